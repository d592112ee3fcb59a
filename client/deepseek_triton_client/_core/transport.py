"""The seam between the client and the network: one way to send a request, whatever carries it.

Everything is a coroutine. Those of the blocking transports never wait for anything but by blocking, so `_blocking.run`
can take them to their end in one go, and whatever stands above this seam is written once.

Implementations raise only errors of this package: each maps its library's errors at one border.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deepseek_triton_client._core.results import ModelMetadata

Outputs = Mapping[str, Any]
"""One response: output name -> value, a plain int, float, bool or str; a list of them where there is not exactly one.

That is how /generate's JSON has them, and gRPC's tensors are brought into the same form.
"""


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor of a request."""

    name: str
    datatype: str
    """Of Triton's protocol: BYTES, BOOL, INT32, UINT64 or FP32."""
    values: Sequence[Any]
    batched: bool = False
    """The model has a batch dimension, of which this is one: the shape is [1, len(values)], else [len(values)]."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, len(self.values)) if self.batched else (len(self.values),)


class ResponseStream(Protocol):
    """The responses to one request. One thread or task reads and closes it."""

    async def receive(self) -> Outputs | None:
        """The next response; None at the end of the stream. Raises what the server answered instead.

        The first call connects and sends the request.
        """
        ...

    def interrupt(self) -> None:
        """Make a `receive` that waits fail or end soon. From any thread, before `close`; never raises."""
        ...

    async def close(self) -> None:
        """Let go. A request that has not ended is cancelled, and the server sees it. May be called again.

        Only here, and not at the end of the stream, goes the connection to the next request: no `interrupt` follows.
        """
        ...


class Transport(Protocol):
    """One model on one server. Threads may share a blocking one, tasks of one event loop the other."""

    always_streams: bool
    """Ask for increments also where the whole text is wanted, because only then the server sees that a client left."""

    def open(self, request_id: str, inputs: Sequence[Input], *, connect_s: float | None) -> ResponseStream:
        """Nothing is sent before the first `receive`. `connect_s` limits reaching the server."""
        ...

    # Each limits every one of its steps to `timeout_s`; None is no limit.

    async def server_ready(self, timeout_s: float | None) -> bool: ...

    async def model_ready(self, timeout_s: float | None) -> bool: ...

    async def metadata(self, timeout_s: float | None) -> ModelMetadata: ...

    async def metrics(self, url: str, timeout_s: float | None) -> str:
        """The text at `url`, which is http:// or https://."""
        ...

    async def close(self) -> None: ...
