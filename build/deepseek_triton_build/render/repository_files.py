"""The files of a Triton model repository for a plan: paths and bytes. Nothing is written here; see folder_writer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from deepseek_triton_build.data import model_source
from deepseek_triton_build.planning.plan import Plan
from deepseek_triton_build.planning.plan_request import ENGINES, PYTHON_BACKEND
from deepseek_triton_build.render.carried_checkpoint import carried_files
from deepseek_triton_build.render.config_pbtxt import config_pbtxt
from deepseek_triton_build.render.model_yaml import model_yaml
from deepseek_triton_build.render.stamp import MANIFEST, RELEASE_RECORD, manifest, stamp_line
from deepseek_triton_build.render.start_sh import start_sh
from deepseek_triton_build.render.yaml_text import settings_file_text

MODEL = "tensorrt_llm"
"""The model's name: what upstream calls it and what clients put into their URLs."""


@dataclass(frozen=True)
class File:
    """One file that is to be written."""

    path: PurePosixPath
    """Relative to the folder that is written."""
    content: bytes
    executable: bool = False


def repository_files(plan: Plan, version: str) -> list[File]:
    """Return every file of the repository, sorted by path; the same plan and version give the same bytes."""
    stamp = stamp_line(plan, version)
    files = [
        File(PurePosixPath("start.sh"), start_sh(plan, stamp=stamp).encode(), executable=True),
        File(PurePosixPath(MODEL, "config.pbtxt"), _config_pbtxt(plan, stamp).encode()),
        File(PurePosixPath(MODEL, "1", "model.yaml"), model_yaml(plan, stamp=stamp).encode()),
        *(
            File(PurePosixPath(MODEL, "1", file.name), settings_file_text(file, stamp=stamp).encode())
            for file in plan.files
        ),
        *_backend_files(plan),
        *(File(PurePosixPath(MODEL, "1", name), content) for name, content in carried_files(plan).items()),
        *_named_backend(plan.request.backend_name),
    ]
    record = plan.release or plan.vllm
    if record is not None:
        files.append(File(PurePosixPath(MODEL, "1", RELEASE_RECORD), record.text.encode()))
    return stamped(plan, files, version=version, format="triton", folder=MODEL)


def stamped(plan: Plan, files: Iterable[File], *, version: str, format: str, folder: str = "") -> list[File]:
    """Return `files` sorted by path, and after them their manifest, which lies in `folder`."""
    ordered = sorted(files, key=lambda file: file.path)
    contents = {file.path.as_posix(): file.content for file in ordered}
    return [*ordered, File(PurePosixPath(folder, MANIFEST), manifest(plan, version, contents, format=format))]


def _config_pbtxt(plan: Plan, stamp: str) -> str:
    """Return config.pbtxt. It is decoupled as model.yaml is, which --set may have changed: the two files must agree."""
    is_decoupled = next(bool(setting.value) for setting in plan.settings if setting.key == "triton_config.decoupled")
    return config_pbtxt(stamp=stamp, decoupled=is_decoupled, backend_name=plan.request.backend_name)


def _named_backend(name: str) -> list[File]:
    """Return the backend that config.pbtxt names, unless it is Triton's own.

    It lies in the model's folder: Triton takes every folder of the repository for a model.
    """
    if name == PYTHON_BACKEND:
        return []
    source = model_source.version_dir() / "named_backend.py"
    return [File(PurePosixPath(MODEL, "backends", name, "model.py"), source.read_bytes())]


_MODULES = ("model.py", "supervise.py")
_PACKAGES = ("deepseek_backend/", "deepseek_launcher/")
_ENGINES = "deepseek_backend/engines/"


def _backend_files(plan: Plan) -> list[File]:
    """Return model.py, the supervisor and their packages, with the plan's engine as the only one.

    The overlay of work-arounds goes along only with a TensorRT-LLM release, for whose worker processes start.sh uses
    it.
    """
    unused = tuple(f"{_ENGINES}{engine}/" for engine in ENGINES if engine != plan.engine)
    if plan.release is None:
        unused += ("deepseek_backend/process/overlay/", "deepseek_backend/workarounds.py")
    version_dir = model_source.version_dir()
    paths = sorted(path for path in version_dir.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    relative = [(path, path.relative_to(version_dir).as_posix()) for path in paths]
    return [
        File(PurePosixPath(MODEL, "1", name), path.read_bytes())
        for path, name in relative
        if name in _MODULES or (name.startswith(_PACKAGES) and not name.startswith(unused))
    ]
