"""Requests without a client's help, so that every byte of the answer can be judged."""

import json

import httpx

TIMEOUT_S = 120


def post(url, body, **headers):
    return httpx.post(url, json=body, headers=headers, timeout=TIMEOUT_S)


def answer(url, body):
    """The JSON of an answer with status 200."""
    response = post(url, body)
    assert response.status_code == 200, response.text
    return response.json()


def events(url, body):
    """The JSON of each event of a stream, in order, without the last line, `[DONE]`, of those of the older APIs."""
    response = post(url, body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data:").strip() for line in response.text.splitlines() if line.startswith("data:")]
    assert (lines[-1] == "[DONE]") is not url.endswith("/responses")
    return [json.loads(line) for line in lines if line != "[DONE]"]
