"""Requests without a client's help, so that every byte of the answer can be judged."""

from __future__ import annotations

import json
from typing import Any

import httpx

TIMEOUT_S = 120


def post(url: str, body: object, **headers: str) -> httpx.Response:
    return httpx.post(url, json=body, headers=headers, timeout=TIMEOUT_S)


def answer(url: str, body: object) -> dict[str, Any]:
    """The JSON of an answer with status 200."""
    response = post(url, body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def events(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON of each event of a stream, in order, without the last line, `[DONE]`, of those that have one."""
    response = post(url, body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data:").strip() for line in response.text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def ends_with_done(url: str, body: dict[str, Any]) -> bool:
    return post(url, body | {"stream": True}).text.rstrip().endswith("data: [DONE]")
