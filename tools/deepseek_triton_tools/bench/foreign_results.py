"""One run as other tools report it: `vllm bench serve`, benchmark_serving and trtllm-bench.

The keys are those of both tools (vllm/benchmarks/serve.py and tensorrt_llm/serve/scripts/benchmark_serving.py), as
`--percentile-metrics ttft,tpot,itl,e2el` writes them. Their inter-token latency is the time between two chunks.

Sections, keys and labels are those of tensorrt_llm/bench/dataclasses/reporting.py, releases 1.0 to 1.2. There is null
for whatever only the engine's own process knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from deepseek_triton_tools.bench.figures import Distribution, Figures
from deepseek_triton_tools.bench.result import BenchResult
from deepseek_triton_tools.bench.workload import LoadPoint


def run_name(load: LoadPoint, run: int = 0) -> str:
    """The name of a run's files, without an ending: "concurrency_32", and "concurrency_32_run_2" for a repeated run."""
    name = load.label.replace(", ", "_").replace(" ", "_")
    return f"{name}_run_{run + 1}" if run else name


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
        "completed": figures.completed,
        "failed": figures.failed + figures.cancelled,
        "total_input_tokens": figures.total_input_tokens,
        "total_output_tokens": figures.total_output_tokens,
        "request_throughput": figures.request_throughput,
        "request_goodput": figures.goodput,
        "request_goodput:": figures.goodput,  # benchmark_serving's key does end in a colon
        "output_throughput": figures.output_throughput,
        "total_token_throughput": figures.total_token_throughput,
        "user_throughput": figures.user_throughput,
        "max_output_tokens_per_s": figures.peak_output_throughput,
        "max_concurrent_requests": figures.peak_concurrency,
    }
    for name, distribution in serving_latencies(figures).items():
        document |= {f"{key}_{name}_ms": value for key, value in _statistics(distribution).items()}
    return document


def serving_latencies(figures: Figures) -> Mapping[str, Distribution]:
    """The latencies by these tools' names, in the order of their tables."""
    return {"ttft": figures.ttft_ms, "tpot": figures.tpot_ms, "itl": figures.chunk_gap_ms, "e2el": figures.e2el_ms}


def _statistics(values: Distribution) -> Mapping[str, float]:
    return {
        "mean": values.mean,
        "median": values.p50,
        "std": values.std,
        "p50": values.p50,
        "p90": values.p90,
        "p95": values.p95,
        "p99": values.p99,
    }


_WIDTH = 50
_LABEL_WIDTH = 40
_SECTIONS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def serving_table(load: LoadPoint, figures: Figures) -> str:
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]
    lines += (f"{label + ':':<{_LABEL_WIDTH}} {value}" for label, value in _totals(load, figures))
    for name, latency in serving_latencies(figures).items():
        lines.append(f"{_SECTIONS[name]:-^{_WIDTH}}")
        for statistic, value in (("Mean", latency.mean), ("Median", latency.p50), ("P99", latency.p99)):
            lines.append(f"{f'{statistic} {name.upper()} (ms):':<{_LABEL_WIDTH}} {value:.2f}")
    return "\n".join([*lines, "=" * _WIDTH])


def _totals(load: LoadPoint, figures: Figures) -> Iterator[tuple[str, str]]:
    yield "Successful requests", str(figures.completed)
    yield "Failed requests", str(figures.failed + figures.cancelled)
    if load.concurrency is not None:
        yield "Maximum request concurrency", str(load.concurrency)
    if load.rate not in (None, math.inf):
        yield "Request rate configured (RPS)", f"{load.rate:.2f}"
    yield "Benchmark duration (s)", f"{figures.duration_s:.2f}"
    yield "Total input tokens", str(figures.total_input_tokens)
    yield "Total generated tokens", str(figures.total_output_tokens)
    yield "Request throughput (req/s)", f"{figures.request_throughput:.2f}"
    if figures.goodput is not None:
        yield "Request goodput (req/s)", f"{figures.goodput:.2f}"
    yield "Output token throughput (tok/s)", f"{figures.output_throughput:.2f}"
    yield "Peak output token throughput (tok/s)", f"{figures.peak_output_throughput:.2f}"
    yield "Peak concurrent requests", f"{figures.peak_concurrency:.2f}"
    yield "Total token throughput (tok/s)", f"{figures.total_token_throughput:.2f}"


_RULE = "=" * 59
_PERCENTILES = ("p50", "p90", "p95", "p99")
_TRTLLM_STATISTICS = {"minimum": "min", "maximum": "max", "average": "mean"} | {name: name for name in _PERCENTILES}
"""trtllm-bench's names of statistics, and ours."""


def trtllm_document(result: BenchResult, figures: Figures) -> dict[str, Any]:
    streamed = figures.ttft_ms.count > 0
    return {
        "engine": {
            "model": result.model,
            "model_path": result.server.get("checkpoint"),
            "engine_dir": None,
            "version": result.server.get("engine_version"),
            "backend": result.server.get("engine"),
            "dtype": None,
            "kv_cache_dtype": None,
            "quantization": None,
        },
        "machine": None,
        "world_info": {
            "tp_size": None,
            "pp_size": None,
            "ep_size": None,
            "world_size": result.gpus,
            "max_batch_size": None,
            "max_num_tokens": None,
            "scheduling_policy": None,
            "kv_cache_percentage": None,
            "issue_rate": None,
        },
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
            "request_latency_percentiles_ms": _trtllm_statistics(figures.e2el_ms),
        },
        **({"streaming_metrics": _streaming_metrics(figures)} if streamed else {}),
        "decoding_stats": None,
        "dataset": {
            "isl_stats": _trtllm_statistics(figures.input_tokens),
            "osl_stats": _trtllm_statistics(figures.output_tokens),
            "num_requests": figures.completed,
            "dataset_path": result.dataset,
            "max_isl": figures.input_tokens.max,
            "max_osl": figures.output_tokens.max,
            "avg_isl": figures.input_tokens.mean,
            "avg_osl": figures.output_tokens.mean,
        },
    }


def trtllm_table(document: Mapping[str, Any]) -> str:
    """Return the table of a document of `trtllm_document`: the sections about requests and performance."""
    return "\n".join([*_request_lines(document["request_info"]), "", *_performance_lines(document)])


def _trtllm_statistics(values: Distribution) -> dict[str, float]:
    return {name: getattr(values, ours) for name, ours in _TRTLLM_STATISTICS.items()}


def _streaming_metrics(figures: Figures) -> dict[str, Any]:
    return {
        "token_output_speed_tok_s": figures.decode_speed.mean,
        "avg_ttft_ms": figures.ttft_ms.mean,
        "avg_tpot_ms": figures.tpot_ms.mean,
        "tpot_percentiles": _trtllm_statistics(figures.tpot_ms),
        "ttft_percentiles": _trtllm_statistics(figures.ttft_ms),
        "gen_tps_percentiles": _trtllm_statistics(figures.decode_speed),
    }


def _request_lines(requests: Mapping[str, Any]) -> Iterator[str]:
    yield from _section("REQUEST DETAILS")
    yield f"{'Number of requests:':<31} {requests['num_requests']}"
    yield f"{'Number of concurrent requests:':<31} {requests['avg_num_concurrent_requests']:.4f}"
    yield f"{'Average Input Length (tokens):':<31} {requests['avg_input_length']:.4f}"
    yield f"{'Average Output Length (tokens):':<31} {requests['avg_output_length']:.4f}"


def _performance_lines(document: Mapping[str, Any]) -> Iterator[str]:
    performance, streaming = document["performance"], document.get("streaming_metrics")
    yield from _section("PERFORMANCE OVERVIEW")
    yield _line("Request Throughput (req/sec)", performance["request_throughput_req_s"])
    yield _line("Total Output Throughput (tokens/sec)", performance["system_output_throughput_tok_s"])
    yield _line("Total Token Throughput (tokens/sec)", performance["system_total_throughput_tok_s"])
    yield _line("Total Latency (ms)", performance["total_latency_ms"])
    yield _line("Average request latency (ms)", performance["avg_request_latency_ms"])
    yield _line("Per User Output Throughput [w/ ctx] (tps/user)", performance["output_throughput_per_user_tok_s"])
    if performance["output_throughput_per_gpu_tok_s"] is not None:
        yield _line("Per GPU Output Throughput (tps/gpu)", performance["output_throughput_per_gpu_tok_s"])
    if streaming is not None:
        yield _line("Average time-to-first-token [TTFT] (ms)", streaming["avg_ttft_ms"])
        yield _line("Average time-per-output-token [TPOT] (ms)", streaming["avg_tpot_ms"])
        yield _line("Per User Output Speed (tps/user)", streaming["token_output_speed_tok_s"])
        yield from ("", "-- Per-Request Time-per-Output-Token [TPOT] Breakdown (ms)", "")
        yield from _breakdown("TPOT", streaming["tpot_percentiles"])
        yield from ("", "-- Per-Request Time-to-First-Token [TTFT] Breakdown (ms)", "")
        yield from _breakdown("TTFT", streaming["ttft_percentiles"])
        yield from ("", "-- Per-Request Generation Throughput [GTPS] Breakdown (tps/user)", "")
        yield from _breakdown("GTPS", streaming["gen_tps_percentiles"])
    yield from ("", "-- Request Latency Breakdown (ms) -----------------------", "")
    yield from _breakdown("Latency", performance["request_latency_percentiles_ms"])


def _section(text: str) -> tuple[str, str, str]:
    return (_RULE, f"= {text}", _RULE)


def _line(label: str, value: float) -> str:
    return f"{label + ':':<49} {value:.4f}"


def _breakdown(name: str, statistics: Mapping[str, float]) -> Iterator[str]:
    return (f"[{name}] {statistic.upper():<7}: {value:.4f}" for statistic, value in statistics.items())
