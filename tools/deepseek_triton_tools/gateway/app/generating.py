"""A request to the model, whichever API it came by."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from deepseek_triton_tools.gateway.app.model_front import ModelFront
from deepseek_triton_tools.gateway.app.request_record import RequestRecord
from deepseek_triton_tools.gateway.app.token_counts import TokenCounts
from deepseek_triton_tools.gateway.triton.call import Call, Part, UpstreamError


async def generate(
    model: ModelFront,
    record: RequestRecord,
    inputs: dict[str, object],
    affinity: bytes | None,
    *,
    num_choices: int,
    suffix: str = "",
) -> AsyncGenerator[list[Part], None]:
    """The model's answer, with what the record has to know of the way to it. Raises UpstreamError, also for an answer
    that stops without the end of each choice."""
    going_on = num_choices
    call = Call(inputs, record.upstream_id + suffix, affinity, record.upstream_headers, [])
    try:
        async with aclosing(model.fleet.generate(call)) as answer:
            async for parts in answer:
                record.token_came()
                for part in parts:
                    if part.finish_reason:
                        going_on -= 1
                yield parts
        if going_on > 0:
            raise UpstreamError("the server stopped answering before the answer was complete")
    finally:
        if call.tried:
            record.server = call.tried[-1]
            record.retries += len(call.tried) - 1


def note(record: RequestRecord, counts: TokenCounts) -> None:
    """Write what was used into the record."""
    record.num_input_tokens, record.num_output_tokens = counts.num_input, counts.num_output
    record.num_cached_tokens, record.num_reasoning_tokens = counts.num_cached, counts.num_reasoning
