"""What is left on a GPU when a part of a launch is killed: with the supervisor, and without.

python tests/bench/orphans.py [--ranks 2]      # takes GPUs, torch, mpirun and nvidia-smi; prints JSON lines

Each rank holds GPU memory in two processes, one of them in a session of its own, as an engine's workers may be.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SUPERVISE = Path(__file__).resolve().parents[2] / "model_repository/tensorrt_llm/1/supervise.py"
MARK = "DEEPSEEK_TRITON_LAUNCH"
GONE_WITHIN_S = 60
FREE_MIB = 50
"""By which the memory in use wavers by itself."""
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--tag-output"]
HOLDER = """\
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
import torch
torch.cuda.set_device(int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")) % torch.cuda.device_count())
memory = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("holding", flush=True)
time.sleep(600)
"""
"""A rank, and a grandchild of it that init or a subreaper inherits."""


def used_mib() -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.check_output(query, text=True).split()))


def marked(launch: str) -> dict[int, str]:
    """The launch's processes that run, and their command lines; looked up independently of the supervisor's code."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if f"{MARK}={launch}".encode() in variables and state not in "ZX":
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue  # gone meanwhile, or another user's
    return found


def start(launch: str, command: list[str], num_holders: int, log: Path) -> subprocess.Popen[bytes]:
    """:raises RuntimeError: when they don't hold their memory within 90 s."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, env={**os.environ, MARK: launch}, stdout=output, stderr=output)
    end = time.monotonic() + 90
    while log.read_text().count("holding") < num_holders:
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise RuntimeError(f"the ranks don't start: {log.read_text()[-1000:]}")
        time.sleep(0.2)
    return process


def supervised(num_ranks: int, port: int) -> list[str]:
    ports = ["--http-port", str(port), "--grpc-port", str(port + 1), "--metrics-port", str(port + 2)]
    options = ["--ranks", str(num_ranks), "--ready-within", "0", "--exit-timeout", "3", *ports]
    rank = [sys.executable, str(SUPERVISE), "rank", "--", sys.executable, "-c", HOLDER]
    return [sys.executable, str(SUPERVISE), "run", *options, "--", *MPIRUN, "-n", str(num_ranks), *rank]


def kill_one(kind: Callable[[str], bool]) -> Callable[[int, dict[int, str]], None]:
    def kill(run: int, processes: dict[int, str]) -> None:
        os.kill(min(pid for pid, command in processes.items() if kind(command)), signal.SIGKILL)

    return kill


CASES: dict[str, Callable[[int, dict[int, str]], None]] = {
    "kill -9 of the supervisor": lambda run, processes: os.kill(run, signal.SIGKILL),
    "kill -9 of mpirun": kill_one(lambda command: command.startswith("mpirun ")),
    "kill -9 of a rank's guard": kill_one(
        lambda command: " rank -- " in command and "supervise.py run" not in command and "mpirun" not in command
    ),
    "kill -9 of a process with GPU memory": kill_one(
        lambda command: "torch.ones" in command and "supervise.py" not in command
    ),
    "SIGTERM": lambda run, processes: os.kill(run, signal.SIGTERM),
}


def measure(case: str, number: int, num_ranks: int, idle_mib: int, log: Path) -> dict[str, object]:
    launch = f"bec{number:05x}"
    process = start(launch, supervised(num_ranks, 21000 + 3 * number), 2 * num_ranks, log)
    held, processes = used_mib(), marked(launch)
    began = time.monotonic()
    CASES[case](process.pid, processes)
    while (marked(launch) or used_mib() > idle_mib + FREE_MIB) and time.monotonic() - began < GONE_WITHIN_S:
        time.sleep(0.1)
    took_s = round(time.monotonic() - began, 2)
    left = {"processes_left": len(marked(launch)), "mib_after": used_mib()}
    code = process.wait(GONE_WITHIN_S)
    return {"case": case, "processes": len(processes), "mib_before": held, **left, "gone_s": took_s, "code": code}


def measure_without(num_ranks: int, log: Path) -> dict[str, object]:
    launch = "bec0ffff"
    command = [*MPIRUN, "-n", str(num_ranks), sys.executable, "-c", HOLDER]
    process = start(launch, command, 2 * num_ranks, log)
    process.kill()
    process.wait()
    time.sleep(10)
    left, held = marked(launch), used_mib()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    case = "without a supervisor: kill -9 of mpirun, 10 s later"
    return {"case": case, "processes_left": len(left), "mib_after": held}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    num_ranks = parser.parse_args().ranks
    idle_mib = used_mib()
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(CASES):
            print(json.dumps(measure(case, number, num_ranks, idle_mib, Path(folder, f"{number}.log"))), flush=True)
        print(json.dumps(measure_without(num_ranks, Path(folder, "without.log"))))


if __name__ == "__main__":
    main()
