"""The configuration as a real tritonserver reads it: what makes no difference, and what is refused at load."""

import re
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deepseek_triton_build import model_repository
from deepseek_triton_tools.server.server_process import ServerProcess
from deepseek_triton_tools.tool_errors import ServerFailedError
from support.servers import change_yaml, url
from support.web import web
from support.wire import MODEL, generated


def test_auto_complete_makes_no_difference(tiny_server: ServerProcess, random_repository: Path) -> None:
    """config.pbtxt says everything, so there is nothing for Triton to complete."""
    with ServerProcess.serving(random_repository, server_args=("--disable-auto-complete-config",)) as server:
        assert _described(server) == _described(tiny_server)
        assert generated(server) == generated(tiny_server)


def _described(server: ServerProcess) -> list[Mapping[str, Any]]:
    address = f"{url(server, 'http')}/v2/models/{MODEL}"
    return [web.get(f"{address}{part}").raise_for_status().json() for part in ("", "/config")]


REFUSED: dict[str, tuple[dict[str, str], dict[str, object], list[str]]] = {
    "two files that disagree": (
        {"decoupled: true": "decoupled: false", "max_batch_size: 0": "max_batch_size: 8"},
        {},
        [
            "decoupled: config.pbtxt says False, model.yaml says True; set both alike",
            "max_batch_size: config.pbtxt says 8, model.yaml says 0; set both alike",
        ],
    ),
    "bad keys": (
        {},
        {
            "default_max_tokenz": 9,
            "stream_mode": "both",
            "default_timeout_ms": 0,
            "max_inflight": "many",
            "default_sampling": {"top_p": 2},
            "on_fatal": "panic",
        },
        [
            "triton_config.default_max_tokenz: unknown key, did you mean default_max_tokens?; known: ",
            "triton_config.stream_mode: expected one of delta, cumulative, got 'both'",
            "triton_config.default_timeout_ms: expected a whole number of milliseconds from 1, or null, got 0",
            "triton_config.max_inflight: expected a whole number from 1, or null, got 'many'",
            "triton_config.default_sampling.top_p: expected a number >= 0 and <= 1, got 2",
            "triton_config.on_fatal: expected one of exit, unready, got 'panic'",
        ],
    ),
    "a default that the engine does not do": (
        {},
        {"engine": "simulated", "engine_options": {}, "default_sampling": {"repetition_penalty": 1.1}},
        ["triton_config.default_sampling.repetition_penalty: the simulated engine has no logits to apply it to"],
    ),
}
"""What is wrong -> (lines of config.pbtxt that are replaced, keys of model.yaml, all that is said of it)."""


def test_all_that_is_wrong_is_said_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the logs of failures stay beside the repositories
    with ThreadPoolExecutor() as pool:
        messages = pool.map(_failure, [_changed(tmp_path / name, *REFUSED[name][:2]) for name in REFUSED])
        for (name, (*_, expected)), message in zip(REFUSED.items(), messages, strict=True):
            with subtests.test(name):
                assert message.startswith("model 'tensorrt_llm' failed to load: ")
                assert [said for said in expected if said not in message] == []


def test_a_file_that_is_not_python_is_named_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("engines/__init__.py", "engines/simulated/__init__.py"):
        repository = _changed(tmp_path / name, {}, {"engine": "simulated", "engine_options": {}})
        (repository / MODEL / "1/deepseek_backend" / name).write_text("x = (", encoding="utf-8")
        assert f"deepseek_backend/{name}:1 " in _failure(repository)


def _changed(repository: Path, pbtxt: Mapping[str, str], yaml: Mapping[str, object]) -> Path:
    """A copy of model_repository/ with these changes."""
    shutil.copytree(model_repository(), repository, ignore=shutil.ignore_patterns("__pycache__"))
    config = repository / MODEL / "config.pbtxt"
    lines = config.read_text(encoding="utf-8")
    config.write_text(re.sub("|".join(pbtxt) or "$^", lambda found: pbtxt[found[0]], lines), encoding="utf-8")
    change_yaml(repository / MODEL / "1/model.yaml", **yaml)
    return repository


def _failure(repository: Path) -> str:
    with pytest.raises(ServerFailedError) as caught:
        ServerProcess.serving(repository)
    message, _, log = str(caught.value).removesuffix(")").rpartition(" (the server's log: ")
    assert message.removeprefix("model 'tensorrt_llm' failed to load: ") in Path(log).read_text(encoding="utf-8")
    return message
