"""Makes up log-probabilities with the shape of real ones, to try clients and dashboards with. They mean nothing.

They are consistent. At each position the likeliest token has some probability, and every further rank a fixed share of
the one before, so that all add up to 1. Greedy decoding takes rank 1. Otherwise a rank comes as often as its
probability says. The same token at the same position always gets the same numbers."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

from deepseek_backend.engines.base import Logprob, TokenLogprobs
from deepseek_backend.engines.generate_request import SamplingParams
from deepseek_backend.engines.simulated.filler_text import ORDINARY_IDS, VOCABULARY, id_of, text_of


def output_logprobs(token_ids: Sequence[int], first: int, sampling: SamplingParams) -> list[TokenLogprobs]:
    """Return those of generated tokens; `first` is the index of the first one in the output."""
    last_rank = 1 if sampling.greedy else sampling.top_k or len(ORDINARY_IDS)
    count = sampling.logprobs or 0
    return [
        _invent(token_id, text_of(token_id), position, count, last_rank)
        for position, token_id in enumerate(token_ids, first)
    ]


def prompt_logprobs(prompt: Sequence[str] | Sequence[int], count: int) -> list[TokenLogprobs | None]:
    """Return those of a prompt's tokens, which are texts or ids; None for the first."""
    tokens = [(id_of(token), token) if isinstance(token, str) else (token, text_of(token)) for token in prompt]
    invented = [_invent(*token, position, count, len(ORDINARY_IDS)) for position, token in enumerate(tokens[1:], 1)]
    return [None, *invented]


def _invent(token_id: int, text: str, position: int, count: int, last_rank: int) -> TokenLogprobs:
    """Return the token, then the others among the `count` likeliest."""
    noise = zlib.crc32(b"%d at %d" % (token_id, position))
    likeliest = 0.25 + 0.7 * (noise >> 16) / 65536
    top, fall = math.log(likeliest), math.log1p(-likeliest)
    drawn = 1 + int(math.log1p(-(noise & 0xFFFF) / 65536) / fall)
    rank = min(drawn, last_rank)
    others = [other for other in range(1, count + 1) if other != rank]
    return [
        Logprob(token_id, top + (rank - 1) * fall, rank, text),
        *(_neighbour(token_id, distance, top + (other - 1) * fall, other) for distance, other in enumerate(others, 1)),
    ]


def _neighbour(token_id: int, distance: int, logprob: float, rank: int) -> Logprob:
    """Return an alternative: the token at this distance in the vocabulary, which is never the same token."""
    neighbour = ORDINARY_IDS[(token_id - ORDINARY_IDS.start + distance) % len(ORDINARY_IDS)]
    return Logprob(neighbour, logprob, rank, VOCABULARY[neighbour])
