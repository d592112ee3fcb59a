"""`supervise.py run` around real processes: its exit code, messages, output and restarts."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from deepseek_launcher.world import HOPELESS
from deepseek_triton_build import OutputError, PlanRequest, make_plan, repository_files, write_repository
from support.supervising import PYTHON, SUPERVISE, free_ports, is_ready, listed, name_of, rank_of, runs, until_ready
from support.waiting import wait_for


def has_state(running, state, restarts):
    launch = listed(running)
    return launch is not None and (launch["state"], launch["restarts"]) == (state, restarts)


def test_the_exit_code_is_the_commands_own(supervise):
    codes = {"exit 0": 0, "exit 3": 3, "kill -9 $$": 137, "kill -TERM $$": 143, "exec no-such-program": 127}
    all_at_once = {script: supervise(*rank_of("bash", "-c", script)) for script in codes}
    assert {script: running.wait() for script, running in all_at_once.items()} == codes


def test_output_is_passed_on_with_any_line_ends(supervise):
    """A missing program is named."""
    running, missing = supervise("printf", r"one\ntwo\rthree\r\n\nno end"), supervise("no-such-program")
    assert running.wait() == 0
    assert running.out == "one\ntwo\nthree\n\nno end"  # universal newlines
    assert missing.wait() == 127
    assert "no-such-program can't be started: No such file or directory" in missing.out + missing.said


def test_output_that_nobody_reads_or_that_never_ends_blocks_nothing(supervise):
    """It blocks neither the command nor a stop, which says whether it drained, and it is not kept in memory."""
    reading, writing = os.pipe()
    unread = supervise("bash", "-c", "yes $(printf %01000d 0) | head -c 20000000; exit 5", stdout=writing)
    os.close(writing)
    drains = "trap 'exit 0' TERM; while printf yes; do :; done"
    floods = [supervise("bash", "-c", flood, stdout=subprocess.DEVNULL) for flood in (drains, "cat /dev/zero")]
    for running in floods:
        wait_for(lambda: megabytes(running.process.pid, "io", "wchar") > 0.1)  # noqa: B023
        running.process.terminate()
    assert [running.wait() for running in (unread, *floods)] == [5, 0, 0]
    assert ["while it was loading" in running.said for running in floods] == [False, True]
    os.close(reading)


def megabytes(pid, file, name):
    values = dict(line.split(":") for line in Path(f"/proc/{pid}/{file}").read_text().splitlines())
    return int(values[name].split()[0]) / 1e6


def test_a_stop_lets_the_server_drain(serve):
    """A closed stdout ends nothing, and a hangup that is ignored stays so."""
    reading, writing = os.pipe()
    os.close(reading)
    running, closed, nohup = serve("--drains", "0.5"), serve("--says", "lost", stdout=writing), serve(before=["nohup"])
    os.close(writing)
    until_ready(running, closed, nohup)
    assert listed(running)["state"] == "ready"
    nohup.process.send_signal(signal.SIGHUP)
    assert listed(nohup)["state"] == "ready"
    for each in (running, closed, nohup):
        each.process.terminate()

    assert [each.wait() for each in (running, closed, nohup)] == [0, 0, 0]
    assert "draining" in running.out
    assert not running.others()
    assert not is_ready(running)
    assert listed(running) is None


def test_a_repository_is_not_replaced_while_a_launch_uses_it(serve, tmp_path):
    repository = tmp_path / "repository"
    files = repository_files(make_plan(PlanRequest(variant="tiny")), version="1.0")
    write_repository(files, repository)
    running = serve()
    until_ready(running)
    with pytest.raises(OutputError, match="a server runs from this folder"):
        write_repository(files, repository, force=True)
    running.process.terminate()
    assert running.wait() == 0

    write_repository(files, repository, force=True)


def test_a_second_stop_ends_it_at_once_only_when_it_comes_later(serve):
    """A signal that is repeated at once, as by timeout(1) or by two senders at a time, is ignored."""
    twice, later, now = serve("--drains", "0.5"), serve("--drains", "1000"), serve("--drains", "1000")
    until_ready(twice, later, now)
    later.process.send_signal(signal.SIGINT)
    for number in (signal.SIGSTOP, signal.SIGHUP, signal.SIGTERM, signal.SIGCONT):  # both come in the same moment
        twice.process.send_signal(number)
    wait_for(lambda: "draining" in twice.out)
    assert twice.ask("stop", twice.launch).returncode == 0
    stopped = now.ask("stop", now.launch, "--now")

    def ended():
        later.process.send_signal(signal.SIGINT)
        return later.process.poll() is not None

    wait_for(ended)
    assert (stopped.returncode, stopped.stdout) == (0, f"{now.launch}: stopped\n")
    assert [running.wait() for running in (twice, later, now)] == [0, 128 + signal.SIGKILL, 128 + signal.SIGKILL]
    assert not [*twice.others(), *later.others(), *now.others()]


def test_a_server_that_never_became_ready_is_not_restarted(serve):
    running, waits = (
        serve("--never-ready", "--dies-after", "0.1"),
        serve("--never-ready", "--says", f"{HOPELESS}no file"),
    )
    assert [running.wait(), waits.wait()] == [128 + signal.SIGKILL, 1]
    assert "again" not in running.said
    assert "for ever: no file" in waits.said


def test_a_server_that_had_been_ready_is_restarted_and_given_up_in_the_end(serve):
    reason = "deepseek_backend CRITICAL: the engine is dead: CUDA error"
    running = serve("--says", reason, options=["--max-restarts", "1"])
    for restarts in (0, 1):
        wait_for(lambda: has_state(running, "ready", restarts))  # noqa: B023
        os.kill(running.named("tritonserver"), signal.SIGKILL)

    assert running.wait() == 128 + signal.SIGKILL
    assert running.said.count("restart 1 of 1") == 1
    assert running.said.count("the engine is dead: CUDA error") == 2
    assert "given up after 2 tries" in running.said
    assert running.out.count("serving") == 2


def test_the_policy_decides_on_restarts_and_a_stop_ends_the_pause_before_one(supervise):
    def start(*options):
        return supervise("bash", "-c", "echo tried; exit 3", options=options)

    never, once = start("--restart", "never"), start("--restart", "always", "--max-restarts", "1")
    stopped = start("--restart", "always", "--max-restarts", "9")
    wait_for(lambda: "restart 2 of 9" in stopped.said)
    stopped.process.terminate()
    assert [running.wait() for running in (never, once, stopped)] == [3, 3, 0]
    assert [running.out.count("tried") for running in (never, once, stopped)] == [1, 2, 2]


def test_a_server_or_stub_that_dies_under_a_command_that_stays_is_noticed(serve):
    """The server runs as under trtllm-llmapi-launch, in a subshell with the engine's leader beside it."""
    script = 'set -e; sleep 1000 & ("$@"; echo "the leader is told to stop") & wait'
    once = ["--max-restarts", "0"]
    beside = serve(options=once, wrap=lambda *command: rank_of("bash", "-c", script, "-", *command))
    with_stub, with_control = serve(options=once), serve("--model-control-mode=explicit")
    until_ready(beside, with_stub, with_control)
    time.sleep(1)  # the rank looks for its server every half second
    stub = with_stub.named("triton_python_backend_stub")
    os.kill(beside.named("tritonserver"), signal.SIGKILL)
    os.kill(stub, signal.SIGKILL)
    os.kill(with_control.named("triton_python_backend_stub"), signal.SIGKILL)  # models come and go there

    assert [running.wait() for running in (beside, with_stub)] == [128 + signal.SIGKILL] * 2
    assert f"the model's process died ({stub}, " in with_stub.said
    assert not [*beside.others(), *with_stub.others()]
    assert is_ready(with_control)
    with_control.process.terminate()
    assert with_control.wait() == 0


def test_a_server_that_is_not_ready_for_a_while_is_reported_and_left_alone(serve):
    running = serve()
    until_ready(running)
    fake = running.named("tritonserver")
    os.kill(fake, signal.SIGUSR1)
    wait_for(lambda: not is_ready(running))
    assert runs(fake)
    os.kill(fake, signal.SIGUSR1)
    wait_for(lambda: "ready again" in running.said)
    time.sleep(0.5)  # in which it is asked several times
    assert is_ready(running)
    assert running.said.count("ready again") == running.said.count("not ready (/v2/health/ready answers 400)") == 1
    assert "()" not in running.said


def test_what_another_process_has_is_refused(supervise):
    """A port, with its holder; another launch's ports; and the launch itself, which has one supervisor."""
    ports = free_ports(3)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launches = [supervise("true", ports=[port, *free_ports(2)]), supervise("sleep", "1000", ports=ports)]
        assert launches[0].wait() == 2
    first = launches[1]
    wait_for(lambda: listed(first) and "sleep" in map(name_of, first.others()))
    launches[1:] = [
        supervise("true", ports=ports),
        supervise("true", environment={"DEEPSEEK_TRITON_LAUNCH": first.launch}),
    ]
    assert [refused.wait() for refused in launches] == [2, 2, 2]
    holder = f"port {port} for HTTP is taken by process {os.getpid()}"
    for refused, said in zip(launches, (holder, "is reserved", "is supervised already"), strict=True):
        assert said in refused.said
    assert launches[0].said.count("\n") == 1
    assert runs(first.named("sleep"))


def test_a_launch_waits_for_the_one_before_it_that_is_stopping(supervise, serve):
    draining = serve("--drains", "1000")
    until_ready(draining)
    ports = list(listed(draining)["ports"].values())
    draining.process.terminate()
    wait_for(lambda: listed(draining)["state"] == "stopping")
    following = supervise("true", ports=ports)
    wait_for(lambda: f"launch {draining.launch} is stopping" in following.said)
    os.kill(draining.named("tritonserver"), signal.SIGUSR1)
    assert (following.wait(), draining.wait()) == (0, 0)


WRONG = [
    (["run"], "no command"),
    (["run", "--repository", "/nowhere", "--", "true"], "there is no folder /nowhere"),
    (["run", "--ready-file", "/nowhere/ready", "--", "true"], "--ready-file /nowhere/ready: expected a file in"),
    (["run", "--ready-file", "/tmp", "--", "true"], "--ready-file /tmp: expected a file in"),
    (["run", "--ready-file", f"/{'x' * 300}/y", "--", "true"], "--ready-file /xxx"),
    (["run", "--", "tritonserver", "--allow-http=false"], "--allow-http is off"),
    (["run", "--", "tritonserver", "--allow-http", "Off"], "--allow-http is off"),
    (["run", "--ranks", "0", "--", "true"], "expected 1 or more"),
    (["run", "--ready-within", "soon", "--", "true"], "expected a number of seconds, got 'soon'"),
    (["run", "--http-port", "70000", "--", "true"], "expected a port up to 65535"),
    (["run", "--http-port", "9", "--grpc-port", "9", "--", "true"], "need a port each"),
    (["stop"], "say which"),
    (["stop", "0123abcd", "--all"], "say which"),
    (["stop", "not-an-id"], "expected the 8 hex digits"),
    ([], "required"),
]


def test_a_wrong_command_line_is_refused_in_words(tmp_path):
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    all_at_once = [
        subprocess.Popen([*PYTHON, SUPERVISE, *arguments], env=environment, stderr=subprocess.PIPE, text=True)
        for arguments, _ in WRONG
    ]
    for (arguments, message), refused in zip(WRONG, all_at_once, strict=True):
        _, said = refused.communicate()
        assert (refused.returncode, message in said) == (2, True), (arguments, said)


def test_as_process_1_it_reaps_stops_and_leaves_other_processes_of_the_container_alone(serve):
    """Orphans of `docker exec` become children of process 1, too."""
    inside = ["unshare", "--pid", "--fork", "--mount-proc"]
    probe = subprocess.run([*inside, "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"no namespace of process numbers here: {probe.stderr.decode().strip()}")
    orphans = "for i in 1 2 3; do (sleep 0.1 &) ; done; "
    running = serve(
        before=inside,
        options=["--max-restarts", "1"],
        wrap=lambda *command: rank_of("bash", "-c", f'{orphans} "$@"', "-", *command),
    )
    until_ready(running)
    supervisor = running.pid_of("supervise.py run")
    assert not [path for path in Path("/proc").glob("[0-9]*/stat") if is_zombie_of(path, supervisor)]
    into = ["nsenter", "--target", str(supervisor), "--pid", "--mount", "bash", "-c"]
    other = [*into, "sleep 1000 > /dev/null 2>&1 & exec readlink /proc/self/ns/pid"]
    shell = subprocess.run(other, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True)
    wait_for(lambda: "sleep" in map(name_of, children_of(supervisor)))  # bash becomes it
    orphan = next(pid for pid in children_of(supervisor) if name_of(pid) == "sleep")
    os.kill(running.named("tritonserver"), signal.SIGKILL)
    wait_for(lambda: "restart 1 of 1" in running.said and is_ready(running))
    assert shell.stdout.startswith("pid:")
    assert runs(orphan)
    os.kill(supervisor, signal.SIGTERM)
    assert running.wait() == 0
    assert "draining" in running.out
    assert not running.others()


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_zombie_of(path, parent):
    try:
        state, its_parent = path.read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return False
    return state == "Z" and its_parent == str(parent)
