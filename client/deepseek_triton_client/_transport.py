"""The seam between the client and the network: one way to send a request, whatever carries it.

Implementations raise only errors of this package: each maps its library's errors at one border.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from deepseek_triton_client._models import Chunk, ModelMetadata
from deepseek_triton_client._wire import GenerateRequest


class ResponseStream(Protocol):
    """The answers to one request. One thread reads and closes it."""

    def __iter__(self) -> Iterator[Chunk]:
        """Read once; ends where the server ends the stream."""
        ...

    def interrupt(self) -> None:
        """Make a read that is blocked fail or end soon. From any thread, before `close`."""
        ...

    def close(self) -> None:
        """Let go. A request that has not ended is cancelled, and the server sees it."""
        ...


class Transport(Protocol):
    """One model on one server. Threads may share it."""

    def open(self, request: GenerateRequest) -> ResponseStream: ...

    def is_ready(self) -> bool: ...

    def metadata(self) -> ModelMetadata: ...

    def close(self) -> None: ...
