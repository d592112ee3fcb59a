"""The judge of tests/live/test_gateway_fleet.py: what it takes for a whole answer, and what it does not."""

import json

from support.gateway_load import Asked, judged

PLAIN = Asked("chat", "/v1/chat/completions", {"max_tokens": 4})
STREAM = Asked("chat stream", "/v1/chat/completions", {"max_tokens": 4, "stream": True})
WRONG = Asked("wrong", "/v1/chat/completions", {"max_tokens": 4}, wrong=400)
ERROR = {"error": {"message": "no server is up", "type": "server_error", "param": None, "code": "unavailable"}}
RETRY = "retry-after: 1\r\n"


def answer(tokens=4, reason="length"):
    return json.dumps({"choices": [{"finish_reason": reason}], "usage": {"completion_tokens": tokens}}).encode()


def chunk(reason=None, response_id="a"):
    return {"id": response_id, "choices": [{"finish_reason": reason}], "usage": None}


def usage(tokens=4):
    return {"id": "a", "choices": [], "usage": {"completion_tokens": tokens}}


def events(*documents):
    said = (document if isinstance(document, str) else json.dumps(document) for document in documents)
    return b"".join(f"data: {text}\n\n".encode() for text in said)


OUTCOMES = [
    (PLAIN, 200, "", answer(), "answered"),
    (PLAIN, 200, "", answer(8), "strange"),
    (PLAIN, 200, "", answer(3, "stop"), "strange"),
    (PLAIN, 200, "", answer()[:-3], "strange"),
    (PLAIN, 503, RETRY, json.dumps(ERROR).encode(), "refused"),
    (PLAIN, 429, RETRY, json.dumps(ERROR).encode(), "refused"),
    (PLAIN, 503, "", json.dumps(ERROR).encode(), "strange"),
    (PLAIN, 502, RETRY, json.dumps(ERROR).encode(), "strange"),
    (PLAIN, 400, "", json.dumps(ERROR).encode(), "strange"),
    (WRONG, 400, "", json.dumps(ERROR).encode(), "told"),
    (WRONG, 200, "", answer(), "strange"),
    (STREAM, 200, "", events(chunk(), chunk("length"), usage(), "[DONE]"), "answered"),
    (STREAM, 200, "", events(chunk(), chunk("length"), chunk("length"), usage(), "[DONE]"), "strange"),
    (STREAM, 200, "", events(chunk(), chunk("length"), usage(), usage(), "[DONE]"), "strange"),
    (STREAM, 200, "", events(chunk(), chunk("length", "b"), usage(), "[DONE]"), "strange"),
    (STREAM, 200, "", events(chunk(), chunk("length"), usage(7), "[DONE]"), "strange"),
    (STREAM, 200, "", events(chunk(), chunk("length"), usage()), "strange"),
    (STREAM, 200, "", events(chunk(), ERROR), "failed"),
    (STREAM, 200, "", events(chunk(), ERROR, ERROR), "strange"),
    (STREAM, 200, "", events(chunk(), ERROR, chunk()), "strange"),
    (STREAM, 200, "", events(chunk(), ERROR, "[DONE]"), "strange"),
    (STREAM, 200, "", b"", "strange"),
]


def test_outcomes():
    found = [judged(*exchange).partition(":")[0] for *exchange, _ in OUTCOMES]
    assert found == [outcome for *_, outcome in OUTCOMES]
