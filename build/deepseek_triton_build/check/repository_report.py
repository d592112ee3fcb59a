"""`check DIR`: find what can be checked in a folder, and report on all of it."""

from __future__ import annotations

import os
from pathlib import Path

from deepseek_triton_build.build_errors import NothingToCheckError
from deepseek_triton_build.check.codes import UNREADABLE
from deepseek_triton_build.check.finding import Finding, Report, in_order
from deepseek_triton_build.check.model_identity import CheckOptions, require_model_root
from deepseek_triton_build.check.model_report import MODEL_PY, OUR_PACKAGE, check_model
from deepseek_triton_build.check.pair_report import (
    SIDES,
    check_pair,
    is_orchestrators,
    is_pair,
    missing_side,
    orchestrator_findings,
)
from deepseek_triton_build.check.program_report import check_programs, is_program_folder
from deepseek_triton_build.check.rule_findings import CheckedFolder
from deepseek_triton_build.check.schema import MODEL_YAML
from deepseek_triton_build.check.scripts import PROGRAM_SCRIPTS, START_SCRIPT
from deepseek_triton_build.check.vllm_backend_report import check_vllm_backend_model, is_of_vllm_backend
from deepseek_triton_build.render.stamp import MANIFEST


def check_repository(directory: Path, options: CheckOptions | None = None) -> Report:
    """Check what `directory` is: a model repository, a model's folder, what starts TensorRT-LLM's programs, or a pair.

    A program's is a YAML file of LLM arguments, or a folder with such a file, a script or both. A pair is the folder of
    context and generation servers, or the disagg_config.yaml that joins them.

    :raises NothingToCheckError: when it is none of these.
    :raises BuildError: when the options name an unknown release, variant or GPU, or a model_root that is no folder.
    """
    options = options or CheckOptions()
    require_model_root(options)
    _require_path(directory)
    if is_pair(directory):
        return check_pair(directory, _sides(directory, options), options)
    if (missing := missing_side(directory)) is not None:
        raise NothingToCheckError(
            f"{directory}: expected a pair's two sides, {' and '.join(SIDES)}, found no folder {missing}; build the "
            "pair again, or name the folder of the other side"
        )
    if is_orchestrators(directory):
        sides = _sides(directory.parent, options) if is_pair(directory.parent) else {}
        return Report(findings=in_order(orchestrator_findings(directory, sides, options)), models=())
    checked = _checked(directory, options)
    return Report(findings=in_order(checked.findings), models=tuple(one.model for one in checked.models))


def _sides(directory: Path, options: CheckOptions) -> dict[str, CheckedFolder]:
    """Return side -> everything that was checked in its folder of a pair."""
    return {side: _checked(directory / side, options) for side in SIDES}


def _checked(directory: Path, options: CheckOptions) -> CheckedFolder:
    """Check the models or programs of a folder, or a program's YAML file."""
    is_program = os.path.isfile(directory) or is_program_folder(directory)
    checked = check_programs(directory, options) if is_program else []
    models, unreadable = ([], []) if os.path.isfile(directory) else _models(directory, may_be_none=is_program)
    for folder, version in models:
        is_yaml = not is_of_vllm_backend(folder, folder / version)
        checked.append((check_model if is_yaml else check_vllm_backend_model)(folder, version, directory, options))
    return CheckedFolder(checked, unreadable)


def _require_path(directory: Path) -> None:
    """:raises NothingToCheckError: when there is no such file or folder, or it can't be looked at."""
    try:
        os.stat(directory)
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise NothingToCheckError(
            f"{directory}: expected a model repository, found nothing; name a folder that exists"
        ) from error
    except OSError as error:
        raise NothingToCheckError(f"{directory}: can't be read: {error.strerror}; make it readable") from error
    if directory.suffix == ".sh" and os.path.isfile(directory):
        raise NothingToCheckError(
            f"{directory}: expected a folder or a YAML file, found a script; name its folder, and call the script "
            f"{START_SCRIPT} or {', '.join(PROGRAM_SCRIPTS)}"
        )


def _models(directory: Path, *, may_be_none: bool) -> tuple[list[tuple[Path, str]], list[Finding]]:
    """Return each model's folder with the name of its version folder, and findings about folders that can't be read.

    :raises NothingToCheckError: when there is no such folder, unless there may be none.
    """
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise NothingToCheckError(f"{directory}: can't be read: {error.strerror}; make it readable") from error
    found: list[tuple[Path, str]] = []
    unreadable: list[Finding] = []
    for folder in (directory, *(directory / name for name in names)):
        try:
            found += [(folder, version) for version in _versions(folder)]
        except NotADirectoryError:
            continue
        except OSError as error:
            message, fix = f"{folder.name} can't be looked into: {error.strerror}", "make it readable and searchable"
            unreadable.append(UNREADABLE.finding(message, fix, file=folder.name))
    if may_be_none:
        return found, unreadable
    if not found and unreadable:
        raise NothingToCheckError(f"{directory}: {unreadable[0].message}; {unreadable[0].fix}")
    if not found:
        raise NothingToCheckError(
            f"{directory}: expected a model (a folder with <version>/{MODEL_YAML}), found none; name a model "
            "repository, a model's folder or a YAML file of LLM arguments"
        )
    return found, unreadable


def _versions(folder: Path) -> list[str]:
    """Return the version folders of a model that is ours, upstream's or of Triton's vLLM backend.

    :raises OSError: when the folder can't be listed.
    """
    return sorted(name for name in os.listdir(folder) if name.isdecimal() and _is_version(folder, name))


def _is_version(folder: Path, name: str) -> bool:
    """Whether the version folder has a model.yaml, or has lost one: it is ours, or may not be looked into."""
    version_dir = folder / name
    if os.path.lexists(version_dir / MODEL_YAML) or is_of_vllm_backend(folder, version_dir):
        return True
    if os.path.isdir(version_dir) and not os.access(version_dir, os.X_OK):
        return True
    is_ours = os.path.exists(folder / MANIFEST) or os.path.isdir(version_dir / OUR_PACKAGE)
    return is_ours and os.path.exists(version_dir / MODEL_PY)
