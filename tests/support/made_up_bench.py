"""Results of benchmarks that nobody ran: figures by a formula, for tests of what shows them."""

import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepseek_triton_tools.bench import result
from deepseek_triton_tools.bench.workload import LoadPoint

INPUT_TOKENS = OUTPUT_TOKENS = 1000


def distribution(median: float, count: int = 100) -> result.Distribution:
    return result.Distribution(
        mean=median * 1.05,
        std=median * 0.2,
        min=median * 0.7,
        p50=median,
        p90=median * 1.3,
        p95=median * 1.5,
        p99=median * 2,
        max=median * 2.5,
        count=count,
    )


def made_up_figures(concurrency: int, *, slower: float = 1.0, **others: Any) -> result.Figures:
    """Figures of a server whose step takes 8 ms, and longer with the number of its requests."""
    tpot = slower * (8 + 0.09 * concurrency)
    ttft = slower * (90 + 4 * concurrency)
    e2el = ttft + (OUTPUT_TOKENS - 1) * tpot
    completed = 10 * concurrency
    rate = concurrency / e2el * 1000
    return result.Figures(
        **{
            "duration_s": completed / rate,
            "completed": completed,
            "failed": 0,
            "cancelled": 0,
            "total_input_tokens": completed * INPUT_TOKENS,
            "total_output_tokens": completed * OUTPUT_TOKENS,
            "request_throughput": rate,
            "output_throughput": rate * OUTPUT_TOKENS,
            "total_token_throughput": rate * (INPUT_TOKENS + OUTPUT_TOKENS),
            "user_throughput": 1000 * OUTPUT_TOKENS / e2el,
            "decode_user_throughput": 1000 / tpot,
            "ttft_ms": distribution(ttft, completed),
            "tpot_ms": distribution(tpot, completed),
            "itl_ms": distribution(tpot, completed * OUTPUT_TOKENS),
            "chunk_gap_ms": distribution(tpot, completed * OUTPUT_TOKENS),
            "e2el_ms": distribution(e2el, completed),
            "lag_ms": result.Distribution(),
            **others,
        }
    )


def made_up_run(concurrency: int, *, slower: float = 1.0, **others: Any) -> result.BenchRun:
    figures = made_up_figures(concurrency, slower=slower, **others)
    num_bins = 60
    width = figures.duration_s / num_bins
    each = figures.completed / num_bins
    bins = [
        result.TimelineBin(
            at_s=n * width,
            inflight=concurrency * min(1, (n + 1) / 3, (num_bins - n) / 6),
            output_tokens=round(figures.output_throughput * width * (1 + 0.05 * math.sin(n)) * min(1, n / 3)),
            requests_sent=int(each * (n + 1)) - int(each * n),
            requests_ended=int(each * n) - int(each * max(0, n - 1)),
            failed=figures.failed if n == num_bins // 2 else 0,
        )
        for n in range(num_bins)
    ]
    return result.BenchRun(figures=figures, timeline=tuple(bins))


def made_up_point(concurrency: int, runs: Sequence[float] = (1.0,), **others: Any) -> result.BenchPoint:
    """`runs`: how much slower each repeated run is."""
    load = LoadPoint(num_requests=10 * concurrency, concurrency=concurrency)
    return result.BenchPoint(
        load=load, runs=tuple(made_up_run(concurrency, slower=slower, **others) for slower in runs)
    )


def made_up_result(points: Sequence[result.BenchPoint] | None = None, **others: Any) -> result.BenchResult:
    given: dict[str, Any] = {
        "date": "2026-01-02T03:04:05Z",
        "urls": ("http://127.0.0.1:8000",),
        "endpoint": "triton-http",
        "model": "made-up",
        "gpus": 8,
        "dataset": f"made up: {INPUT_TOKENS} input tokens, {OUTPUT_TOKENS} output tokens",
        "slo": result.Slo(),
        "points": tuple(points or map(made_up_point, (1, 4, 16, 64, 256))),
        "command": "deepseek-triton bench http://127.0.0.1:8000 --concurrency 1,4,16,64,256",
        "server": {"engine": "simulated", "simulation": {"preset": "made-up", "speed": 2.0}, "eos_token": "<end>"},
    }
    return result.BenchResult(**given | others)


def read_samples(path: Path) -> list[result.RequestRecord]:
    """The records of requests.jsonl.gz."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [result.RequestRecord(**json.loads(line)) for line in file]
