"""One server's answers over real sockets: events in any pieces, errors, connections that are kept, stops."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton_tools.gateway.triton import triton_server
from deepseek_triton_tools.gateway.triton.call import Call, Part, UpstreamError
from deepseek_triton_tools.gateway.triton.server_events import EventReader
from deepseek_triton_tools.gateway.triton.triton_server import TritonServer
from support.http_server import HttpServer

CALL = Call({"text_input": "Hi", "streaming": True}, "request-1")
EVENTS = [
    {"text_output": "Grüße, 你好 \n\n", "finish_reason": "None", "output_ids": 7, "num_output_tokens": 1},
    {
        "sequence_index": [1, 0],
        "text_output": ["a", "b"],
        "num_output_tokens": [2, 1],
        "output_ids": [1, 2, 3],
        "finish_reason": ["stop", "None"],
        "model_name": "tensorrt_llm",
    },
    {"reasoning_output": "hm", "finish_reason": "length", "stop_reason": "None", "num_input_tokens": 5},
]
STREAM = b"".join(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n" for event in EVENTS)


@pytest.fixture
def server() -> Iterator[HttpServer]:
    server = HttpServer()
    yield server
    server.stop()


def run(server: HttpServer, body: Callable[[TritonServer], Awaitable[None]]) -> None:
    async def in_loop() -> None:
        triton = TritonServer(server.url, "tensorrt_llm", headers={"key": "secret"})
        try:
            await body(triton)
        finally:
            await triton.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(in_loop())


async def answer_of(triton: TritonServer) -> list[Part]:
    return [part async for parts in triton.generate(CALL) for part in parts]


def test_events_become_parts() -> None:
    assert EventReader().feed(STREAM) == [
        Part(text="Grüße, 你好 \n\n", output_ids=[7], num_output_tokens=1),
        Part(sequence=1, text="a", num_output_tokens=2, output_ids=[1, 2], finish_reason="stop"),
        Part(sequence=0, text="b", num_output_tokens=1, output_ids=[3]),
        Part(reasoning="hm", finish_reason="length", num_input_tokens=5),
    ]


@given(st.sets(st.integers(1, len(STREAM) - 1)))
def test_any_cut_gives_the_same_parts(cuts: set[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    reader = EventReader()
    found = [part for begin, end in itertools.pairwise(edges) for part in reader.feed(STREAM[begin:end])]
    assert found == EventReader().feed(STREAM)


@pytest.mark.parametrize("document", [b"[]", b"{", b'{"num_input_tokens": "x"}', b"\xff"], ids=repr)
def test_an_event_that_is_not_the_models(document: bytes) -> None:
    with pytest.raises(UpstreamError, match="not the model's"):
        EventReader().feed(b"data: " + document + b"\n\n")


def test_an_answer_and_the_connection_that_is_kept(server: HttpServer) -> None:
    server.script(server.pieces(STREAM[:40], STREAM[40:]), server.pieces(STREAM))

    async def body(triton: TritonServer) -> None:
        assert await answer_of(triton) == await answer_of(triton) == EventReader().feed(STREAM)

    run(server, body)
    assert (
        server.requests
        == [
            ("POST", "/v2/models/tensorrt_llm/generate_stream", {"id": "request-1", **CALL.inputs}),
        ]
        * 2
    )
    assert server.headers[0]["key"] == "secret"
    assert server.num_connections == 1


@pytest.mark.parametrize(
    ("status", "body", "code", "unprocessed"),
    [
        (400, b'{"error":"[E_INVALID_ARGUMENT] top_p: no"}', "E_INVALID_ARGUMENT", False),
        (400, b'data: {"error":"[E_PROMPT_TOO_LONG] no"}\n\n', "E_PROMPT_TOO_LONG", False),
        (503, b'{"error":"[E_OVERLOADED] full"}', "E_OVERLOADED", True),
        (400, b'{"error":"Request for unknown model: \'x\' is not found"}', "E_UNAVAILABLE", True),
        (502, b"<html>", "", True),
        (500, b"<html>", "", False),
        (401, b"who?", "", True),
    ],
)
def test_refusals(server: HttpServer, status: int, body: bytes, code: str, unprocessed: bool) -> None:
    server.script(server.body(status, body))

    async def ask(triton: TritonServer) -> None:
        with pytest.raises(UpstreamError) as caught:
            await answer_of(triton)
        assert (caught.value.code, caught.value.unprocessed) == (code, unprocessed)

    run(server, ask)
    assert len(server.requests) == 1, "a refused request needs no stop"


def test_an_error_among_the_events(server: HttpServer) -> None:
    server.script(server.events({"text_output": "a"}, {"error": "[E_INTERNAL] the engine died"}))

    async def ask(triton: TritonServer) -> None:
        with pytest.raises(UpstreamError, match="the engine died"):
            await answer_of(triton)

    run(server, ask)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "sent", [b"", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ndata", b"SSH-2.0\r\n"]
)
def test_connections_that_are_lost(server: HttpServer, sent: bytes) -> None:
    server.script(server.raw(sent))

    async def ask(triton: TritonServer) -> None:
        with pytest.raises(UpstreamError) as caught:
            await answer_of(triton)
        assert caught.value.unprocessed

    run(server, ask)


def test_nobody_listens() -> None:
    async def ask() -> None:
        with pytest.raises(UpstreamError, match="can't connect"):
            await answer_of(TritonServer("http://127.0.0.1:1", "tensorrt_llm"))

    asyncio.run(ask())


def test_an_answer_that_nobody_wants_is_stopped_by_its_id(server: HttpServer) -> None:
    stopped: list[Any] = []

    def stop(handler: Any) -> None:
        stopped.append(server.requests[-1][2])
        server.release.set()
        server.events({"text_output": ""})(handler)

    def until_stopped(handler: Any) -> None:
        handler.start_chunked()
        handler.send_event({"text_output": "a"})
        assert server.release.wait(30)
        handler.send_event({"finish_reason": "cancelled"})
        handler.send_chunk(b"")

    server.script(until_stopped, stop, server.events({"text_output": "b"}))

    async def leave(triton: TritonServer) -> None:
        async with aclosing(triton.generate(CALL)) as answer:
            assert await anext(answer) == [Part(text="a", output_ids=[])]
        await triton.close()
        assert [part.text for part in await answer_of(triton)] == ["b"]

    run(server, leave)
    assert stopped == [{"id": "request-1", "text_input": "", "stop": True}]


def test_a_client_that_leaves_before_the_first_event_stops_the_work(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_server, "_STOP_S", 0.2)
    server.script(server.silence, server.events({"text_output": ""}))

    async def leave(triton: TritonServer) -> None:
        asking = asyncio.ensure_future(answer_of(triton))
        await asyncio.to_thread(server.asked.wait, 30)
        asking.cancel()
        await asyncio.wait([asking])
        await triton.close()
        assert await asyncio.to_thread(server.gone.wait, 30)

    run(server, leave)
    assert [inputs.get("stop") for _, _, inputs in server.requests] == [None, True]
