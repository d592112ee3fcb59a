"""`deepseek-triton warm` as it is called: real processes, real files, real signals."""

import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest
from bench.synthetic_checkpoint import make_checkpoint

from deepseek_triton_tools.cli import parsing
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.warming import take_survey
from support.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "R1"
    make_checkpoint(folder, size=20 * 10**6)
    return folder


def command(*argv, form="files"):
    return [sys.executable, "-m", "deepseek_triton_tools.cli.main", "warm", form, *map(str, argv)]


def run(*argv, form="files", **options):
    return subprocess.run(command(*argv, form=form), capture_output=True, text=True, timeout=PATIENCE_S, **options)


@contextlib.contextmanager
def running(*argv, **environment):
    """A process that is killed at the end, if it is still there."""
    process = subprocess.Popen(
        command(*argv),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,  # no terminal, whose Ctrl-C would reach children by itself
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def cut_off(path, num_bytes):
    os.truncate(path, path.stat().st_size - num_bytes)


# What can be typed


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1024", 1024),
        ("64GiB", 64 * 2**30),
        ("64g", 64 * 2**30),
        ("500GB", 500 * 10**9),
        ("1.5T", 3 * 2**39),
        ("2 MB", 2 * 10**6),
        ("100kb", 10**5),
        (".5KiB", 512),
        ("7B", 7),
    ],
)
def test_a_size(text, num_bytes):
    assert parsing.size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "1e9", "64GiBs", "64 bits", "0", "0.1", "nan", "1,5T"])
def test_what_is_no_size_is_refused_with_examples(text, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["warm", "files", ".", f"--budget={text}"])
    assert ended.value.code == 2
    assert "expected a size such as 64GiB" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "a/b", "1/0", "-1/4"])
def test_what_is_no_share_is_refused(text, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["warm", "files", ".", f"--share={text}"])
    assert ended.value.code == 2
    assert "expected K/N" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["files", "x", "--then"], "--then needs a command"),
        (["files", "x", "--jobs", "65"], "--jobs: expected 1 to 64, got 65"),
        (["files", "x", "--share", "1/2", "--then", "true"], "--then with --share would come before the other shares"),
        (["files", "x", "--share", "2/2", "--ready-file", "y"], "--ready-file with --share would come before"),
        (["files", "x", "--ready-file", "no/y"], "--ready-file no/y: expected a folder that can be written to"),
        (["files", "x", "--ready-file", "."], "can't be removed: it is a folder"),
        (["files", "nowhere"], "nowhere: expected a checkpoint's folder"),
    ],
)
def test_what_cannot_go_together_or_is_not_there_is_one_line(argv, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert main(["warm", *argv]) == (1 if "nowhere" in argv else 2)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("deepseek-triton warm: ")
    assert said in line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "the following arguments are required: FORM"),
        (["files"], "the following arguments are required: CHECKPOINT"),
        (["files", "x", ""], "argument CHECKPOINT: expected a value, got nothing"),
        (["report", "x", "--hold"], "--hold is an option of warm files"),
        (["evict", "x", "--ready-file", "y"], "--ready-file is an option of warm files, warm server"),
        (["files", "x", "--rate", "1G"], "--rate is an option of warm form"),
        (["files", "x", "--batch-sizes", "1,2"], "--batch-sizes is an option of warm server"),
        (["server", ""], "argument URL: expected a value, got nothing"),
        (["server", "http://localhost:1", "x", "y"], "unrecognized arguments: y"),
        (["form", "systemd"], "the following arguments are required: SOURCE"),
        (["form", "cron", "x"], "invalid choice: 'cron'"),
    ],
)
def test_what_a_form_does_not_take_is_refused(argv, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["warm", *argv])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "now"),
    [
        (["/models/R 1", "--hold"], "files '/models/R 1' --hold"),
        (["r1", "--report", "-v"], "report r1 -v"),
        (["--evict", "r1"], "evict r1"),
        (["r1", "--server", "http://localhost:8000", "--wait", "9"], "server http://localhost:8000 r1 --wait 9"),
        (["r1", "--form=systemd"], "form systemd r1"),
    ],
)
def test_what_to_do_comes_first(argv, now, capsys):
    assert main(["warm", *argv]) == 2
    expected = f"expected files, report, evict, server or form first: deepseek-triton warm {now}"
    assert capsys.readouterr().err == f"deepseek-triton warm: {expected}\n"


def test_one_share_of_one_may_be_followed(folder):
    assert run(folder, "--share", "1/1", "--then", "true").returncode == 0


def test_a_mode_of_holding_that_swallows_the_checkpoint_is_explained(capsys):
    with pytest.raises(SystemExit):
        main(["warm", "files", "--hold", "/models/R1"])
    assert "expected --hold by itself, or =auto, =lock or =watch" in capsys.readouterr().err


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        main(["warm", "files", "--help"])
    shown = capsys.readouterr().out
    for part in ("--then", "exit codes: 0", "of the whole node", "2^30"):
        assert part in shown


def test_a_server_that_is_not_there_is_one_line(capsys):
    assert main(["warm", "server", "http://127.0.0.1:9", "--wait", "0.1", "--model", "r1"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("deepseek-triton warm: ")
    assert "127.0.0.1:9" in line


# Warming


def test_all_of_it_is_resident_afterwards(folder):
    assert run(folder, form="evict").returncode == 0
    done = run(folder)

    assert done.returncode == 0
    assert done.stdout.startswith("warm: ")
    assert "budget" in done.stderr
    survey = take_survey([str(folder)])
    assert survey.resident == survey.size


def test_json_is_one_document_and_the_rest_is_on_stderr(folder):
    done = run(folder, "--json", "--verbose", "--jobs", "2")

    document = json.loads(done.stdout)
    assert (document["schema"], document["action"]) == ("deepseek-triton/warm/1", "warm")
    assert (document["exit_code"], document["jobs"], len(document["files"])) == (0, 2, 4)
    assert document["result"]["resident_bytes"] == document["size_bytes"]
    assert "4 shards" in done.stderr


def test_a_shard_cut_off_is_named_with_its_byte_and_the_others_are_warmed(folder):
    second = shards(folder)[1]
    cut_off(second, 1)
    done = run(folder, "--json", "--then", "true")

    document = json.loads(done.stdout)
    assert done.returncode == document["exit_code"] == 1
    [problem] = document["result"]["problems"]
    assert problem["path"] == str(second)
    assert f"{second.stat().st_size:,}" in problem["message"]
    assert problem["fix"]
    assert str(second) in done.stderr
    assert document["result"]["done_bytes"] >= document["size_bytes"] - second.stat().st_size


def test_what_does_not_fit_is_left_out_and_said(folder):
    first, *rest = shards(folder)
    done = run(folder, "--budget", first.stat().st_size + 1, "--json")

    document = json.loads(done.stdout)
    assert done.returncode == 3
    assert (document["fits"], document["chosen_bytes"]) == (False, first.stat().st_size)
    assert {entry["path"] for entry in document["files"]} == set(map(str, rest))
    assert "it does not fit" in done.stderr
    assert "--budget" in document["remedies"]


def test_shares_together_take_every_file_once(folder):
    documents = [json.loads(run(folder, "--json", "-v", "--share", f"{k}/2").stdout) for k in (1, 2)]

    taken = [entry["path"] for document in documents for entry in document["files"] if entry["fate"] == "chosen"]
    assert sorted(taken) == list(map(str, shards(folder)))


def test_a_share_without_a_job_has_nothing_to_do_and_says_who_reads(folder):
    done = run(folder, "--jobs", "4", "--share", "7/8")

    line = "nothing to do: 8 shares, 4 jobs: shares 1 to 4 read"
    assert done.returncode == 0
    assert done.stdout.splitlines() == [line]
    assert line in done.stderr.splitlines()


def test_a_share_says_that_it_is_one(folder):
    done = run(folder, "--share", "2/2")

    [line] = done.stdout.splitlines()
    assert line.startswith("share 2/2 warm: ")
    assert "share 2/2: " in done.stderr


def test_files_without_a_checksum_are_said_not_to_be_verified(folder):
    done = run(folder, "--verify")
    document = json.loads(run(folder, "--verify", "--json").stdout)

    assert done.returncode == 0
    assert "0 of 4 files have a checksum; the others are not verified" in done.stdout
    assert (document["result"]["num_verified"], document["result"]["num_unverified"]) == (0, 4)
    assert "checksum" not in run(folder).stdout


def test_a_budget_above_what_there_is_is_warned_of_before_anything_is_read(folder):
    enlarge(shards(folder)[0])
    done = run(folder, "--budget", "1000T", form="report")

    assert done.returncode in (0, 1)  # the hole it got may be found damaged
    assert " is more than the " in done.stdout
    assert "the first files will be dropped while the last are read" in done.stdout
    document = json.loads(run(folder, "--budget", "1000T", "--json", form="report").stdout)
    assert (document["fits"], document["lacking_bytes"] > 0) == (False, True)
    assert document["remedies"].startswith("what would do: ")
    assert "--budget" not in document["remedies"]


def enlarge(path):
    """Make a file larger than any memory, out of holes."""
    os.truncate(path, 2**43)


# Reporting and dropping


def test_a_report_only_reports(folder):
    run(folder, form="evict")
    done = run(folder, form="report")

    assert done.returncode == 0
    for title in ("Checkpoints", "File systems", "Memory of this node", "What warming would do"):
        assert title in done.stdout
    survey = take_survey([str(folder)])
    assert survey.resident < survey.size / 2


def test_a_report_of_a_damaged_checkpoint_fails_with_code_file_and_fix(folder):
    path = shards(folder)[2]
    cut_off(path, 5)

    done = run(folder, form="report")
    assert done.returncode == 1
    [line] = [line for line in done.stdout.splitlines() if line.startswith(f"{path}: error ")]
    assert "download it again" in line
    assert "damaged: left out" in done.stdout
    document = json.loads(run(folder, "--json", form="report").stdout)
    [finding] = document["checkpoints"][0]["findings"]
    assert (finding["file"], finding["severity"], bool(finding["code"])) == (str(path), "error", True)


def test_what_is_mapped_stays_and_who_maps_it_is_named(folder):
    run(folder)
    path = shards(folder)[0]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert len(bytes(mapped)) == path.stat().st_size  # so that its pages are in this process's tables
        done = run(folder, "--json", form="evict")

    document = json.loads(done.stdout)
    assert done.returncode == document["exit_code"] == 1
    [stayed] = document["result"]["stayed"]
    assert (stayed["path"], stayed["resident_bytes"] > 0) == (str(path), True)
    assert f"({os.getpid()})" in stayed["reason"]
    assert str(path) in done.stderr


# What comes after


def test_the_command_takes_the_place_of_the_process(folder):
    script = "import os, sys; print(os.getpid(), *sys.argv[1:]); sys.exit(7)"
    with running(folder, "--then", sys.executable, "-c", script, "--json", "-x", "a b") as process:
        out, _ = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 7
    assert out.splitlines()[-1] == f"{process.pid} --json -x a b"


def test_the_command_dies_of_a_broken_pipe_as_others_do(folder):
    script = "import signal; print(signal.getsignal(signal.SIGPIPE) == signal.SIG_DFL)"
    shell = f"grep SigIgn /proc/self/status; {sys.executable} -c '{script}'"
    done = run(folder, "--then", "sh", "-c", shell)

    [mask] = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("SigIgn")]
    assert not int(mask, 16) >> (signal.SIGPIPE - 1) & 1


@pytest.mark.parametrize("hold", [[], ["--hold=watch"]])
@pytest.mark.parametrize(
    ("mode", "name", "code"), [(None, "no-such-command", 127), (0o644, "./program", 126), (0o644, "program", 126)]
)
def test_a_command_that_cannot_be_run_is_said_before_anything_is_read(folder, tmp_path, hold, mode, name, code):
    if mode is not None:
        (tmp_path / "program").write_text("#!/bin/sh\n")
        (tmp_path / "program").chmod(mode)
    ready = tmp_path / "ready"
    ready.write_text("of an earlier run")
    path = f"{tmp_path}:{os.environ['PATH']}"
    argv = [folder, *hold, "--ready-file", ready, "--then", name]
    done = run(*argv, cwd=tmp_path, env={**os.environ, "PATH": path})

    assert done.returncode == code
    [line] = done.stderr.splitlines()
    assert line.startswith(f"deepseek-triton warm: --then: {name} can't be run: ")
    assert not ready.exists()


@pytest.mark.parametrize("hold", [[], ["--hold=watch"]])
def test_a_command_that_turns_out_to_be_no_program_is_126(folder, hold, tmp_path):
    ready, program = tmp_path / "ready", tmp_path / "program"
    program.write_bytes(b"\0no program")
    program.chmod(0o755)
    done = run(folder, *hold, "--ready-file", ready, "--then", program)

    assert done.returncode == 126
    assert f"--then: {program} can't be run" in done.stderr.splitlines()[-1]
    assert ready.exists() != bool(hold)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not write")
def test_a_folder_that_cannot_be_written_to_is_said_at_once():
    script = (
        "import os, sys, pathlib; from deepseek_triton_tools.host.readiness_notice import ReadyFile; os.setuid(65534); "
    )
    script += "ReadyFile(pathlib.Path(sys.argv[1]))"
    with tempfile.TemporaryDirectory() as closed:  # pytest's own are for one user
        os.chmod(closed, 0o755)
        argv = [sys.executable, "-c", script, f"{closed}/ready"]
        done = subprocess.run(argv, capture_output=True, text=True)

    assert "expected a folder that can be written to" in done.stderr.splitlines()[-1]


def test_the_command_follows_where_only_a_part_fits_and_not_where_it_is_damaged(folder):
    assert run(folder, "--budget", "1", "--then", "sh", "-c", "exit 5").returncode == 5

    cut_off(shards(folder)[0], 1)
    assert run(folder, "--then", "sh", "-c", "exit 5").returncode == 1


@pytest.mark.parametrize(
    ("signum", "hold", "code"),
    [(signal.SIGINT, [], 130), (signal.SIGTERM, [], 143), (signal.SIGTERM, ["--hold"], 0)],
)
def test_a_signal_ends_it_with_what_was_done(folder, signum, hold, code):
    run(folder, form="evict")
    with running(folder, *hold, "--rate-limit", "1MB", "--json", "--then", "echo", "never") as process:
        for line in process.stderr:
            if "budget" in line:
                break
        time.sleep(0.5)  # of the twenty seconds that it would take
        process.send_signal(signum)
        out, _ = process.communicate(timeout=PATIENCE_S)

    document = json.loads(out)
    assert process.returncode == document["exit_code"] == code
    assert document["result"]["was_stopped"]
    assert not document["ok"]
    assert document["result"]["done_bytes"] < document["size_bytes"]


def test_a_process_that_does_not_stop_is_ended_by_a_second_signal():
    script = (
        "from deepseek_triton_tools.host.stop_signals import Stop\nwith Stop() as stop:\n print(flush=True)\n while 1: "
    )
    script += "stop.event.wait() and print(flush=True); stop.event.clear()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        for _ in range(2):
            process.stdout.readline()
            process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == -signal.SIGTERM


# Holding and telling


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_hold_ends_with_0_and_takes_its_ready_file_along(folder, tmp_path, signum):
    ready = tmp_path / "ready"
    ready.write_text("of an earlier run")
    with running(folder, "--hold", "--ready-file", ready) as process:
        wait_for(lambda: ready.exists() and ready.read_text().startswith("{"))
        [line] = ready.read_text().splitlines()
        process.send_signal(signum)
        process.communicate(timeout=PATIENCE_S)

    facts = json.loads(line)
    assert process.returncode == facts["exit_code"] == 0
    assert facts["held_by"] in ("lock", "watch")
    assert facts["resident_bytes"] == sum(path.stat().st_size for path in shards(folder))
    assert list(tmp_path.iterdir()) == [folder]


def test_a_ready_file_of_an_earlier_run_is_no_sign_of_this_one(folder, tmp_path):
    ready = tmp_path / "ready"
    ready.write_text("of an earlier run")
    cut_off(shards(folder)[0], 1)

    assert run(folder, "--ready-file", ready).returncode == 1
    assert not ready.exists()


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


@pytest.mark.parametrize(("script", "code"), [("exit 6", 6), ("kill -KILL $$", 137)])
def test_a_hold_ends_with_the_command_beside_it(folder, script, code):
    assert run(folder, "--hold=watch", "--then", "sh", "-c", script).returncode == code


def test_the_service_manager_is_told(folder, tmp_path):
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(PATIENCE_S)
        with running(folder, "--hold", NOTIFY_SOCKET=address) as process:
            messages = []
            while not any(message.startswith("READY=1\nSTATUS=held by ") for message in messages):
                messages.append(manager.recv(4096).decode())
            process.send_signal(signal.SIGTERM)
            while messages[-1] != "STOPPING=1":
                messages.append(manager.recv(4096).decode())
            process.communicate(timeout=PATIENCE_S)

    assert messages[0].startswith("STATUS=shards ")
    assert process.returncode == 0


def test_a_service_manager_that_has_gone_is_no_trouble(folder, tmp_path):
    environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "gone")}

    assert run(folder, env=environment).returncode == 0
