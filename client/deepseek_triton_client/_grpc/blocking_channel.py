"""gRPC for the blocking client. The coroutines here only ever wait by blocking."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import grpc  # type: ignore[import-untyped]

from deepseek_triton_client._core.exceptions import Cancelled
from deepseek_triton_client._grpc.grpc_channel import END_S, Metadata


class BlockingChannel:
    """See `GrpcChannel`. Threads may share it."""

    is_asyncio = False

    def __init__(self, target: str, *, options: list[tuple[str, int]], credentials: Any) -> None:
        # Not used: SingleThreadedUnaryStream. A lone thread takes a third less CPU with it, many threads take no less,
        # and each call that is cancelled in the middle keeps 18 KiB until the channel is closed (grpcio 1.85).
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=options)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=options)
        self._closed = False

    def call(self, path: str, request: bytes, *, metadata: Metadata, timeout_s: float | None) -> BlockingCall:
        try:
            return BlockingCall(self._channel.unary_stream(path)(request, timeout=timeout_s, metadata=metadata))
        except ValueError as exc:
            if self._closed:
                raise Cancelled("the client is closed") from exc
            raise

    async def close(self) -> None:
        self._closed = True
        self._channel.close()


class BlockingCall:
    """See `GrpcCall`. Any thread may cancel it."""

    def __init__(self, responses: Any) -> None:
        self._responses = responses

    async def read(self) -> bytes | None:
        data: bytes | None = next(self._responses, None)
        return data

    async def end(self) -> None:
        try:
            with suppress(grpc.FutureCancelledError):  # a cancelled call has ended too
                self._responses.exception(timeout=END_S)
        except grpc.FutureTimeoutError:
            self.cancel()

    def cancel(self) -> None:
        self._responses.cancel()
