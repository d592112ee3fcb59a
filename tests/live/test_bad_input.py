"""Bad input is answered in one clear line with the right code, and the server goes on serving."""

import httpx
import pytest
from servers import url

from deepseek_triton_client import Client, InvalidRequest, ModelNotFound

LONG = "word " * 20_000


@pytest.fixture(scope="module")
def http(tiny_server):
    with httpx.Client(base_url=f"{url(tiny_server, 'http')}/v2/models", timeout=60) as client:
        yield client
        answer = client.post("/tensorrt_llm/generate", json={"text_input": "still there?", "max_tokens": 2})
        assert answer.status_code == 200


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param({}, "[E_INVALID_ARGUMENT] text_input: expected a prompt, got none", id="missing prompt"),
        pytest.param({"text_input": ""}, "[E_INVALID_ARGUMENT] text_input: expected a prompt, got an", id="empty"),
        pytest.param({"text_input": ["a", "b"]}, "expected one prompt, got 2", id="two prompts"),
        pytest.param({"text_input": LONG}, "[E_PROMPT_TOO_LONG]", id="longer than the context"),
        pytest.param({"text_input": "x", "max_tokens": -1}, "max_tokens: expected a number >= 1", id="negative"),
        pytest.param({"text_input": "x", "sampling_param_max_tokens": 0}, "max_tokens: expected", id="zero tensor"),
        pytest.param({"text_input": "x", "max_tokens": "ten"}, "expected a whole number, got 'ten'", id="wrong type"),
        pytest.param({"text_input": "x", "max_tokenz": 1}, "did you mean 'max_tokens'?", id="misspelt"),
        pytest.param({"text_input": "x", "top_p": 1.5}, "top_p: expected a number > 0 and <= 1, got 1.5", id="range"),
        pytest.param({"text_input": "x", "sampling_parameters": "{"}, "expected a JSON object", id="inner JSON"),
    ],
)
def test_what_the_backend_refuses_is_a_400_with_a_code(http, verb, body, expected):
    answer = http.post(f"/tensorrt_llm/{verb}", json=body)

    assert answer.status_code == 400
    assert expected in answer.text.replace('\\"', '"')
    assert answer.text.count("\n") <= 2


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b'{"text_input": "x", "id": "\xff"}', id="id"),
        pytest.param(b'{"text_input": "x", "tag": "\xff"}', id="parameter"),
        pytest.param(b'{"text_input": "\xff"}', id="prompt"),
    ],
)
def test_bytes_that_are_no_utf8_are_refused_with_a_code(http, content):
    answer = http.post("/tensorrt_llm/generate", content=content)

    assert answer.status_code == 400
    assert "[E_INVALID_ARGUMENT]" in answer.text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(b"not json", "failed to parse the request JSON", id="not JSON"),
        pytest.param(b'{"text_input": 5}', "access JSON non-string as string", id="prompt of wrong type"),
        pytest.param(b'{"text_input": "x", "sampling_param_top_p": "a"}', "Unable to parse", id="tensor of wrong type"),
    ],
)
def test_what_triton_itself_refuses_is_an_error_too(http, content, expected):
    """These never reach the model; tritonserver 2.51 answers 500 in its own words."""
    answer = http.post("/tensorrt_llm/generate", content=content)

    assert answer.status_code in (400, 500)
    assert expected in answer.json()["error"]


def test_an_unknown_model_is_a_404(http):
    assert http.post("/gpt/generate", json={"text_input": "x"}).status_code == 404


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_the_client_raises_typed_errors(tiny_server, scheme):
    with Client(url(tiny_server, scheme)) as client, pytest.raises(InvalidRequest) as caught:
        client.generate("x", max_tokens=-1, request_id="job-1")
    assert (caught.value.code, caught.value.request_id) == ("E_INVALID_ARGUMENT", "job-1")

    with Client(url(tiny_server, scheme)) as client, pytest.raises(InvalidRequest, match="E_PROMPT_TOO_LONG"):
        client.generate(LONG)

    with Client(url(tiny_server, scheme), model_name="gpt") as client, pytest.raises(ModelNotFound):
        client.generate("x")
