"""Keys and their limits, as openai-python sees them."""

import hashlib

import httpx
import openai
import pytest
from openai import OpenAI

from conformance.asked import FRANCE, PARIS
from conformance.running import gateway

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


def client(guarded_url, key):
    return OpenAI(base_url=f"{guarded_url}/v1", api_key=key, max_retries=0)


def test_an_unknown_key_is_refused_everywhere(guarded_url, model_name):
    with client(guarded_url, "sk-unknown") as unknown:
        for ask in (
            lambda: unknown.chat.completions.create(model=model_name, messages=FRANCE),
            lambda: unknown.completions.create(model=model_name, prompt="x"),
            lambda: unknown.responses.create(model=model_name, input="x"),
            lambda: unknown.models.list(),
        ):
            with pytest.raises(openai.AuthenticationError) as caught:
                ask()
            assert caught.value.code == "invalid_api_key"
    for path in ("/tokenize", "/detokenize"):
        assert httpx.post(guarded_url + path, json={"prompt": "x", "tokens": [1]}).status_code == 401
    assert [httpx.get(guarded_url + path).status_code for path in ("/health", "/ready", "/metrics")] == [200] * 3


def test_a_key_lets_in_to_its_models_up_to_its_limit(guarded_url, model_name):
    with client(guarded_url, FREE) as free:
        completion = free.chat.completions.create(model=model_name, messages=FRANCE, temperature=0)
    assert completion.choices[0].message.content == PARIS
    with client(guarded_url, ELSEWHERE) as elsewhere, pytest.raises(openai.PermissionDeniedError):
        elsewhere.chat.completions.create(model=model_name, messages=FRANCE)
    with client(guarded_url, SLOW) as slow:
        assert slow.chat.completions.create(model=model_name, messages=FRANCE, max_tokens=1)
        with pytest.raises(openai.RateLimitError) as caught:
            slow.chat.completions.create(model=model_name, messages=FRANCE, max_tokens=1)
    assert caught.value.code == "rate_limit_exceeded"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
