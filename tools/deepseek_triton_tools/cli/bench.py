"""`deepseek-triton bench`: load on a server, what it measured, and what to do with it."""

from __future__ import annotations

from deepseek_triton_tools.cli.bench_compare import add_compare_form
from deepseek_triton_tools.cli.bench_dataset import add_dataset_form
from deepseek_triton_tools.cli.bench_report import add_report_form
from deepseek_triton_tools.cli.bench_run import add_run_form
from deepseek_triton_tools.cli.parsing import VerbParser


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
    add_compare_form(forms)
