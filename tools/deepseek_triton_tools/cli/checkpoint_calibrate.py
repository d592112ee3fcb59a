"""`deepseek-triton checkpoint calibrate`: the script that finds the scales of activations for W4AFP8, and its run."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from deepseek_triton_tools.cli.parsing import Verbs, add_verb, path
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.tool_errors import InstallationError


def add_calibrate_form(forms: Verbs) -> None:
    """Add the form `calibrate` to `checkpoint`."""
    verb = add_verb(forms, "calibrate", "print a script that calibrates activations for W4AFP8 on 8 GPUs, or run it")
    verb.runs(
        _calibrate,
        "deepseek-triton checkpoint calibrate /models/DeepSeek-R1 --output /models/R1-amax > calibrate.sh",
        "deepseek-triton checkpoint calibrate /models/DeepSeek-R1 --output /models/R1-amax --run",
        notes="The folder is for checkpoint quantize --to w4afp8 --act-scales. A run that has failed goes on with the\n"
        "stage that failed. It clones and installs NVIDIA's ModelOpt. docs/checkpoints.md has more.",
    )
    verb.add_argument("source", type=path, metavar="DIR", help="folder of DeepSeek-V3, R1 or V3.1 in FP8, as published")
    help_text = "folder that gets the amax files; the work beside it, OUT.work, takes as much disk as the checkpoint"
    verb.add_argument("--output", type=path, required=True, metavar="OUT", help=help_text)
    verb.add_argument("--run", action="store_true", help="run it here, instead of printing it")


def _calibrate(args: argparse.Namespace) -> int:
    if find_spec("ml_dtypes") is None:
        raise InstallationError(f"checkpoint calibrate needs ml-dtypes and numpy: {install_extra('checkpoint')}")
    from deepseek_triton_tools.checkpoints.calibration import lacking, plan_calibration, render_calibration
    from deepseek_triton_tools.doctor.machine import Machine
    from deepseek_triton_tools.host.then_command import run_instead
    from deepseek_triton_tools.terminal.output_streams import to_reader

    calibration = plan_calibration(args.source, args.output)
    text = render_calibration(calibration)
    if args.run:
        if wrong := list(lacking(calibration, Machine())):
            raise InstallationError(f"the calibration can't run here: {'; '.join(wrong)}")
        run_instead(["bash", "-c", text, "calibrate"])
    with to_reader():
        print(text, end="")
    return 0
