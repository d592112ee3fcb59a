"""Requests in the shape of the tests of Triton's own OpenAI front end, answered by the gateway.

They are those of triton-inference-server/server, commit e1db8a603, python/openai/tests, as far as a client of OpenAI
does not make them in test_clients.py, without LoRA, embeddings, tokenizers of the front end, and loading of models.
The gateway answers otherwise in this: what is wrong gets 400 with `error`, not FastAPI's 422; `n` above 1,
`logit_bias`, a temperature above 2 and 20 likely tokens are allowed; `logprobs: 0` asks for the generated tokens' own.
"""

import contextlib
import http.client
from urllib.parse import urlsplit

import httpx
import pytest
from openai import AsyncOpenAI

from conformance.asked import TIME_TOOL, WEATHER_TOOL, post

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = "What is machine learning?"
MESSAGES = [{"role": "user", "content": PROMPT}]
SYSTEM = {"role": "system", "content": "You are a Triton Inference Server expert."}
TIME_CHOICE = {"type": "function", "function": {"name": TIME_TOOL["function"]["name"]}}
BIG_BODY_BYTES = 64 * 2**20
"""The front end's limit of a body, which is the gateway's too."""
WILD = {"temperature": 1.9, "max_tokens": 120, "ignore_eos": True}
"""After its own end the tiny model is sure of nothing; before, it says the same at any temperature."""
STORY = {CHAT: {"messages": [{"role": "user", "content": "Tell me a story."}], **WILD}}
STORY[COMPLETIONS] = {"prompt": "Once upon a time", **WILD}


@pytest.fixture
def ask(gateway_url, model_name):
    def ask(path, body, status=200):
        """The JSON of the answer, which has this status."""
        asked = {"messages": MESSAGES} if path == CHAT else {"prompt": PROMPT}
        response = post(gateway_url + path, {"model": model_name, **asked, **body})
        assert response.status_code == status, response.text
        return response.json()

    return ask


def content(answer):
    choice = answer["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


SAMPLING = [
    *({}, {"temperature": 0.7}, {"max_tokens": 10}, {"top_p": 0.9}, {"frequency_penalty": 0.5}, {"n": 1}),
    *({"presence_penalty": 0.2}, {"min_tokens": 16}, {"ignore_eos": True, "max_tokens": 30}, {"temperature": 2.1}),
    *({"logit_bias": {"0": 0}}, {"stream": False}),
]
ACCEPTED = {
    CHAT: [
        *SAMPLING,
        {"messages": [SYSTEM, *MESSAGES]},
        {"messages": [SYSTEM]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]},
        *({"max_completion_tokens": 10}, {"logprobs": True}, {"stop": "."}, {"stop": []}, {"stop": [".", ","]}),
    ],
    COMPLETIONS: [*SAMPLING, {"logprobs": 5}],
}
WRONG = [
    *({"temperature": -0.1}, {"max_tokens": -1}, {"top_p": 1.1}, {"frequency_penalty": 3}, {"frequency_penalty": -3}),
    *({"presence_penalty": 2.1}, {"presence_penalty": -2.1}, {"min_tokens": -1}, {"ignore_eos": 123}),
]
REFUSED = {
    CHAT: [
        *((body, next(iter(body))) for body in [*WRONG, {"max_completion_tokens": -1}]),
        ({"messages": []}, "messages"),
        ({"messages": [{}]}, "role"),
        ({"top_logprobs": 5}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 25}, "top_logprobs"),
        ({"tool_choice": TIME_CHOICE}, "tool"),
        ({"tool_choice": TIME_CHOICE, "tools": [WEATHER_TOOL]}, "tool"),
        ({"tool_choice": "required", "tools": []}, "tool"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
    COMPLETIONS: [
        *((body, next(iter(body))) for body in WRONG),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
}


@pytest.mark.sample
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_accepted_and_what_is_refused(ask, path, subtests):
    for body in ACCEPTED[path]:
        with subtests.test(body=body):
            answer = ask(path, body)
            assert content(answer).strip()
            assert answer["choices"][0].get("message", {"role": "assistant"})["role"] == "assistant"
            usage = answer["usage"]
            assert usage["prompt_tokens"] > 0
            assert usage["completion_tokens"] > 0
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    for body, word in REFUSED[path]:
        with subtests.test(body=body):
            error = ask(path, body, 400)["error"]
            assert error["type"] == "invalid_request_error"
            assert error.keys() == {"message", "type", "param", "code"}
            assert word in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_sampling(ask, path):
    names = ("max_tokens", "max_completion_tokens") if path == CHAT else ("max_tokens",)
    for name in names:
        words = [len(content(ask(path, {name: limit})).split()) for limit in (1, 1, 100)]
        assert words[:2] == [1, 1]
        assert words[2] > 1
    if path == CHAT:
        assert len(content(ask(path, {"max_tokens": 50, "max_completion_tokens": 1})).split()) == 1
    story = STORY[path]
    greedy = story | {"temperature": 0}
    first, second, other = (content(ask(path, body)) for body in (greedy, greedy, story))
    assert first == second != other
    assert content(ask(path, story)) != other
    first, second, other = (content(ask(path, story | {"seed": seed})) for seed in (1, 1, 2))
    assert first == second != other
    assert [choice["index"] for choice in ask(path, {"n": 2})["choices"]] == [0, 1]
    ended = ask(path, {"logit_bias": {"1": 100}})  # token 1 is the end of the text
    assert (content(ended), ended["usage"]["completion_tokens"]) == ("", 1)


def test_a_prompt_is_echoed_and_needs_no_model(gateway_url, model_name, ask):
    assert content(ask(COMPLETIONS, {"echo": True})).startswith(PROMPT)
    assert PROMPT not in content(ask(COMPLETIONS, {"echo": False}))
    response = post(gateway_url + COMPLETIONS, {"prompt": PROMPT})
    assert (response.status_code, response.json()["model"]) == (200, model_name)
    for body in ({}, {"model": model_name}):
        assert "prompt" in post(gateway_url + COMPLETIONS, body).json()["error"]["message"]


async def test_stops_of_a_stream(base_url, model_name):
    client = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    for fields in ({}, {"stop": "is"}, {"stop": ["is"]}, {"stop": ["is", ".", ","]}):
        asked = {"model": model_name, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 64, **fields}
        whole = (await client.chat.completions.create(**asked)).choices[0]
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
        texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
        assert "".join(texts) == whole.message.content
        assert len(texts) > 1
        assert chunks[-1].choices[0].finish_reason == whole.finish_reason


@pytest.mark.sample
def test_paths(gateway_url, model_name):
    for path in ("/health/ready", "/ready", "/health"):
        assert httpx.get(gateway_url + path).status_code == 200
    [listed] = httpx.get(f"{gateway_url}/v1/models").json()["data"]
    assert (listed["id"], listed["object"]) == (model_name, "model")
    for verb in ("load", "unload"):
        assert post(f"{gateway_url}/v1/models/{model_name}/{verb}", {}).status_code in (404, 405)
    wrong = httpx.get(gateway_url + CHAT)
    assert (wrong.status_code, "POST" in wrong.headers["allow"]) == (405, True)
    for length in ("not-a-number", "-1"):
        connection = http.client.HTTPConnection(urlsplit(gateway_url).netloc)
        connection.putrequest("POST", CHAT)
        connection.putheader("Content-Length", length)
        connection.endheaders()
        assert connection.getresponse().status == 400
        connection.close()


def test_a_body_over_the_limit_is_rejected(gateway_url):
    kind = {"Content-Type": "application/json"}
    for size, status in ((BIG_BODY_BYTES, 400), (BIG_BODY_BYTES + 1, 413)):
        # A gateway that answers and closes before the whole body was sent is heard by who sends no more.
        with contextlib.suppress(httpx.WriteError):
            response = httpx.post(gateway_url + CHAT, content=b"x" * size, headers=kind, timeout=60)
            assert response.status_code == status
