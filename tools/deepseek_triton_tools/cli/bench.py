"""`deepseek-triton bench`: load on a server, and two results side by side or as pictures."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from deepseek_triton_tools.cli.bench_dataset import add_dataset_form
from deepseek_triton_tools.cli.bench_run import add_run_form
from deepseek_triton_tools.cli.parsing import VerbParser, Verbs, add_json, add_verb, option, path, real_number
from deepseek_triton_tools.terminal.output_streams import complain, print_json, to_reader
from deepseek_triton_tools.terminal.tables import paragraph, show
from deepseek_triton_tools.tool_errors import ToolError

_percent = real_number("a percentage from 0, such as 5", lambda value: 0 <= value < math.inf)


def add_options(verb: VerbParser) -> None:
    verb.default_form = "run"
    forms = verb.add_forms(
        "FORM",
        "deepseek-triton bench http://localhost:8000 --concurrency 1,8,64 --isl 1024 --osl 128 --output bench",
        "deepseek-triton bench compare before after",
        notes="`bench URL` is short for `bench run URL`. docs/bench.md has more.",
    )
    add_run_form(forms)
    add_dataset_form(forms)
    add_report_form(forms)
    _add_compare_form(forms)


def add_report_form(forms: Verbs) -> None:
    verb = add_verb(forms, "report", "draw one or several results as one HTML page")
    verb.runs(
        _report,
        "deepseek-triton bench report bench",
        "deepseek-triton bench report before/bench.json after/bench.json --output both.html",
        notes="The page needs no network. docs/bench.md says what the pictures show.",
    )
    option(verb, "results RESULT", "bench.json, or the folder with it; several are compared", path, nargs="+")
    text = "the page to write (default: report.html)"
    option(verb, "--output FILE", text, path, default=Path("report.html"))
    verb.gone = {"--picture": "the page has the pictures"}


def _report(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.bench.report import NamedResult, write_report
    from deepseek_triton_tools.bench.result import read_result

    if args.output.exists() and args.output.suffix.lower() not in (".html", ".htm"):
        raise ToolError(f"--output {args.output}: it exists and is no HTML page; name another file", exit_code=2)
    names = _result_names(args.results)
    results = [NamedResult(name=name, result=read_result(file)) for name, file in zip(names, args.results, strict=True)]
    write_report(args.output, results)
    complain(f"written to {args.output}")
    return 0


def _result_names(files: Sequence[Path]) -> list[str]:
    """The folder's name of a bench.json, the file's own name of others, and the path where these are the same."""
    from deepseek_triton_tools.bench.result import FILE_NAME

    places = [(file / FILE_NAME if file.is_dir() else file).resolve() for file in files]
    if len(set(places)) < len(places):
        raise ToolError("expected different results, got one twice", exit_code=2)
    names = [place.parent.name if place.name == FILE_NAME else place.stem for place in places]
    counts = Counter(names)
    return [str(file) if counts[name] > 1 else name for name, file in zip(names, files, strict=True)]


def _add_compare_form(forms: Verbs) -> None:
    verb = add_verb(forms, "compare", "lay two results side by side, and say which differences are more than noise")
    verb.runs(
        _compare,
        "deepseek-triton bench compare before/bench.json after/bench.json",
        "deepseek-triton bench compare before after --fail-if-worse 5",
        notes="exit codes: 0; 1 a figure is worse (--fail-if-worse), or a file can't be read; 2 wrong command line",
    )
    option(verb, "a A", "bench.json, or the folder that --output named", path)
    option(verb, "b B", "the same of the other result", path)
    add_json(verb, "docs/bench.md")
    text = "end with exit code 1 if a figure is worse by more than PERCENT, and not by noise"
    option(verb, "--fail-if-worse PERCENT", text, _percent)


def _compare(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.bench.result import read_result
    from deepseek_triton_tools.bench.result_tables import compare, comparison_document, comparison_tables

    comparison = compare(read_result(args.a), read_result(args.b))
    worse = [] if args.fail_if_worse is None else comparison.worse_by(args.fail_if_worse)
    if args.json:
        print_json(comparison_document(comparison))
    else:
        with to_reader():
            for line in comparison.differences:
                print(paragraph(line, ""))
            for table in comparison_tables(comparison):
                show(table)
            for line in comparison.notes:
                print(paragraph(line, ""))
    for line in worse:
        complain(f"worse by more than {args.fail_if_worse:g} %: {line}")
    return 1 if worse else 0
