"""This says what bench sends, and at which pace: requests and their lengths, datasets, points of load."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """A request to send. In a conversation, the prompt is only what the user adds in this turn."""

    prompt: str | tuple[int, ...]
    """Text, or token ids."""
    output_tokens: int | None = None
    """Number of tokens to generate; None: the server's default."""
    at_s: float | None = None
    """Seconds after the start of the run at which a trace sends it. In a conversation only the first turn has it."""
    wait_s: float = 0.0
    """Seconds between the end of the turn before and this one."""
    fields: Mapping[str, Any] | None = None
    """More sampling fields of this request."""


Conversation: TypeAlias = tuple[BenchRequest, ...]
"""Turns that are sent one after the other; each prompt follows the text so far. A plain request is one of one turn."""


@dataclass(frozen=True, slots=True)
class NormalLengths:
    """Lengths in tokens that are distributed normally, at least 1; all are the same without `stdev`."""

    mean: int
    stdev: int = 0

    def draw(self, num: int, seed: int) -> "NDArray[np.int64]":
        """Return the lengths that TensorRT-LLM's prepare_dataset.py draws for this seed: its generator, rounded up."""
        import numpy as np

        drawn: NDArray[np.float64] = np.random.RandomState(seed).normal(self.mean, self.stdev, num)
        return np.ceil(drawn).clip(1).astype(np.int64)

    def __str__(self) -> str:
        return f"{self.mean}±{self.stdev}" if self.stdev else str(self.mean)


@dataclass(frozen=True, slots=True)
class UniformLengths:
    """Lengths in tokens from `least` to `most`, both included."""

    least: int
    most: int

    def draw(self, num: int, seed: int) -> "NDArray[np.int64]":
        """Return the lengths that TensorRT-LLM's prepare_dataset.py draws for this seed."""
        import numpy as np

        return np.random.default_rng(seed).integers(self.least, self.most + 1, num)

    def __str__(self) -> str:
        return f"{self.least}-{self.most}"


Lengths: TypeAlias = NormalLengths | UniformLengths

DEFAULT_INPUT_LEN, DEFAULT_OUTPUT_LEN = 1024, 128
"""The defaults of `vllm bench serve`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOptions:
    """Random prompts, or the requests of `file`. The same options give the same requests."""

    file: Path | None = None
    shuffle: bool = False
    """Take the file's requests in random order. Not for a trace."""
    speedup: float = 1.0
    """By how much faster a trace is replayed."""
    input: Lengths = NormalLengths(DEFAULT_INPUT_LEN)
    """Random prompts: the tokens that follow the prefix."""
    output: Lengths | None = None
    """Tokens to generate. None: those that the file says, and 128 with random prompts."""
    prefix_len: int = 0
    """Tokens that begin every prompt of a group."""
    num_prefixes: int = 1
    """Number of groups."""
    turns: int = 1
    """Number of requests in each conversation."""
    later_input: Lengths | None = None
    """Tokens that the user adds in each turn after the first. None: as `input`."""
    think_s: float = 0.0
    """Seconds between an answer and the next turn."""
    seed: int = 0
    """Below 2^32, which is numpy's limit."""

    @property
    def random_output(self) -> Lengths:
        """Tokens to generate for random prompts."""
        return self.output or NormalLengths(DEFAULT_OUTPUT_LEN)

    @property
    def longest(self) -> int:
        """Tokens of a random prompt and its answer, at the end of the conversation; of normal lengths the means."""
        lengths = (self.input, *[self.later_input or self.input] * (self.turns - 1), *[self.random_output] * self.turns)
        return self.prefix_len + sum(each.mean if isinstance(each, NormalLengths) else each.most for each in lengths)

    @property
    def label(self) -> str:
        """The dataset in a few words, for tables."""
        if self.file is not None:
            return self.file.name if self.output is None else f"{self.file.name}, output {self.output}"
        parts = [f"random {self.input}/{self.random_output}"]
        if self.prefix_len:
            groups = f"{self.num_prefixes} prefixes" if self.num_prefixes > 1 else "a prefix"
            parts.append(f"{groups} of {self.prefix_len}")
        if self.turns > 1:
            parts.append(f"{self.turns} turns")
        return ", ".join(parts)


_AT_ONCE_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """Closed loop: `concurrency` without `rate`. Open loop: `rate`, and `concurrency` is then only a limit. Trace:
    neither; the dataset says when."""

    num_requests: int
    """Conversations that are measured; a plain request is a conversation of one turn."""
    num_warmup: int = 0
    """Conversations sent before, at the same pace, and not measured."""
    concurrency: int | None = None
    """Conversations under way at once."""
    rate: float | None = None
    """Requests a second; infinity sends all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps between requests: 1 is Poisson, below it come bursts."""
    duration_s: float | None = None
    """Nothing is sent later than this; what is under way is waited for. The dataset is repeated as often as needed."""
    leave_share: float = 0.0
    """Share of the requests, 0 to 1, that the client leaves after `leave_after_s`."""
    leave_after_s: float = 0.0

    @property
    def at_once(self) -> bool:
        """Whether all requests are due within a tenth of a second: then their number is the load, not the rate."""
        return self.rate is not None and self.num_requests <= _AT_ONCE_S * self.rate

    @property
    def label(self) -> str:
        """A name for tables, pictures and files."""
        parts = []
        if self.at_once:
            parts.append(f"{self.num_requests} at once")
        if self.rate is not None and not (self.at_once and math.isinf(self.rate)):
            parts.append(f"rate {self.rate:.12g}")
        if self.concurrency is not None:
            parts.append(f"concurrency {self.concurrency}")
        return ", ".join(parts) or "trace"
