"""The servers' metrics during a run as a table: those that explain a benchmark."""

from __future__ import annotations

from collections.abc import Mapping

from deepseek_triton_tools.bench.measuring.figures import MetricSummary
from deepseek_triton_tools.bench.results.result_tables import number_text
from deepseek_triton_tools.terminal.tables import Table

GAUGES = (
    "deepseek_triton_inflight_sequences",
    "deepseek_triton_engine_running_requests",
    "deepseek_triton_engine_waiting_requests",
    "deepseek_triton_kv_cache_used_blocks",
    "deepseek_triton_kv_cache_capacity_blocks",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "nv_gpu_utilization",
    "nv_gpu_memory_used_bytes",
    "nv_gpu_power_usage",
    "DCGM_FI_DEV_GPU_UTIL",
    "DCGM_FI_DEV_FB_USED",
    "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_DEV_SM_CLOCK",
    "DCGM_FI_DEV_GPU_TEMP",
)
COUNTERS = (
    "deepseek_triton_prompt_tokens_total",
    "deepseek_triton_cached_prompt_tokens_total",
    "deepseek_triton_generated_tokens_total",
    "deepseek_triton_draft_tokens_proposed_total",
    "deepseek_triton_draft_tokens_accepted_total",
    "deepseek_triton_requests_refused_total",
    "deepseek_triton_aborts_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "nv_energy_consumption",
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
)


def metrics_table(metrics: Mapping[str, MetricSummary], run: str) -> Table | None:
    """Return a row for each metric that was not zero all the time, over all its series; None where there was none.

    :param run: for the title.
    """
    rows = []
    for name in GAUGES + COUNTERS:
        series = [each for key, each in metrics.items() if key.partition("{")[0] == name]
        increase = sum(each.increase for each in series)
        most = max((each.max for each in series), default=0.0)
        if name in COUNTERS and increase:
            rows.append((name, str(len(series)), "-", "-", number_text(increase)))
        elif name in GAUGES and most:
            mean = sum(each.mean for each in series) / len(series)
            rows.append((name, str(len(series)), number_text(mean), number_text(most), "-"))
    headings = ("metric", "series", "mean", "max", "increase")
    return Table(title=f"Servers and GPUs during {run}", headings=headings, rows=rows, is_grid=True) if rows else None
