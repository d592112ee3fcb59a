"""The checkpoints that the models of a Triton model repository load, by their model.yaml."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepseek_triton_build.check import Finding, read_yaml
from deepseek_triton_build.text import short_repr
from deepseek_triton_tools.tool_errors import CheckpointError

MODEL_YAML = "model.yaml"
_TENSORRT_LLM, _REFERENCE, _SIMULATED = "tensorrt_llm", "reference", "simulated"
_DRAFT_KEYS = ("speculative_model", "speculative_model_dir")
"""Keys of speculative_config that name a draft model: the second one in TensorRT-LLM 1.1, the first in 0.21 and 1.2."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One checkpoint that one model.yaml names."""

    model_yaml: Path
    name: str
    """A folder or the name of a model on the Hugging Face hub, as model.yaml has it."""
    revision: str | None
    is_draft: bool
    only_indexed: bool
    """The engine reads the files that the checkpoint's index names, and not all that are in its folder."""

    @property
    def path(self) -> Path:
        """The path, if `name` is a folder. A relative path counts from model.yaml's folder, as in the backend."""
        return self.model_yaml.parent / self.name

    def __str__(self) -> str:
        return f"the {'draft ' if self.is_draft else ''}model of {self.model_yaml}"


class NothingToReadError(CheckpointError):
    """The served model has no weights of its own."""


def model_yamls(path: Path) -> list[Path]:
    """The model.yaml files at `path`, which is a model.yaml itself, or the folder of a version, a model or a
    repository.

    Each model has one: that of its highest version, which Triton loads unless config.pbtxt says otherwise.

    :raises OSError: when a folder can't be listed.
    """
    if not path.is_dir():
        return [path] if path.suffix in (".yaml", ".yml") else []
    if os.path.lexists(path / MODEL_YAML):
        return [path / MODEL_YAML]
    folders = [path, *(path / name for name in sorted(os.listdir(path)) if os.path.isdir(path / name))]
    return [found for folder in folders for found in _newest(folder)]


def list_folder(folder: Path) -> list[str]:
    """:raises CheckpointError: when the folder can't be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder}: can't be listed: {error.strerror}; allow this user to read it") from error


def _newest(model_folder: Path) -> Iterator[Path]:
    names = list_folder(model_folder)
    versions = [name for name in names if name.isdecimal() and os.path.lexists(model_folder / name / MODEL_YAML)]
    if versions:
        yield model_folder / max(versions, key=int) / MODEL_YAML


def served_models(model_yaml: Path) -> list[ServedModel]:
    """The checkpoint that `model_yaml` names, and the one of its draft model.

    :raises NothingToReadError: when the engine reads no checkpoint.
    :raises CheckpointError: when the file can't be read, or names no checkpoint.
    """
    document, findings = read_yaml(model_yaml, str(model_yaml))
    if document is None:
        raise CheckpointError("; ".join(_text(finding, model_yaml) for finding in findings))
    triton, model = _section(document.values, "triton_config"), document.values.get("model")
    engine = triton.get("engine", _TENSORRT_LLM)
    if engine == _SIMULATED:
        raise NothingToReadError(f"{model_yaml}: the simulated engine reads no weights; there is nothing to warm")
    if not isinstance(model, str) or not model:
        raise CheckpointError(
            f"{model_yaml}: expected model: and a checkpoint's folder or name, found {short_repr(model)}"
        )
    revision = document.values.get("revision")
    found = ServedModel(
        model_yaml=model_yaml,
        name=model,
        revision=revision if isinstance(revision, str) else None,
        is_draft=False,
        only_indexed=engine == _REFERENCE,
    )
    return [found, *_drafts(model_yaml, _section(document.values, "speculative_config"))]


def _drafts(model_yaml: Path, speculative: dict[Any, Any]) -> Iterator[ServedModel]:
    for key in _DRAFT_KEYS:
        name = speculative.get(key)
        if isinstance(name, str) and name:
            yield ServedModel(model_yaml=model_yaml, name=name, revision=None, is_draft=True, only_indexed=False)


def _section(values: Any, key: str) -> dict[Any, Any]:
    section = values.get(key)
    return section if isinstance(section, dict) else {}


def _text(finding: Finding, model_yaml: Path) -> str:
    message = finding.message.removeprefix(f"{model_yaml}: ")
    return f"{model_yaml}{f':{finding.line}' if finding.line else ''}: {message}; {finding.fix}"
