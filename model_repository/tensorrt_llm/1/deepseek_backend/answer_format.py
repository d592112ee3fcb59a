"""Tells what the engine and its model can do: sampling fields, the facts that "describe" tells, and an answer's form.

The form stands here where the client's guide alone can't say it.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, TypeAlias

from deepseek_backend.chat_rendering import FENCED, RAW_JSON, CallForm, ChatFacts
from deepseek_backend.config import BackendConfig
from deepseek_backend.contract import SAMPLING_BY_NAME, SAMPLING_FIELDS, ErrorCode
from deepseek_backend.engines.base import Capabilities, ModelTokenizer
from deepseek_backend.engines.generate_request import SamplingParams
from deepseek_backend.engines.prompting import SPECIAL_TOKENS
from deepseek_backend.engines.tags import CALL_BEGIN, CALLS_BEGIN, CALLS_END, CLOSING, ends_inside
from deepseek_backend.errors import ConfigError, RequestError
from deepseek_backend.messages import ToolUse
from deepseek_backend.parsing import contradictions


def supported_fields(capabilities: Capabilities) -> dict[str, str]:
    """Return each sampling field, priority and request_type: "" where the engine honours it, else why not."""
    honoured = set(capabilities.sampling_fields)
    if "logprobs" in honoured:
        honoured.add("best_of")
    if capabilities.priority:
        honoured.add("priority")
    if capabilities.handover_form:
        honoured.add("request_type")
    reasons = dict.fromkeys((*SAMPLING_BY_NAME, "priority", "request_type"), "not supported by this engine")
    reasons["request_type"] = "this engine does whole requests only"
    reasons["best_of"] = "needs logprobs to choose by, which this engine does not have here"
    reasons |= capabilities.unsupported
    return {name: "" if name in honoured else reason for name, reason in reasons.items()}


def check_defaults(config: BackendConfig, supported: Mapping[str, str]) -> None:
    """Check `default_sampling` against what the engine supports.

    :raises ConfigError: for a default that the engine would not honour, or that contradicts another.
    """
    defaults = config.default_sampling
    problems = [
        f"triton_config.default_sampling.{name}: {supported[name]}"
        for name, value in defaults.items()
        if supported[name] and value != SAMPLING_BY_NAME[name].neutral
    ]
    together = contradictions(defaults, config.default_max_tokens)
    problems += [f"triton_config.default_sampling: {problem}" for problem in together]
    if problems:
        raise ConfigError(problems)


_HUB_FOLDER = "models--"
"""A folder of the Hugging Face hub's cache, such as models--deepseek-ai--DeepSeek-R1, begins with it. The checkpoint
lies in a folder below, whose name is a hash."""


def model_info(
    config: BackendConfig,
    capabilities: Capabilities,
    tokenizer: ModelTokenizer,
    facts: ChatFacts,
    supported: Mapping[str, str],
) -> str:
    """Return the output `model_info`; the contract says what its keys mean.

    :param supported: sampling field -> "" where it is honoured, else the reason why not.
    """
    document = {
        "name": served_name(config.model),
        "checkpoint": config.model,
        "engine": config.engine,
        "engine_version": capabilities.version,
        "simulation": capabilities.simulation,
        "max_seq_len": capabilities.max_seq_len,
        "default_max_tokens": config.default_max_tokens,
        "greedy_by_default": SamplingParams.of(config.default_sampling).greedy,
        "decoupled": config.decoupled,
        "tool_form": None if facts.form is None else facts.form.name,
        "thinking_switch": facts.has_switch,
        "reasoning_efforts": facts.v4 and facts.v4.known_efforts,
        "fields": dict(supported),
        "chat_template": tokenizer.chat_template,
        **{name: tokenizer.special_tokens.get(name, "") for name in SPECIAL_TOKENS},
        "vocab_size": tokenizer.vocab_size,
    }
    return json.dumps(document, ensure_ascii=False)


def served_name(checkpoint: str) -> str:
    """Return the name for people of the checkpoint in a folder, or of one on the hub: its last part, in small letters.

    >>> served_name("/models/DeepSeek-R1"), served_name("deepseek-ai/DeepSeek-V3.1")
    ('deepseek-r1', 'deepseek-v3.1')
    """
    parts = PurePath(checkpoint).parts
    cached = [part.split("--")[-1] for part in parts if part.startswith(_HUB_FOLDER)]
    return (cached or parts or ["deepseek"])[-1].lower()


def model_type(config: BackendConfig) -> str:
    """Return model_type of the checkpoint's config.json; "" for one that can't be looked at."""
    try:
        with open(f"{config.resolved_model}/config.json", encoding="utf-8") as file:
            document: Any = json.load(file)
    except (OSError, ValueError):
        return ""
    return str(document.get("model_type", "")) if isinstance(document, dict) else ""


Format: TypeAlias = Mapping[str, Any]

_GUIDES = tuple(field.name for field in SAMPLING_FIELDS if field.guided)
_TAG = "guided_structural_tag"
_ANY_TEXT: Format = {"type": "any_text"}
_REASONING: Format = {"type": "tag", "begin": "", "content": _ANY_TEXT, "end": CLOSING}


def with_answer_format(
    sampling: SamplingParams,
    tool_use: ToolUse,
    form: CallForm | None,
    *,
    prompt: str,
    begun: str,
    refused: str,
    continues_reasoning: bool = False,
    has_switch: bool = True,
) -> SamplingParams:
    """Return the sampling fields with a guide that fits the whole answer.

    A structural tag of the client's own stays as it is: it says itself where it binds.

    :param form: how the model writes calls.
    :param begun: the beginning of a call with which the prompt ends; "" without one.
    :param refused: why the engine takes no such structural tag; "" if it does.
    :param has_switch: thinking can be turned off.
    :raises RequestError: E_UNSUPPORTED for a guide that would bind the reasoning.
    """
    name = next((name for name in _GUIDES if getattr(sampling, name)), "")
    is_strict = any(_is_strict(tool) for tool in tool_use.tools)
    if name == _TAG or not (name or is_strict):
        return sampling
    writes_json = form is not None and form in (FENCED, RAW_JSON)
    calls = _Calls(form, tool_use) if form is not None and writes_json and tool_use.tools and not refused else None
    if begun:
        # The answer is a call, so the guide says nothing about it.
        return _guided_by(sampling, calls.begun() if calls is not None and is_strict else None)
    if not name:
        return sampling if calls is None else _guided_by(sampling, calls.in_text())
    thinks = continues_reasoning or ends_inside(prompt)
    if thinks and refused:
        advice = "turn thinking off" if has_switch else "leave it out, because this model can't turn thinking off"
        raise RequestError(
            f"{name}: the prompt lets the model think first, and no guide can begin after </think>: {refused}; "
            + advice,
            code=ErrorCode.UNSUPPORTED,
        )
    if not thinks and calls is None:
        return sampling
    value = getattr(sampling, name)
    answer: Format
    if name.startswith("guided_json"):
        schema = json.loads(value) if name == "guided_json" else {"type": "object"}
        answer = {"type": "json_schema", "json_schema": schema}
    elif name == "guided_regex":
        answer = {"type": "regex", "pattern": value}
    else:
        answer = {"type": "grammar", "grammar": value}
    if calls is not None:
        answer = {"type": "or", "elements": [answer, calls.alone()]}
    return _guided_by(sampling, _sequence(_REASONING, answer) if thinks else answer)


class _Calls:
    """Calls in a form that writes arguments as JSON."""

    def __init__(self, form: CallForm, tool_use: ToolUse) -> None:
        self._form = form
        self._tool_use = tool_use

    def alone(self) -> Format:
        """One call or several, and no other text."""
        separated = {
            "type": "tags_with_separator",
            "tags": self._tags(self._form.call_begins),
            "separator": self._form.between_calls,
            "at_least_one": True,
        }
        return _sequence(_text(CALLS_BEGIN), separated, _text(CALLS_END))

    def in_text(self) -> Format:
        """Free text in which calls may begin."""
        return {"type": "triggered_tags", "triggers": [CALL_BEGIN], "tags": self._tags(self._form.call_begins)}

    def begun(self) -> Format:
        """The rest of an answer that the prompt has begun, up to the name of the tool or to its arguments."""
        name = self._tool_use.name
        if not name:
            return _sequence({"type": "or", "elements": self._tags("")}, _ANY_TEXT)
        tool = next(tool for tool in self._tool_use.tools if tool["function"]["name"] == name)
        return _sequence(_arguments(tool), _text(self._form.after_arguments), _ANY_TEXT)

    def _tags(self, before_name: str) -> list[Format]:
        return [
            {
                "type": "tag",
                "begin": before_name + tool["function"]["name"] + self._form.after_name,
                "content": _arguments(tool),
                "end": self._form.after_arguments,
            }
            for tool in self._tool_use.tools
        ]


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True


def _arguments(tool: Mapping[str, Any]) -> Format:
    schema = tool["function"].get("parameters") if _is_strict(tool) else None
    return {"type": "json_schema", "json_schema": schema or {"type": "object"}}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _guided_by(sampling: SamplingParams, answer: Format | None) -> SamplingParams:
    """Return the fields with this format as the only guide; without a guide for None."""
    tag = None if answer is None else json.dumps({"type": "structural_tag", "format": answer}, ensure_ascii=False)
    guides: dict[str, Any] = {**dict.fromkeys(_GUIDES), _TAG: tag}
    return dataclasses.replace(sampling, **guides)
