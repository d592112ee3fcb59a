"""`deepseek-triton demo`: generator, tritonserver, backend and client in one run, without a GPU."""

from __future__ import annotations

import argparse

from deepseek_triton_tools.cli.parsing import VerbParser, add_tritonserver, positive


def add_options(verb: VerbParser) -> None:
    verb.runs(
        _demo,
        "deepseek-triton demo",
        "deepseek-triton demo --engine simulated --preset h200x8-r1-fp8-min-latency",
    )
    engines = ("reference", "simulated")
    help_text = "reference computes the answers, simulated sends filler text (default: %(default)s)"
    verb.add_argument("--engine", choices=engines, default=engines[0], help=help_text)
    help_text = "the deployment whose speed the simulated engine imitates; an unknown name lists all"
    verb.add_argument("--preset", metavar="NAME", help=help_text)
    help_text = "the most tokens of an answer (default: 200; of the simulated engine, which always takes all, 32)"
    verb.add_argument("--max-tokens", type=positive, metavar="N", help=help_text)
    add_tritonserver(verb)


def _demo(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.generating.demo import run_demo

    run_demo(engine=args.engine, preset=args.preset, max_tokens=args.max_tokens, tritonserver=args.tritonserver)
    return 0
