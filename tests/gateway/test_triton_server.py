"""The way to one Triton server, over real sockets: what comes of its answers, however they are cut, stall or break."""

import asyncio
import json
import re
import ssl
import threading
from contextlib import aclosing, asynccontextmanager, suppress

import pytest
import uvloop

from deepseek_backend.service import STOPPING
from deepseek_triton_tools.gateway import triton_server
from deepseek_triton_tools.gateway.triton_call import Call, UpstreamError
from deepseek_triton_tools.gateway.triton_server import ConnectionFailed, TritonServer, connect, request_head
from support.raw_triton import RawTriton, Wire, answer, event, refusal
from support.waiting import PATIENCE_S

HELLO = (event(text_output="Hé"), event(text_output="llo"), event(finish_reason="stop", num_output_tokens=2))


@pytest.fixture
def triton():
    with RawTriton().serving() as triton:
        triton.script = answer(*HELLO)
        yield triton


@asynccontextmanager
async def server_of(triton, headers=None):
    server = TritonServer(triton.url, "m", headers=headers)
    try:
        yield server
    finally:
        await server.close()


def call(name="one", **inputs):
    return Call({"text_input": "Hi", **inputs}, name)


async def parts(server, asked=None):
    return [part async for some in server.generate(asked or call()) for part in some]


def text(found):
    return "".join(part.text for part in found)


async def until(holds):
    while not holds():
        await asyncio.sleep(0.01)


async def error_of(answering):
    with pytest.raises(UpstreamError) as raised:
        await answering
    return raised.value


async def test_an_answer_in_pieces_to_a_request_with_its_headers(triton):
    async with server_of(triton, {"triton-key": "secret"}) as server:
        triton.script = answer(*HELLO, cuts=1)
        found = await parts(server)
        assert (text(found), found[-1].finish_reason, found[-1].num_output_tokens) == ("Héllo", "stop", 2)
        assert triton.asked == [{"id": "one", "text_input": "Hi"}]
        assert triton.heads[0].startswith("POST /v2/models/m/generate_stream HTTP/1.1")
        assert "triton-key: secret" in triton.heads[0]


def lost_in_the_middle(wire):
    wire.head()
    wire.chunk(HELLO[0])
    wire.close()


def page(status):
    """The error of a proxy that knows no JSON."""
    return lambda wire: (wire.head(status), wire.chunk(b"<html>"), wire.chunk(b""))


FAILURES = [
    (lambda wire: wire.send(b"\0\0\6\4\0\0\0\0\0"), "a gRPC port: grpc://", "", True, True),
    (Wire.reset, "the connection was lost|closed the connection", "", True, True),
    (lost_in_the_middle, "the server closed the connection", "", True, True),
    (lambda wire: wire.send(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), "is not HTTP", "", True, True),
    (refusal(503, "[E_OVERLOADED] full"), "^full$", "E_OVERLOADED", True, False),
    (refusal(503, "[E_UNAVAILABLE] the engine died"), "^the engine died$", "E_UNAVAILABLE", True, True),
    (refusal(503, f"[E_UNAVAILABLE] {STOPPING}"), "being stopped", "E_UNAVAILABLE", True, False),
    (refusal(400, "[E_INVALID_ARGUMENT] top_p: 2"), "^top_p: 2$", "E_INVALID_ARGUMENT", False, False),
    (refusal(400, "Request for unknown model: 'm' is not found"), "unknown model", "E_UNAVAILABLE", True, False),
    (refusal(400, "Stub process 'm_0_0' is not healthy."), "Stub process", "E_UNAVAILABLE", True, True),
    (refusal(500, "Failed to process: Stub process 'm_0_0' is not healthy."), "Stub", "E_UNAVAILABLE", True, True),
    (refusal(502, "a proxy's"), "^a proxy's$", "", True, True),
    (refusal(404, "no such model"), "^no such model$", "", True, False),
    (refusal(405, "Method Not Allowed"), "Method Not Allowed, as Triton's metrics port", "", False, False),
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


@pytest.mark.slow
async def test_failures_are_told(triton, subtests):
    for script, message, code, unprocessed, died in FAILURES:
        async with server_of(triton) as server:
            with subtests.test(message=message):
                triton.script = script
                error = await error_of(parts(server))
                assert re.search(message, str(error))
                assert (error.code, error.unprocessed, error.died) == (code, unprocessed, died)
                triton.script = answer(*HELLO)
                assert text(await parts(server)) == "Héllo"


async def test_a_task_and_its_outputs(triton):
    async with server_of(triton) as server:
        triton.script = answer(event(output_ids=[1, 2], num_input_tokens=2))
        assert await server.ask(call(task="tokenize")) == {"output_ids": [1, 2], "num_input_tokens": 2}
        assert json.loads(str((await server.ask(call(task="describe")))["model_info"]))["name"] == "tiny"
        for body in (b"data: nonsense\n\n", b"", b"data: 5\n\n"):
            triton.script = answer(body)
            assert "not the model's" in str(await error_of(server.ask(call(task="tokenize"))))


@pytest.mark.slow
async def test_the_text_before_an_error_comes_first_and_an_event_may_have_many_megabytes(triton):
    async with server_of(triton) as server:
        triton.script = answer(HELLO[0] + event(error="[E_INTERNAL] broken"))
        async with aclosing(server.generate(call())) as found:
            assert text(await anext(found)) == "Hé"
            assert str(await error_of(anext(found))) == "broken"
        triton.script = answer(event(text_output="é" * 5_000_000), cuts=65_536)
        assert len(text(await parts(server))) == 5_000_000


async def test_a_connection_with_an_answer_left_in_it_is_not_used_again(triton):
    connection = await connect(triton.url, None)
    asked = b'{"id":"one","text_input":"Hi"}'
    head = request_head("POST", triton.url, "/v2/models/m/generate_stream", ())
    connection.send(b"%bContent-Length: %d\r\n\r\n%b" % (head, len(asked), asked))
    await until(lambda: connection.keep_alive)
    assert not connection.usable
    await connection.read_all()
    assert connection.usable
    connection.close()


async def test_a_server_that_cant_be_reached():
    for address in (f"http://{'a' * 64}:1", "http://a..b:1", "http://127.0.0.1:9"):
        error = await error_of(parts(TritonServer(address, "m")))
        assert "can't connect" in str(error)
        assert (error.unprocessed, error.died) == (True, False)

    async def close(reader, writer):
        await reader.read(1 << 16)
        writer.close()

    async with await asyncio.start_server(close, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionFailed, match="is it HTTPS that is served there"):
            await connect(f"https://127.0.0.1:{port}", ssl.create_default_context())


def test_a_lookup_that_nobody_waits_for_is_no_error_of_the_loop():
    async def leave():
        for _ in range(8):
            with suppress(TimeoutError):
                await triton_server.within(0, connect("http://a b:1", None))
        with suppress(ConnectionFailed):  # those before it have ended then
            await connect("http://a b:1", None)

    loop, errors = uvloop.new_event_loop(), []
    loop.set_exception_handler(lambda _, told: errors.append(told))
    loop.run_until_complete(leave())
    loop.close()
    assert errors == []


async def test_requests_one_after_another_share_a_connection(triton):
    """And an answer that has ended was heard once."""
    async with server_of(triton) as server:
        for script in (answer(*HELLO), refusal(400, "[E_UNSUPPORTED] n"), answer(*HELLO, cuts=1)):
            triton.script = script
            with suppress(UpstreamError):
                await parts(server)
        assert [server.heard(), server.heard()] == [True, False]
        assert await server.get("/v2/health/ready") == (200, b"")
        assert not server.heard()
        await server.ask(call(task="describe"))
        assert triton.connections == 1


async def test_a_server_that_is_down_has_no_connection_that_nobody_uses(triton):
    async with server_of(triton) as server:
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


@pytest.mark.parametrize("events", [(), HELLO[:2]])
async def test_a_connection_whose_answer_lost_its_end_serves_no_other(triton, events):
    async with server_of(triton) as server:
        triton.script = answer(*events)
        await parts(server)
        triton.script = answer(*HELLO)
        assert [text(await parts(server)) for _ in range(2)] == ["Héllo"] * 2
        assert triton.connections == 2


async def test_a_request_that_is_abandoned_on_a_used_connection_is_not_sent_again(triton):
    async with server_of(triton) as server:
        await parts(server)
        triton.script = silent_until_stopped
        task = asyncio.create_task(parts(server, call("frozen")))
        await until(lambda: len(triton.asked) == 2)
        server.abandon("the server is frozen")
        error = await error_of(task)
        assert ("is frozen" in str(error), error.unprocessed, error.died) == (True, True, True)
        triton.stop_of("frozen").set()
        assert (len(triton.asked), triton.connections) == (2, 1)


@pytest.mark.parametrize("loop_class", [asyncio.SelectorEventLoop, uvloop.Loop])
def test_a_connection_that_closes_as_soon_as_it_is_made(triton, loop_class):
    class LosingLoop(loop_class):
        async def create_connection(self, *args, **options):
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


@pytest.mark.parametrize("dies", [False, True])
async def test_a_connection_that_closes_under_a_request_is_replaced(triton, dies):
    """Whether it was closed for its age or by the server's death is told by the next one."""

    def closed_unseen(wire):
        answer(*HELLO)(wire)
        wire._connection.recv(1)  # of the next request
        (triton.die if dies else wire.reset)()

    async with server_of(triton) as server:
        triton.script = closed_unseen
        assert text(await parts(server)) == "Héllo"
        if dies:
            error = await error_of(parts(server))
            assert ("can't connect" in str(error), error.died) == (True, True)
        else:
            triton.script = answer(*HELLO)
            assert text(await parts(server)) == "Héllo"
            assert triton.connections == 2


@pytest.mark.parametrize("apart", [False, True])
async def test_what_nobody_asked_for_is_not_the_next_answer(triton, apart):
    stray = b"HTTP/1.1 200 OK\r\nContent-Length: 26\r\n\r\n" + event(text_output="x")

    def strays(wire):
        wire.head()
        wire.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(HELLO[2]), HELLO[2]) + (b"" if apart else stray))
        if apart:
            released.wait(PATIENCE_S)
            wire.send(stray)

    released = threading.Event()
    async with server_of(triton) as server:
        triton.script = strays
        assert [part.finish_reason for part in await parts(server)] == ["stop"]
        released.set()
        while apart and server._idle[0].usable:
            await asyncio.sleep(0.01)
        triton.script = answer(*HELLO)
        assert text(await parts(server)) == "Héllo"


def until_stopped(wire):
    wire.head()
    wire.chunk(HELLO[0])
    wire.wait_for_stop()
    wire.chunk(event(finish_reason="cancelled"))
    wire.chunk(b"")


def silent_until_stopped(wire):
    wire.wait_for_stop()
    refusal(500, "[E_CANCELLED] gone")(wire)


async def test_an_answer_that_is_left_is_stopped_and_its_connection_used_again(triton):
    async with server_of(triton) as server:
        triton.script = until_stopped
        async with aclosing(server.generate(call("left"))) as found:
            async for some in found:
                assert text(some) == "Hé"
                break
        await until(lambda: "left" in triton.stopped)
        await server.close()
        assert not server._stopping
        assert triton.connections == 2  # one for the answer, one for the stop


@pytest.mark.parametrize(
    ("late", "handover", "code"),
    [
        (answer(event(text_output="H", finish_reason="length", context_phase_params="{}")), "{}", ""),
        (refusal(503, "[E_OVERLOADED] full"), "", "E_OVERLOADED"),
        (answer(event(error="[E_OVERLOADED] full")), "", "E_OVERLOADED"),
        (Wire.reset, "", "unprocessed"),
    ],
)
async def test_what_comes_when_nobody_waits_is_told(triton, late, handover, code):
    told = []

    def take(found, error):
        told.append(
            (
                "".join(part.context_phase_params for part in found),
                error.code or "unprocessed" * error.unprocessed if error else "",
            )
        )

    def after_the_stop(wire):
        wire.wait_for_stop()
        late(wire)

    async with server_of(triton) as server:
        triton.script = after_the_stop
        task = asyncio.create_task(parts(server, Call({"text_input": "Hi"}, "left", late=take)))
        await until(lambda: triton.asked)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: "left" in triton.stopped)
        await server.close()
    assert told == [(handover, code)]


async def test_a_server_that_ignores_the_stop_loses_the_connection(triton, monkeypatch):
    async with server_of(triton) as server:
        monkeypatch.setattr(triton_server, "_STOP_S", 0.05)

        def deaf(wire):
            wire.head()
            while True:  # until the connection is gone
                wire.chunk(HELLO[0])

        triton.script = deaf
        async with aclosing(server.generate(call())) as found:
            async for _ in found:
                break
        await server.close()
        assert not server._stopping
