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
from support.supervising import PYTHON, SUPERVISE, is_ready, listed, name_of, rank_of, runs, tagged, until_ready
from support.waiting import wait_for


def after(python):
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


def test_it_serves_and_stops_orderly_all_the_same(serve):
    launches = [serve("--drains", "0.5", before=before) for before in SURROUNDINGS.values()]
    for running in launches:
        wait_for(lambda: is_ready(running) or running.process.poll() is not None)  # noqa: B023
    servers = [running.named("tritonserver") for running in launches]
    time.sleep(0.5)  # what it says when it is ready must not end anything
    assert all(map(runs, servers))
    for running in launches:
        running.process.terminate()
    for name, running in zip(SURROUNDINGS, launches, strict=True):
        assert running.wait() == 0, name
        assert not running.others(), name
        assert not running.out or "draining" in running.out, name


def test_stop_ends_a_background_job_and_one_that_ctrl_z_has_stopped(serve):
    """A background job ignores SIGINT and SIGQUIT."""
    job, stopped = serve(before=["bash", "-c", '"$@" & wait $!', "-"]), serve()
    until_ready(job, stopped)
    job.ask("stop", job.launch, "--now")
    stopped.process.send_signal(signal.SIGSTOP)
    stopped.ask("stop", stopped.launch)
    assert job.wait() == 128 + signal.SIGKILL
    assert "ended at once, as asked" in job.said
    assert stopped.wait() == 0
    assert "draining" in stopped.out


def test_stop_prints_no_traceback_at_ctrl_c_and_works_where_it_cannot_print(serve):
    drains, running = serve("--drains", "1000"), serve()
    until_ready(drains, running)
    command = ["env", "--default-signal=INT", *PYTHON, str(SUPERVISE), "stop"]
    environment = {name: value for name, value in running.environment.items() if name != "DEEPSEEK_TRITON_LAUNCH"}
    with subprocess.Popen([*command, drains.launch], env=environment, stderr=subprocess.PIPE, text=True) as stop:
        wait_for(lambda: "draining" in drains.out)
        stop.send_signal(signal.SIGINT)
        assert stop.stderr.read() == ""
    assert stop.returncode == -signal.SIGINT
    with open("/dev/full", "w") as full:
        both = [*command, "00000000", running.launch]
        stopped = subprocess.run(both, env=environment, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (stopped.returncode, stopped.stderr, running.wait()) == (1, "", 0)


def test_a_ready_file_is_never_older_than_the_server(serve, tmp_path):
    """A crash of the machine leaves an old file; the guard removes the file of a supervisor that is killed."""
    left = tmp_path / "left"
    left.touch()
    loading, killed = serve("--never-ready", ready_file=left), serve()
    wait_for(lambda: "tritonserver" in map(name_of, loading.others()))
    assert not is_ready(loading)
    until_ready(killed)
    killed.process.kill()
    wait_for(lambda: not is_ready(killed))


def test_a_record_that_somebody_removes_comes_back(serve, tmp_path):
    """The end of the user's last session removes XDG_RUNTIME_DIR. One that can't be removed changes no exit code."""
    running, other = serve(), serve(options=["--health-every", "1000"])
    until_ready(running, other)
    place = tmp_path / f"deepseek-triton-{os.getuid()}"
    place.rename(tmp_path / "removed")  # at once: a removal file by file would meet the record that is being written
    wait_for(lambda: (listed(running) or {}).get("pid") == running.process.pid)
    assert listed(running)["state"] == "ready"
    running.process.terminate()
    assert running.wait() == 0
    shutil.rmtree(place)
    place.touch()
    other.process.terminate()
    assert other.wait() == 0


def test_a_record_that_finds_no_room_leaves_nothing_half_written(supervise, tmp_path):
    """A folder of records that can't be read is reported in one line."""
    running = supervise("true", before=["prlimit", "--fsize=0"])
    environment = {**os.environ, "XDG_RUNTIME_DIR": f"/{'x' * 300}"}
    for verb in (["list"], ["stop", "--all"]):
        refused = subprocess.run([*PYTHON, str(SUPERVISE), *verb], env=environment, capture_output=True, text=True)
        assert (refused.returncode, refused.stderr.count("\n")) == (1, 1), refused.stderr
        assert "set XDG_RUNTIME_DIR" in refused.stderr
    assert running.wait() == 0
    assert not list((tmp_path / f"deepseek-triton-{os.getuid()}/launches").iterdir())


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
    until_ready(running)
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


def test_a_limit_is_reported_in_one_line(supervise):
    """The limit is on open files, at the places where the first ones are opened."""
    for running in [supervise("sleep", "1000", before=["prlimit", f"--nofile={limit}"]) for limit in (5, 6, 9, 11)]:
        assert running.wait() == 1
        assert "Too many open files" in running.said
        assert "Traceback" not in running.said
        wait_for(lambda: not running.others(), running.others)  # noqa: B023


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


def test_a_missing_proc_is_reported(supervise):
    without = ["unshare", "--mount", "bash", "-c", 'mount -t tmpfs none /proc && exec "$@"', "-"]
    if subprocess.run([*without, "true"], capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    running = supervise("true", before=without)
    assert running.wait() == 1
    assert running.said == "deepseek-triton: /proc shows nothing of this process: it has to be mounted\n"
