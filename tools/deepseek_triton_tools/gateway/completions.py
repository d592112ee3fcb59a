"""POST /v1/completions: one request to the model's server for each prompt, and the answer, whole or as a stream."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from deepseek_triton_tools.gateway.api_route import ApiRequest
from deepseek_triton_tools.gateway.chat_request import GUIDE_FIELDS, ModelRequest, read_common
from deepseek_triton_tools.gateway.model_front import TEXTS_AT_ONCE, ModelFront
from deepseek_triton_tools.gateway.openai_answers import (
    Answer,
    AnswerChoice,
    CompletionLogprobs,
    completion_logprobs,
    finish_of,
    generate,
    give,
    response_identity,
)
from deepseek_triton_tools.gateway.openai_fields import (
    COUNTS,
    MOST_INT32,
    between,
    boolean,
    given_fields,
    invalid,
    model_inputs,
    text,
    token_ids,
    wrong,
)
from deepseek_triton_tools.gateway.triton_call import Part, UpstreamError, affinity_key

COMPLETION_FIELDS = frozenset(
    {
        "model",
        "prompt",
        "suffix",
        "echo",
        "best_of",
        "logprobs",
        "stream",
        "stream_options",
        "prompt_cache_key",
        *GUIDE_FIELDS,
    }
)
"""Fields of completions alone that are no sampling fields."""
_MOST_PROMPTS = 256
_MOST_LOGPROBS = 20

_FIM_BEGIN, _FIM_HOLE, _FIM_END = "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"
"""DeepSeek's tokens around a text with a hole, which the model fills in."""

Prompt = str | list[int]


@dataclass(slots=True)
class CompletionRequest(ModelRequest):
    """logprobs: how many of the likeliest tokens are told; None for no log-probabilities. only_echo: nothing is to be
    generated, so the one token that a request must have is left out of the answer."""

    prompts: list[Prompt] = field(default_factory=list)
    logprobs: int | None = None
    echo: bool = False
    only_echo: bool = False

    def prompt_inputs(self, prompt: Prompt) -> dict[str, object]:
        """The whole body for one of the prompts."""
        form = {"text_input": prompt} if isinstance(prompt, str) else {"text_input": "", "input_ids": prompt}
        return {**form, **self.inputs}


def read_completion_request(document: object) -> CompletionRequest:
    """Raises OpenAIError, which names the field."""
    given = given_fields(document)
    echo = boolean("echo", given.get("echo", False))
    max_tokens = (
        between("max_tokens", given["max_tokens"], int(not echo), MOST_INT32) if "max_tokens" in given else None
    )
    request, sampling = read_common(CompletionRequest, given, own=COMPLETION_FIELDS, max_tokens=max_tokens)
    request.prompts = _prompts(given)
    if request.most_tokens is not None:
        request.most_tokens *= len(request.prompts)
    request.echo, request.only_echo = echo, echo and max_tokens == 0
    if request.only_echo:
        sampling["max_tokens"] = 1
        if request.stream:
            raise invalid("echo with max_tokens 0 has nothing to stream: expected stream false.", param="stream")
    if "logprobs" in given:
        sampling["logprobs"] = request.logprobs = between("logprobs", given["logprobs"], 0, _MOST_LOGPROBS)
        if echo:
            sampling["prompt_logprobs"] = request.logprobs
    request.inputs = model_inputs(given, sampling)
    if request.logprobs is not None:
        request.inputs["return_logprobs"] = True
    if request.continuous_usage:
        request.inputs |= COUNTS
    return request


def _prompts(given: Mapping[str, object]) -> list[Prompt]:
    """One text, one list of token ids, or a list of either."""
    value = given.get("prompt")
    if isinstance(value, str):
        prompts: list[Prompt] = [value]
    else:
        if not isinstance(value, list):
            raise wrong("prompt", "a text, token ids, or a list of texts or lists of token ids", value)
        elements: list[object] = value
        if any(isinstance(element, dict) for element in elements):
            raise wrong("prompt", "texts or token ids (messages go to /v1/chat/completions)", value)
        if elements and all(isinstance(element, int) for element in elements):
            prompts = [token_ids("prompt", elements)]
        else:
            prompts = [
                element if isinstance(element, str) else token_ids(f"prompt[{at}]", element)
                for at, element in enumerate(elements)
            ]
    if not prompts or not all(prompts):
        raise invalid("prompt: expected text or token ids, got nothing.", param="prompt")
    if len(prompts) > _MOST_PROMPTS:
        raise wrong("prompt", f"at most {_MOST_PROMPTS} prompts", len(prompts))
    suffix = text("suffix", given.get("suffix", ""))
    if not suffix:
        return prompts
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise invalid("suffix needs a prompt that is text, not token ids.", param="suffix")
    if given.get("echo"):
        raise invalid("echo and suffix are not possible together.", param="echo")
    return [f"{_FIM_BEGIN}{prompt}{_FIM_HOLE}{suffix}{_FIM_END}" for prompt in prompts]


_encode = msgspec.json.encode


class _Choice(AnswerChoice):
    def __init__(self, echoed: str) -> None:
        self.echoed = echoed
        self.text = [echoed]
        self.logprobs: list[str] = []
        """The contract's JSON, the prompt's first."""
        self.num_characters = 0
        """Length of the tokens that were told, for the offsets of the next ones."""


class CompletionAnswer(Answer):
    """echoed: the text of each prompt, where the request wants it before the answer; "" where not."""

    def __init__(self, request: CompletionRequest, identity: dict[str, object], echoed: Iterable[str]) -> None:
        self._request = request
        self._choices = [_Choice(text) for text in echoed for _ in range(request.num_choices)]
        super().__init__(self._choices)
        self._identity = {**identity, "object": "text_completion"}
        self._head = b"data: %b" % _encode(self._identity)[:-1]
        self._tail = b',"usage":null}\n\n' if request.include_usage else b"}\n\n"

    def take(self, parts: Iterable[Part]) -> bytes:
        """`sequence` of the parts counts through the choices of all prompts."""
        events = []
        for part in parts:
            choice = self._choices[part.sequence]
            self.counts.add(part, part.sequence // self._request.num_choices)
            if self._request.echo and part.prompt_logprobs:
                choice.logprobs.append(part.prompt_logprobs)
            if self._request.only_echo:
                self.counts.num_output = 0  # the one token is the engine's least, and nobody gets it
            else:
                choice.text.append(part.text)
                if part.logprobs:
                    choice.logprobs.append(part.logprobs)
            if part.finish_reason:
                choice.finish_reason, choice.stop_reason = finish_of(part.finish_reason, part.stop_reason)
            if self._request.stream:
                text = "".join(choice.text)
                choice.text.clear()
                if text or choice.finish_reason:
                    events.append(self._chunk(part.sequence, choice, text))
        return b"".join(events)

    def end(self) -> bytes:
        if self._request.stream:
            usage = b'%b,"choices":[],"usage":%b}\n\n' % (self._head, _encode(self.counts.document()))
            return (usage if self._request.include_usage else b"") + b"data: [DONE]\n\n"
        choices = [
            {
                "index": index,
                "text": "".join(choice.text),
                "logprobs": self._logprobs(choice),
                "finish_reason": "length" if self._request.only_echo else choice.finish_reason,
                **({"stop_reason": choice.stop_reason} if choice.stop_reason else {}),
            }
            for index, choice in enumerate(self._choices)
        ]
        return _encode({**self._identity, "choices": choices, "usage": self.counts.document()})

    def _logprobs(self, choice: _Choice) -> CompletionLogprobs | None:
        if self._request.logprobs is None:
            return None
        found = completion_logprobs(
            choice.logprobs, self._request.logprobs, offset=choice.num_characters, echoed=choice.echoed
        )
        choice.num_characters += sum(map(len, found["tokens"]))
        choice.logprobs = []
        return found

    def _chunk(self, index: int, choice: _Choice, text: str) -> bytes:
        logprobs = b"null" if self._request.logprobs is None else _encode(self._logprobs(choice))
        finish = _encode(choice.finish_reason or None)
        more = b',"stop_reason":%b' % _encode(choice.stop_reason) if choice.stop_reason else b""
        tail = self._tail
        if self._request.continuous_usage:
            tail = b',"usage":%b}\n\n' % _encode(self.counts.document())
        return b'%b,"choices":[{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}]%b' % (
            self._head,
            index,
            _encode(text),
            logprobs,
            finish,
            more,
            tail,
        )


async def completion(request: ApiRequest) -> None:
    asked = read_completion_request(request.document)
    name, model = await request.model(asked.model, asked.most_tokens)
    request.has_several_prompts = len(asked.prompts) > 1
    request.made_per_choice = asked.made_per_choice
    texts = [""] * len(asked.prompts)
    if asked.echo:
        of_ids = iter(await model.texts_of([prompt for prompt in asked.prompts if not isinstance(prompt, str)]))
        texts = [prompt if isinstance(prompt, str) else next(of_ids) for prompt in asked.prompts]
    answer = CompletionAnswer(asked, response_identity("cmpl", name, await model.fingerprint()), texts)
    await give(request, answer, _all_parts(request, asked, model), stream=asked.stream)


async def _all_parts(
    request: ApiRequest, asked: CompletionRequest, model: ModelFront
) -> AsyncGenerator[list[Part], None]:
    """The parts of all answers as they come. Their sequences count through the choices of all prompts."""
    record = request.exchange.record

    def one(index: int, suffix: str) -> AsyncGenerator[list[Part], None]:
        prompt = asked.prompts[index]
        affinity = affinity_key(prompt, hint=asked.cache_key)
        inputs = {**asked.prompt_inputs(prompt), "streaming": asked.stream}
        first = index * asked.num_choices
        return generate(model, record, inputs, affinity, suffix=suffix, first=first, copies=asked.copies)

    if len(asked.prompts) == 1:
        async with aclosing(one(0, "")) as parts:
            async for some in parts:
                yield some
        return

    # It is bounded, so that a client that reads slowly makes the servers wait, as it does with one prompt.
    queue: asyncio.Queue[list[Part] | BaseException | None] = asyncio.Queue(maxsize=2 * TEXTS_AT_ONCE)
    left = list(reversed(range(len(asked.prompts))))
    num_workers, num_ended = min(TEXTS_AT_ONCE, len(left)), 0

    async def work() -> None:
        """Ask for prompts that are left. One for which no server has room is left to the other workers."""
        nonlocal num_workers, num_ended
        try:
            while left:
                index, num_before, begun = left.pop(), num_ended, False
                try:
                    async with aclosing(one(index, f"-{index}")) as parts:
                        async for some in parts:
                            begun = True
                            await queue.put(some)
                    num_ended += 1
                except UpstreamError as error:
                    # The room that it did not find may have been another's of these.
                    is_last = num_workers == 1 and num_ended == num_before
                    if begun or is_last or error.code != "E_OVERLOADED":
                        raise
                    left.append(index)
                    if num_workers > 1:
                        break
            num_workers -= 1
            if not num_workers:
                await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.ensure_future(work()) for _ in range(num_workers)]
    try:
        while (found := await queue.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
