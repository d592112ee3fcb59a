"""`deepseek-triton bench run`: send requests at given loads, and print and write what was measured."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from deepseek_triton_client import SamplingParams
from deepseek_triton_tools.bench.expected import preset as published_preset
from deepseek_triton_tools.bench.expected import presets
from deepseek_triton_tools.bench.result import Figures
from deepseek_triton_tools.bench.workload import LoadPoint, NormalLengths
from deepseek_triton_tools.cli.bench_options import add_bench_options, check_options, dataset_options
from deepseek_triton_tools.cli.client_options import DEFAULT_MODEL, DEFAULT_URL, assigned, client_settings
from deepseek_triton_tools.cli.parsing import Verbs, add_verb
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.terminal.output_streams import complain, print_json, to_reader
from deepseek_triton_tools.terminal.tables import paragraph, show
from deepseek_triton_tools.tool_errors import InstallationError, ToolError, in_options

if TYPE_CHECKING:  # numpy and aiohttp take longer than the rest of --help
    from deepseek_triton_build import Plan
    from deepseek_triton_tools.bench.dataset_files import ConversationSource
    from deepseek_triton_tools.bench.expected import BenchPreset
    from deepseek_triton_tools.bench.result import BenchResult
    from deepseek_triton_tools.bench.sweep import Sweep
    from deepseek_triton_tools.bench.targets import Endpoint, TargetSettings

_DEFAULT_CONCURRENCY = 16
_DEFAULT_ROUNDS = 5
_DEFAULT_NUM_PROMPTS = 100
"""Requests of an open loop."""


def add_run_form(forms: Verbs) -> None:
    verb = add_verb(forms, "run", "send requests at given loads, and show what was measured")
    verb.usage = "%(prog)s [URL...] [options]"
    verb.names = _preset_names
    verb.runs(
        _run,
        "deepseek-triton bench http://localhost:8000 --concurrency 1,8,64 --isl 1024 --osl 128 --output bench",
        "deepseek-triton bench http://localhost:9000/v1 --rate 2,4,8 --num-prompts 200 --slo ttft=500,tpot=30",
        notes="URL is a Triton server (http:// or grpc://), or an OpenAI endpoint, whose path ends in /v1. Several\n"
        "servers get requests in turn. docs/bench.md defines every figure.\n"
        "It returns 0; 1 if more requests failed than were answered, 2 for a wrong command line, 130 after Ctrl-C.",
        common="--concurrency --request-rate --num-requests --duration --random-input-len --random-output-len "
        "--dataset-path --preset --slo --gpus --output --model --json",
    )
    add_bench_options(verb)


def _preset_names() -> str:
    width = max(map(len, presets()))
    lines = [f"  {name:{width}}  {preset.title}" for name, preset in presets().items()]
    return "\n".join(["presets (docs/bench.md):", *lines, ""])


def _run(args: argparse.Namespace) -> int:
    for name in ("aiohttp", "numpy", "plotly", "uvloop"):
        if find_spec(name) is None:
            raise InstallationError(f"bench needs {name}: {install_extra('bench')}")
    from deepseek_triton_tools.bench.report import NamedResult, report_warnings
    from deepseek_triton_tools.bench.sweep import (
        OutputFolder,
        RunProgress,
        SweepStep,
        expected_points,
        sweep_result,
        sweep_steps,
    )
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
                complain(in_options(step.problems[url]))
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
    for warning in report_warnings([NamedResult(name=result.served_model, result=result)]):
        complain(in_options(warning))
    if output is not None and output.num_runs:
        complain(f"written to {args.output}: {output.summary}")
    if isinstance(failure, ToolError):
        if len(steps) < (asked := len(sweep.points) * sweep.repeat):
            complain(f"only {len(steps)} of {asked} runs were measured")
        raise failure
    if failure is not None or steps[-1].measured.interrupted:
        complain("interrupted: the figures are of what was measured by then")
        return 130
    return exit_code([step.run.figures for step in steps])


def exit_code(figures: Sequence[Figures]) -> int:
    """Return 1 when more requests failed than were answered, or none was, though the client left none; else 0."""
    completed, failed = (sum(getattr(each, name) for each in figures) for name in ("completed", "failed"))
    left = sum(each.cancelled for each in figures)
    if failed <= completed and completed + left:
        return 0
    complain(f"{failed} of {completed + failed + left} requests failed" if failed else "no request was measured")
    return 1


def _sweep(args: argparse.Namespace) -> Sweep:
    """:raises ToolError: for options that don't go together, and when the server can't be asked."""
    from deepseek_triton_tools.bench.servers import endpoint_of, model_facts, usual_metrics_urls
    from deepseek_triton_tools.bench.sweep import Sweep

    args.urls = args.urls or [DEFAULT_URL]
    endpoint = endpoint_of(args.urls, args.endpoint)
    check_options(args, is_openai=endpoint == "openai")
    published = None if args.preset is None else published_preset(args.preset)
    target = _target(args, endpoint)
    facts = model_facts(target)
    simulation = facts.get("simulation") or {}
    if published is not None and simulation and simulation.get("preset") != published.simulated:
        complain(f"the server simulates {simulation.get('preset') or 'no deployment'}, not the one of {args.preset}")
    source = _conversation_source(args, published, target, facts)
    if args.ignore_eos if args.ignore_eos is not None else published is not None or not source.is_text:
        target = replace(target, fields={"ignore_eos": True, **target.fields})
    metrics_urls = args.metrics_url or usual_metrics_urls(target.urls, target.endpoint)
    if not all(args.metrics_url or usual_metrics_urls([url], target.endpoint) for url in target.urls):
        complain("--metrics-url names the server's metrics, which are at 8002 only beside Triton's own 8000 and 8001")
    return Sweep(
        target=target,
        points=published.loads(short=bool(simulation) and not args.full) if published else _points(args, source),
        repeat=args.repeat,
        conversations=source,
        dataset=source.options.label,
        gpus=args.gpus or (published.gpus if published else None),
        slo=args.slo,
        metrics_urls=[url for url in metrics_urls if url != "none"],
        processes=args.processes,
        seed=args.seed,
        preset=args.preset or "",
        command=shlex.join(["deepseek-triton", *sys.argv[1:]]),
        server=facts,
    )


def _conversation_source(
    args: argparse.Namespace, published: BenchPreset | None, target: TargetSettings, facts: Mapping[str, Any]
) -> ConversationSource:
    """The prompts of --dataset, of any length where nobody counts tokens, or random ones; of a preset its lengths."""
    from deepseek_triton_tools.bench.dataset_files import FileConversationSource, RandomConversationSource
    from deepseek_triton_tools.bench.random_prompts import text_token_ids
    from deepseek_triton_tools.bench.servers import token_counts

    options = dataset_options(args)
    if published is not None:
        options = replace(options, output=NormalLengths(published.output_tokens))
        if options.file is None:
            options = replace(options, input=NormalLengths(published.input_tokens))
    vocab_size = facts.get("vocab_size")
    if options.file is not None:
        runs = len(args.concurrency or [0]) * len(args.rate or [0]) * args.repeat
        most = (args.num_prompts + args.warmup) * runs if args.num_prompts else None
        counter = partial(token_counts, target) if "engine" in facts or options.output is None else None
        return FileConversationSource(options, text_token_ids(vocab_size), counter, most, vocab_size)
    limit = facts.get("max_seq_len") or math.inf
    if options.longest > limit:
        raise ToolError(
            f"expected prompts and answers of at most {limit:,} tokens together, got {options.longest:,}", exit_code=2
        )
    return RandomConversationSource(options, text_token_ids(vocab_size))


def _target(args: argparse.Namespace, endpoint: Endpoint) -> TargetSettings:
    from deepseek_triton_tools.bench.servers import first_openai_model
    from deepseek_triton_tools.bench.targets import TargetSettings

    token = client_settings(args)["token"]
    token = token() if callable(token) else token
    is_openai = endpoint == "openai"
    fields = dict(map(assigned, args.set))
    if not is_openai:
        SamplingParams().merged(fields)  # refuses what is wrong before anything is sent
    target = TargetSettings(
        urls=tuple(args.urls),
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


def _points(args: argparse.Namespace, source: ConversationSource) -> list[LoadPoint]:
    """A point for each concurrency and rate; for a trace without either, one at its own times."""
    concurrencies = args.concurrency or [None]
    if not args.concurrency and not args.rate and (args.rounds or not source.is_trace):
        concurrencies = [_DEFAULT_CONCURRENCY]

    def num_requests(concurrency: int | None) -> int:
        if source.num_requests is not None and not args.num_prompts and not args.rounds:
            return max(1, source.num_requests - int(args.warmup))
        return args.num_prompts or (args.rounds or _DEFAULT_ROUNDS) * (concurrency or 0) or _DEFAULT_NUM_PROMPTS

    return [
        LoadPoint(
            num_requests=num_requests(concurrency),
            num_warmup=args.warmup,
            concurrency=concurrency,
            rate=rate,
            burstiness=args.burstiness or 1.0,
            duration_s=args.duration,
            leave_share=(args.cancel or 0.0) / 100,
            leave_after_s=1.0 if args.cancel_after is None else args.cancel_after,
        )
        for rate in args.rate or [None]
        for concurrency in concurrencies
    ]


def _print(args: argparse.Namespace, result: BenchResult, planned: Plan | None) -> None:
    from deepseek_triton_tools.bench.expected import against_plan, published_table
    from deepseek_triton_tools.bench.result import result_document
    from deepseek_triton_tools.bench.result_tables import metrics_table, result_note, result_tables

    if args.json:
        print_json(result_document(result))
        return
    for table in result_tables(result):
        show(table)
    print(paragraph(result_note(result), indent="") + "\n")
    last = result.points[-1]
    if watched := metrics_table(last.runs[-1].server_metrics, f"the last run: {last.load.label}"):
        show(watched)
    if args.preset is not None and (published := published_table(published_preset(args.preset), result)).rows:
        show(published)
    if planned is not None:
        show(against_plan(planned, result))
