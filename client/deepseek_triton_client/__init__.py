"""A client for text generation on Triton: for DeepSeek as deepseek-triton serves it, and for other models.

    from deepseek_triton_client import Client

    with Client("http://localhost:8000") as client:
        print(client.generate("Why is the sky blue?", max_tokens=200))
        with client.stream("Tell me a story.", temperature=0.6) as stream:
            for chunk in stream:
                print(chunk, end="", flush=True)

AsyncClient is the same for asyncio. `grpc://` URLs need the extra `grpc`. The module
`deepseek_triton_client.testing` has a fake server for the tests of your own program; import it by that name.
"""

from typing import TYPE_CHECKING, Any

from deepseek_triton_client._client import Client, Stream
from deepseek_triton_client._core.client_settings import Connection, Retries, Timeouts, Tls
from deepseek_triton_client._core.exceptions import (
    AccessDenied,
    Cancelled,
    DeadlineExceeded,
    DeepseekTritonError,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    ProtocolError,
    ServerError,
    ServerUnavailable,
)
from deepseek_triton_client._core.results import (
    Answer,
    Chunk,
    Completion,
    Logprob,
    Metrics,
    ModelMetadata,
    PerfMetrics,
    Readiness,
    Sample,
    TensorMetadata,
)
from deepseek_triton_client._core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from deepseek_triton_client._async_client import AsyncClient, AsyncStream

__all__ = [
    "AccessDenied",
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Chunk",
    "Client",
    "Completion",
    "Connection",
    "DeadlineExceeded",
    "DeepseekTritonError",
    "InvalidRequest",
    "Logprob",
    "Metrics",
    "ModelMetadata",
    "ModelNotFound",
    "ModelNotReady",
    "Overloaded",
    "PerfMetrics",
    "ProtocolError",
    "Readiness",
    "Retries",
    "Sample",
    "SamplingParams",
    "ServerError",
    "ServerUnavailable",
    "Stream",
    "TensorMetadata",
    "Timeouts",
    "Tls",
]


def __getattr__(name: str) -> Any:
    """Import the asynchronous client when it is asked for: importing asyncio takes longer than all else here."""
    if name in ("AsyncClient", "AsyncStream"):
        from deepseek_triton_client import _async_client

        return getattr(_async_client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
