"""Loads a checkpoint with transformers: the model, its tokenizer, and its begin and end tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from deepseek_backend.engines.base import timed
from deepseek_backend.engines.prompting import bos_token
from deepseek_backend.engines.reference.tiny_checkpoint import ensure_tiny_checkpoint
from deepseek_backend.errors import EngineError, describe

TINY = "tiny"
"""Name of the demo's checkpoint, which is made at its first use."""


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """A loaded model, its tokenizer and its limits."""

    model: Any
    """A transformers model with a language-modelling head, in evaluation mode."""
    tokenizer: Tokenizer
    """The tokenizer inside that of transformers: several threads may use it."""
    chat_tokenizer: Any
    """The tokenizer of transformers, for its chat template only."""
    bos_token: str
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_position_embeddings: int
    longest_token_bytes: int
    """Bytes of the longest token: no text has fewer tokens than its bytes divided by this."""
    load_seconds: Mapping[str, float]
    """Seconds that each phase of the load took."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of `text`. Any thread may call it."""
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return token_ids


def load_checkpoint(name: str, *, version_dir: Path, device: str, dtype: str) -> LoadedCheckpoint:
    """Load the checkpoint `name`: "tiny", a folder (relative to `version_dir`), or a name on the Hugging Face hub.

    Code in the checkpoint is not run.

    :raises EngineError: with the cause in one line.
    """
    # A progress bar would only fill a server's log.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    load_seconds: dict[str, float] = {}
    try:
        with timed(load_seconds, "checkpoint"):
            source = _source(name, version_dir)
        with timed(load_seconds, "tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        with timed(load_seconds, "weights"):
            # experts_implementation stays at transformers' default, grouped_mm: model_runner has the speeds.
            model: Any = AutoModelForCausalLM.from_pretrained(
                source, dtype=getattr(torch, dtype), attn_implementation="sdpa", trust_remote_code=False
            )
            model = model.to(device).eval()
    except Exception as error:  # transformers may raise anything
        raise EngineError(f"can't load the checkpoint {name!r}: {describe(error)}") from error
    return LoadedCheckpoint(
        model=model,
        tokenizer=tokenizer.backend_tokenizer,
        chat_tokenizer=tokenizer,
        bos_token=bos_token(tokenizer),
        eos_token_ids=_eos_token_ids(model),
        vocab_size=model.config.vocab_size,
        max_position_embeddings=model.config.max_position_embeddings,
        longest_token_bytes=max(len(token.encode()) for token in tokenizer.get_vocab()),
        load_seconds=load_seconds,
    )


def _source(name: str, version_dir: Path) -> str:
    if name == TINY:
        return str(ensure_tiny_checkpoint())
    folder = version_dir / name
    return str(folder) if folder.is_dir() else name


def _eos_token_ids(model: Any) -> frozenset[int]:
    """Return the end tokens of generation_config.json, or else config.json; either may give one, several or none."""
    generation_config = getattr(model, "generation_config", None)
    eos = getattr(generation_config, "eos_token_id", None)
    if eos is None:
        eos = model.config.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)
