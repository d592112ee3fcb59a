"""openai-python with schemas and refusals, against a gateway in front of an obedient model, and with keys."""

import hashlib
import json
from typing import Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from conformance.asked import FRANCE, PARIS
from conformance.obedient_triton import OVERLOADED
from conformance.running import NAMES, gateway


class Joke(BaseModel):
    """What the model is told to write."""

    setup: str
    stars: int


class Place(BaseModel):
    capital: Literal["Paris", "Rome"]


CATS = [{"role": "user", "content": "Tell me a joke about 'cats' with 5 stars, as JSON."}]


@pytest.fixture(scope="module")
def client(obedient_url):
    with OpenAI(base_url=obedient_url, api_key="none", max_retries=0) as client:
        yield client


def test_an_answer_follows_a_schema(client):
    """Whole, while it streams, and by the Responses API; `json_object` leaves the keys to the model."""
    assert sorted(model.id for model in client.models.list()) == sorted(NAMES)
    asked = {"model": NAMES[0], "messages": CATS}
    joke = Joke(setup="cats", stars=5)
    assert client.chat.completions.parse(**asked, response_format=Joke).choices[0].message.parsed == joke
    with client.chat.completions.stream(**asked, response_format=Joke) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == joke
    assert len([event for event in events if event.type == "content.delta"]) > 1
    assert client.responses.parse(model=NAMES[0], input=CATS, text_format=Joke).output_parsed == joke
    completion = client.chat.completions.create(**asked, response_format={"type": "json_object"})
    assert json.loads(completion.choices[0].message.content or "") == {"cats": "a cat"}


def test_the_tiny_model_answers_in_the_form_that_is_parsed(base_url, model_name):
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        asked = {"model": model_name, "messages": FRANCE, "temperature": 0}
        answer = client.chat.completions.parse(**asked, response_format=Place)
    assert isinstance(answer.choices[0].message.parsed, Place)


def test_an_overloaded_server_is_asked_again_as_retry_after_says(client):
    question = [{"role": "user", "content": f"{OVERLOADED} What is the capital of France?"}]
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model=NAMES[0], messages=question)
    assert int(caught.value.response.headers["retry-after"]) >= 1

    question[0]["content"] += " Please."
    patient = client.with_options(max_retries=2)
    raw = patient.chat.completions.with_raw_response.create(model=NAMES[0], messages=question)
    assert raw.retries_taken == 1
    assert raw.parse().choices[0].message.content


# --- Keys and their limits ---


FREE, SLOW, ELSEWHERE = "sk-free", "sk-slow", "sk-elsewhere"
LIMITS = {FREE: "", SLOW: "requests_per_minute=1", ELSEWHERE: "models=another"}


@pytest.fixture(scope="module")
def guarded_url(tiny_triton, logs):
    """A gateway that wants one of three keys."""
    keys = logs / "keys"
    lines = [f"sha256:{hashlib.sha256(key.encode()).hexdigest()} name={key} {limit}\n" for key, limit in LIMITS.items()]
    keys.write_text("".join(lines))
    with gateway(tiny_triton, log=logs / "guarded_gateway.log", options=("--keys", str(keys))) as url:
        yield url


def by_key(guarded_url, key):
    return OpenAI(base_url=f"{guarded_url}/v1", api_key=key, max_retries=0)


def test_an_unknown_key_is_refused_everywhere(guarded_url, model_name):
    with by_key(guarded_url, "sk-unknown") as unknown:
        for ask in (
            lambda: unknown.chat.completions.create(model=model_name, messages=FRANCE),
            lambda: unknown.completions.create(model=model_name, prompt="x"),
            lambda: unknown.responses.create(model=model_name, input="x"),
            lambda: unknown.models.list(),
        ):
            with pytest.raises(openai.AuthenticationError) as caught:
                ask()
            assert caught.value.code == "invalid_api_key"


def test_a_key_lets_in_to_its_models_up_to_its_limit(guarded_url, model_name):
    with by_key(guarded_url, FREE) as free:
        completion = free.chat.completions.create(model=model_name, messages=FRANCE, temperature=0)
    assert completion.choices[0].message.content == PARIS
    with by_key(guarded_url, ELSEWHERE) as elsewhere, pytest.raises(openai.PermissionDeniedError):
        elsewhere.chat.completions.create(model=model_name, messages=FRANCE)
    with by_key(guarded_url, SLOW) as slow:
        assert slow.chat.completions.create(model=model_name, messages=FRANCE, max_tokens=1)
        with pytest.raises(openai.RateLimitError) as caught:
            slow.chat.completions.create(model=model_name, messages=FRANCE, max_tokens=1)
    assert caught.value.code == "rate_limit_exceeded"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
