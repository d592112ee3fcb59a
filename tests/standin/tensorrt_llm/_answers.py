"""What the "model" writes, and with which log-probabilities."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tensorrt_llm.tokenizer import EOS, SPECIAL, StandinTokenizer

PHRASE = "深く考える 🙂 naïve façade, 推理完成。"
"""What every answer says over and over; its tokens end inside characters most of the time."""
THOUGHT = "考えている…</think>"
"""What an answer begins with when its prompt ends with <think>."""


@dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int | None = None


def answer(prompt_token_ids: list[int], params: Any) -> Iterator[int]:
    """The tokens, without end: the phrase, turned by the prompt and, when sampling, by the seed; EOS once in it."""
    tokenizer = StandinTokenizer()
    digest = zlib.crc32(bytes(token % 256 for token in prompt_token_ids))
    words = PHRASE.split(" ")
    turn = digest % len(words)
    if not params._greedy_decoding:
        turn += 1 + (random.randrange(1 << 32) if params.seed is None else params.seed) % (len(words) - 1)
    text = " ".join(words[turn % len(words) :] + words[: turn % len(words)]) + " "
    for bad in [params.bad] if isinstance(params.bad, str) else params.bad or ():
        text = text.replace(bad, "")
    first: list[int] = []
    if params.guided_decoding is not None:
        first += [*tokenizer.encode(_guided_text(params.guided_decoding), add_special_tokens=False), EOS]
    if tokenizer.decode(prompt_token_ids[-40:]).rstrip().endswith("<think>"):
        first += tokenizer.encode(THOUGHT, add_special_tokens=False)
    endless = itertools.cycle(tokenizer.encode(text, add_special_tokens=False))
    return itertools.chain(first, itertools.islice(endless, 40 + digest % 40), [EOS], endless)


def _guided_text(guide: Any) -> str:
    """A JSON object with the guide that was asked for."""
    name = next(name for name in type(guide).__dataclass_fields__ if getattr(guide, name))
    return f'{{"guided": "{name}"}}'


def logprobs(token: int, params: Any, of: str) -> dict[int, Logprob]:
    """One step's entry. A sampler that has the likeliest tokens only may not have the one that it sampled."""
    own = Logprob(-0.25 * _rank(token, params), _rank(token, params))
    if of == "sampled":
        return {token: Logprob(own.logprob, 1)}
    others = (token_id for token_id in range(len(SPECIAL), len(SPECIAL) + 256) if token_id != token)
    entry = {token if rank == own.rank else next(others): rank for rank in range(1, params.logprobs + 1)}
    return {token_id: Logprob(-0.25 * rank, rank) for token_id, rank in entry.items()}


def _rank(token: int, params: Any) -> int:
    """How likely the sampled token was: the likeliest in greedy decoding, one of top_k otherwise."""
    return 1 if params._greedy_decoding else 1 + token % min(3, params.top_k or 3)
