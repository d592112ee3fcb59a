"""A sweep: every point of load in turn, each as often as asked for; how far it is, and the files that runs leave.

The keys of `serving_document` are those of `vllm bench serve` and benchmark_serving (vllm/benchmarks/serve.py and
tensorrt_llm/serve/scripts/benchmark_serving.py), as `--percentile-metrics ttft,tpot,itl,e2el` writes them.

trtllm-bench's sections and keys are those of its `--report_json` (tensorrt_llm/bench/dataclasses/reporting.py, releases
1.0 to 1.2). There is null for whatever only the engine's own process knows.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from deepseek_triton_tools.bench.expected import BenchPreset
from deepseek_triton_tools.bench.load_process import LoadProgress
from deepseek_triton_tools.bench.load_run import LoadProcesses, LoadRun, conversations_needed, processes_for
from deepseek_triton_tools.bench.report import ExpectedPoint, NamedResult, write_report
from deepseek_triton_tools.bench.result import (
    FILE_NAME,
    BenchPoint,
    BenchResult,
    BenchRun,
    Distribution,
    Figures,
    MetricSummary,
    Slo,
    csv_text,
    write_document,
    write_result,
    write_samples,
)
from deepseek_triton_tools.bench.run_figures import run_figures, run_timeline
from deepseek_triton_tools.bench.servers import MetricsWatch
from deepseek_triton_tools.bench.targets import TargetSettings
from deepseek_triton_tools.bench.workload import Conversation, LoadPoint
from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.terminal.status_line import StatusLine, clock
from deepseek_triton_tools.tool_errors import ToolError

_LEAST_BINS, _MOST_BINS = 20, 240
"""Parts of the timeline; about one for each second."""
_NO_SLO = Slo()
_CSV_NAME = "figures.csv"
_REPORT_NAME = "report.html"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    target: TargetSettings
    points: Sequence[LoadPoint]
    repeat: int = 1
    conversations: Callable[[int, int], Sequence[Conversation]]
    """Makes a number of conversations with a seed; each run has a seed of its own, so that no prefix cache helps it."""
    dataset: str
    """The dataset in a few words."""
    gpus: int | None = None
    slo: Slo = _NO_SLO
    metrics_urls: Sequence[str] = ()
    """Servers' own metrics, which are read during each run."""
    processes: int | None = None
    """Load processes; None: as many as the largest point needs."""
    seed: int = 0
    command: str = ""
    preset: str = ""
    server: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SweepStep:
    """One run of a sweep that has ended."""

    load: LoadPoint
    number: int
    """Number of the run at this point, from 0."""
    run: BenchRun
    measured: LoadRun
    problems: Mapping[str, str] = field(default_factory=dict)
    """Addresses of metrics that could not be read, a line each."""


def sweep_steps(sweep: Sweep, on_progress: Callable[[LoadProgress], None]) -> Iterator[SweepStep]:
    """Measure. The first Ctrl-C ends the run under way, which is then the last step; the second raises
    KeyboardInterrupt.

    :raises ToolError: when the server can't be asked.
    """
    target = sweep.target
    number = sweep.processes or max(processes_for(point) for point in sweep.points)
    runs = [point for point in sweep.points for _ in range(sweep.repeat)]
    with LoadProcesses(number) as processes:
        for position, point in enumerate(runs):
            # Neighbouring seeds of a user mustn't share runs, as their sums with the position would.
            seed = int(np.random.SeedSequence((sweep.seed, position)).generate_state(1)[0])
            conversations = sweep.conversations(conversations_needed(point), seed)
            with MetricsWatch(sweep.metrics_urls, own_urls=target.urls, token=target.token, tls=target.tls) as watch:
                measured = processes.run(target, point, conversations, seed=seed, on_progress=on_progress)
            yield SweepStep(
                load=point,
                number=runs[:position].count(point),  # a sweep may name a point twice
                run=_bench_run(sweep, point, measured, watch.summaries()),
                measured=measured,
                problems=watch.problems,
            )
            if measured.interrupted:
                return


def sweep_result(sweep: Sweep, steps: Sequence[SweepStep]) -> BenchResult:
    """Put the steps so far together; steps at equal points are runs of one. There must be a step."""
    points = [
        BenchPoint(load=point, runs=tuple(step.run for step in steps if step.load == point))
        for point in dict.fromkeys(step.load for step in steps)
    ]
    return BenchResult(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        urls=sweep.target.urls,
        endpoint=sweep.target.endpoint,
        model=sweep.target.model,
        gpus=sweep.gpus,
        dataset=sweep.dataset,
        slo=sweep.slo,
        points=tuple(points),
        command=sweep.command,
        preset=sweep.preset,
        server=sweep.server,
    )


def _bench_run(
    sweep: Sweep, point: LoadPoint, measured: LoadRun, server_metrics: Mapping[str, MetricSummary]
) -> BenchRun:
    is_closed = point.rate is None and point.concurrency is not None
    figures = run_figures(
        measured.records, gpus=sweep.gpus, concurrency=point.concurrency if is_closed else None, slo=sweep.slo
    )
    delay_ms = float(np.percentile(measured.delays_ms, 99)) if measured.delays_ms else 0.0
    bins = min(_MOST_BINS, max(_LEAST_BINS, round(figures.duration_s)))
    return BenchRun(
        figures=replace(figures, client_delay_ms=delay_ms),
        timeline=run_timeline(measured.records, bins),
        server_metrics=server_metrics,
        interrupted=measured.interrupted,
    )


# --- What it shows while it runs, and the folder of its files ---


class RunProgress:
    def __init__(self, points: Sequence[LoadPoint], repeat: int) -> None:
        self._line = StatusLine()
        self._runs = [point for point in points for _ in range(repeat)]
        self._num_ended = 0

    def show(self, progress: LoadProgress) -> None:
        self._line.show(lambda: f"{self.name}: {self.text(progress)}")

    def clear(self) -> None:
        self._line.clear()

    def end(self, step: SweepStep) -> None:
        """Leave a line for a run that has ended."""
        figures = step.run.figures
        self._num_ended += 1
        parts = [f"{figures.completed} completed"]
        parts += [f"{number} {name}" for name in ("failed", "cancelled") if (number := getattr(figures, name))]
        speed = f"{figures.output_throughput:,.0f} tokens/s"
        self._line.say(f"{step.load.label}: {', '.join(parts)} in {clock(figures.duration_s)}, {speed}")

    @property
    def name(self) -> str:
        """The run under way among those of its point, and among all."""
        point = self._runs[self._num_ended]
        parts = [point.label]
        if (repeat := self._runs.count(point)) > 1:
            parts.append(f"run {self._runs[: self._num_ended].count(point) + 1} of {repeat}")
        if len(self._runs) > 1:
            parts.append(f"{self._num_ended + 1} of {len(self._runs)} in all")
        return ", ".join(parts)

    def text(self, progress: LoadProgress) -> str:
        """Say how far the run under way is, and how long it will take."""
        duration_s = self._runs[self._num_ended].duration_s
        # A run of a fixed time sends as many requests as it can.
        of_total = f" of {progress.total:,}" if duration_s is None else " ended"
        parts = [f"{progress.ended:,}{of_total}", f"{progress.inflight:,} under way"]
        if progress.failed:
            parts.insert(1, f"{progress.failed:,} of them failed")
        if progress.elapsed_s > 0:
            parts.append(f"{progress.output_tokens / progress.elapsed_s:,.0f} tokens/s")
        left_s = None if duration_s is None else duration_s - progress.elapsed_s
        if duration_s is None and progress.ended:
            left_s = progress.elapsed_s * (progress.total - progress.ended) / progress.ended
        if left_s is not None:
            parts.append(f"about {clock(max(0.0, left_s))} left of this run")
        return ", ".join(parts)


def expected_points(preset: BenchPreset) -> list[ExpectedPoint]:
    """Return the published throughputs of a preset, for pictures."""
    return [
        ExpectedPoint(tps_user=point.published["user_throughput"], tps_gpu=point.published["output_throughput_per_gpu"])
        for point in preset.points
        if {"user_throughput", "output_throughput_per_gpu"} <= point.published.keys()
    ]


def run_name(load: LoadPoint, run: int = 0) -> str:
    """The name of a run's files, without an ending: "concurrency_32", and "concurrency_32_run_2" for a repeated run."""
    name = load.label.replace(", ", "_").replace(" ", "_")
    return f"{name}_run_{run + 1}" if run else name


class OutputFolder:
    def __init__(self, folder: Path, expected: Sequence[ExpectedPoint] = ()) -> None:
        """Make the folder. Raises ToolError when there is a result in it already, or it can't be made."""
        if (folder / FILE_NAME).exists():
            raise ToolError(f"{folder} has a result already: name another --output, or remove it", exit_code=2)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ToolError(f"--output {folder}: {error.strerror}", exit_code=2) from error
        self._folder = folder
        self._expected = expected
        self.num_runs = 0

    def write(self, result: BenchResult, step: SweepStep) -> None:
        """Write the result so far, and the files of its last run, `step`."""
        name = run_name(step.load, step.number)
        figures = step.run.figures
        write_document(serving_document(result, step.load, figures), self._folder / f"{name}.json")
        write_document(trtllm_document(result, figures), self._folder / f"{name}.trtllm-bench.json")
        write_samples(step.measured.records, self._folder / f"{name}.requests.jsonl.gz")
        write_result(result, self._folder / FILE_NAME)
        self.num_runs += 1
        with whole_file(self._folder / _CSV_NAME) as file:
            file.write(csv_text(result))
        own = NamedResult(name=result.preset or self._folder.name, result=result)
        write_report(self._folder / _REPORT_NAME, [own], self._expected)

    @property
    def summary(self) -> str:
        """The files in a few words. A full disk may keep some of them away."""
        names = [name for name in (_REPORT_NAME, FILE_NAME, _CSV_NAME) if (self._folder / name).is_file()]
        return f"{', '.join(names)}, and the figures and requests of {self.num_runs} runs"


# --- A run as other tools write it ---

# Their inter-token latency is the time between two chunks.
_LATENCIES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "chunk_gap_ms", "e2el": "e2el_ms"}
_PERCENTILES = {name: name for name in ("p50", "p90", "p95", "p99")}
# Their names of statistics, and ours.
_SERVING_STATISTICS = {"mean": "mean", "median": "p50", "std": "std", **_PERCENTILES}
_TRTLLM_STATISTICS = {"minimum": "min", "maximum": "max", "average": "mean", **_PERCENTILES}
_CALLED_ALIKE = (
    *("completed", "total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput"),
    *("total_token_throughput", "user_throughput"),
)
_ENGINE = ("model", "model_path", "engine_dir", "version", "backend", "dtype", "kv_cache_dtype", "quantization")
_WORLD = (
    *("tp_size", "pp_size", "ep_size", "world_size", "max_batch_size", "max_num_tokens"),
    *("scheduling_policy", "kv_cache_percentage", "issue_rate"),
)


def serving_document(result: BenchResult, load: LoadPoint, figures: Figures) -> dict[str, Any]:
    document: dict[str, Any] = {
        "date": datetime.fromisoformat(result.date).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": result.endpoint,
        "backend": result.endpoint,
        "label": None,
        "model_id": result.model,
        "tokenizer_id": None,
        "num_prompts": figures.completed + figures.failed + figures.cancelled,
        "request_rate": "inf" if load.rate in (None, math.inf) else load.rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.concurrency,
        "duration": figures.duration_s,
        "failed": figures.failed + figures.cancelled,
        "request_goodput": figures.goodput,
        "request_goodput:": figures.goodput,  # benchmark_serving's key does end in a colon
        **{name: getattr(figures, name) for name in _CALLED_ALIKE},
        "max_output_tokens_per_s": figures.peak_output_throughput,
        "max_concurrent_requests": figures.peak_concurrency,
    }
    for name, figure in _LATENCIES.items():
        for key, ours in _SERVING_STATISTICS.items():
            document[f"{key}_{name}_ms"] = getattr(getattr(figures, figure), ours)
    return document


def trtllm_document(result: BenchResult, figures: Figures) -> dict[str, Any]:
    def statistics(values: Distribution) -> dict[str, float]:
        return {name: getattr(values, ours) for name, ours in _TRTLLM_STATISTICS.items()}

    streaming_metrics = {
        "token_output_speed_tok_s": figures.decode_speed.mean,
        "avg_ttft_ms": figures.ttft_ms.mean,
        "avg_tpot_ms": figures.tpot_ms.mean,
        "tpot_percentiles": statistics(figures.tpot_ms),
        "ttft_percentiles": statistics(figures.ttft_ms),
        "gen_tps_percentiles": statistics(figures.decode_speed),
    }
    return {
        "engine": dict.fromkeys(_ENGINE)
        | {
            "model": result.model,
            "model_path": result.server.get("checkpoint"),
            "version": result.server.get("engine_version"),
            "backend": result.server.get("engine"),
        },
        "machine": None,
        "world_info": dict.fromkeys(_WORLD) | {"world_size": result.gpus},
        "request_info": {
            "num_requests": figures.completed,
            "avg_num_concurrent_requests": figures.request_throughput * figures.e2el_ms.mean / 1000,
            "avg_input_length": figures.input_tokens.mean,
            "avg_output_length": figures.output_tokens.mean,
        },
        "performance": {
            "total_latency_ms": 1000 * figures.duration_s,
            "avg_request_latency_ms": figures.e2el_ms.mean,
            "request_throughput_req_s": figures.request_throughput,
            "system_output_throughput_tok_s": figures.output_throughput,
            "system_total_throughput_tok_s": figures.total_token_throughput,
            "output_throughput_per_user_tok_s": figures.user_throughput,
            "output_throughput_per_gpu_tok_s": figures.output_throughput_per_gpu,
            "request_latency_percentiles_ms": statistics(figures.e2el_ms),
        },
        **({"streaming_metrics": streaming_metrics} if figures.ttft_ms.count else {}),
        "decoding_stats": None,
        "dataset": {
            "isl_stats": statistics(figures.input_tokens),
            "osl_stats": statistics(figures.output_tokens),
            "num_requests": figures.completed,
            "dataset_path": result.dataset,
            "max_isl": figures.input_tokens.max,
            "max_osl": figures.output_tokens.max,
            "avg_isl": figures.input_tokens.mean,
            "avg_osl": figures.output_tokens.mean,
        },
    }
