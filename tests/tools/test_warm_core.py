"""Surveying and warming real files on a real disk, and what can go wrong meanwhile."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from deepseek_triton_tools.host.host_memory import read_host_memory
from deepseek_triton_tools.tool_errors import ToolError
from deepseek_triton_tools.warming import Share, WarmOptions, examine, take_survey, warm
from deepseek_triton_tools.warming.hold import evict_all
from deepseek_triton_tools.warming.page_cache import evict
from deepseek_triton_tools.warming.transfer import BUFFER, STEP, Pace, Transfer
from support.mounting import mounted
from support.page_cache import resident_bytes
from support.rights import without_rights
from support.waiting import wait_for

SIZE = BUFFER + 4097
"""Bytes of a file: more than a buffer, and a part of a page."""
HEADERS = 2**17
"""Bytes of a file that the kernel may have read for its header."""
NAMES = tuple(f"model-0000{number}-of-00004.safetensors" for number in range(1, 5))


def write_shard(path, size=SIZE):
    """A sound shard of one tensor."""
    header = b'{"t": {"dtype": "U8", "shape": [%d], "data_offsets": [0, %d]}}' % (size - 256, size - 256)
    path.write_bytes((248).to_bytes(8, "little") + header.ljust(248) + random.Random(size).randbytes(size - 256))


@pytest.fixture
def checkpoint(tmp_path):
    """A folder of four cold shards."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_shard(folder / NAMES[0])
    for name in NAMES[1:]:
        shutil.copy(folder / NAMES[0], folder / name)
    chill(folder)
    return folder


def chill(folder):
    for path in folder.glob("*.safetensors"):
        if evict(path):
            pytest.skip("nothing can be evicted here: the files lie in memory")


def resident(folder):
    return sum(resident_bytes(path) or 0 for path in folder.glob("*.safetensors"))


def survey_of(folder, **options):
    return take_survey([str(folder)], WarmOptions(**options))


def warmed(folder, **options):
    return warm(survey_of(folder, **options))


def messages(result):
    return [problem.message for problem in result.progress.problems]


def names(files):
    return [each.file.path.name for each in files]


def test_cold_files_are_resident_afterwards(checkpoint):
    assert resident(checkpoint) == 0
    seen = []
    result = warm(survey_of(checkpoint), observe=seen.append)
    assert result.exit_code == 0
    assert result.resident == resident(checkpoint) == 4 * SIZE
    assert result.progress.done == result.progress.total == 4 * SIZE
    assert result.progress.found < 4 * HEADERS
    assert result.progress.num_files_done == result.progress.num_files == 4
    assert [progress.done for progress in seen] == sorted(progress.done for progress in seen)
    assert (seen[-1].done, seen[-1].eta_s in (0, None)) == (seen[-1].total, True)


def test_what_is_resident_is_found_and_not_read_again(checkpoint, monkeypatch):
    warmed(checkpoint)
    evict(checkpoint / NAMES[1])
    with (checkpoint / NAMES[1]).open("rb") as file:  # a part of it is there
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.seek(BUFFER // 2)
        file.read(BUFFER // 2)
    there = resident(checkpoint)
    assert 3 * SIZE < there < 4 * SIZE
    result = warmed(checkpoint)
    assert result.progress.found == pytest.approx(there, abs=4 * HEADERS)
    assert result.resident == 4 * SIZE
    memory = replace(read_host_memory(), available=SIZE)  # as where the pages are locked: they need no room
    monkeypatch.setattr("deepseek_triton_tools.warming.survey.read_host_memory", lambda: memory)
    survey = survey_of(checkpoint)
    assert (survey.lacking, len(survey.chosen)) == (0, 4)
    link = checkpoint.parent / "link"
    link.symlink_to(checkpoint)
    assert names(take_survey([str(checkpoint), str(link)]).files) == list(NAMES)  # once


@pytest.mark.parametrize(("method", "read_ahead"), [("splice", 0), ("read", 0), ("read", 2 * BUFFER)])
def test_every_way_of_reading_brings_all_in(checkpoint, method, read_ahead):
    survey = survey_of(checkpoint)
    files = []
    for each in survey.files:
        system = each.file_system
        reading = replace(system.reading, method=method, read_ahead=read_ahead)
        files.append(replace(each, file_system=replace(system, reading=reading, read_ahead_kb=128)))
    result = warm(replace(survey, files=tuple(files)))
    assert (result.exit_code, result.resident) == (0, 4 * SIZE)


def test_a_file_longer_than_a_segment_is_shared_by_threads_and_whole(checkpoint, monkeypatch):
    monkeypatch.setattr("deepseek_triton_tools.warming.transfer.SEGMENT", BUFFER // 3)
    result = warmed(checkpoint, jobs=3)
    assert (result.exit_code, result.progress.done, result.progress.num_files_done) == (0, 4 * SIZE, 4)
    assert result.resident == 4 * SIZE


def test_what_does_not_fit_is_left_out_and_counted(checkpoint):
    survey = survey_of(checkpoint, budget=2 * SIZE + 1)
    assert survey.lacking == 2 * SIZE - 1
    assert names(survey.chosen) == list(NAMES[:2])
    result = warm(survey)
    assert (result.exit_code, result.resident) == (3, 2 * SIZE)
    assert [resident_bytes(checkpoint / name) == SIZE for name in NAMES] == [True, True, False, False]


def test_shares_are_all_files_once_and_no_more_threads_than_the_node_has(checkpoint):
    for jobs, count in ((4, 1), (4, 3), (2, 4), (1, 4)):
        surveys = [survey_of(checkpoint, jobs=jobs, share=Share(index, count)) for index in range(1, count + 1)]
        assert sorted(name for survey in surveys for name in names(survey.chosen)) == list(NAMES)
        assert sum(survey.jobs for survey in surveys) == jobs
        assert all(survey.chosen == () for survey in surveys if not survey.jobs)
    assert [warm(survey).exit_code for survey in surveys] == [0] * count
    assert resident(checkpoint) == 4 * SIZE
    # They divide the budget, and leave nothing out where all of it fits.
    surveys = [survey_of(checkpoint, jobs=2, budget=2 * SIZE, share=Share(index, 2)) for index in (1, 2)]
    assert [len(survey.chosen) for survey in surveys] == [1, 1]
    surveys = [survey_of(checkpoint, jobs=3, budget=4 * SIZE, share=Share(index, 3)) for index in (1, 2, 3)]
    assert sorted(name for survey in surveys for name in names(survey.chosen)) == list(NAMES)
    assert not any(survey.left_out for survey in surveys)


def test_a_damaged_shard_fails_with_its_byte_and_the_others_are_warmed(checkpoint):
    os.truncate(checkpoint / NAMES[2], SIZE - 1)
    survey = examine(survey_of(checkpoint))
    assert (survey.is_damaged, names(survey.chosen)) == (True, [NAMES[0], NAMES[1], NAMES[3]])
    result = warmed(checkpoint)
    [message] = messages(result)
    assert f"ends at byte {SIZE - 1:,}" in message
    assert (result.exit_code, result.resident, result.survey.chosen_size) == (1, 3 * SIZE, 3 * SIZE)
    assert [resident_bytes(checkpoint / name) for name in NAMES if name != NAMES[2]] == [SIZE] * 3
    assert {each.file.path.name: each.selection for each in result.survey.files}[NAMES[2]] == "damaged"
    weight_map = {"t": "../outside.safetensors", "u": "missing.safetensors"}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    told = "\n".join(messages(warmed(checkpoint)))
    assert [name for name in ("outside", "missing") if name not in told] == []


def test_files_that_change_after_the_survey_are_reported_and_the_rest_goes_on(checkpoint):
    survey = survey_of(checkpoint)
    cut, gone, longer, _ = (checkpoint / name for name in NAMES)
    os.truncate(cut, BUFFER + 1)
    gone.unlink()
    write_shard(checkpoint / "new", SIZE + 1)
    (checkpoint / "new").rename(longer)
    result = warm(survey)
    told = {problem.path: problem.message for problem in result.progress.problems}
    assert told.keys() - {checkpoint} == {cut, gone, longer}  # the folder lacks a file
    assert f"ends at byte {BUFFER + 1:,}" in told[cut]
    assert told[longer] == f"it is longer by now, and had {SIZE:,} bytes when the warm-up began"
    assert (len(told), result.exit_code, result.progress.num_files_done) == (len(messages(result)), 1, 1)
    os.mkfifo(gone)  # a pipe in its place does not block
    assert {problem.path for problem in warm(survey).progress.problems} == {cut, gone, longer}
    transfer = Transfer(survey.chosen[:1], jobs=1, rate_limit=None, checksums={})  # as if its header was seen before
    transfer.start()
    transfer.ended.wait()
    [file] = transfer.files
    assert file.problem.message == f"ends at byte {BUFFER + 1:,}, and had {SIZE:,} bytes when the warm-up began"


@pytest.mark.slow
def test_a_file_that_is_written_to_meanwhile_is_reported(tmp_path):
    size = 2 * STEP
    write_shard(tmp_path / "model.safetensors", size)
    chill(tmp_path)
    transfer = Transfer(survey_of(tmp_path).chosen, jobs=1, rate_limit=STEP, checksums={})
    [file] = transfer.files
    transfer.start()
    wait_for(lambda: file.status is not None)  # it is open, and its second half comes in a second
    with file.path.open("ab") as growing:
        growing.write(b"more")
    transfer.ended.wait()
    assert file.problem.message == f"changed while it was read: {size:,} bytes, then {size + 4:,}"


def test_a_wrong_checksum_names_both(checkpoint):
    right = hashlib.sha256((checkpoint / NAMES[0]).read_bytes()).hexdigest()
    sums = checkpoint / "SHA256SUMS"
    sums.write_text(f"{right}  {NAMES[0]}\n{'0' * 64}  {NAMES[1]}\n")
    chill(checkpoint)
    result = warmed(checkpoint, verify=True)
    assert [problem.path.name for problem in result.progress.problems] == [NAMES[1]]
    assert all(digest in messages(result)[0] for digest in (right, "0" * 64))
    assert (result.exit_code, resident(checkpoint)) == (1, 4 * SIZE)
    sums.write_text(f"{right}  {NAMES[0]}\n")
    result = warmed(checkpoint, verify=True)
    assert (result.num_verified, result.num_unverified, result.exit_code) == (1, 3, 0)


@pytest.mark.slow
def test_a_stop_or_an_error_of_the_observer_ends_the_threads(checkpoint):
    stop = threading.Event()
    result = warm(survey_of(checkpoint, rate_limit=SIZE // 32), observe=lambda progress: stop.set(), stop=stop)
    assert (result.was_stopped, result.exit_code) == (True, 3)
    assert result.progress.done < 4 * SIZE
    with pytest.raises(ZeroDivisionError):
        warm(survey_of(checkpoint, rate_limit=SIZE // 32), observe=lambda progress: 1 / 0)
    for thread in threading.enumerate():
        if thread.name.startswith("warm-"):
            thread.join()


@pytest.mark.slow
def test_waiting_for_the_pace_is_no_stall(checkpoint):
    seen = []
    warm(survey_of(checkpoint, rate_limit=2 * SIZE, stall_s=0.6), observe=seen.append)
    assert all(not progress.stalls for progress in seen)


class Waits(threading.Event):
    """Records the times that it should wait for, and does not wait."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def wait(self, timeout=None):
        self.seconds.append(timeout or 0.0)
        return False


def test_a_pace_makes_readers_wait():
    waits, pace = Waits(), Pace(1e-3)
    for _ in range(4):
        pace.wait(1000, waits)  # a thousand bytes at a thousandth of one a second
    assert [round(seconds / 1e6, 3) for seconds in waits.seconds] == [0, 1, 2, 3]
    waits = Waits()
    Pace(None).wait(10**12, waits)
    assert not waits.seconds


@pytest.fixture
def frozen_disk(checkpoint):
    """A cgroup whose processes get one byte a second from the checkpoint's disk, as storage that does not answer."""
    cgroup = Path(f"/sys/fs/cgroup/blkio/deepseek-triton-test-{os.getpid()}")
    number = os.stat(checkpoint).st_dev
    limit = cgroup / "blkio.throttle.read_bps_device"
    try:
        cgroup.mkdir()
        limit.write_text(f"{os.major(number)}:{os.minor(number)} 1")
    except OSError as error:
        with contextlib.suppress(OSError):  # it was not made
            cgroup.rmdir()
        pytest.skip(f"no blkio cgroup of version 1 can be made here: {error.strerror}")
    yield cgroup
    limit.write_text(f"{os.major(number)}:{os.minor(number)} 0")
    cgroup.rmdir()


_STALLED = """
import ctypes, sys
from pathlib import Path
from deepseek_triton_tools.warming import WarmOptions, take_survey, warm
survey = take_survey([sys.argv[1]], WarmOptions(jobs=2, stall_s=0.5, give_up_s=2.5))
ctypes.CDLL(None).mlockall(1)  # Python itself lies on that disk
Path(sys.argv[2], "cgroup.procs").write_text("0")
stalls = {}
result = warm(survey, observe=lambda progress: stalls.update({s.path.name: s for s in progress.stalls}))
for name, stall in sorted(stalls.items()):
    print(name, stall.offset, stall.mount, stall.waits_in)
print(result.gave_up, result.exit_code)
"""


@pytest.mark.slow
def test_storage_that_does_not_answer_is_named_and_given_up(checkpoint, frozen_disk):
    argv = [sys.executable, "-c", _STALLED, checkpoint, frozen_disk]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    *stalls, last = done.stdout.splitlines()
    assert last == "True 4", done.stderr
    assert [line.split()[:2] for line in stalls] == [[NAMES[0], "0"], [NAMES[1], "0"]]


def test_a_file_that_may_not_be_read_is_reported_and_the_rest_goes_on(checkpoint):
    survey = survey_of(checkpoint)
    (checkpoint / NAMES[1]).chmod(0)
    with without_rights():
        result = warm(survey)
    [problem] = result.progress.problems
    assert (problem.path.name, bool(problem.fix)) == (NAMES[1], True)
    assert "Permission denied" in problem.message
    assert (result.exit_code, result.progress.num_files_done) == (1, 3)


@pytest.mark.slow
def test_pages_that_are_dropped_meanwhile_are_brought_in_again(checkpoint):
    def drop(progress):
        if progress.num_files_done and progress.done < progress.total:
            evict(checkpoint / NAMES[0])

    result = warm(survey_of(checkpoint, jobs=1, rate_limit=4 * SIZE), observe=drop)
    assert SIZE <= result.progress.again <= 2 * SIZE  # the last drop may meet what is being brought in again
    assert (result.exit_code, result.resident) == (0, 4 * SIZE)


def test_options_that_make_no_sense_are_refused_by_name():
    wrong = {"jobs": 0, "budget": -1, "rate_limit": 0, "stall_s": -1, "share": "2/3"}
    for name, value in [*wrong.items(), ("jobs", 65)]:
        with pytest.raises(ValueError, match=name):
            WarmOptions(**{name: value})


@pytest.mark.slow
def test_a_budget_above_the_headroom_is_not_read_again_and_again(checkpoint):
    survey = survey_of(checkpoint, jobs=1, rate_limit=2 * SIZE)
    memory = replace(survey.memory, available=SIZE)

    def drop(progress):
        if progress.num_files_done:
            evict(checkpoint / NAMES[0])

    result = warm(replace(survey, memory=memory), observe=drop)
    assert (result.progress.again, result.exit_code) == (0, 3)


def test_a_bug_in_a_thread_is_raised_and_nothing_hangs(checkpoint, monkeypatch):
    def fail(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(Transfer, "_read_segment", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        warmed(checkpoint)


def test_files_in_memory_need_no_room_and_stay(checkpoint):
    with mounted("-t", "tmpfs", "none", on=checkpoint.parent / "memory") as place:
        for name in NAMES:
            shutil.copy(checkpoint / name, place)
        survey = survey_of(place, budget=SIZE)
        assert (survey.lacking, len(survey.chosen)) == (0, 4)
        assert warm(survey).exit_code == 0
        assert {evicted.reason for evicted in evict_all(survey)} == {"it lies in memory itself, on tmpfs"}


def test_threads_that_could_start_do_all_the_work(checkpoint, monkeypatch):
    start = threading.Thread.start

    def limited(thread):
        if thread.name.startswith("warm-") and thread.name[5:].isdigit() and not next(allowed, False):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    allowed = iter([True, True])
    result = warmed(checkpoint, jobs=8)
    assert (result.exit_code, result.resident) == (0, 4 * SIZE)
    with pytest.raises(ToolError, match="can't start new thread: allow this user more threads"):
        warmed(checkpoint, jobs=8)
