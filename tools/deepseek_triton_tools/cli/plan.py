"""`deepseek-triton plan`: what would be built, and why, without writing anything."""

from __future__ import annotations

import argparse

from deepseek_triton_tools.cli.parsing import VerbParser, add_json
from deepseek_triton_tools.cli.plan_options import add_plan_options


def add_options(verb: VerbParser) -> None:
    verb.runs(
        _plan,
        "deepseek-triton plan deepseek-r1 --gpu h200 --gpus 8",
        "deepseek-triton plan nvidia/DeepSeek-R1-FP4 --gpu b200 --profile throughput --isl 1000 --osl 2000",
    )
    add_plan_options(verb)
    add_json(verb)


def _plan(args: argparse.Namespace) -> int:
    from deepseek_triton_build import make_plan
    from deepseek_triton_tools.cli.plan_request import plan_request
    from deepseek_triton_tools.plans.plan_view import show_plan

    show_plan(make_plan(plan_request(args)), as_json=args.json)
    return 0
