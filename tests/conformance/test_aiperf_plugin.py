"""AIPerf measures the gateway, and our generate endpoints by our plugin: what it counts is what the server counted, and
what failed counts as failed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.running import PROGRAM, TINY, triton
from deepseek_triton_client.testing import FakeServer
from support.documents import commands, snippets

TOKENIZER = TINY / "tensorrt_llm/1/tiny"
NUM_TOKENS = 20
QUIET = ("--tokenizer", TOKENIZER, "--random-seed", 1, "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics")


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulated")
    build = [PROGRAM, "build", "tiny", "--engine", "simulated", "--output", folder / "repository"]
    subprocess.run(build, check=True, capture_output=True)
    with triton(folder / "repository", folder / "triton.log") as url:
        yield url


def profile(server, folder, *options):
    """Run AIPerf against our model, and return the figures it wrote."""
    model = ("--model", "tensorrt_llm", "--url", f"{server}/v2/models/tensorrt_llm", "--use-server-token-count")
    return aiperf(folder, "profile", *model, *QUIET, *options)


def aiperf(folder, *words):
    command = [str(word) for word in (Path(sys.executable).with_name("aiperf"), *words, "--artifact-dir", folder)]
    # Told to be offline, it looks for a local tokenizer in the hub's cache.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return json.loads((folder / "profile_export_aiperf.json").read_text())


@pytest.mark.parametrize("streaming", [True, False])
def test_every_prompt_is_answered_with_the_tokens_that_were_asked_for(simulated, tmp_path, streaming):
    options = ["--isl", 30, "--osl", NUM_TOKENS, "--request-count", 12, "--concurrency", 3]
    options += ["--extra-inputs", "ignore_eos:true", *(["--streaming"] if streaming else [])]
    found = profile(simulated, tmp_path, "--endpoint-type", "deepseek_triton", *options)
    assert (found["request_count"]["avg"], found["request_error_rate"]["avg"]) == (12, 0)
    assert found["total_usage_completion_tokens"]["avg"] == found["total_osl"]["avg"] == 12 * NUM_TOKENS
    assert found["input_sequence_length"]["min"] > 0
    assert [name in found for name in ("time_to_first_token", "inter_token_latency")] == [streaming] * 2


def test_the_second_turn_of_a_conversation_has_the_first_one_before_it(simulated, tmp_path):
    options = ["--conversation-num", 3, "--conversation-turn-mean", 2, "--conversation-turn-stddev", 0]
    options += ["--streaming", "--isl", 30, "--osl", NUM_TOKENS, "--concurrency", 3]
    found = profile(simulated, tmp_path, "--endpoint-type", "deepseek_triton_chat", *options)
    assert found["request_count"]["avg"] == 6
    assert found["request_error_rate"]["avg"] == 0
    records = [json.loads(line) for line in (tmp_path / "profile_export.jsonl").read_text().splitlines()]
    lengths = {0: [], 1: []}
    for record in records:
        lengths[record["metadata"]["turn_index"]].append(record["metrics"]["input_sequence_length"]["value"])
    assert min(lengths[1]) > max(lengths[0])


def test_a_trace_of_token_ids_is_sent_as_it_is(simulated, tmp_path):
    lengths = [40, 7, 90, 1]
    payload = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    lines = [
        {"timestamp": 50 * number, "payload": {"input_ids": [100 + number] * length, **payload}}
        for number, length in enumerate(lengths)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    options = ["--streaming", "--fixed-schedule", "--input-file", trace, "--custom-dataset-type", "mooncake_trace"]
    found = profile(simulated, tmp_path, "--endpoint-type", "deepseek_triton", *options)
    assert found["request_count"]["avg"] == len(lengths)
    assert found["total_usage_prompt_tokens"]["avg"] == sum(lengths)
    assert found["total_usage_completion_tokens"]["avg"] == len(lengths) * NUM_TOKENS


ENDS = {
    "[E_INTERNAL] the engine died": {"error": "[E_INTERNAL] the engine died"},
    "TransferEncodingError": ConnectionResetError(),
    "finish_reason timeout": {"text_output": "", "finish_reason": "timeout"},
    "without a finish_reason": {"text_output": ""},
}


def test_a_stream_that_dies_counts_as_an_error(tmp_path):
    """One of each end, and two that end well."""

    def answer(end):
        return lambda request: iter(("some", " text", end))

    well = {"text_output": ".", "finish_reason": "stop", "num_input_tokens": 5, "num_output_tokens": 3}
    with FakeServer() as server:
        server.script(*(answer(end) for end in (well, *ENDS.values(), well)))
        options = ["--streaming", "--isl", 30, "--osl", NUM_TOKENS, "--request-count", 6]
        found = profile(server.url, tmp_path, "--endpoint-type", "deepseek_triton", *options)
    assert (found["error_request_count"]["avg"], found["request_count"]["avg"]) == (4, 2)
    assert found["total_usage_completion_tokens"]["avg"] == 2 * 3
    told = [entry["error_details"]["message"] for entry in found["error_summary"]]
    assert len(told) == len(ENDS)
    assert [message for message in ENDS if not any(message in each for each in told)] == []


def test_the_commands_of_the_documentation_run(simulated, tmp_path):
    page = "docs/bench.md"
    here = {"http://localhost:8000": simulated, "/models/DeepSeek-R1": str(TOKENIZER)}

    for number, command in enumerate(typed for typed in commands(page) if typed.program == "aiperf"):
        words = list(command.argv[1:])
        for given, ours in here.items():
            words = [word.replace(given, ours) for word in words]
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "trace.jsonl").write_text(snippets("json", page=page)[0].text)
        found = aiperf(folder, *words)
        assert found["request_error_rate"]["avg"] == 0
        assert found["total_usage_completion_tokens"]["avg"] == (6 * 128, 32)[number]


@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses"])
def test_the_gateway_is_measured_and_its_counts_are_aiperfs(gateway_url, model_name, tmp_path, endpoint):
    fields = {"temperature": 0} if endpoint == "responses" else {"temperature": 0, "ignore_eos": True}
    options = ["--endpoint-type", endpoint, "--streaming", "--extra-inputs", json.dumps(fields)]
    options += ["--request-count", 12, "--concurrency", 3, "--isl", 30, "--osl", NUM_TOKENS]
    found = aiperf(tmp_path, "profile", "--model", model_name, "--url", gateway_url, *QUIET, *options)
    assert found["request_count"]["avg"] == 12
    assert found["request_error_rate"]["avg"] == 0
    assert 0 < found["time_to_first_token"]["avg"] <= found["request_latency"]["avg"]
    assert found["usage_prompt_tokens"]["avg"] > found["input_sequence_length"]["avg"] > 0
    total = found["total_usage_completion_tokens"]["avg"]
    assert total == 12 * NUM_TOKENS or endpoint == "responses"
    records = [json.loads(line)["metrics"] for line in (tmp_path / "profile_export.jsonl").read_text().splitlines()]
    # It reads no usage of a response that is incomplete. Its own count is of the text, which has no token for the end.
    whole = [record["output_sequence_length"]["value"] for record in records if "usage_completion_tokens" in record]
    assert whole
    assert sum(whole) == pytest.approx(total, rel=0.15)
