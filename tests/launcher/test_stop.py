"""`stop` and `list` touch the processes that a launch has started, and no others."""

import json
import os
import secrets
import subprocess

import pytest

from support.supervising import PYTHON, SUPERVISE, rank_of, runs
from support.waiting import wait_for


@pytest.fixture
def bystander():
    """A process of this user that carries no launch tag."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def ask(folder, *arguments):
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    command = [*PYTHON, str(SUPERVISE), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def write_record(folder, **facts):
    launch = secrets.token_hex(4)
    path = folder / f"deepseek-triton-{os.getuid()}/launches/{launch}.json"
    path.parent.mkdir(mode=0o700, parents=True)
    path.parent.parent.chmod(0o700)
    record = {
        "id": launch, "pid": 1, "started": 1, "namespace": os.readlink("/proc/self/ns/pid"), "state": "ready",
        "ports": {}, "repository": None, "restarts": 0, "exit_timeout_s": 0,
    }  # fmt: skip
    path.write_text(json.dumps({**record, **facts}))
    return launch, path


def test_a_stop_without_a_launch_succeeds(tmp_path):
    for arguments in (["--repository", str(tmp_path)], ["0123abcd"]):
        stopped = ask(tmp_path, "stop", *arguments)
        assert (stopped.returncode, "nothing runs" in stopped.stdout) == (0, True)


def test_another_process_with_the_recorded_number_gets_no_signal(tmp_path, bystander):
    launch, path = write_record(tmp_path, pid=bystander.pid, started=1)
    assert ask(tmp_path, "stop", launch, "--now").stdout == f"{launch}: stopped\n"
    assert runs(bystander.pid)
    assert not path.exists()


def test_a_record_of_another_container_is_left_alone(tmp_path, bystander):
    launch, path = write_record(tmp_path, pid=bystander.pid, namespace="pid:[1]")
    assert "nothing runs" in ask(tmp_path, "stop", launch).stdout
    assert path.exists()


def test_a_folder_that_is_not_this_users_alone_is_refused(tmp_path):
    """Others can write it, or it is a link, which another user can make in /tmp first."""

    def refused(*arguments):
        done = ask(tmp_path, *arguments)
        return done.returncode == 1 and "is not a folder that only this user can write" in done.stderr

    _, path = write_record(tmp_path)
    path.parent.chmod(0o777)
    assert refused("list")
    path.parent.chmod(0o700)
    place, elsewhere = path.parent.parent, tmp_path / "elsewhere"
    place.rename(elsewhere)
    place.symlink_to(elsewhere)
    assert refused("stop", "--all")
    assert path.exists()


def test_a_broken_record_is_skipped(tmp_path):
    launch, path = write_record(tmp_path)
    sound = json.loads(path.read_text())
    broken = [
        {"id": 5}, {"pid": "self"}, {"started": None}, {"ports": [1]}, {"repository": 5}, {"restarts": "x"},
        {"exit_timeout_s": "x"}, {"exit_timeout_s": float("inf")}, {"state": 7}, {"unknown": 1},
    ]  # fmt: skip
    for number, facts in enumerate(broken):
        path.with_name(f"{number:08x}.json").write_text(json.dumps({**sound, "id": f"{number:08x}", **facts}))
    for number, text in enumerate(("{", "", "[]", "null", "[" * 100_000)):
        path.with_name(f"{number:08x}.json").write_text(text)
    shown = {one["id"] for one in json.loads(ask(tmp_path, "list", "--json").stdout)}
    assert launch in shown
    assert not [name for name in shown if name in (5, *(f"{number:08x}" for number in range(len(broken))))]


def test_a_launch_without_a_record_runs_all_the_same(supervise, tmp_path):
    place = tmp_path / f"deepseek-triton-{os.getuid()}"
    place.write_text("no folder")
    running = supervise("true")
    assert running.wait() == 0
    assert "goes on without being listed" in running.said


def test_stop_by_repositories_ends_only_their_launches(supervise, tmp_path):
    running = []
    for name in ("one", "two", "three"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model/config.pbtxt").touch()
        running.append(supervise(*rank_of("sleep", "1000"), options=["--repository", str(tmp_path / name)]))
    one, two, three = running
    wait_for(lambda: all(each.ranks() for each in running))
    stopped = one.ask("stop", "--repository", f"{tmp_path}/./one", "--repository", f"{tmp_path}/three")

    assert set(stopped.stdout.splitlines()) == {f"{each.launch}: stopped" for each in (one, three)}
    for each in (one, three):
        assert each.wait() == 0
        assert not each.others()
    assert two.ranks()


def test_an_older_python_is_refused_in_one_line():
    """Python's own message, about a file's syntax, would not name the cause."""
    older = f"import runpy, sys; sys.version_info = (3, 9, 1); runpy.run_path({str(SUPERVISE)!r})"
    refused = subprocess.run([*PYTHON, "-c", older], capture_output=True, text=True)
    assert refused.returncode == 1
    assert refused.stderr == "supervise.py: expected Python 3.10 or newer, got 3.9\n"


def test_processes_left_by_a_killed_supervisor_and_its_guard_are_stopped(supervise):
    """A further node is in the same state: the launch has ranks there and no supervisor."""
    running = supervise("true")
    running.wait()
    left = subprocess.Popen(["sleep", "1000"], env={**os.environ, "DEEPSEEK_TRITON_LAUNCH": running.launch})
    assert f"{running.launch}  no supervisor" in running.ask("list").stdout
    running.ask("stop", running.launch)
    assert left.wait(60) != 0


def test_a_killed_supervisors_record_and_shared_memory_go_too(supervise, tmp_path):
    running = supervise("sleep", "1000")
    record = tmp_path / f"deepseek-triton-{os.getuid()}/launches/{running.launch}.json"
    wait_for(record.exists)
    region = f"/dev/shm/deepseek_triton_{running.launch}_test"
    with open(region, "w"):
        running.process.kill()
    wait_for(lambda: not record.exists() and not os.path.exists(region))
