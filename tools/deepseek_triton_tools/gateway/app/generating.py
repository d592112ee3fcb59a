"""A request to the model, whichever API it came by."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec import structs

from deepseek_triton_tools.gateway.app.handled_request import HandledRequest
from deepseek_triton_tools.gateway.app.model_front import ModelFront
from deepseek_triton_tools.gateway.app.token_counts import TokenCounts
from deepseek_triton_tools.gateway.protocol.openai_fields import COUNTS
from deepseek_triton_tools.gateway.triton.call import Call, Part, UpstreamError

UNFINISHED = UpstreamError("the server ended its response before the answer's end")
"""For a response that is complete HTTP, and whose answer lacks its last part."""


async def generate(
    model: ModelFront,
    record: HandledRequest,
    inputs: dict[str, object],
    affinity: bytes | None,
    *,
    suffix: str = "",
    copies: int = 1,
) -> AsyncGenerator[list[Part], None]:
    """The model's answer, with what the record has to know of the way to it.

    suffix: of the request's id at the server. copies: how many sequences the answer's one is given as.
    """
    if record.counts_responses:
        inputs = {**inputs, **COUNTS}
    call = Call(inputs, record.upstream_id + suffix, affinity, record.upstream_headers, [], [])
    try:
        async with aclosing(model.fleet.generate(call)) as answer:
            async for parts in answer:
                record.token_came()
                if copies > 1:
                    parts = [*parts, *(_copy(part, number) for number in range(1, copies) for part in parts)]
                yield parts
    finally:
        if call.tried:
            record.server = call.tried[-1]
            record.retries += len(call.tried) - 1
        if call.context_tried:
            record.context_server = call.context_tried[-1]
            record.retries += len(call.context_tried) - 1


def _copy(part: Part, sequence: int) -> Part:
    """The part for another choice. Its tokens were generated once, so they count once."""
    return structs.replace(part, sequence=sequence, num_output_tokens=0, num_reasoning_tokens=0)


def response_identity(kind: str, model: str, fingerprint: str) -> dict[str, object]:
    """The fields that each chunk of a response repeats. kind: the beginning of its id."""
    return {
        "id": f"{kind}-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint,
    }


def note(record: HandledRequest, counts: TokenCounts) -> None:
    """Write what was used into the record."""
    record.num_input_tokens, record.num_output_tokens = counts.num_input, counts.num_output
    record.num_cached_tokens, record.num_reasoning_tokens = counts.num_cached, counts.num_reasoning
