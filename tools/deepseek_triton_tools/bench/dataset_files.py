"""Datasets in files, as trtllm-bench, `generate`, vLLM, Mooncake, AIPerf and ShareGPT have them; what a sweep sends."""

import json
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deepseek_triton_build.text import nearest_name
from deepseek_triton_client import InvalidRequest, SamplingParams
from deepseek_triton_tools.bench.random_prompts import RandomConversations, TokenCounter, random_ids
from deepseek_triton_tools.bench.workload import BenchRequest, Conversation, DatasetOptions
from deepseek_triton_tools.generating.records import checked_rows, file_name, json_of_line
from deepseek_triton_tools.terminal.output_streams import complain
from deepseek_triton_tools.tool_errors import ToolError

HASHED_BLOCK = 512
"""Tokens that one hash id of a Mooncake trace stands for."""

_PROMPTS = {
    "input_ids": "token ids",
    "logits": "token ids",
    "prompt": "a text or token ids",
    "text_input": "a text",
    "input_length": "a whole number from 1",
}
"""Key -> what it holds. `logits` is trtllm-bench's old name of `input_ids`."""
_OUTPUTS = ("output_tokens", "output_length", "max_tokens")
_MEANT_FOR_OTHERS = ("task_id", "id", "request_id", "model", "stream", "streaming")
_KEYS = (*_PROMPTS, *_OUTPUTS, "timestamp", "hash_ids")
_SAMPLING = tuple(field.name for field in fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """A prompt of which only the length is known, and which blocks it has in common with others."""

    length: int
    hash_ids: tuple[int, ...]
    """One for each 512 tokens; the last one may stand for fewer. Tokens without one are in no other prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRow:
    prompt: str | NDArray[np.int32] | HashedPrompt
    output_tokens: int | None
    at_s: float | None = None
    """Seconds, by the trace's own clock in the file, after the first request later."""
    fields: Mapping[str, Any] | None = None
    """Sampling fields."""


def parse_row(line: bytes, *, vocab_size: int | None = None) -> DatasetRow:
    """Read one line of JSON. Raises ToolError with everything that is wrong with it.

    :param vocab_size: token ids are below it; None where it is not known.
    """
    row = json_of_line(line)
    if isinstance(row, str):
        row = {"prompt": row}
    if isinstance(row, dict) and isinstance(row.get("payload"), dict):
        row |= row.pop("payload")
    if not isinstance(row, dict):
        raise ToolError(f"expected an object with a prompt, got {row!r:.100}")
    parts: dict[str, Any] = {}
    problems: list[str] = []
    # Each takes what it knows out of the row. What is left for the last has to be sampling fields.
    readers: dict[str, Callable[[], Any]] = {
        "prompt": lambda: _prompt(row, vocab_size),
        "output_tokens": lambda: _output_tokens(row),
        "at_s": lambda: _seconds(row),
        "fields": lambda: _fields(row),
    }
    for name, read in readers.items():
        try:
            parts[name] = read()
        except ToolError as error:
            problems.append(str(error))
    if problems:
        raise ToolError("; ".join(problems))
    return DatasetRow(**parts)


def _prompt(row: dict[str, Any], vocab_size: int | None) -> str | NDArray[np.int32] | HashedPrompt:
    if row.pop("messages", None) is not None:
        raise ToolError("messages can't be sent as a prompt: render them with the model's chat template")
    name, value = _one_of(row, tuple(_PROMPTS))
    if name is None:
        raise ToolError(f"expected one of {', '.join(_PROMPTS)}, got {', '.join(row) or 'nothing'}")
    if name == "input_length":
        hash_ids = row.pop("hash_ids", None)
        if _is_count(value):
            return HashedPrompt(value, _hash_ids(hash_ids, value))
    if isinstance(value, str) and value and "text" in _PROMPTS[name]:
        if not can_be_sent(value):
            raise ToolError(f"{name}: half of a surrogate pair can't be sent: {value!r:.100}")
        return value
    is_ids = "token ids" in _PROMPTS[name] and isinstance(value, list) and {*map(type, value)} == {int}
    if not is_ids or min(value) < 0 or max(value) >= 2**31:
        raise ToolError(f"{name}: expected {_PROMPTS[name]}, got {value!r:.100}")
    if vocab_size is not None and max(value) >= vocab_size:
        most = f"token ids from 0 to {vocab_size - 1}, the server's vocabulary"
        raise ToolError(f"{name}: expected {most}, got {max(value)}")
    return np.array(value, np.int32)  # takes a tenth of a list's memory


def _hash_ids(hash_ids: Any, length: int) -> tuple[int, ...]:
    if hash_ids is None:
        return ()
    if not isinstance(hash_ids, list) or not all(type(each) is int and each >= 0 for each in hash_ids):
        raise ToolError(f"hash_ids: expected whole numbers from 0, got {hash_ids!r:.100}")
    if len(hash_ids) < length // HASHED_BLOCK:
        raise ToolError(
            f"hash_ids: expected {length // HASHED_BLOCK} or more, one for each {HASHED_BLOCK} tokens of "
            f"input_length {length}, got {len(hash_ids)}"
        )
    return tuple(hash_ids)


def _output_tokens(row: dict[str, Any]) -> int | None:
    name, value = _one_of(row, _OUTPUTS)
    if value is None:
        return None
    if _is_count(value):
        return int(value)
    raise ToolError(f"{name}: expected a whole number from 1, got {value!r:.100}")


def _seconds(row: dict[str, Any]) -> float | None:
    """The file has milliseconds."""
    value = row.pop("timestamp", None)
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return value / 1000
    raise ToolError(f"timestamp: expected milliseconds from 0, got {value!r:.100}")


def _fields(row: dict[str, Any]) -> Mapping[str, Any] | None:
    left = {name: value for name, value in row.items() if name not in _MEANT_FOR_OTHERS}
    # The client's own hint, which this one precedes, knows sampling fields only.
    for name in left.keys() - set(_SAMPLING):
        meant = nearest_name(name, (*_KEYS, *_SAMPLING))
        if meant in _KEYS:
            raise ToolError(f"unknown {name!r}; did you mean {meant!r}?")
    try:
        SamplingParams().merged(left)
    except InvalidRequest as error:
        raise ToolError(error.message) from error
    return left or None


def _one_of(row: dict[str, Any], names: tuple[str, ...]) -> tuple[str | None, Any]:
    """Take the one of these keys that the row has, and its value. It is a problem if it has several."""
    values = {name: row.pop(name) for name in names if name in row}
    if len(values) > 1:
        raise ToolError(f"expected only one of {' and '.join(values)}")
    return next(iter(values.items()), (None, None))


def can_be_sent(text: str) -> bool:
    """Whether `text` can be encoded. Half of a surrogate pair is valid JSON, but has no UTF-8."""
    return re.search("[\ud800-\udfff]", text) is None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


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
        """Read `options.file`, of which `-` is standard input.

        :param count_tokens: says how long ShareGPT's prompts and answers are.
        :param most: count no more of them than are needed for so many conversations.
        :param vocab_size: token ids are below it; None where it is not known.
        :raises ToolError: when the file can't be used. Each of its first ten problems is one line on stderr.
        """
        assert options.file is not None
        self.options = options
        self._name = name = file_name(options.file)
        self.is_trace = False
        if str(options.file) != "-" and (options.file.is_dir() or not os.access(options.file, os.R_OK)):
            raise ToolError(f"{name}: No such file, or none that can be read", exit_code=2)
        with open(os.dup(0) if str(options.file) == "-" else options.file, "rb") as file:
            if file.peek().lstrip().startswith(b"["):
                rows = list(islice(_sharegpt_rows(name, file.read(), options, count_tokens), most))
            else:
                lines = ((n, line) for n, line in enumerate(file, 1) if line.strip())
                rows = checked_rows(name, "line", lines, partial(parse_row, vocab_size=vocab_size))
                self.is_trace = any(row.at_s is not None for row in rows)
                if options.output is not None:
                    lengths = options.output.draw(len(rows), options.seed).tolist()
                    rows = [replace(row, output_tokens=length) for row, length in zip(rows, lengths, strict=True)]
                rows = _trace(name, rows, options) if self.is_trace else _shuffled(rows, options)
        if options.speedup != 1 and not self.is_trace:
            raise ToolError(f"--trace-speedup: only with a trace, and {name} has no timestamps", exit_code=2)
        if not rows:
            raise ToolError(f"{name} has no request that can be sent")
        self._conversations = FileConversations(list(enumerate(rows)), vocabulary, options.seed)
        self._next = 0
        self.num_requests = len(rows)
        self.is_text = isinstance(self._conversations[0][0].prompt, str)

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
