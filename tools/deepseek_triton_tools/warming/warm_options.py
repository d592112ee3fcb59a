"""What a warm-up is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Method = Literal["splice", "read"]

MOST_JOBS = 64
"""Each is a thread with an open file; no storage is faster with more."""


@dataclass(frozen=True)
class Share:
    """This process's part of a node's work: `index` of `count`, from 1."""

    index: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.count:
            raise ValueError(f"expected a share K/N with K from 1 to N, got {self.index}/{self.count}")

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


@dataclass(frozen=True, kw_only=True)
class WarmOptions:
    """`jobs`, `budget` and `rate_limit` are for the whole node, whatever its number of shares.

    :raises ValueError: with everything that is wrong.
    """

    share: Share = Share()
    jobs: int | None = None
    """Files' windows read at once, on this node. None: what suits the file system."""
    budget: int | None = None
    """Bytes of weights that may lie in this node's page cache. None: what fits the memory that is available."""
    rate_limit: int | None = None
    """Bytes a second, on this node. None: as fast as it goes."""
    verify: bool = False
    """Compute the checksums of the files, where the checkpoint has them."""
    stall_s: float = 30.0
    """Without a byte of a file for so long, it is named."""
    give_up_s: float | None = None
    """Without a byte of any file for so long, the warm-up ends. None: it waits, as the engine would."""

    def __post_init__(self) -> None:
        if not isinstance(self.share, Share):
            raise ValueError(f"share: expected a Share, got {self.share!r}")
        problems = [
            f"{name}: expected {expected}, got {getattr(self, name)}"
            for name, (holds, expected) in _LIMITS.items()
            if getattr(self, name) is not None and not holds(getattr(self, name))
        ]
        if problems:
            raise ValueError("; ".join(problems))


_LIMITS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "jobs": (lambda value: 1 <= value <= MOST_JOBS, f"1 to {MOST_JOBS}"),
    "budget": (lambda value: value >= 0, "a number of bytes from 0"),
    "rate_limit": (lambda value: value >= 1, "a number of bytes from 1"),
    "stall_s": (lambda value: value > 0, "a number of seconds above 0"),
    "give_up_s": (lambda value: value > 0, "a number of seconds above 0"),
}
"""Field -> (what holds for it where it is given, in words)."""
