"""A dataset in numbers, and as a file in trtllm-bench's format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from deepseek_triton_tools.bench.workload import BenchRequest
from deepseek_triton_tools.terminal.tables import Table, paragraph, show
from deepseek_triton_tools.tool_errors import ToolError

PREFIX_BLOCK = 32
"""Tokens. TensorRT-LLM's KV cache reuses blocks of this size."""


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
        print(
            paragraph(
                f"{share:.1%} of the input tokens are in a prefix that an earlier prompt has too (blocks of "
                f"{PREFIX_BLOCK} tokens): what a prefix cache could spare."
            )
        )


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
