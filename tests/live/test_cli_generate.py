"""The command line over the client against real tritonservers, over HTTP and gRPC."""

import json
import subprocess
import sys

import pytest

from deepseek_triton_client import Client, Timeouts
from support.commands import run_command
from support.servers import url
from support.terminal_session import CTRL_C, Terminal

COMMAND = [sys.executable, "-m", "deepseek_triton_tools.cli.main"]


@pytest.fixture(params=["http", "grpc"])
def address(request, tiny_server):
    return url(tiny_server, request.param)


def run(*argv, given):
    return subprocess.run([*COMMAND, *argv], capture_output=True, text=True, input=given)


def test_a_prompt_is_answered_the_same_however_it_is_given(address, tmp_path):
    (tmp_path / "prompt").write_text("Hello, my name is")
    options = ["--url", address, "--max-tokens", "20"]
    with Client(address) as client:
        expected = client.generate("Hello, my name is", max_tokens=20).text

    for done in (
        run_command("generate", "Hello, my name is", *options),
        run_command("generate", "Hello, my name is", "--no-stream", *options),
        run_command("generate", "--file", str(tmp_path / "prompt"), *options),
        run("generate", *options, given="Hello, my name is"),
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


def test_a_batch_has_the_texts_of_single_requests(address, tmp_path):
    rows = [{"prompt": f"The number {number} is", "max_tokens": 4 + number % 5} for number in range(12)]
    rows[5]["temperature"] = 101
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    files = ("--input", str(given), "--output", str(out))
    done = run_command("generate", "--url", address, *files, "--concurrency", "8")

    assert done.returncode == 1
    assert "12 of 12 rows done, 1 failed" in done.stderr
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert answers.pop(5)["error"]["code"] == "E_INVALID_ARGUMENT"
    rows.pop(5)
    with Client(address) as client:
        texts = [client.generate(row["prompt"], max_tokens=row["max_tokens"]).text for row in rows]
    assert [answer["text"] for answer in answers] == texts
    assert [answer["num_output_tokens"] for answer in answers] == [row["max_tokens"] for row in rows]


def test_a_chat_goes_on(address):
    done = run("chat", "--url", address, "--max-tokens", "6", given="Hello\nAgain\n/retry\n")

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
