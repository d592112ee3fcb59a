"""A plan's profile and limits from what a benchmark measured."""

import argparse
import json
from dataclasses import replace

import pytest

from deepseek_triton_tools.bench.expected import choose_load
from deepseek_triton_tools.bench.result import BenchPoint, BenchRun, Distribution, RequestRecord, Slo, write_result
from deepseek_triton_tools.bench.run_figures import run_figures
from deepseek_triton_tools.bench.workload import LoadPoint
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.cli.plan_options import slo
from deepseek_triton_tools.tool_errors import ToolError
from support.made_up_bench import made_up_result


def run_of(concurrency, step_s, outcome="completed"):
    """Each user has one request of 1,024 + 101 tokens; the first one comes after ten steps."""
    times = {"chunk_s": [10 * step_s, 110 * step_s], "ended_s": 110 * step_s}
    tokens = {"chunk_tokens": [1, 100], "num_input_tokens": 1024, "num_output_tokens": 101}
    records = [RequestRecord(index=user, outcome=outcome, **times, **tokens) for user in range(concurrency)]
    return BenchRun(figures=run_figures(records, concurrency=concurrency))


def measured_point(users, *runs):
    return BenchPoint(load=LoadPoint(num_requests=users, concurrency=users), runs=runs)


STEPS = {1: 0.010, 8: 0.012, 64: 0.018, 512: 0.050}
"""Seconds of a step by concurrency."""


def point(users, step_s, **load):
    load = LoadPoint(num_requests=users, **(load or {"concurrency": users}))
    return BenchPoint(load=load, runs=(run_of(users, step_s),))


def sweep(points=None, slo=None):
    return made_up_result(points or [point(*each) for each in STEPS.items()], slo=slo or Slo(), server={})


def chosen(points, slo=None):
    """The concurrency that is planned for."""
    return choose_load(sweep(points), slo or Slo()).workload.concurrency


def test_the_load_with_the_most_tokens_within_the_limits_is_chosen():
    cases = {
        Slo(): (512, "throughput", None),
        Slo(tpot_ms=20): (64, "balanced", 64),
        Slo(tpot_ms=20, ttft_ms=150): (8, "balanced", 8),
        Slo(e2el_ms=1101): (1, "latency", 1),
    }
    loads = {limits: choose_load(sweep(), limits) for limits in cases}
    assert {limits: (load.workload.concurrency, load.profile, load.max_inflight) for limits, load in loads.items()} == (
        cases
    )
    assert {(load.workload.isl, load.workload.osl) for load in loads.values()} == {(1024, 101)}
    assert loads[Slo()].why.startswith("measured: concurrency 512 gave")
    assert loads[Slo()].why.endswith("of 4 loads")
    assert "of 1 load, " in choose_load(sweep([point(1, 0.01)]), Slo(tpot_ms=20)).why


def test_a_run_that_misses_a_limit_is_enough_to_miss_it():
    varied = measured_point(64, run_of(64, 0.018), run_of(64, 0.050))
    assert chosen([point(8, 0.012), varied], Slo(tpot_ms=20)) == 8


def test_an_open_loop_is_planned_for_as_many_as_were_under_way():
    assert chosen([point(64, 0.018, rate=8.0)]) == 64


def test_limits_that_no_load_keeps_are_refused_with_the_nearest():
    with pytest.raises(ToolError, match=r"TPOT 5 ms .* nearest is concurrency 1 with TPOT p99 10 ms"):
        choose_load(sweep(), Slo(tpot_ms=5))


def test_loads_that_are_none_to_plan_for():
    """What failed, was cancelled by the server, or was interrupted; what the client left is no error."""
    figures = replace(run_of(8, 0.01).figures, cancelled=2)
    left, shut = (BenchRun(figures=replace(figures, errors=errors)) for errors in ({}, {"shutting down": 2}))
    interrupted = replace(run_of(8, 0.012), interrupted=True)
    for run, is_one in ((left, True), (shut, False), (run_of(8, 0.01, outcome="failed"), False), (interrupted, False)):
        measured = measured_point(8, run)
        assert chosen([point(1, 0.01), measured]) == (8 if is_one else 1)
        if not is_one and not run.interrupted:
            with pytest.raises(ToolError, match="without errors"):
                chosen([measured])


def test_limits_of_the_benchmark_are_judged_by_the_requests_that_kept_them():
    """Of 40 requests, one has a gap of 300 ms among its 101 tokens: a fortieth misses, but not the 99th percentile."""
    limits = Slo(itl_ms=50)
    tokens = {"chunk_tokens": [1] * 101, "num_input_tokens": 10, "num_output_tokens": 101}
    records = [
        RequestRecord(index=user, ended_s=4.0, chunk_s=[0.01 * n + 0.3 * (user == 0 < n) for n in range(101)], **tokens)
        for user in range(40)
    ]
    run = BenchRun(figures=run_figures(records, slo=limits))
    uneven = measured_point(40, run)
    message = r"nearest is concurrency 40 with ITL p99 10 ms, 97\.5% of the requests within all limits"
    with pytest.raises(ToolError, match=message):
        choose_load(sweep([uneven], limits), limits)
    assert choose_load(sweep([uneven], limits), Slo(itl_ms=49)).workload.concurrency == 40
    kept = replace(uneven, runs=(replace(run, figures=replace(run.figures, good_share=0.99)),))
    assert choose_load(sweep([kept], limits), limits).workload.concurrency == 40


def test_a_limit_of_what_was_not_measured_is_refused():
    one_token = replace(point(8, 0.01).runs[0].figures, tpot_ms=Distribution(), itl_ms=Distribution())
    without = measured_point(8, BenchRun(figures=one_token))
    with pytest.raises(ToolError, match="measured no TPOT and no ITL"):
        choose_load(sweep([without]), Slo(ttft_ms=500, tpot_ms=20, itl_ms=30))
    assert chosen([without, point(1, 0.01)], Slo(tpot_ms=20)) == 1


def test_limits_are_read_or_refused():
    assert slo("ttft=500, tpot=20.5,itl=30,e2el=1e4") == Slo(ttft_ms=500, tpot_ms=20.5, itl_ms=30, e2el_ms=10_000)
    for text in ("ttft", "ttft=", "ttft=0", "ttft=inf", "ttft=nan", "ttfb=3", "", "ttft=5,,"):
        with pytest.raises(argparse.ArgumentTypeError, match="of ttft, tpot, itl, e2el"):
            slo(text)
    with pytest.raises(argparse.ArgumentTypeError, match="one limit of ttft"):
        slo("ttft=1,ttft=2")


@pytest.fixture
def measured(tmp_path):
    write_result(sweep(slo=Slo(tpot_ms=20)), tmp_path / "bench.json")
    return tmp_path


def planned(capsys, *words):
    assert main(["plan", "deepseek-r1", "--gpu", "h200", *words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    return document, {setting["key"]: setting for setting in document["settings"]}


def test_a_plan_takes_workload_and_profile_of_a_benchmark_and_says_why(measured, capsys):
    document, settings = planned(capsys, "--from-bench", str(measured))
    assert document["profile"] == "balanced"
    assert document["workload"] == {"isl": 1024, "osl": 101, "concurrency": 64}
    assert settings["max_batch_size"]["value"] == 64
    assert "measured: concurrency 64 gave" in settings["max_batch_size"]["reason"]
    assert settings["triton_config.max_inflight"]["value"] == 64
    assert settings["triton_config.max_inflight"]["reason"].startswith("measured: ")
    assert set(document["measured"]) == {"--concurrency", "--profile", "triton_config.max_inflight"}


def test_options_that_are_given_go_before_what_was_measured(measured, capsys):
    given = ("--concurrency", "32", "--profile", "throughput", "--set", "triton_config.max_inflight=40")
    document, settings = planned(capsys, "--from-bench", str(measured), *given)
    assert document["profile"] == "throughput"
    assert document["workload"] == {"isl": 1024, "osl": 101, "concurrency": 32}
    assert settings["triton_config.max_inflight"]["reason"] == "set by hand"
    assert document["measured"] == {}
    document, _ = planned(capsys, "--from-bench", str(measured / "bench.json"), "--slo", "tpot=11")
    assert document["workload"]["concurrency"] == 1


@pytest.mark.slow
def test_a_benchmark_of_another_model_or_engine_is_said(tmp_path, capsys):
    cases = {
        (): None,
        ("deepseek-r1", "tensorrt_llm"): None,
        ("deepseek-r1-fp4", "tensorrt_llm"): None,  # other weights
        ("own-folder", "tensorrt_llm"): None,  # an unknown name
        ("tiny", "simulated"): "tiny on the simulated engine",
        ("deepseek-r1", "vllm"): "deepseek-r1 on the vllm engine",
        ("deepseek-v3-0324", "tensorrt_llm"): "deepseek-v3-0324 on the tensorrt_llm engine",
    }
    for server, of in cases.items():
        write_result(
            replace(sweep(), server=dict(zip(("name", "engine"), server, strict=False))), tmp_path / "bench.json"
        )
        document, _ = planned(capsys, "--from-bench", str(tmp_path))
        says = of and f"measured: of {of}, not of deepseek-r1 on tensorrt_llm"
        assert document["measured"].get("--from-bench") == says
    assert main(["plan", "deepseek-r1", "--gpu", "h200", "--from-bench", str(tmp_path)]) == 0
    assert says in " ".join(capsys.readouterr().out.split())


def test_vllm_takes_them_too(measured, capsys):
    _, settings = planned(capsys, "--engine", "vllm", "--gpus", "8", "--from-bench", str(measured))
    assert settings["max_num_seqs"]["value"] == 64
    assert "measured: concurrency 64 gave" in settings["max_num_seqs"]["reason"]
    assert settings["triton_config.max_inflight"]["reason"].startswith("measured: ")


@pytest.mark.slow
def test_the_stamp_makes_the_same_repository_without_the_benchmark(measured, tmp_path, capsys):
    options = ("deepseek-r1", "--gpu", "h200", "--gpus", "8", "--from-bench", str(measured))
    assert main(["build", *options, "--output", str(tmp_path / "r1")]) == 0
    (manifest,) = (tmp_path / "r1").rglob("deepseek-triton.json")
    stamp = json.loads(manifest.read_text())["options"]
    assert "--concurrency 64" in stamp
    assert "triton_config.max_inflight=64" in stamp
    assert main(["plan", *stamp.split(), "--diff", str(tmp_path / "r1")]) == 0
    assert "max_inflight: 64" in (tmp_path / "r1" / "tensorrt_llm" / "1" / "model.yaml").read_text()


def test_what_can_not_be_planned_is_said_in_a_line(measured, capsys):
    cases = {
        ("deepseek-r1", "--slo", "tpot=20"): (2, "--from-bench"),
        ("deepseek-r1", "--from-bench", "nowhere.json"): (2, "nowhere.json"),
        ("deepseek-r1", "--from-bench", str(measured), "--slo", "tpot=1"): (1, "TPOT 1 ms"),
        ("deepseek-r9", "--from-bench", str(measured)): (2, "deepseek-r9"),  # named before the benchmark
    }
    for words, (code, says) in cases.items():
        assert main(["plan", *words, "--gpu", "h200"]) == code
        assert says in capsys.readouterr().err
