"""The options of both executors, from vLLM's engine argument `additional_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class ExecutorOptions:
    """How the pretended device behaves."""

    step_s: float = 0.0
    """Least seconds of an iteration."""
    kv_bytes: int = 256 << 20
    """Memory for the KV cache. Only the scheduler sees it: no such memory is taken."""
    fail_after: int | None = None
    """Number of iterations after which the device fails, and with it the engine core."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ExecutorOptions:
        """Return the options in `given`.

        :raises ValueError: for a name that is no option.
        """
        names = {field.name for field in fields(cls)}
        if unknown := set(given) - names:
            raise ValueError(
                f"additional_config: expected {', '.join(sorted(names))}, got {', '.join(sorted(unknown))}"
            )
        return cls(**given)
