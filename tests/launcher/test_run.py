"""`supervise.py run` around real processes: what it returns, says, hands on, and when it starts again."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from supervising import SUPERVISE, free_ports, name_of, rank_of, runs, until

SERVER = Path(__file__).with_name("fake_server.py")


def server(ports, *options):
    return [sys.executable, str(SERVER), str(ports[0]), *options]


@pytest.fixture
def serve(supervise, tmp_path):
    """The fake server under a supervisor, with a repository of one model."""

    def start(*server_options, options=(), wrap=rank_of, **more):
        ports = free_ports(3)
        model = tmp_path / "repository/a_model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.pbtxt").touch()
        options = ["--repository", str(tmp_path / "repository"), "--ready-file", str(tmp_path / "ready"), *options]
        return supervise(*wrap(*server(ports, *server_options)), ports=ports, options=options, **more)

    return start


def is_ready(running):
    return (running.folder / "ready").exists()


def listed(running):
    found = json.loads(running.ask("list", "--json").stdout)
    return next((launch for launch in found if launch["id"] == running.launch), None)


def has_state(running, state, restarts):
    launch = listed(running)
    return launch is not None and (launch["state"], launch["restarts"]) == (state, restarts)


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("kill -TERM $$", 143), ("exec no-such-program", 127)],
)
def test_the_exit_code_is_the_commands_own(supervise, script, code):
    assert supervise(*rank_of("bash", "-c", script)).wait() == code


def test_a_program_that_is_not_there_is_named(supervise):
    running = supervise("no-such-program")
    assert running.wait() == 127
    assert "no-such-program can't be started: No such file or directory" in running.out + running.said


def test_output_is_handed_on_whatever_its_line_ends(supervise):
    running = supervise("printf", r"one\ntwo\rthree\r\n\nno end")
    assert running.wait() == 0
    assert running.out == "one\ntwo\nthree\n\nno end"  # universal newlines


def test_a_reader_that_does_not_read_holds_up_nothing(supervise):
    reading, writing = os.pipe()
    running = supervise("bash", "-c", "yes $(printf %01000d 0) | head -c 20000000; exit 5", stdout=writing)
    os.close(writing)
    assert running.wait() == 5
    os.close(reading)


def test_a_closed_stdout_ends_nothing(serve):
    reading, writing = os.pipe()
    os.close(reading)
    running = serve("--says", "lost", stdout=writing)
    os.close(writing)
    until(lambda: is_ready(running))
    running.process.terminate()
    assert running.wait() == 0


def test_a_stop_lets_the_server_drain(serve):
    running = serve("--drains", "0.5")
    until(lambda: is_ready(running))
    assert listed(running)["state"] == "ready"
    running.process.terminate()

    assert running.wait() == 0
    assert "draining" in running.out
    assert not running.others()
    assert not is_ready(running)
    assert listed(running) is None


def test_a_second_signal_ends_it_at_once(serve):
    running = serve("--drains", "1000")
    until(lambda: is_ready(running))
    running.process.send_signal(signal.SIGINT)
    until(lambda: "draining" in running.out)
    running.process.send_signal(signal.SIGINT)

    assert running.wait() == 128 + signal.SIGKILL
    assert not running.others()


def test_a_server_that_never_drains_is_killed(serve, monkeypatch):
    running = serve("--drains", "1000", options=["--exit-timeout", "0"], environment={"IN_A_HURRY": "1"})
    until(lambda: is_ready(running))
    stopped = running.ask("stop", running.launch, "--now")

    assert (stopped.returncode, stopped.stdout) == (0, f"{running.launch}: stopped\n")
    assert running.wait() == 128 + signal.SIGKILL
    assert not running.others()


def test_an_ignored_hangup_stays_ignored(serve):
    running = serve(before=["nohup"])
    until(lambda: is_ready(running))
    running.process.send_signal(signal.SIGHUP)
    assert listed(running)["state"] == "ready"
    running.process.terminate()
    assert running.wait() == 0


def test_what_never_became_ready_is_not_started_again(serve):
    running = serve("--never-ready", "--dies-after", "0.1")
    assert running.wait() == 128 + signal.SIGKILL
    assert "again" not in running.said


def test_what_had_been_ready_is_started_again_and_given_up_in_the_end(serve):
    reason = "deepseek_backend CRITICAL: the engine is dead: CUDA error"
    running = serve("--says", reason, options=["--max-restarts", "1"])
    for restarts in (0, 1):
        until(lambda: has_state(running, "ready", restarts))  # noqa: B023
        os.kill(running.named("tritonserver"), signal.SIGKILL)

    assert running.wait() == 128 + signal.SIGKILL
    assert running.said.count("restart 1 of 1") == 1
    assert running.said.count("the engine is dead: CUDA error") == 2
    assert "given up after 2 tries" in running.said
    assert running.out.count("serving") == 2


@pytest.mark.parametrize(("policy", "tries"), [("never", 1), ("always", 2)])
def test_the_policy_decides(supervise, policy, tries):
    running = supervise("bash", "-c", "echo tried; exit 3", options=["--restart", policy, "--max-restarts", "1"])
    assert running.wait() == 3
    assert running.out.count("tried") == tries


def test_a_stop_ends_the_wait_for_the_next_try(supervise):
    running = supervise("bash", "-c", "exit 3", options=["--restart", "always", "--max-restarts", "9"])
    until(lambda: "restart 2 of 9" in running.said)
    running.process.terminate()
    assert running.wait() == 0


def test_a_stub_that_dies_is_fatal(serve):
    running = serve(options=["--max-restarts", "0"])
    until(lambda: is_ready(running))
    stub = running.named("triton_python_backend_stub")
    os.kill(stub, signal.SIGKILL)

    assert running.wait() == 128 + signal.SIGKILL
    assert f"the model's process died ({stub}, " in running.said
    assert not running.others()


def test_without_a_stub_to_watch_it_goes_on(serve):
    running = serve("--model-control-mode=explicit")
    until(lambda: is_ready(running))
    os.kill(running.named("triton_python_backend_stub"), signal.SIGKILL)
    running.process.terminate()
    assert running.wait() == 0


def test_a_server_whose_launcher_stays_is_noticed(serve):
    """As under trtllm-llmapi-launch: the server in a subshell, the engine's leader beside it."""
    script = 'set -e; sleep 1000 & ("$@"; echo "the leader is told to stop") & wait'
    running = serve(options=["--max-restarts", "0"], wrap=lambda *command: rank_of("bash", "-c", script, "-", *command))
    until(lambda: is_ready(running))
    time.sleep(1)  # the rank looks for its server every half second
    os.kill(running.named("tritonserver"), signal.SIGKILL)

    assert running.wait() == 128 + signal.SIGKILL
    assert not running.others()


def test_not_ready_for_a_while_is_said_and_nothing_is_done(serve):
    running = serve()
    until(lambda: is_ready(running))
    fake = running.named("tritonserver")
    os.kill(fake, signal.SIGUSR1)
    until(lambda: not is_ready(running))
    assert runs(fake)
    os.kill(fake, signal.SIGUSR1)
    until(lambda: is_ready(running))
    assert "ready again" in running.said


def test_a_taken_port_is_named_with_who_has_it(supervise):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        running = supervise("true", ports=[port, *free_ports(2)])
        assert running.wait() == 2
    assert f"port {port} for HTTP is taken by process {os.getpid()}" in running.said
    assert running.said.count("\n") == 1


def test_a_port_that_another_launch_will_take_is_refused(supervise):
    ports = free_ports(3)
    first = supervise("sleep", "1000", ports=ports)
    until(lambda: "sleep" in map(name_of, first.others()))
    second = supervise("true", ports=ports)
    assert second.wait() == 2
    assert "is spoken for" in second.said


def test_a_launch_has_one_supervisor(supervise):
    first = supervise("sleep", "1000")
    until(lambda: listed(first) and "sleep" in map(name_of, first.others()))
    second = supervise("true", environment={"DEEPSEEK_TRITON_LAUNCH": first.launch})
    assert second.wait() == 2
    assert f"launch {first.launch} is supervised already" in second.said
    assert runs(first.named("sleep"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "no command"),
        (["run", "--repository", "/nowhere", "--", "true"], "there is no folder /nowhere"),
        (["run", "--", "tritonserver", "--allow-http=false"], "--allow-http is off"),
        (["run", "--ranks", "0", "--", "true"], "expected 1 or more"),
        (["run", "--ready-within", "soon", "--", "true"], "expected a number of seconds, got 'soon'"),
        (["run", "--http-port", "70000", "--", "true"], "expected a port up to 65535"),
        (["run", "--http-port", "9", "--grpc-port", "9", "--", "true"], "need a port each"),
        (["stop"], "say which"),
        (["stop", "not-an-id"], "expected the 8 hex digits"),
        ([], "required"),
    ],
)
def test_a_wrong_command_line_is_refused_in_words(tmp_path, arguments, message):
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    refused = subprocess.run(
        [sys.executable, str(SUPERVISE), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert message in refused.stderr


def test_as_process_1_it_reaps_stops_and_leaves_nothing(serve):
    probe = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"no namespace of process numbers here: {probe.stderr.decode().strip()}")
    orphans = "for i in 1 2 3; do (sleep 0.1 &) ; done; "
    running = serve(
        before=["unshare", "--pid", "--fork", "--mount-proc"],
        wrap=lambda *command: rank_of("bash", "-c", f'{orphans} "$@"', "-", *command),
    )
    until(lambda: is_ready(running))
    supervisor = next(pid for pid, line in running.others().items() if "supervise.py run" in line)
    assert not [path for path in Path("/proc").glob("[0-9]*/stat") if is_zombie_of(path, supervisor)]
    os.kill(supervisor, signal.SIGTERM)

    assert running.wait() == 0
    assert "draining" in running.out
    assert not running.others()


def is_zombie_of(path, parent):
    try:
        state, its_parent = path.read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return False
    return state == "Z" and its_parent == str(parent)
