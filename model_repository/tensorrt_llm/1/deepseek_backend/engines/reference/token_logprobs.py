"""Log-probabilities of tokens by the model alone: before bias, penalties, temperature and filters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from deepseek_backend.engines.base import Logprob, TokenLogprobs

Array = npt.NDArray[np.float32]

_ROWS_AT_ONCE = 256
"""Rows of a prompt whose logits exist at a time: those of a long prompt over a real vocabulary would take gigabytes."""


def token_logprobs(
    logits: Array, token_ids: Sequence[int], num_likeliest: Sequence[int], tokenizer: Tokenizer
) -> list[TokenLogprobs]:
    """Return for each row of `logits` [n, vocab_size] its token of `token_ids`, then its `num_likeliest` tokens."""
    logprobs = log_softmax(logits)
    own = logprobs[np.arange(len(logprobs)), token_ids]
    ranks = 1 + np.count_nonzero(logprobs > own[:, None], axis=-1)
    likeliest = _likeliest(logprobs, max(num_likeliest))
    values = np.take_along_axis(logprobs, likeliest, -1)
    own_entries = zip(token_ids, own.tolist(), ranks.tolist(), strict=True)
    rows = zip(own_entries, likeliest.tolist(), values.tolist(), num_likeliest, strict=True)
    return [_entries(entry, ids[:number], values, tokenizer) for entry, ids, values, number in rows]


def prompt_logprobs(
    hidden: Array,
    logits: Callable[[Array], Array],
    prompt_ids: Sequence[int],
    num_likeliest: int,
    tokenizer: Tokenizer,
) -> list[TokenLogprobs | None]:
    """Return an entry for each token of the prompt; None for the first.

    :param hidden: the model's states after each token, [len(prompt_ids), hidden_size].
    :param logits: makes logits [n, vocab_size] of n states.
    """
    result: list[TokenLogprobs | None] = [None]
    for start in range(1, len(prompt_ids), _ROWS_AT_ONCE):
        token_ids = prompt_ids[start : start + _ROWS_AT_ONCE]
        before = logits(hidden[start - 1 : start - 1 + len(token_ids)])
        result += token_logprobs(before, token_ids, [num_likeliest] * len(token_ids), tokenizer)
    return result


def log_softmax(logits: Array) -> Array:
    """Return the logarithm of the probabilities that `logits` [n, vocab_size] mean."""
    shifted: Array = logits - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def _likeliest(logprobs: Array, number: int) -> npt.NDArray[np.intp]:
    """Return the token ids of the `number` largest of each row, in descending order; equal ones by id."""
    vocab_size = logprobs.shape[-1]
    number = min(number, vocab_size)
    # A partition first: sorting a whole vocabulary takes a hundred times as long.
    some = np.argpartition(logprobs, vocab_size - number, axis=-1)[:, vocab_size - number :] if number else None
    if some is None:
        return np.empty((len(logprobs), 0), np.intp)
    some.sort(axis=-1)
    order = np.argsort(-np.take_along_axis(logprobs, some, -1), axis=-1, kind="stable")
    return np.take_along_axis(some, order, -1)


def _entries(
    own: tuple[int, float, int], likeliest_ids: Sequence[int], logprobs: Sequence[float], tokenizer: Tokenizer
) -> TokenLogprobs:
    """Return one position's. `logprobs` are in descending order: the first position of a value is the token's rank."""
    ranked = [(i, value, logprobs.index(value) + 1) for i, value in zip(likeliest_ids, logprobs, strict=False)]
    entries = [own, *(entry for entry in ranked if entry[0] != own[0])]
    return [Logprob(i, value, rank, tokenizer.decode([i], skip_special_tokens=False)) for i, value, rank in entries]
