"""A server of one kind, behind one interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from deepseek_triton_tools.bench.measuring.request_record import RequestRecord

Endpoint = Literal["triton-http", "triton-grpc", "openai"]

BenchPrompt: TypeAlias = "str | Sequence[int] | list[dict[str, str]]"
"""Text, token ids, or the messages of a chat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings:
    """How to reach the servers. Goes to the load processes, so that everything in it can be pickled."""

    urls: tuple[str, ...]
    """Requests go to them in turn."""
    context_urls: tuple[str, ...] = ()
    """Servers of Triton's that compute the prompts; those of `urls` generate the answers then."""
    endpoint: Endpoint
    model: str
    model_version: str = ""
    chat: bool = False
    """Send prompts as a message of the user, by the model's chat template."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Sampling fields of every request."""
    timeout_s: float | None = None
    """Limit of a whole answer."""
    token: str | None = field(default=None, repr=False)
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @property
    def all_urls(self) -> tuple[str, ...]:
        return (*self.urls, *self.context_urls)


@dataclass(frozen=True, slots=True)
class BenchAnswer:
    """The next turn of a conversation is put behind it."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


class BenchTarget(Protocol):
    """One server. Requests may run at the same time."""

    async def ask(
        self, prompt: BenchPrompt, fields: Mapping[str, Any], record: RequestRecord, *, keep_ids: bool
    ) -> BenchAnswer:
        """Send a request, and note in `record` what comes and when: all but `index`, `turn` and `due_s`.

        Never raises for what a server does. When it is cancelled, the request is left, and `record` says so.
        """
        ...

    async def close(self) -> None: ...


class RunClock(Protocol):
    """Seconds since the start of the run."""

    def __call__(self) -> float: ...


def counted_chunks(times: Sequence[float], tokens: Sequence[int], total: int) -> tuple[list[float], list[int]]:
    """Return the times of chunks and their numbers of tokens, which add up to `total` and are above 0.

    A chunk that brought no token is left out. Where a server doesn't tell the chunks' own numbers, the tokens are
    divided evenly.

    >>> counted_chunks([0.1, 0.2, 0.3], [2, 0, 1], 3)
    ([0.1, 0.3], [2, 1])
    >>> counted_chunks([0.1, 0.2, 0.3], [0, 0, 0], 8)
    ([0.1, 0.2, 0.3], [3, 3, 2])
    """
    if sum(tokens) == total:
        counted = [(time, number) for time, number in zip(times, tokens, strict=True) if number > 0]
        return [time for time, _ in counted], [number for _, number in counted]
    num_chunks = min(len(times), total)
    each, rest = divmod(total, max(1, num_chunks))
    return list(times[:num_chunks]), [each + (number < rest) for number in range(num_chunks)]
