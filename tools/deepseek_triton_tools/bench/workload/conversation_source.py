"""Where the conversations of a sweep's runs come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deepseek_triton_tools.bench.workload.bench_request import Conversation
from deepseek_triton_tools.bench.workload.dataset_files import TokenCounter, first_conversations, read_conversations
from deepseek_triton_tools.bench.workload.dataset_options import DatasetOptions
from deepseek_triton_tools.bench.workload.random_conversations import RandomConversations
from deepseek_triton_tools.generating.prompt_sources import file_name
from deepseek_triton_tools.terminal.output_streams import complain


@dataclass(frozen=True)
class RandomConversationSource:
    """Other prompts for each seed, so that no prefix cache knows them from the run before."""

    options: DatasetOptions
    vocabulary: range

    def __call__(self, number: int, seed: int) -> Sequence[Conversation]:
        return RandomConversations(replace(self.options, seed=seed), number, self.vocabulary)


class FileConversationSource:
    """The conversations of a file, which is read once. A run begins where the run before it ended; a trace, and a run
    that needs more than the file has, begin at its start."""

    def __init__(
        self,
        options: DatasetOptions,
        vocabulary: range,
        count_tokens: TokenCounter,
        most: int | None,
        vocab_size: int | None = None,
    ) -> None:
        """See `read_conversations`. Raises ToolError when the file can't be used."""
        assert options.file is not None
        self._name = file_name(options.file)
        self._found = read_conversations(options.file, options, vocabulary, count_tokens, most, vocab_size)
        self._next = 0
        first = self._found[0][0]
        self.is_trace = first.at_s is not None
        self.is_text = isinstance(first.prompt, str)

    def __len__(self) -> int:
        return len(self._found)

    def __call__(self, number: int, seed: int) -> Sequence[Conversation]:
        there_are, start = len(self._found), self._next
        if self.is_trace or number > there_are:
            return first_conversations(self._found, number, self._name)
        self._next += number
        if start <= there_are < self._next:
            complain(f"{self._name} has {there_are} requests, fewer than all runs: later ones may find them in a cache")
        return self._found.chosen([index % there_are for index in range(start, self._next)])
