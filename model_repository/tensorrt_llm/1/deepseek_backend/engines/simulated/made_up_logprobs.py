"""Made-up log-probabilities: the shape of real ones, for clients and dashboards to be tried with. They mean nothing.

They are consistent: at each place the likeliest token has some probability and every further rank a fixed share of the
one before, so that all add up to 1. Greedy decoding takes rank 1; otherwise a token's rank comes up as often as its
probability says. The same token at the same place always gets the same numbers.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

from deepseek_backend.engines.base import Logprob, TokenLogprobs
from deepseek_backend.engines.generate_request import SamplingParams
from deepseek_backend.engines.simulated.filler_text import ORDINARY_IDS, VOCABULARY, id_of, text_of


def output_logprobs(token_ids: Sequence[int], first: int, sampling: SamplingParams) -> list[TokenLogprobs]:
    """For generated tokens, of which the first has the index `first` in the output."""
    last_rank = 1 if sampling.greedy else sampling.top_k or len(ORDINARY_IDS)
    count = sampling.logprobs or 0
    return [
        _invent(token_id, text_of(token_id), place, count, last_rank) for place, token_id in enumerate(token_ids, first)
    ]


def prompt_logprobs(prompt: Sequence[str] | Sequence[int], count: int) -> list[TokenLogprobs | None]:
    """For a prompt's tokens, as texts or ids."""
    tokens = [(id_of(token), token) if isinstance(token, str) else (token, text_of(token)) for token in prompt]
    invented = [_invent(*token, place, count, len(ORDINARY_IDS)) for place, token in enumerate(tokens[1:], 1)]
    return [None, *invented]


def _invent(token_id: int, text: str, place: int, count: int, last_rank: int) -> TokenLogprobs:
    """The token, and those of the `count` likeliest that it is not."""
    noise = zlib.crc32(b"%d at %d" % (token_id, place))
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
    """An alternative: the token so much further in the vocabulary, which is never the same one."""
    neighbour = ORDINARY_IDS[(token_id - ORDINARY_IDS.start + distance) % len(ORDINARY_IDS)]
    return Logprob(neighbour, logprob, rank, VOCABULARY[neighbour])
