"""One run as the JSON of benchmark_serving and `vllm bench serve`, which other programs read.

The keys are those of both tools (vllm/benchmarks/serve.py and tensorrt_llm/serve/scripts/benchmark_serving.py), as
`--percentile-metrics ttft,tpot,itl,e2el` writes them. Their inter-token latency is the time between two chunks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from deepseek_triton_tools.bench.load.load_settings import LoadPoint
from deepseek_triton_tools.bench.measuring.figures import Distribution, Figures
from deepseek_triton_tools.bench.results.bench_result import BenchResult


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
