"""The mix of the soak: what each job asks for, decided by the seed and the job's number alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bench._load import LEFT, Request

SHORT, MIDDLE, LONG = (1, 16), (16, 256), (300, 900)
"""Tokens, from and to. A long answer is one that something ends before its time."""

_PROMPTS = (
    "The capital of France is",
    "Prove that the square root of two is irrational, in one paragraph.",
    "Translate into Chinese: the model predicts the next token. " * 8,
    "专家的注意力在缓存里。",
    "Summarise:\n" + "the expert that the gate chose has the token's key and value; " * 60,
)
_STOPS = (" the", " model", ".", "词元", "\n", " one day", "🚀")
_BAD_FIELDS: tuple[Mapping[str, Any], ...] = (
    {"no_such_field": 1},
    {"max_tokens": 0},
    {"max_tokens": "ten"},
    {"temperature": 1000.0},
    {"temperature": True},
    {"n": 65, "temperature": 1.0},
    {"n": 2, "temperature": 0.0},
    {"sampling_parameters": '{"top_p": [1]}'},
    {"sampling_parameters": "{no JSON"},
    {"sampling_param_stop": ["x" * 2000]},
    {"guided_json": "{no schema"},
    {"messages": '[{"role": "user", "content": "a second prompt"}]'},
    {"stop": True},
    {"text_input": ""},
)
_ENDS = {"length", "stop"}
_REFUSALS = {"E_INVALID_ARGUMENT", "E_UNSUPPORTED"}


@dataclass(frozen=True, kw_only=True)
class Kind:
    weight: int
    make: Callable[[random.Random], Request]
    expected: frozenset[str]
    """Outcomes."""


def make_request(seed: int, number: int) -> tuple[Request, random.Random]:
    """The job's request, and the generator for what else has to be decided about it."""
    chance = random.Random(f"{seed}/{number}")
    name = chance.choices(list(KINDS), [kind.weight for kind in KINDS.values()])[0]
    request = KINDS[name].make(chance)
    return replace(request, kind=name, request_id=request.request_id or f"job-{number}"), chance


def _fields(chance: random.Random, length: tuple[int, int], *, streaming: bool | None = None) -> dict[str, Any]:
    fields: dict[str, Any] = {"text_input": chance.choice(_PROMPTS), "max_tokens": chance.randint(*length)}
    if chance.random() < 0.6 if streaming is None else streaming:
        fields["streaming"] = True
    if chance.random() < 0.5:
        fields |= {"temperature": round(chance.uniform(0.2, 1.2), 2), "seed": chance.randrange(1 << 30)}
    return fields


def _whole(chance: random.Random) -> Request:
    return Request(fields=_fields(chance, chance.choice((SHORT, MIDDLE)), streaming=False))


def _stream(chance: random.Random) -> Request:
    return Request(fields=_fields(chance, chance.choice((SHORT, MIDDLE)), streaming=True))


def _long(chance: random.Random) -> Request:
    return Request(fields=_fields(chance, LONG))


def _several(chance: random.Random) -> Request:
    prompts, n = chance.sample(_PROMPTS, chance.randint(1, 3)), chance.randint(1, 3)
    fields = _fields(chance, SHORT) | {"text_input": prompts}
    if n > 1:
        fields |= {"n": n, "temperature": 0.9}
    return Request(fields=fields, num_sequences=len(prompts) * n)


def _stop_string(chance: random.Random) -> Request:
    stops = chance.sample(_STOPS, chance.randint(1, 3))
    return Request(fields=_fields(chance, MIDDLE) | {"sampling_param_stop": stops})


def _logprobs(chance: random.Random) -> Request:
    return Request(fields=_fields(chance, SHORT) | {"logprobs": chance.randint(0, 5), "return_logprobs": True})


def _chat(chance: random.Random) -> Request:
    fields = _fields(chance, MIDDLE)
    content = fields.pop("text_input")
    fields["messages"] = json.dumps([{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}])
    return Request(fields=fields)


def _stopped(chance: random.Random) -> Request:
    return Request(fields=_fields(chance, LONG, streaming=True))


def _deadline(chance: random.Random) -> Request:
    fields = _fields(chance, LONG)
    if chance.random() < 0.3:
        return Request(fields=fields | {"timeout_ms": 60_000}, timeout_us=chance.randint(1, 1_000_000))
    return Request(fields=fields | {"timeout_ms": chance.randint(1, 1000)})


def _left(chance: random.Random) -> Request:
    """Left after some chunks, which both protocols can do. The soak makes some of gRPC's a matter of time instead."""
    return Request(fields=_fields(chance, LONG, streaming=True), leave_after_chunks=chance.choice((1, 1, 2, 5, 20)))


def _bad(chance: random.Random) -> Request:
    fields: dict[str, Any] = _fields(chance, SHORT) | dict(chance.choice(_BAD_FIELDS))
    if fields["text_input"] == "":
        del fields["text_input"]
    return Request(fields=fields)


def stop_request(request_id: str) -> Request:
    return Request(kind="stop request", fields={"stop": True, "return_finish_reason": True}, request_id=request_id)


STOPPED = "stopped by id"
LEAVING = "left by its client"

KINDS = {
    "whole": Kind(weight=18, make=_whole, expected=frozenset(_ENDS)),
    "stream": Kind(weight=18, make=_stream, expected=frozenset(_ENDS)),
    "long": Kind(weight=2, make=_long, expected=frozenset(_ENDS)),
    "several prompts or n": Kind(weight=6, make=_several, expected=frozenset(_ENDS)),
    "stop strings": Kind(weight=8, make=_stop_string, expected=frozenset(_ENDS)),
    "logprobs": Kind(weight=6, make=_logprobs, expected=frozenset(_ENDS | _REFUSALS)),
    "chat": Kind(weight=8, make=_chat, expected=frozenset(_ENDS)),
    "deadline": Kind(weight=8, make=_deadline, expected=frozenset(_ENDS | {"timeout"})),
    "bad input": Kind(weight=8, make=_bad, expected=frozenset(_REFUSALS)),
    STOPPED: Kind(weight=6, make=_stopped, expected=frozenset(_ENDS | {"cancelled"})),
    LEAVING: Kind(weight=12, make=_left, expected=frozenset(_ENDS | {LEFT})),
}
EXPECTED = {name: kind.expected for name, kind in KINDS.items()} | {
    # Refused where the one it was to end has ended meanwhile.
    "stop request": frozenset({"stop", "E_INVALID_ARGUMENT"})
}
