"""Triton inside another program, as in its OpenAI front end: the process is a Python, and no tritonserver runs."""

import os
import re
import signal
import subprocess
import time

import pytest

from support.in_process import in_process
from support.server_processes import assert_gone, children_of
from support.servers import MODEL_KILLED, twin

PRESET = "h200x8-r1-fp8-max-throughput"
LONG_ANSWER = 4000  # about 25 s of the twin's pace


AS_INIT = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def serving(folder, before=(), **ours):
    repository = twin(folder / "repository", "--preset", PRESET, **ours)
    return in_process(repository, folder / "log", before)


def test_a_model_process_that_dies_ends_the_program(tmp_path):
    with serving(tmp_path) as server:
        stub, guard = children_of(server.process.pid)
        os.kill(stub, signal.SIGKILL)

        assert -server.wait() in MODEL_KILLED
        assert_gone(stub, guard)
        assert re.search("the model's process has died|lock_exception", server.log())


def test_a_model_process_that_dies_ends_process_1_of_a_container_though_it_waits_for_open_requests(tmp_path):
    """There the kernel ignores a SIGKILL, and a SIGTERM alone makes the program wait for ever."""
    if subprocess.run([*AS_INIT, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no process can be given pids of its own here")
    with serving(tmp_path, AS_INIT) as server:
        server.ask(text_input="nobody goes on with it", max_tokens=LONG_ANSWER, streaming=True)
        assert not server.answer()["final"]
        os.kill(children_of(server.process.pid)[0], signal.SIGKILL)

        assert server.wait() != 0


def test_a_program_that_dies_leaves_nothing_behind(tmp_path):
    with serving(tmp_path) as server:
        stub, guard = children_of(server.process.pid)
        server.process.kill()

        assert_gone(stub, guard)


def test_a_dead_engine_ends_the_program(tmp_path):
    with serving(tmp_path, engine_options={"fail_after": 20}, fatal_grace_s=0) as server:
        server.ask(text_input="the one that sees it happen", max_tokens=100)

        assert server.answer()["error"].startswith("[E_UNAVAILABLE] ")
        assert server.wait() == -signal.SIGKILL


def test_a_program_that_is_told_to_exit_lets_open_requests_end(tmp_path):
    with serving(tmp_path, drain_s=1) as server:
        server.ask(text_input="in time", max_tokens=3)
        assert server.answer()["finish_reason"] == "length"
        time.sleep(4)  # it has listened for long enough to be known by it
        server.ask(text_input="too long", max_tokens=LONG_ANSWER)
        server.process.terminate()

        answer = server.answer()
        assert (answer["final"], answer["finish_reason"]) == (True, "cancelled")
        assert server.wait() == 0
        assert "the server is exiting: open requests have 1 s" in server.log()
        assert "deepseek_backend WARNING: not ready" not in server.log()


def test_a_program_at_work_is_not_taken_for_one_that_exits(tmp_path):
    """Its main thread sleeps again and again, which tritonserver does only when it exits."""
    with serving(tmp_path) as server:
        for _ in range(5):
            server.ask(text_input="at work", max_tokens=20)
            assert server.answer()["finish_reason"] == "length"
            time.sleep(1)
