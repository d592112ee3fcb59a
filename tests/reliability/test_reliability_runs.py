"""The programs of docs/reliability.md, run shortly: a soak of each engine, and a few faults."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reliability.fault_table import FAULTS
from reliability.front_end_queues import LONG_BYTES, lengthen_queues

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent
PAGE = (FOLDER.parents[1] / "docs" / "reliability.md").read_text(encoding="utf-8")
QUICK = ["clients that reset", "gateways killed"]


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def may_have_long_queues() -> bool:
    """Tell whether this user may make the queues of its child processes long."""
    program = "import socket; queue = socket.socketpair(); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        told = lengthen_queues(process.pid)
        process.communicate(b"\n")
    return told >= LONG_BYTES


@pytest.mark.parametrize(
    ("engine", "jobs"),
    [
        ("simulated", 100),
        pytest.param("simulated", 3000, marks=pytest.mark.nightly),
        pytest.param("trtllm", 3000, marks=pytest.mark.nightly),
    ],
)
def test_a_short_soak_has_no_violation(tmp_path: Path, engine: str, jobs: int) -> None:
    if not may_have_long_queues():
        pytest.skip("this user can't make the queues of Triton's front end long; net.core.wmem_default=16777216 would")
    done = run("soak.py", "--jobs", str(jobs), "--engine", engine, "--seed", "7", "--out", str(tmp_path / "out"))

    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 violations" in done.stdout


def may_have_namespaces() -> bool:
    command = ["unshare", "--mount", "--net", "sh", "-c", "ip link set lo up && mount -t tmpfs tmpfs /mnt"]
    return all(map(shutil.which, ("unshare", "ip"))) and not subprocess.run(command, capture_output=True).returncode


@pytest.mark.skipif(not may_have_namespaces(), reason="no namespaces with mounts and a network of their own here")
@pytest.mark.parametrize("names", [QUICK, pytest.param([], marks=pytest.mark.nightly)], ids=["two", "all"])
def test_faults_have_no_violation(tmp_path: Path, names: list[str]) -> None:
    number = str(len(names or FAULTS))
    only = ("--only", *names) if names else ()
    done = run("faults.py", "--injections", number, "--seed", "7", *only, "--out", str(tmp_path / "out"))

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{number} injections, " in done.stdout
    assert ", 0 violations" in done.stdout


def test_the_page_has_every_fault_and_its_promise() -> None:
    rows = {line.split("|")[1].strip(): line for line in PAGE.splitlines() if line.startswith("| ")}

    missing = [fault.name for fault in FAULTS if fault.promise not in rows.get(fault.name, "")]
    assert missing == []
