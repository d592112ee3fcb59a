"""`deepseek-triton demo`: generator, tritonserver, backend and client in one run, without a GPU."""

from __future__ import annotations

import argparse

from deepseek_triton_tools.cli.parsing import VerbParser, add_tritonserver, option, positive


def add_options(verb: VerbParser) -> None:
    verb.runs(
        _demo,
        "deepseek-triton demo",
        "deepseek-triton demo --engine simulated --preset h200x8-r1-fp8-min-latency",
    )
    engines = ("reference", "simulated")
    text = "reference computes the answers, simulated sends filler text (default: %(default)s)"
    option(verb, "--engine", text, choices=engines, default=engines[0])
    option(verb, "--preset NAME", "the deployment whose speed the simulated engine imitates; an unknown name lists all")
    most = "default: 200; of the simulated engine, which always takes all, 32"
    option(verb, "--max-tokens N", f"the most tokens of an answer ({most})", positive)
    add_tritonserver(verb)


def _demo(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.generating.demo import run_demo

    run_demo(engine=args.engine, preset=args.preset, max_tokens=args.max_tokens, tritonserver=args.tritonserver)
    return 0
