"""Sweeps against a real server: which runs are of one point, and the files that they leave."""

import json
import math
import os
import signal

import pytest

from deepseek_triton_tools.bench.load.bench_target import TargetSettings
from deepseek_triton_tools.bench.load.load_settings import LoadPoint
from deepseek_triton_tools.bench.output_folder import OutputFolder
from deepseek_triton_tools.bench.results.request_samples import read_samples
from deepseek_triton_tools.bench.results.result_files import read_result
from deepseek_triton_tools.bench.sweep import Sweep, sweep_result, sweep_steps
from deepseek_triton_tools.bench.workload.bench_request import BenchRequest
from support.paced_server import paced_server


def measured(server, folder, *points, repeat=1, on_progress=lambda *_: None):
    """Run a sweep, with its files after each run."""
    sweep = Sweep(
        target=TargetSettings(urls=(f"http://{server}",), endpoint="triton-http", model="tensorrt_llm"),
        points=points,
        repeat=repeat,
        conversations=lambda number, _: [(BenchRequest(prompt=(5, 6, 7), output_tokens=4),)] * number,
        dataset="random 3/4",
        processes=1,
    )
    output, steps = OutputFolder(folder), []
    for step in sweep_steps(sweep, on_progress):
        steps.append(step)
        output.write(sweep_result(sweep, steps), step)
    return steps, sweep_result(sweep, steps)


@pytest.mark.slow
def test_a_point_that_is_named_twice_has_two_runs_and_every_point_files_of_its_own(tmp_path):
    two, four = (LoadPoint(num_requests=3 * users, concurrency=users) for users in (2, 4))
    at_once = [LoadPoint(num_requests=4, rate=rate) for rate in (1000.0, 2000.0, math.inf)]
    with paced_server("--first-ms", "2", "--step-ms", "1") as server:
        steps, result = measured(server, tmp_path, two, four, *at_once, two)
    first, other, *_, again = steps

    assert [(step.load, step.number) for step in steps] == [(load, 0) for load in (two, four, *at_once)] + [(two, 1)]
    assert [len(point.runs) for point in result.points] == [2, 1, 1, 1, 1]
    assert [point.runs for point in result.points][:2] == [(first.run, again.run), (other.run,)]
    assert [point.runs for point in read_result(tmp_path).points] == [point.runs for point in result.points]
    assert len({point.load.label for point in result.points}) == 5
    assert len(list(tmp_path.glob("*.requests.jsonl.gz"))) == 6
    for name, step in (("concurrency_2", first), ("concurrency_4", other), ("concurrency_2_run_2", again)):
        figures = json.loads((tmp_path / f"{name}.json").read_text())
        assert (figures["duration"], figures["num_prompts"]) == (step.run.figures.duration_s, step.load.num_requests)
        assert len(read_samples(tmp_path / f"{name}.requests.jsonl.gz")) == step.load.num_requests


@pytest.mark.slow
def test_a_run_that_ctrl_c_ended_is_none_of_the_repeats(tmp_path):
    def interrupt(name, progress):
        if name.startswith("concurrency 2, run 2 of 3") and progress.ended and progress.inflight and not raised:
            raised.append(name)
            os.kill(os.getpid(), signal.SIGINT)

    raised = []
    with paced_server("--first-ms", "20", "--step-ms", "1") as server:
        point = LoadPoint(num_requests=150, concurrency=2)
        _, result = measured(server, tmp_path, point, repeat=3, on_progress=interrupt)

    assert raised == ["concurrency 2, run 2 of 3, 2 of 3 in all"]
    assert [run.interrupted for run in result.points[0].runs] == [False, True]
    assert result.points[0].counted_runs == result.points[0].runs[:1]
    assert read_result(tmp_path).points[0].label == "concurrency 2, interrupted"
