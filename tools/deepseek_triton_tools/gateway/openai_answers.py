"""All answers share this: the parts' way to the client, and log-probabilities, ends and counts in OpenAI's words."""

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TypedDict

import msgspec
from msgspec import structs

from deepseek_triton_tools.gateway.api_route import ApiRequest
from deepseek_triton_tools.gateway.guard import BYTES_A_TOKEN
from deepseek_triton_tools.gateway.model_front import ModelFront
from deepseek_triton_tools.gateway.observers import HandledRequest
from deepseek_triton_tools.gateway.openai_fields import OpenAIError
from deepseek_triton_tools.gateway.triton_call import Call, Part, UpstreamError
from deepseek_triton_tools.gateway.triton_server import within

UNFINISHED = UpstreamError("the server ended its response before the answer's end")
"""For a response that is complete HTTP, and whose answer lacks its last part."""
_LAST_WORDS_S = 6.0
"""For the counts of an answer whose client has left; a server that does not stop is left after five seconds."""
_LEAST = -9999.0
"""In place of minus infinity, which JSON has not."""


class _Token(msgspec.Struct):
    logprob: float | None = None
    decoded_token: str | None = None


_decoder = msgspec.json.Decoder(list[dict[str, _Token] | None])


def _decode(logprobs: str) -> list[dict[str, _Token] | None]:
    try:
        return _decoder.decode(logprobs)
    except (msgspec.DecodeError, RecursionError) as error:
        message = f"the model's server sent log-probabilities that can't be read: {error}"
        raise OpenAIError(502, message, kind="server_error", code="bad_gateway") from error


def chat_logprobs(logprobs: str, num_top: int) -> list[dict[str, object]]:
    """The elements of `logprobs.content`: each token that was generated, with the likeliest ones in its place."""
    content = []
    for candidates in _decode(logprobs):
        # The generated token is the first, and is there also when it is none of the likeliest.
        found = list((candidates or {}).values())
        top = sorted(found, key=lambda token: _number(token.logprob), reverse=True)[:num_top]
        content.append({**_chat_token(found[0] if found else _Token()), "top_logprobs": list(map(_chat_token, top))})
    return content


class CompletionLogprobs(TypedDict):
    """`logprobs` of a completion's choice."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def completion_logprobs(
    logprobs: Sequence[str], num_top: int, *, offset: int = 0, echoed: str = ""
) -> CompletionLogprobs:
    """A prompt's first token has no log-probability, and its text is what the others leave of `echoed`.

    logprobs: the contract's JSON, of the prompt and of the text. offset: characters before the first token.
    """
    told: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for document in logprobs:
        generated = _decode(document)
        texts = [next(iter(one.values())).decoded_token or "" if one else "" for one in generated]
        if generated and not generated[0]:
            texts[0] = echoed[: max(0, len(echoed) - sum(map(len, texts)))]
        for candidates, text in zip(generated, texts, strict=True):
            found = list((candidates or {}).values())
            known = bool(found) and found[0].logprob is not None
            top = {token.decoded_token or "": _number(token.logprob) for token in found[: num_top + 1]}
            told["tokens"].append(text)
            told["token_logprobs"].append(_number(found[0].logprob) if known else None)
            told["top_logprobs"].append(top if known else None)
            told["text_offset"].append(offset)
            offset += len(text)
    return told


def _chat_token(token: _Token) -> dict[str, object]:
    text = token.decoded_token or ""
    # A token with a part of a character can't be told by its text.
    known = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": _number(token.logprob), "bytes": known}


def _number(value: float | None) -> float:
    return _LEAST if value is None else max(value, _LEAST)


def finish_of(finish_reason: str, stop_reason: str) -> tuple[str, str]:
    """OpenAI's finish_reason, and what the choice's `stop_reason` tells beside it: the stop string, the id of the stop
    token, or the word that OpenAI has not ("timeout", "cancelled"); "" for nothing."""
    if finish_reason in ("timeout", "cancelled"):  # "stop" would call half an answer whole
        return "length", finish_reason
    return "length" if finish_reason == "length" else "stop", stop_reason


@dataclass(slots=True)
class TokenCounts:
    """Tokens of all choices together. Each prompt counts once. None is a count that no part has told.
    estimated_input: stands in for prompts of which no part has told."""

    num_output: int = 0
    estimated_input: int = 0
    num_reasoning: int | None = None
    _prompts: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    """A prompt's number -> its tokens, and those of them that were cached."""

    @property
    def num_input(self) -> int:
        return sum(num_tokens for num_tokens, _ in self._prompts.values()) or self.estimated_input

    @property
    def num_cached(self) -> int | None:
        known = [num_cached for _, num_cached in self._prompts.values() if num_cached is not None]
        return sum(known) if known and len(known) == len(self._prompts) else None

    def add(self, part: Part, prompt: int = 0) -> None:
        self.num_output += part.num_output_tokens
        if part.num_reasoning_tokens is not None:
            self.num_reasoning = (self.num_reasoning or 0) + part.num_reasoning_tokens
        if part.num_input_tokens:
            _, before = self._prompts.get(prompt, (0, None))
            known = [num_cached for num_cached in (before, part.num_cached_tokens) if num_cached is not None]
            self._prompts[prompt] = part.num_input_tokens, max(known, default=None)

    def document(self) -> dict[str, object]:
        document: dict[str, object] = {
            "prompt_tokens": self.num_input,
            "completion_tokens": self.num_output,
            "total_tokens": self.num_input + self.num_output,
        }
        if (cached := self.num_cached) is not None:
            document["prompt_tokens_details"] = {"cached_tokens": cached}
            document |= {"prompt_cache_hit_tokens": cached, "prompt_cache_miss_tokens": self.num_input - cached}
        if self.num_reasoning is not None:
            document["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning}
        return document


class AnswerChoice:
    """One answer, as far as it has come."""

    finish_reason = ""
    stop_reason = ""


class Answer(ABC):
    """A client gets it in the form that it asked for: the events of a stream, or one document at the end.

    complete: all that is wanted has come, though the model would go on, so the work on the server may be stopped.
    """

    complete = False

    def __init__(self, choices: Sequence[AnswerChoice]) -> None:
        self.counts = TokenCounts()
        self._all = choices

    @property
    def finish_reason(self) -> str:
        """The first choice's."""
        return self._all[0].finish_reason

    @property
    def done(self) -> bool:
        """Every choice has ended."""
        return all(choice.finish_reason for choice in self._all)

    def tell(self, record: HandledRequest) -> None:
        """Tell the record how many tokens there have been."""
        counts = self.counts
        record.num_input_tokens, record.num_output_tokens = counts.num_input, counts.num_output
        record.num_cached_tokens, record.num_reasoning_tokens = counts.num_cached, counts.num_reasoning

    def begin(self) -> bytes:
        """The events before those of the first parts."""
        return b""

    @abstractmethod
    def take(self, parts: Iterable[Part]) -> bytes:
        """Keep the parts, and return the events of a stream that tell of them."""

    @abstractmethod
    def end(self) -> bytes:
        """Return the last events of a stream, or the whole document, after all parts."""


async def generate(
    model: ModelFront,
    record: HandledRequest,
    inputs: dict[str, object],
    affinity: bytes | None,
    *,
    suffix: str = "",
    first: int = 0,
    copies: int = 1,
) -> AsyncGenerator[list[Part], None]:
    """The model's answer, with what the record has to know of the way to it.

    suffix: of the request's id at the server. first: the number of its first sequence in the whole answer. copies: how
    many sequences the answer's one is given as.
    """
    ended = asyncio.Event()

    def late(parts: list[Part], error: UpstreamError | None) -> None:
        record.last_words += _numbered(parts, first)
        ended.set()

    if inputs["streaming"]:  # so that metrics go on while it does
        inputs = {**inputs, "return_num_output_tokens": True}
    inputs = await model.own_inputs(inputs)
    most = (await model.info()).default_max_tokens or 0
    headers = record.upstream_headers
    call = Call(inputs, record.upstream_id + suffix, affinity, headers, [], [], late=late, default_max_tokens=most)
    try:
        async with aclosing(model.fleet.generate(call)) as answer:
            async for parts in answer:
                record.token_came()
                if copies > 1:
                    # Tokens of a copy were generated once, so they count once.
                    parts = parts + [
                        structs.replace(part, sequence=number, num_output_tokens=0, num_reasoning_tokens=0)
                        for number in range(1, copies)
                        for part in parts
                    ]
                yield _numbered(parts, first)
    finally:
        if record.client_left and call.sent:
            with suppress(TimeoutError):
                await within(_LAST_WORDS_S, ended.wait())
        if call.tried:
            record.server = call.tried[-1]
            record.retries += len(call.tried) - 1
        if call.context_tried:
            record.context_server = call.context_tried[-1]
            record.retries += len(call.context_tried) - 1


def _numbered(parts: list[Part], first: int) -> list[Part]:
    if first:
        for part in parts:
            part.sequence += first
    return parts


async def give(request: ApiRequest, answer: Answer, parts: AsyncGenerator[list[Part], None], *, stream: bool) -> None:
    """Send the model's answer, as it comes or once it is whole.

    :raises UpstreamError: when it doesn't come to its end; a stream may have begun.
    """
    exchange, record = request.exchange, request.exchange.record
    record.stream, record.tell = stream, answer.tell
    if stream:
        exchange.expect_stream()
    try:
        async with aclosing(parts):
            async for some in parts:
                if not stream:
                    answer.take(some)
                elif not exchange.has_events:
                    # Only now, so that a refusal of the server is a response with its own status.
                    await exchange.start_stream()
                    await exchange.send_events(answer.begin() + answer.take(some))
                elif events := answer.take(some):
                    await exchange.send_events(events)
                # Closing the parts has the server stop, so nobody pays for what nobody wants.
                if answer.complete:
                    break
    finally:
        # Also of an answer that fails or is left: its tokens are counted against the key all the same.
        record.finish_reason = answer.finish_reason
        answer.take(record.last_words)
        if answer.counts.num_output and not answer.done:  # lost with its server, or left
            answer.counts.estimated_input = request.num_body_bytes // BYTES_A_TOKEN
        answer.tell(record)
    if not answer.done:
        raise UNFINISHED
    if stream:
        await exchange.end_stream(answer.end())
    else:
        await exchange.respond(200, answer.end())


def response_identity(kind: str, model: str, fingerprint: str) -> dict[str, object]:
    """The fields that each chunk of a response repeats. kind: the beginning of its id."""
    return {
        "id": f"{kind}-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint,
    }
