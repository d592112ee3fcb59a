"""What an executor has made of one request in an iteration, and how vLLM gets it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, ModelRunnerOutput

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LogprobRows:
    """Log-probabilities of n positions: first the token there, then the k likeliest of all, in order."""

    token_ids: npt.NDArray[np.int32]
    """[n, k + 1]"""
    logprobs: Array
    """[n, k + 1]"""
    ranks: npt.NDArray[np.int32]
    """Ranks of the tokens at the positions, [n]; 1 is the likeliest."""

    @classmethod
    def of(cls, logits: Array, token_ids: Sequence[int], num_likeliest: int) -> LogprobRows:
        """Return the rows for `logits` [n, vocab_size], whose positions have `token_ids`."""
        shifted = logits - logits.max(-1, keepdims=True)
        logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        own_ids = np.array(token_ids, np.intp)[:, None]
        own = np.take_along_axis(logprobs, own_ids, -1)
        likeliest = np.argsort(-logprobs, -1, kind="stable")[:, :num_likeliest]
        ids = np.concatenate([own_ids, likeliest], -1)
        ranks = 1 + np.count_nonzero(logprobs > own, -1)
        return cls(ids.astype(np.int32), np.take_along_axis(logprobs, ids, -1), ranks.astype(np.int32))

    def tensors(self) -> LogprobsTensors:
        """Return the rows in the form that vLLM has for prompts."""
        return LogprobsTensors(*map(torch.from_numpy, (self.token_ids, self.logprobs, self.ranks)))


@dataclass(frozen=True)
class MadeTokens:
    """The result for one request."""

    token_ids: Sequence[int] = ()
    """None for a part of a prompt."""
    logprobs: LogprobRows | None = None
    """A row for each of token_ids, where the request asks for them."""
    prompt_logprobs: LogprobRows | None = None
    """A row for each token of the prompt but the first; with the first token, where the request asks for them."""


def runner_output(made: Mapping[str, MadeTokens]) -> ModelRunnerOutput:
    """Return the results of an iteration, by the ids of the requests, as vLLM's model runner does."""
    return ModelRunnerOutput(
        req_ids=list(made),
        req_id_to_index={request_id: index for index, request_id in enumerate(made)},
        sampled_token_ids=[list(one.token_ids) for one in made.values()],
        logprobs=_logprobs_lists(list(made.values())),
        prompt_logprobs_dict={
            request_id: one.prompt_logprobs.tensors() for request_id, one in made.items() if one.prompt_logprobs
        },
    )


def _logprobs_lists(made: Sequence[MadeTokens]) -> LogprobsLists | None:
    """Return the rows of all requests, as wide as the widest; rows that nobody asked for hold zeros."""
    width = max((one.logprobs.token_ids.shape[1] for one in made if one.logprobs), default=0)
    if not width:
        return None
    counts = [len(one.token_ids) for one in made]
    starts = [0, *np.cumsum(counts).tolist()]
    columns: list[Any] = [
        np.zeros((starts[-1], width), np.int32),
        np.zeros((starts[-1], width), np.float32),
        np.zeros(starts[-1], np.int32),
    ]
    for one, start in zip(made, starts, strict=False):
        if one.logprobs is not None:
            rows = slice(start, start + len(one.token_ids))
            its_width = one.logprobs.token_ids.shape[1]
            columns[0][rows, :its_width] = one.logprobs.token_ids
            columns[1][rows, :its_width] = one.logprobs.logprobs
            columns[2][rows] = one.logprobs.ranks
    return LogprobsLists(*columns, starts[:-1])
