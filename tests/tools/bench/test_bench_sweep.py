"""Sweeps: which runs are of one point, the files that they leave, what they tell, and the prompts of each run."""

import json
import math
import os
import signal
from types import SimpleNamespace

import pytest

from deepseek_triton_client import InvalidRequest
from deepseek_triton_tools.bench.dataset_files import FileConversationSource
from deepseek_triton_tools.bench.load_process import LoadProgress
from deepseek_triton_tools.bench.random_prompts import text_token_ids
from deepseek_triton_tools.bench.result import read_result
from deepseek_triton_tools.bench.servers import first_openai_model, model_facts
from deepseek_triton_tools.bench.sweep import OutputFolder, RunProgress, Sweep, sweep_result, sweep_steps
from deepseek_triton_tools.bench.targets import TargetSettings
from deepseek_triton_tools.bench.workload import BenchRequest, DatasetOptions, LoadPoint
from deepseek_triton_tools.cli.bench_run import exit_code
from deepseek_triton_tools.tool_errors import ToolError
from support.http_server import HttpServer
from support.made_up_bench import read_samples
from support.paced_server import paced_server


@pytest.fixture
def server():
    server = HttpServer()
    yield server
    server.stop()


def test_progress_says_how_long_it_takes():
    def text(elapsed_s, ended, total, failed=0, **load):
        now = LoadProgress(elapsed_s=elapsed_s, ended=ended, total=total, failed=failed, inflight=2, output_tokens=0)
        point = LoadPoint(num_requests=total, **load)
        return RunProgress([point], repeat=1).text(now).replace(", 2 under way, 0 tokens/s, about", ";")

    assert text(10, 5, 10) == "5 of 10; 0:00:10 left of this run"
    assert text(10, 188, 10, 9, duration_s=60) == "188 ended, 9 of them failed; 0:00:50 left of this run"


def test_runs_go_on_in_the_file_and_say_when_prompts_come_again(tmp_path, capfd):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"text {number}"}) + "\n" for number in range(5)))
    source = FileConversationSource(DatasetOptions(file=file), text_token_ids(), lambda texts: [1] * len(texts), None)
    runs = [[each[0].prompt for each in source(2, seed)] for seed in range(4)]
    assert runs == [[f"text {number}" for number in run] for run in ((0, 1), (2, 3), (4, 0), (1, 2))]
    assert capfd.readouterr().err.count("fewer than all runs") == 1


def openai(server):
    return TargetSettings(urls=(f"{server.url}/v1",), endpoint="openai", model="m", token="secret")


def test_an_openai_endpoint_may_describe_its_tokenizer(server):
    cases = {
        (200, b'{"vocab_size": 640, "model_max_length": 2048}'): {"vocab_size": 640, "max_seq_len": 2048},
        (200, b'{"tokenizer_class": "Other", "model_max_length": 1e30}'): {},
        (200, b"[]"): {},
        (404, b"no"): {},
    }
    server.script(*(server.body(*answer) for answer in cases))
    assert {answer: model_facts(openai(server)) for answer in cases} == cases
    assert server.requests == [("GET", "/tokenizer_info?model=m", None)] * len(cases)
    assert server.headers[0]["authorization"] == "Bearer secret"


def test_no_list_of_models_is_one_line(server):
    cases = {(404, b""): "/v1", (401, b""): "401", (200, b"{}"): "expected a list of models"}
    for answer, expected in cases.items():
        server.script(server.body(*answer))
        with pytest.raises(ToolError, match=expected) as raised:
            first_openai_model(openai(server))
        assert str(raised.value).count("http://") == 1
    urls = (f"{server.url.replace('http', 'https')}/v1",)
    for ca, kind, expected in ((None, ToolError, "TLS"), (__file__, InvalidRequest, r"tls\.ca")):
        with pytest.raises(kind, match=expected):
            first_openai_model(TargetSettings(urls=urls, endpoint="openai", model="m", ca=ca))


def test_a_measurement_of_failures_is_none():
    codes = {(9, 1, 0): 0, (9, 31, 0): 1, (0, 0, 5): 0, (0, 0, 0): 1}
    names = ("completed", "failed", "cancelled")
    assert {each: exit_code([SimpleNamespace(**dict(zip(names, each, strict=True)))]) for each in codes} == codes


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
    output, steps, progress = OutputFolder(folder), [], RunProgress(points, repeat)
    for step in sweep_steps(sweep, lambda so_far: on_progress(progress.name, so_far)):
        progress.end(step)
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

    output = OutputFolder(tmp_path / "full")
    (tmp_path / "full/report.html").mkdir()  # it can't be written, as where a disk is full by then
    with pytest.raises(ToolError, match=r"report\.html"):
        output.write(result, first)
    assert (output.num_runs, output.summary.partition(", and")[0]) == (1, "bench.json, figures.csv")


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
