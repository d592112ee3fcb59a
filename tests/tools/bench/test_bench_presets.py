import math
from dataclasses import replace

import pytest

from deepseek_triton_build import make_plan
from deepseek_triton_tools.bench.load.load_settings import LoadPoint
from deepseek_triton_tools.bench.measuring.figures import MetricSummary, Slo
from deepseek_triton_tools.bench.measuring.request_record import RequestRecord
from deepseek_triton_tools.bench.measuring.run_figures import run_figures
from deepseek_triton_tools.bench.presets.bench_preset import PresetPoint
from deepseek_triton_tools.bench.presets.published_runs import PRESETS, preset
from deepseek_triton_tools.bench.presets.published_table import published_table
from deepseek_triton_tools.bench.results.bench_result import BenchPoint, BenchResult, BenchRun
from deepseek_triton_tools.cli.main import program_parser
from deepseek_triton_tools.cli.plan_request import plan_request
from deepseek_triton_tools.tool_errors import ToolError
from support.documents import read

LATENCY = "r1-h200-min-latency"


def one_request(seconds, tokens=2048):
    return RequestRecord(
        index=0,
        ended_s=seconds,
        chunk_s=[seconds / 2, seconds],
        chunk_tokens=[1, tokens - 1],
        num_input_tokens=1024,
        num_output_tokens=tokens,
    )


def result_of(load, *seconds, server=None):
    runs = tuple(BenchRun(figures=run_figures([one_request(each)], gpus=8, concurrency=1)) for each in seconds)
    return BenchResult(
        date="",
        urls=(),
        endpoint="triton-http",
        model="",
        gpus=8,
        dataset="",
        slo=Slo(),
        points=(BenchPoint(load=load, runs=runs),),
        server=server or {},
    )


def cells(table):
    return {(row[0], row[1]): tuple(row[2:]) for row in table.rows}


@pytest.mark.parametrize("name", PRESETS)
def test_the_server_of_a_preset_can_be_planned_and_takes_its_requests(name):
    chosen = PRESETS[name]
    plan = make_plan(plan_request(program_parser(["plan"]).parse_args(["plan", *chosen.server.split()])))
    assert plan.world_size == chosen.gpus
    longest = plan.canonical.get("max_seq_len") or plan.canonical.get("max_model_len") or math.inf
    assert chosen.input_tokens + chosen.output_tokens <= longest


@pytest.mark.parametrize("name", PRESETS)
def test_a_shortened_load_has_the_published_pace_and_fewer_requests(name):
    for point in PRESETS[name].points:
        assert point.describes(point.load)
        if point.short is not None:
            assert point.describes(point.short)
            assert point.short.num_requests < point.load.num_requests
            assert PRESETS[name].simulated


def test_only_the_simulated_engine_gets_a_shortened_load():
    latency, sweep = preset(LATENCY), preset("r1-sweep")
    assert [load.num_requests for load in latency.loads(short=False)] == [10]
    assert [load.num_requests for load in latency.loads(short=True)] == [3]
    assert sweep.loads(short=True) == sweep.loads(short=False)
    assert [load.num_requests / load.concurrency for load in sweep.loads(short=False)] == [5] * 8


def test_points_without_a_shortened_load_are_left_out():
    both = replace(preset(LATENCY), points=(*preset(LATENCY).points, PresetPoint(load=LoadPoint(num_requests=9))))
    assert len(both.loads(short=True)) == 1


@pytest.mark.parametrize("name", PRESETS)
def test_the_page_has_the_preset_with_its_server(name):
    (row,) = [line for line in read("docs/bench-presets.md").splitlines() if line.startswith(f"| `{name}`")]
    chosen = PRESETS[name]
    assert f"`{chosen.server}`" in row
    assert f"`{chosen.simulated}`" in row if chosen.simulated else "| none: " in row
    assert f"{chosen.input_tokens:,} + {chosen.output_tokens:,}" in row


@pytest.mark.parametrize("name", PRESETS)
def test_the_loads_of_a_preset_have_different_names(name):
    labels = [load.label for load in PRESETS[name].loads(short=False)]
    assert len(set(labels)) == len(labels)


def test_an_unknown_preset_is_refused_with_the_nearest():
    with pytest.raises(ToolError, match="did you mean r1-h200-min-latency") as refused:
        preset("r1-h200-min-latnecy")
    assert refused.value.exit_code == 2


def test_published_figures_stand_beside_the_mean_of_repeated_runs():
    table = published_table(preset(LATENCY), result_of(LoadPoint(num_requests=10, concurrency=1), 12.0, 14.0))
    assert cells(table)["concurrency 1", "latency, ms"] == ("12,945.94", "13,000.00", "+0.4%")
    assert cells(table)["concurrency 1", "requests/s"] == ("0.0772", "0.0774", "+0.2%")
    assert ("concurrency 1", "TTFT, ms") not in cells(table)  # not published
    assert "texts of your own" in table.title


def test_figures_of_a_faster_simulation_are_in_the_deployments_time():
    server = {"simulation": {"preset": "h200x8-r1-fp8-min-latency", "speed": 8}}
    load = LoadPoint(num_requests=3, concurrency=1)
    fast = published_table(preset(LATENCY), result_of(load, 1.625, server=server))
    assert cells(fast) == cells(published_table(preset(LATENCY), result_of(load, 13.0)))
    assert "8 times" in fast.title


def test_another_simulated_deployment_is_named():
    server = {"simulation": {"preset": None, "speed": 1.0}}
    table = published_table(preset(LATENCY), result_of(LoadPoint(num_requests=3, concurrency=1), 13.0, server=server))
    assert "simulates no deployment" in table.title


@pytest.mark.parametrize(("lost_s", "said"), [(0.1, False), (5.0, True)])
def test_a_simulation_that_could_not_keep_its_pace_is_said(lost_s, said):
    name = 'deepseek_triton_engine_stat{model="tensorrt_llm",name="late_s",version="1"}'
    result = result_of(LoadPoint(num_requests=3, concurrency=1), 13.0, server={"simulation": {"speed": 1.0}})
    (point,) = result.points
    late = MetricSummary(first=2.0, last=2.0 + lost_s, mean=3.0, max=2.0 + lost_s)
    point = replace(point, runs=(replace(point.runs[0], server_metrics={name: late}),))
    title = published_table(preset(LATENCY), replace(result, points=(point,))).title
    assert ("lost 5 of 13 s" in title) == said


@pytest.mark.parametrize(
    ("load", "rows"),
    [
        pytest.param(LoadPoint(num_requests=1, rate=10_000.0), 5, id="the published one"),
        pytest.param(LoadPoint(num_requests=16, rate=10_000.0), 0, id="more at once"),
        pytest.param(LoadPoint(num_requests=1, rate=1.0), 0, id="another rate"),
        pytest.param(LoadPoint(num_requests=1, concurrency=1), 0, id="closed loop"),
    ],
)
def test_figures_are_compared_at_the_same_load_only(load, rows):
    assert len(published_table(preset("prompt-heavy"), result_of(load, 16.39)).rows) == rows


def test_a_run_without_an_answer_is_not_compared():
    empty = BenchRun(figures=run_figures([], gpus=8, concurrency=1))
    load = LoadPoint(num_requests=10, concurrency=1)
    result = replace(result_of(load), points=(BenchPoint(load=load, runs=(empty,)),))
    assert published_table(preset(LATENCY), result).rows == []
