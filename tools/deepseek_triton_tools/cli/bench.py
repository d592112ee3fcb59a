"""`deepseek-triton bench`: load on a server, two results side by side or as pictures; and files of requests, made
with the options of prepare_dataset.py, TensorRT-LLM's."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepseek_triton_tools.bench.workload import BenchRequest, DatasetOptions, Lengths, NormalLengths, UniformLengths
from deepseek_triton_tools.cli.bench_options import seed
from deepseek_triton_tools.cli.bench_run import add_run_form
from deepseek_triton_tools.cli.parsing import (
    VerbParser,
    Verbs,
    add_json,
    add_verb,
    number,
    option,
    path,
    positive,
    real_number,
    words,
)
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.terminal.output_streams import complain, print_json, to_reader
from deepseek_triton_tools.terminal.tables import Table, paragraph, show
from deepseek_triton_tools.tool_errors import InstallationError, ToolError

_percent = real_number("a percentage from 0, such as 5", lambda value: 0 <= value < math.inf)


def add_options(verb: VerbParser) -> None:
    verb.default_form = "run"
    forms = verb.add_forms(
        "FORM",
        "deepseek-triton bench http://localhost:8000 --concurrency 1,8,64 --isl 1024 --osl 128 --output bench",
        "deepseek-triton bench compare before after",
        notes="`bench URL` is short for `bench run URL`. docs/bench.md has more.",
    )
    add_run_form(forms)
    add_dataset_form(forms)
    add_report_form(forms)
    _add_compare_form(forms)


def add_report_form(forms: Verbs) -> None:
    verb = add_verb(forms, "report", "draw one or several results as one HTML page")
    verb.runs(
        _report,
        "deepseek-triton bench report bench",
        "deepseek-triton bench report before/bench.json after/bench.json --output both.html",
        notes="The page needs no network. docs/bench.md says what the pictures show.",
    )
    option(verb, "results RESULT", "bench.json, or the folder with it; several are compared", path, nargs="+")
    option(verb, "--output FILE", "the page to write (default: report.html beside the first result)", path)


def _report(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.bench.report import NamedResult, write_report
    from deepseek_triton_tools.bench.result import read_result

    first = args.results[0]
    output = args.output or (first if first.is_dir() else first.parent) / "report.html"
    if output.exists() and output.suffix.lower() not in (".html", ".htm"):
        raise ToolError(f"--output {output}: it exists and is no HTML page; name another file", exit_code=2)
    names = _result_names(args.results)
    results = [NamedResult(name=name, result=read_result(file)) for name, file in zip(names, args.results, strict=True)]
    write_report(output, results)
    complain(f"written to {output}")
    return 0


def _result_names(files: Sequence[Path]) -> list[str]:
    """The folder's name of a bench.json, the file's own name of others, and the path where these are the same."""
    from deepseek_triton_tools.bench.result import FILE_NAME

    places = [(file / FILE_NAME if file.is_dir() else file).resolve() for file in files]
    if len(set(places)) < len(places):
        raise ToolError("expected different results, got one twice", exit_code=2)
    names = [place.parent.name if place.name == FILE_NAME else place.stem for place in places]
    counts = Counter(names)
    return [str(file) if counts[name] > 1 else name for name, file in zip(names, files, strict=True)]


def _add_compare_form(forms: Verbs) -> None:
    verb = add_verb(forms, "compare", "lay two results side by side, and say which differences are more than noise")
    verb.runs(
        _compare,
        "deepseek-triton bench compare before/bench.json after/bench.json",
        "deepseek-triton bench compare before after --fail-if-worse 5",
        notes="exit codes: 0; 1 a figure is worse (--fail-if-worse); 2 wrong command line, or a file can't be read",
    )
    option(verb, "a A", "bench.json, or the folder that --output named", path)
    option(verb, "b B", "the same of the other result", path)
    add_json(verb, "docs/bench.md")
    text = "end with exit code 1 if a figure is worse by more than PERCENT, and not by noise"
    option(verb, "--fail-if-worse PERCENT", text, _percent)


def _compare(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.bench.result import read_result
    from deepseek_triton_tools.bench.result_tables import compare, comparison_document, comparison_tables

    comparison = compare(read_result(args.a), read_result(args.b))
    worse = [] if args.fail_if_worse is None else comparison.worse_by(args.fail_if_worse)
    if args.json:
        print_json(comparison_document(comparison))
    else:
        with to_reader():
            for line in comparison.differences:
                print(paragraph(line, ""))
            for table in comparison_tables(comparison):
                show(table)
            for line in comparison.notes:
                print(paragraph(line, ""))
    for line in worse:
        complain(f"worse by more than {args.fail_if_worse:g} %: {line}")
    return 1 if worse else 0


_SEED = 420
"""prepare_dataset.py's."""
_PREPARE = "deepseek-triton bench dataset"
_TOKENIZER = "folder of a checkpoint, or OWNER/NAME in the hub's cache"
_MEANS = "--input-mean 256 --output-mean 128 --num-requests 1000"
_NORMAL = (
    ("--input-mean N", "mean number of input tokens", {"type": positive, "required": True}),
    ("--input-stdev N", "standard deviation of it (default: 0)", {"type": number, "default": 0}),
    ("--output-mean N", "mean number of output tokens", {"type": positive, "required": True}),
    ("--output-stdev N", "standard deviation of it (default: 0)", {"type": number, "default": 0}),
)
_UNIFORM = (
    ("--input-min N", "fewest input tokens", {"type": positive, "required": True}),
    ("--input-max N", "most input tokens", {"type": positive, "required": True}),
    ("--output-min N", "fewest output tokens", {"type": positive, "required": True}),
    ("--output-max N", "most output tokens", {"type": positive, "required": True}),
)
_RANDOM_KINDS = {
    "token-norm-dist": (
        "random tokens, of lengths that are normally distributed",
        "--input-mean 1000 --input-stdev 99 --output-mean 500 --num-requests 50",
        _NORMAL,
    ),
    "token-unif-dist": (
        "random tokens, of lengths that are uniformly distributed",
        "--input-min 100 --input-max 2000 --output-min 50 --output-max 500 --num-requests 3000",
        _UNIFORM,
    ),
    "shared-prefix": (
        "random tokens, where groups of prompts begin with the same ones",
        f"--num-prefixes 10 --prefix-len 2048 {_MEANS}",
        (
            *_NORMAL,
            ("--prefix-len N", "tokens before the prompt's own", {"type": positive, "required": True}),
            ("--num-prefixes N", "number of prefixes, which take turns (default: 1)", {"type": positive, "default": 1}),
        ),
    ),
    "multi-turn": (
        "conversations of random tokens, in which each prompt has the one before in it",
        f"--turns 4 --later-input-mean 64 {_MEANS}",
        (
            *_NORMAL,
            ("--turns N", "requests in each conversation; answers are random", {"type": positive, "required": True}),
            ("--later-input-mean N", "input tokens that a later turn adds (default: as the first)", {"type": positive}),
        ),
    ),
}
"""Name -> summary, options of an example, and options."""
PREFIX_BLOCK = 32
"""Tokens. TensorRT-LLM's KV cache reuses blocks of this size."""


def add_dataset_form(forms: Verbs) -> None:
    dataset = add_verb(forms, "dataset", "make, convert or look at a file of requests, in trtllm-bench's format")
    kinds = dataset.add_forms(
        "KIND",
        f"{_PREPARE} token-norm-dist --input-mean 1024 --output-mean 2048 --num-requests 3000 --output d.jsonl",
        f"{_PREPARE} show d.jsonl",
        notes="The first group may stand before the kind or after it. docs/bench.md has more.",
    )
    dataset.set_defaults(output=None, stdout=False, tokenizer=None, random_seed=_SEED)
    _add_common(dataset)
    for name, (summary, example, options) in _RANDOM_KINDS.items():
        verb = add_verb(kinds, name, summary)
        line = f"{_PREPARE} {name} {example}"
        verb.runs(_write_random, f"{line} > d.jsonl", f"{line} --random-seed 7 --output d.jsonl")
        group = verb.add_argument_group("requests")
        for names, text, settings in options:
            option(group, names, text, **settings)
        option(group, "--num-requests N", "number of requests, or of conversations", positive, required=True)
        _add_common(verb)
    _add_file_kinds(kinds)


def _add_common(verb: VerbParser) -> None:
    """Add the options that prepare_dataset.py has before the kind."""
    # Where they stand after the kind, a default would replace what came before it.
    common = verb.add_argument_group("output and tokens", argument_default=argparse.SUPPRESS)
    option(common, "--output FILE", "write to this file", path)
    option(common, "--stdout", "write to standard output (default)")
    option(common, "--tokenizer NAME", f"{_TOKENIZER}, for another tokenizer than DeepSeek-V3's and R1's", words)
    option(common, "--random-seed N", f"another seed makes other requests (default: {_SEED})", seed)


def _add_file_kinds(kinds: Verbs) -> None:
    convert = add_verb(kinds, "convert", "ShareGPT's JSON, a trace or other JSON Lines to trtllm-bench's format")
    convert.runs(
        _convert,
        f"{_PREPARE} convert ShareGPT.json --num-requests 1000 --shuffle --tokenizer /models/DeepSeek-R1 > d.jsonl",
        f"{_PREPARE} convert prompts.jsonl --output-mean 512 --output d.jsonl",
    )
    option(convert, "file FILE", "the file; - is standard input", path)
    option(convert, "--num-requests N", "take N of them (default: all)", positive)
    option(convert, "--shuffle", "in random order, as benchmark_serving takes them")
    option(convert, "--output-mean N", "mean number of output tokens (default: what the file says)", positive)
    option(convert, "--output-stdev N", "standard deviation of it (default: 0)", number, default=0)
    _add_common(convert)
    shown = add_verb(kinds, "show", "count a file's requests, their lengths and what their prompts have in common")
    shown.runs(_show, f"{_PREPARE} show d.jsonl", f"{_PREPARE} show ShareGPT.json --tokenizer /models/DeepSeek-R1")
    option(shown, "file FILE", "the file; - is standard input", path)
    text = f"{_TOKENIZER}, to count ShareGPT's tokens with"
    option(shown, "--tokenizer NAME", text, words, default=argparse.SUPPRESS)


# --- A dataset in numbers, and as a file ---


def show_summary(name: str, requests: Iterable[BenchRequest]) -> None:
    """Print how many requests there are, how long they are, and what their prompts have in common."""
    import numpy as np

    lengths: dict[str, list[int]] = {"input tokens": [], "input characters": [], "output tokens": []}
    times: list[float] = []
    num_requests = num_repeated = 0
    seen: set[int] = set()
    for request in requests:
        num_requests += 1
        if isinstance(request.prompt, str):
            lengths["input characters"].append(len(request.prompt))
        else:
            lengths["input tokens"].append(len(request.prompt))
            blocks = _prefix_hashes(request.prompt)
            num_repeated += len(seen.intersection(blocks))
            seen.update(blocks)
        if request.output_tokens is not None:
            lengths["output tokens"].append(request.output_tokens)
        if request.at_s is not None:
            times.append(request.at_s)
    rows = []
    for label, values in lengths.items():
        if values:
            statistics = [float(np.mean(values)), *np.percentile(values, [0, 50, 90, 99, 100]).tolist()]
            rows.append([label, f"{sum(values):,}", *(f"{round(value):,}" for value in statistics)])
    title = f"{name}: {num_requests:,} requests" + (f" in {max(times) - min(times):,.1f} s" if times else "")
    show(Table(title=title, headings=["", "total", "mean", "min", "p50", "p90", "p99", "max"], rows=rows, is_grid=True))
    if lengths["input tokens"]:
        share = num_repeated * PREFIX_BLOCK / sum(lengths["input tokens"])
        text = f"{share:.1%} of the input tokens are in a prefix that an earlier prompt has too"
        print(paragraph(f"{text} (blocks of {PREFIX_BLOCK} tokens): what a prefix cache could spare."))


def _prefix_hashes(ids: Sequence[int]) -> list[int]:
    """A hash of each prefix that ends with a whole block."""
    hashes, last = [], 0
    for end in range(PREFIX_BLOCK, len(ids) + 1, PREFIX_BLOCK):
        last = hash((last, ids[end - PREFIX_BLOCK : end]))
        hashes.append(last)
    return hashes


def dataset_lines(requests: Iterable[BenchRequest]) -> Iterator[str]:
    """Return a line for each request. Raises ToolError for one without a number of output tokens, which the format
    requires."""
    for task_id, request in enumerate(requests):
        if request.output_tokens is None:
            raise ToolError(
                f"request {task_id + 1} has no number of output tokens, and trtllm-bench needs one; give it to all: "
                "--output-mean N",
                exit_code=2,
            )
        is_text = isinstance(request.prompt, str)
        row: dict[str, Any] = {"task_id": task_id, "prompt" if is_text else "input_ids": request.prompt}
        row["output_tokens"] = request.output_tokens
        if request.at_s is not None:  # trtllm-bench ignores what it doesn't know
            row["timestamp"] = round(request.at_s * 1000, 3)
        yield json.dumps({**row, **(request.fields or {})}, separators=(",", ":"), ensure_ascii=False)


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
    output = None if args.output_mean is None else _lengths(args, "output")
    if output is None and args.output_stdev:
        raise ToolError("--output-stdev needs --output-mean, around which lengths vary", exit_code=2)
    if args.output and args.output.exists() and args.file.exists() and args.output.samefile(args.file):
        raise ToolError(f"FILE and --output are the same file, {args.output}", exit_code=2)
    options = DatasetOptions(file=args.file, shuffle=args.shuffle, output=output, seed=args.random_seed)
    return _write(args, _requests_of_file(args, options, args.num_requests))


def _show(args: argparse.Namespace) -> int:
    requests = _requests_of_file(args, DatasetOptions(file=args.file), None)
    from deepseek_triton_tools.generating.records import file_name

    with to_reader():
        show_summary(file_name(args.file), requests)
    return 0


def _requests_of_file(args: argparse.Namespace, options: DatasetOptions, num: int | None) -> Iterable[BenchRequest]:
    _require_numpy()
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
    from deepseek_triton_tools.host.whole_file import whole_file

    output = None if args.stdout else args.output
    with to_reader() if output is None else whole_file(output) as file:
        for line in dataset_lines(requests):
            print(line, file=file)
    return 0
