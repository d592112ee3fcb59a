"""Random prompts of exact length, with shared prefixes and several turns where wanted."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import NDArray

from deepseek_triton_tools.bench.token_ids import random_ids
from deepseek_triton_tools.bench.workload import BenchRequest, Conversation, DatasetOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
        position = range(len(self))[index]
        return self.make(position) if isinstance(position, int) else self.chosen(position)


@dataclass(frozen=True, slots=True)
class ChosenConversations(LazyConversations):
    source: LazyConversations
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def make(self, index: int) -> Conversation:
        return self.source[self.indices[index]]


_PROMPT, _PREFIX, _ANSWER = 1, 2, 3
"""Parts of the keys of random ids, so that no prompt is the same as a prefix."""


class RandomConversations(LazyConversations):
    """Conversation i has prefix i modulo the number of prefixes, so that the groups take turns."""

    def __init__(self, options: DatasetOptions, num: int, vocabulary: range) -> None:
        self._options = options
        self._vocabulary = vocabulary
        later = (options.later_input or options.input).draw(num * (options.turns - 1), options.seed ^ 1)
        first = options.input.draw(num, options.seed)
        self._input_lens = np.column_stack([first, later.reshape(num, options.turns - 1)])
        """[num, turns]"""
        outputs = options.random_output.draw(num * options.turns, options.seed)
        self._output_lens = outputs.reshape(num, options.turns)

    def __len__(self) -> int:
        return len(self._input_lens)

    @cached_property
    def _prefixes(self) -> NDArray[np.int64]:
        """[num_prefixes, prefix_len]"""
        shape = (self._options.num_prefixes, self._options.prefix_len)
        return random_ids(self._vocabulary, shape[0] * shape[1], self._options.seed, _PREFIX).reshape(shape)

    def make(self, index: int) -> Conversation:
        return tuple(
            BenchRequest(
                prompt=tuple(prompt.tolist()),
                output_tokens=int(output_tokens),
                wait_s=self._options.think_s if turn else 0.0,
            )
            for turn, (prompt, output_tokens) in enumerate(
                zip(self._prompts(index), self._output_lens[index], strict=True)
            )
        )

    def flat_requests(self) -> Iterator[BenchRequest]:
        """All requests for a program that knows no conversations: the first turns of all, then the second ones.

        Each prompt has the whole text before it, with random ids in place of the answers. So it begins with the prompt
        of the turn before.
        """
        for turn, index in itertools.product(range(self._options.turns), range(len(self))):
            text = []
            for number, prompt in enumerate(self._prompts(index)[:turn]):
                answer_len = int(self._output_lens[index, number])
                answer = random_ids(self._vocabulary, answer_len, self._options.seed, _ANSWER, index, number)
                text += [prompt, answer]
            ids = np.concatenate([*text, self._prompts(index)[turn]])
            yield BenchRequest(prompt=tuple(ids.tolist()), output_tokens=int(self._output_lens[index, turn]))

    def _prompts(self, index: int) -> list[NDArray[np.int64]]:
        """The token ids of each turn."""
        lengths = self._input_lens[index]
        ids = random_ids(self._vocabulary, int(lengths.sum()), self._options.seed, _PROMPT, index)
        first, *later = np.split(ids, np.cumsum(lengths)[:-1])
        return [np.concatenate([self._prefixes[index % self._options.num_prefixes], first]), *later]
