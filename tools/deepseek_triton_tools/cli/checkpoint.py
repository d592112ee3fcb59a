"""`deepseek-triton checkpoint`: get a checkpoint, verify it, look into it, and make another precision of it."""

from __future__ import annotations

from deepseek_triton_tools.cli.checkpoint_calibrate import add_calibrate_form
from deepseek_triton_tools.cli.checkpoint_compare import add_compare_form
from deepseek_triton_tools.cli.checkpoint_cut import add_cut_form
from deepseek_triton_tools.cli.checkpoint_download import add_download_form
from deepseek_triton_tools.cli.checkpoint_info import add_info_form
from deepseek_triton_tools.cli.checkpoint_quantize import add_quantize_form
from deepseek_triton_tools.cli.checkpoint_verify import add_verify_form
from deepseek_triton_tools.cli.parsing import VerbParser


def add_options(verb: VerbParser) -> None:
    forms = verb.add_forms(
        "FORM",
        "deepseek-triton checkpoint download deepseek-r1 --to /models/DeepSeek-R1",
        "deepseek-triton checkpoint quantize /models/DeepSeek-R1 --to w4afp8 --act-scales act_scales.safetensors "
        "--output /models/DeepSeek-R1-W4AFP8",
        notes="docs/checkpoints.md has more.",
    )
    add_download_form(forms)
    add_verify_form(forms)
    add_info_form(forms)
    add_quantize_form(forms)
    add_calibrate_form(forms)
    add_compare_form(forms)
    add_cut_form(forms)
