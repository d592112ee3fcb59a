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


def spread(num_tokens: int, num_chunks: int) -> list[int]:
    """Divide tokens evenly among chunks whose own numbers nobody told.

    >>> spread(8, 3)
    [3, 3, 2]
    """
    each, rest = divmod(num_tokens, max(1, num_chunks))
    return [each + (number < rest) for number in range(num_chunks)]
