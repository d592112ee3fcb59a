"""One run as the table that `vllm bench serve` prints."""

from __future__ import annotations

import math
from collections.abc import Iterator

from deepseek_triton_tools.bench.load.load_settings import LoadPoint
from deepseek_triton_tools.bench.measuring.figures import Figures
from deepseek_triton_tools.bench.results.serving_json import serving_latencies

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
