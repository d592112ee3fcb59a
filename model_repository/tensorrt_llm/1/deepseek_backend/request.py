"""Tensors and request parameters -> GenerateRequest. Pure: knows numpy arrays, not pb_utils.

A value may come four ways, later ones winning: the model's `default_sampling`, `sampling_parameters` (one JSON
object), request parameters (every key of a /generate body that is not an input tensor), input tensors.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deepseek_backend.config import BackendConfig
from deepseek_backend.contract import (
    EXEMPT_PARAMETERS,
    INPUTS,
    SAMPLING_BY_NAME,
    SAMPLING_FIELDS,
    Dtype,
    ErrorCode,
    SamplingField,
)
from deepseek_backend.errors import RequestError
from deepseek_backend.values import check_value, shown

logger = logging.getLogger(__name__)


GREEDY_BELOW = 1e-5
"""A temperature below this is 0: it would pick the likeliest token anyway, or overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling fields of contract.SAMPLING_FIELDS, checked. None: not given."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    exclude_input_from_output: bool | None = None

    @property
    def greedy(self) -> bool:
        """No sampling asked for: temperature 0, or none of temperature, top_k, top_p and min_p given (0 is none)."""
        if self.top_k == 1 or (self.temperature is not None and self.temperature < GREEDY_BELOW):
            return True
        return self.temperature is None and not self.top_k and self.top_p is None and not self.min_p


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateRequest:
    """One prompt to generate from, as engines see it. Compared by identity."""

    request_id: str
    """Unique among the requests the backend holds; made by the backend, not the client's id."""
    prompt: str
    sampling: SamplingParams
    max_tokens: int
    """sampling.max_tokens or the model's default. The engine cuts it to the room its context leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One Triton request, read and checked: what to generate and how to answer."""

    prompt: str = ""
    streaming: bool = False
    stop: bool = False
    """End the request with this request's id; nothing else in this call counts."""
    sampling: SamplingParams = SamplingParams()
    max_tokens: int = 0
    echo: bool = False
    """Put the prompt before the text."""
    num_input_tokens_always: bool = False
    num_output_tokens_always: bool = False


_FLAGS = frozenset(t.name for t in INPUTS if t.dtype is Dtype.BOOL and not t.name.startswith("sampling_param_"))
_TENSOR_FIELDS = {f.tensor.name: f for f in SAMPLING_FIELDS}
_KNOWN_NAMES = sorted(_FLAGS | set(SAMPLING_BY_NAME) | set(_TENSOR_FIELDS) | {"sampling_parameters", "text_input"})


def parse_call(
    inputs: Mapping[str, npt.NDArray[Any]], parameters: str, config: BackendConfig, supported: Mapping[str, str]
) -> Call:
    """The call that `inputs` (tensor name -> array) and `parameters` (Triton's JSON object) make.

    `supported` maps each sampling field to "" or, where the engine can't do it, to the reason.

    :raises RequestError: with every problem found, in one line.
    """
    reader = _Reader(config)
    reader.read_sampling_json(inputs.get("sampling_parameters"))
    reader.read_parameters(parameters)
    reader.read_tensors(inputs)
    if reader.flags.get("stop"):
        reader.raise_problems()
        return Call(stop=True)
    prompt = reader.read_prompt(inputs.get("text_input"))
    reader.raise_problems()
    fields = {**config.default_sampling, **reader.sampling}
    refuse_unsupported(fields, supported)
    sampling = SamplingParams(**fields)
    flags = reader.flags
    return Call(
        prompt=prompt,
        streaming=flags.get("streaming", flags.get("stream", False)),
        sampling=sampling,
        max_tokens=sampling.max_tokens or config.default_max_tokens,
        echo=sampling.exclude_input_from_output is False or flags.get("exclude_input_in_output") is False,
        num_input_tokens_always=flags.get("return_num_input_tokens", False),
        num_output_tokens_always=flags.get("return_num_output_tokens", False),
    )


class _Reader:
    """Collects values and problems from the three places a request may hold them."""

    def __init__(self, config: BackendConfig) -> None:
        self.sampling: dict[str, Any] = {}
        self.flags: dict[str, bool] = {}
        self.problems: list[str] = []
        self._config = config

    def read_sampling_json(self, array: npt.NDArray[Any] | None) -> None:
        if array is None or not array.size:
            return
        try:
            document = json.loads(array.flat[0])
        except (ValueError, RecursionError) as error:
            self.problems.append(f"sampling_parameters: expected a JSON object, got text that is not JSON ({error})")
            return
        if not isinstance(document, dict):
            self.problems.append(f"sampling_parameters: expected a JSON object, got {shown(document)}")
            return
        for name, value in document.items():
            if name in SAMPLING_BY_NAME:
                self._set_field(SAMPLING_BY_NAME[name], _number(SAMPLING_BY_NAME[name], value))
            else:
                self.problems.append(f"sampling_parameters: no field {shown(name)}{_nearest(name, SAMPLING_BY_NAME)}")

    def read_parameters(self, parameters: str) -> None:
        for name, value in (json.loads(parameters) if parameters else {}).items():
            field = _TENSOR_FIELDS.get(name) or SAMPLING_BY_NAME.get(name)
            if name in _FLAGS:
                self._set_flag(name, value)
            elif field is not None and (field.plain_name or name in _TENSOR_FIELDS):
                self._set_field(field, value)
            elif name not in EXEMPT_PARAMETERS:
                self._unknown(name)

    def read_tensors(self, inputs: Mapping[str, npt.NDArray[Any]]) -> None:
        for name, array in inputs.items():
            if not array.size:
                continue
            if name in _FLAGS:
                self._set_flag(name, bool(array.flat[0]))
            elif name in _TENSOR_FIELDS:
                self._set_field(_TENSOR_FIELDS[name], array)

    def read_prompt(self, array: npt.NDArray[Any] | None) -> str:
        if array is None or not array.size:
            self.problems.append("text_input: expected a prompt, got none")
            return ""
        if array.size > 1:
            self.problems.append(f"text_input: expected one prompt, got {array.size}; send a request for each")
            return ""
        try:
            prompt = _as_text(array.flat[0])
        except UnicodeDecodeError as error:
            self.problems.append(f"text_input: {_not_utf8(error)}")
            return ""
        if not prompt:
            self.problems.append("text_input: expected a prompt, got an empty string")
        return prompt

    def raise_problems(self) -> None:
        if self.problems:
            raise RequestError("; ".join(self.problems))

    def _set_field(self, field: SamplingField, value: object) -> None:
        try:
            if isinstance(value, np.ndarray):
                value = _python_value(field, value)
            self.sampling[field.name] = check_value(field, value)
        except UnicodeDecodeError as error:
            self.problems.append(f"{field.name}: {_not_utf8(error)}")
        except ValueError as error:
            self.problems.append(str(error))

    def _set_flag(self, name: str, value: object) -> None:
        if isinstance(value, bool):
            self.flags[name] = value
        else:
            hint = ' (stop strings are "sampling_param_stop")' if name == "stop" else ""
            self.problems.append(f"{name}: expected true or false, got {shown(value)}{hint}")

    def _unknown(self, name: str) -> None:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._config.ignored_parameters):
            return
        problem = f"unknown parameter {shown(name)}{_nearest(name, _KNOWN_NAMES)}"
        if self._config.unknown_parameters == "error":
            self.problems.append(problem)
        elif self._config.unknown_parameters == "warn":
            logger.warning("%s: passed over", problem)


def _number(field: SamplingField, value: object) -> object:
    """`value`; a number where a client of Triton's vLLM backend wrote it as a string."""
    if not isinstance(value, str) or field.dtype in (Dtype.STRING, Dtype.BOOL):
        return value
    try:
        return float(value) if field.dtype is Dtype.FP32 else int(value)
    except ValueError:
        return value


def _python_value(field: SamplingField, array: npt.NDArray[Any]) -> object:
    values = array.reshape(-1).tolist()
    if field.dtype is Dtype.STRING:
        values = [_as_text(value) for value in values]
    return values if field.many else values[0]


def _as_text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode("utf-8")


_NAMES_ELSEWHERE = {
    "prompt": "text_input",
    "max_new_tokens": "max_tokens",
    "stop_words": "sampling_param_stop",
    "stop_sequences": "sampling_param_stop",
    "random_seed": "seed",
}
"""What other servers call it -> what it is called here."""


def _nearest(name: str, known: Any) -> str:
    if name in _NAMES_ELSEWHERE:
        return f"; here it is {_NAMES_ELSEWHERE[name]!r}"
    match = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"expected UTF-8 text, got byte {error.object[error.start]:#04x} at {error.start}"


def refuse_unsupported(fields: dict[str, Any], supported: Mapping[str, str]) -> None:
    """Refuse, by name, fields the engine can't honour. A neutral value asks for nothing: it is taken out instead.

    :raises RequestError: with the reason.
    """
    for name in list(fields):
        if not supported[name]:
            continue
        neutral = SAMPLING_BY_NAME[name].neutral
        if neutral is None or fields[name] != neutral:
            raise RequestError(f"{name}: {supported[name]}", code=ErrorCode.UNSUPPORTED)
        del fields[name]
