"""A scripted gRPC server on a real socket, and a proxy that can be cut."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from support.contract_metadata import METADATA
from support.waiting import PATIENCE_S

OPTIONS = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 8 * 2**20)]


class GrpcServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers each stream with the next function given to `script`: it gets (request, context) and returns the
    responses."""

    wire = "grpc"

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        """Metadata of every call, also of those without a request."""
        self.asked = threading.Event()
        """Set when a request has come."""
        self.gone = threading.Event()
        """Set when a call's context ends."""
        self.release = threading.Event()
        """Set by a test to let a waiting script go on."""
        self.ready = True
        self.model = own_metadata()
        self.answers: dict[str, Callable[[Any, Any], Any]] = {}
        """Method name (ServerLive, ServerReady, ModelReady or ModelMetadata) -> function that answers in place of the
        default."""
        self._scripts: list[Callable[[Any, Any], Any]] = []
        self._server = grpc.server(ThreadPoolExecutor(max_workers=8), options=OPTIONS)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        if credentials is None:
            self.port = self._server.add_insecure_port("127.0.0.1:0")
            self.url = f"grpc://127.0.0.1:{self.port}"
        else:
            self.port = self._server.add_secure_port("127.0.0.1:0", credentials)
            self.url = f"grpcs://localhost:{self.port}"
        self._server.start()

    def script(self, *functions: Callable[[Any, Any], Any]) -> None:
        self._scripts.extend(functions)

    def stop(self) -> None:
        self.release.set()
        self._server.stop(grace=None).wait()

    def responses(self, *responses: Any) -> Callable[[Any, Any], Any]:
        return lambda request, context: iter(responses)

    def replies(self, *outputs: Any) -> Callable[[Any, Any], Any]:
        return self.responses(*(self.response(**each, final="finish_reason" in each) for each in outputs))

    def says(self, message: str, *before: Any) -> Callable[[Any, Any], Any]:
        """Answers with an error, after these responses."""
        return self.responses(*(self.response(**each) for each in before), self.error(message))

    def hangs(self, *outputs: Any) -> Callable[[Any, Any], Any]:
        """Answers with these responses, and then with nothing until the client leaves."""

        def answer(request: Any, context: Any) -> Any:
            yield from (self.response(**each) for each in outputs)
            left = threading.Event()  # the server's own `gone` may belong to a call before
            assert not context.add_callback(left.set) or left.wait(PATIENCE_S)

        return answer

    @staticmethod
    def response(*, final: bool = False, **outputs: str | int) -> pb.ModelStreamInferResponse:
        """A response as Triton makes it: raw contents, and a parameter that marks the final one."""
        answer = pb.ModelStreamInferResponse()
        answer.infer_response.parameters["triton_final_response"].bool_param = final
        for name, value in outputs.items():
            datatype = "BYTES" if isinstance(value, str) else "INT32"
            answer.infer_response.outputs.add(name=name, datatype=datatype, shape=[1])
            answer.infer_response.raw_output_contents.append(serialized(value))
        return answer

    @staticmethod
    def error(message: str) -> pb.ModelStreamInferResponse:
        return pb.ModelStreamInferResponse(error_message=message)

    def ModelStreamInfer(self, request_iterator, context):
        context.add_callback(self.gone.set)
        self._note(context)
        for request in request_iterator:
            self.requests.append(request)
            self.asked.set()
            yield from self._scripts.pop(0)(request, context)

    def ServerLive(self, request, context):
        self._note(context)
        return self._answer("ServerLive", request, context, pb.ServerLiveResponse(live=True))

    def ServerReady(self, request, context):
        self._note(context)
        return self._answer("ServerReady", request, context, pb.ServerReadyResponse(ready=self.ready))

    def ModelReady(self, request, context):
        self._note(context)
        self.requests.append(request)
        return self._answer("ModelReady", request, context, pb.ModelReadyResponse(ready=self.ready))

    def ModelMetadata(self, request, context):
        self._note(context)
        return self._answer("ModelMetadata", request, context, self.model)

    def _note(self, context: grpc.ServicerContext) -> None:
        self.metadata.append(dict(context.invocation_metadata()))

    def _answer(self, method: str, request: Any, context: Any, otherwise: Any) -> Any:
        return self.answers[method](request, context) if method in self.answers else otherwise


def own_metadata() -> pb.ModelMetadataResponse:
    """The metadata of this project's model."""
    answer = pb.ModelMetadataResponse(name=METADATA.name, versions=METADATA.versions, platform=METADATA.platform)
    for tensors, declared in ((METADATA.inputs, answer.inputs), (METADATA.outputs, answer.outputs)):
        for tensor in tensors:
            declared.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    return answer


def serialized(value: str | int) -> bytes:
    if isinstance(value, int):
        return struct.pack("<i", value)
    encoded = value.encode()
    return struct.pack("<I", len(encoded)) + encoded


class RawServer:
    """Hands each connection to `behave`, which may do anything with it."""

    def __init__(self, behave: Callable[[socket.socket], None]) -> None:
        self._behave = behave
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._accepting = self._start(self._accept)

    def __enter__(self) -> "RawServer":
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        for each in self._sockets:
            with contextlib.suppress(OSError):  # some are closed already
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.keep(connection)
            self._threads.append(self._start(self._serve, connection))

    def keep(self, each: socket.socket) -> None:
        """Close this socket at the end."""
        self._sockets.append(each)

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the client may go, and the end of the test ends all
            self._behave(connection)

    @staticmethod
    def _start(function: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=function, args=arguments)
        thread.start()
        return thread


class Proxy(RawServer):
    """Passes connections on to `port` until `cut`."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._connections: list[socket.socket] = []
        super().__init__(self._pass)

    def cut(self) -> None:
        """Ends the connections with a TCP reset, as a machine that lost them does."""
        for each in self._connections:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):  # it may be gone
                each.shutdown(socket.SHUT_RD)
            each.close()

    def _pass(self, connection: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self._to))
        self.keep(server)
        self._connections.append(connection)
        back = self._start(_copy, server, connection)
        _copy(connection, server)
        back.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):  # one of them was cut
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)
