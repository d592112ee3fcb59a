"""A context and a generation server joined by plain HTTP calls, as the contract says it, without our client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx

from deepseek_triton_tools.server.server_process import ServerProcess
from support.waiting import PATIENCE_S

Chunk = dict[str, Any]
PATH = "/v2/models/tensorrt_llm/generate_stream"


class Joined(NamedTuple):
    """Both legs of a request: every response of each server, in order."""

    context: list[Chunk]
    generation: list[Chunk]

    @property
    def last(self) -> Chunk:
        return self.generation[-1]

    @property
    def text(self) -> str:
        return text(self.generation)


def text(chunks: list[Chunk], output: str = "text_output") -> str:
    return "".join(chunk.get(output, "") for chunk in chunks)


def stream(server: ServerProcess, body: Chunk) -> Iterator[Chunk]:
    """Yield every response of a server. An error of the model is a chunk with "error"."""
    streamed = {"streaming": True, **body}
    with httpx.stream("POST", f"{server.http_url}{PATH}", json=streamed, timeout=PATIENCE_S) as answer:
        for line in answer.iter_lines():
            if line.startswith("data:"):
                yield json.loads(line.removeprefix("data:"))


def context_leg(server: ServerProcess, body: Chunk) -> list[Chunk]:
    return list(stream(server, {**body, "request_type": "context_only"}))


def generation_body(body: Chunk, context: list[Chunk], **changes: Any) -> Chunk:
    """The second request: the first one with what the context server handed over."""
    params = context[-1]["context_phase_params"]
    return {**body, "request_type": "generation_only", "context_phase_params": params, **changes}


def joined(context_server: ServerProcess, generation_server: ServerProcess, body: Chunk) -> Joined:
    """Run a request on both servers."""
    context = context_leg(context_server, body)
    return Joined(context, list(stream(generation_server, generation_body(body, context))))
