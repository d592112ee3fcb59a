"""The guide of a request as TensorRT-LLM and vLLM take it: both have the same names, and both hand it to xgrammar."""

from __future__ import annotations

import json
from typing import Any

from deepseek_backend.contract import SAMPLING_FIELDS, ErrorCode
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from deepseek_backend.engines.reasoning_tags import CLOSING, ends_inside
from deepseek_backend.errors import RequestError

GUIDES = {field.name: field.name.removeprefix("guided_") for field in SAMPLING_FIELDS if field.guided}
"""Our field -> the engines' name of the guide."""
_TAG = "structural_tag"


def is_guided(sampling: SamplingParams) -> bool:
    return any(getattr(sampling, name) for name in GUIDES)


def guide(request: GenerateRequest, *, refused_after_reasoning: str = "") -> dict[str, Any]:
    """Return keyword arguments for the engine's class of guides; none for a request without a guide.

    A guide binds the text from its first token. Where the prompt ends inside <think>, that is the reasoning: the model
    would write the answer there, and no answer after it. So the guide becomes a structural tag that leaves all text
    free up to </think>. A structural tag of the client's own says itself where it binds.

    :param refused_after_reasoning: why the engine takes no such tag; "" if it does.
    :raises RequestError: E_UNSUPPORTED, for a guide after reasoning that is refused.
    """
    guides = {its_name: value for name, its_name in GUIDES.items() if (value := getattr(request.sampling, name))}
    if not guides or _TAG in guides or not ends_inside(request.prompt):
        return guides
    ((name, value),) = guides.items()
    if refused_after_reasoning:
        raise RequestError(
            f"guided_{name}: the prompt lets the model think first, and then no guide can begin after </think>: "
            f"{refused_after_reasoning}; turn thinking off",
            code=ErrorCode.UNSUPPORTED,
        )
    reasoning = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": CLOSING}
    answer_format = {"type": "sequence", "elements": [reasoning, _format(name, value)]}
    return {_TAG: json.dumps({"type": _TAG, "format": answer_format}, ensure_ascii=False)}


def _format(name: str, value: Any) -> dict[str, Any]:
    """A guide as a format of xgrammar's structural tags (its documentation, structural_tag; since 0.1.25)."""
    match name:
        case "json":
            return {"type": "json_schema", "json_schema": json.loads(value)}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": value}
        case _:
            return {"type": "grammar", "grammar": value}
