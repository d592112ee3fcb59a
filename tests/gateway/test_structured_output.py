"""Structured output: what clients ask, as fields of the wire contract."""

import json
import re

import pytest

from deepseek_triton_tools.gateway.chat_request import format_of_responses, guided_fields
from deepseek_triton_tools.gateway.openai_fields import OpenAIError

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":"))
NAMED = {"type": "json_schema", "json_schema": {"name": "a", "description": "d", "strict": True, "schema": SCHEMA}}
TAG = {"type": "structural_tag", "structures": [], "triggers": []}


def test_a_form_becomes_a_field_of_the_contract():
    table = [
        ({}, {}),
        ({"response_format": None}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object", "json_schema": None}}, {"guided_json_object": True}),
        ({"response_format": NAMED}, {"guided_json": SCHEMA_TEXT}),
        ({"response_format": {"type": "regex", "regex": "a+"}}, {"guided_regex": "a+"}),
        ({"response_format": {"type": "ebnf", "ebnf": 'root ::= "a"'}}, {"guided_grammar": 'root ::= "a"'}),
        ({"response_format": TAG}, {"guided_structural_tag": json.dumps(TAG, separators=(",", ":"))}),
        ({"structured_outputs": {"json": SCHEMA, "regex": None, "json_object": False}}, {"guided_json": SCHEMA_TEXT}),
        ({"structured_outputs": {"json": SCHEMA_TEXT}}, {"guided_json": SCHEMA_TEXT}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"guided_regex": "(a|b)"}),
        ({"structured_outputs": {"grammar": "g"}}, {"guided_grammar": "g"}),
        ({"structured_outputs": {}}, {}),
        ({"guided_json": SCHEMA}, {"guided_json": SCHEMA_TEXT}),
        ({"guided_json_object": True}, {"guided_json_object": True}),
        ({"guided_json_object": False}, {}),
        ({"guided_regex": "x"}, {"guided_regex": "x"}),
        ({"guided_choice": ["x"], "response_format": {"type": "text"}}, {"guided_regex": "(x)"}),
    ]
    assert [guided_fields(asked) for asked, _ in table] == [expected for _, expected in table]
    flat = format_of_responses({"type": "json_schema", "name": "a", "strict": True, "schema": SCHEMA})
    assert guided_fields({"response_format": flat}) == {"guided_json": SCHEMA_TEXT}
    assert format_of_responses({"type": "text"}) == {"type": "text"}


def test_a_wrong_form_is_refused_by_name(subtests):
    schema = {"type": "json_schema", "json_schema": {"name": "a"}}
    table = [
        ({"response_format": "json"}, 'response_format: expected an object, got "json"'),
        ({"response_format": {"type": "xml"}}, "response_format.type: expected text, json_object, json_schema"),
        ({"response_format": {}}, "response_format.type: expected"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: expected an object, got nothing"),
        ({"response_format": schema}, "response_format.json_schema.schema: expected a JSON schema, got nothing"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format: unknown field 'schema'"),
        ({"response_format": {**NAMED, "strict": True}}, "response_format: unknown field 'strict'"),
        ({"response_format": {"type": "ebnf", "ebnf": "a", "regex": "a"}}, "response_format: unknown field 'regex'"),
        ({"response_format": schema | {"json_schema": {"x": 1}}}, "response_format.json_schema: unknown field 'x'"),
        ({"response_format": {"type": "regex"}}, "response_format.regex: expected a text, got nothing"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs: expected one of json, json_object, regex"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs: expected one of"),
        ({"guided_json": "{"}, "guided_json: expected a JSON schema, got text that is not JSON"),
        ({"guided_choice": []}, "guided_choice: expected a list of texts, got []"),
        ({"guided_choice": [1]}, "guided_choice: expected a list of texts, got [1]"),
        ({"guided_json_object": "yes"}, "guided_json_object: expected true or false"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format and guided_regex:"),
    ]
    for asked, message in table:
        with subtests.test(asked=asked):
            with pytest.raises(OpenAIError) as caught:
                guided_fields(asked)
            assert caught.value.message.startswith(message)
            assert caught.value.status == 400
            assert message.startswith(caught.value.param)


def test_a_choice_stands_for_itself():
    for text in ("a.b", "1 + 1 = 2?", "[x]{y}(z)", "a\\b", "^$|", "é/-"):
        pattern = guided_fields({"guided_choice": [text, "other"]})["guided_regex"]
        assert re.fullmatch(pattern, text)
        assert not re.fullmatch(pattern, text + "x")
