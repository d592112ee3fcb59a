"""Numbers of config.json, which anybody can have edited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepseek_triton_build.text import short_repr
from deepseek_triton_tools.tool_errors import CheckpointError


def config_number(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return an entry of config.json, or `default` where it is missing or null.

    :raises CheckpointError: when it is no whole number of at least 0, or is missing without a default.
    """
    found = config.get(key)
    found = default if found is None else found
    if type(found) is not int or found < 0:
        raise CheckpointError(
            f"config.json: expected {key} as a whole number, found {short_repr(found)}; download it again"
        )
    return found
