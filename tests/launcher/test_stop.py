"""`stop` and `list` touch the processes that a launch has started, and no others."""

import json
import os
import secrets
import shutil
import subprocess

from support.supervising import PYTHON, SUPERVISE, rank_of, runs
from support.waiting import PATIENCE_S, wait_for


def ask(folder, *arguments):
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    command = [*PYTHON, str(SUPERVISE), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def write_record(folder, **facts):
    launch = secrets.token_hex(4)
    path = folder / f"deepseek-triton-{os.getuid()}/launches/{launch}.json"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.parent.chmod(0o700)
    record = {
        "id": launch, "pid": 1, "started": 1, "namespace": os.readlink("/proc/self/ns/pid"), "state": "ready",
        "ports": {}, "repository": None, "restarts": 0, "exit_timeout_s": 0,
    }  # fmt: skip
    path.write_text(json.dumps({**record, **facts}))
    return launch, path


def test_a_stop_without_a_launch_fails_where_a_name_is_of_nothing(tmp_path):
    for code, *arguments in ((0, "--repository", tmp_path), (1, "0123abcd"), (2, "--repository", tmp_path / "gone")):
        stopped = ask(tmp_path, "stop", *arguments)
        assert (stopped.returncode, "nothing runs" in stopped.stdout + stopped.stderr) == (code, True)


def test_a_process_that_is_not_the_recorded_one_gets_no_signal(tmp_path):
    """It has the number of one that has ended, or of one in another container."""
    with subprocess.Popen(["sleep", "1000"]) as bystander:
        launch, path = write_record(tmp_path, pid=bystander.pid, namespace="pid:[1]")
        assert "nothing runs" in ask(tmp_path, "stop", launch).stdout
        assert path.exists()
        launch, path = write_record(tmp_path, pid=bystander.pid, started=1)
        assert ask(tmp_path, "stop", launch, "--now").stdout == f"{launch}: stopped\n"
        assert runs(bystander.pid)
        assert not path.exists()
        bystander.kill()


def test_the_processes_of_a_container_are_not_this_machines(tmp_path):
    inside = ["unshare", "--pid", "--fork", "--kill-child", "env", "DEEPSEEK_TRITON_LAUNCH=c0c0c0c0"]
    with subprocess.Popen([*inside, "sh", "-c", "echo; exec sleep 1000"], stdout=subprocess.PIPE) as container:
        container.stdout.readline()  # nothing where there are no namespaces
        listed = ask(tmp_path, "list").stdout
        container.kill()
    assert "c0c0c0c0" not in listed


def test_a_folder_that_is_not_this_users_alone_is_refused(tmp_path):
    """Others can write it, or it is a link, which another user can make in /tmp first."""
    _, path = write_record(tmp_path)
    place, elsewhere = path.parent.parent, tmp_path / "elsewhere"
    path.parent.chmod(0o777)
    refused = [ask(tmp_path, "list")]
    path.parent.chmod(0o700)
    place.rename(elsewhere)
    place.symlink_to(elsewhere)
    refused.append(ask(tmp_path, "stop", "--all"))
    assert path.exists()
    for done in refused:
        assert (done.returncode, "is not a folder that only this user can write" in done.stderr) == (1, True)


def test_a_broken_record_is_skipped(tmp_path):
    launch, path = write_record(tmp_path)
    sound = json.loads(path.read_text())
    broken = [
        {"id": 5}, {"pid": "self"}, {"started": None}, {"ports": [1]}, {"repository": 5}, {"restarts": "x"},
        {"exit_timeout_s": "x"}, {"exit_timeout_s": float("inf")}, {"state": 7}, {"unknown": 1},
    ]  # fmt: skip
    texts = [json.dumps({**sound, "id": f"bad{number:05}", **facts}) for number, facts in enumerate(broken)]
    for number, text in enumerate([*texts, "{", "", "[]", "null", "[" * 100_000]):
        path.with_name(f"bad{number:05}.json").write_text(text)
    shown = {one["id"] for one in json.loads(ask(tmp_path, "list", "--json").stdout)}
    assert launch in shown
    assert not shown & {5, *(f"bad{number:05}" for number in range(len(broken)))}


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
    shutil.rmtree(tmp_path / "three")
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


def test_a_launcher_that_was_not_copied_whole_says_so(tmp_path):
    alone = shutil.copy(SUPERVISE, tmp_path)
    refused = subprocess.run([*PYTHON, alone, "list"], capture_output=True, text=True)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "deepseek_launcher" in refused.stderr


def test_what_a_killed_supervisor_leaves_is_stopped_and_removed(supervise, tmp_path):
    """A further node is in the same state as one without a guard: the launch has ranks there and no supervisor."""
    ended, killed = supervise("true"), supervise("sleep", "1000")
    ended.wait()
    left = subprocess.Popen(["sleep", "1000"], env={**os.environ, "DEEPSEEK_TRITON_LAUNCH": ended.launch})
    assert f"{ended.launch}  no supervisor" in ended.ask("list").stdout
    [listed] = [one for one in json.loads(ended.ask("list", "--json").stdout) if one["id"] == ended.launch]
    assert (listed["state"], listed["processes"]) == ("no supervisor", 1)
    reader, writer = os.pipe()
    os.close(reader)  # a reader may leave
    unread = subprocess.run([*PYTHON, str(SUPERVISE), "list"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (unread.returncode, unread.stderr) == (0, b"")
    ended.ask("stop", ended.launch)
    assert left.wait(PATIENCE_S) != 0

    record = tmp_path / f"deepseek-triton-{os.getuid()}/launches/{killed.launch}.json"
    wait_for(record.exists)
    region = f"/dev/shm/deepseek_triton_{killed.launch}_test"
    with open(region, "w"):
        killed.process.kill()
    wait_for(lambda: not record.exists() and not os.path.exists(region))
