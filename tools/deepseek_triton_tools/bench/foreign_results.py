"""One run as other tools report it: `vllm bench serve`, benchmark_serving and trtllm-bench.

The keys of `serving_document` are those of the first two (vllm/benchmarks/serve.py and
tensorrt_llm/serve/scripts/benchmark_serving.py), as `--percentile-metrics ttft,tpot,itl,e2el` writes them.

trtllm-bench's sections, keys and labels are those of its `--report_json` and its table
(tensorrt_llm/bench/dataclasses/reporting.py, releases 1.0 to 1.2). There is null for whatever only the engine's own
process knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from deepseek_triton_tools.bench.figures import Distribution, Figures
from deepseek_triton_tools.bench.result import BenchResult
from deepseek_triton_tools.bench.workload import LoadPoint

# Key -> title in the table, and our figure. Their inter-token latency is the time between two chunks.
_LATENCIES = {
    "ttft": ("Time to First Token", "ttft_ms"),
    "tpot": ("Time per Output Token (excl. 1st token)", "tpot_ms"),
    "itl": ("Inter-token Latency", "chunk_gap_ms"),
    "e2el": ("End-to-end Latency", "e2el_ms"),
}
_PERCENTILES = ("p50", "p90", "p95", "p99")
# Their names of statistics, and ours.
_SERVING_STATISTICS = {"mean": "mean", "median": "p50", "std": "std", **{name: name for name in _PERCENTILES}}
_TRTLLM_STATISTICS = {"minimum": "min", "maximum": "max", "average": "mean", **{name: name for name in _PERCENTILES}}


def run_name(load: LoadPoint, run: int = 0) -> str:
    """The name of a run's files, without an ending: "concurrency_32", and "concurrency_32_run_2" for a repeated run."""
    name = load.label.replace(", ", "_").replace(" ", "_")
    return f"{name}_run_{run + 1}" if run else name


# --- vllm bench serve, benchmark_serving ---


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
    for name, (_, figure) in _LATENCIES.items():
        statistics = _statistics(getattr(figures, figure), _SERVING_STATISTICS)
        document |= {f"{key}_{name}_ms": value for key, value in statistics.items()}
    return document


def serving_table(load: LoadPoint, figures: Figures) -> str:
    has_rate = load.rate not in (None, math.inf)
    totals = {
        "Successful requests": str(figures.completed),
        "Failed requests": str(figures.failed + figures.cancelled),
        "Maximum request concurrency": None if load.concurrency is None else str(load.concurrency),
        "Request rate configured (RPS)": f"{load.rate:.2f}" if has_rate else None,
        "Benchmark duration (s)": f"{figures.duration_s:.2f}",
        "Total input tokens": str(figures.total_input_tokens),
        "Total generated tokens": str(figures.total_output_tokens),
        "Request throughput (req/s)": f"{figures.request_throughput:.2f}",
        "Request goodput (req/s)": None if figures.goodput is None else f"{figures.goodput:.2f}",
        "Output token throughput (tok/s)": f"{figures.output_throughput:.2f}",
        "Peak output token throughput (tok/s)": f"{figures.peak_output_throughput:.2f}",
        "Peak concurrent requests": f"{figures.peak_concurrency:.2f}",
        "Total token throughput (tok/s)": f"{figures.total_token_throughput:.2f}",
    }
    lines = [f"{' Serving Benchmark Result ':=^50}"]
    lines += (f"{label + ':':<40} {value}" for label, value in totals.items() if value is not None)
    for name, (title, figure) in _LATENCIES.items():
        latency: Distribution = getattr(figures, figure)
        lines.append(f"{title:-^50}")
        for statistic, value in (("Mean", latency.mean), ("Median", latency.p50), ("P99", latency.p99)):
            lines.append(f"{f'{statistic} {name.upper()} (ms):':<40} {value:.2f}")
    return "\n".join([*lines, "=" * 50])


def _statistics(values: Distribution, names: Mapping[str, str]) -> dict[str, float]:
    return {name: getattr(values, ours) for name, ours in names.items()}


# --- trtllm-bench ---

_ENGINE = ("model", "model_path", "engine_dir", "version", "backend", "dtype", "kv_cache_dtype", "quantization")
_WORLD = (
    *("tp_size", "pp_size", "ep_size", "world_size", "max_batch_size", "max_num_tokens"),
    *("scheduling_policy", "kv_cache_percentage", "issue_rate"),
)
# Labels of the table, and keys of the document. A line without a value is left out.
_REQUESTS = {
    "Number of concurrent requests": "avg_num_concurrent_requests",
    "Average Input Length (tokens)": "avg_input_length",
    "Average Output Length (tokens)": "avg_output_length",
}
_PERFORMANCE = {
    "Request Throughput (req/sec)": "request_throughput_req_s",
    "Total Output Throughput (tokens/sec)": "system_output_throughput_tok_s",
    "Total Token Throughput (tokens/sec)": "system_total_throughput_tok_s",
    "Total Latency (ms)": "total_latency_ms",
    "Average request latency (ms)": "avg_request_latency_ms",
    "Per User Output Throughput [w/ ctx] (tps/user)": "output_throughput_per_user_tok_s",
    "Per GPU Output Throughput (tps/gpu)": "output_throughput_per_gpu_tok_s",
    "Average time-to-first-token [TTFT] (ms)": "avg_ttft_ms",
    "Average time-per-output-token [TPOT] (ms)": "avg_tpot_ms",
    "Per User Output Speed (tps/user)": "token_output_speed_tok_s",
}
_BREAKDOWNS = {
    "TPOT": ("Per-Request Time-per-Output-Token [TPOT] Breakdown (ms)", "tpot_percentiles"),
    "TTFT": ("Per-Request Time-to-First-Token [TTFT] Breakdown (ms)", "ttft_percentiles"),
    "GTPS": ("Per-Request Generation Throughput [GTPS] Breakdown (tps/user)", "gen_tps_percentiles"),
    "Latency": ("Request Latency Breakdown (ms) -----------------------", "request_latency_percentiles_ms"),
}


def trtllm_document(result: BenchResult, figures: Figures) -> dict[str, Any]:
    def statistics(values: Distribution) -> dict[str, float]:
        return _statistics(values, _TRTLLM_STATISTICS)

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


def trtllm_table(document: Mapping[str, Any]) -> str:
    """Return the table of a document of `trtllm_document`: the sections about requests and performance."""
    requests = document["request_info"]
    performance = document["performance"] | document.get("streaming_metrics", {})
    lines = [*_section("REQUEST DETAILS"), f"{'Number of requests:':<31} {requests['num_requests']}"]
    lines += _labelled(_REQUESTS, requests, 31)
    lines += ["", *_section("PERFORMANCE OVERVIEW"), *_labelled(_PERFORMANCE, performance, 49)]
    for name, (title, key) in _BREAKDOWNS.items():
        if statistics := performance.get(key):
            lines += ["", f"-- {title}", ""]
            lines += (f"[{name}] {statistic.upper():<7}: {value:.4f}" for statistic, value in statistics.items())
    return "\n".join(lines)


def _section(title: str) -> Iterable[str]:
    return ("=" * 59, f"= {title}", "=" * 59)


def _labelled(labels: Mapping[str, str], values: Mapping[str, Any], width: int) -> Iterator[str]:
    return (f"{label + ':':<{width}} {values[key]:.4f}" for label, key in labels.items() if values.get(key) is not None)
