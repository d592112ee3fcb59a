"""What `plan --sla` computes beside what was measured, as tables; docs/measurements.md has the gist.

    make .venv-aiconfigurator/.installed
    python tests/bench/sla_accuracy.py [--python .venv-aiconfigurator/bin/python]

The paces are AIConfigurator's; the formulas and the margins are those of the search. Errors are of the computed figure:
+10 % tokens/s is more than was measured, -10 % TPOT is less. The first run asks for the tables, which takes a minute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "model_repository/tensorrt_llm/1"))

from deepseek_backend.engines.simulated.presets import PRESETS, read_table  # noqa: E402
from deepseek_triton_tools.sla.fleets import (  # noqa: E402
    TOKENS_PER_STEP,
    PacedServer,
    SlaWorkload,
    Times,
    aggregated_times,
    burst_ttft_ms,
    context_ttft_ms,
    generation_tpot_ms,
    margin_for,
    prompt_ms,
)
from deepseek_triton_tools.sla.paces import (  # noqa: E402
    PacedModel,
    ServerLayout,
    SiliconPaces,
)


def tp(size: int, experts: int) -> ServerLayout:
    return ServerLayout(num_gpus=size, expert_parallel_size=experts)


def dp(size: int) -> ServerLayout:
    return ServerLayout(num_gpus=size, expert_parallel_size=size, attention_dp=True)


@dataclass(frozen=True)
class PublishedRun:
    """A run with 1,024 tokens in and 2,048 out of each request."""

    preset: str
    """Name of the simulated engine's preset, which has the limits of its command line."""
    gpu: str
    precision: str
    kv_dtype: str
    layout: ServerLayout
    users: int
    output_tps: float


PUBLISHED = [
    PublishedRun("h200x8-r1-fp8-max-throughput", "h200", "fp8", "bf16", dp(8), 1024, 11489),
    PublishedRun("b200x8-r1-fp4-max-throughput", "b200", "fp4", "bf16", dp(8), 3072, 36384),
    PublishedRun("b200x8-r1-0528-fp4-fp8kv-max-throughput", "b200", "fp4", "fp8", dp(8), 7168, 43146),
    PublishedRun("h200x8-r1-fp8-min-latency", "h200", "fp8", "bf16", tp(8, 4), 1, 158.1),
    PublishedRun("b200x8-r1-fp4-min-latency", "b200", "fp4", "bf16", tp(8, 2), 1, 274.4),
]
""""How to get best performance on DeepSeek-R1 in TensorRT LLM" (NVIDIA TensorRT-LLM documentation)."""


@dataclass(frozen=True)
class MeasuredRow:
    """A measured load of 8 x H200 servers, FP8, without multi-token prediction."""

    isl: int
    osl: int
    layout: ServerLayout
    rows: int
    """Requests of each rank."""
    ttft_ms: float
    tpot_ms: float
    num_servers: int = 1
    context: ServerLayout | None = None
    """Layout of the context servers; None for an aggregated server."""
    num_context: int = 0

    @property
    def users(self) -> int:
        """Requests of all servers."""
        return self.rows * self.layout.num_ranks * self.num_servers


MEASURED = [
    # TensorRT-LLM of 2025-11-02: each load with 1,024 output tokens.
    *(
        MeasuredRow(isl, 1024, tp(8, 1), rows, ttft, tpot)
        for isl, rows, ttft, tpot in [
            (1024, 4, 308, 13.81),
            (1024, 8, 293, 16.39),
            (1024, 16, 380, 20.39),
            (1024, 32, 616, 26.12),
            (1024, 64, 755, 33.96),
            (8192, 4, 447, 14.88),
            (8192, 8, 539, 18.67),
            (8192, 16, 727, 25.24),
            (8192, 32, 996, 35.8),
            (8192, 64, 4995, 48.29),
        ]
    ),
    # TensorRT-LLM 1.1.0rc2.post2: each load of attention data parallelism.
    *(
        MeasuredRow(isl, osl, dp(8), rows, ttft, tpot)
        for isl, osl, rows, ttft, tpot in [
            (1024, 1024, 16, 3201, 31.46),
            (1024, 1024, 32, 2998, 37.23),
            (1024, 8192, 32, 5180, 30.4),
            (8192, 1024, 8, 6422, 39.75),
            (8192, 1024, 16, 8863, 61.19),
            (8192, 1024, 32, 12223, 101.78),
        ]
    ),
    # Dynamo 0.8.1.post1, TensorRT-LLM 1.2.0rc6.post1: each load whose context servers have tensor parallelism.
    *(
        MeasuredRow(isl, 1024, layout, rows, ttft, tpot, num_servers, tp(8, 8), num_context)
        for isl, num_context, layout, num_servers, rows, ttft, tpot in [
            (1024, 1, tp(8, 8), 9, 4, 673, 13.39),
            (1024, 1, tp(8, 8), 9, 8, 876, 16.26),
            (1024, 1, tp(8, 8), 9, 16, 1037, 20.17),
            (1024, 1, tp(8, 8), 9, 32, 1371, 25.29),
            (1024, 1, tp(8, 8), 9, 64, 1808, 30.9),
            (8192, 1, tp(8, 8), 7, 4, 1095, 13.8),
            (8192, 1, tp(8, 8), 6, 8, 1719, 16.81),
            (8192, 1, tp(8, 8), 3, 16, 1449, 21.36),
            (8192, 2, tp(8, 8), 5, 32, 2353, 27.55),
            (8192, 2, dp(8), 3, 8, 2599, 33.11),
            (8192, 1, dp(8), 1, 16, 7691, 36.34),
            (8192, 5, dp(8), 3, 32, 8764, 44.03),
            (8192, 3, dp(8), 1, 64, 3970, 58.27),
        ]
    ),
]
"""Rows of DeepSeek on 8 x H200 and TensorRT-LLM in `silicon_sample.csv` of aiconfigurator-core 0.12.0 (Apache-2.0),
which has them from InferenceX. The table does not tell whether multi-token prediction was on: rows at whose pace it was
are left out, and rows that repeat others."""


def _server(paces: SiliconPaces, model: PacedModel, layout: ServerLayout, max_num_tokens: int) -> PacedServer:
    table = paces.tables(model, [layout])[layout]
    if isinstance(table, str):
        raise SystemExit(f"{layout}: {table}")
    drafts = model.num_draft_tokens
    return PacedServer(
        table=read_table(
            table, num_ranks=layout.num_ranks, num_draft_tokens=drafts, kv_cache_tokens=1 << 30, kv_token_bytes=70272
        ),
        max_num_tokens=max_num_tokens,
        tokens_per_step=TOKENS_PER_STEP[drafts],
    )


def published_table(paces: SiliconPaces) -> Iterator[str]:
    yield "| run | measured, tokens/s | computed | error | with margin | error |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for run in PUBLISHED:
        preset = PRESETS[run.preset]
        model = PacedModel(
            architecture="deepseek-v3",
            precision=run.precision,
            gpu=run.gpu,
            kv_dtype=run.kv_dtype,
            num_draft_tokens=preset.deployment.num_draft_tokens,
        )
        server = _server(paces, model, run.layout, preset.max_num_tokens)
        workload = SlaWorkload(isl=1024, osl=2048)
        times = aggregated_times(server, workload, run.users // run.layout.num_ranks)
        tps = 1000 * run.users * workload.osl / times.e2el_ms(workload.osl)
        slow = tps / margin_for(run.users)
        kv = f" with an {run.kv_dtype.upper()} KV cache" if run.kv_dtype == "fp8" else ""
        users = f"{run.users:,} users" if run.users > 1 else "one user, three drafts"
        cells = [
            f"8 x {run.gpu.upper()}, {run.precision.upper()}{kv}, {users}",
            f"{run.output_tps:,.0f}",
            f"{tps:,.0f}",
            _error(tps, run.output_tps),
            f"{slow:,.0f}",
            _error(slow, run.output_tps),
        ]
        yield f"| {' | '.join(cells)} |"


def measured_table(paces: SiliconPaces) -> Iterator[str]:
    yield "| server | tokens | users | TPOT ms | computed | error | with margin | TTFT ms | at random | all at once |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    found: list[tuple[MeasuredRow, Times, float]] = []
    for row in MEASURED:
        times, burst = computed_times(paces, row)
        found.append((row, times, burst))
        margin = margin_for(row.rows * row.layout.num_ranks)
        name = f"{row.num_context} x {row.context} context + {row.num_servers} x " if row.context else ""
        cells = [
            f"{name}{row.layout}",
            f"{row.isl:,} + {row.osl:,}",
            f"{row.users:,}",
            f"{row.tpot_ms:.1f}",
            f"{times.tpot_ms:.1f}",
            _error(times.tpot_ms, row.tpot_ms),
            _error(times.tpot_ms * margin, row.tpot_ms),
            f"{row.ttft_ms:,.0f}",
            f"{times.ttft_ms:,.0f}",
            f"{burst:,.0f}",
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "| servers | rows | TPOT, computed / measured: least, median, most | not short with margin | TTFT between |"
    yield "| --- | --- | --- | --- | --- |"
    kinds: dict[str, Callable[[MeasuredRow], bool]] = {
        "aggregated, TP": lambda row: row.context is None and not row.layout.attention_dp,
        "aggregated, attention DP": lambda row: row.context is None and row.layout.attention_dp,
        "disaggregated": lambda row: row.context is not None,
    }
    for kind, is_kind in kinds.items():
        of_kind = [(row, times, burst) for row, times, burst in found if is_kind(row)]
        shares = [
            (times.tpot_ms / row.tpot_ms, margin_for(row.rows * row.layout.num_ranks)) for row, times, _ in of_kind
        ]
        tpot = [share for share, _ in shares]
        cells = [
            kind,
            str(len(of_kind)),
            f"{min(tpot):.2f}, {statistics.median(tpot):.2f}, {max(tpot):.2f}",
            str(sum(share * margin >= 1 for share, margin in shares)),
            str(sum(times.ttft_ms <= row.ttft_ms <= burst for row, times, burst in of_kind)),
        ]
        yield f"| {' | '.join(cells)} |"


def computed_times(paces: SiliconPaces, row: MeasuredRow) -> tuple[Times, float]:
    """Return TTFT and TPOT of a row, and TTFT where all its requests come at once.

    An iteration is taken to hold 8,192 tokens, or a longer prompt whole: the rows don't tell max_num_tokens.
    """
    model = PacedModel(architecture="deepseek-v3", precision="fp8", gpu="h200", kv_dtype="bf16")
    workload = SlaWorkload(isl=row.isl, osl=row.osl)
    tokens = max(8192, row.isl + row.rows)
    server = _server(paces, model, row.layout, tokens)
    if row.context is None:
        return aggregated_times(server, workload, row.rows), burst_ttft_ms(server, workload, row.rows)
    tpot = generation_tpot_ms(server, workload, row.rows)
    context = _server(paces, model, row.context, tokens)
    prompt, _ = prompt_ms(context, row.isl)
    ranks = row.num_context * row.context.num_ranks
    busy = min(0.9, row.users * prompt / (ranks * (prompt + row.osl * tpot)))
    burst = burst_ttft_ms(context, workload, row.users / ranks)
    return Times(ttft_ms=context_ttft_ms(context, workload, busy), tpot_ms=tpot), burst


def _error(computed: float, measured: float) -> str:
    return f"{computed / measured - 1:+.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-aiconfigurator/bin/python")
    paces = SiliconPaces(parser.parse_args().python)
    for lines in (published_table(paces), [""], measured_table(paces)):
        print(*lines, sep="\n")


if __name__ == "__main__":
    main()
