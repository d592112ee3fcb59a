"""`deepseek-triton build`: plan, write, say what was written."""

import argparse
from dataclasses import replace

from deepseek_triton_tools.cli.parsing import VerbParser, add_json, path
from deepseek_triton_tools.cli.plan_options import COMMON, add_plan_options
from deepseek_triton_tools.tool_errors import ToolError


def add_options(verb: VerbParser) -> None:
    verb.runs(
        _build,
        "deepseek-triton build deepseek-r1 --gpu h200 --gpus 8 --model /models/DeepSeek-R1 --output r1",
        "deepseek-triton build deepseek-r1 --gpu b200 --profile latency --format trtllm-serve --output r1-serve",
        common=f"{COMMON} --format --force",
    )
    add_plan_options(verb)
    verb.usage = "%(prog)s VARIANT --gpu GPU --output DIR [options]"
    writing = verb.add_argument_group("writing")
    writing.add_argument("--output", type=path, required=True, metavar="DIR", help="the folder to write to")
    formats = "triton (default), vllm-serve, trtllm-serve, trtllm-bench, trtllm-eval, dynamo or quickstart"
    writing.add_argument("--format", default="triton", metavar="NAME", help=formats)
    writing.add_argument("--dynamo", metavar="RELEASE", help="for --format dynamo: Dynamo's release (default: 1.6.2)")
    writing.add_argument("--kv-routing", action="store_true", help="for --format dynamo: route by KV blocks")
    writing.add_argument("--force", action="store_true", help="replace an edited folder or another deployment")
    writing.add_argument(
        "--write-quant-config",
        action="store_true",
        help="write the plan's precision into hf_quant_config.json in --model's folder; a backup is kept",
    )
    add_json(verb)


def _build(args: argparse.Namespace) -> int:
    from deepseek_triton_build import DISAGGREGATED
    from deepseek_triton_tools.cli.model_options import absolute_model
    from deepseek_triton_tools.cli.plan_request import pair_request, plan_request

    if args.format == "vllm-serve" and args.engine is None:
        args.engine = "vllm"  # the format has no other
    args.model = absolute_model(args.model)
    request = replace(plan_request(args), dynamo=args.dynamo, kv_routing=args.kv_routing)
    if request.profile == DISAGGREGATED:
        from deepseek_triton_tools.plans.build_summary import build_pair

        if args.write_quant_config:
            raise ToolError(
                "--write-quant-config: the checkpoint of one server; build it with --profile ctx first", exit_code=2
            )
        build_pair(pair_request(args, request), args.output, force=args.force, format=args.format, as_json=args.json)
        return 0
    from deepseek_triton_tools.plans.build_summary import build

    build(
        request,
        args.output,
        force=args.force,
        format=args.format,
        quant_config=args.write_quant_config,
        as_json=args.json,
    )
    return 0
