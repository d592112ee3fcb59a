"""What a sweep tells while it runs, and which prompts each of its runs gets."""

import json
from types import SimpleNamespace

import pytest

from deepseek_triton_tools.bench.load.bench_target import TargetSettings
from deepseek_triton_tools.bench.load.load_run import LoadProgress
from deepseek_triton_tools.bench.load.load_settings import LoadPoint
from deepseek_triton_tools.bench.run_progress import RunProgress
from deepseek_triton_tools.bench.server_facts import first_openai_model, model_facts
from deepseek_triton_tools.bench.workload.conversation_source import FileConversationSource
from deepseek_triton_tools.bench.workload.dataset_options import DatasetOptions
from deepseek_triton_tools.bench.workload.token_ids import text_token_ids
from deepseek_triton_tools.cli.bench_run import exit_code
from deepseek_triton_tools.cli.sampling_options import assigned_json
from deepseek_triton_tools.tool_errors import ToolError
from support.http_server import HttpServer


@pytest.fixture
def server():
    server = HttpServer()
    yield server
    server.stop()


def test_progress_says_how_long_it_takes():
    def text(elapsed_s, ended, total, *loads):
        now = LoadProgress(elapsed_s=elapsed_s, ended=ended, total=total, failed=0, inflight=2, output_tokens=0)
        points = [LoadPoint(num_requests=total, **load) for load in loads]
        return RunProgress(points, repeat=1).text(now).replace(", 2 under way, 0 tokens/s, about", ";")

    assert text(10, 5, 10, {}) == "5 of 10; 0:00:10 left"
    assert text(10, 188, 10, {"duration_s": 60}) == "188 answered; 0:00:50 left"
    # Nobody knows how long the next takes.
    unknown = text(9, 3, 9, {"concurrency": 1}, {"concurrency": 2})
    assert unknown == "3 of 9; 0:00:18 left of this run, 1 more run"
    fixed = text(10, 0, 9, *({"concurrency": number, "duration_s": 30} for number in (1, 2, 3)))
    assert fixed == "0 answered; 0:00:20 left of this run, 2 more runs, 0:01:20 in all"


def test_runs_go_on_in_the_file_and_say_when_prompts_come_again(tmp_path, capfd):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"text {number}"}) + "\n" for number in range(5)))
    source = FileConversationSource(DatasetOptions(file=file), text_token_ids(), lambda texts: [1] * len(texts), None)
    runs = [[each[0].prompt for each in source(2, seed)] for seed in range(4)]
    assert runs == [[f"text {number}" for number in run] for run in ((0, 1), (2, 3), (4, 0), (1, 2))]
    assert capfd.readouterr().err.count("fewer than all runs") == 1


def test_values_for_other_servers_are_json_but_for_fields_of_text():
    values = {"top_n=5": 5, "stop=1": "1", "mode=fast": "fast", 'logit_bias={"5": 1}': {"5": 1}}
    assert {word: assigned_json(word) for word in values} == {
        word: (word.partition("=")[0], value) for word, value in values.items()
    }


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
    assert server.requests == [("GET", "/tokenizer_info", None)] * len(cases)
    assert server.headers[0]["authorization"] == "Bearer secret"


def test_no_list_of_models_is_one_line(server):
    cases = {(404, b""): "/v1", (401, b""): "401", (200, b"{}"): "expected a list of models"}
    for answer, expected in cases.items():
        server.script(server.body(*answer))
        with pytest.raises(ToolError, match=expected) as raised:
            first_openai_model(openai(server))
        assert str(raised.value).count("http://") == 1
    encrypted = TargetSettings(urls=(f"{server.url.replace('http', 'https')}/v1",), endpoint="openai", model="m")
    with pytest.raises(ToolError, match="TLS"):
        first_openai_model(encrypted)


def test_a_measurement_of_failures_is_none():
    codes = {(9, 1, 0): 0, (9, 31, 0): 1, (0, 0, 5): 0, (0, 0, 0): 1}
    names = ("completed", "failed", "cancelled")
    assert {each: exit_code([SimpleNamespace(**dict(zip(names, each, strict=True)))]) for each in codes} == codes
