"""trtllm-bench's dataset format: JSON Lines with task_id, input_ids or prompt, and output_tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from deepseek_triton_tools.bench.workload.bench_request import BenchRequest
from deepseek_triton_tools.tool_errors import ToolError


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
