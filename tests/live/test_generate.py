"""The same requests by every kind of client and by curl, many at once, and a client that leaves."""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from deepseek_triton_client import Client, DeadlineExceeded, Timeouts
from support.servers import url
from support.wire import LONG_ANSWER, post

PROMPTS = (
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
)


def test_the_quick_starts_own_line_works(tiny_server):
    """Word for word, but for the port; jq only prints, and Python's json.tool stands in where it isn't installed."""
    printer = "jq" if shutil.which("jq") else f"{sys.executable} -m json.tool"
    line = (
        """curl -sS -X POST localhost:8000/v2/models/tensorrt_llm/generate -d '{"text_input": "Hello, my name is", """
        """"sampling_param_temperature":0.8, "sampling_param_top_p":0.95}' | sed 's/^data: //' | """ + printer
    ).replace("8000", str(tiny_server.http_port))

    done = subprocess.run(["bash", "-c", f"set -o pipefail; {line}"], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert '"text_output": "' in done.stdout
    assert '"finish_reason": "length"' in done.stdout


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.8, "top_p": 0.95, "seed": 7}], ids=["greedy", "sampled"])
def test_the_same_request_gives_the_same_text_however_it_is_sent(client_kind, tiny_server, fields):
    with client_kind.client(tiny_server) as client:
        texts = [client.generate(PROMPTS[0], max_tokens=40, **fields).text]
        with client.stream(PROMPTS[0], max_tokens=40, **fields) as stream:
            chunks = [chunk.text for chunk in stream]
    body = {"text_input": PROMPTS[0], "max_tokens": 40, **fields}
    texts += ["".join(chunks), post(tiny_server, "generate", body).json()["text_output"]]

    assert texts[0]
    assert texts == texts[:1] * 3


def test_eight_at_once_get_the_texts_they_get_one_by_one(tiny_server):
    with Client(url(tiny_server, "http")) as http, Client(url(tiny_server, "grpc")) as grpc:

        def ask(client, prompt, max_tokens):
            return client.generate(prompt, max_tokens=max_tokens).text

        asked = [
            *((http, prompt, 12 + number) for number, prompt in enumerate(PROMPTS)),
            *((grpc, prompt, 24 + number) for number, prompt in enumerate(PROMPTS)),
        ]
        one_by_one = [ask(*each) for each in asked]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(ask, *zip(*asked, strict=True))) == one_by_one


@pytest.mark.parametrize("how", ["leave the block", "break off by time limit"])
def test_leaving_frees_the_place(client_kind, simulated_server, how):
    """The twin serves one request at a time. What a server counts then is test_client_leaving's."""
    with client_kind.client(simulated_server) as client:
        if how == "leave the block":
            with client.stream("first", max_tokens=LONG_ANSWER) as stream:
                next(iter(stream))
        else:
            with pytest.raises(DeadlineExceeded):
                client.generate("first", max_tokens=LONG_ANSWER, timeouts=Timeouts(total=0.5))

        # Its place taken, this would wait for the 25 s of the first: far over the limit.
        assert client.generate("second", max_tokens=4, timeouts=Timeouts(total=12)).num_output_tokens == 4
