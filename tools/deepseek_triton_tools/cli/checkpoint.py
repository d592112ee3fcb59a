"""`deepseek-triton checkpoint`: get a checkpoint, verify it, look into it, and make another precision of it."""

from __future__ import annotations

from deepseek_triton_tools.cli.checkpoint_download import add_download_form
from deepseek_triton_tools.cli.checkpoint_verify import add_verify_form
from deepseek_triton_tools.cli.parsing import VerbParser


def add_options(verb: VerbParser) -> None:
    forms = verb.add_forms(
        "FORM",
        "deepseek-triton checkpoint download deepseek-r1 --to /models/DeepSeek-R1",
        "deepseek-triton checkpoint verify /models/DeepSeek-R1",
        notes="docs/checkpoints.md has more.",
    )
    add_download_form(forms)
    add_verify_form(forms)
