"""What OpenAI's own API description requires of the answers that the gateway gives.

`openai_facts.json` has the shapes: types, required keys and enums, as JSON schemas. Its source is `openapi.json` in
github.com/openai/openai-openapi, commit f85dbe223d40 (MIT licence). Descriptions and examples are left out, and so are
all parts that the gateway never answers with, such as images. `nullable` is written as a choice with null, and oneOf as
anyOf, because a choice less may make two alike.
"""

import functools
import json
from pathlib import Path

from jsonschema import Draft202012Validator


@functools.cache
def _validator(schema):
    facts = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return Draft202012Validator({"$ref": f"#/$defs/{schema}", "$defs": facts})


def faults(answer, schema):
    """Say what is wrong with an answer by OpenAI's description: one line for each fault."""
    return [f"{error.json_path}: {error.message}" for error in _validator(schema).iter_errors(answer)]
