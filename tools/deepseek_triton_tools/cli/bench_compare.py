"""`deepseek-triton bench compare`: two results side by side, and what of it is noise."""

from __future__ import annotations

import argparse

from deepseek_triton_tools.cli.parsing import Verbs, add_json, add_verb, path
from deepseek_triton_tools.terminal.output_streams import complain, print_json, to_reader


def add_compare_form(forms: Verbs) -> None:
    verb = add_verb(forms, "compare", "lay two results side by side, and say which differences are more than noise")
    verb.runs(
        _run,
        "deepseek-triton bench compare before/bench.json after/bench.json",
        "deepseek-triton bench compare before after --fail-if-worse 5",
        notes="exit codes: 0; 1 a figure is worse (--fail-if-worse), or a file can't be read; 2 wrong command line",
    )
    help_text = "bench.json, or the folder that --output named"
    verb.add_argument("a", type=path, metavar="A", help=help_text)
    verb.add_argument("b", type=path, metavar="B", help="the same of the other result")
    add_json(verb, "docs/bench-figures.md")
    help_text = "end with exit code 1 if a figure is worse by more than PERCENT, and not by noise"
    verb.add_argument("--fail-if-worse", type=_percent, metavar="PERCENT", help=help_text)


def _percent(text: str) -> float:
    try:
        percent = float(text)
    except ValueError:
        percent = -1.0
    if not 0 <= percent < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a percentage from 0, such as 5, got {text!r:.100}")
    return percent


def _run(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.bench.comparison import compare, comparison_document, comparison_tables
    from deepseek_triton_tools.bench.result import read_result
    from deepseek_triton_tools.terminal.tables import paragraph, show

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
