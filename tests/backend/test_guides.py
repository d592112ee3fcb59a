"""The guide of a request, as the engines take it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from deepseek_backend.engines.guides import guide

THINKING = "Why?<｜Assistant｜><think>\n"


def request(prompt: str, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(request_id="r", prompt=prompt, sampling=SamplingParams(**sampling), max_tokens=20)


@pytest.mark.parametrize(
    ("field", "value", "answer"),
    [
        ("guided_json", '{"type": "array"}', {"type": "json_schema", "json_schema": {"type": "array"}}),
        ("guided_json_object", True, {"type": "json_schema", "json_schema": {"type": "object"}}),
        ("guided_regex", "é+", {"type": "regex", "pattern": "é+"}),
        ("guided_grammar", 'root ::= "a"', {"type": "grammar", "grammar": 'root ::= "a"'}),
    ],
)
def test_after_reasoning_the_guide_binds_the_answer_only(field: str, value: Any, answer: dict[str, Any]) -> None:
    tag = json.loads(guide(request(THINKING, **{field: value}))["structural_tag"])
    reasoning, bound = tag["format"]["elements"]
    assert (tag["type"], tag["format"]["type"]) == ("structural_tag", "sequence")
    assert reasoning == {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}
    assert bound == answer


@pytest.mark.parametrize("prompt", ["Why?", "Why?<｜Assistant｜></think>", "What does <think> mean?"])
def test_without_reasoning_the_guide_stays_as_it_is(prompt: str) -> None:
    assert guide(request(prompt, guided_regex="a+")) == {"regex": "a+"}


def test_a_structural_tag_of_the_clients_own_stays_as_it_is() -> None:
    assert guide(request(THINKING, guided_structural_tag="{}")) == {"structural_tag": "{}"}
    assert guide(request(THINKING)) == {}
