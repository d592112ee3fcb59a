"""`deepseek-triton check`: what is wrong with a model repository, line by line."""

import argparse

from deepseek_triton_tools.cli.parsing import VerbParser, add_json, path, positive


def add_options(verb: VerbParser) -> None:
    verb.runs(
        _check, "deepseek-triton check model_repository", "deepseek-triton check r1 --trtllm 1.1.0 --gpu h200 --json"
    )
    verb.add_argument("repository", type=path, metavar="DIR", nargs="?", help="the model repository")
    verb.add_argument("--explain", metavar="CODE", help="print what the code of a finding means, and check nothing")
    verb.add_argument("--trtllm", metavar="RELEASE", help="TensorRT-LLM to check against, if the files don't say")
    verb.add_argument("--vllm", metavar="VERSION", help="vLLM to check against, if the files don't say")
    verb.add_argument("--variant", metavar="NAME", help="the model it serves, if the files don't say")
    verb.add_argument("--precision", metavar="NAME", help="the precision of its weights, if the files don't say")
    verb.add_argument("--gpu", metavar="GPU", help="the GPU it will run on, if the files don't say")
    verb.add_argument("--gpus", type=positive, metavar="N", help="how many GPUs it will run on, if the files don't say")
    verb.add_argument("--model", type=path, metavar="PATH", help="the checkpoint's folder, if the files name another")
    verb.add_argument("--strict", action="store_true", help="make it an error if the checkpoint is not on this machine")
    add_json(verb)


def _check(args: argparse.Namespace) -> int:
    from deepseek_triton_build.check import CheckOptions
    from deepseek_triton_tools.plans.check_view import check, explain

    if args.explain:
        explain(args.explain)
        return 0
    if args.repository is None:
        args.parser.error("the following arguments are required: DIR")
    options = CheckOptions(
        release=args.trtllm,
        vllm=args.vllm,
        variant=args.variant,
        precision=args.precision,
        gpu=args.gpu,
        num_gpus=args.gpus,
        model_root=args.model,
        strict=args.strict,
    )
    return check(args.repository, options, as_json=args.json)
