"""One run as other tools write it: `vllm bench serve`, benchmark_serving and trtllm-bench.

The keys of `serving_document` are those of the first two (vllm/benchmarks/serve.py and
tensorrt_llm/serve/scripts/benchmark_serving.py), as `--percentile-metrics ttft,tpot,itl,e2el` writes them.

trtllm-bench's sections and keys are those of its `--report_json` (tensorrt_llm/bench/dataclasses/reporting.py, releases
1.0 to 1.2). There is null for whatever only the engine's own process knows.
"""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any

from deepseek_triton_tools.bench.figures import Distribution, Figures
from deepseek_triton_tools.bench.result import BenchResult
from deepseek_triton_tools.bench.workload import LoadPoint

# Their inter-token latency is the time between two chunks.
_LATENCIES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "chunk_gap_ms", "e2el": "e2el_ms"}
_PERCENTILES = {name: name for name in ("p50", "p90", "p95", "p99")}
# Their names of statistics, and ours.
_SERVING_STATISTICS = {"mean": "mean", "median": "p50", "std": "std", **_PERCENTILES}
_TRTLLM_STATISTICS = {"minimum": "min", "maximum": "max", "average": "mean", **_PERCENTILES}
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
