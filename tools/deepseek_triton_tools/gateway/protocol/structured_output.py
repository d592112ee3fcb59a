"""Requests for a form of the answer, in the words of OpenAI, vLLM and TensorRT-LLM, as the wire contract's fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec

from deepseek_triton_tools.gateway.protocol.openai_errors import invalid
from deepseek_triton_tools.gateway.protocol.openai_fields import json_text

GUIDE_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_json_object",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_structural_tag",
)
"""The fields of a request that ask for a form. OpenAI has the first one, vLLM the others."""


def guided_fields(request: Mapping[str, object]) -> dict[str, object]:
    """Return the contract's `guided_*` field for what the request's GUIDE_FIELDS ask; none for plain text.

    request: any of GUIDE_FIELDS; None is the same as absent.

    Raises OpenAIError for a form that is wrong, unknown, or asked for beside another one.
    """
    found = {name: field for name in GUIDE_FIELDS if (field := _guide(name, request.get(name)))}
    if len(found) > 1:
        names = " and ".join(found)
        raise invalid(f"{names}: expected one of them, because an answer has one form.", param=next(iter(found)))
    return next(iter(found.values()), {})


def format_of_responses(text_format: object) -> object:
    """The Responses API's `text.format` as chat's `response_format`, which has the schema one level deeper."""
    if isinstance(text_format, dict) and text_format.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {k: v for k, v in text_format.items() if k != "type"}}
    return text_format


def _guide(name: str, value: object) -> dict[str, object]:
    if value is None:
        return {}
    if name == "response_format":
        return _of_response_format(value)
    if name == "structured_outputs":
        return _of_structured_outputs(value)
    return _WRITERS[name.removeprefix("guided_")](name, value)


def _of_response_format(value: object) -> dict[str, object]:
    document = _an_object("response_format", value)
    kind = document.get("type")
    match kind:
        case "text":
            return {}
        case "json_object":
            return {"guided_json_object": True}
        case "json_schema":
            schema = _an_object("response_format.json_schema", document.get("json_schema"))
            return _json("response_format.json_schema.schema", schema.get("schema"))
        case "regex" | "ebnf" as key:  # TensorRT-LLM's
            return _WRITERS["grammar" if key == "ebnf" else key](f"response_format.{key}", document.get(key))
        case "structural_tag":
            return _structural_tag("response_format", document)
    known = "text, json_object, json_schema, regex, ebnf or structural_tag"
    raise invalid(f"response_format.type: expected {known}, got {kind!r}.", param="response_format.type")


def _of_structured_outputs(value: object) -> dict[str, object]:
    document = {
        name: guide
        for name, guide in _an_object("structured_outputs", value).items()
        # vLLM's clients send all of its fields, with null or false for what they don't ask.
        if guide is not None and guide is not False
    }
    unknown = [name for name in document if name not in _WRITERS]
    if unknown or len(document) > 1:
        raise invalid(
            f"structured_outputs: expected one of {', '.join(_WRITERS)}, got {', '.join(document)}.",
            param="structured_outputs",
        )
    return {
        key: field
        for name, guide in document.items()
        for key, field in _WRITERS[name](f"structured_outputs.{name}", guide).items()
    }


def _json(name: str, value: object) -> dict[str, object]:
    """A JSON schema, as an object or as its text."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise invalid(f"{name}: expected a JSON schema, got text that is not JSON: {error}.", param=name) from None
    return {"guided_json": json_text(_an_object(name, value, "a JSON schema"))}


def _json_object(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, bool):
        raise invalid(f"{name}: expected true or false, got {_shown(value)}.", param=name)
    return {"guided_json_object": True} if value else {}


def _text(field: str) -> Callable[[str, object], dict[str, object]]:
    def write(name: str, value: object) -> dict[str, object]:
        if not isinstance(value, str) or not value:
            raise invalid(f"{name}: expected a text, got {_shown(value)}.", param=name)
        return {field: value}

    return write


def _choice(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, list) or not value or not all(isinstance(choice, str) and choice for choice in value):
        raise invalid(f"{name}: expected a list of texts, got {_shown(value)}.", param=name)
    return {"guided_regex": "(" + "|".join(map(_literal, value)) + ")"}


def _structural_tag(name: str, value: object) -> dict[str, object]:
    return {"guided_structural_tag": value if isinstance(value, str) else json_text(_an_object(name, value))}


_WRITERS: dict[str, Callable[[str, object], dict[str, object]]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _text("guided_regex"),
    "choice": _choice,
    "grammar": _text("guided_grammar"),
    "structural_tag": _structural_tag,
}
"""A guide in vLLM's words -> what makes the contract's field of it."""


def _literal(text: str) -> str:
    """A regular expression for the text itself. Only what has a meaning is escaped: grammars know few escapes."""
    return re.sub(r"[\\^$.|?*+()\[\]{}/-]", r"\\\g<0>", text)


def _an_object(name: str, value: object, what: str = "an object") -> dict[str, object]:
    if not isinstance(value, dict):
        raise invalid(f"{name}: expected {what}, got {_shown(value)}.", param=name)
    return value


def _shown(value: object) -> str:
    """The value in an error message: as JSON, and not all of a long one."""
    text = "nothing" if value is None else json_text(value)
    return text if len(text) <= 60 else text[:57] + "..."
