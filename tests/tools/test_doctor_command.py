"""`deepseek-triton doctor`: what it prints, its exit codes, and the command lines that it refuses."""

import json
import os
import re
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deepseek_triton_build.check import CheckOptions, check_repository
from deepseek_triton_tools.cli import doctor as verb
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.doctor.examine import CHECKS
from deepseek_triton_tools.doctor.expected_of_repository import expected_of
from deepseek_triton_tools.doctor.findings import CAPABILITIES
from deepseek_triton_tools.doctor.machine import NOT_FOUND, Done, Machine, Python
from deepseek_triton_tools.doctor.software import KNOWN_BAD
from support.faked_machine import FakedMachine

ROOT = Path(__file__).parents[2]


def document(capsys, *argv):
    code = main(["doctor", *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def by_check(said):
    return {found["check"]: found for found in said["findings"]}


def by_capability(said):
    return {each["id"]: each["works"] for each in said["capabilities"]}


@pytest.fixture
def r1(tmp_path, capsys):
    """R1 for 8 x H200, whose checkpoint is nowhere."""
    folder = tmp_path / "r1"
    argv = ["build", "deepseek-r1", "--gpu", "h200", "--gpus", "8", "--model", "/no/R1", "--output", str(folder)]
    assert main(argv) == 0
    capsys.readouterr()
    return folder


@pytest.fixture
def on_path(monkeypatch, tmp_path):
    """Puts a shell script before the programs that this machine has."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def write(name, script):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return write


class WithoutPrograms(Machine):
    """This machine, on which no program can be run: no driver, no MPI."""

    def run(self, *command, **given):
        return Done(code=NOT_FOUND)


@pytest.fixture
def bare(monkeypatch):
    monkeypatch.setattr(verb, "Machine", WithoutPrograms)


@pytest.mark.slow
def test_this_machine(on_path, capsys):
    """Without a GPU the tests' own machine serves all but TensorRT-LLM."""
    on_path("nvidia-smi", "echo 'No devices were found'\nexit 6")  # as without a driver, on machines that have one too
    code, said = document(capsys)
    assert code in (0, 3)
    assert said["schema"] == "deepseek-triton/doctor/1"
    assert (said["exit_code"], said["ok"]) == (code, code == 0)
    assert {found["check"] for found in said["findings"]} == {check.id for check in CHECKS}
    assert {found["level"] for found in said["findings"]} <= {"ok", "skipped", "note", "warning", "error"}
    gpus = by_check(said)["gpus"]
    assert (gpus["level"], gpus["blocks"]) == ("note", ["tensorrt-llm", "vllm"])
    can = by_capability(said)
    assert list(can) == list(CAPABILITIES)
    assert [name for name in ("demo", "simulated", "client", "generator", "warm") if not can[name]] == []
    [llm] = [each for each in said["capabilities"] if each["id"] == "tensorrt-llm"]
    assert (llm["works"], "gpus" in {row["check"] for row in llm["in_the_way"]}) == (False, True)
    [facts] = said["facts"].values()
    assert facts["Python"] == ".".join(map(str, sys.version_info[:3]))


@pytest.mark.slow
def test_a_repository_for_tensorrt_llm(bare, r1, capsys):
    code, said = document(capsys, str(r1))
    found = by_check(said)
    assert code == 1
    levels = {"gpus": "error", "tensorrt-llm": "error", "repository": "ok"}
    assert {check: found[check]["level"] for check in levels} == levels
    assert "nvcr.io/nvidia/tritonserver:" in found["tensorrt-llm"]["fix"]
    assert found["checkpoint"]["result"] == "/no/R1 is not there"
    assert len(found["repository"]["result"].split(", ")[1]) == 16
    can = by_capability(said)
    assert (can["demo"], can["simulated"], can["launch-local"]) == (True, True, False)
    assert not [check for check in found if check.startswith("check:")]  # but for the checkpoint, which is said once
    path = r1 / "tensorrt_llm/1/model.yaml"
    path.write_text(path.read_text().replace("max_batch_size:", "max_bach_size:", 1).replace("/no/R1", "~/no/R1"))
    code, said = document(capsys, str(path))  # as trtllm-serve takes it; its folder is the repository then
    assert code == 1
    assert by_check(said)["repository"]["result"].startswith(f"{path.parent}, ")
    assert by_check(said)["checkpoint"]["result"].endswith("/~/no/R1 is not there")
    [wrong] = [found for found in said["findings"] if "max_bach_size" in found["result"]]
    assert (wrong["check"][:6], "model.yaml:" in wrong["result"]) == ("check:", True)


def test_a_folder_for_trtllm_serve_needs_no_tritonserver(tmp_path, monkeypatch, capsys):
    build = ["build", "deepseek-r1", "--gpu", "h200", "--profile", "disagg", "--model", "/models/DeepSeek-R1"]
    assert main([*build, "--format", "trtllm-serve", "--output", str(tmp_path / "r1")]) == 0
    capsys.readouterr()
    monkeypatch.setattr(verb, "Machine", lambda: FakedMachine(programs={}, python=BARE))
    found = by_check(document(capsys, str(tmp_path / "r1/context"))[1])
    assert found["ports"]["result"] == "free: HTTP 8001"
    assert (found["tritonserver"]["level"], found["tensorrt-llm"]["level"]) == ("note", "error")
    assert "nvcr.io/nvidia/tensorrt-llm/release:" in found["tensorrt-llm"]["fix"]
    assert not [
        row for row in found.values() if row["level"] == "error" and row["cause"][:8] in ("start.sh", "model.ya")
    ]


def test_the_repository_of_the_demo(bare, capsys):
    """What this project's own folder needs is all here."""
    code, said = document(capsys, str(ROOT / "model_repository"), "--http-port", "18470", "--grpc-port", "18471")
    assert [found for found in said["findings"] if found["level"] == "error" and found["check"] != "ports"] == []
    assert code in (0, 1, 3)
    assert by_check(said)["tritonserver"]["level"] == "ok"


REHEARSALS = [
    ("deepseek-r1 --gpu h200 --trtllm 1.2.1", "tensorrt_llm --gpu h200 --gpus 8 --trtllm 1.2.1 --output rehearsal"),
    ("tiny --engine simulated", None),
    ("deepseek-r1 --engine vllm --gpu h100 --gpus 16", "vllm --gpu h100 --gpus 8 --vllm 0.27.1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "command"), REHEARSALS)
def test_a_load_of_hours_is_rehearsed_first(plan, command, tmp_path, monkeypatch, capsys):
    assert main(["build", *plan.split(), "--output", str(tmp_path / "r")]) == 0
    monkeypatch.setattr(verb, "Machine", FakedMachine)
    capsys.readouterr()
    main(["doctor", str(tmp_path / "r")])
    shown = " ".join(capsys.readouterr().out.split())
    assert ("NCCL, MPI and kernels" in shown) == (command is not None and "vllm" not in plan)
    assert ("build tiny --engine" in shown) == (command is not None)
    assert f"build tiny --engine {command or ''}" in shown or not command


def test_text_has_cause_and_fix_and_hides_what_is_in_order(monkeypatch, capsys):
    machine = FakedMachine(runs={"nvidia-smi": Done(code=6, out="No devices were found\n")})
    monkeypatch.setattr(verb, "Machine", lambda: machine)
    main(["doctor"])
    shown = capsys.readouterr().out
    main(["doctor", "-v"])
    assert ("ok       Python: " in shown, "ok       Python: " in capsys.readouterr().out) == (False, True)
    parts = ["note     GPUs: nvidia-smi: No devices were found", "         fix: "]
    parts += ["  no   serve with TensorRT-LLM (in the way: ", "  yes  ask a server (generate, chat)"]
    assert [part for part in parts if part not in shown] == []


BARE = Python(executable="/usr/bin/python3", version="3.12.3", glibc="2.39")


def test_exit_codes(monkeypatch, capsys):
    bare = {"programs": {}, "runs": {}}
    cases = [
        (FakedMachine(), 3),  # no stub beside its tritonserver
        (FakedMachine(**bare, python=BARE), 0),
        (FakedMachine(**bare, python=BARE, limits={"stack": (1, 1)}), 3),
        (FakedMachine(**bare, python=replace(BARE, version="3.9.1")), 1),
    ]
    for machine, code in cases:
        monkeypatch.setattr(verb, "Machine", lambda machine=machine: machine)
        assert main(["doctor"]) == code


@pytest.mark.slow
def test_through_a_command(tmp_path, capsys):
    """A container's `exec`, as it were: another environment, and the checks travel into it."""
    through = f"env -i PATH=/nowhere HOME={tmp_path}"
    code, said = document(capsys, "--through", through, "--python", sys.executable)
    assert code in (0, 1, 3)
    assert {found["host"] for found in said["findings"]} == {through}
    assert str(tmp_path) in by_check(said)["disk"]["result"]
    code, said = document(capsys, "--through", "no-such-program exec")
    assert code == 1
    assert by_check(said)["reached"]["result"] == "no-such-program: No such file or directory"
    assert not any(by_capability(said).values())


@pytest.mark.slow
def test_hosts_of_which_one_is_here_and_one_is_not(tmp_path, on_path, monkeypatch, capsys):
    """An ssh that runs the command here, in another's place, for one host and refuses the other."""
    refused = "echo 'ssh: connect to host b port 22: Connection refused' >&2; exit 255"
    script = f'for last; do :; done\necho "$*" >> {tmp_path}/asked\ncase "$*" in *192.0.2.7*) {refused};; esac'
    on_path("ssh", f'{script}\nexec /bin/sh -c "$last"')
    monkeypatch.setenv("PATH", str(tmp_path))  # no other program is looked at
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=8\n192.0.2.6 slots=8  # documentation's addresses (RFC 5737)\n192.0.2.7\n")
    options = ["--host-file", str(hosts), "--ssh-port", "2233", "--ssh-args", "-i key", "--python", sys.executable]
    code, said = document(capsys, *options)
    asked = (tmp_path / "asked").read_text()
    assert code == 1
    assert "-o BatchMode=yes" in asked
    assert "-p 2233 -i key -- 192.0.2.6" in asked
    assert "localhost" not in asked
    reached = {found["host"]: found["level"] for found in said["findings"] if found["check"] == "reached"}
    assert reached == {"192.0.2.6": "ok", "192.0.2.7": "error"}
    assert set(said["facts"]) == {"localhost", "192.0.2.6"}
    assert [by_check(said)[check]["level"] for check in ("clock", "same-python")] == ["ok", "ok"]
    assert not by_capability(said)["launch-mpirun"]


@pytest.mark.slow
@pytest.mark.usefixtures("bare")
def test_hosts_are_named_in_text(r1, on_path, capsys):
    on_path("ssh", "echo 'u@h: Permission denied (publickey).' >&2\nexit 255")
    assert main(["doctor", str(r1), "--hosts", "192.0.2.6,localhost"]) == 1
    shown = capsys.readouterr().out
    assert "error    192.0.2.6: reached: u@h: Permission denied (publickey)." in shown
    assert "ssh-copy-id" in shown
    assert ") is not 192.0.2.6, the first of them" in shown
    assert "hosts: 2 of them: 192.0.2.6, localhost\n         the repository takes 1\n" in shown


REFUSED = [
    (["--hosts", "a,,b"], "expected names separated by commas"),
    (["--hosts", "a,-oProxyCommand=x"], "expected names separated by commas"),
    (["--hosts", "a", "--host-file", "f"], "not allowed with"),
    (["--hosts", "a", "--through", "x"], "not allowed with"),
    (["--host-file", "/no/such"], "--host-file /no/such: can't be read: No such file"),
    (["--host-file", os.devnull], "expected a host on each line, got none"),
    (["--ssh-port", "22"], "are for --hosts or --host-file"),
    (["--ssh-port", "auto", "--hosts", "a"], "from 1 to 65535"),
    (["--http-port", "8001"], "need a port each, got 8001, 8001, 8002"),
    ([""], "is a variable not set?"),
    (["--python", ""], "is a variable not set?"),
    (["--interface", ""], "is a variable not set?"),
    (["--model", "/m"], "name its folder first"),
    (["--through", ""], "--through: expected a command"),
    (["--through", "'"], "expected words as a shell has them"),
    (["--hosts", "a", "--ssh-args", '"'], "expected words as a shell has them"),
    (["/no/such/folder"], "expected a model repository"),
]


@pytest.mark.slow
def test_a_wrong_command_line_is_refused(capsys):
    for argv, said in REFUSED:
        try:
            code = main(["doctor", *argv])
        except SystemExit as ended:
            code = int(ended.code or 0)
        captured = capsys.readouterr()
        assert code == (1 if argv == ["/no/such/folder"] else 2), argv
        assert said in captured.err, argv
        assert captured.out == ""


@pytest.mark.usefixtures("bare")
def test_the_ports_are_start_sh_s(monkeypatch, capsys):
    """Doctor looks at the port of the variable that its finding says to set."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        monkeypatch.setenv("HTTP_PORT", str(taken))
        code, said = document(capsys)
        assert code in (0, 1, 3)
        assert f"{taken} (HTTP) is taken" in by_check(said)["ports"]["result"]
    monkeypatch.setenv("HTTP_PORT", "9" * 5000)
    assert main(["doctor"]) == 2
    assert "HTTP_PORT: expected a number from 1 to 65535" in capsys.readouterr().err


def test_the_page_has_every_check_capability_and_known_fault():
    page = (ROOT / "docs/doctor.md").read_text()
    section = page.partition("## Checks")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE) == [check.id for check in CHECKS]
    assert [name for name in CAPABILITIES if f"`{name}`" not in page] == []
    assert [bad.source for bad in KNOWN_BAD if bad.source not in page] == []


@pytest.mark.slow
def test_nvcc_is_expected_where_start_sh_lets_deepgemm_use_it(tmp_path):
    def uses_nvcc():
        return expected_of(folder, check_repository(folder, CheckOptions()), None).uses_nvcc

    for profile, is_used in (("latency", False), ("throughput", True)):
        folder = tmp_path / profile
        assert main(["build", "deepseek-r1", "--gpu", "h200", "--profile", profile, "--output", str(folder)]) == 0
        assert uses_nvcc() == is_used
    script = folder / "start.sh"
    script.write_text(script.read_text().replace("TRTLLM_DG_JIT_USE_NVCC:-1", "TRTLLM_DG_JIT_USE_NVCC:-0"))
    assert not uses_nvcc()
