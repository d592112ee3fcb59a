"""Bad input is answered in one clear line with the right code, and the server goes on serving."""

import json

import httpx
import pytest

from support.servers import url
from support.wire import WAYS, WHOLE, Sent, ask, exchange, strings

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
        pytest.param(
            {"sampling_param_max_tokens": 4},
            "text_input: expected a prompt in one of text_input, messages, input_ids, got none",
            id="no prompt",
        ),
        pytest.param({"text_input": ""}, "[E_INVALID_ARGUMENT] text_input: expected a prompt, got an", id="empty"),
        pytest.param({"text_input": ["a", ""]}, "expected a prompt, got an empty string", id="one of two is empty"),
        pytest.param({"text_input": "a", "input_ids": [1]}, "got text_input and input_ids", id="two kinds of prompt"),
        pytest.param({"text_input": LONG}, "[E_PROMPT_TOO_LONG]", id="longer than the context"),
        pytest.param({"text_input": "x", "max_tokens": -1}, "max_tokens: expected a number >= 1", id="negative"),
        pytest.param({"text_input": "x", "sampling_param_max_tokens": 0}, "max_tokens: expected", id="zero tensor"),
        pytest.param({"text_input": "x", "max_tokens": "ten"}, "expected a whole number, got 'ten'", id="wrong type"),
        pytest.param({"text_input": "x", "max_tokenz": 1}, "did you mean 'max_tokens'?", id="misspelt"),
        pytest.param({"text_input": "x", "top_p": 1.5}, "top_p: expected a number >= 0 and <= 1, got 1.5", id="range"),
        pytest.param({"text_input": "x", "sampling_parameters": "{"}, "expected a JSON object", id="inner JSON"),
    ],
)
def test_what_the_backend_refuses_is_a_400_with_a_code(http, verb, body, expected):
    answer = http.post(f"/tensorrt_llm/{verb}", json=body)

    assert answer.status_code == 400
    assert expected in answer.text.replace('\\"', '"')
    assert answer.text.count("\n") <= 2


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
@pytest.mark.parametrize("body", [{}, {"prompt": "x"}, {"max_tokens": 4}])
def test_a_body_without_any_input_is_answered_by_triton_which_names_the_prompt(http, verb, body):
    answer = http.post(f"/tensorrt_llm/{verb}", json=body)

    assert answer.status_code == 400
    assert "missing required input(s) ['text_input']" in answer.json()["error"]


OUT_OF_RANGE = [
    ("max_tokens", 0, ">= 1"),
    ("max_tokens", -(2**31), ">= 1"),
    ("temperature", -0.5, ">= 0 and <= 100"),
    ("temperature", 101.0, ">= 0 and <= 100"),
    ("top_k", -1, ">= 0"),
    ("top_p", -0.25, ">= 0 and <= 1"),
    ("top_p", 1.5, ">= 0 and <= 1"),
    ("min_p", -0.5, ">= 0 and <= 1"),
    ("min_p", 2.0, ">= 0 and <= 1"),
    ("repetition_penalty", 0.0, ">= 0.01 and <= 10"),
    ("repetition_penalty", 11.0, ">= 0.01 and <= 10"),
    ("presence_penalty", 2.5, ">= -2 and <= 2"),
    ("presence_penalty", -2.5, ">= -2 and <= 2"),
    ("frequency_penalty", 3.0, ">= -2 and <= 2"),
    ("frequency_penalty", -3.0, ">= -2 and <= 2"),
    ("min_tokens", -1, ">= 0"),
    ("stop_token_ids", [5, -1], ">= 0"),
    ("n", 0, ">= 1 and <= 64"),
    ("n", 65, ">= 1 and <= 64"),
    ("best_of", 0, ">= 1 and <= 64"),
    ("best_of", 65, ">= 1 and <= 64"),
    ("logprobs", -1, ">= 0 and <= 20"),
    ("logprobs", 21, ">= 0 and <= 20"),
    ("prompt_logprobs", 21, ">= 0 and <= 20"),
    ("truncate_prompt_tokens", 0, ">= 1"),
    ("stop", [""], "a string that is not empty"),
    ("stop", ["x"] * 65, "at most 64 values, got 65"),
    ("stop", ["x" * 1025], "at most 1024 characters, got 1025"),
    ("bad", [""], "a string that is not empty"),
    ("bad", ["x"] * 65, "at most 64 values, got 65"),
    ("stop_token_ids", [1] * 65, "at most 64 values, got 65"),
    ("logit_bias", '{"5": 100.5}', ">= -100 and <= 100, got 100.5"),
    ("logit_bias", '{"the": 1}', "token ids from 0 as keys, got 'the'"),
    ("logit_bias", "[5]", "a JSON object, got [5]"),
    ("guided_json", "[]", "a JSON object, got []"),
    ("guided_json", "{", "a JSON object, got text that is not JSON"),
    ("guided_structural_tag", "7", "a JSON object, got 7"),
    ("guided_regex", "x" * 65537, "at most 65536 characters, got 65537"),
    ("guided_grammar", "", "a string that is not empty"),
]
"""(sampling field, value that its tensor can hold, limit as the message has it)"""

OTHERS = [
    ("timeout_ms", 0, ">= 1"),
    ("timeout_ms", -5, ">= 1"),
    ("priority", -(2**31), ">= -2147483647"),
    ("stream_mode", "both", "'delta' or 'cumulative', got 'both'"),
    ("sampling_parameters", "[1]", "a JSON object, got [1]"),
    ("sampling_parameters", '{"max_tokens": 1', "a JSON object, got text that is not JSON"),
    ("chat_template_kwargs", "true", "a JSON object, got True"),
]
"""Of the request as a whole."""

WRONG_TYPES = [
    ("max_tokens", 1.5, "a whole number, got 1.5"),
    ("max_tokens", True, "a whole number, got True"),
    ("max_tokens", 2**31, "<= 2147483647, got 2147483648"),
    ("temperature", "hot", "a number, got 'hot'"),
    ("temperature", True, "a number, got True"),
    ("temperature", 10**400, "<= 100, got 1000000"),
    ("top_p", [0.5], "a number, got [0.5]"),
    ("seed", 2**64, "<= 18446744073709551615, got 18446744073709551616"),
    ("ignore_eos", 1, "true or false, got 1"),
    ("ignore_eos", "yes", "true or false, got 'yes'"),
    ("stop", 7, "a string that is not empty, got 7"),
    ("stop", ["x", None], "a string that is not empty, got None"),
    ("stop_token_ids", ["x"], "a whole number, got 'x'"),
    ("n", {"of": 2}, "a whole number, got {'of': 2}"),
]
"""What only JSON can hold."""


def _shortened(value):
    text = str(value)
    return text if len(text) < 24 else f"{text[:20]}..."


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(("name", "value", "limit"), OUT_OF_RANGE, ids=_shortened)
def test_a_tensor_out_of_range_is_refused_with_the_limit(tiny_server, way, name, value, limit):
    body = {"text_input": "x", "temperature": 1.0, f"sampling_param_{name}": value}

    refusal = ask(tiny_server, way, body).refusal()

    assert refusal.startswith(f"[E_INVALID_ARGUMENT] {name}: expected ")
    assert limit in refusal


@pytest.mark.parametrize("way", WHOLE, ids=str)
@pytest.mark.parametrize(("name", "value", "limit"), OUT_OF_RANGE + WRONG_TYPES, ids=_shortened)
def test_a_value_in_json_is_refused_with_the_limit(tiny_server, way, name, value, limit):
    body = {"text_input": "x", "temperature": 1.0, "sampling_parameters": json.dumps({name: value})}

    refusal = ask(tiny_server, way, body).refusal()

    assert refusal.startswith(f"[E_INVALID_ARGUMENT] {name}: expected ")
    assert limit in refusal


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(("name", "value", "limit"), OTHERS, ids=_shortened)
def test_a_field_of_the_request_is_refused_with_the_limit(tiny_server, way, name, value, limit):
    refusal = ask(tiny_server, way, {"text_input": "x", name: value}).refusal()

    assert refusal.startswith(f"[E_INVALID_ARGUMENT] {name}: expected ")
    assert limit in refusal


@pytest.mark.parametrize("way", WHOLE, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_no_number_is_refused(tiny_server, way, value):
    """A gRPC tensor holds it, and Python's JSON; /generate's own JSON does not."""
    fields = {"sampling_param_temperature": value} if way.scheme == "grpc" else {}
    document = json.dumps({"top_p": value})

    refusal = ask(tiny_server, way, {"text_input": "x", "sampling_parameters": document, **fields}).refusal()

    for name in ("top_p", "temperature") if fields else ("top_p",):
        assert f"{name}: expected a number, got {value}" in refusal


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens: expected at most max_tokens, which is 8, got 9"),
        ({"n": 3, "best_of": 2}, "best_of: expected at least n, which is 3, got 2"),
        ({"exclude_input_in_output": True, "exclude_input_from_output": False}, "expected one value, got"),
        ({"guided_regex": "a", "guided_json_object": True}, "expected one of them, got 2"),
    ],
    ids=_shortened,
)
def test_what_contradicts_is_refused(tiny_server, way, fields, expected):
    refusal = ask(tiny_server, way, {"text_input": "x", "temperature": 1.0, **fields}).refusal()

    assert refusal.startswith("[E_INVALID_ARGUMENT] ")
    assert expected in refusal


def test_a_stop_string_by_the_plain_name_is_told_where_it_belongs(tiny_server):
    """As a gRPC request parameter; in a body of /generate it is the tensor, of a type that Triton itself refuses."""
    tensors = {"text_input": strings("x")}

    refusal = exchange(tiny_server, Sent(tensors=tensors, parameters={"stop": "."})).only_error()

    expected = "stop: expected true or false, got '.' (stop strings are \"sampling_param_stop\")"
    assert refusal == f"[E_INVALID_ARGUMENT] {expected}"


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"text_input": ["x"] * 257}, "text_input: expected at most 256 prompts, got 257"),
        (
            {"input_ids": [3], "exclude_input_from_output": False},
            "exclude_input_from_output: false needs a prompt in text",
        ),
        ({"input_ids": [3, -1]}, "input_ids: expected token ids from 0"),
        ({"input_ids": [3, 10**6]}, "input_ids: expected token ids from 0 to "),
        ({"messages": "Hello"}, "messages: expected a JSON array, got text that is not JSON"),
        ({"messages": "{}"}, "messages: expected a JSON array of messages, got an object"),
        ({"messages": "[]"}, "messages: expected at least one message, got an empty array"),
        ({"messages": '[{"role": "user"}]'}, "messages[0]: expected an object with role and content, got 'role'"),
        ({"messages": '[{"role": "x", "content": ""}]'}, "messages[0].role: expected one of system, developer, user, "),
        (
            {"messages": '[{"role": "user", "content": ""}]', "chat_template_kwargs": '{"chat_template": "x"}'},
            "chat_template_kwargs: chat_template can't be set by a request",
        ),
    ],
    ids=_shortened,
)
def test_a_bad_prompt_is_refused(tiny_server, way, body, expected):
    refusal = ask(tiny_server, way, body).refusal()

    assert refusal.startswith("[E_INVALID_ARGUMENT] ")
    assert expected in refusal


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
