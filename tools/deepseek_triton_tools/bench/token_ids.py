"""Token ids of prompts: which ones are text, by DeepSeek's tokenizer or a checkpoint's, and how many a text has."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.repository.hub_cache import find_snapshot, parse_hub_name
from deepseek_triton_tools.tool_errors import CheckpointError, InstallationError

TokenCounter: TypeAlias = Callable[[Sequence[str]], Sequence[int]]
"""Returns the number of tokens of each text."""

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


# --- A checkpoint's tokenizer ---

_FILE = "tokenizer.json"


def tokenizer_text_ids(name: str) -> range:
    """The ids that are text.

    :param name: a folder, or a model's name on the Hugging Face hub. A DeepSeek's name is enough: its files are not
        read.
    :raises CheckpointError: when there is no tokenizer that can be read.
    """
    hub_name = None if Path(name).is_dir() else parse_hub_name(name)
    if hub_name is not None and "deepseek" in hub_name.model.casefold():
        return text_token_ids()
    path = _tokenizer_file(name)
    try:
        return text_token_ids(len(json.loads(path.read_bytes())["model"]["vocab"]))
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is no tokenizer: expected a model with a vocab") from error


def tokenizer_counter(name: str) -> TokenCounter:
    """Return what counts tokens, the one that begins a prompt included, as benchmark_serving counts them.

    :raises CheckpointError: when there is no tokenizer that can be read.
    :raises InstallationError: without the package tokenizers.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise InstallationError(
            f"counting tokens needs the package tokenizers: {install_extra('reference')}"
        ) from error

    path = _tokenizer_file(name)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise CheckpointError(f"{path} is no tokenizer: {error}") from error

    def count(texts: Sequence[str]) -> list[int]:
        return [len(encoding.ids) for encoding in tokenizer.encode_batch(list(texts))]

    return count


def _tokenizer_file(name: str) -> Path:
    hub_name = None if Path(name).is_dir() else parse_hub_name(name)
    folder = find_snapshot(hub_name)[0] if hub_name else Path(name)
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no folder {name}, and a name on the hub is OWNER/NAME; name a checkpoint's folder, or leave out "
            "the tokenizer"
        )
    if not (folder / _FILE).is_file():
        raise CheckpointError(f"{folder} has no {_FILE}; name a checkpoint's folder, or leave out the tokenizer")
    return folder / _FILE
