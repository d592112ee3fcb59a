"""`bench dataset`: prepare_dataset.py's command lines, the other kinds, convert and show."""

from __future__ import annotations

import io
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepseek_triton_tools.cli.bench_dataset import add_dataset_form
from deepseek_triton_tools.cli.parsing import VerbParser, add_verb
from deepseek_triton_tools.tool_errors import ToolError

TINY = Path(__file__).resolve().parents[3] / "model_repository/tensorrt_llm/1/tiny"


def dataset(line: str) -> int:
    """Run `bench dataset` with these words."""
    parser = VerbParser(prog="deepseek-triton")
    bench = add_verb(parser.add_subparsers(parser_class=VerbParser), "bench", "measure")
    add_dataset_form(bench.add_forms("FORM", notes=""))
    args = parser.parse_args(["bench", "dataset", *shlex.split(line)])
    code: int = args.handler(args)
    return code


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


SEEDS = [
    ("--stdout --tokenizer=deepseek-ai/DeepSeek-V3 token-norm-dist --input-mean=65536 --output-mean=1024", 24),
    ("--stdout --tokenizer=deepseek-ai/DeepSeek-V3 token-norm-dist --input-mean=131072 --output-mean=1024", 4),
    ("--tokenizer=nvidia/DeepSeek-R1-FP4 --stdout token-norm-dist --input-mean=1024 --output-mean=2048", 49152),
    ("--stdout --tokenizer deepseek-ai/DeepSeek-R1 token-norm-dist --input-mean 1000 --output-mean 1000", 8192),
]
"""Published ones, without the zero deviations that all of them have."""
CHILD = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"


@pytest.mark.parametrize(("line", "num_requests"), SEEDS)
def test_published_lines_of_prepare_dataset_work(
    line: str, num_requests: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """At most four requests of each are made: tests/bench has the time that all of them take."""
    num = min(num_requests, 4)
    assert dataset(f"{line} --input-stdev=0 --output-stdev=0 --num-requests={num}") == 0
    found = rows(capsys.readouterr().out)
    words = shlex.split(line.replace("=", " "))
    input_len, output_len = (int(words[words.index(f"--{end}-mean") + 1]) for end in ("input", "output"))
    assert [row["task_id"] for row in found] == list(range(num))
    assert {(len(row["input_ids"]), row["output_tokens"]) for row in found} == {(input_len, output_len)}
