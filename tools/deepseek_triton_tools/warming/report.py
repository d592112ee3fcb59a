"""Reports tell of a survey, and of the progress and result of a warm-up and an eviction: lines for people, and the JSON
document "deepseek-triton/warm/1"."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from deepseek_triton_build.arithmetic import PREFETCH_SHARE
from deepseek_triton_build.check import Finding
from deepseek_triton_tools.host.host_memory import BUDGET_SHARE
from deepseek_triton_tools.host.units import about, part_of, sized
from deepseek_triton_tools.repository.checkpoint_files import CheckpointFiles
from deepseek_triton_tools.terminal.status_line import StatusLine
from deepseek_triton_tools.terminal.tables import Table
from deepseek_triton_tools.warming.filesystem import FileSystem
from deepseek_triton_tools.warming.hold import Evicted
from deepseek_triton_tools.warming.page_cache import known_sum
from deepseek_triton_tools.warming.survey import Survey, SurveyedFile
from deepseek_triton_tools.warming.transfer import Problem
from deepseek_triton_tools.warming.warm_up import Stall, WarmProgress, WarmResult

SCHEMA = "deepseek-triton/warm/1"
_OF_CGROUPS = ("limit", "usage", "file_cache", "headroom")
GIB = 2**30
# Seconds between two lines in a log: short enough to see that a load of minutes moves.
PLAIN_S = 15.0
_SELECTIONS = {
    "chosen": "",
    "too much": "does not fit",
    "other share": "another share's",
    "damaged": "damaged: left out",
}


def files_to_show(survey: Survey, *, verbose: bool) -> list[SurveyedFile]:
    """All files with `verbose`, else the files that are damaged or do not fit."""
    return [each for each in survey.files if verbose or each.selection in ("damaged", "too much")]


def files_table(files: Sequence[SurveyedFile]) -> Table:
    rows = [
        [
            str(each.file.path),
            sized(each.file.size),
            _resident(each.resident, each.file.size),
            _SELECTIONS[each.selection],
        ]
        for each in files
    ]
    return Table(title="Files", headings=("file", "size", "resident", ""), rows=rows)


def preamble(survey: Survey) -> Iterator[str]:
    """Lines before the first byte is read: what is warmed, how it is read, and what room there is."""
    for checkpoint in survey.checkpoints:
        name = f"{checkpoint.source}: {len(checkpoint.files)} shards, {sized(checkpoint.size)}"
        yield f"{name} in {checkpoint.folder} ({checkpoint.found_by})"
        does = "reads it ahead itself" if engine_prefetches(checkpoint, survey) else "does not read it ahead"
        yield f"the engine {does}: it does below {PREFETCH_SHARE:.0%} of MemAvailable, {sized(survey.memory.available)}"
    for system in file_systems(survey):
        yield f"on {system.mount}, {system.reading.kind}: {_read_with(system)}: {system.reading.reason}"
    if places := uncached(survey):
        yield f"what is read from {places} does not stay in the page cache"
    yield (
        f"memory: room for {sized(survey.memory.headroom)} by {decided_by(survey)}; budget {sized(survey.budget)}; "
        f"resident: {_resident(survey.resident, survey.size)}"
    )
    if lacking(survey):
        yield f"it does not fit: {sized(lacking(survey))} too much; {remedies(survey)}"
    if survey.lacking:
        yield f"warming {part_of(survey.chosen_size, survey.size)}, the first files that fit"
    if survey.exceeds_headroom:
        yield (
            f"--budget {sized(survey.budget)} is more than the {sized(survey.memory.headroom)} that fits: the first "
            "files will be dropped while the last are read"
        )
    if not survey.jobs:
        yield _nothing_to_do(survey)
    elif survey.options.share.count > 1:
        files = f"{len(survey.chosen)} shards, {sized(survey.chosen_size)}"
        yield f"share {survey.options.share}: {files}; the rest is for other processes"


def lacking(survey: Survey) -> int:
    """Bytes by which the files exceed the room that there is, even where --budget allows more; 0 when they fit."""
    return max(survey.lacking, survey.needed - survey.memory.headroom if survey.exceeds_headroom else 0)


def uncached(survey: Survey) -> str:
    """The mounts of chosen files that keep nothing in the page cache; "" where there are none."""
    systems = {each.file_system.mount: each.file_system for each in survey.chosen}.values()
    return " and ".join(str(each.mount) for each in systems if each.reading.jobs and not each.reading.is_cached)


def _nothing_to_do(survey: Survey) -> str:
    """The line for a share that has no job."""
    working = survey.num_working_shares
    which = "share 1" if working == 1 else f"shares 1 to {working}"
    jobs = f"{working} job{'' if working == 1 else 's'}"
    return f"nothing to do: {survey.options.share.count} shares, {jobs}: {which} read"


def summary(result: WarmResult) -> str:
    """The line at the end of a warm-up."""
    progress, chosen = result.progress, result.survey.chosen_size
    read = progress.done - progress.found + progress.again
    rate = f", {sized(read / progress.elapsed_s)}/s" if progress.elapsed_s and read else ""
    resident = "not known by the kernel" if result.resident is None else part_of(result.resident, chosen)
    line = (
        f"{_verdict(result)}: {part_of(progress.done, progress.total)} done in {about(progress.elapsed_s)}; "
        f"{sized(read)} read{rate}, {sized(progress.found)} found there; resident {resident}"
    )
    if not result.survey.jobs and not progress.problems and not result.was_stopped:
        return _nothing_to_do(result.survey)
    if progress.again:
        line += f"; {sized(progress.again)} were dropped meanwhile and read again"
    if result.survey.options.verify:
        line += f"; {result.num_verified} of {result.num_verified + result.num_unverified} files have a checksum"
        line += "; the others are not verified" if result.num_unverified else ""
    number = len(progress.problems)
    return f"{line}; {number} problem{'' if number == 1 else 's'}" if number else line


def _verdict(result: WarmResult) -> str:
    if result.was_stopped:
        return "stopped"
    if result.gave_up:
        return "given up: the storage stalled"
    if result.is_damaged:
        return "not whole"
    part = result.survey.options.share
    share = f"share {part} " if part.count > 1 else ""
    if result.survey.left_out:
        return f"{share}partly warm: not all of it fits"
    if places := uncached(result.survey):
        return f"{share}read, but not warm: the page cache keeps nothing of {places}"
    return f"{share}partly warm: not all of it stayed" if result.is_partial else f"{share}warm"


def warnings(result: WarmResult) -> Iterator[str]:
    """Findings and losses that are no problem of a single file. Those problems were shown while the warm-up ran."""
    for checkpoint in result.survey.checkpoints:
        yield from (finding_line(finding) for finding in checkpoint.findings if finding.severity != "error")
    if not _was_dropped(result):
        return
    survey = result.survey
    why = (
        "memory is wanted by others, or a cgroup is smaller than it says; warm less with --budget, or keep it there "
        "with --hold"
    )
    if survey.exceeds_headroom:
        more = f"--budget {sized(survey.budget)} is more than the {sized(survey.memory.headroom)} that fits"
        why = f"{more}; without it what fits is warmed; {remedies(survey)}"
    yield f"not all of it stayed: {why}"


def _was_dropped(result: WarmResult) -> bool:
    """Everything was read, and the kernel did not keep all of it."""
    return result.exit_code == 3 and not result.was_stopped and not result.survey.left_out


def files_now(result: WarmResult, *, verbose: bool) -> list[SurveyedFile]:
    """Files with what is resident now: all with `verbose`, else the warmed files that are not fully resident."""
    if not verbose and not _was_dropped(result):
        return []
    files = result.survey.files
    if not result.gave_up:  # asking about a storage that stalled would never return
        files = tuple(replace(each, resident=each.ask_resident()) for each in files)
    return [each for each in files if verbose or (each.selection == "chosen" and each.resident != each.file.size)]


def eviction(survey: Survey, evicted: Sequence[Evicted]) -> str:
    """One line of what `warm evict` did."""
    stayed = known_sum(each.left for each in evicted)
    files = f"{len(evicted)} shards, {sized(survey.size)}"
    if stayed is None:
        return f"dropped as far as the kernel allows: {files}; it does not say what is resident"
    before = "" if survey.resident is None else f"; resident before {sized(survey.resident)}, now {sized(stayed)}"
    return f"{'not all dropped' if stayed else 'dropped'}: {files}{before}"


def finding_line(finding: Finding) -> str:
    return f"{finding.file}: {finding.severity} {finding.code} {finding.message}; {finding.fix}"


def remedies(survey: Survey) -> str:
    """Ways to make room for all files, in one line."""
    memory = survey.memory
    if survey.needed <= memory.headroom:
        return f"what would do: --budget {_size_option(survey.needed)}"
    needed = math.ceil(survey.needed / BUDGET_SHARE)
    ways = [f"--budget {_size_option(survey.needed)}"] if survey.options.budget is not None and survey.lacking else []
    for cgroup in memory.cgroups:
        if cgroup.headroom < needed:
            limit = needed + cgroup.usage - cgroup.file_cache
            ways.append(
                f"a memory limit of {_size_option(limit)} for the cgroup {cgroup.path} ({_size_option(cgroup.limit)})"
            )
    if memory.available < needed:
        ways.append(f"{_size_option(needed - memory.available)} more available memory")
    return f"what would do: {' and '.join(ways)}"


def _size_option(num_bytes: int) -> str:
    """The size as an option takes it, rounded up."""
    unit, name = (GIB, "GiB") if num_bytes >= 10 * GIB else (2**20, "MiB")
    return f"{math.ceil(num_bytes / unit)}{name}"


def decided_by(survey: Survey) -> str:
    tightest = survey.memory.tightest
    return "MemAvailable" if tightest is None else f"the memory limit of the cgroup {tightest.path}"


def file_systems(survey: Survey) -> list[FileSystem]:
    """The file systems of the files, each once, in the order of the files."""
    return list({each.file_system.mount: each.file_system for each in survey.files}.values())


def in_flight(survey: Survey) -> int:
    """The most bytes that this share's threads ask for at once."""
    readings = [system.reading for system in file_systems(survey)]
    return survey.jobs * max((reading.window + reading.read_ahead for reading in readings), default=0)


def engine_prefetches(checkpoint: CheckpointFiles, survey: Survey) -> bool:
    """Whether the engine reads the checkpoint ahead by itself. It looks at MemAvailable and not at cgroups."""
    return checkpoint.size < PREFETCH_SHARE * survey.memory.available


def _read_with(system: FileSystem) -> str:
    reading = system.reading
    if not reading.jobs:
        return "nothing to bring in"
    ahead = f" and {sized(reading.read_ahead)} ahead" if reading.read_ahead else ""
    cached = "" if reading.is_cached else ", and not kept in the page cache"
    return f"{reading.jobs} windows of {sized(reading.window)}{ahead} at once by {reading.method}{cached}"


def _resident(resident: int | None, size: int) -> str:
    if resident is None:
        return "unknown"
    return f"{part_of(resident, size)} ({resident / size:.0%})" if size else "nothing"


class ProgressView:
    """Shows the progress that `warm` reports; give it as `observe`."""

    def __init__(self) -> None:
        self._status = StatusLine(PLAIN_S)
        self._shown_problems: set[Problem] = set()
        self._stalled: dict[Path, float] = {}
        """File -> seconds that it had stalled for when that was shown last."""

    def __call__(self, progress: WarmProgress) -> None:
        for problem in progress.problems:
            if problem not in self._shown_problems:
                self._shown_problems.add(problem)
                self._status.say(str(problem))
        stalled = {stall.path: stall for stall in progress.stalls}
        for path in set(self._stalled) - set(stalled):
            self._status.say(f"{path}: goes on")
        self._stalled = {path: shown_s for path, shown_s in self._stalled.items() if path in stalled}
        for path, stall in stalled.items():
            if path not in self._stalled or stall.waited_s > 2 * self._stalled[path]:
                self._stalled[path] = stall.waited_s
                self._status.say(stall_line(stall))
        self._status.show(lambda: progress_line(progress))

    def clear(self) -> None:
        """Remove the line from the terminal, so that others can write there."""
        self._status.clear()


def progress_line(progress: WarmProgress) -> str:
    parts = [
        f"shards {progress.num_files_done}/{progress.num_files}",
        part_of(progress.done, progress.total),
        f"{sized(progress.rate)}/s",
    ]
    if progress.eta_s is not None and progress.done < progress.total:
        parts.append(f"{about(progress.eta_s)} left")
    if progress.again:
        parts.append(f"{sized(progress.again)} read again")
    return ", ".join(parts)


def stall_line(stall: Stall) -> str:
    where = f"; the kernel waits in {stall.waits_in}" if stall.waits_in else ""
    return f"{stall.path}: not a byte for {about(stall.waited_s)}, at byte {stall.offset:,}; on {stall.mount}{where}"


# --- JSON ---


def survey_document(survey: Survey, *, action: str, exit_code: int, verbose: bool = False) -> dict[str, Any]:
    """The document of `warm report`; the other actions add to it."""
    options, memory = survey.options, survey.memory
    return {
        "schema": SCHEMA,
        "action": action,
        "ok": exit_code == 0,
        "exit_code": exit_code,
        "checkpoints": [
            {
                "source": checkpoint.source,
                "folder": str(checkpoint.folder),
                "found_by": checkpoint.found_by,
                "num_files": len(checkpoint.files),
                "size_bytes": checkpoint.size,
                "engine_prefetches": engine_prefetches(checkpoint, survey),
                "findings": [asdict(finding) for finding in checkpoint.findings],
            }
            for checkpoint in survey.checkpoints
        ],
        "file_systems": [
            {**asdict(system.mount), "read_ahead_kb": system.read_ahead_kb, "reading": asdict(system.reading)}
            for system in file_systems(survey)
        ],
        "memory": {
            **{f"{name}_bytes": getattr(memory, name) for name in ("total", "available", "headroom")},
            "decided_by": "MemAvailable" if memory.tightest is None else memory.tightest.path,
            "cgroups": [
                {
                    "path": cgroup.path,
                    "version": cgroup.version,
                    **{f"{name}_bytes": getattr(cgroup, name) for name in _OF_CGROUPS},
                }
                for cgroup in memory.cgroups
            ],
        },
        "size_bytes": survey.size,
        "num_files": len(survey.files),
        "resident_bytes": survey.resident,
        "residency_by": sorted({each.residency_method for each in survey.files if each.residency_method}),
        "budget_bytes": survey.budget,
        "fits": not lacking(survey),
        "lacking_bytes": lacking(survey),
        "remedies": remedies(survey) if lacking(survey) else None,
        "chosen_bytes": survey.chosen_size,
        "chosen_files": len(survey.chosen),
        "share": str(options.share),
        "num_working_shares": survey.num_working_shares,
        "jobs": survey.jobs,
        "rate_limit_bytes_per_s": options.rate_limit,
        "in_flight_bytes": in_flight(survey),
        "files": [
            {
                "path": str(each.file.path),
                "size_bytes": each.file.size,
                "resident_bytes": each.resident,
                "fate": each.selection,
                "mount_point": each.file_system.mount.mount_point,
            }
            for each in files_to_show(survey, verbose=verbose)
        ],
    }


def result_document(result: WarmResult, *, exit_code: int, verbose: bool = False) -> dict[str, Any]:
    """The document of `warm files`."""
    progress = result.progress
    read = progress.done - progress.found + progress.again
    return survey_document(result.survey, action="warm", exit_code=exit_code, verbose=verbose) | {
        # With --hold a signal ends the verb with exit code 0, whatever was warm by then.
        "ok": exit_code == 0 and not result.was_stopped,
        "result": {
            **{f"{name}_bytes": getattr(progress, name) for name in ("total", "done", "found")},
            "read_bytes": read,
            "read_again_bytes": progress.again,
            "resident_bytes": result.resident,
            "num_files": progress.num_files,
            "num_files_done": progress.num_files_done,
            "elapsed_s": round(progress.elapsed_s, 3),
            "read_bytes_per_s": round(read / progress.elapsed_s) if progress.elapsed_s else None,
            **{name: getattr(result, name) for name in ("was_stopped", "gave_up", "num_verified", "num_unverified")},
            "problems": [asdict(problem) | {"path": str(problem.path)} for problem in progress.problems],
            "stalls": [asdict(stall) | {"path": str(stall.path)} for stall in progress.stalls],
        },
    }


def evict_document(
    survey: Survey, evicted: Sequence[Evicted], *, exit_code: int, verbose: bool = False
) -> dict[str, Any]:
    """The document of `warm evict`."""
    return survey_document(survey, action="evict", exit_code=exit_code, verbose=verbose) | {
        "result": {
            "resident_bytes": known_sum(each.left for each in evicted),
            "stayed": [
                {"path": str(each.path), "resident_bytes": each.left, "reason": each.reason}
                for each in evicted
                if each.reason or verbose
            ],
        }
    }
