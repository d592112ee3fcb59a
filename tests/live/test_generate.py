"""The reference engine under a real tritonserver: real forward passes, over HTTP and gRPC, streamed and not."""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from support.servers import url

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
            texts.append("".join(chunk.text for chunk in stream))
    body = {"text_input": PROMPTS[0], "max_tokens": 40, **fields}
    texts.append(_post(tiny_server, "generate", body).json()["text_output"])

    assert texts[0]
    assert texts == texts[:1] * 3


def test_seeds_make_a_difference(tiny):
    texts = {tiny.generate(PROMPTS[0], max_tokens=20, temperature=0.8, seed=seed).text for seed in range(4)}

    assert len(texts) > 1


def test_a_stream_comes_in_increments_with_usage_at_the_end(tiny):
    with tiny.stream(PROMPTS[2], max_tokens=200) as stream:
        chunks = list(stream)

    assert len(chunks) > 4
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1].finish_reason, chunks[-1].num_output_tokens) == ("length", 200)
    assert chunks[-1].num_input_tokens > 4


def test_sixteen_at_once_get_the_texts_they_get_one_by_one(tiny):
    requests = [(prompt, tokens) for prompt in PROMPTS for tokens in (12, 24, 36, 48)]

    def ask(request):
        return tiny.generate(request[0], max_tokens=request[1]).text

    one_by_one = [ask(request) for request in requests]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, requests)) == one_by_one


def test_a_stop_string_ends_the_text_before_it(tiny):
    whole = tiny.generate(PROMPTS[0], max_tokens=30).text
    stop = whole[len(whole) // 2 :][:6]

    completion = tiny.generate(PROMPTS[0], max_tokens=30, stop=[stop])

    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == whole[: whole.index(stop)]


def test_the_prompt_is_echoed_on_request(tiny):
    echoed = tiny.generate(PROMPTS[1], max_tokens=5, exclude_input_from_output=False).text

    assert echoed == PROMPTS[1] + tiny.generate(PROMPTS[1], max_tokens=5).text


def test_no_event_of_a_stream_splits_a_character(simulated_server):
    """The twin's words are partly Chinese and emoji; every event must be whole UTF-8 by itself."""
    body = {"text_input": "你好", "stream": True, "max_tokens": 200}
    address = f"{url(simulated_server, 'http')}/v2/models/tensorrt_llm/generate_stream"
    with httpx.stream("POST", address, json=body, timeout=60) as response:
        events = [line for line in response.iter_raw() if line.strip()]

    assert len(events) > 10
    text = b"".join(events).decode()
    assert "�" not in text
    assert any(ord(character) > 0xFFFF for character in text)


def _post(server, verb, body):
    return httpx.post(f"{url(server, 'http')}/v2/models/tensorrt_llm/{verb}", json=body, timeout=60)
