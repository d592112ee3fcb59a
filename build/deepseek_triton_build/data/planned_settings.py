"""A line of model.yaml, and a variable of the environment, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Explained:
    """Something chosen, with the reason."""

    reason: str
    source: str = ""
    """The document the reason rests on; empty when it is arithmetic or the user's own choice."""

    @property
    def comment(self) -> str:
        return f"{self.reason} ({self.source})" if self.source else self.reason


@dataclass(frozen=True, kw_only=True)
class Setting(Explained):
    """One line of model.yaml."""

    key: str
    """Dotted path, `kv_cache_config.dtype`."""
    value: Any


@dataclass(frozen=True, kw_only=True)
class EnvironmentVariable(Explained):
    """One variable that the server is started with."""

    name: str
    value: str


@dataclass(frozen=True, kw_only=True)
class Omission:
    """A setting of the recipe, or a default, that the plan leaves out."""

    key: str
    value: Any
    reason: str
