"""Token ids for random prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FIRST_TEXT = 3
"""Every DeepSeek tokenizer begins with the tokens for begin, end and padding."""
_DEEPSEEK_TEXT = 128_000
"""DeepSeek-V3's other special tokens follow its 128,000 tokens of text. How many ids a server says that there are
(128,815 with them, 129,280 with padding) depends on the engine, so random prompts mustn't depend on it."""
_MOST_SPECIAL = 32
"""The tiny model has 17 special tokens at the end of a small vocabulary."""


def text_token_ids(vocab_size: int | None = None) -> range:
    """The ids that are text: a special token in a prompt could end it, or begin a thought.

    :param vocab_size: as a server's `model_info` has it; None: DeepSeek-V3's.
    """
    if vocab_size is None or vocab_size >= _DEEPSEEK_TEXT:
        return range(_FIRST_TEXT, _DEEPSEEK_TEXT)
    return range(_FIRST_TEXT, max(vocab_size - _MOST_SPECIAL, _FIRST_TEXT + 1))


def random_ids(vocabulary: range, length: int, *key: int) -> NDArray[np.int64]:
    """Return `length` ids of `vocabulary`, the same ones for the same key of whole numbers from 0."""
    return np.random.default_rng(key).integers(vocabulary.start, vocabulary.stop, length)
