"""What all answers have, in OpenAI's words: log-probabilities, the reason for the end, and counts of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import msgspec

from deepseek_triton_tools.gateway.openai_fields import OpenAIError
from deepseek_triton_tools.gateway.triton_call import Part

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
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for candidates, text in (each for document in logprobs for each in _with_text(_decode(document), echoed)):
        found = list((candidates or {}).values())
        known = bool(found) and found[0].logprob is not None
        tokens.append(text)
        values.append(_number(found[0].logprob) if known else None)
        tops.append(
            {each.decoded_token or "": _number(each.logprob) for each in found[: num_top + 1]} if known else None
        )
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _with_text(tokens: list[dict[str, _Token] | None], echoed: str) -> Iterable[tuple[dict[str, _Token] | None, str]]:
    """Each token's candidates and text."""
    texts = [next(iter(candidates.values())).decoded_token or "" if candidates else "" for candidates in tokens]
    if tokens and not tokens[0]:
        texts[0] = echoed[: max(0, len(echoed) - sum(map(len, texts)))]
    return zip(tokens, texts, strict=True)


def _chat_token(token: _Token) -> dict[str, object]:
    text = token.decoded_token or ""
    # A token with a part of a character can't be told by its text.
    known = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": _number(token.logprob), "bytes": known}


def _number(value: float | None) -> float:
    return _LEAST if value is None else max(value, _LEAST)


_BY_REASON = {"stop": "stop", "length": "length", "timeout": "length", "cancelled": "stop"}


def finish_of(finish_reason: str, stop_reason: str) -> tuple[str, str]:
    """OpenAI's finish_reason, and what the choice's `stop_reason` tells beside it: the stop string, the id of the stop
    token, or the word that OpenAI has not ("timeout", "cancelled"); "" for nothing."""
    told = _BY_REASON.get(finish_reason or "stop", "stop")
    return told, finish_reason if finish_reason in ("timeout", "cancelled") else stop_reason


@dataclass(slots=True)
class TokenCounts:
    """Tokens of all choices together. The prompt counts once."""

    num_input: int = 0
    num_output: int = 0
    num_cached: int = 0
    num_reasoning: int = 0

    def add(self, part: Part) -> None:
        self.num_output += part.num_output_tokens
        self.num_reasoning += part.num_reasoning_tokens
        if part.num_input_tokens:
            self.num_input = part.num_input_tokens
            self.num_cached = max(self.num_cached, part.num_cached_tokens)

    def plus(self, other: TokenCounts) -> TokenCounts:
        """The counts of two prompts together."""
        return TokenCounts(
            self.num_input + other.num_input,
            self.num_output + other.num_output,
            self.num_cached + other.num_cached,
            self.num_reasoning + other.num_reasoning,
        )

    def document(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.num_input,
            "completion_tokens": self.num_output,
            "total_tokens": self.num_input + self.num_output,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning},
            "prompt_cache_hit_tokens": self.num_cached,
            "prompt_cache_miss_tokens": self.num_input - self.num_cached,
        }
