"""`deepseek-triton bench dataset`: files of requests, made with the options of TensorRT-LLM's prepare_dataset.py."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from deepseek_triton_tools.bench.workload import DatasetOptions, Lengths, NormalLengths, UniformLengths
from deepseek_triton_tools.cli.bench_dataset_options import seed
from deepseek_triton_tools.cli.parsing import VerbParser, Verbs, add_verb, number, path, positive, words
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.terminal.output_streams import to_reader
from deepseek_triton_tools.tool_errors import InstallationError, ToolError

if TYPE_CHECKING:  # numpy takes longer than the rest of --help
    from deepseek_triton_tools.bench.workload import BenchRequest

_SEED = 420
"""prepare_dataset.py's."""
_PREPARE = "deepseek-triton bench dataset"


def add_dataset_form(forms: Verbs) -> None:
    """Add the form `dataset` to `bench`."""
    dataset = add_verb(forms, "dataset", "make, convert or look at a file of requests, in trtllm-bench's format")
    kinds = dataset.add_forms(
        "KIND",
        f"{_PREPARE} token-norm-dist --input-mean 1024 --output-mean 2048 --num-requests 3000 --output d.jsonl",
        f"{_PREPARE} show d.jsonl",
        notes="The first group may stand before the kind or after it. docs/bench-datasets.md has more.",
    )
    _add_common(dataset, {"output": None, "stdout": False, "tokenizer": None, "random_seed": _SEED})
    _add_norm_dist(kinds)
    _add_unif_dist(kinds)
    _add_shared_prefix(kinds)
    _add_multi_turn(kinds)
    _add_convert(kinds)
    _add_show(kinds)


def _add_common(verb: VerbParser, defaults: Mapping[str, Any] | None = None) -> None:
    """Add the options that prepare_dataset.py has before the kind. Where they stand after it, they have no defaults,
    which would replace what came before."""
    verb.set_defaults(**(defaults or {}))
    common = verb.add_argument_group("output and tokens", argument_default=argparse.SUPPRESS)
    common.add_argument("--output", type=path, metavar="FILE", help="write to this file")
    common.add_argument("--stdout", action="store_true", help="write to standard output (default)")
    help_text = (
        "folder of a checkpoint, or OWNER/NAME in the hub's cache, for another tokenizer than DeepSeek-V3's and R1's"
    )
    common.add_argument("--tokenizer", type=words, metavar="NAME", help=help_text)
    help_text = f"another seed makes other requests (default: {_SEED})"
    common.add_argument("--random-seed", type=seed, metavar="N", help=help_text)


def _add_norm_dist(kinds: Verbs) -> None:
    verb = add_verb(kinds, "token-norm-dist", "random tokens, of lengths that are normally distributed")
    verb.runs(
        _write_random,
        f"{_PREPARE} token-norm-dist --input-mean 65536 --output-mean 1024 --num-requests 24 > d.jsonl",
        f"{_PREPARE} token-norm-dist --input-mean 1000 --input-stdev 99 --output-mean 500 --num-requests 50 > d.jsonl",
    )
    _add_random(verb)


def _add_unif_dist(kinds: Verbs) -> None:
    verb = add_verb(kinds, "token-unif-dist", "random tokens, of lengths that are uniformly distributed")
    example = f"{_PREPARE} token-unif-dist --input-min 100 --input-max 2000 --output-min 50 --output-max 500"
    verb.runs(
        _write_random,
        f"{example} --num-requests 3000 > d.jsonl",
        f"{example} --num-requests 3000 --random-seed 7 --output d.jsonl",
    )
    lengths = verb.add_argument_group("requests")
    for end in ("input", "output"):
        for bound, meaning in (("min", "fewest"), ("max", "most")):
            help_text = f"{meaning} {end} tokens"
            lengths.add_argument(f"--{end}-{bound}", type=positive, required=True, metavar="N", help=help_text)
    lengths.add_argument("--num-requests", type=positive, required=True, metavar="N", help="number of requests")
    _add_common(verb)


def _add_shared_prefix(kinds: Verbs) -> None:
    verb = add_verb(kinds, "shared-prefix", "random tokens, where groups of prompts begin with the same ones")
    example = f"{_PREPARE} shared-prefix --num-prefixes 10 --prefix-len 2048"
    verb.runs(
        _write_random,
        f"{example} --input-mean 256 --output-mean 128 --num-requests 1000 > d.jsonl",
        f"{example} --input-mean 256 --input-stdev 64 --output-mean 128 --num-requests 1000 --output d.jsonl",
    )
    prefix = _add_random(verb)
    prefix.add_argument(
        "--prefix-len", type=positive, required=True, metavar="N", help="tokens before the prompt's own"
    )
    help_text = "number of prefixes, which take turns (default: 1)"
    prefix.add_argument("--num-prefixes", type=positive, default=1, metavar="N", help=help_text)


def _add_multi_turn(kinds: Verbs) -> None:
    verb = add_verb(
        kinds, "multi-turn", "conversations of random tokens, in which each prompt has the one before in it"
    )
    example = f"{_PREPARE} multi-turn --turns 4 --input-mean 1024 --later-input-mean 64 --output-mean 128"
    verb.runs(
        _write_random,
        f"{example} --num-requests 100 > d.jsonl",
        f"{example} --num-requests 100 --random-seed 7 --output d.jsonl",
        notes="The file has single requests, with random tokens for the answers. `bench --turns` has real answers.",
    )
    turns = _add_random(verb, "number of conversations")
    turns.add_argument("--turns", type=positive, required=True, metavar="N", help="requests in each conversation")
    help_text = "input tokens that a later turn adds, on average (default: as the first)"
    turns.add_argument("--later-input-mean", type=positive, metavar="N", help=help_text)


def _add_random(verb: VerbParser, num: str = "number of requests") -> argparse._ArgumentGroup:
    lengths = verb.add_argument_group("requests")
    for end in ("input", "output"):
        help_text = f"mean number of {end} tokens"
        lengths.add_argument(f"--{end}-mean", type=positive, required=True, metavar="N", help=help_text)
        help_text = "standard deviation of it (default: 0)"
        lengths.add_argument(f"--{end}-stdev", type=number, default=0, metavar="N", help=help_text)
    lengths.add_argument("--num-requests", type=positive, required=True, metavar="N", help=num)
    _add_common(verb)
    return lengths


def _add_convert(kinds: Verbs) -> None:
    verb = add_verb(kinds, "convert", "ShareGPT's JSON, a trace or other JSON Lines to trtllm-bench's format")
    verb.runs(
        _convert,
        f"{_PREPARE} convert ShareGPT.json --num-requests 1000 --shuffle --tokenizer /models/DeepSeek-R1 > d.jsonl",
        f"{_PREPARE} convert prompts.jsonl --output-mean 512 --output d.jsonl",
    )
    verb.add_argument("file", type=path, metavar="FILE", help="the file; - is standard input")
    verb.add_argument("--num-requests", type=positive, metavar="N", help="take N of them (default: all)")
    verb.add_argument("--shuffle", action="store_true", help="in random order, as benchmark_serving takes them")
    help_text = "mean number of output tokens (default: what the file says)"
    verb.add_argument("--output-mean", type=positive, metavar="N", help=help_text)
    verb.add_argument(
        "--output-stdev", type=number, default=0, metavar="N", help="standard deviation of it (default: 0)"
    )
    _add_common(verb)


def _add_show(kinds: Verbs) -> None:
    verb = add_verb(kinds, "show", "count a file's requests, their lengths and what their prompts have in common")
    verb.runs(_show, f"{_PREPARE} show d.jsonl", f"{_PREPARE} show ShareGPT.json --tokenizer /models/DeepSeek-R1")
    verb.add_argument("file", type=path, metavar="FILE", help="the file; - is standard input")
    help_text = "folder of a checkpoint, or OWNER/NAME in the hub's cache, to count ShareGPT's tokens with"
    verb.add_argument("--tokenizer", type=words, metavar="NAME", default=argparse.SUPPRESS, help=help_text)


# --- What runs ---


def _require_numpy() -> None:
    if find_spec("numpy") is None:
        raise InstallationError(f"bench dataset needs numpy: {install_extra('bench')}")


def _write_random(args: argparse.Namespace) -> int:
    _require_numpy()
    from deepseek_triton_tools.bench.random_conversations import RandomConversations

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
    """The lengths of one end, input or output."""
    given = vars(args)
    if f"{end}_mean" in given:
        return NormalLengths(given[f"{end}_mean"], given[f"{end}_stdev"])
    least, most = given[f"{end}_min"], given[f"{end}_max"]
    if least > most:
        raise ToolError(f"--{end}-min {least} is more than --{end}-max {most}", exit_code=2)
    return UniformLengths(least, most)


def _convert(args: argparse.Namespace) -> int:
    _require_numpy()
    output = None if args.output_mean is None else _lengths(args, "output")
    if output is None and args.output_stdev:
        raise ToolError("--output-stdev needs --output-mean, around which lengths vary", exit_code=2)
    options = DatasetOptions(file=args.file, shuffle=args.shuffle, output=output, seed=args.random_seed)
    return _write(args, _requests(args, options, args.num_requests))


def _show(args: argparse.Namespace) -> int:
    _require_numpy()
    from deepseek_triton_tools.bench.dataset_summary import show_summary, summarize
    from deepseek_triton_tools.generating.prompt_sources import file_name

    summary = summarize(_requests(args, DatasetOptions(file=args.file), None))
    with to_reader():
        show_summary(file_name(args.file), summary)
    return 0


def _requests(args: argparse.Namespace, options: DatasetOptions, num: int | None) -> Iterable[BenchRequest]:
    """The requests of a file."""
    from deepseek_triton_tools.bench.dataset_files import make_conversations
    from deepseek_triton_tools.bench.tokenizer_files import tokenizer_counter

    counter = None if args.tokenizer is None else tokenizer_counter(args.tokenizer)
    conversations = make_conversations(options, num, _vocabulary(args), counter)
    return (request for conversation in conversations for request in conversation)


def _vocabulary(args: argparse.Namespace) -> range:
    from deepseek_triton_tools.bench.random_conversations import text_token_ids
    from deepseek_triton_tools.bench.tokenizer_files import tokenizer_text_ids

    return text_token_ids() if args.tokenizer is None else tokenizer_text_ids(args.tokenizer)


def _write(args: argparse.Namespace, requests: Iterable[BenchRequest]) -> int:
    from deepseek_triton_tools.bench.dataset_summary import dataset_lines
    from deepseek_triton_tools.host.whole_file import whole_file

    output = None if args.stdout else args.output
    with to_reader() if output is None else whole_file(output) as file:
        for line in dataset_lines(requests):
            print(line, file=file)
    return 0
