"""A client for DeepSeek on Triton, as deepseek-triton serves it.

    from deepseek_triton_client import Client

    with Client("http://localhost:8000") as client:
        print(client.generate("Why is the sky blue?", max_tokens=200))
        with client.stream("Tell me a story.", temperature=0.6) as stream:
            for chunk in stream:
                print(chunk, end="", flush=True)

HTTP needs httpx only; `grpc://` URLs need the extra: pip install deepseek-triton[grpc].
"""

from deepseek_triton_client._client import Client
from deepseek_triton_client._errors import (
    Cancelled,
    DeadlineExceeded,
    DeepseekTritonError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ProtocolError,
    ServerError,
    ServerUnavailable,
)
from deepseek_triton_client._models import Chunk, Completion, ModelMetadata, TensorMetadata
from deepseek_triton_client._sampling import SamplingParams
from deepseek_triton_client._stream import Stream
from deepseek_triton_client._timeouts import Timeouts

__all__ = [
    "Cancelled",
    "Chunk",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "DeepseekTritonError",
    "InvalidRequest",
    "ModelMetadata",
    "ModelNotFound",
    "Overloaded",
    "ProtocolError",
    "SamplingParams",
    "ServerError",
    "ServerUnavailable",
    "Stream",
    "TensorMetadata",
    "Timeouts",
]
