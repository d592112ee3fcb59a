"""`deepseek-triton bench run`: send requests at given loads, and print and write what was measured."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from deepseek_triton_tools.bench.load.load_settings import LoadPoint
from deepseek_triton_tools.bench.measuring.figures import Slo
from deepseek_triton_tools.cli.bench_dataset_options import add_dataset_options, dataset_options
from deepseek_triton_tools.cli.client_options import add_server_options, resolved_token
from deepseek_triton_tools.cli.parsing import Verbs, add_json, add_verb, duration, path, positive, words
from deepseek_triton_tools.cli.sampling_options import assigned
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.terminal.output_streams import complain, print_json, to_reader
from deepseek_triton_tools.tool_errors import InstallationError, ToolError

if TYPE_CHECKING:  # numpy and aiohttp take longer than the rest of --help
    from deepseek_triton_tools.bench.load.target import TargetSettings
    from deepseek_triton_tools.bench.sweep import Sweep

_DEFAULT_CONCURRENCY = 16
_DEFAULT_ROUNDS = 5
_DEFAULT_NUM_PROMPTS = 100
"""Of an open loop."""
_TABLES = ("ours", "vllm", "trtllm-bench")
_SLO_NAMES = ("ttft", "tpot", "itl", "e2el")


def add_run_form(forms: Verbs) -> None:
    verb = add_verb(forms, "run", "send requests at given loads, and show what was measured")
    verb.usage = "%(prog)s URL... [options]"
    verb.runs(
        _run,
        "deepseek-triton bench http://localhost:8000 --concurrency 1,8,64 --isl 1024 --osl 128 --output bench",
        "deepseek-triton bench http://localhost:9000/v1 --rate 2,4,8 --num-prompts 200 --slo ttft=500,tpot=30",
        notes="URL is a Triton server (http:// or grpc://), or an OpenAI endpoint, whose path ends in /v1. Several\n"
        "servers get requests in turn. docs/bench.md has more; docs/bench-figures.md defines every figure.",
    )
    verb.add_argument("urls", nargs="+", type=words, metavar="URL", help="the server; several are asked in turn")
    add_json(verb, "docs/bench-figures.md")
    _add_load(verb.add_argument_group("load"))
    add_dataset_options(verb)
    _add_requests(verb.add_argument_group("requests"))
    _add_results(verb.add_argument_group("results"))
    server = verb.add_argument_group("server")
    help_text = "what answers there (default: openai if the URL's path ends in /v1, else triton)"
    server.add_argument("--endpoint", choices=("triton", "openai"), help=help_text)
    help_text = "read a server's metrics here; may be repeated; none: don't (default: port 8002 of Triton)"
    server.add_argument("--metrics-url", action="append", type=words, metavar="URL", help=help_text)
    add_server_options(server)


def _add_load(group: argparse._ArgumentGroup) -> None:
    help_text = "requests under way at once, each number in turn (default: 16)"
    group.add_argument("--concurrency", type=_numbers, metavar="N,N", help=help_text)
    help_text = "requests a second, each rate in turn; inf: all at once; --concurrency is then a limit"
    group.add_argument("--rate", "--request-rate", type=_rates, metavar="R,R", help=help_text)
    help_text = "1: Poisson arrivals (default); below 1 they come in bursts, above 1 evenly"
    group.add_argument("--burstiness", type=_above_zero, default=1.0, metavar="X", help=help_text)
    help_text = "requests to measure at each load (default: 5 for each of --concurrency; all of a file)"
    group.add_argument("--num-prompts", "--num-requests", type=positive, metavar="N", help=help_text)
    help_text = "measure K requests for each one of --concurrency"
    group.add_argument("--rounds", type=positive, metavar="K", help=help_text)
    help_text = "send nothing after S seconds; the requests are repeated as needed"
    group.add_argument("--duration", type=duration, metavar="S", help=help_text)
    help_text = "requests before the measured ones, at the same pace (default: none)"
    group.add_argument("--warmup", type=_count, default=0, metavar="N", help=help_text)
    help_text = "measure each load R times, for an interval of confidence (default: 1)"
    group.add_argument("--repeat", type=positive, default=1, metavar="R", help=help_text)
    help_text = "percentage of requests that the client leaves early (default: 0)"
    group.add_argument("--cancel", "--request-cancellation-rate", type=_percentage, metavar="P", help=help_text)
    help_text = "seconds after which these are left (default: 1)"
    group.add_argument("--cancel-after", "--request-cancellation-delay", type=duration, metavar="S", help=help_text)
    help_text = "processes that send (default: one for 256 streams, on half of the cores at most)"
    group.add_argument("--processes", type=positive, metavar="N", help=help_text)


def _add_requests(group: argparse._ArgumentGroup) -> None:
    help_text = "send prompts as chat messages; they need text, so not with random prompts"
    group.add_argument("--chat", action="store_true", help=help_text)
    help_text = "generate all tokens of the output length (default: for random prompts and traces)"
    group.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, help=help_text)
    help_text = "a sampling field of every request, such as temperature=0; may be repeated"
    group.add_argument("--set", action="append", type=words, default=[], metavar="NAME=VALUE", help=help_text)
    group.add_argument("--timeout", type=duration, metavar="S", help="seconds for an answer (default: no limit)")


def _add_results(group: argparse._ArgumentGroup) -> None:
    help_text = "write bench.json, report.html, figures.csv, one JSON for each run, requests.jsonl.gz there"
    group.add_argument("--output", type=path, metavar="FOLDER", help=help_text)
    help_text = "GPUs of all servers together, for TPS/GPU (default: what the server says)"
    group.add_argument("--gpus", type=positive, metavar="N", help=help_text)
    help_text = "limits in ms for goodput, such as ttft=500,tpot=30; also itl, e2el"
    group.add_argument("--slo", type=_slo, default=Slo(), metavar="LIMITS", help=help_text)
    help_text = "print the tables of another tool: vllm or trtllm-bench (default: ours)"
    group.add_argument("--table", choices=_TABLES, default="ours", help=help_text)


def _run(args: argparse.Namespace) -> int:
    try:
        sweep = _sweep(args)
    except ModuleNotFoundError as error:
        raise InstallationError(f"bench needs {error.name}: {install_extra('bench')}") from error
    from deepseek_triton_tools.bench.results.output_folder import OutputFolder
    from deepseek_triton_tools.bench.sweep import sweep_result, sweep_steps

    output = None if args.output is None else OutputFolder(args.output)
    progress = BenchProgress()
    steps = []
    for step in sweep_steps(sweep, progress.show):
        progress.clear()
        steps.append(step)
        if output is not None:
            output.write(sweep_result(sweep, steps), step)
        with to_reader():
            _print_step(args, step)
        if step.measured.interrupted:
            complain("interrupted: the figures are of what was measured by then, the rest was not")
    result = sweep_result(sweep, steps)
    with to_reader():
        _print_result(args, result)
    if output is not None:
        complain(f"written to {args.output}: {', '.join(output.names)}")
    return 1 if any(step.measured.interrupted for step in steps) or not _any_completed(result) else 0
