"""Reads and checks what a client sent, wherever it put it: input tensors, request parameters and JSON.

Reading does not stop at the first problem: `Problems` collects them.
"""

import difflib
import fnmatch
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy.typing as npt

from deepseek_backend.config import BackendConfig
from deepseek_backend.contract import (
    EXEMPT_PARAMETERS,
    INPUTS,
    MAX_CHAT_BYTES,
    MAX_INPUT_IDS,
    MAX_PROMPTS,
    REQUEST_FIELDS,
    SAMPLING_BY_NAME,
    SAMPLING_FIELDS,
    TIMEOUT_US,
    Dtype,
    ErrorCode,
    SamplingFieldSpec,
)
from deepseek_backend.errors import RequestError
from deepseek_backend.field_values import check_characters, check_value, quoted, read_json
from deepseek_backend.messages import Prompt, read_messages


class Problems:
    """The problems of a request: the first MOST in full, and the number of the others.

    A request may hold any number of unknown names, and each one written out costs a search for the nearest known name.
    """

    MOST = 8

    __slots__ = ("_found", "_num_more")

    def __init__(self) -> None:
        self._found: list[str] = []
        self._num_more = 0

    def add(self, problem: str | Callable[[], str]) -> None:
        """Add a problem, or a function that makes its text where that takes time."""
        if len(self._found) >= self.MOST:
            self._num_more += 1
        else:
            self._found.append(problem if isinstance(problem, str) else problem())

    def __bool__(self) -> bool:
        return bool(self._found)

    def __str__(self) -> str:
        """Return all of them in one line."""
        return "; ".join(self._found) + (f"; and {self._num_more:,} more" if self._num_more else "")


_PROMPTS = ("text_input", "messages", "input_ids")
_GUIDE_OBJECTS = ("structured_outputs", "guided_decoding")
"""vLLM's names for an object that holds the guide: the present name and the one before."""
_GUIDES = frozenset(field.name.removeprefix("guided_") for field in SAMPLING_FIELDS if field.guided)
"""Names of the guides in such an object."""
# Names of lists in vLLM and TensorRT-LLM -> field. Clients also send them empty. A string there is not read, because
# its commas would part words in TensorRT-LLM.
_WORD_LISTS = {"bad_words": "bad", "stop_words": "stop"}
# Sampling parameters of vLLM, TensorRT-LLM and its older Triton backend -> the values that clients send for nothing.
_ASK_FOR_NOTHING: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("use_beam_search", "flat_logprobs", "skip_clone", "skip_reading_prefix_cache"), (False,)),
    **dict.fromkeys(("return_context_logits", "return_generation_logits", "return_encoder_output"), (False,)),
    **dict.fromkeys(("return_log_probs", "apply_batched_logits_processor", "return_token_ids"), (False,)),
    **dict.fromkeys(("allowed_token_ids", "logits_processors", "bad_token_ids", "extra_args", "vllm_xargs"), ([], {})),
    **dict.fromkeys(("detokenize", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("beam_search_diversity_rate", "output_kind", "output_text_buffer_length"), (0,)),
    **dict.fromkeys(("length_penalty", "beam_width", "num_return_sequences"), (1,)),
    "early_stopping": (False, 0),
}
_CHOICE = "choice"
"""vLLM's guide that gives the possible answers; a regular expression says the same."""
_FOREIGN_NAMES = frozenset(
    {"max_completion_tokens", f"guided_{_CHOICE}", *_WORD_LISTS, *_GUIDE_OBJECTS, *_ASK_FOR_NOTHING}
)
_NUMBER_LENGTH = 40
"""A longer string is not taken for a number."""
_WHOLE = re.compile(r"[+-]?[0-9]+")
_SWITCHES = {"true": True, "false": False}
_DECIMAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


class FieldReader:
    """Collects values and problems from the three places a request may hold them.

    Two tables at the end of this file, for tensors and for request parameters, say how each name is read.
    """

    def __init__(self, config: BackendConfig) -> None:
        self.sampling: dict[str, Any] = {}
        self.flags: dict[str, bool] = {}
        self.settings: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        """Field -> the name by which the client gave it, where that is another."""
        self.problems = Problems()
        self.warnings = Problems()
        """Unknown parameters, where the configuration only warns of them."""
        self._config = config

    def read(self, inputs: Mapping[str, npt.NDArray[Any]], parameters: str) -> None:
        """Read all values except the prompts and the chat template's arguments. The later place wins."""
        if "sampling_parameters" in inputs:
            document = self._json_object("sampling_parameters", _first(inputs["sampling_parameters"]))
            for name, value in self._with_own_names(document).items():
                if value is None:  # OpenAI's clients write it for "not given"
                    continue
                field = SAMPLING_BY_NAME.get(name)
                if field is not None:
                    self._field_parameter(field, value)
                else:
                    self.problems.add(partial(_unknown_field, name))
        if parameters and parameters != "{}":  # "{}" is what most requests have, and reading it takes a microsecond
            for name, value in self._with_own_names(json.loads(parameters)).items():
                entry = _PARAMETERS.get(name)
                if entry is not None:
                    read, target = entry
                    read(self, target, value)
                elif name not in EXEMPT_PARAMETERS:
                    self._unknown_parameter(name)
        for name, array in inputs.items():
            entry = _TENSORS.get(name)
            if entry is not None and (array.size or name in _LISTS):
                read, target = entry
                read(self, target, array)

    def read_prompts(self, inputs: Mapping[str, npt.NDArray[Any]]) -> tuple[Prompt, ...]:
        given = [name for name in _PROMPTS if name in inputs and inputs[name].size]
        if len(given) > 1 and given[0] == "text_input" and not any(inputs["text_input"].flat):
            del given[0]  # an empty one, sent because config.pbtxt says that it is required
        if len(given) != 1:
            got = " and ".join(given) or "none"
            self.problems.add(f"text_input: expected a prompt in one of {', '.join(_PROMPTS)}, got {got}")
            return ()
        name, array = given[0], inputs[given[0]]
        if name == "input_ids":
            if array.size > MAX_INPUT_IDS:
                problem = f"input_ids: expected at most {MAX_INPUT_IDS:,} token ids, got {array.size:,}"
                raise RequestError(problem, code=ErrorCode.PROMPT_TOO_LONG)
            if (least := int(array.min())) < 0:
                self.problems.add(f"input_ids: expected token ids from 0, got {least}")
            else:
                return (Prompt(token_ids=tuple(array.reshape(-1).tolist())),)
            return ()
        if array.size > MAX_PROMPTS:
            self.problems.add(f"{name}: expected at most {MAX_PROMPTS} prompts, got {array.size}")
            return ()
        return tuple([prompt for value in array.flat if (prompt := self._prompt(name, value)) is not None])

    def read_template_kwargs(self, array: npt.NDArray[Any]) -> Mapping[str, Any]:
        kwargs = self._json_object("chat_template_kwargs", _first(array))
        try:
            check_characters("chat_template_kwargs", kwargs)
        except ValueError as error:
            self.problems.add(str(error))
        return kwargs

    def read_json_text(self, name: str, inputs: Mapping[str, npt.NDArray[Any]]) -> str | None:
        """Return the JSON text of an input; None where it was not given, or is no text."""
        value = _first(inputs.get(name))
        return self._text(name, value) if value else None

    def agreed(self, name: str, alias: str, *, default: bool) -> bool:
        """Return the value of a flag that has two names; `name` may be the name of a sampling field."""
        value, by_alias = self.flags.get(name, self.sampling.get(name)), self.flags.get(alias)
        if value is None:
            return default if by_alias is None else by_alias
        if by_alias is not None and by_alias != value:
            got = f"{name} {str(value).lower()} and {alias} {str(by_alias).lower()}"
            self.problems.add(f"{name}: expected one value, got {got}")
        return bool(value)

    def _prompt(self, name: str, value: bytes | str) -> Prompt | None:
        text = self._text(name, value)
        if text is None:
            return None
        if name == "text_input":
            if text:
                return Prompt(text=text)
            self.problems.add("text_input: expected a prompt, got an empty string")
            return None
        try:
            return Prompt(messages=read_messages(text))
        except ValueError as error:
            self.problems.add(str(error))
            return None

    def _text(self, name: str, value: bytes | str) -> str | None:
        # A tokenizer takes seconds and hundreds of megabytes for more.
        if len(value) > MAX_CHAT_BYTES:
            problem = f"{name}: expected at most {MAX_CHAT_BYTES:,} bytes, got {len(value):,}"
            raise RequestError(problem, code=ErrorCode.PROMPT_TOO_LONG)
        try:
            return str(_decoded(value))
        except UnicodeDecodeError as error:
            self.problems.add(f"{name}: {_not_utf8(error)}")
            return None

    def _with_own_names(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `document` with other servers' names replaced by the contract's, and vLLM's guides taken apart."""
        if _FOREIGN_NAMES.isdisjoint(document):  # nearly always
            return document
        fields = {name: value for name, value in document.items() if value not in _ASK_FOR_NOTHING.get(name, ())}
        if "max_completion_tokens" in fields:
            self._rename(fields, "max_completion_tokens", fields.pop("max_completion_tokens"), "max_tokens")
        for alias, name in _WORD_LISTS.items():
            if alias in fields and not fields[alias]:
                del fields[alias]
            elif isinstance(fields.get(alias), list):
                self._rename(fields, alias, fields.pop(alias), name)
        if (texts := fields.pop(f"guided_{_CHOICE}", None)) is not None:
            self._rename(fields, f"guided_{_CHOICE}", self._one_of(f"guided_{_CHOICE}", texts), "guided_regex")
        for alias in _GUIDE_OBJECTS:
            for name, guide in self._json_object(alias, fields.pop(alias, None)).items():
                # The whole of vLLM's dataclass says None and False for what it does not ask; its own state has a "_".
                if guide is None or guide is False or name.startswith("_"):
                    continue
                if name in _GUIDES:
                    self._rename(fields, f"{alias}.{name}", guide, f"guided_{name}")
                elif name == _CHOICE:
                    self._rename(fields, f"{alias}.{name}", self._one_of(f"{alias}.{name}", guide), "guided_regex")
                else:
                    self.problems.add(partial(_unknown_guide, alias, name))  # the search for the nearest is slow
        return fields

    def _one_of(self, name: str, texts: object) -> str | None:
        """Return the regular expression of an answer that is one of `texts`."""
        if not isinstance(texts, list) or not texts or not all(isinstance(one, str) and one for one in texts):
            self.problems.add(f"{name}: expected a list of texts that are not empty, got {quoted(texts)}")
            return None
        # Only what has a meaning is escaped: grammars know few escapes.
        literals = [re.sub(r"[\\^$.|?*+()\[\]{}/-]", r"\\\g<0>", one) for one in texts]
        return f"({'|'.join(literals)})"

    def _rename(self, fields: dict[str, Any], alias: str, value: object, name: str) -> None:
        """Put into `fields`, as `name`, the value that `alias` gave."""
        if fields.get(name) is None:
            fields[name] = value
            self.names[name] = alias
        elif fields[name] != value:
            self.problems.add(f"{name}: given twice, by itself and by {alias}; expected one of them")

    def _json_object(self, name: str, value: object) -> dict[str, Any]:
        """Return the object that `value` is, or holds as JSON text; an empty object for None."""
        if isinstance(value, (str, bytes)):
            if len(value) > MAX_CHAT_BYTES:
                self.problems.add(f"{name}: expected at most {MAX_CHAT_BYTES:,} bytes, got {len(value):,}")
                return {}
            try:
                value = read_json(value)
            except ValueError as error:
                self.problems.add(f"{name}: expected a JSON object, got text that is not JSON ({error})")
                return {}
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.problems.add(f"{name}: expected a JSON object, got {quoted(value)}")
            return {}
        return value

    def _field_tensor(self, field: SamplingFieldSpec, array: npt.NDArray[Any]) -> None:
        try:
            one_or_all = array.reshape(-1).tolist() if field.many else array.item(0)
            self._set(field, list(map(_decoded, one_or_all)) if field.many else _decoded(one_or_all))
        except UnicodeDecodeError as error:
            self.problems.add(f"{field.name}: {_not_utf8(error)}")

    def _field_parameter(self, field: SamplingFieldSpec, value: object) -> None:
        # Clients of Triton's vLLM backend write numbers as strings, and true and false.
        if isinstance(value, str) and len(value) <= _NUMBER_LENGTH and field.dtype not in (Dtype.STRING, Dtype.BOOL):
            if field.dtype is Dtype.FP32:
                value = float(value) if _DECIMAL.fullmatch(value) else value
            else:
                value = int(value) if _WHOLE.fullmatch(value) else value
        elif field.dtype is Dtype.BOOL and isinstance(value, str):
            value = _SWITCHES.get(value.lower(), value)
        self._set(field, value)

    def _set(self, field: SamplingFieldSpec, value: object) -> None:
        if value is False and field.name in (
            "logprobs",
            "prompt_logprobs",
        ):  # no number of them, as OpenAI's chat has it
            return
        if field.many and value == "":  # by itself; among others it is a mistake
            value = ()
        into = self.settings if field.name in _SETTINGS else self.sampling
        if field.off is not None and value == field.off:
            into[field.name] = field.neutral  # also where it is None: the model's default must not count
            return
        try:
            into[field.name] = check_value(field, value)
        except ValueError as error:
            self.problems.add(str(error))

    def _flag_parameter(self, name: str, value: object) -> None:
        if isinstance(value, bool):
            self.flags[name] = value
        else:
            hint = ' (stop strings are "sampling_param_stop")' if name == "stop" else ""
            self.problems.add(f"{name}: expected true or false, got {quoted(value)}{hint}")

    def _unknown_parameter(self, name: str) -> None:
        mode = self._config.unknown_parameters
        if mode == "ignore" or any(fnmatch.fnmatchcase(name, pattern) for pattern in self._config.ignored_parameters):
            return
        (self.problems if mode == "error" else self.warnings).add(partial(_unknown_parameter, name))


def _first(array: npt.NDArray[Any] | None) -> Any:
    return None if array is None or not array.size else array.flat[0]


def _decoded(value: Any) -> Any:
    """Return text for bytes, which a tensor of strings holds; any other value as it is."""
    return value.decode("utf-8") if isinstance(value, bytes) else value


# Characters of an unknown name that are compared. No known name is longer, and the search for the nearest takes time in
# proportion to the product of the lengths.
_NAME_LENGTH = 100

_NAMES_ELSEWHERE = {
    "prompt": "text_input",
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "request_output_len": "max_tokens",
    "n_predict": "max_tokens",
    "stop_words": "stop",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "bad_words": "bad",
    "random_seed": "seed",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "num_return_sequences": "n",
    "end_id": "stop_token_ids",
    "top_logprobs": "logprobs",
    "return_log_probs": "return_logprobs",
    "json_schema": "guided_json",
    "length_penalty": "",
}
"""Name on other servers -> name here; empty where nothing here does the same."""


def _unknown_parameter(name: str) -> str:
    if name in _INPUT_NAMES:
        return f"{name}: expected an input tensor, got a request parameter"
    return f"unknown parameter {quoted(name)}{_nearest(name, _KNOWN_NAMES, in_full=True)}"


def _unknown_field(name: str) -> str:
    plain = name.removeprefix("sampling_param_")
    if name not in _KNOWN_NAMES:
        hint = _nearest(name, SAMPLING_BY_NAME)
    elif plain in SAMPLING_BY_NAME:
        hint = f"; here it is {plain!r}"
    else:
        hint = "; it belongs beside sampling_parameters, not into it"
    return f"sampling_parameters: no field {quoted(name)}{hint}"


def _unknown_guide(alias: str, name: str) -> str:
    return f"{alias}: no guide {quoted(name)}{_nearest(name, _GUIDES)}"


def _nearest(name: str, known: Any, *, in_full: bool = False) -> str:
    """Return the hint to the name meant. `in_full`: a list's name is that of its tensor, for want of a plain one."""
    if name in _NAMES_ELSEWHERE:
        meant = _NAMES_ELSEWHERE[name]
        if in_full and meant in SAMPLING_BY_NAME and SAMPLING_BY_NAME[meant].many:
            meant = SAMPLING_BY_NAME[meant].tensor.name
        return f"; here it is {meant!r}" if meant else ""
    snake = re.sub("(?<=[a-z])(?=[A-Z])", "_", name[:_NAME_LENGTH]).lower()  # others write topK
    match = difflib.get_close_matches(snake, list(known), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"expected UTF-8 text, got byte {error.object[error.start]:#04x} at {error.start}"


_SETTINGS = {field.name: field for field in (*REQUEST_FIELDS, TIMEOUT_US)}
# Tensors that count even when they hold no value: they ask for an empty list, whatever the model's default is.
_LISTS = frozenset(field.tensor.name for field in SAMPLING_FIELDS if field.many)
_FLAGS = tuple(t.name for t in INPUTS if t.dtype is Dtype.BOOL and not t.name.startswith("sampling_param_"))
_FLAG_ALIASES = {"Streaming": "streaming"}
"""Request parameters as upstream's llmapi_client.py spells them."""
_INPUT_NAMES = frozenset(tensor.name for tensor in INPUTS)
_KNOWN_NAMES = sorted(_INPUT_NAMES | set(SAMPLING_BY_NAME) | {TIMEOUT_US.name})

_Table = Mapping[str, tuple[Callable[[FieldReader, Any, Any], None], Any]]
"""Name -> (the method that reads its value, the field or the name of the flag that it is read for)."""

_TENSORS: _Table = {
    **{name: (lambda reader, name, array: reader.flags.update({name: bool(array.item(0))}), name) for name in _FLAGS},
    **{field.tensor.name: (FieldReader._field_tensor, field) for field in SAMPLING_FIELDS},
    **{field.name: (FieldReader._field_tensor, field) for field in REQUEST_FIELDS},
}
_PARAMETERS: _Table = {
    **{field.name: (FieldReader._field_parameter, field) for field in SAMPLING_FIELDS if field.plain_name},
    **{field.tensor.name: (FieldReader._field_parameter, field) for field in SAMPLING_FIELDS},
    # Unlike a sampling field, a setting never comes as a string: no other server has it, so no client writes it so.
    **{name: (FieldReader._set, field) for name, field in _SETTINGS.items() if name not in EXEMPT_PARAMETERS},
    **{name: (FieldReader._flag_parameter, name) for name in _FLAGS},
    **{alias: (FieldReader._flag_parameter, name) for alias, name in _FLAG_ALIASES.items()},
}
