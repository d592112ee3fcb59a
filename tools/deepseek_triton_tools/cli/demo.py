"""`deepseek-triton demo`: generator, tritonserver, backend and client in one run, without a GPU."""

from __future__ import annotations

import argparse

from deepseek_triton_tools.cli.parsing import VerbParser, add_tritonserver


def add_options(verb: VerbParser) -> None:
    verb.runs(
        _demo,
        "deepseek-triton demo",
        "deepseek-triton demo --engine simulated --preset h200x8-r1-fp8-min-latency",
    )
    engines = ("transformers", "simulated")
    verb.add_argument("--engine", choices=engines, default=engines[0], help="default: %(default)s")
    verb.add_argument("--preset", help="the deployment whose pace the simulated engine keeps; a wrong one lists them")
    verb.add_argument("--max-tokens", type=int, default=32, help="tokens for each prompt (default: %(default)s)")
    add_tritonserver(verb)


def _demo(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.generating.demo import run_demo

    run_demo(engine=args.engine, preset=args.preset, max_tokens=args.max_tokens, tritonserver=args.tritonserver)
    return 0
