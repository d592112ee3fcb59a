"""A dataset in numbers, and as a file in trtllm-bench's format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepseek_triton_tools.bench.workload import BenchRequest
from deepseek_triton_tools.terminal.tables import Table, paragraph, show
from deepseek_triton_tools.tool_errors import ToolError

PREFIX_BLOCK = 32
"""Tokens. TensorRT-LLM's KV cache reuses blocks of this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSummary:
    num_requests: int
    input_tokens: Sequence[int]
    """Lengths of the prompts that are token ids."""
    input_characters: Sequence[int]
    """Lengths of the prompts that are text."""
    output_tokens: Sequence[int]
    """Output lengths, where requests have one."""
    repeated_tokens: int
    """Input tokens in blocks with which an earlier prompt begins too: what a large prefix cache would spare."""
    duration_s: float | None
    """From the first request of a trace to the last; None where the requests have no times."""


def summarize(requests: Iterable[BenchRequest]) -> DatasetSummary:
    input_tokens, input_characters, output_tokens, times = [], [], [], []
    repeated_blocks = num_requests = 0
    seen: set[int] = set()
    for request in requests:
        num_requests += 1
        if isinstance(request.prompt, str):
            input_characters.append(len(request.prompt))
        else:
            input_tokens.append(len(request.prompt))
            blocks = _prefix_hashes(request.prompt)
            repeated_blocks += len(seen.intersection(blocks))
            seen.update(blocks)
        if request.output_tokens is not None:
            output_tokens.append(request.output_tokens)
        if request.at_s is not None:
            times.append(request.at_s)
    return DatasetSummary(
        num_requests=num_requests,
        input_tokens=input_tokens,
        input_characters=input_characters,
        output_tokens=output_tokens,
        repeated_tokens=repeated_blocks * PREFIX_BLOCK,
        duration_s=max(times) - min(times) if times else None,
    )


def show_summary(name: str, summary: DatasetSummary) -> None:
    """Print it as a table."""
    lengths = {
        "input tokens": summary.input_tokens,
        "input characters": summary.input_characters,
        "output tokens": summary.output_tokens,
    }
    rows = [
        [label, f"{sum(values):,}", *(f"{round(value):,}" for value in _spread(values))]
        for label, values in lengths.items()
        if values
    ]
    title = f"{name}: {summary.num_requests:,} requests"
    if summary.duration_s is not None:
        title += f" in {summary.duration_s:,.1f} s"
    show(Table(title=title, headings=["", "total", "mean", "min", "p50", "p90", "p99", "max"], rows=rows, is_grid=True))
    if summary.input_tokens:
        share = summary.repeated_tokens / sum(summary.input_tokens)
        print(
            paragraph(
                f"{share:.1%} of the input tokens are in a prefix that an earlier prompt has too (blocks of "
                f"{PREFIX_BLOCK} tokens): what a prefix cache could spare."
            )
        )


def _spread(values: Sequence[int]) -> list[float]:
    return [float(np.mean(values)), *np.percentile(values, [0, 50, 90, 99, 100]).tolist()]


def _prefix_hashes(ids: Sequence[int]) -> list[int]:
    """A hash of each prefix that ends with a whole block."""
    content = np.asarray(ids, np.int32).tobytes()
    size = PREFIX_BLOCK * np.dtype(np.int32).itemsize
    hashes, last = [], 0
    for end in range(size, len(content) + 1, size):
        last = hash((last, content[end - size : end]))
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
