"""The layouts of one server that a search tries, and the paces that are asked for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

Json: TypeAlias = dict[str, Any]

GRID: Mapping[str, list[int]] = {
    "batches": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024],
    "contexts": [1024, 4096, 16384, 65536],
    "prompt_batches": [0, 1, 16, 64, 256, 1024],
    "tokens": [64, 256, 1024, 2048, 4096, 8192, 16384, 32768],
}
"""The points of every table: decoding rows and mean cached tokens, decoding rows and prompt tokens, of one rank."""


@dataclass(frozen=True, kw_only=True)
class ServerLayout:
    """How one server divides the model."""

    num_gpus: int
    expert_parallel_size: int
    attention_dp: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks with requests of their own."""
        return self.num_gpus if self.attention_dp else 1

    @property
    def expert_tensor_size(self) -> int:
        """GPUs among which each expert is divided."""
        return self.num_gpus // self.expert_parallel_size

    def __str__(self) -> str:
        return f"{'DP' if self.attention_dp else 'TP'}{self.num_gpus} EP{self.expert_parallel_size}"


@dataclass(frozen=True, kw_only=True)
class PacedModel:
    """The model, GPU and options that a table is for."""

    architecture: str
    precision: str
    gpu: str
    kv_dtype: str
    """bf16 or fp8."""
    num_draft_tokens: int = 0


class Paces(Protocol):
    """Where durations of iterations come from."""

    @property
    def source(self) -> str:
        """The source, with its version, as results name it."""

    def tables(self, model: PacedModel, layouts: Sequence[ServerLayout]) -> dict[ServerLayout, Json | str]:
        """Return for each layout its table over GRID, or why there is none."""


def layouts_up_to(num_gpus: int) -> Iterator[ServerLayout]:
    """Yield the layouts of servers of 1, 2, 4 and so on GPUs: whole experts on each, or divided among 2, 4 or all."""
    size = 1
    while size <= num_gpus:
        for attention_dp in (False, True):
            for experts in sorted({size, size // 2, size // 4, 1} - {0}, reverse=True):
                yield ServerLayout(num_gpus=size, expert_parallel_size=experts, attention_dp=attention_dp)
        size *= 2
