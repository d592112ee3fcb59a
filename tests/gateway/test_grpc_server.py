"""A server over gRPC behind a transport that a script replaces. What is the same over HTTP is tested there."""

import asyncio
import re
from contextlib import aclosing

import pytest

from deepseek_triton_client._core.exceptions import (
    AccessDenied,
    InvalidRequest,
    ModelNotReady,
    Overloaded,
    ServerError,
    ServerUnavailable,
)
from deepseek_triton_client._core.interfaces import Input
from deepseek_triton_tools.gateway.grpc_server import GrpcServer
from deepseek_triton_tools.gateway.triton_call import Call, UpstreamError

LAST = {"finish_reason": "stop", "num_output_tokens": 2}


class Script:
    """Stands for the transport, and for each of its streams."""

    def __init__(self, *responses):
        self.responses = responses
        self.opened = []
        self.closed = []
        self.ready = True
        self.stop = asyncio.Event()

    def open(self, request_id, inputs, *, connect_s, headers):
        self.opened.append((request_id, list(inputs), dict(headers)))
        is_stop = any(each.name == "stop" for each in inputs)
        if is_stop:
            self.stop.set()
        return Stream(self, [LAST] if is_stop else list(self.responses))

    async def server_ready(self, timeout_s):
        if isinstance(self.ready, Exception):
            raise self.ready
        return self.ready

    model_ready = server_ready

    async def close(self):
        pass


class Stream:
    def __init__(self, script, left):
        self._script = script
        self._left = left

    async def receive(self):
        if not self._left:
            return None
        response = self._left.pop(0)
        if isinstance(response, Exception):
            raise response
        if response == "until stopped":
            await self._script.stop.wait()
            return {"finish_reason": "cancelled"}
        return response

    async def close(self):
        self._script.closed.append(len(self._left))


def server_of(script):
    server = GrpcServer("grpc://127.0.0.1:1", "m", headers={}, ca=None)
    server._grpc = script
    return server


async def parts(server, **inputs):
    call = Call({"text_input": "Hi", **inputs}, "one", headers={"traceparent": "00"})
    return [part async for some in server.generate(call) for part in some]


async def test_an_answer_and_its_request():
    script = Script({"text_output": "Hé"}, {"text_output": ["a", "b"], "sequence_index": [0, 1]}, LAST)
    found = await parts(server_of(script), input_ids=[1, 2], streaming=True, timeout_ms=5)
    assert [(part.sequence, part.text) for part in found] == [(0, "Hé"), (0, "a"), (1, "b"), (0, "")]
    [(name, inputs, headers)] = script.opened
    assert (name, headers) == ("one", {"traceparent": "00"})
    assert inputs == [
        Input("text_input", "BYTES", ("Hi",)),
        Input("input_ids", "INT32", [1, 2]),
        Input("streaming", "BOOL", (True,)),
        Input("timeout_ms", "INT32", (5,)),
    ]
    assert await server_of(Script({"model_info": "{}"})).ask(Call({"task": "describe"}, "one")) == {"model_info": "{}"}


FAILURES = [
    (ServerUnavailable("nobody there", unprocessed=True), "nobody there", "", True, False),
    (ServerUnavailable("Socket closed"), "Socket closed", "", True, True),
    (ServerUnavailable("the engine died", code="E_UNAVAILABLE"), "^the engine died$", "E_UNAVAILABLE", True, True),
    (ModelNotReady("Request for unknown model: 'm' is not found"), "unknown model", "E_UNAVAILABLE", True, False),
    (ServerError("Stub process 'm_0_0' is not healthy."), "Stub process", "E_UNAVAILABLE", True, True),
    (Overloaded("full", code="E_OVERLOADED"), "^full$", "E_OVERLOADED", True, False),
    (Overloaded("a proxy's limit"), "a proxy's limit", "E_OVERLOADED", True, False),
    (InvalidRequest("top_p: 2", code="E_INVALID_ARGUMENT"), "^top_p: 2$", "E_INVALID_ARGUMENT", False, False),
    (AccessDenied("restricted"), "the gateway was refused: restricted", "", True, False),
    (ServerError("broken"), "^broken$", "", False, False),
]


async def test_failures_are_told(subtests):
    for raised, message, code, unprocessed, died in FAILURES:
        with subtests.test(message=message):
            with pytest.raises(UpstreamError) as caught:
                await parts(server_of(Script(raised)))
            error = caught.value
            assert re.search(message, str(error))
            assert (error.code, error.unprocessed, error.died) == (code, unprocessed, died)


async def test_the_text_before_an_error_comes_first():
    for raised in (ServerError("broken"), ServerUnavailable("broken")):
        async with aclosing(server_of(Script({"text_output": "Hé"}, raised)).generate(Call({}, "one"))) as found:
            assert [part.text for part in await anext(found)] == ["Hé"]
            with pytest.raises(UpstreamError, match="broken"):
                await anext(found)


async def test_an_answer_that_is_left_is_stopped_and_ends_by_itself():
    """gRPC would cancel it with the task that waits for it, which can crash Triton."""
    script = Script("until stopped")
    server = server_of(script)
    task = asyncio.create_task(parts(server))
    while not script.opened:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await server.close()
    assert [(name, [each.name for each in inputs]) for name, inputs, _ in script.opened] == [
        ("one", ["text_input"]),
        ("one", ["text_input", "stop"]),
    ]
    assert script.closed == [0, 0]


async def test_a_slow_reader_holds_the_stream(monkeypatch):
    monkeypatch.setattr("deepseek_triton_tools.gateway.grpc_server.UNREAD_BYTES", 10)
    responses = [{"text_output": "a long text"} for _ in range(5)]
    script = Script(*responses, LAST)
    async with aclosing(server_of(script).generate(Call({}, "one"))) as found:
        await anext(found)
        await asyncio.sleep(0)
        assert not script.closed
        assert len([parts async for parts in found]) == 5
    assert script.closed == [0]


async def test_whether_it_is_ready():
    script = Script()
    server = server_of(script)
    assert await server.get("/v2/health/ready") == (200, b"")
    for script.ready in (False, ServerUnavailable("nobody there")):
        with pytest.raises(UpstreamError, match=r"not ready|nobody there"):
            await server.get("/v2/models/m/ready")
