"""Text without a model: a tokenizer that only counts, and a vocabulary to babble from.

The tokens of a request are fixed by its prompt and seed, so that its text is the same in every batch, process and run.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
from dataclasses import dataclass

EOS_ID = 1
"""Of SPECIAL_TOKENS, which have the numbers they have in DeepSeek's vocabulary."""

SPECIAL_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")

_WORDS = """
the a of to and in is that it for as with on by this be at from or one all we can more if so what about into some could
time them other then now only new way may first also after back work year make well even want because any these give
most day us between think over know take people see look come good than its just model token layer expert cache latent
head batch prompt stream memory weight gate route draft accept prefill decode step queue block page rank tensor query
key value score soft max norm scale embed logit sample text word sentence answer question reason proof number sum prime
square root even odd limit series point line plane angle circle matrix vector field group ring graph tree node edge path
café naïve façade über señor Ærø Łódź Москва
"""
_UNSPACED = [
    *"的一是在有和不这中大为上个国我以要他时来用们",
    "模型",
    "推理",
    "专家",
    "注意力",
    "缓存",
    "词元",
    "北京",
    "你好",
]
_UNSPACED += [",", ".", ".\n\n", ";", ":", "-", "?", "!", "\n", "。", ",", " 🚀", " 🧠", " ✨", " 👩‍💻", " 🇨🇳"]

VOCABULARY: tuple[str, ...] = (*SPECIAL_TOKENS, *(f" {word}" for word in _WORDS.split()), *_UNSPACED)
"""Token id -> text."""

_SINGLES = [(token_id,) for token_id in range(len(VOCABULARY))]

_TAPE_LENGTH = 1 << 16
_MASK = _TAPE_LENGTH - 1

_TOKEN = re.compile(r"<｜[^｜]{1,32}｜>|[ ]?[^\W\d_\u2e80-\U0003ffff]{1,8}|\d{1,3}|[ ]?[^\w\s]|\s+|.", re.DOTALL)
"""A word with the space before it (a long one in pieces), three digits, or one character: about what a tokenizer makes
of English, Chinese and numbers."""


def count_tokens(prompt: str, *, add_special_tokens: bool = True) -> int:
    """Prompt length in tokens; at least 1, for a model needs one to start from."""
    return max(1, len(_TOKEN.findall(prompt)) + add_special_tokens)


@functools.cache
def _tape() -> list[int]:
    """Random tokens, made once."""
    draw = random.Random(61)
    return [draw.randrange(len(SPECIAL_TOKENS), len(VOCABULARY)) for _ in range(_TAPE_LENGTH)]


@dataclass(frozen=True, slots=True)
class Script:
    """All that a request would ever say: a walk over the tape."""

    start: int
    stride: int
    """Odd, so that the walk meets the whole tape before it repeats."""

    def read(self, first: int, end: int) -> tuple[tuple[int, ...], str]:
        """Ids and text of the tokens from `first` up to `end`."""
        tape = _tape()
        if end - first == 1:  # nearly every call, once for each token
            token_id = tape[(self.start + first * self.stride) & _MASK]
            return _SINGLES[token_id], VOCABULARY[token_id]
        ids = tuple([tape[(self.start + index * self.stride) & _MASK] for index in range(first, end)])
        return ids, "".join([VOCABULARY[token_id] for token_id in ids])

    def find(self, token_ids: frozenset[int], first: int, end: int) -> int | None:
        """Index of the first token from `first` up to `end` that is one of `token_ids`."""
        ids, _ = self.read(first, end)
        return next((first + offset for offset, token_id in enumerate(ids) if token_id in token_ids), None)


def write_script(prompt: str, seed: int | None = None) -> Script:
    """The script for a prompt; `seed` None is greedy decoding."""
    salt = "" if seed is None else str(seed)
    digest = hashlib.blake2b(f"{salt}\0{prompt}".encode(errors="surrogatepass"), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    return Script(start=number & _MASK, stride=(number >> 16) & _MASK | 1)
