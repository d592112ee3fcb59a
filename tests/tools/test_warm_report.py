"""The texts and documents of `warm`: what fits, what would make it fit, the progress and the result."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton_tools.cli import parsing
from deepseek_triton_tools.host.host_memory import BUDGET_SHARE, CgroupMemory, HostMemory
from deepseek_triton_tools.host.units import about, part_of, sized
from deepseek_triton_tools.terminal.tables import plain_lines
from deepseek_triton_tools.warming import WarmOptions, report, take_survey, warm
from deepseek_triton_tools.warming.page_cache import evict
from deepseek_triton_tools.warming.report import (
    SCHEMA,
    ProgressView,
    progress_line,
    result_document,
    stall_line,
    survey_document,
)
from deepseek_triton_tools.warming.transfer import Problem
from deepseek_triton_tools.warming.warm_up import Stall, WarmProgress
from support.cached_checkpoint import write_checkpoint
from support.page_cache import on_uncached

GIB = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("R1") / "R1"
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def survey(folder):
    """The survey of a machine with 1 TiB, in no cgroup."""
    found = take_survey([str(folder)])
    return in_memory(found, HostMemory(total=2**40, available=1000 * GIB, cgroups=()))


def in_memory(survey, memory):
    return replace(survey, memory=memory, budget=int(memory.headroom * BUDGET_SHARE))


def enlarged(survey, num_bytes):
    """The survey as if the first file had that many bytes more."""
    first = survey.files[0]
    file = replace(first.file, size=first.file.size + num_bytes)
    checkpoint = replace(survey.checkpoints[0], files=(file, *survey.checkpoints[0].files[1:]))
    return replace(survey, files=(replace(first, file=file), *survey.files[1:]), checkpoints=(checkpoint,))


def cgroup(limit, usage=0, file_cache=0):
    return CgroupMemory(path="/kubepods/pod1", version=2, limit=limit, usage=usage, file_cache=file_cache)


def text(survey, **options):
    """All that is said before a byte is read."""
    lines = [*report.preamble(survey)]
    if files := report.files_to_show(survey, **{"verbose": False} | options):
        lines += plain_lines(report.files_table(files).rows)
    return "\n".join(lines)


def missing(parts, shown):
    return [part for part in parts if part not in shown]


def test_the_report_says_what_is_where_and_how_it_would_be_read(survey, folder):
    shown, system = text(survey), survey.files[0].file_system
    parts = [f"4 shards, {sized(survey.size)} in {folder}", system.mount.type, system.mount.mount_point]
    parts += [system.reading.reason, "by MemAvailable", "the engine reads it ahead itself"]
    assert missing(parts, shown) == []
    unusual = ["that fits", "stay in the page cache", survey.files[1].file.path.name]
    assert missing(unusual, shown) == unusual
    assert missing(unusual[2:], text(survey, verbose=True)) == []
    damaged = (survey.files[0], replace(survey.files[1], selection="damaged"), *survey.files[2:])
    shown = text(replace(survey, files=damaged))  # a row where something is wrong
    assert missing([survey.files[0].file.path.name, unusual[2], "damaged"], shown) == [survey.files[0].file.path.name]
    unknown = replace(survey, files=tuple(replace(each, resident=None, residency_method=None) for each in survey.files))
    assert missing(["resident: unknown"], text(unknown)) == []
    document = survey_document(unknown, action="report", exit_code=0)
    assert (document["resident_bytes"], document["residency_by"]) == (None, [])
    for more, answer in ((-1, True), (0, False)):  # the engine reads ahead below nine tenths of what is available
        large = enlarged(survey, 900 * GIB + more - survey.size)
        [found] = survey_document(large, action="report", exit_code=0)["checkpoints"]
        assert (found["engine_prefetches"], "itself" in text(large)) == (answer, answer)


def test_the_cgroup_that_decides_is_named_with_the_limit_that_would_do(survey):
    large = enlarged(survey, 640 * GIB)
    tight = in_memory(large, HostMemory(total=2**40, available=1000 * GIB, cgroups=(cgroup(100 * GIB, 30 * GIB),)))
    parts = ["it does not fit", "by the memory limit of the cgroup /kubepods/pod1"]
    parts += ["a memory limit of 742GiB for the cgroup /kubepods/pod1 (100GiB)"]
    assert missing(parts, text(tight)) == []


@settings(max_examples=50)
@given(
    size=st.integers(1, 700 * GIB),
    available=st.integers(0, 800 * GIB),
    limit=st.none() | st.integers(1, 800 * GIB),
    usage=st.integers(0, 100 * GIB),
)
def test_the_checkpoint_fits_after_the_remedy(survey, size, available, limit, usage):
    cgroups = () if limit is None else (cgroup(limit, usage),)
    tight = in_memory(enlarged(survey, size), HostMemory(total=2**40, available=available, cgroups=cgroups))
    if not tight.lacking:
        return
    ways = report.remedies(tight)
    assert ways.startswith("what would do: ")
    *_, memory = [tight.memory, *given_by(ways, tight.memory)]
    budget = asked(ways, "--budget ")
    assert (budget or int(memory.headroom * BUDGET_SHARE)) >= tight.size
    assert tight.size <= memory.headroom


def asked(ways, before, after=None):
    """The size between two words."""
    if before not in ways:
        return None
    return parsing.size(ways.partition(before)[2].split(" ")[0])


def given_by(ways, memory):
    limit = asked(ways, "a memory limit of ")
    if limit:
        memory = replace(memory, cgroups=tuple(replace(each, limit=limit) for each in memory.cgroups))
        yield memory
    if "more available memory" in ways:
        more = parsing.size(ways.removesuffix(" more available memory").split(" ")[-1])
        yield replace(memory, available=memory.available + more)


def too_large_a_budget(survey):
    """The survey of a budget above the headroom, so that everything would be read."""
    memory = HostMemory(total=2**40, available=survey.size // 2, cgroups=())
    return replace(survey, memory=memory, budget=2**40, options=WarmOptions(budget=2**40))


def test_a_budget_above_what_fits_is_warned_of(survey, folder):
    tight = too_large_a_budget(survey)
    warning = f"--budget 1.0 TiB is more than the {sized(survey.size // 2)} that fits"
    assert missing(["it does not fit", warning], text(tight)) == []
    document = survey_document(tight, action="report", exit_code=0)
    assert (document["fits"], document["lacking_bytes"]) == (False, survey.size - survey.size // 2)
    assert missing(["more available memory", "--budget"], document["remedies"]) == ["--budget"]
    small = replace(survey, budget=10, options=WarmOptions(budget=10))
    assert asked(report.remedies(small), "--budget ") >= survey.size
    assert "cgroup" not in report.remedies(small)
    result = replace(warm(take_survey([str(folder)])), resident=0)
    [usual] = report.warnings(result)
    [line] = report.warnings(replace(result, survey=too_large_a_budget(result.survey)))
    assert ("--hold" in usual, "--hold" in line, "--budget 1.0 TiB is more" in line) == (True, False, True)


def test_a_file_system_that_keeps_nothing_in_the_page_cache_is_never_called_warm(folder, survey):
    place = survey.files[0].file_system.mount
    device = on_uncached(survey)
    assert f"what is read from {place} does not stay in the page cache" in text(device)
    result = warm(on_uncached(take_survey([str(folder)])))
    assert report.summary(result).startswith(f"read, but not warm: the page cache keeps nothing of {place}: ")
    assert not report.uncached(on_uncached(survey, jobs=0))  # in memory it is warm already


def test_the_document_of_a_survey(survey, folder):
    document = json.loads(json.dumps(survey_document(survey, action="report", exit_code=0), allow_nan=False))
    expected = {"schema": SCHEMA, "action": "report", "ok": True, "fits": True, "remedies": None, "files": []}
    expected |= {"size_bytes": survey.size, "chosen_bytes": survey.size}
    assert {name: document[name] for name in expected} == expected
    [checkpoint], [system] = document["checkpoints"], document["file_systems"]
    assert (checkpoint["folder"], checkpoint["num_files"]) == (str(folder), 4)
    assert system["mount_point"] == survey.files[0].file_system.mount.mount_point
    assert system["reading"]["method"] in ("splice", "read")
    assert document["memory"]["decided_by"] == "MemAvailable"
    assert len(survey_document(survey, action="report", exit_code=0, verbose=True)["files"]) == 4


def test_the_summary_and_the_document_of_a_result(folder):
    result = warm(take_survey([str(folder)]))
    survey = result.survey
    assert report.summary(result).startswith(f"warm: {part_of(survey.size, survey.size)} done in ")
    assert not list(report.warnings(result))
    assert not report.files_now(result, verbose=False)
    assert [each.resident for each in report.files_now(result, verbose=True)] == [f.file.size for f in survey.files]
    document = json.loads(json.dumps(result_document(result, exit_code=0), allow_nan=False))
    assert document["result"]["resident_bytes"] == document["result"]["done_bytes"] == document["size_bytes"]
    read = document["result"]["read_bytes"] - document["result"]["read_again_bytes"]
    assert read + document["result"]["found_bytes"] == document["size_bytes"]
    assert document["ok"]
    assert not result_document(replace(result, was_stopped=True), exit_code=0)["ok"]


def test_the_summary_says_how_it_ended(folder):
    cases = [
        ("stopped: ", WarmOptions(), {"was_stopped": True}),
        ("given up: ", WarmOptions(), {"gave_up": True}),
        ("partly warm: not all of it stayed: ", WarmOptions(), {"resident": 0}),
        ("partly warm: not all of it fits: ", WarmOptions(budget=10**6), {}),
    ]
    for verdict, options, changes in cases:
        result = replace(warm(take_survey([str(folder)], options)), **changes)
        assert report.summary(result).startswith(verdict)
        assert bool(list(report.warnings(result))) == ("stayed" in verdict)
    warmed = warm(take_survey([str(folder)], WarmOptions(verify=True)))
    for verified, said in {4: "; 4 of 4 files have a checksum", 3: "; the others are not verified"}.items():
        result = replace(warmed, num_verified=verified, num_unverified=4 - verified)
        assert report.summary(result).endswith(said)
        counted = result_document(result, exit_code=0)["result"]
        assert (counted["num_verified"], counted["num_unverified"]) == (verified, 4 - verified)


def test_files_that_did_not_stay_are_rows(folder):
    result = replace(warm(take_survey([str(folder)])), resident=0)
    path = result.survey.files[2].file.path
    evict(path)
    assert [each.file.path for each in report.files_now(result, verbose=False)] == [path]
    assert not report.files_now(replace(result, was_stopped=True), verbose=False)


def progress(**changes):
    values = {"total": 642 * GIB, "done": 171 * GIB, "found": 0, "again": 0, "num_files": 163}
    values |= {"num_files_done": 41, "elapsed_s": 80.0, "rate": 2.1 * GIB, "eta_s": 224.0, "stalls": (), "problems": ()}
    return WarmProgress(**values | changes)


def stall(**changes):
    values = {"path": Path("/m/model-00041.safetensors"), "offset": 1234567, "waited_s": 42.0}
    return Stall(**values | {"waits_in": "nfs_wait", "mount": "nfs4 server:/export on /m"} | changes)


def test_the_lines_of_progress_and_of_a_stall():
    line = "shards 41/163, 171 of 642 GiB, 2.1 GiB/s, 4 min left"
    assert progress_line(progress()) == line
    assert progress_line(progress(again=3 * GIB)) == f"{line}, 3.0 GiB read again"
    assert progress_line(progress(eta_s=None)) == "shards 41/163, 171 of 642 GiB, 2.1 GiB/s"
    where = "/m/model-00041.safetensors: not a byte for 42 s, at byte 1,234,567; on nfs4 server:/export on /m"
    assert stall_line(stall()) == f"{where}; the kernel waits in nfs_wait"
    assert stall_line(stall(waits_in="")) == where


def test_a_stall_is_shown_again_when_it_has_doubled_and_a_problem_once(capsys):
    view = ProgressView()
    for waited_s in (31.0, 40.0, 61.0, 63.0):
        view(progress(stalls=(stall(waited_s=waited_s),)))
    view(progress())
    view(progress())
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(", at")[0].rpartition(" for ")[2] for line in lines[:2]] == ["31 s", "63 s"]
    assert lines[2:] == ["/m/model-00041.safetensors: goes on"]
    first, second = (Problem(path=Path(name), message="ends at byte 7", fix="download it again") for name in "ab")
    view(progress(problems=(second,)))
    view(progress(problems=(first, second)))
    assert capsys.readouterr().err.splitlines() == [str(second), str(first)]


def test_sizes_and_times():
    sizes = {0: "0 bytes", 999: "999 bytes", 1000: "1.0 KiB", 2**20: "1.0 MiB", 2.5 * GIB: "2.5 GiB"}
    sizes[641.3 * GIB] = "641 GiB"
    assert {num_bytes: sized(num_bytes) for num_bytes in sizes} == sizes
    times = {0.04: "0.0 s", 42: "42 s", 224: "4 min", 3900: "1 h 5 min"}
    assert {seconds: about(seconds) for seconds in times} == times
