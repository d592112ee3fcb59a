"""POST /v1/chat/completions through the whole application: what is asked of the model's server, and what comes back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from deepseek_triton_tools.gateway.protocol.chat_request import CHAT_FIELDS
from deepseek_triton_tools.gateway.protocol.completion_request import COMPLETION_FIELDS
from deepseek_triton_tools.gateway.protocol.openai_fields import INPUTS, REFUSED, SAMPLING, WITHOUT_EFFECT
from gateway.openai_facts import faults
from gateway.scripted_triton import ScriptedTriton, gateway_of

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
LAST = {
    "finish_reason": "stop",
    "num_input_tokens": 5,
    "num_output_tokens": 3,
    "num_cached_tokens": 4,
    "num_reasoning_tokens": 1,
}
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 3,
    "total_tokens": 8,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 1},
    "prompt_cache_hit_tokens": 4,
    "prompt_cache_miss_tokens": 1,
}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ScriptedTriton, TestClient]]:
    triton = ScriptedTriton()
    with gateway_of(triton) as client:
        yield triton, client


@pytest.fixture
def triton(served: tuple[ScriptedTriton, TestClient]) -> ScriptedTriton:
    scripted = served[0]
    scripted.events, scripted.status, scripted.pause_s = [{"text_output": "Hello", **LAST}], 200, 0.0
    scripted.asked.clear()
    return scripted


@pytest.fixture
def client(served: tuple[ScriptedTriton, TestClient]) -> TestClient:
    return served[1]


def chunks_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_an_answer(triton: ScriptedTriton, client: TestClient) -> None:
    triton.events = [{"reasoning_output": "hm"}, {"text_output": "Hel"}, {"text_output": "lo", **LAST}]
    document = client.post(PATH, json={"messages": MESSAGES, "max_tokens": 9, "user": "me", "top_k": None}).json()
    assert faults(document, "CreateChatCompletionResponse") == []
    [choice] = document["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None, "reasoning_content": "hm"}
    assert (choice["finish_reason"], document["usage"]) == ("stop", USAGE)
    assert document["system_fingerprint"].startswith("fp_")
    [asked] = triton.asked
    assert json.loads(asked["sampling_parameters"]) == {"max_tokens": 9, "n": 1}
    assert asked["streaming"] is False


def test_a_stream(triton: ScriptedTriton, client: TestClient) -> None:
    triton.events = [{"reasoning_output": "hm"}, {"text_output": "Hel"}, {"text_output": "lo", **LAST}]
    asked = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = chunks_of(client.post(PATH, json=asked).text)
    assert [fault for chunk in (*chunks, usage) for fault in faults(chunk, "CreateChatCompletionStreamResponse")] == []
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, None, "stop"]
    assert (usage["choices"], usage["usage"]) == ([], USAGE)


@pytest.mark.parametrize(
    ("reason", "stop_reason", "told", "beside"),
    [
        ("stop", "None", "stop", None),
        ("stop", "###", "stop", "###"),
        ("length", "None", "length", None),
        ("timeout", "None", "length", "timeout"),
        ("cancelled", "None", "stop", "cancelled"),
    ],
)
def test_why_an_answer_ended(
    triton: ScriptedTriton, client: TestClient, reason: str, stop_reason: str, told: str, beside: str | None
) -> None:
    triton.events = [{"text_output": "x", **LAST, "finish_reason": reason, "stop_reason": stop_reason}]
    [choice] = client.post(PATH, json={"messages": MESSAGES}).json()["choices"]
    assert (choice["finish_reason"], choice.get("stop_reason")) == (told, beside)


@pytest.mark.parametrize("body", [{"temperature": 0}, {"top_k": 1}], ids=str)
def test_greedy_choices_are_one_answer_told_several_times(
    triton: ScriptedTriton, client: TestClient, body: dict[str, Any]
) -> None:
    document = client.post(PATH, json={"messages": MESSAGES, "n": 3, **body}).json()
    assert [choice["index"] for choice in document["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in document["choices"]} == {"Hello"}
    assert document["usage"]["completion_tokens"] == 3  # they were generated once
    assert json.loads(triton.asked[0]["sampling_parameters"])["n"] == 1


def test_several_choices_are_sampled_unless_a_temperature_says_otherwise(
    triton: ScriptedTriton, client: TestClient
) -> None:
    names = {"sequence_index": [0, 1], "text_output": ["a", "b"]}
    triton.events = [{**names, **{name: [value, value] for name, value in LAST.items()}}]
    document = client.post(PATH, json={"messages": MESSAGES, "n": 2}).json()
    assert [choice["message"]["content"] for choice in document["choices"]] == ["a", "b"]
    assert json.loads(triton.asked[0]["sampling_parameters"]) == {"n": 2, "temperature": 1.0}


def test_log_probabilities(triton: ScriptedTriton, client: TestClient) -> None:
    told = [{"7": {"logprob": -0.5, "decoded_token": "é"}, "8": {"logprob": -0.1, "decoded_token": "b"}}]
    triton.events = [{"text_output": "é", "logprobs": json.dumps(told), **LAST}]
    asked = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}
    [token] = client.post(PATH, json=asked).json()["choices"][0]["logprobs"]["content"]
    assert token == {
        "token": "é",
        "logprob": -0.5,
        "bytes": [195, 169],
        "top_logprobs": [{"token": "b", "logprob": -0.1, "bytes": [98]}],
    }


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"echo": True}, "echo"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"thinking": {"type": "maybe"}}, "thinking"),
        ({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": False}}, "thinking"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(triton: ScriptedTriton, client: TestClient, body: dict[str, Any], param: str) -> None:
    answer = client.post(PATH, json={"messages": MESSAGES, **body})
    assert answer.status_code == 400
    assert faults(answer.json(), "ErrorResponse") == []
    error = answer.json()["error"]
    if param != "thinking":
        assert error["param"] == param
    assert param in error["message"]
    assert triton.asked == []


def test_the_nearest_known_field_is_told(client: TestClient) -> None:
    error = client.post(PATH, json={"messages": MESSAGES, "temprature": 1}).json()["error"]
    assert error["message"] == "unknown field 'temprature'. Did you mean temperature?"


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"\xff\xfe", {}, 400),
        (b"[" * 100_000, {}, 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', {}, 400),
        (b"{}", {"Content-Type": "text/plain"}, 415),
        (b"{}", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        (b" " * (64 * 2**20 + 1), {}, 413),
    ],
    ids=["cut", "not UTF-8", "deep", "half a character", "text", "form", "large"],
)
def test_bodies_that_are_no_request(client: TestClient, content: bytes, headers: dict[str, str], status: int) -> None:
    answer = client.post(PATH, content=content, headers={"Content-Type": "application/json", **headers})
    assert answer.status_code == status
    assert faults(answer.json(), "ErrorResponse") == []


@pytest.mark.parametrize(
    ("code", "of_server", "status", "told"),
    [
        ("E_INVALID_ARGUMENT", 400, 400, None),
        ("E_UNSUPPORTED", 400, 400, "unsupported_parameter"),
        ("E_PROMPT_TOO_LONG", 400, 400, "context_length_exceeded"),
        ("E_INTERNAL", 500, 500, "internal_error"),
    ],
)
def test_what_the_server_refuses(
    triton: ScriptedTriton, client: TestClient, code: str, of_server: int, status: int, told: str | None
) -> None:
    triton.events, triton.status = [{"error": f"[{code}] top_p: expected less"}], of_server
    answer = client.post(PATH, json={"messages": MESSAGES, "stream": True})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, told)
    assert answer.json()["error"]["message"].endswith("top_p: expected less")


@pytest.mark.parametrize(
    "last",
    [[{"error": "[E_INTERNAL] the engine died"}], []],
    ids=["an error", "nothing more"],
)
def test_a_stream_that_fails_ends_with_one_error(
    triton: ScriptedTriton, client: TestClient, last: list[dict[str, Any]]
) -> None:
    triton.events = [{"text_output": "Hel"}, *last]
    triton.pause_s = 0.05
    events = client.post(PATH, json={"messages": MESSAGES, "stream": True}).text.split("\n\n")
    assert events.pop() == ""
    assert list(json.loads(events[-1].removeprefix("data: "))) == ["error"]
    assert not any("[DONE]" in event for event in events)


def test_an_answer_without_an_end_is_an_error(triton: ScriptedTriton, client: TestClient) -> None:
    triton.events = [{"text_output": "Hel"}]
    assert client.post(PATH, json={"messages": MESSAGES}).status_code == 502


def test_a_body_that_does_not_say_what_it_is(client: TestClient) -> None:
    """A page of a stranger may send one through a browser without being allowed to."""
    assert client.post(PATH, content=json.dumps({"messages": MESSAGES}).encode()).status_code == 415


def test_clients_are_not_told_of_servers(triton: ScriptedTriton, client: TestClient) -> None:
    triton.events, triton.status = [{"error": "http://10.1.2.3:8000 is broken"}], 500
    answer = client.post(PATH, json={"messages": MESSAGES})
    assert answer.status_code == 502
    assert "10.1.2.3" not in answer.text


@pytest.mark.parametrize("path", [PATH, "/v1/completions", "/v1/responses"])
def test_a_stream_that_waits_begins_with_comments(path: str) -> None:
    triton = ScriptedTriton()
    triton.events, triton.wait_s = [{"text_output": "Hello", **LAST}], 0.5
    asked = {PATH: {"messages": MESSAGES}, "/v1/completions": {"prompt": "Hi"}, "/v1/responses": {"input": "Hi"}}
    with gateway_of(triton, keep_alive_s=0.1) as client:
        text = client.post(path, json={**asked[path], "stream": True}).text
        triton.events, triton.status = [{"error": "[E_INVALID_ARGUMENT] top_p: expected less"}], 400
        refused = client.post(path, json={**asked[path], "stream": True})
    assert text.startswith(": keep-alive\n\n")
    assert "Hello" in text
    assert refused.status_code == 200
    assert "error" in json.loads(refused.text.split("\n\n")[-2].removeprefix("data: "))


def test_methods_and_paths(client: TestClient) -> None:
    for answer, status in ((client.get(PATH), 405), (client.post("/v1/nothing", json={}), 404)):
        assert answer.status_code == status
        assert faults(answer.json(), "ErrorResponse") == []


@pytest.mark.parametrize("base", ["", "/beta"])
def test_the_other_base_urls_of_deepseeks_own_api(triton: ScriptedTriton, client: TestClient, base: str) -> None:
    """They have no routes of their own in metrics and logs."""
    chat, completion = {"messages": MESSAGES}, {"prompt": "Hi"}
    answers = [client.get(f"{base}/models"), client.get(f"{base}/models/tiny")]
    answers += [client.post(base + path, json=chat) for path in ("/chat/completions", "/chat/completions/")]
    answers.append(client.post(f"{base}/completions", json=completion))
    assert [answer.status_code for answer in answers] == [200] * 5
    routes = set(re.findall(r'route="([^"]*)"', client.get("/metrics").text))
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= routes
    assert {route for route in routes if route.startswith(("/chat", "/completions", "/models", "/beta"))} == set()


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/v1/chat/completions", "; did you mean /v1/chat/completions?"),
        ("/v1/tokenize", "; did you mean /tokenize?"),
        ("/v1/embeddings", ""),
    ],
)
def test_the_nearest_path_is_told(client: TestClient, path: str, hint: str) -> None:
    assert client.post(path, json={}).json()["error"]["message"] == f"nothing is at {path}{hint}"


def test_every_field_has_one_place() -> None:
    """Refusals apply to a field that nobody reads."""
    places = [set(SAMPLING), set(INPUTS), set(WITHOUT_EFFECT)]
    assert sum(map(len, places)) == len(set().union(*places))
    assert not set(REFUSED) & set().union(*places)
    assert set(REFUSED) & (CHAT_FIELDS | COMPLETION_FIELDS) == {"echo", "suffix", "best_of"}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(sorted({*SAMPLING, *INPUTS, *WITHOUT_EFFECT, *REFUSED, *CHAT_FIELDS, *COMPLETION_FIELDS}))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from([PATH, "/v1/completions"]), body=st.dictionaries(FIELDS | st.text(max_size=8), VALUES))
def test_any_request_is_answered_or_refused(
    triton: ScriptedTriton, client: TestClient, path: str, body: dict[str, Any]
) -> None:
    """n is left alone: the scripted answer has one sequence."""
    usual = {"messages": MESSAGES, "prompt": "Hi"}
    required = "messages" if path == PATH else "prompt"
    asked = {
        required: usual[required],
        **{name: value for name, value in body.items() if name not in ("n", "best_of")},
    }
    answer = client.post(path, json=asked)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert faults(answer.json(), "ErrorResponse") == []


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", PATH, 405)])
def test_what_no_route_takes_has_its_request_id(client: TestClient, method: str, path: str, status: int) -> None:
    answer = client.request(method, path, headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (status, "mine")
    assert f'route="other",status="{status}"' in client.get("/metrics").text
