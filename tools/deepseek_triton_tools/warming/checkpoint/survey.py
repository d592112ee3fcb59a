"""What a warm-up finds before it begins: the files, where they lie, what is in memory already, and what fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from deepseek_triton_build.check.finding import Finding
from deepseek_triton_tools.host.host_memory import HostMemory, read_host_memory
from deepseek_triton_tools.repository.checkpoint_files import (
    CheckpointFiles,
    WeightFile,
    files_of_share,
    find_checkpoints,
)
from deepseek_triton_tools.warming.pagecache.filesystem import FileSystem, Mount, file_system_of, read_mounts
from deepseek_triton_tools.warming.pagecache.residency import ResidentFile
from deepseek_triton_tools.warming.warm_options import Share, WarmOptions

BUDGET_SHARE = 0.9
"""Of the headroom: the engine too reads ahead only while the checkpoint is smaller than that share of the available
memory (TensorRT-LLM's weight_loader.py), and its own processes need the rest."""

Selection = Literal["chosen", "too much", "other share", "damaged"]
"""What becomes of a file: it is warmed; it does not fit the budget; another process warms it; it is damaged."""


@dataclass(frozen=True, kw_only=True)
class SurveyedFile:
    file: WeightFile
    file_system: FileSystem
    resident: int | None
    """Bytes of it in the page cache; None: unknown."""
    asked_by: str | None
    """How the kernel was asked: cachestat or mincore."""
    fate: Selection

    @property
    def is_chosen(self) -> bool:
        return self.fate == "chosen"

    def ask_resident(self) -> int | None:
        """As `resident`, now. None too for a file that can't be opened."""
        return _ask(self.file, self.file_system)[0]


@dataclass(frozen=True, kw_only=True)
class Survey:
    checkpoints: tuple[CheckpointFiles, ...]
    files: tuple[SurveyedFile, ...]
    """Of all shares, in the order they are read."""
    memory: HostMemory
    budget: int
    """Bytes of weights that may lie in this node's page cache."""
    jobs: int
    """Of this share; 0 where there are more shares than jobs and this one has nothing to do."""
    num_working_shares: int
    options: WarmOptions

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(each.file.size for each in self.files)

    @property
    def resident(self) -> int | None:
        """Bytes in the page cache; None when it is unknown of a file."""
        parts = [each.resident for each in self.files]
        return None if None in parts else sum(part for part in parts if part is not None)

    @property
    def lacking(self) -> int:
        """Bytes by which the files exceed the budget; 0 when they fit."""
        return max(0, self.needed - self.budget)

    @property
    def needed(self) -> int:
        """Bytes of memory that the files want: none for what lies in memory anyway (tmpfs), or is all there already
        though it may be locked, and so no part of what the machine calls available."""
        if self.options.budget is None and self.resident == self.size:
            return 0
        return sum(each.file.size for each in self.files if each.file_system.reading.jobs)

    @property
    def exceeds_headroom(self) -> bool:
        """More is asked for than there is room: while the last files are read, the first are dropped."""
        return min(self.budget, self.needed) > self.memory.headroom

    @property
    def chosen(self) -> tuple[SurveyedFile, ...]:
        return tuple(each for each in self.files if each.is_chosen)

    @property
    def left_out(self) -> tuple[SurveyedFile, ...]:
        """Of this share, what does not fit."""
        return tuple(each for each in self.files if each.fate == "too much")

    @property
    def chosen_size(self) -> int:
        return sum(each.file.size for each in self.chosen)

    @property
    def is_damaged(self) -> bool:
        """Of a checkpoint something is missing, cut off, or not what it should be; known once it was examined."""
        return any(finding.severity == "error" for each in self.checkpoints for finding in each.findings)


_DEFAULTS = WarmOptions()


def take_survey(sources: str | Sequence[str], options: WarmOptions = _DEFAULTS) -> Survey:
    """What there is to warm, of one checkpoint or several. Reads no weights.

    :raises CheckpointError: when a source is no checkpoint.
    :raises OSError: when this machine does not say what memory it has.
    """
    sources = [sources] if isinstance(sources, str) else sources
    checkpoints = tuple(checkpoint for source in sources for checkpoint in find_checkpoints(source))
    files = _distinct(checkpoints)
    systems = _file_systems(files)
    memory = read_host_memory()
    budget = options.budget if options.budget is not None else int(memory.headroom * BUDGET_SHARE)
    jobs = options.jobs or min((system.reading.jobs for system in systems.values() if system.reading.jobs), default=1)
    num_working = min(options.share.count, jobs)
    survey = Survey(
        checkpoints=checkpoints,
        files=tuple(_surveyed(file, systems[file.path]) for file in files),
        memory=memory,
        budget=budget,
        jobs=_jobs_of_share(jobs, options.share),
        num_working_shares=num_working,
        options=options,
    )
    return _with_fates(survey)


def with_findings(survey: Survey, findings: Mapping[Path, Sequence[Finding]]) -> Survey:
    """`survey` with what is wrong with its checkpoints, by folder; what is damaged is not chosen."""
    checkpoints = tuple(replace(each, findings=tuple(findings.get(each.folder, ()))) for each in survey.checkpoints)
    errors = (finding for found in findings.values() for finding in found if finding.severity == "error")
    damaged = {Path(finding.file) for finding in errors}
    files = tuple(replace(each, fate="damaged") if each.file.path in damaged else each for each in survey.files)
    return replace(survey, checkpoints=checkpoints, files=files)


def _distinct(checkpoints: Sequence[CheckpointFiles]) -> list[WeightFile]:
    """The files of all, each once: two repositories may serve one checkpoint."""
    by_path = {file.path.resolve(): file for checkpoint in checkpoints for file in checkpoint.files}
    return list(by_path.values())


def _file_systems(files: Sequence[WeightFile]) -> dict[Path, FileSystem]:
    """By WeightFile.path. The files of one folder are on one file system, where nothing is mounted on a file."""
    mounts: Sequence[Mount] = read_mounts()
    by_folder: dict[Path, FileSystem] = {}
    systems = {}
    for file in files:
        place = file.path.resolve()
        if place.parent not in by_folder:
            by_folder[place.parent] = file_system_of(place, mounts)
        systems[file.path] = by_folder[place.parent]
    return systems


def _with_fates(survey: Survey) -> Survey:
    """Which files this share warms: its part of them, as far as they fit.

    Where not all fit, each share has its part of the budget: the parts are made before anything is measured, for other
    processes measure at another time.
    """
    share, count = survey.options.share, survey.num_working_shares
    if share.index > count:
        return survey
    mine = {file.path for file in files_of_share([each.file for each in survey.files], Share(share.index, count))}
    left = survey.budget // count if survey.lacking else survey.size
    files = []
    for each in survey.files:
        if each.file.path in mine:
            cost = each.file.size if each.file_system.reading.jobs else 0
            fate: Selection = "chosen" if cost <= left else "too much"
            left -= cost if fate == "chosen" else 0
            each = replace(each, fate=fate)
        files.append(each)
    return replace(survey, files=tuple(files))


def _jobs_of_share(jobs: int, share: Share) -> int:
    return jobs // share.count + (share.index <= jobs % share.count)


def _surveyed(file: WeightFile, system: FileSystem) -> SurveyedFile:
    """Another share's, until it is known whose it is."""
    resident, method = _ask(file, system)
    return SurveyedFile(file=file, file_system=system, resident=resident, asked_by=method, fate="other share")


def _ask(file: WeightFile, system: FileSystem) -> tuple[int | None, str | None]:
    """Bytes of the file in the page cache, and how that is known. That it can't be opened is for later to report."""
    if not system.reading.jobs:
        return file.size, "memory"
    if not system.reading.is_cached:
        return None, None
    try:
        with ResidentFile(file.path) as pages:
            return pages.resident(), pages.method
    except OSError:
        return None, None
