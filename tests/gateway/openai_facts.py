"""What OpenAI's own API description requires of the answers that the gateway gives.

`openai_facts.json` has the shapes: types, required keys and enums, as JSON schemas. Its source is `openapi.json` in
github.com/openai/openai-openapi, commit f85dbe223d40 (MIT licence). Descriptions and examples are left out, and so are
all parts that the gateway never answers with, such as images. To make it again:
`python tests/gateway/openai_facts.py openapi.json`; the new file has the schemas that the old one has.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FACTS = Path(__file__).with_suffix(".json")

ANSWERS = (
    *("CreateChatCompletionResponse", "CreateChatCompletionStreamResponse", "CreateCompletionResponse"),
    *("ListModelsResponse", "Model", "ErrorResponse", "Response", "ResponseStreamEvent"),
)
"""The schemas of whole answers, and of the events of a stream."""

_KEPT = frozenset({"type", "required", "enum", "minimum", "maximum", "minItems"})


@functools.cache
def _facts() -> Mapping[str, Any]:
    schemas: Mapping[str, Any] = json.loads(FACTS.read_text(encoding="utf-8"))
    return schemas


def faults(answer: object, schema: str) -> list[str]:
    """Say what is wrong with an answer by OpenAI's description: one line for each fault. schema: one of ANSWERS."""
    from jsonschema import Draft202012Validator

    validator = Draft202012Validator({"$ref": f"#/$defs/{schema}", "$defs": _facts()})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(answer)]


# --- making the file --------------------------------------------------------------------------------------------------


def _shape(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """A schema without its words; None for what the gateway never answers with."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return _or_null(schema, {"$ref": f"#/$defs/{name}"}) if name in _facts() else None
    shape: dict[str, Any] = {key: value for key, value in schema.items() if key in _KEPT}
    properties = {name: _shape(value) for name, value in schema.get("properties", {}).items()}
    if properties:
        shape["properties"] = {name: value for name, value in properties.items() if value is not None}
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            choices = [part for choice in schema[union] if (part := _shape(choice)) is not None]
            if not choices:
                return None
            # A choice less may make two alike, so that anyOf takes the place of oneOf.
            shape["anyOf" if union == "oneOf" else union] = choices
    if isinstance(schema.get("items"), Mapping) and (items := _shape(schema["items"])) is not None:
        shape["items"] = items
    return _or_null(schema, shape)


def _or_null(schema: Mapping[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    """`nullable` is OpenAPI 3.0's word, which the document has beside JSON schema's own."""
    return {"anyOf": [shape, {"type": "null"}]} if schema.get("nullable") else shape


if __name__ == "__main__":
    schemas = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["components"]["schemas"]
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(_shape(schemas[name]))}" for name in _facts())
    FACTS.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
