"""vLLM inside a real tritonserver: its processes, when a model is unloaded, one is killed, or the server drains."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from deepseek_triton_client import Client, Retries, ServerUnavailable
from deepseek_triton_tools.server.server_process import ServerProcess
from support.server_processes import session_members
from support.vllm_arguments import filler_arguments
from support.vllm_repository import vllm_repository
from support.waiting import wait_for

STEP_S = 0.02
LONG_ANSWER = 150
EXPLICIT = ("--model-control-mode=explicit", "--load-model=tensorrt_llm")
FATAL_EXIT_CODE = 137


@contextmanager
def serving_vllm(folder: Path, *, server_args: tuple[str, ...] = (), **ours: object) -> Iterator[ServerProcess]:
    repository = vllm_repository(folder, ours=ours, **filler_arguments(step_s=STEP_S))
    with ServerProcess.serving(repository, server_args=server_args) as server:
        yield server


def processes(server: ServerProcess, title: str) -> list[int]:
    """Ids of the processes of the server's session whose command line holds `title`."""
    return [pid for pid in session_members(server.pid) if title in command_line(pid)]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def stub_of(server: ServerProcess) -> int:
    """The guard has the same command line, and a name of its own."""
    names = {Path(f"/proc/{pid}/comm").read_text().strip(): pid for pid in session_members(server.pid)}
    return names["triton_python_b"]


def test_a_model_is_unloaded_and_loaded_again_and_a_killed_core_ends_the_server(tmp_path: Path) -> None:
    with serving_vllm(tmp_path / "repository", server_args=EXPLICIT, fatal_grace_s=0) as server:
        assert len(processes(server, "EngineCore")) == 1
        models = f"{server.http_url}/v2/repository/models/tensorrt_llm"
        httpx.post(f"{models}/unload", timeout=60).raise_for_status()
        wait_for(lambda: not processes(server, "EngineCore"))
        assert httpx.get(f"{server.http_url}/v2/health/live", timeout=60).status_code == 200

        httpx.post(f"{models}/load", timeout=240).raise_for_status()
        (core,) = processes(server, "EngineCore")
        with Client(server.http_url, retries=Retries(attempts=1)) as client:
            assert client.generate("hello", max_tokens=3, ignore_eos=True).num_output_tokens == 3
            with client.stream("hello", max_tokens=4000, ignore_eos=True) as stream:
                chunks = iter(stream)
                next(chunks)
                os.kill(core, signal.SIGKILL)
                with pytest.raises(ServerUnavailable) as caught:
                    list(chunks)
        assert caught.value.code == "E_UNAVAILABLE"
        assert server.wait() == FATAL_EXIT_CODE
    assert "engine core has died" in str(server.failure())


def test_a_killed_stub_leaves_no_engine_core(tmp_path: Path) -> None:
    with serving_vllm(tmp_path / "a folder with blanks") as server:
        (core,) = processes(server, "EngineCore")
        os.kill(stub_of(server), signal.SIGKILL)

        assert server.wait() == 128 + signal.SIGKILL
        wait_for(lambda: not os.path.exists(f"/proc/{core}"))


def test_a_signal_to_every_process_lets_open_requests_end(tmp_path: Path) -> None:
    """The stub's locale is C, in which torch can't be imported; the model is ready all the same."""
    ends: list[tuple[str | None, int | None]] = []
    with serving_vllm(tmp_path / "repository") as server:
        begun = threading.Semaphore(0)

        def ask() -> None:
            with (
                Client(server.http_url) as client,  # closed with the answer: Triton waits for open connections
                client.stream("hello", max_tokens=LONG_ANSWER, ignore_eos=True) as stream,
            ):
                chunks = iter(stream)
                last = next(chunks)
                begun.release()
                for chunk in chunks:
                    last = chunk
            ends.append((last.finish_reason, last.num_output_tokens))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert begun.acquire(timeout=60)
        os.killpg(server.pid, signal.SIGTERM)
        for thread in threads:
            thread.join(60)

        assert server.wait() == 0, "\n".join(server.log_tail[-60:])
        assert not processes(server, "EngineCore")
    assert ends == [("length", LONG_ANSWER)] * 4
