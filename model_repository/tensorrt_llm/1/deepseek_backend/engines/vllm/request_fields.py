"""Pure functions that translate a request into vLLM's SamplingParams, and say which fields it honours."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepseek_backend.contract import SAMPLING_BY_NAME, SAMPLING_FIELDS
from deepseek_backend.engines.base import TEXT_LAYER_FIELDS
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from deepseek_backend.engines.vllm.loading import VllmRelease
from deepseek_backend.errors import RequestError

APPLIED_HERE = TEXT_LAYER_FIELDS | {
    *("max_tokens", "truncate_prompt_tokens", "add_special_tokens", "skip_special_tokens", "return_perf_metrics"),
}
"""Sampling fields that the backend's text layer and this engine apply themselves, with any vLLM."""
GUIDES = {field.name: field.name.removeprefix("guided_") for field in SAMPLING_FIELDS if field.guided}
"""Our field -> the field of vLLM's StructuredOutputsParams."""
_RENAMED = {"bad": "bad_words"}
"""Our field -> the field of vLLM's SamplingParams, where the names differ."""


BANNED = "_bad_words_token_ids"
"""vLLM's own field for the token ids of `bad_words`."""
MAX_BANNED_SEQUENCES = 128
MAX_BANNED_TOKENS = 1024
"""Bounds of vLLM's worker. Beyond them it fails, and the engine core with it
(vllm/v1/worker/gpu/sample/bad_words.py, 0.24.0 to 0.33.0)."""


def unsupported_fields(release: VllmRelease, llm_args: Mapping[str, Any]) -> dict[str, str]:
    """Return each field of the contract, and priority, that vLLM does not honour under `llm_args`, with the reason."""
    known, guides = set(release.record["sampling_params"]), set(release.record["structured_outputs"])
    refused = release.refused_with_drafts if llm_args.get("speculative_config") else frozenset()
    reasons: dict[str, str] = {}
    for name in SAMPLING_BY_NAME:
        its_name = _RENAMED.get(name, name)
        if name in APPLIED_HERE or name == "best_of":
            continue
        if name not in GUIDES and its_name in refused:
            reasons[name] = f"vLLM {release.version} refuses it with speculative decoding"
        elif (GUIDES[name] not in guides) if name in GUIDES else (its_name not in known):
            reasons[name] = f"vLLM {release.version} does not have it"
    if llm_args.get("scheduling_policy") != "priority":
        reasons["priority"] = "needs the engine argument scheduling_policy: priority"
    return reasons


def sampling_arguments(
    request: GenerateRequest,
    *,
    max_tokens: int,
    max_temperature: float | None,
    word_token_ids: Callable[[str], list[int]],
) -> dict[str, Any]:
    """Return keyword arguments of vLLM's SamplingParams, without the guide.

    Text, stop strings and special tokens are this engine's and the backend's own work. vLLM takes a temperature between
    0 and 0.01 for 0.01.

    :param max_tokens: the request's, cut to the room that the context leaves.
    :raises RequestError: for a temperature above `max_temperature`, and for bad words that vLLM can't take.
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "detokenize": False,
        "skip_clone": True,  # vLLM changes its copy, and the request's own is used once
        "max_tokens": max_tokens,
        # Generation ends at max_tokens anyway, and vLLM refuses a min_tokens above it.
        "min_tokens": sampling.min_tokens and min(sampling.min_tokens, max_tokens),
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        BANNED: banned_token_ids(sampling.bad, word_token_ids) if sampling.bad else None,
        "logit_bias": sampling.logit_bias or None,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logprobs": sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs,
        **_randomness(sampling, max_temperature),
    }
    return {name: value for name, value in params.items() if value is not None}


def _randomness(sampling: SamplingParams, max_temperature: float | None) -> dict[str, Any]:
    """Return the fields that choose a token. vLLM's own default is a temperature of 1, and its top_p must not be 0."""
    if sampling.greedy:
        return {"temperature": 0.0}
    temperature = sampling.temperature
    if temperature is not None and max_temperature is not None and temperature > max_temperature:
        raise RequestError(
            f"temperature: expected at most {max_temperature:g}, which is vLLM's limit, got {temperature:g}"
        )
    return {
        "temperature": temperature,
        "top_k": sampling.top_k or None,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p or None,
        "seed": sampling.seed,
    }


def banned_token_ids(words: Sequence[str], token_ids_of: Callable[[str], list[int]]) -> list[list[int]]:
    """Return each word in token ids, and again with a blank before it.

    vLLM would ban a word after a blank only where it has as many tokens as without one.

    :raises RequestError: for a word without tokens, and for more than vLLM takes.
    """
    spellings: dict[str, None] = {}
    for word in words:
        bare = word if word.isspace() else word.lstrip(" ")
        spellings |= dict.fromkeys((bare,) if word.isspace() else (bare, f" {bare}"))
    banned = [token_ids_of(spelling) for spelling in spellings]
    if not all(words) or not all(banned):
        raise RequestError("bad: expected words, got one without a token")
    if len(banned) > MAX_BANNED_SEQUENCES:
        raise RequestError(
            f"bad: expected at most {MAX_BANNED_SEQUENCES // 2} words, as vLLM is told each with and without a blank "
            f"before it, got {len(words)}"
        )
    if (num_tokens := sum(map(len, banned))) > MAX_BANNED_TOKENS:
        raise RequestError(
            f"bad: expected at most {MAX_BANNED_TOKENS:,} tokens in all, each word with and without a blank before "
            f"it, got {num_tokens:,}"
        )
    return banned


def guide(sampling: SamplingParams) -> dict[str, Any]:
    """Return keyword arguments of vLLM's StructuredOutputsParams; none for a request without a guide."""
    return {its_name: value for name, its_name in GUIDES.items() if (value := getattr(sampling, name))}


def refusal(error: Exception, sampling: SamplingParams) -> RequestError:
    """Return vLLM's refusal of a request as ours. It begins with our name of the field, where that is known.

    Only some of vLLM's errors name the field themselves; in others its name is part of the message.
    """
    message = " ".join(str(error).split())
    guides = [name for name in GUIDES if getattr(sampling, name)]
    named = str(getattr(error, "parameter", None))
    ours = {_RENAMED.get(name, name): name for name in SAMPLING_BY_NAME}
    # Of a guide, vLLM repeats the client's own words.
    words = [named] if guides else [named, *(word for word in re.findall(r"\w+", message) if len(word) > 3)]
    field = next((ours[word] for word in words if word in ours), guides[0] if guides else "")
    return RequestError(f"{field}: vLLM refused it: {message}" if field else f"vLLM refused the request: {message}")
