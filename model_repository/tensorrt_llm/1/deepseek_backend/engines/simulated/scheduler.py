"""Continuous batching without a model: it decides which requests advance in an iteration, and by how many tokens.

The scheduler knows no clock, no threads and no text. It works as TensorRT-LLM does with its GUARANTEED_NO_EVICT policy:
by priority, and the oldest first among equals. A request is admitted when a row of the batch, the token budget of the
iteration, and KV blocks for its prompt and every token that it may generate are all free. It keeps these blocks until
its end; a request of a context server keeps them until another server has fetched its KV cache.

Under attention data parallelism each rank has a batch, a budget and a KV cache of its own. A request goes to the rank
with the fewest rows. A prompt within the budget runs in one iteration, a longer one in chunks.
"""

import bisect
import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """The limits of one rank."""

    max_batch_size: int
    max_num_tokens: int
    """Limit on the tokens of an iteration: prompt tokens, and 1 + num_draft_tokens for each decoding row."""
    tokens_per_block: int
    num_blocks: int
    num_draft_tokens: int = 0
    tokens_per_step: float = 1.0
    """Acceptance length: average number of tokens that a decoding row gains in an iteration."""

    @property
    def tokens_per_row(self) -> int:
        return 1 + self.num_draft_tokens


@dataclass(slots=True)
class RankLoad:
    """The work of one rank in one iteration."""

    num_decodes: int = 0
    context_tokens: int = 0
    """Number of cached tokens that all decoding rows attend to."""
    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    """Number of pairs of a prompt token and a token that it attends to."""


@dataclass(slots=True, eq=False, kw_only=True)
class ScheduledRow:
    """The scheduler's view of one request. Rows are compared by identity."""

    num_input_tokens: int
    max_tokens: int
    """Number of generated tokens for which KV blocks are reserved."""
    length: int
    """Number of generated tokens at its end; at most max_tokens."""
    priority: int = 0
    """Rows with a higher priority go first."""
    generated: int = 0
    """Number of generated tokens; before its prompt was computed, of those that come from a context server."""
    prefilled: int = 0
    blocks: int = 0
    fetches: bool = False
    """Its KV cache comes from a context server: it takes its place in a batch, and decodes from `Scheduler.join` on."""
    keeps_blocks: bool = False
    """Its blocks stay reserved after its end, until `Scheduler.free`."""
    rank: "RankBatch | None" = None
    """Batch in which it runs; None while it waits and after its end."""


class Iteration(NamedTuple):
    """The result of one iteration."""

    loads: list[RankLoad]
    """The work of each rank; empty where no rank had any, so that it was no iteration."""
    moved: list[ScheduledRow]
    """Rows that gained tokens. Those with generated == length have ended; they hold no blocks unless `keeps_blocks`."""
    admitted: list[ScheduledRow]
    """Rows that waited until this iteration."""


class RankBatch:
    """The batch of one rank, and its KV cache."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._decoding: list[ScheduledRow] = []
        self._prefilling: ScheduledRow | None = None
        self._prompted: list[ScheduledRow] = []  # rows whose prompt ends in the current iteration
        self._fetching: set[ScheduledRow] = set()
        self._context_tokens = 0
        self._budget = 0
        self.free_blocks = limits.num_blocks
        self.load = RankLoad()

    @property
    def num_running(self) -> int:
        begun = len(self._prompted) + (self._prefilling is not None) + len(self._fetching)
        return len(self._decoding) + begun

    def begin(self) -> None:
        """Begin an iteration with the decoding rows and the prompt that has begun already."""
        self.load = RankLoad(num_decodes=len(self._decoding), context_tokens=self._context_tokens)
        self._budget = self._limits.max_num_tokens - len(self._decoding) * self._limits.tokens_per_row
        if self._prefilling is not None:
            self._prefill(self._prefilling)

    def fits(self, row: ScheduledRow) -> bool:
        prompt = row.num_input_tokens + row.generated
        needed = 0 if row.fetches else prompt if prompt <= self._limits.max_num_tokens else 1
        return (
            self._budget >= needed  # a prompt that has begun and not ended leaves no budget
            and self.free_blocks >= row.blocks
            and self.num_running < self._limits.max_batch_size
        )

    def admit(self, row: ScheduledRow) -> None:
        row.rank = self
        self.free_blocks -= row.blocks
        if row.fetches:
            self._fetching.add(row)
        else:
            self._prefill(row)

    def join(self, row: ScheduledRow) -> None:
        """Let a row decode, whose KV cache has come."""
        self._fetching.remove(row)
        self._decoding.append(row)
        self._context_tokens += row.num_input_tokens + row.generated

    def advance(self, burst: int) -> list[ScheduledRow]:
        """Carry out the iteration and return the rows that advanced.

        A decoding row gains `burst` tokens, and a row whose prompt ends gains one.
        """
        for row in self._decoding:
            row.generated += burst
        for row in self._prompted:
            row.generated += 1
            self._context_tokens += row.num_input_tokens + row.generated
        self._context_tokens += burst * len(self._decoding)
        moved = self._decoding + self._prompted
        self._decoding, self._prompted = moved, []
        ended = [row for row in moved if row.generated >= row.length]
        if ended:
            self._decoding = [row for row in moved if row.generated < row.length]
        for row in ended:
            self._context_tokens -= row.num_input_tokens + row.generated
            row.generated = row.length
            if not row.keeps_blocks:
                self.free(row)
        return moved

    def drop(self, row: ScheduledRow) -> None:
        """Remove a row between two iterations."""
        if row is self._prefilling:
            self._prefilling = None
        elif row in self._fetching:
            self._fetching.remove(row)
        else:
            self._decoding.remove(row)
            self._context_tokens -= row.num_input_tokens + row.generated
        self.free(row)

    def free(self, row: ScheduledRow) -> None:
        """Free the blocks of a row that has ended."""
        self.free_blocks += row.blocks
        row.rank = None

    def _prefill(self, row: ScheduledRow) -> None:
        prompt = row.num_input_tokens + row.generated
        chunk = min(prompt - row.prefilled, self._budget)
        self._budget -= chunk
        self.load.prefill_tokens += chunk
        self.load.prefill_pairs += chunk * (row.prefilled + chunk / 2)
        row.prefilled += chunk
        if row.prefilled == prompt:
            self._prefilling = None
            self._prompted.append(row)
        else:
            self._prefilling = row


@dataclass
class Scheduler:
    """The queue of waiting rows, and the ranks.

    Every row reaches its end if max_batch_size * tokens_per_row is at most max_num_tokens, and the row's prompt and
    max_tokens fit the KV cache of one rank.
    """

    limits: BatchLimits
    num_ranks: int = 1
    waiting: deque[ScheduledRow] = field(default_factory=deque, init=False)
    """Waiting rows, in the order in which they will be admitted."""
    num_iterations: int = field(default=0, init=False)
    num_drafted: int = field(default=0, init=False)
    """Number of draft tokens so far."""
    num_accepted: int = field(default=0, init=False)
    """Number of accepted draft tokens so far. They count even where a row ended before them."""
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
            self.waiting.append(row)  # always so where no request has a priority
        else:
            bisect.insort(self.waiting, row, key=lambda other: -other.priority)

    def remove(self, row: ScheduledRow) -> None:
        """Remove a row that waits or runs."""
        if row.rank is None:
            self.waiting.remove(row)
        else:
            row.rank.drop(row)

    def join(self, row: ScheduledRow) -> None:
        """Let a row that `fetches` decode, because its KV cache has come."""
        if row.rank is not None:
            row.rank.join(row)

    def free(self, row: ScheduledRow) -> None:
        """Free the blocks of a row that has ended and `keeps_blocks`."""
        if row.rank is not None:
            row.rank.free(row)

    def clear(self) -> None:
        """Remove all rows, in whatever state an exception has left them. The counts stay."""
        self.waiting.clear()
        self.ranks = [RankBatch(self.limits) for _ in range(self.num_ranks)]

    def step(self) -> Iteration:
        """Admit waiting rows, and run one iteration if there is work."""
        for rank in self.ranks:
            rank.begin()
        admitted = []
        while self.waiting:
            row = self.waiting[0]
            fitting = [rank for rank in self.ranks if rank.fits(row)]
            if not fitting:
                break
            self.waiting.popleft()
            min(fitting, key=lambda rank: rank.num_running).admit(row)
            admitted.append(row)
        loads = [rank.load for rank in self.ranks]
        if not any(load.num_decodes or load.prefill_tokens for load in loads):
            return Iteration([], [], admitted)
        burst = self.decoded_between(self.num_iterations, self.num_iterations + 1)
        if self.limits.num_draft_tokens:
            num_decodes = sum(load.num_decodes for load in loads)
            self.num_drafted += num_decodes * self.limits.num_draft_tokens
            self.num_accepted += num_decodes * (burst - 1)
        moved = [row for rank in self.ranks for row in rank.advance(burst)]
        self.num_iterations += 1
        return Iteration(loads, moved, admitted)

    def decoded_between(self, first: int, end: int) -> int:
        """Return the tokens that a decoding row gains from iteration `first` up to `end`.

        They are whole numbers that make tokens_per_step on average.
        """
        rate = self.limits.tokens_per_step
        return math.floor(end * rate) - math.floor(first * rate)
