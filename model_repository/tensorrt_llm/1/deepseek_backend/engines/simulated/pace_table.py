"""The duration of an iteration, interpolated in a table: which a model.yaml holds.

A table belongs to one layout of one model on one kind of GPU. All its numbers are of one rank, and all ranks are taken
to have the same work: prompts that are spread unevenly cost what the same tokens cost on all ranks together.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepseek_backend.engines.simulated.scheduler import RankLoad

_DECODE = "decode"
_PROMPT = "prompt"


@dataclass(frozen=True, slots=True)
class Grid:
    """Values over two axes, linear between the points. Below an axis its first point holds; above, the last line goes
    on."""

    rows: tuple[float, ...]
    columns: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]

    def at(self, row: float, column: float) -> float:
        above, share = _place(self.rows, row)
        right, along = _place(self.columns, column)
        low, high = self.values[above - 1], self.values[above]
        first = low[right - 1] + along * (low[right] - low[right - 1])
        last = high[right - 1] + along * (high[right] - high[right - 1])
        return first + share * (last - first)


def _place(points: Sequence[float], value: float) -> tuple[int, float]:
    """Return the number of the point that ends the stretch of `value`, and its place there: 0 begin, 1 end."""
    number = min(max(bisect_right(points, value), 1), len(points) - 1)
    begin, end = points[number - 1], points[number]
    return number, max(0.0, (value - begin) / (end - begin))


@dataclass(frozen=True, kw_only=True)
class PaceTable:
    """A deployment, as `DeploymentModel` is one, whose durations were looked up elsewhere."""

    num_ranks: int
    num_draft_tokens: int
    kv_cache_tokens: int
    """Number of tokens in the KV cache of one rank."""
    kv_token_bytes: float
    """Bytes of a token in the KV cache."""
    decode: Grid
    """Milliseconds of an iteration without prompts, over decoding rows and over the mean number of cached tokens."""
    prompt: Grid
    """Milliseconds of an iteration with prompts, over decoding rows (from 0) and over the tokens of one prompt."""
    pair_ns: Grid
    """Nanoseconds of each pair of tokens beyond those of one whole prompt, for later chunks, over the same tokens."""

    def step_seconds(self, loads: Sequence[RankLoad]) -> float:
        """Return the duration of an iteration; `loads` has one for each rank."""
        ranks = len(loads)
        rows = sum([load.num_decodes for load in loads])
        context = sum([load.context_tokens for load in loads]) / rows if rows else 0.0
        tokens = sum([load.prefill_tokens for load in loads]) / ranks
        pairs = sum([load.prefill_pairs for load in loads]) / ranks if tokens else 0.0
        return self.step_ms(rows / ranks, context, tokens, pairs) / 1000

    def step_ms(self, rows: float, context: float, tokens: float = 0.0, pairs: float | None = None) -> float:
        """Return the duration in ms of an iteration on ranks with equal work.

        :param rows: decoding rows of a rank, each with `context` cached tokens.
        :param tokens: prompt tokens of a rank.
        :param pairs: pairs of a prompt token and a token that it attends to. None: those of one whole prompt.
        """
        decode = self.decode.at(rows, context) if rows else 0.0
        if not tokens:
            return decode
        beyond = 0.0 if pairs is None else pairs - tokens**2 / 2
        prompt = self.prompt.at(rows, tokens) + beyond * self.pair_ns.at(0, tokens) * 1e-6
        # Prompts were measured beside rows of the shortest context.
        longer = decode - self.decode.at(rows, self.decode.columns[0]) if rows else 0.0
        return max(prompt + longer, decode)


def read_table(
    document: Mapping[str, Any], *, num_ranks: int, num_draft_tokens: int, kv_cache_tokens: int, kv_token_bytes: float
) -> PaceTable:
    """Make a table of the part `pace` of a preset file.

    :raises ValueError: for another document; it says what is wrong.
    """
    parts = ("batches", "contexts", _DECODE, "prompt_batches", "tokens", _PROMPT, "pair_ns")
    if not isinstance(document, Mapping) or set(document) != set(parts):
        raise ValueError(f"expected a mapping with {', '.join(parts)}")
    decode = _grid(document, _DECODE, "batches", "contexts")
    prompt = _grid(document, _PROMPT, "prompt_batches", "tokens")
    pairs = _numbers(document, "pair_ns", len(prompt.columns))
    return PaceTable(
        num_ranks=num_ranks,
        num_draft_tokens=num_draft_tokens,
        kv_cache_tokens=kv_cache_tokens,
        kv_token_bytes=kv_token_bytes,
        decode=decode,
        prompt=prompt,
        pair_ns=Grid(rows=(0, 1), columns=prompt.columns, values=(pairs, pairs)),
    )


def _grid(document: Mapping[str, Any], name: str, rows: str, columns: str) -> Grid:
    axes = [_numbers(document, axis) for axis in (rows, columns)]
    for axis, points in zip((rows, columns), axes, strict=True):
        if len(points) < 2 or sorted(set(points)) != list(points):
            raise ValueError(f"{axis}: expected two or more rising numbers, got {list(points)}")
    lines = document[name]
    if not isinstance(lines, list) or len(lines) != len(axes[0]):
        raise ValueError(f"{name}: expected a list of {len(axes[0])} lists, one for each of {rows}")
    values = tuple(_numbers({f"{name}[{n}]": line}, f"{name}[{n}]", len(axes[1])) for n, line in enumerate(lines))
    return Grid(rows=axes[0], columns=axes[1], values=values)


def _numbers(document: Mapping[str, Any], name: str, length: int | None = None) -> tuple[float, ...]:
    given = document[name]
    if not isinstance(given, list) or not all(
        isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf for value in given
    ):
        raise ValueError(f"{name}: expected a list of numbers from 0")
    if length is not None and len(given) != length:
        raise ValueError(f"{name}: expected {length} numbers, got {len(given)}")
    return tuple(given)
