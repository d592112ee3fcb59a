"""Options of `bench run`: what they are, which go together, and the dataset that they describe."""

import argparse
import math
from collections.abc import Iterator

from deepseek_triton_tools.bench.result import Slo
from deepseek_triton_tools.bench.workload import (
    DEFAULT_INPUT_LEN,
    DEFAULT_OUTPUT_LEN,
    DatasetOptions,
    Lengths,
    NormalLengths,
    UniformLengths,
)
from deepseek_triton_tools.cli.client_options import SET_HELP, add_address, add_server_options, address
from deepseek_triton_tools.cli.parsing import (
    VerbParser,
    add_json,
    duration,
    number,
    option,
    path,
    positive,
    real_number,
    several,
    whole_number,
    words,
)
from deepseek_triton_tools.cli.plan_options import slo
from deepseek_triton_tools.tool_errors import ToolError

seed = whole_number("a whole number below 2^32", most=2**32 - 1)
_above_zero = real_number("a number above 0", lambda value: 0 < value < math.inf)
_percentage = real_number("a percentage above 0, up to 100", lambda value: 0 < value <= 100)
_range_ratio = real_number("a number from 0 to below 1", lambda value: 0 <= value < 1)
_rates = several("requests a second, such as 0.5,2,8 or inf", real_number("a rate", lambda value: value > 0))
_numbers = several("whole numbers from 1, such as 1,8,64", positive)


def add_bench_options(verb: VerbParser) -> None:
    add_address(verb, "; several are asked in turn")
    add_json(verb, "docs/bench.md")
    published = verb.add_argument_group("published runs")
    option(published, "--preset NAME", "send what a guide's benchmark sends, and show its figures beside", words)
    option(published, "--full", "all requests of the preset on a simulated server too (default there: few)")
    load = verb.add_argument_group("load")
    option(load, "--concurrency N,N", "requests under way at once, each number in turn (default: 16)", _numbers)
    option(load, "--rate --request-rate R,R", "requests a second, each rate in turn; inf: all at once", _rates)
    option(load, "--burstiness X", "1: Poisson arrivals (default); below 1 bursts, above 1 even ones", _above_zero)
    text = "requests, or conversations, at each load (default: 5 for each of --concurrency, else 100; all of a file)"
    option(load, "--num-prompts --num-requests N", text, positive)
    option(load, "--rounds K", "measure K requests for each one of --concurrency (default: 5)", positive)
    option(load, "--duration S", "send nothing after S seconds; requests are repeated as needed", duration)
    option(load, "--warmup N", "requests before the measured ones, at the same pace (default: 0)", number, default=0)
    option(load, "--repeat R", "measure each load R times, for an interval (default: 1)", positive, default=1)
    text = "percentage of requests that the client leaves early (default: 0)"
    option(load, "--cancel --request-cancellation-rate P", text, _percentage)
    text = "seconds after which these are left (default: 1)"
    option(load, "--cancel-after --request-cancellation-delay S", text, duration)
    option(load, "--processes N", "processes that send (default: one for 256 streams)", positive)
    _add_dataset(verb)
    requests = verb.add_argument_group("requests")
    option(requests, "--chat", "send prompts as chat messages; they need text, so not with random prompts")
    text = "generate all tokens of the output length (default: if prompts are token ids)"
    option(requests, "--ignore-eos", text, action=argparse.BooleanOptionalAction)
    option(requests, "--set NAME=VALUE", SET_HELP, words, action="append", default=[])
    option(requests, "--timeout S", "seconds for an answer (default: no limit)", duration)
    results = verb.add_argument_group("results")
    option(results, "--output FOLDER", "write bench.json, report.html, figures.csv and files of each run there", path)
    option(results, "--gpus N", "GPUs of all servers together, for TPS/GPU (default: the preset's)", positive)
    text = "limits in ms for goodput, such as ttft=500,tpot=30; also itl, e2el"
    option(results, "--slo LIMITS", text, slo, default=Slo())
    text = "a plan's limits beside: a folder that build wrote, or options of plan in quotes"
    option(results, "--against PLAN", text, words)
    server = verb.add_argument_group("server")
    text = "what answers there (default: openai if the URL's path ends in /v1, else triton)"
    option(server, "--endpoint", text, choices=("triton", "openai"))
    text = "read a server's metrics here; may be repeated; none: don't (default: 8002 beside 8000 and 8001)"
    option(server, "--metrics-url URL", text, lambda url: url if url == "none" else address(url), action="append")
    add_server_options(server)


def _add_dataset(verb: VerbParser) -> None:
    random = verb.add_argument_group("random prompts: token ids of exact length")
    option(random, "--isl --random-input-len N", "input tokens (default: 1024)", positive)
    option(random, "--osl --random-output-len N", "tokens to generate (default: 128)", positive)
    option(random, "--input-stdev N", "standard deviation: normal lengths around --isl", number)
    option(random, "--output-stdev N", "the same for the output", number)
    text = "uniform lengths, from (1 - R) to (1 + R) times as long; R is below 1"
    option(random, "--range-ratio --random-range-ratio R", text, _range_ratio)
    text = "tokens before these that several prompts have in common (default: 0)"
    option(random, "--prefix-len --random-prefix-len N", text, number)
    option(random, "--num-prefixes N", "number of different prefixes (default: 1)", positive)
    option(random, "--turns N", "turns of each conversation (default: 1)", positive)
    option(random, "--later-isl N", "input tokens that each later turn adds (default: as the first)", positive)
    option(random, "--think-time S", "seconds between an answer and the next turn (default: 0)", duration)
    file = verb.add_argument_group("requests from a file")
    text = "trtllm-bench's or generate's JSON Lines, ShareGPT, a trace (docs/bench.md); - is standard input"
    option(file, "--dataset --dataset-path FILE", text, path)
    option(file, "--shuffle", "in random order", default=None)
    option(file, "--trace-speedup X", "send a trace X times as fast (default: 1)", _above_zero)
    option(verb, "--seed N", "makes other prompts, or another order (default: 0)", seed, default=0)


# --- Which go together ---

_NEEDS = {
    "burstiness": "rate",
    "cancel_after": "cancel",
    "full": "preset",
    "later_isl": "turns",
    "think_time": "turns",
    "num_prefixes": "prefix_len",
    "shuffle": "dataset",
    "trace_speedup": "dataset",
}
_OF_RANDOM = ("isl", "input_stdev", "range_ratio", "prefix_len", "num_prefixes", "turns", "later_isl", "think_time")
_REFUSES = {
    "preset": (
        *("concurrency", "rate", "burstiness", "num_prompts", "rounds", "duration", "warmup", "cancel", "cancel_after"),
        *("osl", "output_stdev", *_OF_RANDOM),
    ),
    "dataset": _OF_RANDOM,
    "range_ratio": ("input_stdev", "output_stdev"),
    "json": ("against",),
    "rounds": ("num_prompts",),
}
_SENT_OTHERWISE = {
    "max_tokens": "--osl",
    "max_completion_tokens": "--osl",
    "model": "--model",
    "prompt": "--dataset",
    "messages": "--dataset and --chat",
}


def check_options(args: argparse.Namespace, *, is_openai: bool) -> None:
    """:raises ToolError: for options that need others, or don't go with others; it names every mistake."""
    if problems := [*_misplaced(args), *_not_for_this_server(args, is_openai)]:
        raise ToolError("; ".join(problems), exit_code=2)


def _misplaced(args: argparse.Namespace) -> Iterator[str]:
    present = {name for name, value in vars(args).items() if value not in (None, False, 0, "")}
    for name, needed in _NEEDS.items():
        if name in present and needed not in present and not ("preset" in present and name in _REFUSES["preset"]):
            yield f"{_option(name)}: only with {_option(needed)}"
    if {"rounds", "rate"} <= present and "concurrency" not in present:
        yield "--rounds: with --rate only if there is --concurrency"
    if args.duration and present & {"num_prompts", "rounds"} and (args.concurrency or args.rate or not args.dataset):
        yield "--duration: not with --num-prompts and --rounds, but for a trace"
    if {"dataset", "output_stdev"} <= present and not present & {"osl", "preset"}:
        yield "--output-stdev: with --dataset it needs --osl, around which lengths vary"
    if args.chat and args.dataset is None:
        yield "--chat: random prompts are token ids, and a chat needs text; give --dataset"
    for name, refused in _REFUSES.items():
        misplaced = ", ".join(_option(other) for other in refused if other in present)
        if name in present and misplaced:
            yield f"{misplaced}: not with {_option(name)}"


def _not_for_this_server(args: argparse.Namespace, is_openai: bool) -> Iterator[str]:
    if is_openai and (args.turns or 1) > 1:
        yield "--turns: an OpenAI endpoint gives no token ids of its answers, which later turns need; ask Triton itself"
    if is_openai and args.model_version:
        yield "--model-version: an OpenAI endpoint has none"
    for text in args.set:
        name = text.partition("=")[0].strip().lstrip("-").replace("-", "_")
        if name in _SENT_OTHERWISE:
            yield f"--set {name}: say it with {_SENT_OTHERWISE[name]}"
        elif is_openai and name in ("stream", "stream_options"):
            yield f"--set {name}: bench always streams"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# --- The dataset ---


def dataset_options(args: argparse.Namespace) -> DatasetOptions:
    """Read the options, which `check_options` has let pass."""
    keeps_output = args.dataset is not None and args.osl is None
    return DatasetOptions(
        file=args.dataset,
        shuffle=bool(args.shuffle),
        speedup=args.trace_speedup or 1.0,
        input=_lengths(args.isl or DEFAULT_INPUT_LEN, args.input_stdev, args.range_ratio),
        output=None if keeps_output else _lengths(args.osl or DEFAULT_OUTPUT_LEN, args.output_stdev, args.range_ratio),
        prefix_len=args.prefix_len or 0,
        num_prefixes=args.num_prefixes or 1,
        turns=args.turns or 1,
        later_input=None if args.later_isl is None else _lengths(args.later_isl, args.input_stdev, args.range_ratio),
        think_s=args.think_time or 0.0,
        seed=args.seed,
    )


def _lengths(mean: int, stdev: int | None, range_ratio: float | None) -> Lengths:
    """The range is benchmark_serving's in TensorRT-LLM and vLLM."""
    if not range_ratio:
        return NormalLengths(mean, stdev or 0)
    return UniformLengths(max(1, int(mean * (1 - range_ratio))), int(mean * (1 + range_ratio)))
