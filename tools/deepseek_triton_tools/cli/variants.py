"""`deepseek-triton variants`: what can be served on what, by how many GPUs, tuned for what."""

import argparse

from deepseek_triton_tools.cli.parsing import VerbParser, add_json, require_tools


def add_options(verb: VerbParser) -> None:
    verb.runs(_variants, "deepseek-triton variants", "deepseek-triton variants --gpu h200")
    verb.add_argument("--gpu", metavar="GPU", help="show one GPU only, such as h200")
    add_json(verb)


def _variants(args: argparse.Namespace) -> int:
    require_tools()
    from deepseek_triton_tools.plans.support_tables import show_variants

    show_variants(args.gpu, as_json=args.json)
    return 0
