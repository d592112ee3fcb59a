"""`check DIR`: find what can be checked in a folder, and report on all of it."""

from __future__ import annotations

import os
from pathlib import Path

from deepseek_triton_build.build_errors import NothingToCheckError
from deepseek_triton_build.check.finding import Report, in_order
from deepseek_triton_build.check.model_identity import CheckOptions, require_model_root
from deepseek_triton_build.check.model_report import MODEL_YAML, check_file, check_model
from deepseek_triton_build.render.trtllm_commands import YAML_NAME


def check_repository(directory: Path, options: CheckOptions | None = None) -> Report:
    """Check what `directory` is: a model repository, a model's folder, or the LLM arguments of TensorRT-LLM's programs.

    Those arguments are a YAML file, named by itself or by its folder.

    :raises NothingToCheckError: when it is none of these.
    :raises BuildError: when the options name an unknown release or GPU, or a model_root that is no folder.
    """
    options = options or CheckOptions()
    require_model_root(options)
    exported = directory / YAML_NAME
    if os.path.isfile(directory) or os.path.isfile(exported):
        checked = [check_file(directory if os.path.isfile(directory) else exported, options)]
    else:
        models = _models(directory)
        checked = [check_model(folder, version, directory, options) for folder, version in models]
    findings = in_order(finding for _, found in checked for finding in found)
    return Report(findings=findings, models=tuple(model for model, _ in checked))


def _models(directory: Path) -> list[tuple[Path, str]]:
    """Return each model's folder, with the name of a version folder that has a model.yaml.

    :raises NothingToCheckError: when there is no such folder.
    """
    if not os.path.isdir(directory):
        raise NothingToCheckError(f"{directory}: expected a model repository, found nothing; name a folder that exists")
    try:
        folders = [directory, *(directory / name for name in sorted(os.listdir(directory)))]
    except OSError as error:
        raise NothingToCheckError(f"{directory}: can't be read: {error.strerror}; make it readable") from error
    found = [(folder, version) for folder in folders for version in _versions(folder)]
    if not found:
        raise NothingToCheckError(
            f"{directory}: expected a model (a folder with <version>/{MODEL_YAML}), found none; name a model "
            "repository, a model's folder or a YAML file of LLM arguments"
        )
    return found


def _versions(folder: Path) -> list[str]:
    try:
        names = os.listdir(folder)
    except OSError:  # a file, or a folder that we may not read
        return []
    return sorted(name for name in names if name.isdecimal() and os.path.lexists(folder / name / MODEL_YAML))
