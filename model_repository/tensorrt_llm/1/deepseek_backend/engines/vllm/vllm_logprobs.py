"""Log-probabilities of vLLM in the form of the engine protocol: those of the core's outputs, and of the public ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepseek_backend.engines.base import Logprob, TokenLogprobs

Text = Callable[[int], str]
"""Makes the text of one token alone."""


def array_logprobs(rows: Any, num_likeliest: int, text: Text) -> list[TokenLogprobs]:
    """Return the entries of a LogprobsLists (numpy) or LogprobsTensors (torch), with the `num_likeliest` of each row.

    The rows are as wide as the request that asks for the most in the iteration needs.

    Its first three fields are token ids [n, k + 1], log-probabilities [n, k + 1] and the ranks [n] of the first token
    of each row. The first one is the token at the position, and the others are the likeliest ones, in order.
    """
    token_ids, logprobs = (field[:, : 1 + num_likeliest].tolist() for field in rows[:2])
    ranks = rows[2].tolist()
    return [
        [
            Logprob(ids[0], values[0], rank, text(ids[0])),
            *(
                Logprob(token_id, value, place, text(token_id))
                for place, (token_id, value) in enumerate(zip(ids[1:], values[1:], strict=True), 1)
                if token_id != ids[0]
            ),
        ]
        for ids, values, rank in zip(token_ids, logprobs, ranks, strict=True)
    ]


def mapped_logprobs(rows: Sequence[Mapping[int, Any] | None], text: Text) -> list[TokenLogprobs | None]:
    """Return the entries of a RequestOutput: token id -> vLLM's Logprob, the token at the position first."""
    return [
        None
        if row is None
        else [Logprob(token_id, entry.logprob, entry.rank, text(token_id)) for token_id, entry in row.items()]
        for row in rows
    ]
