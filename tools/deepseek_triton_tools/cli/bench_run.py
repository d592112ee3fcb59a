"""`deepseek-triton bench run`: send requests at given loads, and print and write what was measured."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from deepseek_triton_client import SamplingParams
from deepseek_triton_tools.bench.figures import Figures, Slo
from deepseek_triton_tools.bench.presets import PRESETS
from deepseek_triton_tools.bench.presets import preset as published_preset
from deepseek_triton_tools.bench.workload import DatasetOptions, LoadPoint, NormalLengths
from deepseek_triton_tools.cli.bench_dataset_options import add_dataset_options, dataset_options
from deepseek_triton_tools.cli.bench_rules import check_options
from deepseek_triton_tools.cli.client_options import DEFAULT_MODEL, add_server_options, client_settings
from deepseek_triton_tools.cli.parsing import Verbs, add_json, add_verb, duration, number, path, positive, words
from deepseek_triton_tools.cli.sampling_options import assigned, assigned_json
from deepseek_triton_tools.cli.slo_option import slo
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.terminal.output_streams import complain, print_json, to_reader
from deepseek_triton_tools.terminal.tables import is_terminal, paragraph, show
from deepseek_triton_tools.tool_errors import InstallationError, ToolError

if TYPE_CHECKING:  # numpy and aiohttp take longer than the rest of --help
    from deepseek_triton_build import Plan
    from deepseek_triton_tools.bench.presets import BenchPreset
    from deepseek_triton_tools.bench.result import BenchResult
    from deepseek_triton_tools.bench.sweep import Sweep
    from deepseek_triton_tools.bench.targets import TargetSettings
    from deepseek_triton_tools.bench.workload import Conversation

_DEFAULT_CONCURRENCY = 16
_DEFAULT_ROUNDS = 5
_DEFAULT_NUM_PROMPTS = 100
"""Requests of an open loop."""
_TABLES = ("ours", "vllm", "trtllm-bench")


def add_run_form(forms: Verbs) -> None:
    verb = add_verb(forms, "run", "send requests at given loads, and show what was measured")
    verb.usage = "%(prog)s URL... [options]"
    verb.runs(
        _run,
        "deepseek-triton bench http://localhost:8000 --concurrency 1,8,64 --isl 1024 --osl 128 --output bench",
        "deepseek-triton bench http://localhost:9000/v1 --rate 2,4,8 --num-prompts 200 --slo ttft=500,tpot=30",
        notes="URL is a Triton server (http:// or grpc://), or an OpenAI endpoint, whose path ends in /v1. Several\n"
        "servers get requests in turn. docs/bench.md has more; docs/bench-figures.md defines every figure.\n"
        "It returns 0; 1 if more requests failed than were answered, 2 for a wrong command line, 130 after Ctrl-C.",
    )
    verb.add_argument("urls", nargs="+", type=words, metavar="URL", help="the server; several are asked in turn")
    add_json(verb, "docs/bench-figures.md")
    published = verb.add_argument_group("published runs")
    help_text = "send what a guide's benchmark sends, and show its figures beside; the names stand below"
    published.add_argument("--preset", type=words, metavar="NAME", help=help_text)
    help_text = "all requests of the preset on a simulated server too (default there: a steady load of minutes)"
    published.add_argument("--full", action="store_true", help=help_text)
    verb.names = _preset_names
    _add_load(verb.add_argument_group("load"))
    add_dataset_options(verb)
    _add_requests(verb.add_argument_group("requests"))
    _add_results(verb.add_argument_group("results"))
    server = verb.add_argument_group("server")
    help_text = "what answers there (default: openai if the URL's path ends in /v1, else triton)"
    server.add_argument("--endpoint", choices=("triton", "openai"), help=help_text)
    help_text = "read a server's metrics here; may be repeated; none: don't (default: port 8002 of Triton)"
    server.add_argument("--metrics-url", action="append", type=words, metavar="URL", help=help_text)
    help_text = "context server, which computes the prompt; URL generates the answer then; may be repeated"
    server.add_argument("--context-url", action="append", default=[], type=words, metavar="URL", help=help_text)
    add_server_options(server)


def _preset_names() -> str:
    width = max(map(len, PRESETS))
    lines = [f"  {name:{width}}  {each.title}" for name, each in PRESETS.items()]
    return "\n".join(["presets (docs/bench-presets.md):", *lines, ""])


def _add_load(group: argparse._ArgumentGroup) -> None:
    help_text = "requests under way at once, each number in turn (default: 16)"
    group.add_argument("--concurrency", type=_numbers, metavar="N,N", help=help_text)
    help_text = "requests a second, each rate in turn; inf: all at once; --concurrency is then a limit"
    group.add_argument("--rate", "--request-rate", type=_rates, metavar="R,R", help=help_text)
    help_text = "1: Poisson arrivals (default); below 1 they come in bursts, above 1 evenly"
    group.add_argument("--burstiness", type=_above_zero, metavar="X", help=help_text)
    help_text = "requests to measure at each load (default: 5 for each of --concurrency; all of a file)"
    group.add_argument("--num-prompts", "--num-requests", type=positive, metavar="N", help=help_text)
    help_text = "measure K requests for each one of --concurrency (default: 5)"
    group.add_argument("--rounds", type=positive, metavar="K", help=help_text)
    help_text = "send nothing after S seconds; the requests are repeated as needed"
    group.add_argument("--duration", type=duration, metavar="S", help=help_text)
    help_text = "requests before the measured ones, at the same pace (default: none)"
    group.add_argument("--warmup", type=number, default=0, metavar="N", help=help_text)
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
    help_text = "generate all tokens of the output length (default: if prompts are token ids)"
    group.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, help=help_text)
    help_text = "a sampling field of every request, such as temperature=0; may be repeated"
    group.add_argument("--set", action="append", type=words, default=[], metavar="NAME=VALUE", help=help_text)
    group.add_argument("--timeout", type=duration, metavar="S", help="seconds for an answer (default: no limit)")


def _add_results(group: argparse._ArgumentGroup) -> None:
    help_text = "write bench.json, report.html, figures.csv, one JSON for each run, requests.jsonl.gz there"
    group.add_argument("--output", type=path, metavar="FOLDER", help=help_text)
    help_text = "GPUs of all servers together, for TPS/GPU (default: the preset's; without it no figures per GPU)"
    group.add_argument("--gpus", type=positive, metavar="N", help=help_text)
    help_text = "limits in ms for goodput, such as ttft=500,tpot=30; also itl, e2el"
    group.add_argument("--slo", type=slo, default=Slo(), metavar="LIMITS", help=help_text)
    help_text = "lay a plan's limits beside what was measured: a folder that build wrote, or options of plan in quotes"
    group.add_argument("--against", type=words, metavar="PLAN", help=help_text)
    group.add_argument("--picture", action=argparse.BooleanOptionalAction, help="draw pictures (default: of a sweep)")
    help_text = "print the tables of another tool: vllm or trtllm-bench (default: ours)"
    group.add_argument("--table", choices=_TABLES, help=help_text)


def _run(args: argparse.Namespace) -> int:
    for name in ("aiohttp", "numpy", "plotext", "plotly", "uvloop"):
        if find_spec(name) is None:
            raise InstallationError(f"bench needs {name}: {install_extra('bench')}")
    from deepseek_triton_tools.bench.report_page import report_warnings
    from deepseek_triton_tools.bench.report_points import NamedResult
    from deepseek_triton_tools.bench.sweep import SweepStep, sweep_result, sweep_steps
    from deepseek_triton_tools.bench.sweep_output import OutputFolder, RunProgress, expected_points
    from deepseek_triton_tools.cli.plan_request import plan_named

    planned = None if args.against is None else plan_named(args.against)
    sweep = _sweep(args)
    expected = expected_points(published_preset(args.preset)) if args.preset else ()
    output = None if args.output is None else OutputFolder(args.output, expected)
    progress = RunProgress(sweep.points, sweep.repeat)
    steps: list[SweepStep] = []
    unread: set[str] = set()
    failure: ToolError | KeyboardInterrupt | None = None
    try:
        for step in sweep_steps(sweep, progress.show):
            progress.end(step)
            for url in step.problems.keys() - unread:
                complain(step.problems[url])
            unread |= step.problems.keys()
            steps.append(step)
            if output is not None:
                output.write(sweep_result(sweep, steps), step)
    except (ToolError, KeyboardInterrupt) as error:
        progress.clear()
        if not steps:
            raise
        failure = error
    result = sweep_result(sweep, steps)
    with to_reader():
        _print(args, result, planned)
    for warning in report_warnings([NamedResult(name=result.model, result=result)]):
        complain(warning)
    if output is not None:
        complain(f"written to {args.output}: {output.summary}")
    if isinstance(failure, ToolError):
        complain(f"only {len(steps)} of {len(sweep.points) * sweep.repeat} runs were measured")
        raise failure
    if failure is not None or steps[-1].measured.interrupted:
        complain("interrupted: the figures are of what was measured by then")
        return 130
    return exit_code([step.run.figures for step in steps])


def exit_code(figures: Sequence[Figures]) -> int:
    """Return 1 when more requests failed than were answered, or none was, though the client left none; else 0."""
    completed, failed = (sum(getattr(each, name) for each in figures) for name in ("completed", "failed"))
    left_early = sum(each.cancelled for each in figures)
    if failed > completed:
        complain(f"{failed} of {completed + failed + left_early} requests failed")
        return 1
    return 0 if completed or left_early else 1


def _sweep(args: argparse.Namespace) -> Sweep:
    """Raises ToolError for options that don't go together, and when the server can't be asked."""
    from deepseek_triton_tools.bench.dataset_files import (
        FileConversationSource,
        RandomConversationSource,
    )
    from deepseek_triton_tools.bench.random_conversations import text_token_ids
    from deepseek_triton_tools.bench.server_facts import endpoint_of, model_facts, token_counts
    from deepseek_triton_tools.bench.sweep import Sweep

    check_options(args, is_openai=endpoint_of(args.urls, args.endpoint) == "openai")
    published = None if args.preset is None else published_preset(args.preset)
    options = dataset_options(args) if published is None else _preset_dataset(args, published)
    target = _target(args)
    facts = model_facts(target)
    simulation = facts.get("simulation")
    if published is not None and simulation and simulation.get("preset") != published.simulated:
        complain(f"the server simulates {simulation.get('preset') or 'no deployment'}, not the one of {args.preset}")
    loads = published and list(published.loads(short=bool(facts.get("simulation")) and not args.full))
    vocabulary = text_token_ids(facts.get("vocab_size"))
    is_text = False
    if options.file is None:
        longest, limit = options.longest, facts.get("max_seq_len") or math.inf
        if longest > limit:
            raise ToolError(
                f"expected prompts and answers of at most {limit:,} tokens together, got {longest:,}", exit_code=2
            )
        source: Callable[[int, int], Sequence[Conversation]] = RandomConversationSource(options, vocabulary)
        points = loads or _points(args, None, is_trace=False)
    else:
        runs = len(args.concurrency or [0]) * len(args.rate or [0]) * args.repeat
        most = (args.num_prompts + args.warmup) * runs if args.num_prompts else None
        source = in_file = FileConversationSource(
            options, vocabulary, partial(token_counts, target), most, facts.get("vocab_size")
        )
        points = loads or _points(args, len(in_file), is_trace=in_file.is_trace)
        is_text = in_file.is_text
    if args.ignore_eos if args.ignore_eos is not None else published is not None or not is_text:
        target = replace(target, fields={"ignore_eos": True, **target.fields})
    return Sweep(
        target=target,
        points=points,
        repeat=args.repeat,
        conversations=source,
        dataset=options.label,
        gpus=args.gpus or (published.gpus if published else None),
        slo=args.slo,
        metrics_urls=_metrics_urls(args, target),
        processes=args.processes,
        seed=args.seed,
        preset=args.preset or "",
        command=shlex.join(["deepseek-triton", *sys.argv[1:]]),
        server=facts,
    )


def _preset_dataset(args: argparse.Namespace, published: BenchPreset) -> DatasetOptions:
    """Return the preset's dataset, or the prompts of --dataset with answers of its length. Raises ToolError."""
    options = replace(dataset_options(args), output=NormalLengths(published.output_tokens))
    return options if options.file is not None else replace(options, input=NormalLengths(published.input_tokens))


def _metrics_urls(args: argparse.Namespace, target: TargetSettings) -> Sequence[str]:
    from deepseek_triton_tools.bench.server_metrics import usual_metrics_urls

    if args.metrics_url == ["none"]:
        return ()
    return args.metrics_url or usual_metrics_urls(target.all_urls, target.endpoint)


def _target(args: argparse.Namespace) -> TargetSettings:
    from deepseek_triton_tools.bench.server_facts import endpoint_of, first_openai_model
    from deepseek_triton_tools.bench.targets import TargetSettings

    endpoint = endpoint_of(args.urls, args.endpoint)
    token = client_settings(args)["token"]
    token = token() if callable(token) else token
    is_openai = endpoint == "openai"
    fields = dict(map(assigned_json if is_openai else assigned, args.set))
    if not is_openai:
        SamplingParams().merged(fields)  # refuses what is wrong before anything is sent
    target = TargetSettings(
        urls=tuple(args.urls),
        context_urls=tuple(args.context_url),
        endpoint=endpoint,
        model=args.model,
        model_version=args.model_version,
        chat=args.chat,
        fields=fields,
        timeout_s=args.timeout,
        token=token,
        ca=args.ca,
        certificate=args.cert,
        key=args.key,
    )
    return replace(target, model=first_openai_model(target)) if is_openai and args.model == DEFAULT_MODEL else target


def _points(args: argparse.Namespace, in_file: int | None, *, is_trace: bool) -> list[LoadPoint]:
    """Return a point for each concurrency and rate; for a trace without either, one at its own times.

    :param in_file: the number of conversations in the dataset's file.
    """
    concurrencies = args.concurrency or [None]
    rates = args.rate or [None]
    if not args.concurrency and not args.rate and (args.rounds or not is_trace):
        concurrencies = [_DEFAULT_CONCURRENCY]
    return [
        LoadPoint(
            num_requests=_num_requests(args, concurrency, in_file),
            num_warmup=args.warmup,
            concurrency=concurrency,
            rate=rate,
            burstiness=args.burstiness or 1.0,
            duration_s=args.duration,
            leave_share=(args.cancel or 0.0) / 100,
            leave_after_s=1.0 if args.cancel_after is None else args.cancel_after,
        )
        for rate in rates
        for concurrency in concurrencies
    ]


def _num_requests(args: argparse.Namespace, concurrency: int | None, in_file: int | None) -> int:
    number: int = args.num_prompts or (args.rounds or _DEFAULT_ROUNDS) * (concurrency or 0) or _DEFAULT_NUM_PROMPTS
    if in_file is not None and not args.num_prompts and not args.rounds:
        number = max(1, in_file - int(args.warmup))
    return number


def _print(args: argparse.Namespace, result: BenchResult, planned: Plan | None) -> None:
    from deepseek_triton_tools.bench.foreign_results import serving_table, trtllm_document, trtllm_table
    from deepseek_triton_tools.bench.planning import against_plan
    from deepseek_triton_tools.bench.presets import published_table
    from deepseek_triton_tools.bench.report_points import NamedResult
    from deepseek_triton_tools.bench.result import result_document
    from deepseek_triton_tools.bench.result_tables import metrics_table, result_note, result_tables
    from deepseek_triton_tools.bench.terminal_pictures import show_pictures

    if args.json:
        print_json(result_document(result))
        return
    if args.table in (None, "ours"):
        for table in result_tables(result):
            show(table)
        print(paragraph(result_note(result), indent="") + "\n")
        last = result.points[-1]
        watched = metrics_table(last.runs[-1].server_metrics, f"the last run: {last.load.label}")
        if watched is not None:
            show(watched)
    if args.preset is not None and (published := published_table(published_preset(args.preset), result)).rows:
        show(published)
    if planned is not None:
        show(against_plan(planned, result))
    for point in result.points:
        for run in point.runs:
            if args.table in ("vllm", "trtllm-bench") and len(result.points) > 1:
                print(f"\n{point.load.label}:")
            if args.table == "vllm":
                print(serving_table(point.load, run.figures))
            elif args.table == "trtllm-bench":
                print(trtllm_table(trtllm_document(result, run.figures)))
    if args.picture if args.picture is not None else is_terminal() and len(result.points) > 1:
        show_pictures([NamedResult(name=result.preset or result.model, result=result)])


# --- Types of values ---


def _number_above_zero(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value > 0 else None


def _above_zero(text: str) -> float:
    value = _number_above_zero(text)
    if value is None or math.isinf(value):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r:.100}")
    return value


def _percentage(text: str) -> float:
    value = _number_above_zero(text)
    if value is None or value > 100:
        raise argparse.ArgumentTypeError(f"expected a percentage above 0, up to 100, got {text!r:.100}")
    return value


def _rates(text: str) -> list[float]:
    values = [_number_above_zero(part) for part in text.split(",")]
    if None in values:
        raise argparse.ArgumentTypeError(f"expected requests a second, such as 0.5,2,8 or inf, got {text!r:.100}")
    return [value for value in values if value is not None]


def _numbers(text: str) -> list[int]:
    try:
        return [positive(part) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"expected whole numbers from 1, such as 1,8,64, got {text!r:.100}") from error
