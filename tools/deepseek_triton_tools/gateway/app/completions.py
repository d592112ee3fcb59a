"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from deepseek_triton_tools.gateway.app.api_route import ApiRequest
from deepseek_triton_tools.gateway.app.completion_answer import CompletionAnswer
from deepseek_triton_tools.gateway.app.generating import UNFINISHED, generate, note, response_identity
from deepseek_triton_tools.gateway.app.model_front import ModelFront
from deepseek_triton_tools.gateway.fleet.affinity import affinity_key
from deepseek_triton_tools.gateway.protocol.completion_request import CompletionRequest, read_completion_request
from deepseek_triton_tools.gateway.triton.call import Part

_AT_ONCE = 32
"""How many prompts of one request are at work together."""


async def completion(request: ApiRequest) -> None:
    asked = read_completion_request(request.document)
    name, model = await request.model(asked.model, asked.most_tokens)
    request.has_several_prompts = len(asked.prompts) > 1
    request.made_per_choice = asked.made_per_choice
    record = request.exchange.record
    record.stream = asked.stream
    echoed = await _echoed(asked, model)
    answer = CompletionAnswer(asked, response_identity("cmpl", name, await model.fingerprint()), echoed)
    async with aclosing(_all_parts(request, asked, model)) as found:
        try:
            if asked.stream:
                await _stream(request, answer, found)
            else:
                async for prompt, parts in found:
                    answer.take(prompt, parts)
                if not answer.done:
                    raise UNFINISHED
                await request.exchange.respond(200, answer.document())
        finally:
            note(record, answer.counts)
            record.finish_reason = answer.finish_reason


async def _stream(
    request: ApiRequest, answer: CompletionAnswer, found: AsyncGenerator[tuple[int, list[Part]], None]
) -> None:
    exchange = request.exchange
    exchange.expect_stream()
    async for prompt, parts in found:
        if not exchange.has_events:
            await exchange.start_stream()
        if events := answer.chunks(prompt, parts):
            await exchange.send_events(events)
    if not answer.done:
        raise UNFINISHED
    await exchange.end_stream(answer.end())


async def _echoed(asked: CompletionRequest, model: ModelFront) -> Sequence[str]:
    """The text of each prompt, for `echo`."""
    if not asked.echo:
        return [""] * len(asked.prompts)
    texts = iter(await model.texts_of([prompt for prompt in asked.prompts if not isinstance(prompt, str)]))
    return [prompt if isinstance(prompt, str) else next(texts) for prompt in asked.prompts]


async def _all_parts(
    request: ApiRequest, asked: CompletionRequest, model: ModelFront
) -> AsyncGenerator[tuple[int, list[Part]], None]:
    """The parts of all answers as they come, each with the number of its prompt."""
    record = request.exchange.record

    def one(index: int, suffix: str) -> AsyncGenerator[list[Part], None]:
        prompt = asked.prompts[index]
        affinity = affinity_key(prompt, hint=asked.cache_key)
        inputs = {**asked.prompt_inputs(prompt), "streaming": asked.stream}
        return generate(model, record, inputs, affinity, suffix=suffix, copies=asked.copies)

    if len(asked.prompts) == 1:
        async with aclosing(one(0, "")) as parts:
            async for some in parts:
                yield 0, some
        return

    queue: asyncio.Queue[tuple[int, list[Part]] | BaseException | None] = asyncio.Queue(maxsize=2 * _AT_ONCE)
    room = asyncio.Semaphore(_AT_ONCE)

    async def put(index: int) -> None:
        try:
            async with room, aclosing(one(index, f"-{index}")) as parts:
                async for some in parts:
                    await queue.put((index, some))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.ensure_future(put(index)) for index in range(len(asked.prompts))]
    try:
        running = len(tasks)
        while running:
            found = await queue.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                running -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
