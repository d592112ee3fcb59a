"""The package's own files: the YAML beside this module, and the model repository that each build is a copy of."""

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from inspect import formatannotation
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from deepseek_triton_build.data.type_strings import fits, in_words
from deepseek_triton_build.text import short_repr

_FOLDER = Path(__file__).parent
_Entry = TypeVar("_Entry")


def read_data(file: str) -> str:
    """Return the text of `file`, a path in this folder."""
    return (_FOLDER / file).read_text("utf-8")


def load_yaml(file: str, *, until: str = "") -> Any:
    """Return the content of `file`, a path in this folder, up to the first line that is `until`, or all of it. It is
    ours, so it needs none of parse_yaml's care."""
    import yaml

    # A part of the text, because PyYAML makes the values of a large table in tens of milliseconds.
    text = read_data(file).partition(f"\n{until}\n")[0] if until else read_data(file)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)

    def value(node: Any) -> Any:
        # What PyYAML's own constructor does, in half of its time: these files have no nodes that name themselves.
        if isinstance(node, yaml.MappingNode):
            loader.flatten_mapping(node)
            return {value(key): value(one) for key, one in node.value}
        if isinstance(node, yaml.SequenceNode):
            return [value(one) for one in node.value]
        return node.value if node.tag == "tag:yaml.org,2002:str" else loader.construct_object(node)

    return value(loader.get_single_node())


def entry_of(place: str, kind: Callable[..., _Entry], row: Mapping[str, Any], **more: Any) -> _Entry:
    """Return an entry of such a file, with `more`. Raises LookupError with its place for a key that is missing or
    unknown, and for a value of another type than its field has."""
    try:
        entry = kind(**row, **more)
    except TypeError as error:
        raise LookupError(f"{place}: {str(error).partition(' ')[2]}") from error
    types = _types(kind)
    if wrong := [key for key, value in row.items() if not fits(value, types[key])]:
        told = (f"{key}: expected {in_words(types[key])}, found {short_repr(row[key])}" for key in wrong)
        raise LookupError(f"{place}: {'; '.join(told)}")
    return entry


@cache
def _types(kind: Any) -> dict[str, str]:
    """Return field -> its type, as type_strings reads it; a tuple may hold anything."""
    types = "\n".join(formatannotation(field.type).strip("'") for field in fields(kind)).replace(", ...", "")
    for python, ours in (("typing.", ""), ("collections.abc.Mapping", "dict"), ("collections.abc.Sequence", "list")):
        types = types.replace(python, ours)
    return {field.name: spelled for field, spelled in zip(fields(kind), types.split("\n"), strict=True)}


_PACKAGE = Path(__file__).resolve().parents[1]
# The wheel holds the folder inside this package (force-include); an editable install reads the checkout's.
_CANDIDATES = (_PACKAGE / "model_repository", _PACKAGE.parents[1] / "model_repository")


def model_repository() -> Path:
    """Return the folder that holds `tensorrt_llm/`.

    :raises FileNotFoundError: when neither place has it.
    """
    for candidate in _CANDIDATES:
        if (candidate / "tensorrt_llm" / "1" / "model.py").is_file():
            return candidate
    raise FileNotFoundError(f"the package is incomplete: no model_repository at {' or '.join(map(str, _CANDIDATES))}")


def version_dir() -> Path:
    """Return the folder of model.py. On sys.path it makes `deepseek_backend` importable."""
    return model_repository() / "tensorrt_llm" / "1"


@cache
def backend_module(name: str) -> ModuleType:
    """Return a module of the backend that needs nothing but the standard library."""
    # The backend is no installed package: it lies beside model.py, from where Triton runs it.
    if (place := str(version_dir())) not in sys.path:
        sys.path.append(place)
    return importlib.import_module(f"deepseek_backend.{name}")


def contract() -> ModuleType:
    """Return the backend's contract.py: the names, types and ranges of the wire."""
    return backend_module("contract")
