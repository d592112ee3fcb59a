"""Datasets in files: JSON Lines of several tools, ShareGPT's JSON, and traces."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deepseek_triton_tools.bench.dataset_rows import (
    HASHED_BLOCK,
    DatasetRow,
    HashedPrompt,
    can_be_sent,
    parse_row,
)
from deepseek_triton_tools.bench.random_conversations import LazyConversations, RandomConversations
from deepseek_triton_tools.bench.token_ids import TokenCounter, random_ids
from deepseek_triton_tools.bench.workload import BenchRequest, Conversation, DatasetOptions
from deepseek_triton_tools.generating.prompt_sources import checked_rows, file_name
from deepseek_triton_tools.terminal.output_streams import complain
from deepseek_triton_tools.tool_errors import ToolError

_UNIQUE, _BLOCK = 1, 2
"""Parts of the keys of random ids."""
_FEWEST_TOKENS, _MOST_PROMPT_TOKENS, _MOST_TOKENS = 4, 1024, 2048
"""benchmark_serving leaves out what of ShareGPT is shorter or longer (is_valid_sequence in vLLM and TensorRT-LLM)."""
_COUNTED_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class FileConversations(LazyConversations):
    """The rows of a file, each a conversation of one turn."""

    rows: Sequence[tuple[int, DatasetRow]]
    """With a number that gives a prompt of its own to a row of which only the length is known."""
    vocabulary: range
    seed: int

    def __len__(self) -> int:
        return len(self.rows)

    def make(self, index: int) -> Conversation:
        number, row = self.rows[index]
        prompt = row.prompt if isinstance(row.prompt, str) else tuple(self._ids(number, row.prompt).tolist())
        return (BenchRequest(prompt=prompt, output_tokens=row.output_tokens, at_s=row.at_s, fields=row.fields),)

    def at_s(self, index: int) -> float:
        return self.rows[index][1].at_s or 0.0

    def chosen(self, indices: Sequence[int]) -> FileConversations:
        """Only their rows are pickled."""
        return replace(self, rows=[self.rows[index] for index in indices])

    def _ids(self, number: int, prompt: NDArray[np.int32] | HashedPrompt) -> NDArray[Any]:
        if not isinstance(prompt, HashedPrompt):
            return prompt
        blocks = [random_ids(self.vocabulary, HASHED_BLOCK, self.seed, _BLOCK, hash_id) for hash_id in prompt.hash_ids]
        rest = max(0, prompt.length - HASHED_BLOCK * len(blocks))
        own = random_ids(self.vocabulary, rest, self.seed, _UNIQUE, number)
        ids: NDArray[np.int64] = np.concatenate([*blocks, own])
        return ids[: prompt.length]


def read_conversations(
    path: Path,
    options: DatasetOptions,
    vocabulary: range,
    count_tokens: TokenCounter | None = None,
    most: int | None = None,
    vocab_size: int | None = None,
) -> FileConversations:
    """Return all conversations of a file.

    :param path: `-` is standard input.
    :param count_tokens: says how long ShareGPT's prompts and answers are.
    :param most: count no more of them than are needed for so many conversations.
    :param vocab_size: token ids are below it; None where it is not known.
    :raises ToolError: when the file can't be used. Each of its first ten problems is one line on stderr.
    """
    name = file_name(path)
    is_trace = False
    with open(os.dup(0) if str(path) == "-" else path, "rb") as file:
        if file.peek().lstrip().startswith(b"["):
            answered = [
                pair for pair in checked_rows(name, "conversation", _entries(name, file.read()), _answered) if pair
            ]
            _shuffle(answered, options)
            rows = list(islice(_sharegpt_rows(name, answered, options, count_tokens), most))
        else:
            lines = ((n, line) for n, line in enumerate(file, 1) if line.strip())
            rows = checked_rows(name, "line", lines, partial(parse_row, vocab_size=vocab_size))
            if options.output is not None:
                lengths = options.output.draw(len(rows), options.seed).tolist()
                rows = [replace(row, output_tokens=length) for row, length in zip(rows, lengths, strict=True)]
            is_trace = any(row.at_s is not None for row in rows)
            if is_trace:
                rows = _trace(name, rows, options)
            else:
                _shuffle(rows, options)
    if options.speedup != 1 and not is_trace:
        raise ToolError(f"--trace-speedup: only with a trace, and {name} has no timestamps", exit_code=2)
    if not rows:
        raise ToolError(f"{name} has no request that can be sent")
    return FileConversations(list(enumerate(rows)), vocabulary, options.seed)


def _shuffle(rows: list[Any], options: DatasetOptions) -> None:
    """Give the order that benchmark_serving gives for the seed."""
    if options.shuffle:
        random.Random(options.seed).shuffle(rows)


def _trace(name: str, rows: list[DatasetRow], options: DatasetOptions) -> list[DatasetRow]:
    """The rows in the order of their times, the first at 0 s."""
    timed = [(row.at_s, row) for row in rows if row.at_s is not None]
    problems = []
    if len(timed) < len(rows):
        problems.append(f"only {len(timed)} of {len(rows)} lines have a timestamp")
    if options.shuffle:
        problems.append("a trace keeps its order: leave out --shuffle")
    if problems:
        raise ToolError(f"{name}: {'; '.join(problems)}", exit_code=2)
    timed.sort(key=lambda pair: pair[0])
    return [replace(row, at_s=(at_s - timed[0][0]) / options.speedup) for at_s, row in timed]


# --- ShareGPT ---


def _entries(name: str, content: bytes) -> Iterable[tuple[int, Any]]:
    try:
        return enumerate(json.loads(content), 1)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"{name} is not JSON: {error}") from error


def _answered(entry: Any) -> tuple[str, str] | None:
    """The first two texts of a conversation, a prompt and its answer; None for a conversation without an answer."""
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        raise ToolError(f'expected {{"conversations": [...]}}, got {entry!r:.100}')
    texts = [turn["value"] for turn in turns[:2] if isinstance(turn, dict) and isinstance(turn.get("value"), str)]
    if len(texts) < len(turns[:2]):
        raise ToolError(f'expected {{"from": ..., "value": TEXT}} in conversations, got {turns[:2]!r:.100}')
    if not all(map(can_be_sent, texts)):
        raise ToolError(f"half of a surrogate pair can't be sent: {texts!r:.100}")
    return (texts[0], texts[1]) if len(texts) == 2 else None


def _sharegpt_rows(
    name: str, answered: list[tuple[str, str]], options: DatasetOptions, count_tokens: TokenCounter | None
) -> Iterator[DatasetRow]:
    """Rows of the lengths that benchmark_serving takes; of all lengths where nothing counts tokens."""
    is_fixed = options.output is not None
    if count_tokens is None and not is_fixed:
        raise ToolError(
            f"{name}: an answer's length is the number of output tokens, and counting needs a tokenizer: give "
            "--tokenizer DIR, a checkpoint's folder (or --output-mean N to convert)",
            exit_code=2,
        )
    fixed = options.output.draw(len(answered), options.seed).tolist() if options.output else [0] * len(answered)
    # A server counts no tokens of an empty text.
    pairs = [(*texts, length) for texts, length in zip(answered, fixed, strict=True) if all(texts)]
    if count_tokens is None:
        yield from (DatasetRow(prompt=prompt, output_tokens=length) for prompt, _, length in pairs)
        return
    for start in range(0, len(pairs), _COUNTED_AT_ONCE):
        prompts, answers, output_lens = zip(*pairs[start : start + _COUNTED_AT_ONCE], strict=True)
        input_lens = count_tokens(prompts)
        if not is_fixed:
            output_lens = tuple(count_tokens(answers))
        for prompt, input_len, output_len in zip(prompts, input_lens, output_lens, strict=True):
            is_long_enough = input_len >= _FEWEST_TOKENS and (is_fixed or output_len >= _FEWEST_TOKENS)
            if is_long_enough and input_len <= _MOST_PROMPT_TOKENS and input_len + output_len <= _MOST_TOKENS:
                yield DatasetRow(prompt=prompt, output_tokens=output_len)


# --- What the runs of a sweep send ---


@dataclass(frozen=True)
class RandomConversationSource:
    """Other prompts for each seed, so that no prefix cache knows them from the run before."""

    options: DatasetOptions
    vocabulary: range
    num_requests: None = None
    is_trace: bool = False
    is_text: bool = False

    def __call__(self, number: int, seed: int) -> LazyConversations:
        return RandomConversations(replace(self.options, seed=seed), number, self.vocabulary)


class FileConversationSource:
    """The conversations of a file, which is read once. A run begins where the run before it ended; a trace, and a run
    that needs more than the file has, begin at its start."""

    def __init__(
        self,
        options: DatasetOptions,
        vocabulary: range,
        count_tokens: TokenCounter | None = None,
        most: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """See `read_conversations`. Raises ToolError when the file can't be used."""
        assert options.file is not None
        self.options = options
        self._name = file_name(options.file)
        self._conversations = read_conversations(options.file, options, vocabulary, count_tokens, most, vocab_size)
        self._next = 0
        first = self._conversations[0][0]
        self.num_requests = len(self._conversations)
        self.is_trace = first.at_s is not None
        self.is_text = isinstance(first.prompt, str)

    def __call__(self, number: int, seed: int) -> LazyConversations:
        """:raises ToolError: for a trace that has fewer. Of other files they are repeated, and stderr says so."""
        start = 0 if self.is_trace or number > self.num_requests else self._next
        if number > self.num_requests:
            if self.is_trace:
                problem = f"{self._name} is a trace of {self.num_requests} requests, not {number}, and not repeated"
                raise ToolError(problem, exit_code=2)
            complain(f"{self._name} has {self.num_requests} requests: they are repeated as needed")
        elif not self.is_trace:
            self._next += number
            if start <= self.num_requests < self._next:
                complain(
                    f"{self._name} has {self.num_requests} requests, fewer than all runs: later ones may find them in "
                    "a cache"
                )
        return self._conversations.chosen([index % self.num_requests for index in range(start, start + number)])


ConversationSource: TypeAlias = RandomConversationSource | FileConversationSource
