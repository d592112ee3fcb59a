"""`deepseek-triton bench dataset`: files of requests, made with the options of TensorRT-LLM's prepare_dataset.py."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from deepseek_triton_tools.bench.workload import DatasetOptions, Lengths, NormalLengths, UniformLengths
from deepseek_triton_tools.cli.bench_options import seed
from deepseek_triton_tools.cli.parsing import (
    Handler,
    VerbParser,
    Verbs,
    add_verb,
    number,
    option,
    path,
    positive,
    words,
)
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.terminal.output_streams import to_reader
from deepseek_triton_tools.tool_errors import InstallationError, ToolError

if TYPE_CHECKING:  # numpy takes longer than the rest of --help
    from deepseek_triton_tools.bench.workload import BenchRequest

_SEED = 420
"""prepare_dataset.py's."""
_PREPARE = "deepseek-triton bench dataset"
_MEANS = "--input-mean 256 --output-mean 128 --num-requests 1000"
_BOUNDS = "--input-min 100 --input-max 2000 --output-min 50 --output-max 500 --num-requests 3000"


def add_dataset_form(forms: Verbs) -> None:
    dataset = add_verb(forms, "dataset", "make, convert or look at a file of requests, in trtllm-bench's format")
    kinds = dataset.add_forms(
        "KIND",
        f"{_PREPARE} token-norm-dist --input-mean 1024 --output-mean 2048 --num-requests 3000 --output d.jsonl",
        f"{_PREPARE} show d.jsonl",
        notes="The first group may stand before the kind or after it. docs/bench-datasets.md has more.",
    )
    dataset.set_defaults(output=None, stdout=False, tokenizer=None, random_seed=_SEED)
    _add_common(dataset)
    _add_random_kinds(kinds)
    _add_file_kinds(kinds)


def _add_common(verb: VerbParser) -> None:
    """Add the options that prepare_dataset.py has before the kind."""
    # Where they stand after the kind, a default would replace what came before it.
    common = verb.add_argument_group("output and tokens", argument_default=argparse.SUPPRESS)
    option(common, "--output FILE", "write to this file", path)
    option(common, "--stdout", "write to standard output (default)")
    text = "folder of a checkpoint, or OWNER/NAME in the hub's cache, for another tokenizer than DeepSeek-V3's and R1's"
    option(common, "--tokenizer NAME", text, words)
    option(common, "--random-seed N", f"another seed makes other requests (default: {_SEED})", seed)


def _add_random_kinds(kinds: Verbs) -> None:
    _add_random_kind(
        kinds,
        "token-norm-dist",
        "random tokens, of lengths that are normally distributed",
        "--input-mean 65536 --output-mean 1024 --num-requests 24 > d.jsonl",
        "--input-mean 1000 --input-stdev 99 --output-mean 500 --num-requests 50 > d.jsonl",
    )
    _add_random_kind(
        kinds,
        "token-unif-dist",
        "random tokens, of lengths that are uniformly distributed",
        f"{_BOUNDS} > d.jsonl",
        f"{_BOUNDS} --random-seed 7 --output d.jsonl",
        is_uniform=True,
    )
    prefix = _add_random_kind(
        kinds,
        "shared-prefix",
        "random tokens, where groups of prompts begin with the same ones",
        f"--num-prefixes 10 --prefix-len 2048 {_MEANS} > d.jsonl",
        f"--num-prefixes 10 --prefix-len 2048 {_MEANS} --input-stdev 64 --output d.jsonl",
    )
    option(prefix, "--prefix-len N", "tokens before the prompt's own", positive, required=True)
    option(prefix, "--num-prefixes N", "number of prefixes, which take turns (default: 1)", positive, default=1)
    turns = _add_random_kind(
        kinds,
        "multi-turn",
        "conversations of random tokens, in which each prompt has the one before in it",
        "--turns 4 --input-mean 1024 --later-input-mean 64 --output-mean 128 --num-requests 100 > d.jsonl",
        "--turns 4 --input-mean 1024 --output-mean 128 --num-requests 100 --random-seed 7 --output d.jsonl",
        counted="conversations",
        notes="The file has single requests, with random tokens for the answers. `bench --turns` has real answers.",
    )
    option(turns, "--turns N", "requests in each conversation", positive, required=True)
    text = "input tokens that a later turn adds, on average (default: as the first)"
    option(turns, "--later-input-mean N", text, positive)


def _add_random_kind(
    kinds: Verbs,
    name: str,
    summary: str,
    *examples: str,
    counted: str = "requests",
    is_uniform: bool = False,
    notes: str = "",
) -> argparse._ArgumentGroup:
    verb = add_verb(kinds, name, summary)
    verb.runs(_write_random, *(f"{_PREPARE} {name} {example}" for example in examples), notes=notes)
    lengths = verb.add_argument_group("requests")
    for end in ("input", "output"):
        if is_uniform:
            option(lengths, f"--{end}-min N", f"fewest {end} tokens", positive, required=True)
            option(lengths, f"--{end}-max N", f"most {end} tokens", positive, required=True)
        else:
            option(lengths, f"--{end}-mean N", f"mean number of {end} tokens", positive, required=True)
            option(lengths, f"--{end}-stdev N", "standard deviation of it (default: 0)", number, default=0)
    option(lengths, "--num-requests N", f"number of {counted}", positive, required=True)
    _add_common(verb)
    return lengths


def _add_file_kinds(kinds: Verbs) -> None:
    convert = _add_file_kind(
        kinds,
        "convert",
        "ShareGPT's JSON, a trace or other JSON Lines to trtllm-bench's format",
        _convert,
        "ShareGPT.json --num-requests 1000 --shuffle --tokenizer /models/DeepSeek-R1 > d.jsonl",
        "prompts.jsonl --output-mean 512 --output d.jsonl",
    )
    option(convert, "--num-requests N", "take N of them (default: all)", positive)
    option(convert, "--shuffle", "in random order, as benchmark_serving takes them")
    option(convert, "--output-mean N", "mean number of output tokens (default: what the file says)", positive)
    option(convert, "--output-stdev N", "standard deviation of it (default: 0)", number, default=0)
    _add_common(convert)
    shown = _add_file_kind(
        kinds,
        "show",
        "count a file's requests, their lengths and what their prompts have in common",
        _show,
        "d.jsonl",
        "ShareGPT.json --tokenizer /models/DeepSeek-R1",
    )
    text = "folder of a checkpoint, or OWNER/NAME in the hub's cache, to count ShareGPT's tokens with"
    option(shown, "--tokenizer NAME", text, words, default=argparse.SUPPRESS)


def _add_file_kind(kinds: Verbs, name: str, summary: str, handler: Handler, *examples: str) -> VerbParser:
    verb = add_verb(kinds, name, summary)
    verb.runs(handler, *(f"{_PREPARE} {name} {example}" for example in examples))
    option(verb, "file FILE", "the file; - is standard input", path)
    return verb


# --- What runs ---


def _require_numpy() -> None:
    if find_spec("numpy") is None:
        raise InstallationError(f"bench dataset needs numpy: {install_extra('bench')}")


def _write_random(args: argparse.Namespace) -> int:
    _require_numpy()
    from deepseek_triton_tools.bench.random_prompts import RandomConversations

    later = getattr(args, "later_input_mean", None)
    options = DatasetOptions(
        input=_lengths(args, "input"),
        output=_lengths(args, "output"),
        prefix_len=getattr(args, "prefix_len", 0),
        num_prefixes=getattr(args, "num_prefixes", 1),
        turns=getattr(args, "turns", 1),
        later_input=None if later is None else NormalLengths(later, args.input_stdev),
        seed=args.random_seed,
    )
    return _write(args, RandomConversations(options, args.num_requests, _vocabulary(args)).flat_requests())


def _lengths(args: argparse.Namespace, end: str) -> Lengths:
    """:param end: input or output."""
    values = vars(args)
    if f"{end}_mean" in values:
        return NormalLengths(values[f"{end}_mean"], values[f"{end}_stdev"])
    least, most = values[f"{end}_min"], values[f"{end}_max"]
    if least > most:
        raise ToolError(f"--{end}-min {least} is more than --{end}-max {most}", exit_code=2)
    return UniformLengths(least, most)


def _convert(args: argparse.Namespace) -> int:
    _require_numpy()
    output = None if args.output_mean is None else _lengths(args, "output")
    if output is None and args.output_stdev:
        raise ToolError("--output-stdev needs --output-mean, around which lengths vary", exit_code=2)
    options = DatasetOptions(file=args.file, shuffle=args.shuffle, output=output, seed=args.random_seed)
    return _write(args, _requests_of_file(args, options, args.num_requests))


def _show(args: argparse.Namespace) -> int:
    _require_numpy()
    from deepseek_triton_tools.bench.dataset_files import show_summary
    from deepseek_triton_tools.generating.prompt_sources import file_name

    requests = _requests_of_file(args, DatasetOptions(file=args.file), None)
    with to_reader():
        show_summary(file_name(args.file), requests)
    return 0


def _requests_of_file(args: argparse.Namespace, options: DatasetOptions, num: int | None) -> Iterable[BenchRequest]:
    from deepseek_triton_tools.bench.dataset_files import FileConversationSource
    from deepseek_triton_tools.bench.random_prompts import tokenizer_counter

    counter = None if args.tokenizer is None else tokenizer_counter(args.tokenizer)
    source = FileConversationSource(options, _vocabulary(args), counter, num)
    conversations = source(num or source.num_requests, options.seed)
    return (request for conversation in conversations for request in conversation)


def _vocabulary(args: argparse.Namespace) -> range:
    from deepseek_triton_tools.bench.random_prompts import text_token_ids, tokenizer_text_ids

    return text_token_ids() if args.tokenizer is None else tokenizer_text_ids(args.tokenizer)


def _write(args: argparse.Namespace, requests: Iterable[BenchRequest]) -> int:
    from deepseek_triton_tools.bench.dataset_files import dataset_lines
    from deepseek_triton_tools.host.whole_file import whole_file

    output = None if args.stdout else args.output
    with to_reader() if output is None else whole_file(output) as file:
        for line in dataset_lines(requests):
            print(line, file=file)
    return 0
