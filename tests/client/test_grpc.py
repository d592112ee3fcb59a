"""What only the gRPC transport does: statuses, ends that are announced, and what it asks besides."""

import asyncio
import gc
import socket
import struct
from concurrent.futures import Future, ThreadPoolExecutor

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from deepseek_triton_client._asyncio_runtime import AsyncioRuntime
from deepseek_triton_client._core.client_settings import Connection, Endpoint, Settings, Timeouts
from deepseek_triton_client._core.exceptions import (
    AccessDenied,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ProtocolError,
    ServerError,
    ServerUnavailable,
)
from deepseek_triton_client._core.interfaces import Input
from deepseek_triton_client._core.results import TensorMetadata
from deepseek_triton_client._grpc import grpc_channel
from deepseek_triton_client._grpc.grpc_channel import BY_STATUS_CODE
from support.drivers import opened
from support.grpc_server import Proxy, RawServer

INPUTS = [
    Input("text_input", "BYTES", ["hé"]),
    Input("streaming", "BOOL", [True]),
    Input("sampling_param_max_tokens", "INT32", [7]),
    Input("sampling_param_stop", "BYTES", ["a", "b"]),
]
FIRST = {"text_output": "a"}
WAIT_S = 30
FRAME_SETTINGS = b"\0\0\0\4\0\0\0\0\0"


@pytest.fixture
def transport(driver, grpc_server):
    return driver.transport(grpc_server.url)


# --- Requests and responses ---


def test_what_is_sent(grpc_server, driver):
    grpc_server.script(grpc_server.replies(FIRST))
    driver.ask(driver.transport(grpc_server.url, model_version="2"), inputs=INPUTS)
    (sent,) = grpc_server.requests
    assert (sent.model_name, sent.model_version, sent.id) == ("tensorrt_llm", "2", "r1")
    assert sent.parameters["triton_enable_empty_final_response"].bool_param
    assert [(each.name, each.datatype, list(each.shape)) for each in sent.inputs] == [
        ("text_input", "BYTES", [1]),
        ("streaming", "BOOL", [1]),
        ("sampling_param_max_tokens", "INT32", [1]),
        ("sampling_param_stop", "BYTES", [2]),
    ]
    assert list(sent.raw_input_contents) == [b"\3\0\0\0h\xc3\xa9", b"\1", b"\7\0\0\0", b"\1\0\0\0a\1\0\0\0b"]


def test_an_empty_final_response_is_left_out_and_a_request_that_ends_is_not_cancelled(grpc_server, driver, transport):
    ended = []

    def answer(request, context):
        yield grpc_server.response(**FIRST)
        yield grpc_server.response(final=True)
        assert grpc_server.release.wait(WAIT_S)
        ended.append(context.is_active())

    grpc_server.script(answer)
    stream = opened(transport)
    assert driver.run(stream.receive()) == FIRST
    grpc_server.release.set()
    assert driver.run(stream.receive()) is None
    driver.run(stream.close())
    assert ended == [True]


# --- Errors ---


def test_a_status_becomes_an_error_of_this_package(grpc_server, driver, transport, subtests):
    code = grpc.StatusCode
    said = [(status, "what", kind, "what", ()) for status, kind in BY_STATUS_CODE.items() if status is not code.OK]
    said += [
        (code.UNAVAILABLE, "[E_OVERLOADED] full", Overloaded, "[E_OVERLOADED] full", ()),
        (code.INTERNAL, "", ServerError, "INTERNAL", ()),
        (code.UNAUTHENTICATED, "no token", AccessDenied, "no token", ()),
        (code.PERMISSION_DENIED, "not you", AccessDenied, "not you", ()),
        (code.RESOURCE_EXHAUSTED, "full", Overloaded, "full", (FIRST,)),
    ]
    assert set(BY_STATUS_CODE) == set(code)
    for status, details, kind, text, before in said:

        def answer(_, context, status=status, details=details, before=before):
            yield from (grpc_server.response(**each) for each in before)
            context.abort(status, details)

        grpc_server.script(answer)
        error = driver.fails(transport)
        with subtests.test(f"{status.name} {details}"):
            assert (type(error), str(error)) == (kind, text)
            refused = status is code.RESOURCE_EXHAUSTED or details.startswith("[E_OVERLOADED]")
            assert error.unprocessed is (refused and not before)


def test_responses_that_can_not_be_read(grpc_server, driver):
    """Outputs without their contents, a response over the limit, and what is no message of Triton."""
    broken = grpc_server.response(text_output="a")
    broken.infer_response.ClearField("raw_output_contents")
    large = grpc_server.response(text_output="a" * 2000)
    transport = driver.transport(grpc_server.url, connection=Connection(max_message_bytes=1000))
    for response, said in ((broken, "raw contents"), (large, "connection.max_message_bytes")):
        grpc_server.script(grpc_server.responses(response))
        error = driver.fails(transport)
        assert (type(error), said in str(error), error.unprocessed) == (ProtocolError, True, False)

    handler = grpc.stream_stream_rpc_method_handler(lambda requests, context: iter([b"\xff\xff"]))
    methods = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelStreamInfer": handler})
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((methods,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        error = driver.fails(driver.transport(f"grpc://127.0.0.1:{port}"))
    finally:
        server.stop(None).wait()
    assert type(error) is ProtocolError
    assert "ModelStreamInferResponse" in str(error)


@pytest.mark.slow
def test_a_request_over_the_servers_limit(driver, grpc_server, transport):
    stream = transport.open("r1", [Input("text_input", "BYTES", ["a" * 9_000_000])], connect_s=10.0)
    with pytest.raises(InvalidRequest):
        driver.run(stream.receive())


# --- Connections ---


def test_a_server_that_comes_back_is_found(grpc_server, driver):
    grpc_server.script(*[grpc_server.replies(FIRST)] * 10)  # of some the answer is lost, where it is cut late
    with Proxy(grpc_server.port) as proxy:
        transport = driver.transport(f"grpc://127.0.0.1:{proxy.port}")
        driver.ask(transport)
        proxy.cut()
        while True:
            try:
                assert driver.ask(transport) == [FIRST]
                break
            except ServerUnavailable:
                pass


@pytest.mark.slow
def test_connecting_is_limited_where_something_listens_and_by_grpc_itself_without_a_limit(driver, full_queue):
    with RawServer(lambda connection: connection.recv(1 << 16)) as server:
        error = driver.fails(driver.transport(f"grpc://127.0.0.1:{server.port}"), connect_s=0.2)
        assert str(error) == "no connection within 0.2 s"
        assert (type(error), error.unprocessed) == (ServerUnavailable, True)
    transport = driver.transport(f"grpc://127.0.0.1:{full_queue}", timeouts=Timeouts(connect=0.1))
    error = driver.fails(transport, connect_s=None)
    assert (type(error), error.unprocessed) == (ServerUnavailable, True)


def test_another_service(http_server, driver):
    """The client takes the HTTP port for the gRPC port."""
    error = driver.fails(driver.transport(http_server.url.replace("http://", "grpc://")))
    assert (type(error), error.unprocessed) == (ServerUnavailable, True)


def frame(kind, flags, stream, payload):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def until_request(connection):
    """Open HTTP/2 and read the request's header frame and data to the end."""
    connection.sendall(FRAME_SETTINGS)
    received = b""
    while b"ModelStreamInfer" not in received:
        data = connection.recv(1 << 16)
        if not data:
            raise OSError
        received += data


def sends(answer, *, and_waits):
    """After the request these bytes; then the connection ends, or waits for the client."""

    def behave(connection):
        until_request(connection)
        connection.sendall(answer)
        if and_waits:
            connection.recv(1 << 16)
        else:
            connection.shutdown(socket.SHUT_RDWR)

    return behave


STATUS_503 = frame(1, 5, 1, b"\x08\x03503")
GO_AWAY = frame(7, 0, 0, struct.pack(">II", 1, 0))
"""Of a server that had the request."""
RESET_STREAM = frame(3, 0, 1, struct.pack(">I", 11))


def test_only_a_request_that_surely_was_not_worked_on_is_unprocessed(driver):
    for behave, *expected in (
        (sends(STATUS_503, and_waits=True), ServerUnavailable, True),
        (sends(GO_AWAY, and_waits=False), ServerUnavailable, False),
        (sends(b"", and_waits=False), ServerUnavailable, False),
        (sends(RESET_STREAM, and_waits=True), Overloaded, False),
    ):
        with RawServer(behave) as server:
            error = driver.fails(driver.transport(f"grpc://127.0.0.1:{server.port}"), connect_s=None)
        assert [type(error), error.unprocessed] == expected


# --- Ends that are announced ---


def until_gone(grpc_server, *responses):
    """Send these responses and wait until the client leaves. The future tells whether it did."""
    left = Future()
    grpc_server.gone.clear()

    def answer(request, context):
        context.add_callback(lambda: left.done() or left.set_result(True))
        yield from responses
        if not grpc_server.gone.wait(WAIT_S):
            left.set_result(False)

    grpc_server.script(answer)
    return left


@pytest.fixture
def ends(monkeypatch):
    """Says how many seconds an announced end is waited for."""

    def last(seconds):
        monkeypatch.setattr(grpc_channel, "END_S", seconds)

    return last


def test_an_end_that_is_announced_and_does_not_come(grpc_server, driver, transport, ends):
    """Whether the stream is read on or closed, and after an error; responses after the final one are left out."""
    ends(0.1)
    final, error = grpc_server.response(text_output="a", final=True), grpc_server.error("what")
    left = until_gone(grpc_server, final)
    stream = opened(transport)
    assert driver.run(stream.receive()) == FIRST
    driver.run(stream.close())
    assert left.result(WAIT_S)
    for responses in ((final,), (final, grpc_server.response(text_output="b"))):
        left = until_gone(grpc_server, *responses)
        assert driver.ask(transport) == [FIRST]
        assert left.result(WAIT_S)
    left = until_gone(grpc_server, error)
    assert type(driver.fails(transport)) is ServerError
    assert left.result(WAIT_S)


def test_an_interrupt_while_the_end_is_waited_for(grpc_server, driver, transport, ends):
    ends(2.0 * WAIT_S)
    left = until_gone(grpc_server, grpc_server.response(text_output="a", final=True))
    stream = opened(transport)
    driver.run(stream.receive())
    reading = driver.start(stream.receive())
    driver.soon(stream.interrupt)
    assert reading.result(WAIT_S) is None
    driver.run(stream.close())
    assert left.result(WAIT_S)


@pytest.mark.parametrize("driver", ["asyncio"], indirect=True)
def test_tasks_that_are_cancelled_while_they_wait_stay_cancelled(grpc_server, driver, transport, ends):
    """For the end, and for a response of a stream that is interrupted in the same moment."""

    async def body(waiting, *, interrupted):
        stream = opened(transport)
        await stream.receive()
        task = asyncio.ensure_future(getattr(stream, waiting)())
        await asyncio.sleep(0)
        if interrupted:
            stream.interrupt()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    ends(2.0 * WAIT_S)
    left = until_gone(grpc_server, grpc_server.response(text_output="a", final=True))
    driver.run(body("close", interrupted=False))
    assert left.result(WAIT_S)
    if hasattr(asyncio.Task, "cancelling"):  # Python 3.10 can't tell the two apart
        grpc_server.script(grpc_server.hangs(FIRST))
        driver.run(body("receive", interrupted=True))


@pytest.mark.slow
def test_a_stream_that_is_forgotten_after_its_loop(grpc_server):
    left = until_gone(grpc_server, grpc_server.response(text_output="a"))
    endpoint = Endpoint.parse(grpc_server.url)
    transport = AsyncioRuntime().transport(endpoint, Settings(endpoints=(endpoint,), model_name="tensorrt_llm"))
    stream = opened(transport)
    asyncio.run(stream.receive())
    assert asyncio.run(transport.server_ready(WAIT_S))  # another loop has a channel of its own
    asyncio.run(transport.close())
    del stream, transport
    gc.collect()
    assert left.result(WAIT_S)


# --- What is asked besides ---


def test_headers_that_gRPC_can_not_send(driver):
    for name in ("trace-bin", "Trace-Bin", "a~b", "é"):
        with pytest.raises(InvalidRequest, match=name):
            driver.transport("grpc://127.0.0.1:1", headers={name: "x"})


def test_ready(grpc_server, driver):
    transport = driver.transport(grpc_server.url, model_version="3")
    for is_ready in (True, False):
        grpc_server.ready = is_ready
        assert driver.run(transport.server_ready(10.0)) is driver.run(transport.model_ready(10.0)) is is_ready
    assert (grpc_server.requests[0].name, grpc_server.requests[0].version) == ("tensorrt_llm", "3")


def test_metadata(grpc_server, driver, transport):
    grpc_server.model = pb.ModelMetadataResponse(name="m", versions=["1"], platform="python")
    grpc_server.model.inputs.add(name="text_input", datatype="BYTES", shape=[-1])
    metadata = driver.run(transport.metadata(10.0))
    assert (metadata.name, metadata.versions, metadata.platform) == ("m", ("1",), "python")
    assert (metadata.inputs, metadata.outputs) == ((TensorMetadata("text_input", "BYTES", (-1,)),), ())

    unknown = (grpc.StatusCode.NOT_FOUND, "Request for unknown model")
    grpc_server.answers["ModelMetadata"] = lambda request, context: context.abort(*unknown)
    with pytest.raises(ModelNotFound):
        driver.run(transport.metadata(10.0))

    grpc_server.answers["ModelMetadata"] = lambda request, context: grpc_server.release.wait(WAIT_S)
    with pytest.raises(ServerUnavailable, match=r"no answer within 0\.2 s") as caught:
        driver.run(transport.metadata(0.2))
    assert caught.value.unprocessed


def test_a_server_is_asked_whether_it_lives_until_it_has_answered_once_or_refuses_to_say(grpc_server, driver):
    grpc_server.script(*[grpc_server.replies(FIRST)] * 2)
    asked = []

    def lives(request, context):
        asked.append(request)
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "no")

    grpc_server.answers["ServerLive"] = lives
    assert driver.ask(driver.transport(grpc_server.url)) == [FIRST]
    assert len(asked) == 1
    transport = driver.transport(grpc_server.url)
    driver.run(transport.metadata(10.0))
    assert driver.ask(transport) == [FIRST]
    assert len(asked) == 1


def test_metrics_come_over_http(grpc_server, http_server, driver, transport):
    http_server.script(http_server.body(200, b"nv_inference_count 1\n", "text/plain"))
    assert driver.run(transport.metrics(f"{http_server.url}/metrics", 10.0)) == "nv_inference_count 1\n"


def test_proxies_of_the_environment_are_not_used(grpc_server, driver, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{listener.getsockname()[1]}")
    grpc_server.script(grpc_server.replies(FIRST))
    assert driver.ask(driver.transport(grpc_server.url)) == [FIRST]
