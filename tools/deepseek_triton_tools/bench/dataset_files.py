"""Datasets in files: JSON Lines of several tools, ShareGPT's JSON, and traces; what a sweep sends of them; a dataset in
numbers, and as a file in trtllm-bench's format."""

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

from deepseek_triton_tools.bench.dataset_rows import HASHED_BLOCK, DatasetRow, HashedPrompt, can_be_sent, parse_row
from deepseek_triton_tools.bench.random_prompts import RandomConversations, TokenCounter, random_ids
from deepseek_triton_tools.bench.workload import BenchRequest, Conversation, DatasetOptions
from deepseek_triton_tools.generating.records import checked_rows, file_name
from deepseek_triton_tools.terminal.output_streams import complain
from deepseek_triton_tools.terminal.tables import Table, paragraph, show
from deepseek_triton_tools.tool_errors import ToolError

PREFIX_BLOCK = 32
"""Tokens. TensorRT-LLM's KV cache reuses blocks of this size."""
_UNIQUE, _BLOCK = 1, 2
"""Parts of the keys of random ids."""
_FEWEST_TOKENS, _MOST_PROMPT_TOKENS, _MOST_TOKENS = 4, 1024, 2048
"""benchmark_serving leaves out what of ShareGPT is shorter or longer (is_valid_sequence in vLLM and TensorRT-LLM)."""
_COUNTED_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class FileConversations(Sequence[Conversation]):
    """The rows of a file, each a conversation of one turn, whose prompt is made when it is asked for."""

    rows: Sequence[tuple[int, DatasetRow]]
    """With a number that gives a prompt of its own to a row of which only the length is known."""
    vocabulary: range
    seed: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Conversation:  # type: ignore[override]
        number, row = self.rows[index]
        prompt: str | tuple[int, ...]
        if isinstance(row.prompt, HashedPrompt):
            prompt = self._hashed(number, row.prompt)
        else:
            prompt = row.prompt if isinstance(row.prompt, str) else tuple(row.prompt.tolist())
        return (BenchRequest(prompt=prompt, output_tokens=row.output_tokens, at_s=row.at_s, fields=row.fields),)

    def at_s(self, index: int) -> float:
        """When a trace begins the conversation, in seconds after the start; 0 without a trace."""
        return self.rows[index][1].at_s or 0.0

    def _hashed(self, number: int, prompt: HashedPrompt) -> tuple[int, ...]:
        blocks = [random_ids(self.vocabulary, HASHED_BLOCK, self.seed, _BLOCK, hash_id) for hash_id in prompt.hash_ids]
        rest = max(0, prompt.length - HASHED_BLOCK * len(blocks))
        own = random_ids(self.vocabulary, rest, self.seed, _UNIQUE, number)
        return tuple(np.concatenate([*blocks, own])[: prompt.length].tolist())


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
            rows = list(islice(_sharegpt_rows(name, file.read(), options, count_tokens), most))
        else:
            lines = ((n, line) for n, line in enumerate(file, 1) if line.strip())
            rows = checked_rows(name, "line", lines, partial(parse_row, vocab_size=vocab_size))
            is_trace = any(row.at_s is not None for row in rows)
            if options.output is not None:
                lengths = options.output.draw(len(rows), options.seed).tolist()
                rows = [replace(row, output_tokens=length) for row, length in zip(rows, lengths, strict=True)]
            rows = _trace(name, rows, options) if is_trace else _shuffled(rows, options)
    if options.speedup != 1 and not is_trace:
        raise ToolError(f"--trace-speedup: only with a trace, and {name} has no timestamps", exit_code=2)
    if not rows:
        raise ToolError(f"{name} has no request that can be sent")
    return FileConversations(list(enumerate(rows)), vocabulary, options.seed)


def _shuffled(rows: list[Any], options: DatasetOptions) -> list[Any]:
    """Give the order that benchmark_serving gives for the seed."""
    if options.shuffle:
        random.Random(options.seed).shuffle(rows)
    return rows


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


def _sharegpt_rows(
    name: str, content: bytes, options: DatasetOptions, count_tokens: TokenCounter | None
) -> Iterator[DatasetRow]:
    """Rows of the lengths that benchmark_serving takes; of all lengths where nothing counts tokens."""
    try:
        entries = enumerate(json.loads(content), 1)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"{name} is not JSON: {error}") from error
    answered = _shuffled([pair for pair in checked_rows(name, "conversation", entries, _answered) if pair], options)
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
        if not is_fixed:
            output_lens = tuple(count_tokens(answers))
        for prompt, input_len, output_len in zip(prompts, count_tokens(prompts), output_lens, strict=True):
            is_long_enough = input_len >= _FEWEST_TOKENS and (is_fixed or output_len >= _FEWEST_TOKENS)
            if is_long_enough and input_len <= _MOST_PROMPT_TOKENS and input_len + output_len <= _MOST_TOKENS:
                yield DatasetRow(prompt=prompt, output_tokens=output_len)


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


# --- What the runs of a sweep send ---


@dataclass(frozen=True)
class RandomConversationSource:
    """Other prompts for each seed, so that no prefix cache knows them from the run before."""

    options: DatasetOptions
    vocabulary: range
    num_requests: None = None
    is_trace: bool = False
    is_text: bool = False

    def __call__(self, number: int, seed: int) -> Sequence[Conversation]:
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

    def __call__(self, number: int, seed: int) -> FileConversations:
        """:raises ToolError: for a trace that has fewer. Of other files they are repeated, and stderr says so."""
        start = 0 if self.is_trace or number > self.num_requests else self._next
        has = f"{self._name} has {self.num_requests} requests"
        if number > self.num_requests:
            if self.is_trace:
                problem = f"{self._name} is a trace of {self.num_requests} requests, not {number}, and not repeated"
                raise ToolError(problem, exit_code=2)
            complain(f"{has}: they are repeated as needed")
        elif not self.is_trace:
            self._next += number
            if start <= self.num_requests < self._next:
                complain(f"{has}, fewer than all runs: later ones may find them in a cache")
        rows = self._conversations.rows
        # Only these rows go to the load processes.
        return replace(self._conversations, rows=[rows[n % len(rows)] for n in range(start, start + number)])


ConversationSource: TypeAlias = RandomConversationSource | FileConversationSource


# --- A dataset in numbers, and as a file ---


def show_summary(name: str, requests: Iterable[BenchRequest]) -> None:
    """Print how many requests there are, how long they are, and what their prompts have in common."""
    lengths: dict[str, list[int]] = {"input tokens": [], "input characters": [], "output tokens": []}
    times: list[float] = []
    num_requests = num_repeated = 0
    seen: set[int] = set()
    for request in requests:
        num_requests += 1
        if isinstance(request.prompt, str):
            lengths["input characters"].append(len(request.prompt))
        else:
            lengths["input tokens"].append(len(request.prompt))
            blocks = _prefix_hashes(request.prompt)
            num_repeated += len(seen.intersection(blocks))
            seen.update(blocks)
        if request.output_tokens is not None:
            lengths["output tokens"].append(request.output_tokens)
        if request.at_s is not None:
            times.append(request.at_s)
    rows = []
    for label, values in lengths.items():
        if values:
            statistics = [float(np.mean(values)), *np.percentile(values, [0, 50, 90, 99, 100]).tolist()]
            rows.append([label, f"{sum(values):,}", *(f"{round(value):,}" for value in statistics)])
    title = f"{name}: {num_requests:,} requests" + (f" in {max(times) - min(times):,.1f} s" if times else "")
    show(Table(title=title, headings=["", "total", "mean", "min", "p50", "p90", "p99", "max"], rows=rows, is_grid=True))
    if lengths["input tokens"]:
        share = num_repeated * PREFIX_BLOCK / sum(lengths["input tokens"])
        text = f"{share:.1%} of the input tokens are in a prefix that an earlier prompt has too"
        print(paragraph(f"{text} (blocks of {PREFIX_BLOCK} tokens): what a prefix cache could spare."))


def _prefix_hashes(ids: Sequence[int]) -> list[int]:
    """A hash of each prefix that ends with a whole block."""
    hashes, last = [], 0
    for end in range(PREFIX_BLOCK, len(ids) + 1, PREFIX_BLOCK):
        last = hash((last, ids[end - PREFIX_BLOCK : end]))
        hashes.append(last)
    return hashes


def dataset_lines(requests: Iterable[BenchRequest]) -> Iterator[str]:
    """Return a line for each request. Raises ToolError for one without a number of output tokens, which the format
    requires."""
    for task_id, request in enumerate(requests):
        if request.output_tokens is None:
            raise ToolError(
                f"request {task_id + 1} has no number of output tokens, and trtllm-bench needs one; give it to all: "
                "--output-mean N",
                exit_code=2,
            )
        is_text = isinstance(request.prompt, str)
        row: dict[str, Any] = {"task_id": task_id, "prompt" if is_text else "input_ids": request.prompt}
        row["output_tokens"] = request.output_tokens
        if request.at_s is not None:  # trtllm-bench ignores what it doesn't know
            row["timestamp"] = round(request.at_s * 1000, 3)
        yield json.dumps({**row, **(request.fields or {})}, separators=(",", ":"), ensure_ascii=False)
