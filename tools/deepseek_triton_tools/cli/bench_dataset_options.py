"""Options of `bench` that say which requests it sends."""

from __future__ import annotations

import argparse

from deepseek_triton_tools.bench.workload import (
    DEFAULT_INPUT_LEN,
    DEFAULT_OUTPUT_LEN,
    DatasetOptions,
    Lengths,
    NormalLengths,
    UniformLengths,
)
from deepseek_triton_tools.cli.parsing import VerbParser, duration, number, path, positive, whole_number
from deepseek_triton_tools.tool_errors import ToolError

_OF_A_FILE = ("shuffle", "trace_speedup")
_OF_RANDOM_PROMPTS = (
    "isl",
    "input_stdev",
    "range_ratio",
    "prefix_len",
    "num_prefixes",
    "turns",
    "later_isl",
    "think_time",
)


seed = whole_number("a whole number below 2^32", most=2**32 - 1)


def add_dataset_options(verb: VerbParser) -> None:
    """Add the options that `dataset_options` reads."""
    random = verb.add_argument_group("random prompts: token ids of exact length")
    help_text = "input tokens (default: 1024)"
    random.add_argument("--isl", "--random-input-len", type=positive, metavar="N", help=help_text)
    help_text = "tokens to generate (default: 128)"
    random.add_argument("--osl", "--random-output-len", type=positive, metavar="N", help=help_text)
    help_text = "standard deviation: input lengths are normally distributed around --isl"
    random.add_argument("--input-stdev", type=number, metavar="N", help=help_text)
    random.add_argument("--output-stdev", type=number, metavar="N", help="the same for the output")
    help_text = "both lengths are uniformly distributed, from (1 - R) to (1 + R) times as long; R is below 1"
    random.add_argument("--range-ratio", "--random-range-ratio", type=_range_ratio, metavar="R", help=help_text)
    help_text = "tokens before these that several prompts have in common (default: 0)"
    random.add_argument("--prefix-len", "--random-prefix-len", type=number, metavar="N", help=help_text)
    help_text = "number of different prefixes (default: 1)"
    random.add_argument("--num-prefixes", type=positive, metavar="N", help=help_text)
    random.add_argument("--turns", type=positive, metavar="N", help="turns of each conversation (default: 1)")
    help_text = "input tokens that each later turn adds (default: as the first)"
    random.add_argument("--later-isl", type=positive, metavar="N", help=help_text)
    help_text = "seconds between an answer and the next turn (default: 0)"
    random.add_argument("--think-time", type=duration, metavar="S", help=help_text)
    file = verb.add_argument_group("requests from a file")
    help_text = (
        "trtllm-bench's or generate's JSON Lines, ShareGPT, a trace (docs/bench-datasets.md); - is standard input"
    )
    file.add_argument("--dataset", "--dataset-path", type=path, metavar="FILE", help=help_text)
    file.add_argument("--shuffle", action="store_true", default=None, help="in random order")
    file.add_argument("--trace-speedup", type=_factor, metavar="X", help="send a trace X times as fast (default: 1)")
    help_text = "makes other prompts, or another order (default: 0)"
    verb.add_argument("--seed", type=seed, default=0, metavar="N", help=help_text)


def dataset_options(args: argparse.Namespace) -> DatasetOptions:
    """Read the options. Raises ToolError when they don't go together."""
    is_file = args.dataset is not None
    misplaced = [name for name in (_OF_RANDOM_PROMPTS if is_file else _OF_A_FILE) if getattr(args, name) is not None]
    if misplaced:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in misplaced)
        raise ToolError(f"{options}: {'not with' if is_file else 'only with'} --dataset", exit_code=2)
    if args.range_ratio is not None and (args.input_stdev or args.output_stdev):
        raise ToolError("--range-ratio: not with --input-stdev or --output-stdev", exit_code=2)
    if is_file and args.output_stdev and args.osl is None:
        raise ToolError("--output-stdev: with --dataset it needs --osl, around which lengths vary", exit_code=2)
    own_output = not is_file or args.osl is not None
    return DatasetOptions(
        file=args.dataset,
        shuffle=bool(args.shuffle),
        speedup=args.trace_speedup or 1.0,
        input=_lengths(args.isl or DEFAULT_INPUT_LEN, args.input_stdev, args.range_ratio),
        output=_lengths(args.osl or DEFAULT_OUTPUT_LEN, args.output_stdev, args.range_ratio) if own_output else None,
        prefix_len=args.prefix_len or 0,
        num_prefixes=args.num_prefixes or 1,
        turns=args.turns or 1,
        later_input=None if args.later_isl is None else _lengths(args.later_isl, args.input_stdev, args.range_ratio),
        think_s=args.think_time or 0.0,
        seed=args.seed,
    )


def _lengths(mean: int, stdev: int | None, range_ratio: float | None) -> Lengths:
    """The range is benchmark_serving's in TensorRT-LLM and vLLM."""
    if range_ratio is None:
        return NormalLengths(mean, stdev or 0)
    return UniformLengths(max(1, int(mean * (1 - range_ratio))), int(mean * (1 + range_ratio)))


def _range_ratio(text: str) -> float:
    """A number from 0 to below 1."""
    ratio = _float(text)
    if ratio is None or not 0 <= ratio < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to below 1, got {text!r}")
    return ratio


def _factor(text: str) -> float:
    """A number above 0."""
    factor = _float(text)
    if factor is None or not 0 < factor < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return factor


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
