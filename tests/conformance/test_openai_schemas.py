"""openai-python with schemas, several calls and refusals, against a gateway in front of an obedient model."""

import json

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from conformance.obedient_triton import OVERLOADED
from conformance.running import NAMES


class Joke(BaseModel):
    """What the model is told to write."""

    setup: str
    stars: int


CATS = [{"role": "user", "content": "Tell me a joke about 'cats' with 5 stars, as JSON."}]


@pytest.fixture(scope="module")
def client(obedient_url):
    with OpenAI(base_url=obedient_url, api_key="none", max_retries=0) as client:
        yield client


def test_both_names_are_listed(client):
    assert sorted(model.id for model in client.models.list()) == sorted(NAMES)


def test_parse_makes_an_object_of_a_schema(client):
    parsed = client.chat.completions.parse(model=NAMES[0], messages=CATS, response_format=Joke)
    assert parsed.choices[0].message.parsed == Joke(setup="cats", stars=5)


def test_a_stream_is_parsed_while_it_comes(client):
    with client.chat.completions.stream(model=NAMES[0], messages=CATS, response_format=Joke) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Joke(setup="cats", stars=5)
    assert len([event for event in events if event.type == "content.delta"]) > 1


def test_responses_parse_a_schema(client):
    response = client.responses.parse(model=NAMES[0], input=CATS, text_format=Joke)
    assert response.output_parsed == Joke(setup="cats", stars=5)


def test_json_mode(client):
    completion = client.chat.completions.create(model=NAMES[0], messages=CATS, response_format={"type": "json_object"})
    assert json.loads(completion.choices[0].message.content or "") == {"cats": "a cat"}


def test_a_schema_that_the_engine_cannot_follow_is_refused_with_the_reason(base_url, model_name):
    """The tiny model's engine has no guided decoding: better refused than ignored."""
    with (
        OpenAI(base_url=base_url, api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        client.chat.completions.parse(model=model_name, messages=CATS, response_format=Joke)
    assert "response_format" in caught.value.message or caught.value.param == "response_format"


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
