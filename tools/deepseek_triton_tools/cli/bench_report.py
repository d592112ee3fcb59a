"""`deepseek-triton bench report`: pictures of results, as one HTML page and in the terminal."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from deepseek_triton_tools.cli.parsing import Verbs, add_verb, path
from deepseek_triton_tools.terminal.output_streams import complain, to_reader
from deepseek_triton_tools.terminal.tables import is_terminal
from deepseek_triton_tools.tool_errors import ToolError


def add_report_form(forms: Verbs) -> None:
    """Add the form `report` to `bench`."""
    verb = add_verb(forms, "report", "draw one or several results as one HTML page, and in the terminal")
    verb.runs(
        _report,
        "deepseek-triton bench report bench",
        "deepseek-triton bench report before/bench.json after/bench.json --output both.html",
        notes="The page needs no network. docs/bench.md says what the pictures show.",
    )
    help_text = "bench.json, or the folder with it; several are compared"
    verb.add_argument("results", nargs="+", type=path, metavar="RESULT", help=help_text)
    help_text = "the page to write (default: report.html)"
    verb.add_argument("--output", type=path, default=Path("report.html"), metavar="FILE", help=help_text)
    help_text = "draw in the output too where it is no terminal"
    verb.add_argument("--picture", action="store_true", help=help_text)


def _report(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.bench.report_page import write_report
    from deepseek_triton_tools.bench.report_points import NamedResult
    from deepseek_triton_tools.bench.result import read_result
    from deepseek_triton_tools.bench.terminal_pictures import show_pictures

    if args.output.exists() and args.output.suffix.lower() not in (".html", ".htm"):
        raise ToolError(f"--output {args.output}: it exists and is no HTML page; name another file", exit_code=2)
    names = _names(args.results)
    results = [NamedResult(name=name, result=read_result(file)) for name, file in zip(names, args.results, strict=True)]
    write_report(args.output, results)
    if args.picture or is_terminal():
        with to_reader():
            show_pictures(results)
    complain(f"written to {args.output}")
    return 0


def _names(files: Sequence[Path]) -> list[str]:
    """The folder's name of a bench.json, the file's own name of others, and the path where these are the same."""
    from deepseek_triton_tools.bench.result import FILE_NAME

    places = [(file / FILE_NAME if file.is_dir() else file).resolve() for file in files]
    if len(set(places)) < len(places):
        raise ToolError("expected different results, got one twice", exit_code=2)
    names = [place.parent.name if place.name == FILE_NAME else place.stem for place in places]
    counts = Counter(names)
    return [str(file) if counts[name] > 1 else name for name, file in zip(names, files, strict=True)]
