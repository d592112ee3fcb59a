"""Translates log-probabilities: the request for TensorRT-LLM, and its answer for the engine protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepseek_backend.contract import MAX_LOGPROBS, ErrorCode
from deepseek_backend.engines.base import Logprob, TokenLogprobs
from deepseek_backend.engines.generate_request import SamplingParams
from deepseek_backend.errors import EngineError, RequestError
from deepseek_backend.release import LogprobSupport

MAX_LIKELIEST = 64
"""Most tokens requested per position, so that the sampled one is among them. Each costs time on the loop thread."""


def num_logprobs(sampling: SamplingParams, support: LogprobSupport | None) -> int | None:
    """Return TensorRT-LLM's `logprobs` for ours. Its 0 means none, so that its 1 is our 0: the generated token alone.

    A sampler that gives the likeliest tokens only leaves the sampled token out when it is not among them. It is surely
    among them in greedy decoding, and with a top_k no larger than the most tokens that may be requested. Other requests
    are refused.

    :raises RequestError: E_UNSUPPORTED, for more than the sampler gives.
    """
    if sampling.logprobs is None:
        return None
    if support is None:  # never ignored in silence; with MTP it would end every other request
        raise RequestError("logprobs: this sampler has none", code=ErrorCode.UNSUPPORTED)
    if support.of == "sampled":
        _check_most(sampling.logprobs, 0, "this sampler has that of the sampled token only")
        return 1
    _check_most(sampling.logprobs, support.most or MAX_LOGPROBS, "this release has no more")
    if sampling.greedy:
        return max(1, sampling.logprobs)
    most = support.most or MAX_LIKELIEST
    if not sampling.top_k or sampling.top_k > most:
        raise RequestError(
            f"logprobs: this sampler has those of the likeliest tokens only, and the sampled one may be none of them: "
            f"expected greedy decoding{f' or a top_k of at most {most}' if most > 1 else ''}",
            code=ErrorCode.UNSUPPORTED,
        )
    return max(sampling.logprobs, sampling.top_k)


def token_logprobs(
    token_ids: Sequence[int], entries: Sequence[Mapping[int, Any]], sampling: SamplingParams, text: Callable[[int], str]
) -> list[TokenLogprobs]:
    """Return `entries`, one for each of `token_ids`, in the form of the engine protocol.

    :raises EngineError: when they don't belong to the tokens: no answer is better than another token's numbers.
    """
    if len(entries) != len(token_ids) or not all(map(_holds, entries, token_ids)):
        raise EngineError("TensorRT-LLM sent log-probabilities that do not belong to the tokens it sent")
    most = sampling.logprobs or 0
    return [_token_logprobs(token_id, entry, most, text) for token_id, entry in zip(token_ids, entries, strict=True)]


def _token_logprobs(token_id: int, entry: Mapping[int, Any], most: int, text: Callable[[int], str]) -> TokenLogprobs:
    """Return one position's. The ranks are TensorRT-LLM's; where only the sampled token is known that is 1."""
    likeliest = sorted((other.rank, token, other.logprob) for token, other in entry.items() if token != token_id)
    return [
        Logprob(token_id, float(entry[token_id].logprob), entry[token_id].rank, text(token_id)),
        *(Logprob(token, float(value), rank, text(token)) for rank, token, value in likeliest if rank <= most),
    ]


def _holds(entry: Any, token_id: int) -> bool:
    return isinstance(entry, Mapping) and token_id in entry


def _check_most(given: int, most: int, why: str) -> None:
    if given > most:
        raise RequestError(f"logprobs: expected at most {most}, got {given}; {why}", code=ErrorCode.UNSUPPORTED)
