"""The command line over the client against real tritonservers, over HTTP and gRPC."""

import subprocess
import sys

import pytest

from deepseek_triton_client import Client
from support.commands import run_command
from support.servers import url

COMMAND = [sys.executable, "-m", "deepseek_triton_tools.cli.main"]


@pytest.fixture(params=["http", "grpc"])
def address(request, tiny_server):
    return url(tiny_server, request.param)


def run(*argv, given):
    return subprocess.run([*COMMAND, *argv], capture_output=True, text=True, input=given)


def test_a_prompt_is_answered_the_same_however_it_is_given(address, tmp_path):
    (tmp_path / "prompt").write_text("Hello, my name is")
    options = ["--raw", "--url", address, "--max-tokens", "20"]
    with Client(address) as client:
        expected = client.generate("Hello, my name is", max_tokens=20).text

    for done in (
        run_command("generate", "Hello, my name is", *options),
        run_command("generate", "Hello, my name is", "--no-stream", *options),
        run_command("generate", "--file", str(tmp_path / "prompt"), *options),
        run("generate", *options, given="Hello, my name is"),
    ):
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{expected}\n", "")


def test_a_chat_goes_on(address):
    done = run("chat", "--url", address, "--max-tokens", "6", given="Hello\nAgain\n/retry\n")

    answers = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert len(answers) == 3
    assert answers[1] == answers[2]
