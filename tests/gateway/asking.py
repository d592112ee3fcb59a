"""Requests to a gateway, and what comes back."""

import json

from gateway.openai_facts import faults
from support.raw_triton import event

MAX_BODY = 200_000
HELLO = event(text_output="Hello")
LAST = event(finish_reason="stop", num_input_tokens=5, num_output_tokens=3, num_cached_tokens=4, num_reasoning_tokens=1)
"""The end of an answer."""
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
}
CHAT, COMPLETION, RESPONSE = BODIES


def ask(client, path=CHAT, **fields):
    return client.post(path, json={**BODIES[path], **fields})


def error_of(response, status):
    """The error of a response that has this status."""
    assert response.status_code == status, response.text
    assert faults(response.json(), "ErrorResponse") == []
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def events_of(text):
    """The JSON of a stream's events. A stream of chunks that ends well ends with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
