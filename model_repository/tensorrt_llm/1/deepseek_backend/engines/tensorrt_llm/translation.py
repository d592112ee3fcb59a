"""Between our requests and TensorRT-LLM's: pure functions."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from deepseek_backend.engines.base import FinishReason
from deepseek_backend.errors import EngineError
from deepseek_backend.request import GenerateRequest

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What the detokenizer puts at the end for a character whose last bytes have not been generated yet."""

_FINISH_REASONS: Mapping[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "timeout": "timeout",
    "cancelled": "cancelled",
}


def complete_text(text: str, num_chars_sent: int, *, final: bool) -> str:
    """What of `text`, the whole text so far, may be sent after `num_chars_sent` characters.

    Stand-ins for an incomplete character at the end wait for the step that completes it; in the last step they are what
    the text is.
    """
    new = text[num_chars_sent:]
    return new if final else new.rstrip(INCOMPLETE)


def sampling_params(request: GenerateRequest, *, max_tokens: int, seeded: bool) -> dict[str, Any]:
    """Keyword arguments of tensorrt_llm.SamplingParams for `request`.

    Stop strings, the echo of the prompt and its special tokens are done outside the engine. max_tokens is always given:
    the class's own default is 32.
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_tokens": max_tokens,
        "exclude_input_from_output": True,
        "add_special_tokens": False,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "min_tokens": sampling.min_tokens,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": sampling.skip_special_tokens,
        "include_stop_str_in_output": sampling.include_stop_str_in_output,
    }
    if not sampling.greedy:
        params |= _random_sampling(request, seeded=seeded)
    return {name: value for name, value in params.items() if value is not None}


def _random_sampling(request: GenerateRequest, *, seeded: bool) -> dict[str, Any]:
    """The fields that make TensorRT-LLM sample at all.

    Up to 1.1 its test for greedy decoding looks at top_k and top_p only, so a temperature alone changes nothing; a
    top_p of 1 says "sample" and cuts nothing off. A seeded sampler without a seed uses a fixed one.
    """
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or None,
        "top_p": 1.0 if sampling.top_p is None and not sampling.top_k else sampling.top_p,
        "min_p": sampling.min_p,
        "seed": secrets.randbits(63) if seeded and sampling.seed is None else sampling.seed,
    }


def finish_reason(reason: str) -> FinishReason:
    try:
        return _FINISH_REASONS[reason]
    except KeyError:
        raise EngineError(f"TensorRT-LLM ended a request with the unknown finish reason {reason!r}") from None
