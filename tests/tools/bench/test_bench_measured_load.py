"""A plan's profile and limits from what a benchmark measured."""

import argparse
import json
from dataclasses import replace

import pytest

from deepseek_triton_tools.bench.load.load_settings import LoadPoint
from deepseek_triton_tools.bench.measured_load import choose_load
from deepseek_triton_tools.bench.measuring.figures import Distribution, Slo
from deepseek_triton_tools.bench.measuring.request_record import RequestRecord
from deepseek_triton_tools.bench.measuring.run_figures import run_figures
from deepseek_triton_tools.bench.results.bench_result import BenchPoint, BenchResult, BenchRun
from deepseek_triton_tools.bench.results.result_files import write_result
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.cli.slo_option import slo
from deepseek_triton_tools.tool_errors import ToolError


def run_of(concurrency, step_s, outcome="completed"):
    """Each user has one request of 1,024 + 101 tokens; the first one comes after ten steps."""
    records = [
        RequestRecord(
            index=user,
            ended_s=110 * step_s,
            chunk_s=[10 * step_s, 110 * step_s],
            chunk_tokens=[1, 100],
            num_input_tokens=1024,
            num_output_tokens=101,
            outcome=outcome,
        )
        for user in range(concurrency)
    ]
    return BenchRun(figures=run_figures(records, concurrency=concurrency))


STEPS = {1: 0.010, 8: 0.012, 64: 0.018, 512: 0.050}
"""Seconds of a step by concurrency."""


def point(users, step_s, **load):
    load = LoadPoint(num_requests=users, **(load or {"concurrency": users}))
    return BenchPoint(load=load, runs=(run_of(users, step_s),))


def sweep(points=None, slo=None):
    return BenchResult(
        date="2026-01-01T00:00:00+00:00",
        urls=("http://localhost:8000",),
        endpoint="triton-http",
        model="tensorrt_llm",
        gpus=8,
        dataset="random 1024/101",
        slo=slo or Slo(),
        points=tuple(points or [point(*each) for each in STEPS.items()]),
    )


@pytest.mark.parametrize(
    ("slo", "concurrency", "profile", "max_inflight"),
    [
        pytest.param(Slo(), 512, "throughput", None, id="the most of all"),
        pytest.param(Slo(tpot_ms=20), 64, "balanced", 64, id="TPOT"),
        pytest.param(Slo(tpot_ms=20, ttft_ms=150), 8, "balanced", 8, id="TTFT"),
        pytest.param(Slo(e2el_ms=1101), 1, "latency", 1, id="latency"),
    ],
)
def test_the_load_with_the_most_tokens_within_the_limits_is_chosen(slo, concurrency, profile, max_inflight):
    load = choose_load(sweep(), slo)
    assert (load.workload.isl, load.workload.osl, load.workload.concurrency) == (1024, 101, concurrency)
    assert (load.profile, load.max_inflight) == (profile, max_inflight)
    assert load.why.startswith(f"measured: concurrency {concurrency} gave")


def test_a_run_that_misses_a_limit_is_enough_to_miss_it():
    steady, varied = point(8, 0.012), point(64, 0.018)
    varied = replace(varied, runs=(*varied.runs, run_of(64, 0.050)))
    assert choose_load(sweep([steady, varied]), Slo(tpot_ms=20)).workload.concurrency == 8


def test_an_open_loop_is_planned_for_as_many_as_were_under_way():
    assert choose_load(sweep([point(64, 0.018, rate=8.0)]), Slo()).workload.concurrency == 64


def test_limits_that_no_load_keeps_are_refused_with_the_nearest():
    with pytest.raises(ToolError, match=r"no load .* TPOT 5 ms .* nearest is concurrency 1 with TPOT p99 10 ms"):
        choose_load(sweep(), Slo(tpot_ms=5))


def test_a_load_with_failed_requests_is_none_to_plan_for():
    failing = BenchPoint(load=LoadPoint(num_requests=8, concurrency=8), runs=(run_of(8, 0.01, outcome="failed"),))
    assert choose_load(sweep([failing, point(1, 0.01)]), Slo()).workload.concurrency == 1
    with pytest.raises(ToolError, match="without errors"):
        choose_load(sweep([failing]), Slo())


def test_limits_of_the_benchmark_are_judged_by_the_requests_that_kept_them():
    """Of 40 requests, one has a gap of 300 ms among its 101 tokens: a fortieth misses, but not the 99th percentile."""
    limits = Slo(itl_ms=50)
    records = [
        RequestRecord(
            index=user,
            ended_s=4.0,
            chunk_s=[0.01 * step + (0.3 if user == 0 and step else 0.0) for step in range(101)],
            chunk_tokens=[1] * 101,
            num_input_tokens=10,
            num_output_tokens=101,
        )
        for user in range(40)
    ]
    run = BenchRun(figures=run_figures(records, slo=limits))
    uneven = BenchPoint(load=LoadPoint(num_requests=40, concurrency=40), runs=(run,))
    message = r"nearest is concurrency 40 with ITL p99 10 ms, 97\.5% of the requests within all limits"
    with pytest.raises(ToolError, match=message):
        choose_load(sweep([uneven], limits), limits)
    assert choose_load(sweep([uneven], limits), Slo(itl_ms=49)).workload.concurrency == 40
    kept = replace(uneven, runs=(replace(run, figures=replace(run.figures, good_share=0.99)),))
    assert choose_load(sweep([kept], limits), limits).workload.concurrency == 40


def test_a_limit_of_what_was_not_measured_is_refused():
    one_token = replace(point(8, 0.01).runs[0].figures, tpot_ms=Distribution(), itl_ms=Distribution())
    without = BenchPoint(load=LoadPoint(num_requests=8, concurrency=8), runs=(BenchRun(figures=one_token),))
    with pytest.raises(ToolError, match="measured no TPOT and no ITL: leave that out of --slo"):
        choose_load(sweep([without]), Slo(ttft_ms=500, tpot_ms=20, itl_ms=30))
    assert choose_load(sweep([without, point(1, 0.01)]), Slo(tpot_ms=20)).workload.concurrency == 1


def test_what_the_server_cancelled_is_an_error_and_what_the_client_left_is_none():
    figures = replace(run_of(8, 0.01).figures, cancelled=2)
    left, shut = (BenchRun(figures=replace(figures, errors=errors)) for errors in ({}, {"shutting down": 2}))
    load = LoadPoint(num_requests=10, concurrency=8)
    assert choose_load(sweep([BenchPoint(load=load, runs=(left,))]), Slo()).workload.concurrency == 8
    with pytest.raises(ToolError, match="without errors"):
        choose_load(sweep([BenchPoint(load=load, runs=(shut,))]), Slo())


def test_an_interrupted_run_is_none_to_plan_for():
    whole, cut = point(1, 0.01), replace(run_of(8, 0.012), interrupted=True)
    started = BenchPoint(load=LoadPoint(num_requests=8, concurrency=8), runs=(cut,))
    assert choose_load(sweep([whole, started]), Slo()).workload.concurrency == 1


@pytest.mark.parametrize("text", ["ttft", "ttft=", "ttft=0", "ttft=inf", "ttft=nan", "ttfb=3", "", "ttft=5,,"])
def test_limits_without_a_meaning_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected limits in ms of ttft, tpot, itl, e2el"):
        slo(text)


def test_two_limits_of_one_kind_are_refused():
    with pytest.raises(argparse.ArgumentTypeError, match="expected one limit of ttft"):
        slo("ttft=1,ttft=2")


def test_limits_are_read():
    assert slo("ttft=500, tpot=20.5,itl=30,e2el=1e4") == Slo(ttft_ms=500, tpot_ms=20.5, itl_ms=30, e2el_ms=10_000)


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


def test_limits_given_go_before_those_of_the_benchmark(measured, capsys):
    document, _ = planned(capsys, "--from-bench", str(measured / "bench.json"), "--slo", "tpot=11")
    assert document["workload"]["concurrency"] == 1


@pytest.mark.parametrize(
    ("server", "says"),
    [
        pytest.param(
            {"name": "tiny", "engine": "simulated"},
            "measured: of tiny on the simulated engine, not of deepseek-r1 on tensorrt_llm",
            id="both",
        ),
        pytest.param(
            {"name": "deepseek-r1", "engine": "vllm"},
            "measured: of deepseek-r1 on the vllm engine, not of deepseek-r1 on tensorrt_llm",
            id="engine",
        ),
        pytest.param(
            {"name": "deepseek-v3-0324", "engine": "tensorrt_llm"},
            "measured: of deepseek-v3-0324 on the tensorrt_llm engine, not of deepseek-r1 on tensorrt_llm",
            id="model",
        ),
        pytest.param({"name": "deepseek-r1", "engine": "tensorrt_llm"}, None, id="the same"),
        pytest.param({"name": "deepseek-r1-fp4", "engine": "tensorrt_llm"}, None, id="other weights"),
        pytest.param({"name": "own-folder", "engine": "tensorrt_llm"}, None, id="an unknown name"),
        pytest.param({}, None, id="nothing said"),
    ],
)
def test_a_benchmark_of_another_model_or_engine_is_said(server, says, tmp_path, capsys):
    write_result(replace(sweep(), server=server), tmp_path / "bench.json")
    document, _ = planned(capsys, "--from-bench", str(tmp_path))
    assert document["measured"].get("--from-bench") == says
    assert main(["plan", "deepseek-r1", "--gpu", "h200", "--from-bench", str(tmp_path)]) == 0
    assert (says is None) == ("measured: of" not in " ".join(capsys.readouterr().out.split()))


def test_loads_are_counted():
    assert "of 1 load, " in choose_load(sweep([point(1, 0.01)]), Slo(tpot_ms=20)).why
    assert choose_load(sweep(), Slo()).why.endswith("of 4 loads")


def test_an_unknown_model_is_named_before_the_benchmark(measured, capsys):
    assert main(["plan", "deepseek-r9", "--gpu", "h200", "--from-bench", str(measured)]) != 0
    assert "deepseek-r9" in capsys.readouterr().err


def test_vllm_takes_them_too(measured, capsys):
    _, settings = planned(capsys, "--engine", "vllm", "--gpus", "8", "--from-bench", str(measured))
    assert settings["max_num_seqs"]["value"] == 64
    assert "measured: concurrency 64 gave" in settings["max_num_seqs"]["reason"]
    assert settings["triton_config.max_inflight"]["reason"].startswith("measured: ")


def test_the_stamp_makes_the_same_repository_without_the_benchmark(measured, tmp_path, capsys):
    options = ("deepseek-r1", "--gpu", "h200", "--gpus", "8", "--from-bench", str(measured))
    assert main(["build", *options, "--output", str(tmp_path / "r1")]) == 0
    (manifest,) = (tmp_path / "r1").rglob("deepseek-triton.json")
    stamp = json.loads(manifest.read_text())["options"]
    assert "--concurrency 64" in stamp
    assert "triton_config.max_inflight=64" in stamp
    assert main(["plan", *stamp.split(), "--diff", str(tmp_path / "r1")]) == 0
    assert "max_inflight: 64" in (tmp_path / "r1" / "tensorrt_llm" / "1" / "model.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        pytest.param(("--slo", "tpot=20"), "--slo: only with --from-bench", id="limits of nothing"),
        pytest.param(("--from-bench", "nowhere.json"), "nowhere.json can't be read", id="no file"),
        pytest.param(("--from-bench", "{bench}", "--slo", "tpot=1"), "no load of the benchmark", id="too strict"),
    ],
)
def test_what_can_not_be_planned_is_said_in_a_line(words, says, measured, capsys):
    words = [word.format(bench=measured) for word in words]
    assert main(["plan", "deepseek-r1", "--gpu", "h200", *words]) in (1, 2)
    assert says in capsys.readouterr().err
