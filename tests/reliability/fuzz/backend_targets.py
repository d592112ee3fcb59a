"""The parsers that run in the model's process and in the supervisor."""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from deepseek_backend.answer_format import with_answer_format
from deepseek_backend.answer_text import ReasoningSplitter, StopStringFilter
from deepseek_backend.chat_rendering import ChatFacts, ChatRenderer, find_chat_facts
from deepseek_backend.config import load_config, parse_config
from deepseek_backend.contract import INPUTS, SAMPLING_FIELDS, Dtype
from deepseek_backend.engines.generate_request import read_handover
from deepseek_backend.engines.prompting import render_chat
from deepseek_backend.engines.reference.checkpoint_files import TensorFiles, read_config
from deepseek_backend.engines.reference.checkpoint_loading import ChatTemplate
from deepseek_backend.engines.simulated.filler_text import render_chat_form
from deepseek_backend.errors import ConfigError, EngineError, RequestError
from deepseek_backend.messages import read_messages, read_tool_use
from deepseek_backend.parsing import ParsedRequest, parse_request
from deepseek_backend.release import read_record
from deepseek_backend.v4_prompt import V4, V41
from deepseek_launcher import launches
from deepseek_launcher.output import Lines
from deepseek_launcher.rank import is_alive_event, parse_event
from reliability.fuzz.mutation import cuts
from reliability.fuzz.refusals import check_message, may_refuse

TINY = Path(__file__).resolve().parents[3] / "model_repository/tensorrt_llm/1/tiny"
_CONFIG = parse_config({"model": "m"}, version_dir=Path())
_SUPPORTED = dict.fromkeys([*(field.name for field in SAMPLING_FIELDS), "priority", "request_type"], "")
_DTYPES = {tensor.name: tensor.dtype for tensor in INPUTS}
_NUMPY: Mapping[Dtype, npt.DTypeLike] = {
    Dtype.STRING: np.object_,
    Dtype.BOOL: np.bool_,
    Dtype.INT32: np.int32,
    Dtype.UINT64: np.uint64,
    Dtype.FP32: np.float32,
}


def generate_request(data: bytes) -> None:
    """A body of /generate, as Triton hands it on: inputs as tensors, all other keys as request parameters."""
    given = taken_apart(data)
    if given is None:
        return
    with may_refuse(RequestError):
        parsed = parse_request(*given, _CONFIG, _SUPPORTED)
        for renderer in _renderers():
            _render(renderer, parsed)


def taken_apart(data: bytes) -> tuple[dict[str, npt.NDArray[Any]], str] | None:
    """(tensors, parameters) of a body; None for what Triton itself would refuse."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    tensors, parameters = {}, {}
    for name, value in body.items():
        if name in _DTYPES:
            array = _tensor(_DTYPES[name], value)
            if array is None:
                return None
            tensors[name] = array
        elif isinstance(value, str | int | float):
            parameters[name] = value
    try:
        return tensors, json.dumps(parameters)
    except ValueError:  # a number too long to be written
        return None


def _tensor(dtype: Dtype, value: object) -> npt.NDArray[Any] | None:
    values = value if isinstance(value, list) else [value]
    if dtype is Dtype.STRING:
        if not all(isinstance(each, str) for each in values):
            return None
        return np.array([str(each).encode("utf-8", "surrogatepass") for each in values], np.object_)
    if not all(isinstance(each, int | float) for each in values):
        return None
    try:
        return np.array(values, _NUMPY[dtype])
    except (OverflowError, ValueError):
        return None


def _render(renderer: ChatRenderer, parsed: ParsedRequest) -> None:
    for prompt in parsed.prompts:
        if prompt.messages is None:
            continue
        with may_refuse(RequestError):
            rendered = renderer.render(prompt.messages, parsed.chat_template_kwargs, parsed.tool_use)
            rendered.prompt.encode()
            with_answer_format(
                parsed.sampling,
                parsed.tool_use,
                renderer.facts.form,
                prompt=rendered.prompt,
                begun=rendered.begun,
                refused="",
            )


class TemplateEngine:
    """Renders as the reference engine does."""

    def __init__(self, folder: Path) -> None:
        self._template = ChatTemplate(folder)

    def render_chat(self, messages: Any, template_kwargs: Mapping[str, Any]) -> str:
        return render_chat(self._template, messages, template_kwargs)


class _SimulatedForm:
    def render_chat(self, messages: Any, template_kwargs: Mapping[str, Any]) -> str:
        return render_chat_form(messages, template_kwargs)


class _NoTemplate:
    def render_chat(self, messages: Any, template_kwargs: Mapping[str, Any]) -> str:
        from deepseek_backend.contract import ErrorCode

        raise RequestError("there is no template", code=ErrorCode.UNSUPPORTED)


@cache
def _renderers() -> tuple[ChatRenderer, ...]:
    """DeepSeek's forms: V3.1's template, R1's, the simulated engine's, and the programs of V3.2, V4 and V4.1."""
    engines: list[Any] = [TemplateEngine(TINY), TemplateEngine(TINY / "r1"), _SimulatedForm()]
    found: list[tuple[Any, ChatFacts]] = [(one, find_chat_facts(one, is_v32=False)) for one in engines]
    programs: list[dict[str, Any]] = [{"is_v32": True}, {"is_v32": False, "v4": V4}, {"is_v32": False, "v4": V41}]
    found += [(_NoTemplate(), find_chat_facts(_NoTemplate(), **program)) for program in programs]
    return tuple(ChatRenderer(engine, facts, eos_token="<｜end▁of▁sentence｜>") for engine, facts in found)


def messages(data: bytes) -> None:
    text = _text(data)
    if text is None:
        return
    with may_refuse(ValueError):
        read = read_messages(text)
        for renderer in _renderers():
            with may_refuse(RequestError):
                renderer.render(read, {}, read_tool_use(None, None))


def tools(data: bytes) -> None:
    """The tools, and behind a line break the choice."""
    text = _text(data)
    if text is None:
        return
    given, _, choice = text.partition("\n")
    with may_refuse(ValueError):
        use = read_tool_use(given or None, choice or None)
        for renderer in _renderers():
            with may_refuse(RequestError):
                renderer.render([{"role": "user", "content": "Hi"}], {}, use)


def context_handover(data: bytes) -> None:
    text = _text(data)
    if text is not None:
        with may_refuse(ValueError):
            read_handover(read_handover(text).to_json().decode())


def stop_strings(data: bytes) -> None:
    """Stop strings, one a line, an empty line, and the text. The result does not depend on where the text is cut."""
    head, _, body = data.decode("utf-8", "replace").partition("\n\n")
    stops = [line for line in head.split("\n") if line][:8]
    if not stops:
        return
    results = set()
    for pieces in ([body], list(body), [piece.decode("utf-8", "replace") for piece in cuts(body.encode())]):
        if "".join(pieces) != body:  # a cut inside a character
            continue
        found = StopStringFilter(stops)
        text = "".join(map(found.push, pieces))
        results.add((text + ("" if found.matched is not None else found.finish()), found.matched))
    assert len(results) == 1, results
    ((text, matched),) = results
    ends = [(at + len(stop), -len(stop), stop) for stop in stops if (at := body.find(stop)) >= 0]
    end, _, first = min(ends, default=(0, 0, None))
    assert matched == first
    assert text == (body if first is None else body[: end - len(first)])


def reasoning(data: bytes) -> None:
    """The output of a model, cut in several ways."""
    text = data.decode("utf-8", "replace")
    for opened in (False, True):
        results = set()
        for pieces in ([text], list(text), [text[at : at + 3] for at in range(0, len(text), 3)]):
            splitter = ReasoningSplitter(opened=opened)
            parts = [splitter.push(piece) for piece in pieces]
            parts.append(splitter.finish())
            results.add(("".join(part[0] for part in parts), "".join(part[1] for part in parts)))
        assert len(results) == 1, results


def model_yaml(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.yaml")
        path.write_bytes(data)
        try:
            load_config(path)
        except ConfigError as error:
            for problem in error.problems:
                check_message(problem)


def _reads(name: str, read: Callable[[Path], object], error: type[Exception]) -> Callable[[bytes], None]:
    """A target that reads a folder with a file of this name."""

    def target(data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, name).write_bytes(data)
            with may_refuse(error):
                read(Path(folder))

    return target


release_record = _reads(
    "release.yaml", lambda folder: read_record(folder, option="engine_options.allow_version_mismatch"), ConfigError
)
reference_config = _reads("config.json", read_config, EngineError)
reference_tensors = _reads("model.safetensors", lambda folder: TensorFiles(folder, block_size=(128, 128)), EngineError)


def rank_lines(data: bytes) -> None:
    """The output of ranks: lines put together, and the events in them. Without tags nothing may be lost."""
    for tagged in (False, True):
        seen: list[str] = []

        def wants(line: str, seen: list[str] = seen) -> bool:
            seen.append(line)
            is_alive_event(line)
            parse_event(line, "0123abcd")
            return True

        lines = Lines(wants, tagged=tagged)
        out = b"".join(map(lines.feed, cuts(data))) + lines.end()
        if not tagged:
            assert out == data


def launch_file(data: bytes) -> None:
    """A file of the supervisor's records: those that are none are skipped."""
    with tempfile.TemporaryDirectory() as name, patch.dict(os.environ, XDG_RUNTIME_DIR=name):
        folder = launches.record_folder()
        folder.mkdir(parents=True, mode=0o700)
        Path(folder, "0123abcd.json").write_bytes(data)
        launches.read_records()


def _text(data: bytes) -> str | None:
    """The text of an input, which has been decoded before these parsers get it."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
