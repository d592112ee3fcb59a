"""Command lines of TensorRT-LLM's programs, read back into settings."""

from collections.abc import Mapping
from typing import Any

from deepseek_triton_build.data.own_files import load_yaml

FLAGS: Mapping[str, Mapping[str, list[str]]] = load_yaml("spelling.yaml")["flags"]


def from_flags(program: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return canonical settings for `flags` (`--tp_size` or `tp_size` -> value) of `program`; unknown flags stay."""
    ours = {flag: key for key, names in FLAGS[program].items() for flag in names}
    return {ours.get(f"--{name.lstrip('-').replace('-', '_')}", name): value for name, value in flags.items()}


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted path -> value; an empty mapping counts as a value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found
