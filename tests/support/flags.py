"""Command lines of TensorRT-LLM's programs, read back into settings."""

from collections.abc import Mapping
from typing import Any

from deepseek_triton_build.data.spelling import keys_of_flags


def from_flags(program: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return canonical settings for `flags` (`--tp_size` or `tp_size` -> value) of `program`; unknown flags stay."""
    ours = keys_of_flags(program)
    return {ours.get(f"--{name.lstrip('-').replace('-', '_')}", name): value for name, value in flags.items()}
