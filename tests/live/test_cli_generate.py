"""The command line over the client against real tritonservers, over HTTP and gRPC."""

import json
import subprocess
import sys

import pytest

from deepseek_triton_client import Client, Timeouts
from support.commands import run_command
from support.servers import url
from support.terminal_session import CTRL_C, Terminal

PROMPTS = [f"The number {number} is" for number in range(24)]
COMMAND = [sys.executable, "-m", "deepseek_triton_tools.cli.main"]


@pytest.fixture(params=["http", "grpc"])
def address(request, tiny_server):
    return url(tiny_server, request.param)


def run(*argv, **options):
    return subprocess.run([*COMMAND, *argv], capture_output=True, text=True, **options)


def test_a_prompt_is_answered_the_same_however_it_is_given(address, tmp_path):
    (tmp_path / "prompt").write_text("Hello, my name is")
    options = ["--url", address, "--max-tokens", "20"]
    with Client(address) as client:
        expected = client.generate("Hello, my name is", max_tokens=20).text

    for done in (
        run_command("generate", "Hello, my name is", *options),
        run_command("generate", "Hello, my name is", "--no-stream", *options),
        run_command("generate", "--file", str(tmp_path / "prompt"), *options),
        run("generate", *options, input="Hello, my name is"),
    ):
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{expected}\n", "")


def test_json_has_details_and_a_refusal_is_one_line(address):
    asked = ["generate", "Hi", "--url", address, "--max-tokens", "8", "--json", "--return-output-ids"]
    done = run_command(*asked, "--logprobs", "2", "--return-cumulative-logprob", "--temperature", "1")
    refused = run_command(*asked, "--temperature", "101")

    record = json.loads(done.stdout)
    assert (record["finish_reason"], record["num_output_tokens"]) == ("length", 8)
    assert len(record["output_ids"]) == len(record["logprobs"]) == 8
    assert [place[0]["token_id"] for place in record["logprobs"]] == record["output_ids"]
    assert record["cumulative_logprob"] < 0
    assert 0 < record["time_to_first_token_s"] <= record["total_s"]
    (line,) = refused.stderr.splitlines()
    assert (refused.returncode, refused.stdout) == (1, "")
    assert line.startswith("deepseek-triton generate: [E_INVALID_ARGUMENT] temperature: ")


def test_a_batch_has_the_texts_of_single_requests_and_goes_on(address, tmp_path):
    rows = [{"prompt": prompt, "max_tokens": 4 + number % 5} for number, prompt in enumerate(PROMPTS)]
    rows[5]["temperature"] = 101
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    argv = ["generate", "--url", address, "--input", "in.jsonl", "--output", "out.jsonl", "--concurrency", "8"]

    done = run(*argv, cwd=tmp_path)

    assert done.returncode == 1
    assert "24 of 24 rows done, 1 failed" in done.stderr
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert answers.pop(5)["error"]["code"] == "E_INVALID_ARGUMENT"
    rows.pop(5)
    with Client(address) as client:
        texts = [client.generate(row["prompt"], max_tokens=row["max_tokens"]).text for row in rows]
    assert [answer["text"] for answer in answers] == texts
    assert [answer["num_output_tokens"] for answer in answers] == [row["max_tokens"] for row in rows]

    whole = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").write_bytes(whole[: len(whole) // 2])
    assert run(*argv, "--resume", cwd=tmp_path).returncode == 0
    resumed = [json.loads(line).get("text") for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [text for text in resumed if text is not None] == texts


def test_a_chat_goes_on(address):
    done = run("chat", "--url", address, "--max-tokens", "6", input="Hello\nAgain\n/retry\n")

    answers = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert len(answers) == 3
    assert answers[1] == answers[2]


@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_ctrl_c_frees_the_server(simulated_server, scheme, verb, tmp_path):
    """The twin takes one request at a time: the next is answered only when the first was cancelled."""
    address = url(simulated_server, scheme)
    options = ["--url", address, "--max-tokens", "20000", "--ignore-eos"]
    prompt = ["Go on and on."] if verb == "generate" else []
    with Terminal(verb, *prompt, *options, XDG_STATE_HOME=str(tmp_path)) as terminal:
        if verb == "chat":
            terminal.read_until("> ")
            terminal.type("Go on and on.\r")
            terminal.read_until("Go on and on.")
        while len(terminal.seen) < 400:
            terminal.read_until(" ")
        terminal.type(CTRL_C)
        if verb == "chat":
            terminal.read_until("[stopped]")
        else:
            assert terminal.exit_code() == 130
        with Client(address, timeouts=Timeouts(total=60)) as client:
            client.generate("Hi", max_tokens=1)
