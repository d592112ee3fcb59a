"""`deepseek-triton checkpoint info`: what a checkpoint is, and what serves it."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from deepseek_triton_tools.cli.parsing import Verbs, add_json, add_verb, require_tools, words
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.tool_errors import InstallationError


def add_info_form(forms: Verbs) -> None:
    """Add the form `info` to `checkpoint`."""
    verb = add_verb(forms, "info", "say what a checkpoint is: model, precision, parts, and what serves it")
    verb.runs(
        _info,
        "deepseek-triton checkpoint info /models/DeepSeek-R1",
        "deepseek-triton checkpoint info deepseek-ai/DeepSeek-R1 --json",
        notes="Only headers are read, so it takes seconds. Exit codes: 0 it is described; 1 its files contradict each\n"
        "other, or one is missing or damaged.",
    )
    help_text = "its folder, its Hugging Face name in the local cache, or a model repository that serves it"
    verb.add_argument("checkpoint", type=words, metavar="CHECKPOINT", help=help_text)
    add_json(verb, "docs/checkpoints.md")


def _info(args: argparse.Namespace) -> int:
    require_tools()
    if find_spec("ml_dtypes") is None:
        raise InstallationError(f"checkpoint info needs ml-dtypes and numpy: {install_extra('checkpoint')}")
    from deepseek_triton_tools.checkpoints.info import describe
    from deepseek_triton_tools.checkpoints.info_view import document, tables
    from deepseek_triton_tools.repository.checkpoint_files import find_checkpoints
    from deepseek_triton_tools.terminal.output_streams import complain, print_json, to_reader
    from deepseek_triton_tools.terminal.tables import show

    found = [describe(files) for files in find_checkpoints(args.checkpoint)]
    with to_reader():
        if args.json:
            print_json(document(found))
        else:
            for info in found:
                for table in tables(info):
                    show(table)
    problems = [problem for info in found for problem in info.problems]
    for problem in problems:
        complain(f"deepseek-triton checkpoint: {problem}")
    return 1 if problems else 0
