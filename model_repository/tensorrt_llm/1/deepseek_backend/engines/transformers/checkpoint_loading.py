"""Loads a checkpoint with transformers: the model, its tokenizer, and what begins and ends its text."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from deepseek_backend.engines.prompting import bos_token
from deepseek_backend.engines.transformers.tiny_checkpoint import ensure_tiny_checkpoint
from deepseek_backend.errors import EngineError, describe

TINY = "tiny"
"""The name of the demo's checkpoint, which is made on first use."""


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """A loaded model and what is needed around it."""

    model: Any
    """A transformers model with a language-modelling head, in evaluation mode."""
    tokenizer: Tokenizer
    """The one inside transformers' tokenizer: it can be used from several threads."""
    chat_tokenizer: Any
    """transformers' own, for its chat template alone."""
    bos_token: str
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_position_embeddings: int
    longest_token_bytes: int
    """Of the vocabulary: no text becomes fewer tokens than its bytes divided by this."""
    load_seconds: Mapping[str, float]
    """Phase of the load -> how long it took."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; safe from any thread."""
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return token_ids


class _Stopwatch:
    """Times phases that follow one another."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begun = time.monotonic()

    def end(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[phase], self._begun = now - self._begun, now


def load_checkpoint(name: str, *, version_dir: Path, device: str, dtype: str) -> LoadedCheckpoint:
    """The checkpoint `name`: "tiny", a folder (relative to `version_dir`), or a name on the Hugging Face hub.

    Code that comes with a checkpoint is not run.

    :raises EngineError: with the cause in one line.
    """
    # A progress bar is noise in a server's log.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    watch = _Stopwatch()
    try:
        source = _source(name, version_dir)
        watch.end("checkpoint")
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        watch.end("tokenizer")
        # experts_implementation stays at transformers' default, grouped_mm: see model_runner on speed.
        model: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=getattr(torch, dtype), attn_implementation="sdpa", trust_remote_code=False
        )
        model = model.to(device).eval()
        watch.end("weights")
    except Exception as error:  # the border to transformers, which raises whatever it meets
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
        load_seconds=watch.seconds,
    )


def _source(name: str, version_dir: Path) -> str:
    if name == TINY:
        return str(ensure_tiny_checkpoint())
    folder = version_dir / name
    return str(folder) if folder.is_dir() else name


def _eos_token_ids(model: Any) -> frozenset[int]:
    """generation_config.json's end tokens, or config.json's; either may give one, several or none."""
    generation_config = getattr(model, "generation_config", None)
    eos = getattr(generation_config, "eos_token_id", None)
    if eos is None:
        eos = model.config.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)
