"""The text of the "model", and its log-probabilities."""

from __future__ import annotations

import itertools
import random
import zlib
from dataclasses import dataclass

from tensorrt_llm.tokenizer import EOS, SPECIAL, StandinTokenizer

PHRASE = "深く考える 🙂 naïve façade, 推理完成。"
"""Text that every answer repeats; most of its tokens end inside a character."""
REASONING = "考えている…</think>"
"""Beginning of an answer whose prompt ends with <think>."""


@dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int | None = None


def answer(prompt_token_ids, params):
    """Yield endless tokens: the phrase, rotated by the prompt and, when sampling, by the seed, with one EOS.

    A prompt with an <answer> and an </answer> behind it gets what stands between the last two of them, and EOS.
    """
    tokenizer = StandinTokenizer()
    _, opening, rest = tokenizer.decode(prompt_token_ids).rpartition("<answer>")
    dictated, closing, _ = rest.partition("</answer>")
    if opening and closing:
        return itertools.chain(tokenizer.encode(dictated, add_special_tokens=False), itertools.repeat(EOS))
    digest = zlib.crc32(bytes(token % 256 for token in prompt_token_ids))
    words = PHRASE.split(" ")
    rotation = digest % len(words)
    if not params._greedy_decoding:
        rotation += 1 + (random.randrange(1 << 32) if params.seed is None else params.seed) % (len(words) - 1)
    text = " ".join(words[rotation % len(words) :] + words[: rotation % len(words)]) + " "
    for bad in [params.bad] if isinstance(params.bad, str) else params.bad or ():
        text = text.replace(bad, "")
    first = []
    if params.guided_decoding is not None:
        first += [*tokenizer.encode(_guided_text(params.guided_decoding), add_special_tokens=False), EOS]
    if tokenizer.decode(prompt_token_ids[-40:]).rstrip().endswith("<think>"):
        first += tokenizer.encode(REASONING, add_special_tokens=False)
    endless = itertools.cycle(tokenizer.encode(text, add_special_tokens=False))
    return itertools.chain(first, itertools.islice(endless, 40 + digest % 40), [EOS], endless)


def _guided_text(guide):
    """Return a JSON object with the name of the guide."""
    name = next(name for name in type(guide).__dataclass_fields__ if getattr(guide, name))
    return f'{{"guided": "{name}"}}'


def logprobs(token, params, of):
    """Return one step's entry. A sampler that gives the likeliest tokens only may leave out the sampled one."""
    own = Logprob(-0.25 * _rank(token, params), _rank(token, params))
    if of == "sampled":
        return {token: Logprob(own.logprob, 1)}
    others = (token_id for token_id in range(len(SPECIAL), len(SPECIAL) + 256) if token_id != token)
    entry = {token if rank == own.rank else next(others): rank for rank in range(1, params.logprobs + 1)}
    return {token_id: Logprob(-0.25 * rank, rank) for token_id, rank in entry.items()}


def _rank(token, params):
    """Return the sampled token's rank: 1 in greedy decoding, one of top_k otherwise."""
    return 1 if params._greedy_decoding else 1 + token % min(3, params.top_k or 3)
