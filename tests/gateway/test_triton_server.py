"""The way to one Triton server, over real sockets: what comes of its answers, however they are cut, stall or break."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing, suppress
from typing import Any

import pytest
import uvloop

from deepseek_backend.service import STOPPING
from deepseek_triton_tools.gateway.triton import triton_server
from deepseek_triton_tools.gateway.triton.call import Call, Part, UpstreamError
from deepseek_triton_tools.gateway.triton.triton_connection import ConnectionFailed, connect, request_head
from deepseek_triton_tools.gateway.triton.triton_server import TritonServer
from support.raw_triton import RawTriton, Script, Wire, answer, event, refusal

EXITING = "the server is exiting; send the request to another one"
HELLO = (event(text_output="Hé"), event(text_output="llo"), event(finish_reason="stop", num_output_tokens=2))


@pytest.fixture
def triton() -> Iterator[RawTriton]:
    with RawTriton().serving() as triton:
        yield triton


def run(
    triton: RawTriton, body: Callable[[TritonServer], Coroutine[Any, Any, None]], headers: dict[str, str] | None = None
) -> None:
    async def in_loop() -> None:
        server = TritonServer(triton.url, "m", headers=headers)
        try:
            await body(server)
        finally:
            await server.close()

    asyncio.run(in_loop())


def call(name: str = "one", **inputs: object) -> Call:
    return Call({"text_input": "Hi", **inputs}, name)


async def parts(server: TritonServer, asked: Call | None = None) -> list[Part]:
    return [part async for some in server.generate(asked or call()) for part in some]


def text(found: list[Part]) -> str:
    return "".join(part.text for part in found)


@pytest.mark.parametrize("cuts", [0, 1, 2, 3, 7, 64])
def test_an_answer_is_the_same_however_it_is_cut(triton: RawTriton, cuts: int) -> None:
    async def body(server: TritonServer) -> None:
        triton.script = answer(*HELLO, cuts=cuts)
        found = await parts(server)
        assert (text(found), found[-1].finish_reason, found[-1].num_output_tokens) == ("Héllo", "stop", 2)
        assert triton.asked == [{"id": "one", "text_input": "Hi"}]
        assert triton.heads[0].startswith("POST /v2/models/m/generate_stream HTTP/1.1")
        assert "triton-key: secret" in triton.heads[0]

    run(triton, body, {"triton-key": "secret"})


def test_sequences_of_one_response_are_parts_of_their_own(triton: RawTriton) -> None:
    async def body(server: TritonServer) -> None:
        triton.script = answer(
            event(
                text_output=["a", "b"],
                sequence_index=[1, 0],
                finish_reason=["None", "length"],
                stop_reason=["None", "None"],
                num_output_tokens=[2, 1],
                output_ids=[7, 8, 9],
            )
        )
        found = await parts(server)
        assert [(part.sequence, part.text, part.finish_reason, part.num_output_tokens) for part in found] == [
            (1, "a", "", 2),
            (0, "b", "length", 1),
        ]

    run(triton, body)


def lost_before(wire: Wire) -> None:
    wire.reset()


def lost_in_the_middle(wire: Wire) -> None:
    wire.head()
    wire.chunk(HELLO[0])
    wire.close()


def not_http(wire: Wire) -> None:
    wire.send(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")


def page(status: int) -> Script:
    """The error of a proxy that knows no JSON."""

    def write(wire: Wire) -> None:
        wire.head(status)
        wire.chunk(b"<html>")
        wire.chunk(b"")

    return write


FAILURES: list[tuple[Script, str, str, bool, bool]] = [
    (lost_before, "the connection was lost|closed the connection", "", True, True),
    (lost_in_the_middle, "the server closed the connection", "", True, True),
    (not_http, "is not HTTP", "", True, True),
    (refusal(503, "[E_OVERLOADED] full"), "^full$", "E_OVERLOADED", True, False),
    (refusal(503, "[E_UNAVAILABLE] the engine died"), "^the engine died$", "E_UNAVAILABLE", True, True),
    (refusal(503, f"[E_UNAVAILABLE] {STOPPING}"), "being stopped", "E_UNAVAILABLE", True, False),
    (refusal(503, f"[E_UNAVAILABLE] {EXITING}"), "exiting", "E_UNAVAILABLE", True, False),
    (refusal(400, "[E_INVALID_ARGUMENT] top_p: 2"), "^top_p: 2$", "E_INVALID_ARGUMENT", False, False),
    (refusal(400, "Request for unknown model: 'm' is not found"), "unknown model", "E_UNAVAILABLE", True, False),
    (refusal(400, "Stub process 'm_0_0' is not healthy."), "Stub process", "E_UNAVAILABLE", True, True),
    (
        refusal(500, "Failed to process the request(s), message: Stub process 'm_0_0' is not healthy."),
        "Stub process",
        "E_UNAVAILABLE",
        True,
        True,
    ),
    (refusal(502, "a proxy's"), "^a proxy's$", "", True, True),
    (refusal(404, "no such model"), "^no such model$", "", True, False),
    (refusal(403, "restricted"), "the gateway was refused: restricted", "", True, False),
    (page(403), "the gateway was refused: .* HTTP 403: '<html>'", "", True, False),
    (page(502), "HTTP 502: '<html>'", "", True, True),
    (refusal(400, "unexpected inference input 'x'"), "unexpected", "", False, False),
    (refusal(429, "a proxy's limit"), "a proxy's limit", "E_OVERLOADED", True, False),
    (refusal(500, "[E_INTERNAL] the engine failed"), "^the engine failed$", "E_INTERNAL", False, False),
    (answer(event(error="[E_CANCELLED] gone")), "^gone$", "E_CANCELLED", False, False),
    (answer(b"data: {]\n\n"), "not the model's", "", False, False),
    (answer(b'data: {"text_output": 5}\n\n'), "not the model's", "", False, False),
]


@pytest.mark.parametrize(("script", "message", "code", "unprocessed", "died"), FAILURES)
def test_a_failure_is_told(
    triton: RawTriton, script: Script, message: str, code: str, unprocessed: bool, died: bool
) -> None:
    async def body(server: TritonServer) -> None:
        triton.script = script
        with pytest.raises(UpstreamError, match=message) as raised:
            await parts(server)
        assert (raised.value.code, raised.value.unprocessed, raised.value.died) == (code, unprocessed, died)
        triton.script = answer(*HELLO)
        assert text(await parts(server)) == "Héllo"

    run(triton, body)


@pytest.mark.parametrize("body_of_answer", [b"data: nonsense\n\n", b"", b"data: 5\n\n"])
def test_a_task_with_a_strange_answer_is_an_upstream_error(triton: RawTriton, body_of_answer: bytes) -> None:
    async def body(server: TritonServer) -> None:
        triton.script = answer(body_of_answer)
        with pytest.raises(UpstreamError, match="not the model's"):
            await server.ask(call(task="tokenize"))

    run(triton, body)


def test_the_text_before_an_error_comes_first(triton: RawTriton) -> None:
    async def body(server: TritonServer) -> None:
        triton.script = answer(HELLO[0] + event(error="[E_INTERNAL] broken"))
        found: list[Part] = []

        async def read() -> None:
            async for some in server.generate(call()):
                found.extend(some)

        with pytest.raises(UpstreamError, match="broken"):
            await read()
        assert text(found) == "Hé"

    run(triton, body)


def test_a_connection_with_an_answer_left_in_it_is_not_used_again(triton: RawTriton) -> None:
    async def body(server: TritonServer) -> None:
        triton.script = answer(*HELLO)
        connection = await connect(triton.url, None)
        asked = b'{"id":"one","text_input":"Hi"}'
        head = request_head("POST", triton.url, "/v2/models/m/generate_stream", ())
        connection.send(b"%bContent-Length: %d\r\n\r\n%b" % (head, len(asked), asked))
        while not connection.keep_alive:
            await asyncio.sleep(0.01)
        assert not connection.usable
        await connection.read_all()
        assert connection.usable
        connection.close()

    run(triton, body)


def test_a_server_without_tls_is_asked_by_https() -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.close()

    async def body() -> None:
        async with await asyncio.start_server(close, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(ConnectionFailed, match="closed at once; is it HTTPS that is served there"):
                await connect(f"https://127.0.0.1:{port}", ssl.create_default_context())

    asyncio.run(body())


@pytest.mark.parametrize("host", ["a" * 64, "a..b"])
def test_a_name_that_no_host_can_have(host: str) -> None:
    async def body() -> None:
        with pytest.raises(UpstreamError, match="can't connect"):
            await TritonServer(f"http://{host}:1", "m").ask(call())

    asyncio.run(body())


def test_nobody_listens() -> None:
    with pytest.raises(UpstreamError, match="can't connect") as raised:
        asyncio.run(parts(TritonServer("http://127.0.0.1:9", "m")))
    assert raised.value.unprocessed
    assert not raised.value.died


def test_requests_one_after_another_share_a_connection(triton: RawTriton) -> None:
    async def body(server: TritonServer) -> None:
        for script in (answer(*HELLO), refusal(400, "[E_UNSUPPORTED] n"), answer(*HELLO, cuts=1)):
            triton.script = script
            with suppress(UpstreamError):
                await parts(server)
        assert await server.get("/v2/health/ready") == (200, b"")
        await server.ask(call(task="describe"))
        assert triton.connections == 1

    run(triton, body)


def test_a_server_that_is_down_has_no_connection_that_nobody_uses(triton: RawTriton) -> None:
    async def body(server: TritonServer) -> None:
        triton.script = answer(*HELLO)
        await parts(server)
        async with aclosing(server.generate(call())) as running:
            await anext(running)  # on the connection of the first
            await server.get("/v2/health/ready")  # this one is idle now
            assert triton.connections == 2

            server.keep_idle(False)
            await server.get("/v2/health/ready")
            assert triton.connections == 3
            async for _ in running:
                pass
        await server.get("/v2/health/ready")
        assert triton.connections == 4

        server.keep_idle(True)
        await server.get("/v2/health/ready")
        await server.get("/v2/health/ready")
        assert triton.connections == 5

    run(triton, body)


@pytest.mark.parametrize("events", [(), HELLO[:2]])
def test_a_connection_whose_answer_lost_its_end_serves_no_other(triton: RawTriton, events: tuple[bytes, ...]) -> None:
    async def body(server: TritonServer) -> None:
        triton.script = answer(*events)
        await parts(server)
        triton.script = answer(*HELLO)
        assert [text(await parts(server)) for _ in range(2)] == ["Héllo"] * 2
        assert triton.connections == 2

    run(triton, body)


def test_a_request_that_is_abandoned_on_a_used_connection_is_not_sent_again(triton: RawTriton) -> None:
    async def body(server: TritonServer) -> None:
        triton.script = answer(*HELLO)
        await parts(server)
        triton.script = silent_until_stopped
        task = asyncio.create_task(parts(server, call("frozen")))
        while len(triton.asked) < 2:
            await asyncio.sleep(0.01)
        server.abandon("the server is frozen")
        with pytest.raises(UpstreamError, match="is frozen") as raised:
            await task
        assert (raised.value.unprocessed, raised.value.died) == (True, True)
        triton.stop_of("frozen").set()
        assert (len(triton.asked), triton.connections) == (2, 1)

    run(triton, body)


def test_an_answer_that_has_ended_was_heard_once(triton: RawTriton) -> None:
    async def body(server: TritonServer) -> None:
        triton.script = answer(*HELLO)
        await parts(server)
        assert [server.heard(), server.heard()] == [True, False]
        await server.get("/v2/health/ready")
        assert not server.heard()

    run(triton, body)


@pytest.mark.parametrize("loop_class", [asyncio.SelectorEventLoop, uvloop.Loop])
def test_a_connection_that_closes_as_soon_as_it_is_made(
    triton: RawTriton, loop_class: type[asyncio.AbstractEventLoop]
) -> None:
    class LosingLoop(loop_class):  # type: ignore[misc, valid-type]
        async def create_connection(self, *args: Any, **options: Any) -> Any:
            transport, protocol = await super().create_connection(*args, **options)
            transport.abort()
            while protocol.usable:
                await asyncio.sleep(0)
            return transport, protocol

    loop = LosingLoop()
    try:
        with pytest.raises(UpstreamError, match="can't connect: the server closed") as raised:
            loop.run_until_complete(parts(TritonServer(triton.url, "m")))
    finally:
        loop.close()
    assert (raised.value.unprocessed, raised.value.died) == (True, False)


def closed_unseen(wire: Wire) -> None:
    """End the answer, and close the connection when the next request comes on it."""
    answer(*HELLO)(wire)
    wire._connection.recv(1)
    wire.reset()


def test_a_server_that_takes_a_request_and_is_gone_then_has_died(triton: RawTriton) -> None:
    """Whether the used connection was closed for its age or by the server's death is told by the next one."""

    async def body(server: TritonServer) -> None:
        triton.script = dies_at_the_second
        assert text(await parts(server)) == "Héllo"
        with pytest.raises(UpstreamError, match="can't connect") as raised:
            await parts(server)
        assert raised.value.died

    def dies_at_the_second(wire: Wire) -> None:
        answer(*HELLO)(wire)
        wire._connection.recv(1)
        triton.die()

    run(triton, body)


def test_a_connection_that_closes_under_a_request_is_replaced(triton: RawTriton) -> None:
    async def body(server: TritonServer) -> None:
        triton.script = closed_unseen
        assert text(await parts(server)) == "Héllo"
        triton.script = answer(*HELLO)
        assert text(await parts(server)) == "Héllo"
        assert triton.connections == 2

    run(triton, body)


@pytest.mark.parametrize("apart", [False, True])
def test_what_nobody_asked_for_is_not_the_next_answer(triton: RawTriton, apart: bool) -> None:
    stray = b"HTTP/1.1 200 OK\r\nContent-Length: 26\r\n\r\n" + event(text_output="x")

    def strays(wire: Wire) -> None:
        wire.head()
        wire.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(HELLO[2]), HELLO[2]) + (b"" if apart else stray))
        if apart:
            released.wait(5)
            wire.send(stray)

    released = threading.Event()

    async def body(server: TritonServer) -> None:
        triton.script = strays
        assert [part.finish_reason for part in await parts(server)] == ["stop"]
        released.set()
        while apart and server._idle[0].usable:
            await asyncio.sleep(0.01)
        triton.script = answer(*HELLO)
        assert text(await parts(server)) == "Héllo"

    run(triton, body)


async def stopped(triton: RawTriton, name: str) -> None:
    while name not in triton.stopped:
        await asyncio.sleep(0.01)


def until_stopped(wire: Wire) -> None:
    wire.head()
    wire.chunk(HELLO[0])
    wire.wait_for_stop()
    wire.chunk(event(finish_reason="cancelled"))
    wire.chunk(b"")


def silent_until_stopped(wire: Wire) -> None:
    wire.wait_for_stop()
    refusal(500, "[E_CANCELLED] gone")(wire)


def test_an_answer_that_is_left_is_stopped_and_its_connection_used_again(triton: RawTriton) -> None:
    async def body(server: TritonServer) -> None:
        triton.script = until_stopped
        async with aclosing(server.generate(call("left"))) as found:
            async for some in found:
                assert text(some) == "Hé"
                break
        await stopped(triton, "left")
        await server.close()
        assert not server._stopping
        assert triton.connections == 2  # one for the answer, one for the stop

    run(triton, body)


def test_a_request_without_an_answer_yet_is_stopped(triton: RawTriton) -> None:
    async def body(server: TritonServer) -> None:
        triton.script = silent_until_stopped
        task = asyncio.create_task(parts(server, call("silent")))
        while not triton.asked:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await stopped(triton, "silent")
        await server.close()
        triton.script = answer(*HELLO)
        assert text(await parts(server)) == "Héllo"

    run(triton, body)


@pytest.mark.parametrize(
    ("late", "handover", "code"),
    [
        (answer(event(text_output="H", finish_reason="length", context_phase_params="{}")), "{}", ""),
        (refusal(503, "[E_OVERLOADED] full"), "", "E_OVERLOADED"),
        (answer(event(error="[E_OVERLOADED] full")), "", "E_OVERLOADED"),
        (Wire.reset, "", "unprocessed"),
    ],
)
def test_what_comes_when_nobody_waits_is_told(triton: RawTriton, late: Script, handover: str, code: str) -> None:
    told: list[tuple[str, str]] = []

    def take(found: list[Part], error: UpstreamError | None) -> None:
        told.append(
            (
                "".join(part.context_phase_params for part in found),
                error.code or "unprocessed" * error.unprocessed if error else "",
            )
        )

    def after_the_stop(wire: Wire) -> None:
        wire.wait_for_stop()
        late(wire)

    async def body(server: TritonServer) -> None:
        triton.script = after_the_stop
        task = asyncio.create_task(parts(server, Call({"text_input": "Hi"}, "left", late=take)))
        while not triton.asked:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        await stopped(triton, "left")
        await server.close()

    run(triton, body)
    assert told == [(handover, code)]


def test_a_server_that_ignores_the_stop_loses_the_connection(
    triton: RawTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(server: TritonServer) -> None:
        monkeypatch.setattr(triton_server, "_STOP_S", 0.05)

        def deaf(wire: Wire) -> None:
            wire.head()
            while True:  # until the connection is gone
                wire.chunk(HELLO[0])

        triton.script = deaf
        async with aclosing(server.generate(call())) as found:
            async for _ in found:
                break
        await server.close()
        assert not server._stopping

    run(triton, body)


def test_a_reader_that_is_slow_makes_the_server_wait(triton: RawTriton) -> None:
    """What is not taken stays in the server's socket: a bounded part of it is here."""
    size = 64 * 2**20
    sent = 0

    def long_answer(wire: Wire) -> None:
        nonlocal sent
        wire.head()
        piece = event(text_output="x" * 65_000)
        while sent < size:
            wire.chunk(piece)
            sent += len(piece)
        wire.chunk(b"")

    async def body(server: TritonServer) -> None:
        triton.script = long_answer
        total = 0
        async with aclosing(server.generate(call())) as found:
            async for some in found:
                if not total:
                    await asyncio.sleep(0.5)
                    assert sent < size // 4
                total += len(text(some))
        assert total >= 65_000 * (size // 65_100)

    run(triton, body)


def test_one_event_of_many_megabytes(triton: RawTriton) -> None:
    async def body(server: TritonServer) -> None:
        triton.script = answer(event(text_output="é" * 5_000_000), cuts=65_536)
        assert len(text(await parts(server))) == 5_000_000

    run(triton, body)


def test_outputs_of_a_task(triton: RawTriton) -> None:
    async def body(server: TritonServer) -> None:
        triton.script = answer(event(output_ids=[1, 2], num_input_tokens=2))
        assert await server.ask(call(task="tokenize")) == {"output_ids": [1, 2], "num_input_tokens": 2}
        assert json.loads(str((await server.ask(call(task="describe")))["model_info"]))["name"] == "tiny"

    run(triton, body)
