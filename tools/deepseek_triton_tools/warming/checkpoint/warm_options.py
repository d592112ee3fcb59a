"""The options of a warm-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

MOST_JOBS = 64
"""Each job is a thread with an open file. No storage is faster with more of them."""


@dataclass(frozen=True)
class Share:
    """This process's part of a node's work: share `index` of `count`, counted from 1."""

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

    :raises ValueError: lists everything that is wrong.
    """

    share: Share = Share()
    jobs: int | None = None
    """Windows of files that this node reads at once. None: the number that suits the file system."""
    budget: int | None = None
    """Bytes of weights that may lie in this node's page cache. None: what fits the available memory."""
    rate_limit: int | None = None
    """Bytes a second that this node may read. None: no limit."""
    verify: bool = False
    """Compute the checksums of the files, where the checkpoint has them."""
    stall_s: float = 30.0
    """Seconds without a byte of a file after which the file is reported."""
    give_up_s: float | None = None
    """Seconds without a byte of any file after which the warm-up ends. None: it waits, as the engine would."""

    def __post_init__(self) -> None:
        if not isinstance(self.share, Share):
            raise ValueError(f"share: expected a Share, got {self.share!r}")
        problems = [
            f"{name}: expected {expected}, got {getattr(self, name)}"
            for name, (is_allowed, expected) in _LIMITS.items()
            if getattr(self, name) is not None and not is_allowed(getattr(self, name))
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
"""Field -> the test that its value has to pass unless it is None, and that test in words."""
