"""The configuration as a real tritonserver reads it: what makes no difference, and what is refused at load."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deepseek_triton_build import model_repository
from deepseek_triton_tools.server.server_process import ServerProcess
from deepseek_triton_tools.tool_errors import ServerFailedError
from support.servers import url
from support.wire import MODEL, generated


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of model_repository/, to be changed; the logs of failures stay beside it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ignore = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(model_repository(), tmp_path / "repository", ignore=ignore))


def change_yaml(repository: Path, **ours: object) -> None:
    path = repository / MODEL / "1/model.yaml"
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    document["triton_config"] |= ours
    path.write_text(yaml.safe_dump(document), encoding="utf-8")


def change_pbtxt(repository: Path, old: str, new: str) -> None:
    path = repository / MODEL / "config.pbtxt"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def failure(repository: Path) -> str:
    with pytest.raises(ServerFailedError) as caught:
        ServerProcess.serving(repository)
    message, _, log = str(caught.value).removesuffix(")").rpartition(" (the server's log: ")
    assert message.removeprefix("model 'tensorrt_llm' failed to load: ") in Path(log).read_text(encoding="utf-8")
    return message


def test_auto_complete_makes_no_difference(tiny_server: ServerProcess, random_repository: Path) -> None:
    """config.pbtxt says everything, so there is nothing for Triton to complete."""
    with ServerProcess.serving(random_repository, server_args=("--disable-auto-complete-config",)) as server:
        assert _described(server) == _described(tiny_server)
        assert generated(server) == generated(tiny_server)


def _described(server: ServerProcess) -> list[Mapping[str, Any]]:
    address = f"{url(server, 'http')}/v2/models/{MODEL}"
    return [httpx.get(f"{address}{part}", timeout=20).raise_for_status().json() for part in ("", "/config")]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "decoupled: true",
            "decoupled: false",
            "decoupled: config.pbtxt says False, model.yaml says True; set both alike",
        ),
        (
            "max_batch_size: 0",
            "max_batch_size: 8",
            "max_batch_size: config.pbtxt says 8, model.yaml says 0; set both alike",
        ),
    ],
    ids=["decoupled", "max_batch_size"],
)
def test_a_config_pbtxt_that_disagrees_is_refused(repository: Path, old: str, new: str, expected: str) -> None:
    change_pbtxt(repository, old, new)

    assert failure(repository) == f"model 'tensorrt_llm' failed to load: {expected}"


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ({"decoupled": False}, "decoupled: config.pbtxt says True, model.yaml says False; set both alike"),
        ({"max_batch_size": 8}, "max_batch_size: expected 0: the engine batches, Triton does not, got 8"),
    ],
    ids=["decoupled", "max_batch_size"],
)
def test_a_model_yaml_that_disagrees_is_refused(repository: Path, ours: dict[str, object], expected: str) -> None:
    change_yaml(repository, **ours)

    assert expected in failure(repository)


def test_both_disagreements_are_said_at_once(repository: Path) -> None:
    change_pbtxt(repository, "decoupled: true", "decoupled: false")
    change_pbtxt(repository, "max_batch_size: 0", "max_batch_size: 8")

    message = failure(repository)

    assert "decoupled: config.pbtxt says False" in message
    assert "max_batch_size: config.pbtxt says 8" in message


def test_all_bad_keys_are_reported_at_once(repository: Path) -> None:
    change_yaml(
        repository,
        engine="sglang",
        default_max_tokenz=9,
        stream_mode="both",
        default_timeout_ms=0,
        max_inflight="many",
        default_sampling={"top_p": 2, "top_q": 1},
        on_fatal="panic",
    )

    message = failure(repository)

    for expected in (
        "triton_config.engine: expected one of tensorrt_llm, vllm, reference, simulated, got 'sglang'",
        "triton_config.default_max_tokenz: unknown key, did you mean default_max_tokens?; known: ",
        "triton_config.stream_mode: expected one of delta, cumulative, got 'both'",
        "triton_config.default_timeout_ms: expected a whole number of milliseconds from 1, or null, got 0",
        "triton_config.max_inflight: expected a whole number from 1, or null, got 'many'",
        "triton_config.default_sampling.top_p: expected a number >= 0 and <= 1, got 2",
        "triton_config.default_sampling.top_q: no such sampling field",
        "triton_config.on_fatal: expected one of exit, unready, got 'panic'",
    ):
        assert expected in message


def test_a_default_that_the_engine_does_not_do_is_refused(repository: Path) -> None:
    change_yaml(repository, engine="simulated", engine_options={}, default_sampling={"repetition_penalty": 1.1})

    assert failure(repository).endswith(
        "triton_config.default_sampling.repetition_penalty: the simulated engine has no logits to apply it to"
    )


def test_bad_engine_options_are_reported_at_once(repository: Path) -> None:
    change_yaml(repository, engine_options={"num_thread": 1, "max_num_seqs": 0})

    message = failure(repository)

    assert "triton_config.engine_options.num_thread: unknown option; known: " in message
    assert "triton_config.engine_options.max_num_seqs: expected a whole number from 1, got 0" in message
