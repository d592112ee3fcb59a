"""Conversations that are made when they are asked for: 50 million token ids would take gigabytes as Python's ints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from deepseek_triton_tools.bench.workload.bench_request import Conversation


class LazyConversations(Sequence[Conversation]):
    """Each is made anew whenever it is asked for. They can be pickled, and slices of them are lazy too."""

    @abstractmethod
    def make(self, index: int) -> Conversation:
        """Make the conversation of an index from 0 on."""

    def chosen(self, indices: Sequence[int]) -> LazyConversations:
        """Some of them, in this order."""
        return ChosenConversations(self, indices)

    def at_s(self, index: int) -> float:
        """When a trace begins the conversation, in seconds after the start; 0 without a trace."""
        return self[index][0].at_s or 0.0

    @overload
    def __getitem__(self, index: int) -> Conversation: ...
    @overload
    def __getitem__(self, index: slice) -> LazyConversations: ...
    def __getitem__(self, index: int | slice) -> Conversation | LazyConversations:
        found = range(len(self))[index]
        return self.make(found) if isinstance(found, int) else self.chosen(found)


@dataclass(frozen=True, slots=True)
class ChosenConversations(LazyConversations):
    source: LazyConversations
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def make(self, index: int) -> Conversation:
        return self.source[self.indices[index]]
