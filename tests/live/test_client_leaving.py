"""However a caller goes away, the server hears of it, stops working for him and counts a cancelled request."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deepseek_triton_client import Client, DeadlineExceeded, DeepseekTritonError, Timeouts
from deepseek_triton_tools.server.server_process import ServerProcess
from support.client_kinds import ClientKind
from support.scraping import published, settled, value
from support.servers import url
from support.wire import LONG_ANSWER

LONG: dict[str, Any] = {"max_tokens": LONG_ANSWER, "ignore_eos": True}


@contextlib.contextmanager
def one_is_cancelled(server: ServerProcess) -> Iterator[None]:
    """In the block or at once afterwards: the request would take 25 s, and be counted as finished by its length."""
    before = _cancelled(settled(server, _idle))
    yield
    published(server, lambda series: _cancelled(series) == before + 1 and _idle(series))


def _idle(series: Any) -> bool:
    return value(series, "inflight_sequences") == 0


def _busy(series: Any) -> bool:
    return value(series, "inflight_sequences") == 1


def _cancelled(series: Any) -> float:
    return value(series, "requests_finished_total", outcome="E_CANCELLED")


@pytest.fixture
def client(client_kind: ClientKind, small_server: ServerProcess) -> Iterator[Any]:
    """The client stays open: what ends a request is not its closing."""
    with client_kind.client(small_server, model_version="1") as opened:
        yield opened


def leave_at_once(client: Any) -> None:
    with client.stream("x", **LONG):
        pass


def leave_after_a_chunk(client: Any) -> None:
    with client.stream_chat("x", **LONG) as stream:
        next(iter(stream))


def close_the_stream(client: Any) -> None:
    with client.stream("x", **LONG) as stream:
        next(iter(stream))
        stream.close()
        with pytest.raises(DeepseekTritonError, match="closed before its end"):
            list(stream)


def fail_in_the_block(client: Any) -> None:
    with contextlib.suppress(ZeroDivisionError), client.stream("x", **LONG) as stream:
        next(iter(stream))
        raise ZeroDivisionError


def run_out_of_time_whole(client: Any) -> None:
    with pytest.raises(DeadlineExceeded, match="total of"):
        client.generate("x", timeouts=Timeouts(total=0.3), **LONG)


def run_out_of_time_between_tokens(client: Any) -> None:
    fields = {**LONG, "stream_interval_ms": 700, "timeouts": Timeouts(between_tokens=0.1)}
    with client.stream("x", **fields) as stream:
        with pytest.raises(DeadlineExceeded, match=r"timeouts\.between_tokens of 0\.1 s ran out") as caught:
            stream.completion()
        assert stream.text
        assert caught.value.request_id == stream.request_id


def leave_many(client: Any) -> None:
    answers = client.generate_many([{"prompt": "x", **LONG}, "y"], concurrency=1, timeouts=Timeouts(total=0.4))
    with pytest.raises(DeadlineExceeded):
        next(answers)


WAYS: list[Callable[[Any], None]] = [
    leave_at_once,
    leave_after_a_chunk,
    close_the_stream,
    fail_in_the_block,
    run_out_of_time_whole,
    run_out_of_time_between_tokens,
    leave_many,
]


@pytest.mark.parametrize("leave", WAYS, ids=lambda way: way.__name__)
def test_the_server_stops_for_whom_has_left(small_server, client, leave):
    with one_is_cancelled(small_server):
        leave(client)

    assert client.generate("next", max_tokens=2).num_output_tokens == 2


def test_a_closed_client_leaves_its_streams(client_kind, small_server):
    with (
        one_is_cancelled(small_server),
        client_kind.client(small_server, model_version="1") as client,
        client.stream("x", **LONG) as stream,
    ):
        next(iter(stream))
        client.close()
        with pytest.raises(DeepseekTritonError):
            stream.completion()


@pytest.mark.parametrize("client_kind", [("http", "async"), ("grpc", "async")], ids=" ".join, indirect=True)
@pytest.mark.parametrize("verb", ["generate", "stream", "generate_many"])
def test_a_cancelled_task_is_a_cancelled_request(client_kind, small_server, verb):
    with client_kind.client(small_server, model_version="1") as driven:
        with one_is_cancelled(small_server):
            task = client_kind.loop.start(_ask(driven.client, verb))
            published(small_server, _busy)
            task.cancel()
        assert task.cancelled()
        assert driven.generate("next", max_tokens=2).num_output_tokens == 2


async def _ask(client: Any, verb: str) -> None:
    if verb == "generate_many":
        async with contextlib.aclosing(client.generate_many([{"prompt": "x", **LONG}])) as answers:
            await anext(answers)
    elif verb == "stream":
        async with client.stream("x", **LONG) as stream:
            await stream.completion()
    else:
        await client.generate("x", **LONG)


def test_leaving_a_loop_over_many_cancels_what_is_under_way(client_kind, simulated_server):
    """One answer has come, one request runs and two wait for the one place: the next to ask has it at once."""
    requests = [{"prompt": "short", "max_tokens": 2}, *[{"prompt": "long", **LONG}] * 3]
    with client_kind.client(simulated_server) as client:
        answers = client.generate_many(requests, concurrency=4)
        assert next(answers).num_output_tokens == 2
        answers.close()

        assert client.generate("next", max_tokens=2, timeouts=Timeouts(total=15)).num_output_tokens == 2


# --- An interrupt, in a process of its own ---

CHILD = """
import asyncio, sys
from deepseek_triton_client import AsyncClient, Client

url, style = sys.argv[1:]
asked = dict(prompt="x", max_tokens=4000, ignore_eos=True)

def run(client, verb):
    if verb == "stream":
        with client.stream(**asked) as stream:
            return list(stream)
    return list(client.generate_many([asked])) if verb == "generate_many" else client.generate(**asked)

async def run_async(verb):
    client = AsyncClient(url, model_version="1")
    if verb == "stream":
        async with client.stream(**asked) as stream:
            return [chunk async for chunk in stream]
    if verb == "generate_many":
        return [answer async for answer in client.generate_many([asked])]
    return await client.generate(**asked)

client = Client(url, model_version="1")
for verb in ("generate", "stream", "generate_many"):
    sys.stdin.readline()
    try:
        run(client, verb) if style == "sync" else asyncio.run(run_async(verb))
        print("not interrupted", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
sys.stdin.readline()
"""


def test_an_interrupt_cancels(client_kind, small_server):
    """The process lives on, and so does its client: that the server hears of it is the interrupt's doing."""
    arguments = [sys.executable, "-c", CHILD, client_kind.url(small_server), client_kind.style]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin
        assert child.stdout
        for _ in range(3):
            with one_is_cancelled(small_server):
                child.stdin.write("go on\n")
                child.stdin.flush()
                published(small_server, _busy)
                child.send_signal(signal.SIGINT)
                assert child.stdout.readline() == "interrupted\n"
        _, noise = child.communicate(timeout=30)

    assert (child.returncode, noise) == (0, "")


# --- Leaving is not always cancelling ---


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_stream_left_at_its_last_chunk_has_ended(small_server, scheme):
    """Nothing is cancelled in the moment of the last response, which can leave Triton unable to exit."""
    before = _cancelled(settled(small_server, _idle))
    with Client(url(small_server, scheme), model_version="1") as client:
        for _ in range(100):
            with client.stream("x", max_tokens=1, ignore_eos=True) as stream:
                for chunk in stream:
                    if chunk.finish_reason:
                        break

    assert _cancelled(settled(small_server, _idle)) == before
