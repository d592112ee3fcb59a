"""The answer to the task "describe": the facts of the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from deepseek_backend.config import BackendConfig
from deepseek_backend.engines.base import Capabilities, ModelTokenizer
from deepseek_backend.engines.prompting import SPECIAL_TOKENS
from deepseek_backend.request.chat_rendering import ChatFacts

_HUB_FOLDER = "models--"
"""A folder of the Hugging Face hub's cache, such as models--deepseek-ai--DeepSeek-R1, begins with it. The checkpoint
lies in a folder below, whose name is a hash."""


def model_info(
    config: BackendConfig,
    capabilities: Capabilities,
    tokenizer: ModelTokenizer,
    facts: ChatFacts,
    supported: Mapping[str, str],
) -> str:
    """Return the output `model_info`; the contract says what its keys mean.

    :param supported: sampling field -> "" where it is honoured, else the reason why not.
    """
    document = {
        "name": served_name(config.model),
        "checkpoint": config.model,
        "engine": config.engine,
        "engine_version": capabilities.version,
        "simulation": capabilities.simulation,
        "max_seq_len": capabilities.max_seq_len,
        "default_max_tokens": config.default_max_tokens,
        "decoupled": config.decoupled,
        "tool_form": None if facts.form is None else facts.form.name,
        "thinking_switch": facts.has_switch,
        "fields": dict(supported),
        "chat_template": tokenizer.chat_template,
        **{name: tokenizer.special_tokens.get(name, "") for name in SPECIAL_TOKENS},
        "vocab_size": tokenizer.vocab_size,
    }
    return json.dumps(document, ensure_ascii=False)


def served_name(checkpoint: str) -> str:
    """Return the name for people of the checkpoint in a folder, or of one on the hub: its last part, in small letters.

    >>> served_name("/models/DeepSeek-R1"), served_name("deepseek-ai/DeepSeek-V3.1")
    ('deepseek-r1', 'deepseek-v3.1')
    """
    parts = PurePath(checkpoint).parts
    cached = [part.split("--")[-1] for part in parts if part.startswith(_HUB_FOLDER)]
    return (cached or parts or ["deepseek"])[-1].lower()


def is_v32(config: BackendConfig) -> bool:
    """Return whether the checkpoint's folder has a DeepSeek-V3.2; False for one that can't be looked at."""
    try:
        with open(f"{config.resolved_model}/config.json", encoding="utf-8") as file:
            document: Any = json.load(file)
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and document.get("model_type") == "deepseek_v32"
