"""`deepseek-triton warm` as it is called: real files, and real processes where signals and commands matter."""

import argparse
import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from deepseek_triton_tools.cli import parsing
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.host.lifecycle import ReadyFile
from deepseek_triton_tools.tool_errors import ToolError
from deepseek_triton_tools.warming import take_survey
from support.cached_checkpoint import write_checkpoint
from support.waiting import PATIENCE_S, wait_for


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "R1"
    write_checkpoint(folder)
    return folder


@pytest.fixture
def call(capsys):
    """Call the command in this process."""

    def call(*argv, form="files"):
        capsys.readouterr()
        try:
            code = main(["warm", form, *map(str, argv)])
        except SystemExit as ended:
            code = ended.code
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    return call


@contextlib.contextmanager
def running(*argv, **environment):
    """A process that is killed at the end, if it is still there."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "warm", "files", *map(str, argv)]
    # A session of its own has no terminal, whose Ctrl-C would reach children by itself.
    with subprocess.Popen(command, **pipes, env={**os.environ, **environment}, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def manager(tmp_path):
    """The socket of a service manager at `manager.address`, and `manager.next(start)`, its next message of a kind."""
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)
        listener.settimeout(PATIENCE_S)

        def following(start):
            while not (message := listener.recv(4096).decode()).startswith(start):
                pass
            return message

        yield SimpleNamespace(address=address, next=following)


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def cut_off(path, num_bytes):
    os.truncate(path, path.stat().st_size - num_bytes)


def test_sizes_and_shares(call):
    for parse, texts in {
        parsing.size: ("", "GiB", "-1G", "1e9", "64GiBs", "64 bits", "0", "0.1", "nan", "1,5T"),
        parsing.share: ("0/4", "5/4", "1", "a/b", "1/0", "-1/4"),
    }.items():
        for text in texts:
            with pytest.raises(argparse.ArgumentTypeError):
                parse(text)
    sizes = {"1024": 1024, "64GiB": 64 * 2**30, "64g": 64 * 2**30, "500GB": 500 * 10**9, "1.5T": 3 * 2**39}
    sizes |= {"2 MB": 2 * 10**6, "100kb": 10**5, ".5KiB": 512, "7B": 7}
    assert {text: parsing.size(text) for text in sizes} == sizes
    for option in ("--budget=0", "--share=5/4"):
        assert call(".", option).returncode == 2


def test_what_cannot_go_together_or_is_not_there_is_one_line(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = {
        "x --then": "--then needs a command",
        "x --jobs 65": "--jobs: expected 1 to 64, got 65",
        "x --share 1/2 --then true": "--then with --share would come before the other shares",
        "x --share 2/2 --ready-file y": "--ready-file with --share would come before",
        "x --ready-file no/y": "--ready-file no/y: expected a folder that can be written to",
        "x --ready-file .": "can't be removed: it is a folder",
        "nowhere": "nowhere: expected a checkpoint's folder",
    }
    for argv, said in cases.items():
        done = call(*argv.split())
        assert done.returncode == (1 if argv == "nowhere" else 2), argv
        [line] = done.stderr.splitlines()
        assert line.startswith("deepseek-triton warm: ")
        assert said in line


@pytest.mark.slow
def test_what_a_form_does_not_take_is_refused(capsys):
    cases = [
        (["files"], "the following arguments are required: CHECKPOINT"),
        (["files", "x", ""], "argument CHECKPOINT: expected a value, got nothing"),
        (["files", "--hold", "/models/R1"], "expected --hold by itself, or =auto, =lock or =watch"),
        (["report", "x", "--hold"], "--hold is an option of warm files"),
        (["evict", "x", "--ready-file", "y"], "--ready-file is an option of warm files, warm server"),
        (["files", "x", "--rate", "1G"], "--rate is an option of plan, warm form"),
        (["files", "x", "--batch-sizes", "1,2"], "--batch-sizes is an option of warm server"),
        (["server", ""], "argument URL: expected a value, got nothing"),
        (["server", "http://localhost:1", "x", "y"], "unrecognized arguments: y"),
        (["form", "systemd"], "the following arguments are required: SOURCE"),
        (["form", "cron", "x"], "invalid choice: 'cron'"),
    ]
    for argv, said in cases:
        with pytest.raises(SystemExit, match="2"):
            main(["warm", *argv])
        assert said in capsys.readouterr().err, argv


def test_a_server_that_is_not_there_is_one_line(call):
    done = call("http://127.0.0.1:9", "--wait", "0.1", "--model", "r1", form="server")
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith("deepseek-triton warm: ")
    assert "127.0.0.1:9" in line


@pytest.mark.slow
def test_all_of_it_is_resident_afterwards(call, folder):
    assert call(folder, form="evict").returncode == 0
    done = call(folder, form="report")  # only reports
    assert done.returncode == 0
    assert "memory: room for " in done.stdout
    survey = take_survey([str(folder)])
    assert survey.resident < survey.size / 2
    done = call(folder)
    assert (done.returncode, done.stdout[:6], "budget" in done.stderr) == (0, "warm: ", True)
    assert take_survey([str(folder)]).resident == survey.size


def test_json_is_one_document_and_the_rest_is_on_stderr(call, folder):
    done = call(folder, "--json", "--verbose", "--jobs", "2", "--verify")
    document = json.loads(done.stdout)
    assert (document["schema"], document["action"]) == ("deepseek-triton/warm/1", "warm")
    assert (document["exit_code"], document["jobs"], len(document["files"])) == (0, 2, 4)
    assert document["result"]["resident_bytes"] == document["size_bytes"]
    assert (document["result"]["num_verified"], document["result"]["num_unverified"]) == (0, 4)
    assert "4 shards" in done.stderr


@pytest.mark.slow
def test_a_shard_cut_off_is_named_and_the_others_are_warmed(call, folder):
    second = shards(folder)[1]
    cut_off(second, 1)
    done = call(folder, "--json", "--then", "true")
    document = json.loads(done.stdout)
    assert done.returncode == document["exit_code"] == 1
    [problem] = document["result"]["problems"]
    assert (problem["path"], f"{second.stat().st_size:,}" in problem["message"]) == (str(second), True)
    assert problem["fix"]
    assert str(second) in done.stderr
    assert document["result"]["done_bytes"] >= document["size_bytes"] - second.stat().st_size
    done = call(folder, form="report")
    [line] = [line for line in done.stdout.splitlines() if line.startswith(f"{second}: error ")]
    assert (done.returncode, "download it again" in line) == (1, True)
    [finding] = json.loads(call(folder, "--json", form="report").stdout)["checkpoints"][0]["findings"]
    assert (finding["file"], finding["severity"], bool(finding["code"])) == (str(second), "error", True)


@pytest.mark.slow
def test_a_share_says_which_one_it_is(call, folder):
    done = call(folder, "--share", "2/2")
    assert done.stdout.startswith("share 2/2 warm: ")
    assert "share 2/2: " in done.stderr
    done = call(folder, "--jobs", "4", "--share", "7/8")  # a share without a job says who reads
    line = "nothing to do: 8 shares, 4 jobs: shares 1 to 4 read"
    assert (done.returncode, done.stdout.splitlines()) == (0, [line])
    assert line in done.stderr.splitlines()


def test_what_is_mapped_stays_and_who_maps_it_is_named(call, folder):
    call(folder)
    path = shards(folder)[0]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert len(bytes(mapped)) == path.stat().st_size  # so that its pages are in this process's tables
        done = call(folder, "--json", form="evict")
    document = json.loads(done.stdout)
    assert done.returncode == document["exit_code"] == 1
    [stayed] = document["result"]["stayed"]
    assert (stayed["path"], stayed["resident_bytes"] > 0) == (str(path), True)
    assert f"({os.getpid()})" in stayed["reason"]
    assert str(path) in done.stderr


@pytest.mark.slow
def test_the_command_takes_the_place_of_the_process(folder):
    script = 'grep SigIgn /proc/self/status; echo $$ "$@"; exit 7'
    argv = ["--share", "1/1", "--budget", "1", "--then", "sh", "-c", script, "sh", "--json", "-x", "a b"]
    with running(folder, *argv) as process:
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 7
    *_, mask, line = out.splitlines()
    assert line == f"{process.pid} --json -x a b"
    assert not int(mask.split()[1], 16) >> (signal.SIGPIPE - 1) & 1  # it dies of a broken pipe as others do


@pytest.mark.parametrize("hold", [[], ["--hold=watch"]])
def test_a_command_that_cannot_be_run_is_said_before_anything_is_read(call, folder, tmp_path, hold, monkeypatch):
    (tmp_path / "program").write_text("#!/bin/sh\n")
    (tmp_path / "program").chmod(0o644)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ready = tmp_path / "ready"
    for name, code in {"no-such-command": 127, "./program": 126, "program": 126}.items():
        ready.write_text("of an earlier run")
        done = call(folder, *hold, "--ready-file", ready, "--then", name)
        assert done.returncode == code
        [line] = done.stderr.splitlines()
        assert line.startswith(f"deepseek-triton warm: --then: {name} can't be run: ")
        assert not ready.exists()


@pytest.mark.slow
def test_a_command_that_turns_out_to_be_no_program_is_126(folder, tmp_path):
    ready, program = tmp_path / "ready", tmp_path / "program"
    program.write_bytes(b"\0no program")
    program.chmod(0o755)
    with running(folder, "--ready-file", ready, "--then", program) as process:
        _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, ready.exists()) == (126, True)
    assert f"--then: {program} can't be run" in err.splitlines()[-1]


def test_a_hold_ends_with_the_command_beside_it(call, folder, tmp_path):
    ready, program = tmp_path / "ready", tmp_path / "program"
    program.write_bytes(b"\0no program")
    program.chmod(0o755)
    for argv, code in {(program,): 126, ("sh", "-c", "exit 6"): 6, ("sh", "-c", "kill -KILL $$"): 137}.items():
        assert call(folder, "--hold=watch", "--ready-file", ready, "--then", *argv).returncode == code
        assert not ready.exists()


def test_a_folder_that_cannot_be_written_to_is_said_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ToolError, match="expected a folder that can be written to"):
        ReadyFile(tmp_path / "ready")


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "hold", "code"), [(signal.SIGINT, [], 130), (signal.SIGTERM, ["--hold"], 0)])
def test_a_signal_ends_it_with_what_was_done(call, folder, manager, signum, hold, code):
    call(folder, form="evict")
    argv = [folder, *hold, "--rate-limit", "100KB", "--json", "--then", "echo", "never"]  # twenty seconds
    with running(*argv, NOTIFY_SOCKET=manager.address) as process:
        manager.next("STATUS=shards ")
        process.send_signal(signum)
        out, _ = process.communicate(timeout=PATIENCE_S)
    document = json.loads(out)
    assert process.returncode == document["exit_code"] == code
    assert (document["result"]["was_stopped"], document["ok"]) == (True, False)
    assert document["result"]["done_bytes"] < document["size_bytes"]


@pytest.mark.slow
def test_a_process_that_does_not_stop_is_ended_by_a_second_signal():
    script = "from deepseek_triton_tools.host.lifecycle import Stop\nwith Stop() as stop:\n print(flush=True)\n"
    script += " while 1: stop.event.wait() and print(flush=True); stop.event.clear()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        for _ in range(2):
            process.stdout.readline()
            process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == -signal.SIGTERM


@pytest.mark.slow
def test_a_signal_that_came_before_the_command_reaches_it_all_the_same():
    script = "import os, signal\nfrom deepseek_triton_tools.host.lifecycle import CommandBeside, Stop\n"
    script += "with Stop() as stop:\n os.kill(os.getpid(), signal.SIGTERM)\n stop.event.wait()\n"
    script += " print(CommandBeside(['sleep', '1000'], stop).exit_code())"
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    assert done.stdout == "143\n"


@pytest.mark.slow
def test_a_hold_ends_with_0_and_takes_its_ready_file_along(folder, tmp_path, manager):
    ready = tmp_path / "ready"
    ready.write_text("of an earlier run")
    with running(folder, "--hold", "--ready-file", ready, NOTIFY_SOCKET=manager.address) as process:
        manager.next("STATUS=shards ")
        manager.next("READY=1\nSTATUS=held by ")
        wait_for(lambda: ready.exists() and ready.read_text().startswith("{"))
        [line] = ready.read_text().splitlines()
        process.send_signal(signal.SIGINT)
        manager.next("STOPPING=1")
        process.communicate(timeout=PATIENCE_S)
    facts = json.loads(line)
    assert process.returncode == facts["exit_code"] == 0
    assert facts["held_by"] in ("lock", "watch")
    assert facts["resident_bytes"] == sum(path.stat().st_size for path in shards(folder))
    assert not ready.exists()


def test_a_ready_file_of_an_earlier_run_is_no_sign_of_this_one(call, folder, tmp_path, monkeypatch, manager):
    ready = tmp_path / "ready"
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    assert call(folder, "--ready-file", ready).returncode == 0
    assert ready.exists()
    assert manager.next("READY=1").startswith("READY=1\nSTATUS=warm: ")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))  # is no trouble
    assert call(folder, "--ready-file", ready).returncode == 0
    cut_off(shards(folder)[0], 1)
    assert call(folder, "--ready-file", ready).returncode == 1
    assert not ready.exists()


@pytest.mark.slow
def test_a_command_beside_a_hold_gets_its_signals_and_gives_its_code(folder, tmp_path):
    ready, begun = tmp_path / "ready", tmp_path / "begun"
    script = f"trap 'exit 9' TERM; touch {begun}; while :; do sleep 0.05; done"
    with running(folder, "--hold=watch", "--ready-file", ready, "--then", "sh", "-c", script) as process:
        wait_for(begun.exists)
        assert ready.exists()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 9
    assert not ready.exists()
