"""config.pbtxt, read with Triton's own protobuf messages and checked against the wire contract."""

import importlib.util
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from deepseek_triton_build.check import codes
from deepseek_triton_build.check.documents import read_text
from deepseek_triton_build.data.finding import Code, Finding
from deepseek_triton_build.data.own_files import contract
from deepseek_triton_build.data.setting_types import BACKEND_SETTINGS
from deepseek_triton_build.data.type_strings import fits
from deepseek_triton_build.render.model_configuration import declaration
from deepseek_triton_build.text import is_inside, nearest_name, printable_line, safe_name, short_repr

NAME = "config.pbtxt"
_PYTHON = "python"
_SHOWN = 4
"""Placeholders that a finding names."""
# What TensorRT-LLM's fill_template.py, envsubst and chart templates fill in.
_PLACEHOLDER = re.compile(r"\$\{\w+\}|\{\{.*?\}\}|\$[A-Za-z_]\w*|<[A-Z][A-Z_]+>")
_TOKEN = re.compile(r"""(?P<skip>\#[^\n]*)|(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|(?P<word>\w+)|[{}<>[\]]""")
_CLOSES = {"}": "{", "]": "[", ">": "<"}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A config.pbtxt that could be read."""

    file: str
    text: str
    message: Any
    """The protobuf message inference.ModelConfig."""

    def line(self, at: str) -> int | None:
        """Return the line where `at` stands outermost and first; None when the file doesn't have it.

        :param at: a field's name or, in double quotes, a text.
        """
        found = self._places.get(at)
        return None if found is None else found[1]

    @cached_property
    def _places(self) -> Mapping[str, tuple[int, int]]:
        """Word or quoted text -> how deep in braces its outermost and first occurrence is, and on which line."""
        places: dict[str, tuple[int, int]] = {}
        depth, line, read = 0, 1, 0
        for token in _TOKEN.finditer(self.text):
            line += self.text.count("\n", read, token.start())
            read = token.start()
            word = token[0] if token["text"] is None else f'"{token["text"][1:-1]}"'
            if word in "{<>}":
                depth += 1 if word in "{<" else -1
            elif token["skip"] is None and (word not in places or depth < places[word][0]):
                places[word] = depth, line
        return places

    def at(self, at: str) -> dict[str, Any]:
        """Return the place of a field or of a quoted text, for a finding."""
        return {"file": self.file, "line": self.line(at), "key": at.strip('"')}

    def finding(self, check: Code, message: str, fix: str, *, at: str) -> Finding:
        return check.finding(message, fix, **self.at(at))

    def unknown_number(self, field: str, number: int, *, at: str) -> Finding:
        """Return the finding about a number that stands for no name of Triton's."""
        message = f"{field} {number} is not one that Triton knows"
        return self.finding(codes.BROKEN_CONFIG, message, "write its name instead", at=at)


def read_config(path: Path, file: str) -> tuple[ModelConfig | None, list[Finding]]:
    """Return the configuration in `path`, and what is wrong with the file itself."""
    if not os.path.exists(path):
        fix = "write it: name, backend, inputs, outputs and instance_group"
        return None, [codes.NO_CONFIG.finding(f"{file} is missing", fix, file=file)]
    text = read_text(path, file)
    if isinstance(text, Finding):
        return None, [text]
    if text.startswith("\ufeff"):
        message = "expected a field, found a byte order mark"
        return None, [codes.BROKEN_CONFIG.finding(message, "remove the byte order mark", file=file, line=1)]
    if finding := _unfilled(text, file):
        return None, [finding]
    messages = _messages()
    if messages is None:
        message = f"{file} was not checked, because tritonclient's gRPC part is not installed"
        return None, [codes.NO_PROTOBUF.finding(message, "pip install 'tritonclient[grpc]'", file=file)]
    from google.protobuf import text_format

    try:
        parsed = text_format.Parse(text, messages.ModelConfig())
    except text_format.ParseError as error:
        problem = printable_line(str(error).partition(" : ")[2]) or "not a ModelConfig"
        line = error.GetLine()
        if "missing ending quote" in problem:
            fix = "write the second quote"
            return None, [codes.BROKEN_CONFIG.finding("a quote is not closed", fix, file=file, line=line)]
        if lost := _lost_bracket(text):
            return None, [codes.BROKEN_CONFIG.finding(lost[1], lost[2], file=file, line=lost[0])]
        return None, [codes.BROKEN_CONFIG.finding(problem, "correct or remove it", file=file, line=line)]
    except UnicodeDecodeError:
        fix = "write it as UTF-8, without escaped bytes above 0x7f"
        return None, [codes.BROKEN_CONFIG.finding("a string is not UTF-8", fix, file=file)]
    return ModelConfig(file=file, text=text, message=parsed), []


def _unfilled(text: str, file: str) -> Finding | None:
    """Return the finding about placeholders of a template that nothing has filled in; None where there are none."""
    places: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        for name in _PLACEHOLDER.findall(line.partition("#")[0]):
            places.setdefault(name, number)
    if not places:
        return None
    names = [*places][:_SHOWN]
    more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    message = f"it is a template that was not filled in: {safe_name(', '.join(names))}{more}"
    fix = "write the values in their places, or fill it as it is meant to be (TensorRT-LLM: fill_template.py)"
    return codes.BROKEN_CONFIG.finding(message, fix, file=file, line=places[names[0]])


class _Bracket(NamedTuple):
    char: str
    line: int
    indent: int


def _lost_bracket(text: str) -> tuple[int, str, str] | None:
    """Return where a brace or a bracket is missing or too many, what is wrong and how to mend it; None if all match."""
    lines = text.splitlines()
    opened: list[_Bracket] = []
    line, read = 1, 0
    for token in _TOKEN.finditer(text):
        line += text.count("\n", read, token.start())
        read = token.start()
        char = token[0]
        if char in _CLOSES.values():
            opened.append(_Bracket(char, line, _indent(lines[line - 1])))
        elif char in _CLOSES:
            below, top = ([None, None, *opened])[-2:]
            is_first = lines[line - 1].lstrip().startswith(char)
            is_outer = is_first and top is not None and top.line < line and top.indent > _indent(lines[line - 1])
            if top is not None and top.char == _CLOSES[char] and not is_outer:
                opened.pop()
            elif top is not None and (is_outer or (below is not None and below.char == _CLOSES[char])):
                return _unclosed(top, lines)
            else:
                return line, f"{char} closes nothing", f"remove it, or write the {_CLOSES[char]} that it closes"
    return _unclosed(opened[-1], lines) if opened else None


def _unclosed(bracket: _Bracket, lines: Sequence[str]) -> tuple[int, str, str]:
    """Return the last line that can be inside: the next one is indented no deeper than the line of the bracket."""
    closer = next(closer for closer, opener in _CLOSES.items() if opener == bracket.char)
    last = bracket.line
    for number, line in enumerate(lines[bracket.line :], bracket.line + 1):
        if line.strip() and _indent(line) <= bracket.indent:
            break
        last = number if line.strip() else last
    return last, f"the {bracket.char} of line {bracket.line} is not closed", f"write {closer} behind this line"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def check_versions(config: ModelConfig, folder: Path) -> Iterator[Finding]:
    """Find a version policy that serves nothing that is there, names what is not, or serves an empty folder.

    Triton serves the highest number unless the policy says otherwise.
    """
    policy = config.message.version_policy
    there = sorted((name for name in os.listdir(folder) if name.isdecimal() and (folder / name).is_dir()), key=int)
    served = there[-(policy.latest.num_versions if policy.HasField("latest") else 1) :]
    if policy.HasField("all"):
        served = there
    elif policy.HasField("specific"):
        served = [name for name in there if int(name) in policy.specific.versions]
    elif policy.HasField("latest") and not policy.latest.num_versions:
        served = []
    if not served:
        text = f"version_policy serves none of the versions that are there: {', '.join(there)}"
        yield config.finding(codes.WRONG_VERSION, text, "leave version_policy out, or name one", at="version_policy")
    absent = sorted({*policy.specific.versions} - {*map(int, there)})
    if served and absent:
        text = f"version_policy names {', '.join(map(str, absent))}, and there is only {', '.join(there)}"
        yield config.finding(codes.ABSENT_VERSION, text, "name what is there", at="version_policy")
    for name in served:
        if not os.listdir(folder / name):
            text, fix = f"Triton serves version {name}, whose folder is empty", f"remove the folder {name}"
            yield config.finding(codes.WRONG_VERSION, text, fix, at="version_policy")


def check_config(
    config: ModelConfig, *, folder: Path, triton: Mapping[str, Any] | None, model_yaml: str, is_ours: bool
) -> Iterator[Finding]:
    """Check the configuration against its folder, the triton_config of `model_yaml` and the wire contract.

    :param folder: the model's folder.
    :param triton: the content of triton_config; None when model.yaml can't be read.
    """
    message, folder_name = config.message, folder.resolve().name
    yield from check_name(config, folder)
    if message.backend != _PYTHON and backend_folder(config, folder) is None:
        text = f"expected backend {_PYTHON}, found {short_repr(message.backend or message.platform or None)}"
        fix = f'write backend: "{_PYTHON}"'
        if is_inside(message.backend) and message.backend:
            place = f"{safe_name(folder_name)}/backends/{safe_name(message.backend)}"
            fix += f", or put {message.backend}'s model.py into {place}"
        yield config.finding(codes.WRONG_BACKEND, text, fix, at="backend")
    policies = (("decoupled", message.model_transaction_policy.decoupled), ("max_batch_size", message.max_batch_size))
    defaults = {"decoupled": is_ours, "max_batch_size": 0}  # what model.py takes when triton_config lacks the key
    for key, here in policies if triton is not None else ():
        yield from _check_policy(config, key, here, (triton or {}).get(key, defaults[key]), model_yaml, is_ours)
    for tensor in (*message.input, *message.output):
        if _dtype(tensor) is None:
            yield config.unknown_number("data_type", tensor.data_type, at=f'"{tensor.name}"')
    if is_ours:
        # Where the two files differ about decoupled, C006 tells it, and the inputs may be those of either.
        either = message.model_transaction_policy.decoupled, bool((triton or {}).get("decoupled", True))
        declared = {tensor.name for tensor in message.input}
        inputs = min(
            (contract().declared_inputs(decoupled=value) for value in either),
            key=lambda inputs: len(declared ^ {tensor.name for tensor in inputs}),
        )
        yield from _check_tensors(config, "input", message.input, inputs)
        yield from _check_tensors(config, "output", message.output, contract().OUTPUTS)


def check_name(config: ModelConfig, folder: Path) -> Iterator[Finding]:
    """Find a name that is not that of the model's folder."""
    name, folder_name = config.message.name, folder.resolve().name
    if name not in ("", folder_name):
        text = f"the model is named {name!r}, its folder {folder_name!r}"
        yield config.finding(codes.WRONG_NAME, text, f'write name: "{folder_name}", or rename the folder', at="name")


def backend_folder(config: ModelConfig, folder: Path) -> Path | None:
    """Return the folder of the Python-based backend that the model in `folder` names; None when it names none.

    Such a backend is a folder with a model.py (triton-inference-server/python_backend, Python Based Backends). `build
    --backend-name` writes it into backends/ of the model's folder. In the repository itself, Triton takes backends/ for
    a model and fails to load it (2.51).
    """
    name = config.message.backend
    if name in ("", _PYTHON) or not is_inside(name):
        return None
    places = (above / "backends" / name for above in (folder, folder.parent.parent))
    return next((place for place in places if os.path.isfile(place / "model.py")), None)


def _check_policy(
    config: ModelConfig, key: str, here: Any, there: Any, model_yaml: str, is_ours: bool
) -> Iterator[Finding]:
    # Of a value that the backend does not take, T002 tells.
    if here == there or (is_ours and not fits(there, BACKEND_SETTINGS[key])):
        return
    text = f"{key} is {short_repr(here)} here and {short_repr(there)} in {model_yaml}"
    wanted = (
        f"model_transaction_policy {{ decoupled: {short_repr(there)} }}" if key == "decoupled" else f"{key}: {there}"
    )
    is_left_out = config.line(key) is None
    if is_left_out and not is_ours:
        yield config.finding(codes.POLICY_ONLY_COMPLETED, text, f"write {wanted}", at=key)
    else:
        fix = f"write {wanted}, or change {model_yaml}"
        yield config.finding(codes.POLICY_DIFFERS, text, fix, at=key)


def _check_tensors(config: ModelConfig, kind: str, declared: Iterable[Any], wanted: Iterable[Any]) -> Iterator[Finding]:
    declared = list(declared)
    here = {tensor.name: tensor for tensor in declared}
    by_name = {tensor.name: tensor for tensor in wanted}
    for name, times in Counter(tensor.name for tensor in declared).items():
        if times > 1:
            text = f"{kind} {short_repr(name)} is declared {times} times"
            yield config.finding(codes.MISSING_TENSOR, text, "leave only one of them", at=f'"{name}"')
    for name, tensor in by_name.items():
        if name not in here:
            text = f"{kind} {name} is missing"
            yield config.finding(codes.MISSING_TENSOR, text, f"add {declaration(kind, tensor)}", at=f'"{name}"')
            continue
        found = _shape(_dtype(here[name]) or str(here[name].data_type), here[name], kind)
        expected = _shape(tensor.dtype.value, tensor, kind)
        if found != expected:
            text = f"{kind} {name}: expected {expected}, found {found}"
            yield config.finding(codes.MISSING_TENSOR, text, f"write {declaration(kind, tensor)}", at=f'"{name}"')
    for name in here.keys() - by_name.keys():
        near = nearest_name(name, by_name.keys() - here.keys())
        fix = f"did you mean {near}?" if near else "remove it"
        yield config.finding(
            codes.EXTRA_TENSOR, f"{kind} {short_repr(name)} is not in the wire contract", fix, at=f'"{name}"'
        )


def _shape(dtype: str, tensor: Any, kind: str) -> str:
    """Return type and shape of a tensor for people. Outputs have no `optional`."""
    optional = ", optional" if kind == "input" and tensor.optional else ""
    return f"{dtype} {list(tensor.dims)}{optional}"


def _dtype(tensor: Any) -> str | None:
    known = tensor.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number.get(tensor.data_type)
    return None if known is None else str(known.name)


@cache
def _messages() -> ModuleType | None:
    """Return tritonclient's model_config_pb2; None when it is not installed.

    The module is loaded by itself, because importing its package also imports grpc and numpy, which takes 0.2 s.
    """
    loaded = sys.modules.get("tritonclient.grpc.model_config_pb2")
    package = importlib.util.find_spec("tritonclient")
    if loaded is not None or package is None:
        return loaded
    for folder in package.submodule_search_locations or ():
        path = Path(folder) / "grpc" / "model_config_pb2.py"
        spec = importlib.util.spec_from_file_location("deepseek_triton_build._model_config_pb2", path)
        if path.is_file() and spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            except ImportError:  # tritonclient without its grpc extra comes without protobuf
                return None
            return module
    return None
