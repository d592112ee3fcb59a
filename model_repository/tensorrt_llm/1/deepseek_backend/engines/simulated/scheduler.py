"""Continuous batching without a model: which requests move in an iteration, and by how many tokens.

Knows no clock, no threads and no text. It schedules as TensorRT-LLM does with its GUARANTEED_NO_EVICT policy: by
priority, first come, first served among equals; a request is admitted when a row of the batch, the token budget of the
iteration and KV blocks for its prompt and every token it may generate are all free, and it keeps those blocks to its
end, whoever comes.

Under attention data parallelism each rank has a batch, a budget and a KV cache of its own; a request goes to the rank
with the fewest rows. A prompt no longer than the budget runs whole in one iteration, a longer one in chunks.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """Of one rank."""

    max_batch_size: int
    max_num_tokens: int
    """Tokens in one iteration: prompts, and 1 + num_draft_tokens for each decoding row."""
    tokens_per_block: int
    num_blocks: int
    num_draft_tokens: int = 0
    tokens_per_step: float = 1.0
    """Acceptance length: tokens a decoding row gains in an iteration, on average."""

    @property
    def tokens_per_row(self) -> int:
        return 1 + self.num_draft_tokens


@dataclass(slots=True)
class RankLoad:
    """What one rank computes in one iteration."""

    num_decodes: int = 0
    context_tokens: int = 0
    """Cached tokens that the decoding rows attend to, all rows together."""
    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    """Pairs of a prompt token and one it attends to."""


@dataclass(slots=True, eq=False, kw_only=True)
class ScheduledRow:
    """One request as the scheduler sees it. Compared by identity."""

    num_input_tokens: int
    max_tokens: int
    """What KV blocks are reserved for."""
    length: int
    """Tokens it will have generated at its end; at most max_tokens."""
    priority: int = 0
    """Higher goes first."""
    generated: int = 0
    prefilled: int = 0
    blocks: int = 0
    rank: RankBatch | None = None
    """Where it runs; None while it waits and after its end."""


class Iteration(NamedTuple):
    loads: list[RankLoad]
    """One for each rank."""
    moved: list[ScheduledRow]
    """The rows that gained tokens; those with generated == length have ended and hold nothing any more."""
    admitted: list[ScheduledRow]
    """The rows that waited until this iteration."""


class RankBatch:
    """A batch and its KV cache."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._decoding: list[ScheduledRow] = []
        self._prefilling: ScheduledRow | None = None
        self._prompted: list[ScheduledRow] = []  # rows whose prompt ends in the iteration being put together
        self._context_tokens = 0
        self._budget = 0
        self.free_blocks = limits.num_blocks
        self.load = RankLoad()

    @property
    def num_running(self) -> int:
        return len(self._decoding) + len(self._prompted) + (self._prefilling is not None)

    def begin(self) -> None:
        """Start an iteration: decoding rows first, then the prompt that is under way."""
        self.load = RankLoad(num_decodes=len(self._decoding), context_tokens=self._context_tokens)
        self._budget = self._limits.max_num_tokens - len(self._decoding) * self._limits.tokens_per_row
        if self._prefilling is not None:
            self._prefill(self._prefilling)

    def fits(self, row: ScheduledRow) -> bool:
        needed = row.num_input_tokens if row.num_input_tokens <= self._limits.max_num_tokens else 1
        return (
            self._budget >= needed  # none is left beside a prompt that is still under way
            and self.free_blocks >= row.blocks
            and self.num_running < self._limits.max_batch_size
        )

    def admit(self, row: ScheduledRow) -> None:
        row.rank = self
        self.free_blocks -= row.blocks
        self._prefill(row)

    def advance(self, burst: int) -> list[ScheduledRow]:
        """Carry the iteration out: decoding rows gain `burst` tokens, a prompt's end gives one. The rows that moved."""
        for row in self._decoding:
            row.generated += burst
        for row in self._prompted:
            row.generated = 1
            self._context_tokens += row.num_input_tokens + 1
        self._context_tokens += burst * len(self._decoding)
        moved = self._decoding + self._prompted
        self._decoding, self._prompted = moved, []
        ended = [row for row in moved if row.generated >= row.length]
        if ended:
            self._decoding = [row for row in moved if row.generated < row.length]
        for row in ended:
            self._context_tokens -= row.num_input_tokens + row.generated
            row.generated = row.length
            self._release(row)
        return moved

    def drop(self, row: ScheduledRow) -> None:
        """Take out a row between two iterations."""
        if row is self._prefilling:
            self._prefilling = None
        else:
            self._decoding.remove(row)
            self._context_tokens -= row.num_input_tokens + row.generated
        self._release(row)

    def _prefill(self, row: ScheduledRow) -> None:
        chunk = min(row.num_input_tokens - row.prefilled, self._budget)
        self._budget -= chunk
        self.load.prefill_tokens += chunk
        self.load.prefill_pairs += chunk * (row.prefilled + chunk / 2)
        row.prefilled += chunk
        if row.prefilled == row.num_input_tokens:
            self._prefilling = None
            self._prompted.append(row)
        else:
            self._prefilling = row

    def _release(self, row: ScheduledRow) -> None:
        self.free_blocks += row.blocks
        row.rank = None


@dataclass
class Scheduler:
    """The queue and the ranks.

    Every row comes to its end if max_batch_size * tokens_per_row is at most max_num_tokens, and a row's prompt and
    max_tokens fit the KV cache of one rank.
    """

    limits: BatchLimits
    num_ranks: int = 1
    waiting: deque[ScheduledRow] = field(default_factory=deque, init=False)
    """In the order in which they will be admitted."""
    num_iterations: int = field(default=0, init=False)
    num_drafted: int = field(default=0, init=False)
    """Draft tokens so far."""
    num_accepted: int = field(default=0, init=False)
    """Of those, the right ones; they count even where a row ended before them."""
    ranks: list[RankBatch] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = [RankBatch(self.limits) for _ in range(self.num_ranks)]

    @property
    def num_running(self) -> int:
        return sum(rank.num_running for rank in self.ranks)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.num_running

    @property
    def num_blocks(self) -> int:
        return self.limits.num_blocks * self.num_ranks

    @property
    def num_blocks_used(self) -> int:
        return self.num_blocks - sum(rank.free_blocks for rank in self.ranks)

    def add(self, row: ScheduledRow) -> None:
        row.blocks = -(-(row.num_input_tokens + row.max_tokens) // self.limits.tokens_per_block)
        if not self.waiting or self.waiting[-1].priority >= row.priority:
            self.waiting.append(row)  # always, where nobody uses priorities
        else:
            bisect.insort(self.waiting, row, key=lambda other: -other.priority)

    def remove(self, row: ScheduledRow) -> None:
        """Take out a row that waits or runs."""
        if row.rank is None:
            self.waiting.remove(row)
        else:
            row.rank.drop(row)

    def clear(self) -> None:
        """Take out all rows, in whatever state an exception has left them. What has been counted stays."""
        self.waiting.clear()
        self.ranks = [RankBatch(self.limits) for _ in range(self.num_ranks)]

    def step(self) -> Iteration:
        """One iteration."""
        for rank in self.ranks:
            rank.begin()
        admitted = self._admit()
        burst = self.decoded_between(self.num_iterations, self.num_iterations + 1)
        loads = [rank.load for rank in self.ranks]
        if self.limits.num_draft_tokens:
            num_decodes = sum(load.num_decodes for load in loads)
            self.num_drafted += num_decodes * self.limits.num_draft_tokens
            self.num_accepted += num_decodes * (burst - 1)
        moved = [row for rank in self.ranks for row in rank.advance(burst)]
        self.num_iterations += 1
        return Iteration(loads, moved, admitted)

    def decoded_between(self, first: int, end: int) -> int:
        """Whole tokens that a decoding row gains from iteration `first` up to `end`; tokens_per_step on average."""
        rate = self.limits.tokens_per_step
        return math.floor(end * rate) - math.floor(first * rate)

    def _admit(self) -> list[ScheduledRow]:
        admitted = []
        while self.waiting:
            row = self.waiting[0]
            fitting = [rank for rank in self.ranks if rank.fits(row)]
            if not fitting:
                break
            self.waiting.popleft()
            min(fitting, key=lambda rank: rank.num_running).admit(row)
            admitted.append(row)
        return admitted
