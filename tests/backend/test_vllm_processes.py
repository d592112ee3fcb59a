"""Processes of vLLM's, as the engine starts them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import wait_for

PROGRAM = """
import multiprocessing, pathlib, sys, time
from multiprocessing import shared_memory

from deepseek_backend.engines.vllm.vllm_start import own_process_group


def core(name, registered):
    memory = shared_memory.SharedMemory(name=name, create=True, size=1024)
    pathlib.Path(registered).touch()
    time.sleep(600)


if __name__ == "__main__":
    with own_process_group():
        multiprocessing.get_context("spawn").Process(target=core, args=sys.argv[1:]).start()
    time.sleep(600)
"""


@pytest.mark.slow
def test_no_shared_memory_is_left_after_a_crash_and_the_end_of_the_group(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    segment = Path(f"/dev/shm/deepseek_triton_test_{os.getpid()}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    registered = tmp_path / "registered"
    stub = subprocess.Popen([sys.executable, program, segment.name, registered], env=environment)
    try:
        # Python tells the resource tracker of a segment after it has made it.
        wait_for(registered.exists, lambda: "no segment was made")

        stub.kill()
        os.killpg(stub.pid, signal.SIGKILL)  # what the guard process does then

        wait_for(lambda: not segment.exists(), lambda: f"{segment} is left")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(stub.pid, signal.SIGKILL)
        stub.kill()
        stub.wait()
        segment.unlink(missing_ok=True)
