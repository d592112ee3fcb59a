"""One run as trtllm-bench reports it: the JSON of its `--report_json`, and its table.

Sections, keys and labels are those of tensorrt_llm/bench/dataclasses/reporting.py, releases 1.0 to 1.2. There is null
for whatever only the engine's own process knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deepseek_triton_tools.bench.measuring.figures import Distribution, Figures
from deepseek_triton_tools.bench.results.bench_result import BenchResult

_RULE = "=" * 59
_PERCENTILES = ("p50", "p90", "p95", "p99")
_STATISTICS = {"minimum": "min", "maximum": "max", "average": "mean"} | {name: name for name in _PERCENTILES}
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
            "request_latency_percentiles_ms": _statistics(figures.e2el_ms),
        },
        **({"streaming_metrics": _streaming_metrics(figures)} if streamed else {}),
        "decoding_stats": None,
        "dataset": {
            "isl_stats": _statistics(figures.input_tokens),
            "osl_stats": _statistics(figures.output_tokens),
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


def _statistics(values: Distribution) -> dict[str, float]:
    return {name: getattr(values, ours) for name, ours in _STATISTICS.items()}


def _streaming_metrics(figures: Figures) -> dict[str, Any]:
    return {
        "token_output_speed_tok_s": figures.decode_speed.mean,
        "avg_ttft_ms": figures.ttft_ms.mean,
        "avg_tpot_ms": figures.tpot_ms.mean,
        "tpot_percentiles": _statistics(figures.tpot_ms),
        "ttft_percentiles": _statistics(figures.ttft_ms),
        "gen_tps_percentiles": _statistics(figures.decode_speed),
    }


def _request_lines(requests: Mapping[str, Any]) -> Iterator[str]:
    yield from _heading("REQUEST DETAILS")
    yield f"{'Number of requests:':<31} {requests['num_requests']}"
    yield f"{'Number of concurrent requests:':<31} {requests['avg_num_concurrent_requests']:.4f}"
    yield f"{'Average Input Length (tokens):':<31} {requests['avg_input_length']:.4f}"
    yield f"{'Average Output Length (tokens):':<31} {requests['avg_output_length']:.4f}"


def _performance_lines(document: Mapping[str, Any]) -> Iterator[str]:
    performance, streaming = document["performance"], document.get("streaming_metrics")
    yield from _heading("PERFORMANCE OVERVIEW")
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


def _heading(text: str) -> tuple[str, str, str]:
    return (_RULE, f"= {text}", _RULE)


def _line(label: str, value: float) -> str:
    return f"{label + ':':<49} {value:.4f}"


def _breakdown(name: str, statistics: Mapping[str, float]) -> Iterator[str]:
    return (f"[{name}] {statistic.upper():<7}: {value:.4f}" for statistic, value in statistics.items())
