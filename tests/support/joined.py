"""A context and a generation server joined by plain HTTP calls, as the contract says it, without our client."""

import json
from typing import Any, NamedTuple

import httpx

from support.waiting import PATIENCE_S

Chunk = dict[str, Any]
PATH = "/v2/models/tensorrt_llm/generate_stream"


class Joined(NamedTuple):
    """Both legs of a request: every response of each server, in order."""

    context: list[Chunk]
    generation: list[Chunk]

    @property
    def last(self):
        return self.generation[-1]

    @property
    def text(self):
        return text(self.generation)


def text(chunks, output="text_output"):
    return "".join(chunk.get(output, "") for chunk in chunks)


def stream(server, body):
    """Yield every response of a server. An error of the model is a chunk with "error"."""
    streamed = {"streaming": True, **body}
    with httpx.stream("POST", f"{server.http_url}{PATH}", json=streamed, timeout=PATIENCE_S) as answer:
        for line in answer.iter_lines():
            if line.startswith("data:"):
                yield json.loads(line.removeprefix("data:"))


def context_leg(server, body):
    return list(stream(server, {**body, "request_type": "context_only"}))


def generation_body(body, context, **changes):
    """The second request: the first one with what the context server handed over."""
    params = context[-1]["context_phase_params"]
    return {**body, "request_type": "generation_only", "context_phase_params": params, **changes}


def joined(context_server, generation_server, body):
    """Run a request on both servers."""
    context = context_leg(context_server, body)
    return Joined(context, list(stream(generation_server, generation_body(body, context))))
