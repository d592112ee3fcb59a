"""`deepseek-triton plan`: what would be built, and why, without writing anything."""

from __future__ import annotations

import argparse

from deepseek_triton_tools.cli.parsing import VerbParser, add_json, path
from deepseek_triton_tools.cli.plan_options import add_plan_options


def add_options(verb: VerbParser) -> None:
    verb.runs(
        _plan,
        "deepseek-triton plan deepseek-r1 --gpu h200 --gpus 8",
        "deepseek-triton plan nvidia/DeepSeek-R1-FP4 --gpu b200 --profile throughput --isl 1000 --osl 2000",
    )
    add_plan_options(verb)
    shown = verb.add_mutually_exclusive_group()
    add_json(shown)
    shown.add_argument("--brief", action="store_true", help="leave out the settings and what was left out")
    shown.add_argument("--diff", type=path, metavar="DIR", help="show what `build --output DIR` would change")


def _plan(args: argparse.Namespace) -> int:
    from deepseek_triton_build import DISAGGREGATED, make_plan
    from deepseek_triton_tools.cli.plan_request import pair_request, plan_request

    request = plan_request(args)
    if request.profile == DISAGGREGATED:
        from deepseek_triton_tools.plans.pair_summary import show_pair

        show_pair(pair_request(args, request), as_json=args.json, brief=args.brief, against=args.diff)
        return 0
    plan = make_plan(request)
    if args.diff is not None:
        from deepseek_triton_tools.plans.plan_diff import show_diff

        show_diff(plan, args.diff)
    else:
        from deepseek_triton_tools.plans.plan_view import show_plan

        show_plan(plan, as_json=args.json, brief=args.brief)
    return 0
