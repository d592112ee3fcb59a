"""`deepseek-triton checkpoint compare`: what another precision of a checkpoint has changed."""

from __future__ import annotations

import argparse
import os
import re
from importlib.util import find_spec
from pathlib import Path

from deepseek_triton_tools.cli.parsing import Verbs, add_json, add_verb, path, positive
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.tool_errors import InstallationError, ToolError


def add_compare_form(forms: Verbs) -> None:
    """Add the form `compare` to `checkpoint`."""
    verb = add_verb(
        forms, "compare", "show what another precision has changed: each weight's error, and the experts' output"
    )
    verb.runs(
        _compare,
        "deepseek-triton checkpoint compare /models/DeepSeek-R1 /models/DeepSeek-R1-W4AFP8 --sample 24",
        "deepseek-triton checkpoint compare DeepSeek-R1 DeepSeek-R1-bf16 --layers 3,58-60 --report error.html",
        notes="FP8 in blocks, INT4 in groups, bfloat16 and float32 are compared as the numbers that they stand for.\n"
        "docs/checkpoints.md says what the figures mean.",
    )
    verb.add_argument("source", type=path, metavar="SOURCE", help="folder of the checkpoint that counts as right")
    verb.add_argument("other", type=path, metavar="OTHER", help="folder of the checkpoint that was made of it")
    help_text = "only these layers, such as 3,58-60 (default: everything)"
    verb.add_argument("--layers", type=_layers, metavar="LIST", help=help_text)
    help_text = "only N weights of each part, and of each layer's experts, evenly spaced (default: all)"
    verb.add_argument("--sample", type=positive, metavar="N", help=help_text)
    verb.add_argument("--workers", type=positive, metavar="N", help="processes (default: one a core)")
    verb.add_argument("--report", type=path, metavar="FILE", help="write a page with pictures, which needs no network")
    add_json(verb, "docs/checkpoints.md")


def _layers(text: str) -> frozenset[int]:
    """Read a list of layers: "3,58-60"."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part.strip(), re.ASCII)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise argparse.ArgumentTypeError(f"expected layers such as 3,58-60, got {text!r:.100}")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def _compare(args: argparse.Namespace) -> int:
    if find_spec("ml_dtypes") is None:
        raise InstallationError(f"checkpoint compare needs ml-dtypes and numpy: {install_extra('checkpoint')}")
    if args.report is not None and find_spec("plotly") is None:
        raise InstallationError(f"--report needs plotly: {install_extra('bench')}")
    if args.report is not None and not _can_be_written(args.report):
        raise ToolError(
            f"--report: expected a file in a folder that can be written, found {args.report}; name another", exit_code=2
        )
    from deepseek_triton_tools.checkpoints.comparison_view import (
        comparison_document,
        show_comparison,
        write_comparison,
    )
    from deepseek_triton_tools.checkpoints.weight_comparison import compare
    from deepseek_triton_tools.terminal.output_streams import print_json, to_reader
    from deepseek_triton_tools.terminal.status_line import StatusLine

    status = StatusLine()
    found = compare(
        args.source,
        args.other,
        layers=args.layers,
        sample=args.sample,
        workers=args.workers or len(os.sched_getaffinity(0)),
        on_progress=lambda done, total: status.show(lambda: f"compared {done:,} of {total:,} weights and layers"),
    )
    status.clear()
    with to_reader():
        if args.json:
            print_json(comparison_document(found, args.source, args.other))
        else:
            show_comparison(found)
    if args.report is not None:  # after the figures, which would be lost when this fails
        write_comparison(args.report, found, args.source, args.other)
    return 0


def _can_be_written(report: Path) -> bool:
    return report.parent.is_dir() and not report.is_dir() and os.access(report.parent, os.W_OK | os.X_OK)
