"""Bad input is answered in one clear line with the right code, whichever way it comes, and the server goes on serving.

What each field takes is tested where it is read: tests/backend/test_parsing.py and test_field_ranges.py.
"""

import httpx
import pytest

from support.servers import url
from support.wire import WAYS, ask

LONG = "word " * 20_000


@pytest.fixture(scope="module")
def http(tiny_server):
    with httpx.Client(base_url=f"{url(tiny_server, 'http')}/v2/models", timeout=60) as client:
        yield client
        answer = client.post("/tensorrt_llm/generate", json={"text_input": "still there?", "max_tokens": 2})
        assert answer.status_code == 200


REFUSED = [  # a body of /generate, and the code and the part of the line that names the field
    ({"sampling_param_max_tokens": 4}, "[E_INVALID_ARGUMENT] text_input: "),
    ({"text_input": ["a", ""]}, "[E_INVALID_ARGUMENT] text_input: expected a prompt, got an empty string"),
    ({"text_input": LONG}, "[E_PROMPT_TOO_LONG]"),
    ({"text_input": "x", "max_tokens": "ten"}, "[E_INVALID_ARGUMENT] max_tokens: expected a whole number, got 'ten'"),
    ({"text_input": "x", "max_tokenz": 1}, "did you mean 'max_tokens'?"),
    ({"text_input": "x", "sampling_parameters": "{"}, "[E_INVALID_ARGUMENT] sampling_parameters: "),
]


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_what_the_backend_refuses_is_a_400_with_a_code(http, verb, subtests):
    for body, expected in REFUSED:
        with subtests.test(expected):
            answer = http.post(f"/tensorrt_llm/{verb}", json=body)
            assert answer.status_code == 400
            assert expected in answer.text.replace('\\"', '"')
            assert answer.text.count("\n") <= 2


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_a_body_without_any_input_is_answered_by_triton_which_names_the_prompt(http, verb):
    for body in ({}, {"prompt": "x"}, {"max_tokens": 4}):
        answer = http.post(f"/tensorrt_llm/{verb}", json=body)
        assert answer.status_code == 400
        assert "missing required input(s) ['text_input']" in answer.json()["error"]


ALL_WAYS = [  # fields of a body, and how the refusal begins
    ({"sampling_param_stop_token_ids": [5, -1]}, "stop_token_ids: expected a number >= 0"),
    ({"sampling_parameters": '{"top_p": NaN}'}, "top_p: expected a number, got nan"),
    ({"timeout_ms": 0}, "timeout_ms: expected a number >= 1"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens: expected at most max_tokens, which is 8, got 9"),
    ({"text_input": None, "input_ids": [3, 10**6]}, "input_ids: expected token ids from 0 to "),
    ({"text_input": None, "messages": '[{"role": "x", "content": ""}]'}, "messages[0].role: expected one of system, "),
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_field_is_refused_with_its_limit(tiny_server, way, subtests):
    for fields, expected in ALL_WAYS:
        with subtests.test(expected):
            body = {"text_input": "x", "temperature": 1.0, **fields}
            refusal = ask(tiny_server, way, {name: value for name, value in body.items() if value is not None})
            assert refusal.refusal().startswith(f"[E_INVALID_ARGUMENT] {expected}")


def test_bytes_that_are_no_utf8_are_refused_with_a_code(http):
    for content in (
        b'{"text_input": "x", "id": "\xff"}',
        b'{"text_input": "x", "tag": "\xff"}',
        b'{"text_input": "\xff"}',
    ):
        answer = http.post("/tensorrt_llm/generate", content=content)
        assert answer.status_code == 400
        assert "[E_INVALID_ARGUMENT]" in answer.text


def test_what_triton_itself_refuses_is_an_error_too(http):
    """These never reach the model; tritonserver 2.51 answers 500 in its own words."""
    for content, expected in {
        b"not json": "failed to parse the request JSON",
        b'{"text_input": 5}': "access JSON non-string as string",
        b'{"text_input": "x", "sampling_param_top_p": "a"}': "Unable to parse",
    }.items():
        answer = http.post("/tensorrt_llm/generate", content=content)
        assert answer.status_code in (400, 500)
        assert expected in answer.json()["error"]
