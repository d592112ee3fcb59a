"""Log-probabilities of tokens by the model alone: before penalties, temperature and filters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tokenizers import Tokenizer

from deepseek_backend.engines.base import Logprob, TokenLogprobs

_ROWS_AT_ONCE = 256
"""Rows of a prompt whose logits exist at a time: those of a long prompt over a real vocabulary would take gigabytes."""


@torch.inference_mode()
def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_likeliest: Sequence[int], tokenizer: Tokenizer
) -> list[TokenLogprobs]:
    """Return for each row of `logits` [n, vocab_size] its token of `token_ids`, then its `num_likeliest` tokens."""
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = 1 + (logprobs > own).sum(-1)
    likeliest = logprobs.topk(min(max(num_likeliest), logprobs.shape[-1]))
    own_entries = zip(token_ids, own[:, 0].tolist(), ranks.tolist(), strict=True)
    rows = zip(own_entries, likeliest.indices.tolist(), likeliest.values.tolist(), num_likeliest, strict=True)
    return [_entries(entry, ids[:number], values, tokenizer) for entry, ids, values, number in rows]


def prompt_logprobs(
    hidden: torch.Tensor,
    logits: Callable[[torch.Tensor], torch.Tensor],
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


def _entries(
    own: tuple[int, float, int], likeliest_ids: Sequence[int], logprobs: Sequence[float], tokenizer: Tokenizer
) -> TokenLogprobs:
    """Return one position's. `logprobs` are in descending order: the first position of a value is the token's rank."""
    ranked = [(i, value, logprobs.index(value) + 1) for i, value in zip(likeliest_ids, logprobs, strict=False)]
    entries = [own, *(entry for entry in ranked if entry[0] != own[0])]
    return [Logprob(i, value, rank, tokenizer.decode([i], skip_special_tokens=False)) for i, value, rank in entries]
