from dataclasses import replace

import pytest

from deepseek_triton_tools.bench.expected import against_plan
from deepseek_triton_tools.bench.result import BenchPoint, BenchRun, MetricSummary, RequestRecord
from deepseek_triton_tools.bench.run_figures import run_figures
from deepseek_triton_tools.bench.workload import LoadPoint
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.cli.plan_options import OptionError
from deepseek_triton_tools.cli.plan_request import plan_named
from support.made_up_bench import made_up_result

H200 = "deepseek-r1 --gpu h200 --profile throughput --isl 1024 --osl 2048 --concurrency 1024"


def gauge(highest):
    return MetricSummary(first=0, last=0, mean=highest / 2, max=highest)


def run_of(metrics=None, users=1000, tokens=2048, outcome="completed"):
    answer = {"chunk_s": [1.0, 2.0], "chunk_tokens": [1, tokens - 1], "num_output_tokens": tokens}
    ended = {"ended_s": 2.0, "outcome": outcome, "error": "E_OVERLOADED: busy" if outcome == "failed" else ""}
    records = [RequestRecord(index=user, num_input_tokens=1024, **answer, **ended) for user in range(users)]
    return BenchRun(figures=run_figures(records, concurrency=users), server_metrics=metrics or {})


def lines(text, *runs, **facts):
    load = LoadPoint(num_requests=1, concurrency=1)
    result = made_up_result([BenchPoint(load=load, runs=(run,)) for run in runs], **facts)
    return {row[0]: tuple(row[1:]) for row in against_plan(plan_named(text), result).rows}


METRICS = {
    'deepseek_triton_engine_running_requests{model="r1"}': gauge(1024),
    'deepseek_triton_engine_waiting_requests{model="r1"}': gauge(76),
    'deepseek_triton_kv_cache_used_blocks{model="r1"}': gauge(98_304),
    'deepseek_triton_kv_cache_capacity_blocks{model="r1"}': gauge(99_600),
    'deepseek_triton_requests_refused_total{code="E_OVERLOADED"}': MetricSummary(first=5, last=12, mean=8, max=12),
    'nv_gpu_memory_used_bytes{gpu_uuid="a"}': gauge(100 * 2**30),
    'nv_gpu_memory_used_bytes{gpu_uuid="b"}': gauge(139 * 2**30),
}


@pytest.mark.slow
def test_what_the_server_says_stands_beside_the_plan():
    seen = lines(H200, run_of(), run_of(METRICS))
    assert seen["requests that run at once"] == ("1,024", "1,024", "76 waited, the batch was full")
    assert seen["requests refused or failed"][:2] == ("0", "7")
    assert seen["memory in use of a GPU, GiB"][1:] == ("139.0", "more than planned")
    (share,) = [cells for name, cells in seen.items() if "KV tokens" in name]
    assert share[1:] == ("99%", "the KV cache is full")

    limited = lines(
        f"{H200} --set triton_config.max_inflight=64", run_of({"deepseek_triton_inflight_sequences": gauge(64)})
    )
    assert limited["requests accepted at once"] == ("64", "64", "reached")
    vllm = "deepseek-r1 --engine vllm --gpu h200 --gpus 8 --concurrency 64"
    seen = lines(vllm, run_of({"vllm:num_requests_running": gauge(60)}))
    assert seen["requests that run at once"] == ("64", "60", "94% of the batch")


def test_without_metrics_the_client_says_how_many_were_under_way():
    seen = lines(H200, run_of(users=512))
    assert seen["requests under way"] == ("1,024", "512", "50% of the batch")
    assert seen["tokens of a prompt"] == ("1,024", "1,024", "")
    assert not any("KV tokens in use" in name for name in seen)
    failed = lines(H200, run_of(users=3, outcome="failed"))["requests refused or failed"]
    assert failed[1:] == ("3", "E_OVERLOADED: busy")


@pytest.mark.slow
def test_more_than_was_planned_for_is_said():
    seen = lines(H200, run_of(tokens=3000))
    assert seen["tokens of an answer"] == ("2,048", "3,000", "longer than planned")
    assert seen["tokens of both"] == ("3,072", "4,024", "longer than planned")
    seen = lines("deepseek-r1 --gpu h200 --isl 1024 --osl 2048", run_of(users=3000))
    assert seen["requests of 1,024 + 2,048 tokens in the KV cache"][2] == "more than the plan has room for"
    assert seen["requests under way"][2] == "the server allows more than the plan"


def test_gpus_are_those_of_all_servers():
    run = run_of(users=1)
    two = {"gpus": 16, "urls": ("http://a", "http://b")}
    assert [lines(H200, run, **facts)["GPUs"] for facts in ({}, {"gpus": 4}, two)] == [
        ("8", "8", ""),
        ("8", "4", "another number of them"),
        ("2 x 8", "16", ""),
    ]


def test_a_generated_folder_has_its_plan(tmp_path, capsys):
    assert main(["build", *H200.split(), "--output", str(tmp_path / "r1")]) == 0
    given, built = plan_named(H200), plan_named(str(tmp_path / "r1"))
    assert replace(built, request=given.request) == given  # the stamp names the number of GPUs


def test_what_is_no_plan_is_refused(tmp_path, subtests):
    refused = {
        str(tmp_path): "that `deepseek-triton build` wrote",
        "deepseek-r1 --gpu h200 --speed 3": "has no --speed 3",
        "deepseek-r1 --gpus many": "--gpus: expected a whole number",
        f"{tmp_path}/r1": "there is no folder .*/r1 that `deepseek-triton build` wrote",
        "./my r1": "there is no folder ./my r1 that",
        "tiny": "has no limits to compare",
    }
    for text, says in refused.items():
        with subtests.test(text), pytest.raises(OptionError, match=says):
            plan_named(text)
