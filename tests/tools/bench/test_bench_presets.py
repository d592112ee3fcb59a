import math
from dataclasses import fields, replace

import pytest

from deepseek_triton_build import make_plan
from deepseek_triton_tools.bench.expected import PresetPoint, preset, presets, published_table
from deepseek_triton_tools.bench.result import BenchPoint, BenchRun, Figures, MetricSummary, RequestRecord
from deepseek_triton_tools.bench.run_figures import run_figures
from deepseek_triton_tools.bench.workload import LoadPoint
from deepseek_triton_tools.cli.main import program_parser
from deepseek_triton_tools.cli.plan_request import plan_request
from deepseek_triton_tools.tool_errors import ToolError
from support.documents import read
from support.made_up_bench import made_up_result

LATENCY = "r1-h200-min-latency"
ONE = LoadPoint(num_requests=3, concurrency=1)


def run_of(*seconds, **more):
    """A run with one request for each."""
    tokens = {"chunk_tokens": [1, 2047], "num_input_tokens": 1024, "num_output_tokens": 2048}
    records = [RequestRecord(index=0, ended_s=each, chunk_s=[each / 2, each], **tokens) for each in seconds]
    return BenchRun(figures=run_figures(records, gpus=8, concurrency=1), **more)


def published(name, load, *runs, server=None):
    result = made_up_result([BenchPoint(load=load, runs=runs)], server=server or {})
    return published_table(preset(name), result)


def cells(table):
    return {(row[0], row[1]): tuple(row[2:]) for row in table.rows}


@pytest.mark.slow
def test_each_preset(subtests):
    page = read("docs/bench.md").splitlines()
    for name, chosen in presets().items():
        with subtests.test(name):
            # Its server can be planned, and takes its requests.
            plan = make_plan(plan_request(program_parser(["plan"]).parse_args(["plan", *chosen.server.split()])))
            assert plan.world_size == chosen.gpus
            longest = plan.canonical.get("max_seq_len") or plan.canonical.get("max_model_len") or math.inf
            assert chosen.input_tokens + chosen.output_tokens <= longest
            # A shortened load has the published pace and fewer requests.
            for point in chosen.points:
                assert point.describes(point.load)
                assert point.published.keys() <= {each.name for each in fields(Figures)}
                if point.short is not None:
                    assert point.describes(point.short)
                    assert point.short.num_requests < point.load.num_requests
                    assert chosen.simulated
            labels = [load.label for load in chosen.loads(short=False)]
            assert len(set(labels)) == len(labels)
            # The page has it, with its server.
            (row,) = [line for line in page if line.startswith(f"| `{name}`")]
            assert f"`{chosen.server}`" in row
            assert f"`{chosen.simulated}`" in row if chosen.simulated else "| none: " in row
            assert f"{chosen.input_tokens:,} + {chosen.output_tokens:,}" in row


def test_only_the_simulated_engine_gets_a_shortened_load():
    latency, sweep = preset(LATENCY), preset("r1-sweep")
    assert [[load.num_requests for load in latency.loads(short=short)] for short in (False, True)] == [[10], [3]]
    assert sweep.loads(short=True) == sweep.loads(short=False)
    assert [load.num_requests / load.concurrency for load in sweep.loads(short=False)] == [5] * 8
    # Points without one are left out.
    both = replace(latency, points=(*latency.points, PresetPoint(load=LoadPoint(num_requests=9))))
    assert len(both.loads(short=True)) == 1


def test_an_unknown_preset_is_refused_with_the_nearest():
    with pytest.raises(ToolError, match=LATENCY) as refused:
        preset("r1-h200-min-latnecy")
    assert refused.value.exit_code == 2


def test_published_figures_stand_beside_the_mean_of_repeated_runs():
    table = published(LATENCY, LoadPoint(num_requests=10, concurrency=1), run_of(12.0), run_of(14.0))
    assert cells(table)["concurrency 1", "latency, ms"] == ("12,945.94", "13,000.00", "+0.4%")
    assert cells(table)["concurrency 1", "requests/s"] == ("0.0772", "0.0774", "+0.2%")
    assert ("concurrency 1", "TTFT, ms") not in cells(table)  # not published
    assert "texts of your own" in table.title
    assert published(LATENCY, LoadPoint(num_requests=10, concurrency=1), run_of()).rows == []  # without an answer


def test_figures_of_a_faster_simulation_are_in_the_deployments_time():
    server = {"simulation": {"preset": "h200x8-r1-fp8-min-latency", "speed": 8}}
    fast = published(LATENCY, ONE, run_of(1.625), server=server)
    assert cells(fast) == cells(published(LATENCY, ONE, run_of(13.0)))
    assert "8 times" in fast.title
    other = published(LATENCY, ONE, run_of(13.0), server={"simulation": {"preset": None, "speed": 1.0}})
    assert "simulates no deployment" in other.title


def test_a_simulation_that_could_not_keep_its_pace_is_said():
    name = 'deepseek_triton_engine_stat{model="tensorrt_llm",name="late_s",version="1"}'
    for lost_s, said in ((0.1, False), (5.0, True)):
        late = MetricSummary(first=2.0, last=2.0 + lost_s, mean=3.0, max=2.0 + lost_s)
        run = run_of(13.0, server_metrics={name: late})
        title = published(LATENCY, ONE, run, server={"simulation": {"speed": 1.0}}).title
        assert ("lost 5 of 13 s" in title) == said


def test_figures_are_compared_at_the_same_load_only():
    rows = {
        LoadPoint(num_requests=1, rate=10_000.0): 5,  # the published one
        LoadPoint(num_requests=16, rate=10_000.0): 0,
        LoadPoint(num_requests=1, rate=1.0): 0,
        LoadPoint(num_requests=1, concurrency=1): 0,
    }
    assert {load: len(published("prompt-heavy", load, run_of(16.39)).rows) for load in rows} == rows
