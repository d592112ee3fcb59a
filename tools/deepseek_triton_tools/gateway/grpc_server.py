"""One Triton server over gRPC, by the client's own transport.

Each response becomes the event that Triton's HTTP front end would send, so everything after it is the same for both.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import msgspec

from deepseek_triton_client._asyncio_runtime import AsyncioRuntime
from deepseek_triton_client._core.client_settings import Endpoint, Settings, Tls
from deepseek_triton_client._core.exceptions import (
    AccessDenied,
    Cancelled,
    DeepseekTritonError,
    ModelNotFound,
    Overloaded,
    ServerUnavailable,
)
from deepseek_triton_client._core.interfaces import Input
from deepseek_triton_client._grpc.grpc_transport import GrpcStream, GrpcTransport
from deepseek_triton_tools.gateway.triton_call import Call, UpstreamError
from deepseek_triton_tools.gateway.triton_server import CONNECT_S, UNREAD_BYTES, TritonConnection, TritonServer

_STATUSES: dict[type[DeepseekTritonError], int] = {AccessDenied: 403, ModelNotFound: 404, Overloaded: 429}
"""HTTP would answer with these. Any other error is 500, which tells nothing more than its text."""
_DATATYPES = {str: "BYTES", bool: "BOOL", int: "INT32"}
"""All that the inputs of a Call need."""


class GrpcServer(TritonServer):
    """See `TritonServer`. ca: certificates to trust, as PEM; None for gRPC's own."""

    def __init__(self, url: str, model: str, *, headers: Mapping[str, str], ca: Path | None) -> None:
        super().__init__(url, model)
        endpoint = Endpoint.parse(url)
        self._settings = Settings(endpoints=(endpoint,), model_name=model, headers=headers, tls=Tls(ca=ca))
        self._grpc = self._transport()

    def _transport(self) -> GrpcTransport:
        """It connects when it is first used, and again when the connection was lost."""
        return GrpcTransport(self._settings.endpoints[0], self._settings, AsyncioRuntime().transport, is_asyncio=True)

    async def get(self, path: str, *, fresh: bool = False) -> tuple[int, bytes]:
        """Whether the server is ready, or the model where `path` names one."""
        is_model = "models" in path
        try:
            if await (self._grpc.model_ready(None) if is_model else self._grpc.server_ready(None)):
                return 200, b""
            problem = "the model is not ready" if is_model else "it is not ready"
        except DeepseekTritonError as error:
            problem = str(error)
        raise UpstreamError(f"{self.url}: {problem}", unprocessed=True)

    async def close(self) -> None:
        await super().close()
        # Another is at hand, because a last release of a KV cache may follow.
        last, self._grpc = self._grpc, self._transport()
        await last.close()

    async def _send(self, call: Call, *, fresh: bool) -> tuple[TritonConnection, bool]:
        inputs = []
        for name, value in call.inputs.items():
            values = value if isinstance(value, (list, tuple)) else (value,)
            inputs.append(Input(name, _DATATYPES[type(values[0])] if values else "INT32", values))
        return GrpcConnection(
            self._grpc.open(call.request_id, inputs, connect_s=CONNECT_S, headers=call.headers)
        ), False


class GrpcConnection(TritonConnection):
    def __init__(self, stream: GrpcStream) -> None:
        super().__init__()
        self._ended = False
        self._room = asyncio.Event()
        # A task of its own, because gRPC cancels the request with the task that waits for its response.
        self._receiving = asyncio.get_running_loop().create_task(self._receive(stream))

    async def read(self) -> bytes:
        body = await super().read()
        self._room.set()
        return body

    def close(self) -> None:
        self._receiving.cancel()

    async def _receive(self, stream: GrpcStream) -> None:
        try:
            while (outputs := await stream.receive()) is not None:
                self._take(200, outputs)
                self._room.clear()
                if self._unread > UNREAD_BYTES:
                    await self._room.wait()
            self._status, self._ended = 200, True
        except DeepseekTritonError as error:
            if type(error) in (ServerUnavailable, Cancelled) and not error.code:
                self._fail(str(error), unsent=error.unprocessed)
            else:
                self._take(_STATUSES.get(type(error), 500), {"error": str(error)})
                self._ended = True
        finally:
            self._wake()
            await stream.close()

    def _take(self, status: int, outputs: Mapping[str, object]) -> None:
        self.heard = True
        self._status = self._status or status
        self.on_body(b"data: %b\n\n" % msgspec.json.encode(outputs))
        self._wake()
