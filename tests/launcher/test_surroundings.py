"""Hostile surroundings: closed streams, limits, full disks, blocked signals, folders that disappear."""

import contextlib
import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepseek_launcher.output import OutputWriter
from deepseek_launcher.rank_events import line
from deepseek_launcher.world import World
from support.supervising import PYTHON, SUPERVISE, is_ready, listed, name_of, rank_of, runs, tagged
from support.waiting import wait_for


def after(python: str) -> list[str]:
    """Return the beginning of a command line: it runs `python`, then becomes the command behind it."""
    return [sys.executable, "-S", "-c", f"import os, signal, sys; {python}; os.execvp(sys.argv[1], sys.argv[1:])"]


SURROUNDINGS = {
    "stdin, stdout and stderr are closed": ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "-"],
    "more open files than select(2) takes": after("[os.dup2(0, number) for number in range(3, 1100)]"),
    "SIGTERM and SIGCHLD are blocked": after(
        "signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGCHLD))"
    ),
    "SIGTERM and SIGCHLD are ignored": ["env", "--ignore-signal=TERM", "--ignore-signal=CHLD"],
    "no PATH, so that Python knows no name of its own": [
        *("env", "-u", "PATH", shutil.which("bash") or "bash"),
        *("-c", 'PYTHON=$1; shift; exec -a python3 "$PYTHON" "$@"', "-"),
    ],
}


@pytest.mark.parametrize("before", SURROUNDINGS.values(), ids=list(SURROUNDINGS))
def test_it_serves_and_stops_orderly_all_the_same(serve, before):
    running = serve("--drains", "0.5", before=before)
    wait_for(lambda: is_ready(running) or running.process.poll() is not None)
    server = running.named("tritonserver")
    time.sleep(0.5)  # what it says when it is ready must not end anything
    assert runs(server)
    running.process.terminate()
    assert running.wait() == 0
    assert not running.others()
    assert not running.out or "draining" in running.out


def test_stop_now_ends_also_the_background_job_of_a_script(serve):
    """A background job ignores SIGINT and SIGQUIT."""
    running = serve(before=["bash", "-c", '"$@" & wait $!', "-"])
    wait_for(lambda: is_ready(running))
    running.ask("stop", running.launch, "--now")
    assert running.wait() == 128 + signal.SIGKILL
    assert "ended at once, as asked" in running.said


def test_stop_goes_on_with_a_supervisor_that_ctrl_z_has_stopped(serve):
    running = serve()
    wait_for(lambda: is_ready(running))
    running.process.send_signal(signal.SIGSTOP)
    running.ask("stop", running.launch)
    assert running.wait() == 0
    assert "draining" in running.out


def untagged_environment(running):
    return {name: value for name, value in running.environment.items() if name != "DEEPSEEK_TRITON_LAUNCH"}


def test_ctrl_c_in_stop_prints_no_traceback(serve):
    running = serve("--drains", "1000")
    wait_for(lambda: is_ready(running))
    command = [*PYTHON, str(SUPERVISE), "stop", running.launch]
    with subprocess.Popen(command, env=untagged_environment(running), stderr=subprocess.PIPE, text=True) as stop:
        wait_for(lambda: "draining" in running.out)
        stop.send_signal(signal.SIGINT)
        assert stop.stderr.read() == ""
    assert stop.returncode == -signal.SIGINT


def test_stop_works_also_where_it_cannot_print(serve):
    running = serve()
    wait_for(lambda: is_ready(running))
    command = [*PYTHON, str(SUPERVISE), "stop", "00000000", running.launch]
    with open("/dev/full", "w") as full:
        stopped = subprocess.run(
            command, env=untagged_environment(running), stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (stopped.returncode, stopped.stderr, running.wait()) == (0, "", 0)


def test_a_ready_file_is_never_older_than_the_server(serve, tmp_path):
    """A crash of the machine leaves an old file; the guard removes the file of a supervisor that is killed."""
    left = tmp_path / "left"
    left.touch()
    loading, killed = serve("--never-ready", ready_file=left), serve()
    wait_for(lambda: "tritonserver" in map(name_of, loading.others()))
    assert not is_ready(loading)
    wait_for(lambda: is_ready(killed))
    killed.process.kill()
    wait_for(lambda: not is_ready(killed))


def test_a_record_that_somebody_removes_comes_back(serve, tmp_path):
    """The end of the user's last session removes XDG_RUNTIME_DIR."""
    running = serve()
    wait_for(lambda: is_ready(running))
    shutil.rmtree(tmp_path / f"deepseek-triton-{os.getuid()}")
    wait_for(lambda: (listed(running) or {}).get("pid") == running.process.pid)
    assert listed(running)["state"] == "ready"


def test_a_record_that_cannot_be_removed_changes_no_exit_code(serve, tmp_path):
    running = serve(options=["--health-every", "1000"])
    wait_for(lambda: is_ready(running))
    place = tmp_path / f"deepseek-triton-{os.getuid()}"
    shutil.rmtree(place)
    place.touch()
    running.process.terminate()
    assert running.wait() == 0


def test_a_record_that_finds_no_room_leaves_nothing_half_written(supervise, tmp_path):
    running = supervise("true", before=["prlimit", "--fsize=0"])
    assert running.wait() == 0
    assert not list((tmp_path / f"deepseek-triton-{os.getuid()}/launches").iterdir())


def test_an_unreadable_folder_of_records_is_reported_in_one_line():
    environment = {**os.environ, "XDG_RUNTIME_DIR": f"/{'x' * 300}"}
    for verb in (["list"], ["stop", "--all"]):
        refused = subprocess.run([*PYTHON, str(SUPERVISE), *verb], env=environment, capture_output=True, text=True)
        assert (refused.returncode, refused.stderr.count("\n")) == (1, 1), refused.stderr
        assert "set XDG_RUNTIME_DIR" in refused.stderr


def test_output_goes_on_when_a_full_disk_has_room_again(tmp_path):
    log = tmp_path / "log"
    full = os.open("/dev/full", os.O_WRONLY)
    writer = OutputWriter(full)
    for _ in range(2):
        writer.write(b"lost\n")
        writer.flush(60)
    with log.open("wb") as room:
        os.dup2(room.fileno(), full)
    writer.write(b"kept\n")
    writer.flush(60)
    os.close(full)
    assert log.read_text() == "deepseek-triton: 10 bytes of output left out: the disk was full\nkept\n"


def test_names_that_are_no_utf8_are_served(supervise, tmp_path):
    folder = os.fsencode(tmp_path) + b"/repository"
    os.makedirs(folder + b"/model\xff")
    Path(os.fsdecode(folder + b"/model\xff/config.pbtxt")).touch()
    repository = os.fsdecode(folder)
    running = supervise(*rank_of("true", "--model-repository", repository), options=["--repository", repository])
    assert running.wait() == 0, running.said + running.out


def test_without_files_to_open_nothing_is_ended_and_a_stop_leaves_nothing(serve):
    running = serve()
    wait_for(lambda: is_ready(running))
    server, ranks = running.named("tritonserver"), running.ranks()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for pid in (running.process.pid, *ranks):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, most))
    wait_for(lambda: "does not answer" in running.said)
    time.sleep(3)  # a stub that is gone is noticed after two
    assert runs(server)
    running.process.terminate()
    assert running.wait() == 1
    assert "Too many open files" in running.said
    assert "Traceback" not in running.said + running.out
    wait_for(lambda: not running.others(), running.others)


@pytest.mark.parametrize("limit", [5, 6, 9, 11])
def test_a_limit_is_reported_in_one_line(supervise, limit):
    """The limit is on open files, at the places where the first ones are opened."""
    running = supervise("sleep", "1000", before=["prlimit", f"--nofile={limit}"])
    assert running.wait() == 1
    assert "Too many open files" in running.said
    assert "Traceback" not in running.said
    wait_for(lambda: not running.others(), running.others)


def test_a_guard_whose_reader_stands_still_ends_too():
    """It has a last message for the supervisor, and the pipe is full."""
    launch = secrets.token_hex(4)
    reading, writing = os.pipe()
    environment = {**os.environ, "DEEPSEEK_TRITON_LAUNCH": launch}
    rank = subprocess.Popen(rank_of("sleep", "1000"), env=environment, stderr=writing)
    wait_for(lambda: "sleep" in map(name_of, tagged(launch)))
    os.set_blocking(writing, False)
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, b"x" * size)
    os.set_blocking(writing, True)
    rank.kill()
    rank.wait()
    wait_for(lambda: not tagged(launch), lambda: tagged(launch))
    os.close(reading)
    os.close(writing)


def test_a_null_in_a_line_is_no_number():
    world = World(1, launch="0123abcd")
    world.take(line(0, "alive", "0123abcd", read_bytes=None))
    assert "starting" in world.progress()


def test_a_missing_proc_is_reported(supervise):
    without = ["unshare", "--mount", "bash", "-c", 'mount -t tmpfs none /proc && exec "$@"', "-"]
    if subprocess.run([*without, "true"], capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    running = supervise("true", before=without)
    assert running.wait() == 1
    assert running.said == "deepseek-triton: /proc shows nothing of this process: it has to be mounted\n"
