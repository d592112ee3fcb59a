"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from deepseek_triton_tools.gateway.app.api_route import ApiRequest
from deepseek_triton_tools.gateway.app.chat_answer import StreamedChatAnswer, WholeChatAnswer
from deepseek_triton_tools.gateway.app.generating import UNFINISHED, generate, note, response_identity
from deepseek_triton_tools.gateway.fleet.affinity import affinity_key
from deepseek_triton_tools.gateway.protocol.chat_request import read_chat_request
from deepseek_triton_tools.gateway.triton.call import Part


async def chat_completion(request: ApiRequest) -> None:
    asked = read_chat_request(request.document)
    name, model = await request.model(asked.model, asked.most_tokens)
    record = request.exchange.record
    record.stream = asked.stream
    # Calls may make the rest of an answer unwanted, which is seen in time only while it streams.
    streaming = asked.stream or asked.only_first_call
    affinity = affinity_key([m for m in asked.messages if isinstance(m, dict)], hint=asked.cache_key)
    inputs = {**asked.inputs, "streaming": streaming}
    making = StreamedChatAnswer if asked.stream else WholeChatAnswer
    answer = making(
        asked,
        response_identity("chatcmpl", name, await model.fingerprint()),
        request.state.settings.reasoning_fields,
    )
    parts = generate(model, record, inputs, affinity, copies=asked.copies)
    async with aclosing(parts):
        try:
            if isinstance(answer, StreamedChatAnswer):
                await _stream(request, answer, parts)
            else:
                await _respond(request, answer, parts)
        finally:
            note(record, answer.counts)
            record.finish_reason = answer.choices[0].finish_reason


async def _stream(request: ApiRequest, answer: StreamedChatAnswer, parts: AsyncGenerator[list[Part], None]) -> None:
    exchange = request.exchange
    exchange.expect_stream()
    async for some in parts:
        if not exchange.has_events:
            # Only now, so that a refusal of the server is a response with its own status.
            await exchange.start_stream()
            await exchange.send_events(answer.begin() + answer.take(some))
        elif events := answer.take(some):
            await exchange.send_events(events)
        if answer.complete:
            break
    if not answer.done:
        raise UNFINISHED
    await exchange.end_stream(answer.end())


async def _respond(request: ApiRequest, answer: WholeChatAnswer, parts: AsyncGenerator[list[Part], None]) -> None:
    async for some in parts:
        answer.take(some)
        if answer.complete:
            break
    if not answer.done:
        raise UNFINISHED
    await request.exchange.respond(200, answer.document())
