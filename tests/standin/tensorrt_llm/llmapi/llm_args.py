"""LLM arguments, checked against the record as pydantic checks the real ones: unknown keys are errors at any depth."""

import re
from collections.abc import Mapping
from typing import Any

from tensorrt_llm._record import RECORD, fields_of

_SCALARS = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}


class ValidationError(ValueError):
    """Lists what is wrong, as pydantic's does."""

    def __init__(self, class_name, key, message):
        super().__init__(f"1 validation error for {class_name}\n{key}\n  {message}")
        self._entry = {"loc": tuple(key.split(".")), "msg": message}

    def errors(self):
        return [self._entry]


class Section(dict[str, Any]):
    """A section made by `from_dict`: it has been checked against the class that its discriminator names."""


def from_dict(key, section):
    """A section such as speculative_config, whose class is chosen by one of its keys.

    :raises ValueError: as upstream's from_dict does.
    """
    choice = fields_of("TorchLlmArgs")[key]["class_by"]
    name = section.get(choice["key"])
    if name not in choice["classes"]:
        raise ValueError(f"{key}: Invalid {choice['key']}: {name}")
    rest = {field: value for field, value in section.items() if field != choice["key"]}
    check(rest, choice["classes"][name], key)
    return Section(section)


def check(values, class_name, path=""):
    """:raises ValueError: for the first key or value the class does not have."""
    known = fields_of(class_name)
    for key, value in values.items():
        full = f"{path}.{key}" if path else key
        if key not in known:
            raise ValidationError(class_name, full, "Extra inputs are not permitted")
        _check_value(full, known[key], value)


def _check_value(full, row, value):
    if isinstance(value, Section):
        return
    if "class_by" in row and value is not None:
        raise ValueError(f"{full}: expected a config object, got {type(value).__name__}; use from_dict")
    if "class" in row and isinstance(value, Mapping):
        check(value, row["class"], full)
        return
    problem = _type_problem(row["type"], value)
    if problem:
        raise ValueError(f"{full}: {problem}, got {value!r}")


def _type_problem(type_text, value):
    """What is wrong with `value`, or nothing. Types that this file can't judge are let through."""
    if value is None:
        return "" if "None" in type_text else f"expected {type_text}"
    literal = re.match(r"Literal\[(.*?)\]", type_text)
    if literal:
        choices = [choice.strip() for choice in literal[1].split(",")]
        given = str(value).upper() if "any case" in type_text else value
        return "" if given in choices else f"expected one of {', '.join(choices)}"
    expected = _SCALARS.get(type_text.partition(" ")[0])
    if expected is None:
        return ""
    is_right = isinstance(value, expected) and (expected == (bool,) or not isinstance(value, bool))
    return "" if is_right else f"expected {type_text}"


def checked_llm_args(arguments):
    """`arguments` with the defaults of the top level filled in."""
    alias = RECORD["mpi"]["leader"]["llm_arg"]
    arguments = {"mpi_session" if name == alias else name: value for name, value in arguments.items()}
    check(arguments, "TorchLlmArgs")
    if not arguments.get("model"):
        raise ValidationError("TorchLlmArgs", "model", "Field required")
    if arguments.get("stream_interval", 1) <= 0:
        raise ValueError(f"stream_interval must be positive, got {arguments['stream_interval']}")
    defaults = {name: row["default"] for name, row in fields_of("TorchLlmArgs").items()}
    return {**defaults, **arguments}


class TorchLlmArgs:
    """The arguments of the PyTorch backend, checked."""

    def __init__(self, **arguments):
        self.arguments = checked_llm_args(arguments)


def mtp_layers(llm_args):
    """Draft tokens of an iteration; max_draft_len has no say up to 1.2.1."""
    section = llm_args.get("speculative_config") or {}
    return section.get(RECORD["speculative_config"]["mtp_layers_key"], 1) if section else 0
