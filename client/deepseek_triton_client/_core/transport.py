"""The interface between the client and the network: how a request is sent, whatever protocol carries it.

All methods that may wait are coroutines. Those of the blocking transports only ever wait by blocking, so that
`_blocking_runtime.run` can run them to their end in one step, and everything above this interface is written once.

Implementations raise only errors of this package: each translates the errors of its library in one place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deepseek_triton_client._core.results import ModelMetadata

Outputs = Mapping[str, Any]
"""One response: output name -> value. A value is an int, float, bool or str; or a list of them, unless it has one
element. This is the form of /generate's JSON; the tensors of gRPC are converted to it."""


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor of a request."""

    name: str
    datatype: str
    """Name of the datatype in Triton's protocol: BYTES, BOOL, INT32, UINT64 or FP32."""
    values: Sequence[Any]
    batched: bool = False
    """Whether the model has a batch dimension: the shape of this batch of one is [1, len(values)] then."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, len(self.values)) if self.batched else (len(self.values),)


class ResponseStream(Protocol):
    """The responses to one request. Only one thread or task reads and closes it."""

    async def receive(self) -> Outputs | None:
        """Return the next response; None at the end. Raises the server's error. The first call sends the request."""
        ...

    def interrupt(self) -> None:
        """Make a waiting `receive` fail or end soon. Called from any thread, but not after `close`; never raises."""
        ...

    async def close(self) -> None:
        """End the use of the network. An unfinished request is cancelled, and the server sees it. May be called again.

        Only from here on, and not from the stream's end, the connection can serve others: no `interrupt` may follow.
        """
        ...


class Transport(Protocol):
    """One model on one server. Threads may share a blocking transport, the tasks of one event loop the other kind."""

    always_streams: bool
    """Whether to stream even whole answers, because only then the server notices that a client left."""

    def open(self, request_id: str, inputs: Sequence[Input], *, connect_s: float | None) -> ResponseStream:
        """Prepare a request; the first `receive` sends it. `connect_s` limits the time to reach the server."""
        ...

    # The following methods apply `timeout_s` to each of their steps; None is no limit.

    async def server_ready(self, timeout_s: float | None) -> bool: ...

    async def model_ready(self, timeout_s: float | None) -> bool: ...

    async def metadata(self, timeout_s: float | None) -> ModelMetadata: ...

    async def metrics(self, url: str, timeout_s: float | None) -> str:
        """Return the text at `url`, which is http:// or https://."""
        ...

    async def close(self) -> None: ...
