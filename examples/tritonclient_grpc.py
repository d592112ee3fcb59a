"""Use NVIDIA's tritonclient, blocking and with asyncio. Usage: python tritonclient_grpc.py [HOST:PORT]"""

from __future__ import annotations

import asyncio
import queue
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio


def request(prompt: str, **sampling: Any) -> dict[str, Any]:
    """Both clients take the prompt as a tensor, and plain names as request parameters."""
    text = triton.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([prompt.encode()], dtype=object))
    return {"model_name": "tensorrt_llm", "inputs": [text], "parameters": {"streaming": True, **sampling}}


def text_of(result: triton.InferResult | None, error: Exception | None) -> str:
    if error is not None:
        raise error
    return str(result.as_numpy("text_output")[0].decode())


def blocking(address: str) -> None:
    responses: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with triton.InferenceServerClient(address) as client:
        client.start_stream(callback=lambda result, error: responses.put((result, error)))
        client.async_stream_infer(**request("Once upon a time", max_tokens=16, temperature=0.6))
        is_last = False
        while not is_last:
            result, error = responses.get()
            print(text_of(result, error), end="", flush=True)
            is_last = result.as_numpy("finish_reason") is not None
    print()


async def with_asyncio(address: str) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield request("Tell me a story.", max_tokens=16)

    async with triton_aio.InferenceServerClient(address) as client:
        async for result, error in client.stream_infer(requests()):
            print(text_of(result, error), end="", flush=True)
    print("\nasyncio: done")


if __name__ == "__main__":
    server = sys.argv[1] if len(sys.argv) > 1 else "localhost:8001"
    blocking(server)
    asyncio.run(with_asyncio(server))
