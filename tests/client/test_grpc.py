"""The gRPC transport, blocking and with asyncio, against scripted servers on real sockets."""

import asyncio
import contextlib
import gc
import socket
import struct
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import grpc
import pytest
import trustme
from tritonclient.grpc import service_pb2 as pb

from deepseek_triton_client import _blocking_runtime
from deepseek_triton_client._core import exceptions
from deepseek_triton_client._core.client_settings import Connection, Endpoint, Settings, Timeouts, Tls
from deepseek_triton_client._core.exceptions import (
    AccessDenied,
    Cancelled,
    DeepseekTritonError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ProtocolError,
    ServerError,
    ServerUnavailable,
)
from deepseek_triton_client._core.results import TensorMetadata
from deepseek_triton_client._core.transport import Input
from deepseek_triton_client._grpc import asyncio_channel, blocking_channel
from deepseek_triton_client._grpc.grpc_errors import BY_STATUS_CODE
from deepseek_triton_client._grpc.grpc_transport import asyncio_transport, blocking_transport
from support.grpc_server import GrpcServer, Proxy, RawServer

INPUTS = [
    Input("text_input", "BYTES", ["hé"]),
    Input("streaming", "BOOL", [True]),
    Input("sampling_param_max_tokens", "INT32", [7]),
    Input("sampling_param_stop", "BYTES", ["a", "b"], batched=True),
]
WAIT_S = 30
FRAME_SETTINGS = b"\0\0\0\4\0\0\0\0\0"


class Blocking:
    """Runs `body(transport)`."""

    def run(self, url, body, **settings):
        return _blocking_runtime.run(self._whole(blocking_transport, url, body, settings))

    def after(self, event, callback):
        """Call `callback` from another thread when `event` is set, as a watchdog does."""
        threading.Thread(target=lambda: (event.wait(WAIT_S), callback())).start()

    async def sleep(self, event):
        assert event.wait(WAIT_S)

    @staticmethod
    async def _whole(make, url, body, settings):
        endpoint = Endpoint.parse(url)
        transport = make(endpoint, Settings(endpoints=(endpoint,), **{"model_name": "tensorrt_llm"} | settings))
        try:
            return await body(transport)
        finally:
            await transport.close()


class Asyncio(Blocking):
    def run(self, url, body, **settings):
        return asyncio.run(self._whole(asyncio_transport, url, body, settings))

    def after(self, event, callback):
        """Call `callback` on the loop's own thread, as a watchdog does."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=lambda: (event.wait(WAIT_S), loop.call_soon_threadsafe(callback))).start()

    async def sleep(self, event):
        assert await asyncio.to_thread(event.wait, WAIT_S)


@pytest.fixture(params=[Blocking, Asyncio])
def driver(request):
    return request.param()


@pytest.fixture
def proxy(grpc_server):
    with Proxy(grpc_server.port) as proxy:
        yield proxy


def opened(transport, connect_s=10.0):
    return transport.open("r1", INPUTS, connect_s=connect_s)


async def everything(transport, connect_s=10.0):
    stream = opened(transport, connect_s)
    try:
        return await rest(stream)
    finally:
        await stream.close()


async def rest(stream):
    found = []
    while (outputs := await stream.receive()) is not None:
        found.append(outputs)
    return found


def failing(driver, url, body=everything, **settings):
    with pytest.raises(DeepseekTritonError) as caught:
        driver.run(url, body, **settings)
    return caught.value


# --- requests and responses ---


def test_what_is_sent(grpc_server, driver):
    grpc_server.script(grpc_server.responses(grpc_server.response(text_output="a")))
    driver.run(grpc_server.url, everything, model_version="2")
    (sent,) = grpc_server.requests
    assert (sent.model_name, sent.model_version, sent.id) == ("tensorrt_llm", "2", "r1")
    assert sent.parameters["triton_enable_empty_final_response"].bool_param
    assert [(each.name, each.datatype, list(each.shape)) for each in sent.inputs] == [
        ("text_input", "BYTES", [1]),
        ("streaming", "BOOL", [1]),
        ("sampling_param_max_tokens", "INT32", [1]),
        ("sampling_param_stop", "BYTES", [1, 2]),
    ]
    assert list(sent.raw_input_contents) == [b"\3\0\0\0h\xc3\xa9", b"\1", b"\7\0\0\0", b"\1\0\0\0a\1\0\0\0b"]


def test_responses(grpc_server, driver):
    """An empty final response is left out, and a stream that ended stays so."""

    async def body(transport):
        stream = opened(transport)
        found = await rest(stream)
        assert await stream.receive() is None
        await stream.close()
        await stream.close()
        return found

    last = {"text_output": "好", "finish_reason": "stop", "num_output_tokens": 2}
    responses = (grpc_server.response(text_output="你"), grpc_server.response(**last), grpc_server.response(final=True))
    grpc_server.script(grpc_server.responses(*responses))
    assert driver.run(grpc_server.url, body) == [{"text_output": "你"}, last]


def test_a_request_that_ends_is_not_cancelled(grpc_server, driver):
    ended = []

    def answer(request, context):
        yield grpc_server.response(text_output="a")
        assert grpc_server.release.wait(WAIT_S)
        ended.append(context.is_active())

    async def body(transport):
        stream = opened(transport)
        await stream.receive()
        grpc_server.release.set()
        assert await stream.receive() is None
        await stream.close()

    grpc_server.script(answer)
    driver.run(grpc_server.url, body)
    assert ended == [True]


def test_many_streams_at_once(grpc_server, driver):
    """All streams share one connection, and each gets its own answer."""

    def answer(request, context):
        yield grpc_server.response(text_output=request.id)

    async def one(transport, number):
        stream = transport.open(str(number), INPUTS, connect_s=10.0)
        found = await rest(stream)
        await stream.close()
        return found

    async def body(transport):
        if isinstance(driver, Asyncio):
            return await asyncio.gather(*(one(transport, number) for number in range(20)))
        found = [None] * 20

        def thread(number):
            found[number] = _blocking_runtime.run(one(transport, number))

        threads = [threading.Thread(target=thread, args=(number,)) for number in range(20)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return found

    grpc_server.script(*[answer] * 20)
    assert driver.run(grpc_server.url, body) == [[{"text_output": str(number)}] for number in range(20)]


# --- errors the server sends ---


@pytest.mark.parametrize("num_before", [0, 1])
def test_an_error_in_the_stream_is_its_end(grpc_server, driver, num_before):
    async def body(transport):
        stream = opened(transport)
        for _ in range(num_before):
            await stream.receive()
        with pytest.raises(DeepseekTritonError) as caught:
            await stream.receive()
        assert await stream.receive() is None
        await stream.close()
        return caught.value

    answers = [grpc_server.response(text_output="a")] * num_before
    for message, kind, code, unprocessed in (
        ("[E_PROMPT_TOO_LONG] 9 > 8", InvalidRequest, "E_PROMPT_TOO_LONG", False),
        ("[E_OVERLOADED] full", Overloaded, "E_OVERLOADED", True),
        ("[E_UNAVAILABLE] stopping", ServerUnavailable, "E_UNAVAILABLE", True),
        ("Request for unknown model: 'x' is not found", ModelNotFound, None, False),
        ("what", ServerError, None, False),
    ):
        grpc_server.script(grpc_server.responses(*answers, grpc_server.error(message)))
        error = driver.run(grpc_server.url, body)
        assert (type(error), error.code, str(error)) == (kind, code, message)
        assert error.unprocessed is (unprocessed and not num_before)


def test_a_status_becomes_an_error_of_this_package(grpc_server, driver, subtests):
    code = grpc.StatusCode
    said = {status: (status, "what", BY_STATUS_CODE[status], "what") for status in code if status is not code.OK}
    more = [
        (code.UNAVAILABLE, "[E_OVERLOADED] full", Overloaded, "[E_OVERLOADED] full"),
        (code.INTERNAL, "", ServerError, "INTERNAL"),
        (code.UNAUTHENTICATED, "no token", AccessDenied, "no token"),
        (code.PERMISSION_DENIED, "not you", AccessDenied, "not you"),
    ]
    assert set(BY_STATUS_CODE) == set(code)
    for status, details, kind, text in [*said.values(), *more]:
        grpc_server.script(lambda _, context, status=status, details=details: context.abort(status, details))
        error = failing(driver, grpc_server.url)
        with subtests.test(f"{status.name} {details}"):
            assert (type(error), str(error)) == (kind, text)
            assert type(error).__module__ == exceptions.__name__
            assert error.unprocessed is (status is code.RESOURCE_EXHAUSTED or details.startswith("[E_OVERLOADED]"))


def test_a_refusal_after_the_first_response_is_not_unprocessed(grpc_server, driver):
    def answer(request, context):
        yield grpc_server.response(text_output="a")
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    grpc_server.script(answer)
    error = failing(driver, grpc_server.url)
    assert (type(error), error.unprocessed) == (Overloaded, False)


def test_responses_that_can_not_be_read(grpc_server, driver):
    """Outputs without their contents, a response over the limit, and what is no message of Triton."""
    broken = grpc_server.response(text_output="a")
    broken.infer_response.ClearField("raw_output_contents")
    large = grpc_server.response(text_output="a" * 2000)
    for response, said in ((broken, "raw contents"), (large, "connection.max_message_bytes")):
        grpc_server.script(grpc_server.responses(response))
        error = failing(driver, grpc_server.url, connection=Connection(max_message_bytes=1000))
        assert (type(error), said in str(error), error.unprocessed) == (ProtocolError, True, False)

    handler = grpc.stream_stream_rpc_method_handler(lambda requests, context: iter([b"\xff\xff"]))
    methods = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelStreamInfer": handler})
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((methods,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        error = failing(driver, f"grpc://127.0.0.1:{port}")
    finally:
        server.stop(None).wait()
    assert type(error) is ProtocolError
    assert "ModelStreamInferResponse" in str(error)


# --- sizes ---


def test_responses_of_megabytes_are_within_the_default(grpc_server, driver):
    grpc_server.script(grpc_server.responses(grpc_server.response(text_output="a" * 5_000_000)))
    (outputs,) = driver.run(grpc_server.url, everything)
    assert len(outputs["text_output"]) == 5_000_000


@pytest.mark.slow
def test_a_request_over_the_servers_limit(grpc_server, driver):
    async def body(transport):
        stream = transport.open("r1", [Input("text_input", "BYTES", ["a" * 9_000_000])], connect_s=10.0)
        await stream.receive()

    assert type(failing(driver, grpc_server.url, body)) is InvalidRequest


# --- the end of connections ---


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_connection_lost_before_the_first_response_or_in_the_middle(grpc_server, proxy, driver, num_before):
    """The server had the request, and may have processed it."""

    async def body(transport):
        stream = opened(transport)
        for _ in range(num_before):
            await stream.receive()
        driver.after(grpc_server.asked, proxy.cut)
        try:
            await rest(stream)
        finally:
            await stream.close()

    grpc_server.script(grpc_server.silence(*[grpc_server.response(text_output="a")] * num_before))
    error = failing(driver, f"grpc://127.0.0.1:{proxy.port}", body)
    assert (type(error), error.unprocessed) == (ServerUnavailable, False)


def test_a_server_that_comes_back_is_found(grpc_server, proxy, driver):
    async def body(transport):
        await everything(transport)
        proxy.cut()
        while True:
            try:
                return await everything(transport)
            except ServerUnavailable:
                pass

    answer = grpc_server.responses(grpc_server.response(text_output="a"))
    grpc_server.script(*[answer] * 10)  # of some the answer is lost, where the connection is cut late
    assert driver.run(f"grpc://127.0.0.1:{proxy.port}", body) == [{"text_output": "a"}]


def refused_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_nobody_there(driver):
    for address in (f"127.0.0.1:{refused_port()}", "no.such.host.invalid:8001"):
        for connect_s in (10.0, None):
            error = failing(driver, f"grpc://{address}", lambda transport: everything(transport, connect_s))  # noqa: B023
            assert (type(error), error.unprocessed) == (ServerUnavailable, True)
    for method in ("server_ready", "model_ready", "metadata"):
        url = f"grpc://127.0.0.1:{refused_port()}"
        error = failing(driver, url, lambda transport: getattr(transport, method)(10.0))  # noqa: B023
        assert (type(error), error.unprocessed) == (ServerUnavailable, True)


@pytest.fixture
def blackhole():
    """A port where nothing answers, not even TCP: its queue of connections is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@pytest.mark.slow
def test_connecting_is_limited(driver, blackhole):
    """Also where something listens."""
    with RawServer(lambda connection: connection.recv(1 << 16)) as server:
        for port in (blackhole, server.port):
            error = failing(driver, f"grpc://127.0.0.1:{port}", lambda transport: everything(transport, 0.2))
            assert (type(error), error.unprocessed) == (ServerUnavailable, True)
            assert str(error) == "no connection within 0.2 s"


@pytest.mark.slow
def test_gRPC_gives_up_by_itself_where_the_request_has_no_limit(driver, blackhole):
    error = failing(
        driver,
        f"grpc://127.0.0.1:{blackhole}",
        lambda transport: everything(transport, None),
        timeouts=Timeouts(connect=0.1),
    )
    assert (type(error), error.unprocessed) == (ServerUnavailable, True)


def test_an_interrupt_while_connecting(driver, blackhole):
    async def body(transport):
        stream = opened(transport, 600.0)
        begun = threading.Event()
        driver.after(begun, stream.interrupt)
        begin = stream._remember
        stream._remember = lambda call: (begin(call), begun.set())[0]
        await stream.receive()

    assert type(failing(driver, f"grpc://127.0.0.1:{blackhole}", body)) is Cancelled


def test_another_service(http_server, driver):
    """The client takes the HTTP port for the gRPC port."""
    error = failing(driver, http_server.url.replace("http://", "grpc://"))
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


def status_503(connection):
    until_request(connection)
    connection.sendall(frame(1, 5, 1, b"\x08\x03503"))
    connection.recv(1 << 16)


def goaway(connection):
    """Bytes of a server that had the request; the connection ends after them."""
    until_request(connection)
    connection.sendall(frame(7, 0, 0, struct.pack(">II", 1, 0)))
    connection.shutdown(socket.SHUT_RDWR)


def closed(connection):
    until_request(connection)
    connection.shutdown(socket.SHUT_RDWR)


def reset_stream(connection):
    until_request(connection)
    connection.sendall(frame(3, 0, 1, struct.pack(">I", 11)))
    connection.recv(1 << 16)


def test_only_a_request_that_surely_was_not_worked_on_is_unprocessed(driver):
    for behave, kind, unprocessed in (
        (status_503, ServerUnavailable, True),
        (goaway, ServerUnavailable, False),
        (closed, ServerUnavailable, False),
        (reset_stream, Overloaded, False),
    ):
        with RawServer(behave) as server:
            error = failing(driver, f"grpc://127.0.0.1:{server.port}", lambda transport: everything(transport, None))
        assert (type(error), error.unprocessed) == (kind, unprocessed)


# --- cancelling ---


@pytest.mark.parametrize("num_before", [0, 1])
def test_an_interrupt_before_the_first_response_or_in_the_middle(grpc_server, driver, num_before):
    async def body(transport):
        stream = opened(transport)
        for _ in range(num_before):
            await stream.receive()
        driver.after(grpc_server.asked, stream.interrupt)
        await stream.receive()

    grpc_server.script(grpc_server.silence(*[grpc_server.response(text_output="a")] * num_before))
    assert type(failing(driver, grpc_server.url, body)) is Cancelled
    assert grpc_server.gone.wait(WAIT_S)


def test_an_interrupt_before_anything_was_sent(grpc_server, driver):
    """Nothing is sent before the first receive."""

    async def body(transport):
        await opened(transport).close()
        assert grpc_server.metadata == []
        stream = opened(transport)
        stream.interrupt()
        await stream.receive()

    assert type(failing(driver, grpc_server.url, body)) is Cancelled
    assert grpc_server.requests == []


def test_closing_cancels(grpc_server, driver):
    async def body(transport):
        stream = opened(transport)
        await stream.receive()
        assert not grpc_server.gone.is_set()
        await stream.close()
        await driver.sleep(grpc_server.gone)

    grpc_server.script(grpc_server.silence(grpc_server.response(text_output="a")))
    driver.run(grpc_server.url, body)


def until_gone(grpc_server, *responses):
    """Send these responses and wait until the client leaves. The future tells whether it did."""
    left = Future()

    def answer(request, context):
        context.add_callback(lambda: left.done() or left.set_result(True))
        yield from responses
        if not grpc_server.gone.wait(WAIT_S):
            left.set_result(False)

    grpc_server.script(answer)
    return left


@pytest.mark.slow
def test_a_stream_that_is_forgotten_is_cancelled(grpc_server, driver):
    left = until_gone(grpc_server, grpc_server.response(text_output="a"))

    async def body(transport):
        stream = opened(transport)
        await stream.receive()
        del stream
        gc.collect()
        assert await asyncio.to_thread(left.result) if isinstance(driver, Asyncio) else left.result()

    driver.run(grpc_server.url, body)


@pytest.mark.slow
def test_a_stream_that_is_forgotten_after_its_loop(grpc_server):
    left = until_gone(grpc_server, grpc_server.response(text_output="a"))
    endpoint = Endpoint.parse(grpc_server.url)
    transport = asyncio_transport(endpoint, Settings(endpoints=(endpoint,), model_name="tensorrt_llm"))
    stream = opened(transport)
    asyncio.run(stream.receive())
    del stream, transport
    gc.collect()
    assert left.result(WAIT_S)


@pytest.mark.slow
def test_an_end_that_is_announced_and_does_not_come(grpc_server, driver):
    """Whether the stream is read on or closed, and after an error; responses after the final one are left out."""
    final, error = grpc_server.response(text_output="a", final=True), grpc_server.error("what")
    left = until_gone(grpc_server, final)

    async def body(transport):
        stream = opened(transport)
        assert await stream.receive() == {"text_output": "a"}
        await stream.close()

    driver.run(grpc_server.url, body)
    assert left.result(WAIT_S)
    for responses in ((final,), (final, grpc_server.response(text_output="b"))):
        grpc_server.gone.clear()
        left = until_gone(grpc_server, *responses)
        assert driver.run(grpc_server.url, everything) == [{"text_output": "a"}]
        assert left.result(WAIT_S)
    grpc_server.gone.clear()
    left = until_gone(grpc_server, error)
    assert type(failing(driver, grpc_server.url)) is ServerError
    assert left.result(WAIT_S)


def test_an_interrupt_while_the_end_is_waited_for(grpc_server, driver, monkeypatch):
    for module in (blocking_channel, asyncio_channel):
        monkeypatch.setattr(module, "END_S", 2.0 * WAIT_S)
    left = until_gone(grpc_server, grpc_server.response(text_output="a", final=True))

    async def body(transport):
        stream = opened(transport)
        await stream.receive()
        driver.after(grpc_server.asked, stream.interrupt)
        assert await stream.receive() is None
        await stream.close()

    driver.run(grpc_server.url, body)
    assert left.result(WAIT_S)


def test_a_task_that_is_cancelled_while_it_waits_for_the_end(grpc_server, monkeypatch):
    monkeypatch.setattr(asyncio_channel, "END_S", 2.0 * WAIT_S)
    left = until_gone(grpc_server, grpc_server.response(text_output="a", final=True))

    async def body(transport):
        stream = opened(transport)
        await stream.receive()
        task = asyncio.ensure_future(stream.close())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(left.result)

    Asyncio().run(grpc_server.url, body)


def test_closing_the_transport_ends_its_streams(grpc_server, driver):
    async def body(transport):
        stream = opened(transport)
        await stream.receive()
        await transport.close()
        with pytest.raises(Cancelled):
            await stream.receive()
        with pytest.raises(Cancelled, match="closed"):
            await everything(transport)

    grpc_server.script(grpc_server.silence(grpc_server.response(text_output="a")))
    driver.run(grpc_server.url, body)
    assert grpc_server.gone.wait(WAIT_S)


def test_a_cancelled_task_stays_cancelled_and_cancels_the_request(grpc_server):
    async def body(transport):
        stream = opened(transport)
        await stream.receive()
        task = asyncio.ensure_future(stream.receive())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(grpc_server.gone.wait, WAIT_S)

    grpc_server.script(grpc_server.silence(grpc_server.response(text_output="a")))
    Asyncio().run(grpc_server.url, body)


@pytest.mark.skipif(not hasattr(asyncio.Task, "cancelling"), reason="Python 3.10 can't tell the two apart")
def test_a_task_that_is_cancelled_while_its_stream_is_interrupted_stays_cancelled(grpc_server):
    async def body(transport):
        stream = opened(transport)
        await stream.receive()
        task = asyncio.ensure_future(stream.receive())
        await asyncio.sleep(0)
        stream.interrupt()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    grpc_server.script(grpc_server.silence(grpc_server.response(text_output="a")))
    Asyncio().run(grpc_server.url, body)


# --- headers and TLS ---


def test_headers_and_token_go_with_every_call(grpc_server, driver):
    tokens = iter(["one", "two", "three"])

    async def body(transport):
        await transport.server_ready(10.0)
        await everything(transport)

    grpc_server.script(grpc_server.responses())
    driver.run(grpc_server.url, body, headers={"X-Team": "red"}, token=lambda: next(tokens))
    assert [(each["x-team"], each["authorization"]) for each in grpc_server.metadata] == [
        ("red", "Bearer one"),
        ("red", "Bearer two"),
    ]


def test_headers_that_gRPC_can_not_send(driver):
    async def body(transport):
        raise AssertionError

    for name in ("trace-bin", "Trace-Bin", "a~b", "é"):
        error = failing(driver, "grpc://127.0.0.1:1", body, headers={name: "x"})
        assert type(error) is InvalidRequest
        assert name in str(error)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    client = authority.issue_cert("client@example.org")
    client.private_key_and_cert_chain_pem.write_to_path(folder / "client.pem")
    client.private_key_pem.write_to_path(folder / "client.key")
    for number, blob in enumerate(client.cert_chain_pems):
        blob.write_to_path(folder / "client.crt", append=number > 0)
    (folder / "garbage.pem").write_text("garbage")
    return authority, folder


@pytest.fixture
def secure(authority):
    """Starts a server with a certificate for localhost."""
    servers = []

    def start(*, mutual=False):
        certificate = authority[0].issue_cert("localhost")
        pair = (certificate.private_key_pem.bytes(), b"".join(each.bytes() for each in certificate.cert_chain_pems))
        root = authority[0].cert_pem.bytes() if mutual else None
        servers.append(GrpcServer(grpc.ssl_server_credentials([pair], root, mutual)))
        servers[-1].script(servers[-1].responses(servers[-1].response(text_output="a")))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def test_tls(secure, authority, driver):
    """A server that nobody vouches for, or that wants a certificate, gets no request without one."""
    folder, ca = authority[1], Tls(ca=authority[1] / "ca.pem")
    assert driver.run(secure().url, everything, tls=ca) == [{"text_output": "a"}]
    for certificate, key in (("client.crt", folder / "client.key"), ("client.pem", None)):
        tls = Tls(ca=folder / "ca.pem", certificate=folder / certificate, key=key)
        assert driver.run(secure(mutual=True).url, everything, tls=tls) == [{"text_output": "a"}]
    for url, settings in ((secure().url, {}), (secure(mutual=True).url, {"tls": ca})):
        error = failing(driver, url, **settings)
        assert (type(error), error.unprocessed) == (ServerUnavailable, True)


def test_files_that_are_no_certificates(authority, driver):
    async def body(transport):
        raise AssertionError

    wrong = [{"ca": "garbage.pem"}, {"certificate": "garbage.pem"}]
    for names in [*wrong, {"certificate": "client.crt", "key": "garbage.pem"}]:
        tls = Tls(**{field: authority[1] / name for field, name in names.items()})
        error = failing(driver, "grpcs://localhost:1", body, tls=tls)
        assert type(error) is InvalidRequest
        assert "garbage.pem" in str(error)


# --- what is asked besides ---


@pytest.mark.parametrize("is_ready", [True, False])
def test_ready(grpc_server, driver, is_ready):
    async def body(transport):
        return await transport.server_ready(10.0), await transport.model_ready(10.0)

    grpc_server.ready = is_ready
    assert driver.run(grpc_server.url, body, model_version="3") == (is_ready, is_ready)
    assert (grpc_server.requests[0].name, grpc_server.requests[0].version) == ("tensorrt_llm", "3")


def test_metadata(grpc_server, driver):
    grpc_server.model = pb.ModelMetadataResponse(name="m", versions=["1"], platform="python")
    grpc_server.model.inputs.add(name="text_input", datatype="BYTES", shape=[-1])
    metadata = driver.run(grpc_server.url, lambda transport: transport.metadata(10.0))
    assert (metadata.name, metadata.versions, metadata.platform) == ("m", ("1",), "python")
    assert (metadata.inputs, metadata.outputs) == ((TensorMetadata("text_input", "BYTES", (-1,)),), ())

    unknown = (grpc.StatusCode.NOT_FOUND, "Request for unknown model")
    grpc_server.answers["ModelMetadata"] = lambda request, context: context.abort(*unknown)
    assert type(failing(driver, grpc_server.url, lambda transport: transport.metadata(10.0))) is ModelNotFound


def test_asking_a_server_that_does_not_answer(grpc_server, driver):
    async def body(transport):
        await transport.server_ready(10.0)
        await transport.metadata(0.2)

    grpc_server.answers["ModelMetadata"] = lambda request, context: grpc_server.release.wait(WAIT_S)
    error = failing(driver, grpc_server.url, body)
    assert (type(error), str(error), error.unprocessed) == (ServerUnavailable, "no answer within 0.2 s", True)


def test_a_server_that_is_not_asked_whether_it_lives_once_it_has_answered(grpc_server, driver):
    asked = []
    grpc_server.answers["ServerLive"] = lambda request, context: asked.append(1) or pb.ServerLiveResponse(live=True)

    async def body(transport):
        await transport.metadata(10.0)
        await everything(transport)

    grpc_server.script(grpc_server.responses())
    driver.run(grpc_server.url, body)
    assert asked == []


def test_a_server_that_refuses_to_say_whether_it_lives_is_asked_all_the_same(grpc_server, driver):
    grpc_server.answers["ServerLive"] = lambda request, context: context.abort(grpc.StatusCode.UNIMPLEMENTED, "no")
    grpc_server.script(grpc_server.responses(grpc_server.response(text_output="a")))
    assert driver.run(grpc_server.url, everything) == [{"text_output": "a"}]


def test_metrics_come_over_http(grpc_server, http_server, driver):
    http_server.script(http_server.body(200, b"nv_inference_count 1\n", "text/plain"))
    text = driver.run(grpc_server.url, lambda transport: transport.metrics(f"{http_server.url}/metrics", 10.0))
    assert text == "nv_inference_count 1\n"


def test_proxies_of_the_environment_are_not_used(grpc_server, driver, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{refused_port()}")
    grpc_server.script(grpc_server.responses(grpc_server.response(text_output="a")))
    assert driver.run(grpc_server.url, everything) == [{"text_output": "a"}]
