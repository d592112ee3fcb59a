"""The checkpoints that a source means, the models of a repository among them, and the files that the engine reads:
which they are, where they lie, and whether they are whole.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepseek_triton_build.check import INCOMPLETE, INDEX, MISSING_SHARD, Finding, check_weights, files_read, read_yaml
from deepseek_triton_build.text import safe_name, short_repr
from deepseek_triton_tools.repository.hub_cache import HubName, find_snapshot, parse_hub_name, unfinished_downloads
from deepseek_triton_tools.tool_errors import CheckpointError

MODEL_YAML = "model.yaml"
# Keys of speculative_config that name a draft model: the second one in TensorRT-LLM 1.1, the first in 0.21 and 1.2.
_DRAFT_KEYS = ("speculative_model", "speculative_model_dir")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One checkpoint that one model.yaml names."""

    model_yaml: Path
    name: str
    """A folder or the name of a model on the Hugging Face hub, as model.yaml has it."""
    revision: str | None = None
    is_draft: bool = False
    only_indexed: bool = False
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
    """Return the model.yaml files at `path`, which is a model.yaml itself, or the folder of a version, a model or a
    repository.

    Each model has one: that of its highest version, which Triton loads unless config.pbtxt says otherwise.

    :raises OSError: when a folder can't be listed.
    """
    if not path.is_dir():
        return [path] if path.suffix in (".yaml", ".yml") else []
    if os.path.lexists(path / MODEL_YAML):
        return [path / MODEL_YAML]
    folders = [path, *(path / name for name in sorted(os.listdir(path)) if os.path.isdir(path / name))]
    return [newest for folder in folders if (newest := _newest(folder))]


def list_folder(folder: Path) -> list[str]:
    """:raises CheckpointError: when the folder can't be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder}: can't be listed: {error.strerror}; allow this user to read it") from error


def _newest(model_folder: Path) -> Path | None:
    """Return the model.yaml of the model's highest version; None where it is no model's folder."""
    names = list_folder(model_folder)
    versions = [name for name in names if name.isdecimal() and os.path.lexists(model_folder / name / MODEL_YAML)]
    return model_folder / max(versions, key=int) / MODEL_YAML if versions else None


def served_models(model_yaml: Path) -> list[ServedModel]:
    """Return the checkpoint that `model_yaml` names, and the one of its draft model.

    :raises NothingToReadError: when the engine reads no checkpoint.
    :raises CheckpointError: when the file can't be read, or names no checkpoint.
    """
    document, findings = read_yaml(model_yaml, str(model_yaml))
    if document is None:
        texts = []
        for finding in findings:
            texts.append(f"{model_yaml}{f':{finding.line}' if finding.line else ''}: {finding.message}; {finding.fix}")
        raise CheckpointError("; ".join(texts))
    triton, model = _section(document.values, "triton_config"), document.values.get("model")
    engine = triton.get("engine", "tensorrt_llm")
    if engine == "simulated":
        raise NothingToReadError(f"{model_yaml}: the simulated engine reads no weights")
    if not isinstance(model, str) or not model:
        raise CheckpointError(
            f"{model_yaml}: expected model: and a checkpoint's folder or name, found {short_repr(model)}"
        )
    revision = document.values.get("revision")
    main = ServedModel(
        model_yaml=model_yaml,
        name=model,
        revision=revision if isinstance(revision, str) else None,
        only_indexed=engine == "reference",
    )
    speculative = _section(document.values, "speculative_config")
    drafts = [name for key in _DRAFT_KEYS if isinstance(name := speculative.get(key), str) and name]
    return [main, *(ServedModel(model_yaml=model_yaml, name=name, is_draft=True) for name in drafts)]


def _section(values: Any, key: str) -> dict[Any, Any]:
    section = values.get(key)
    return section if isinstance(section, dict) else {}


@dataclass(frozen=True, kw_only=True)
class WeightFile:
    """One *.safetensors file that the engine opens."""

    path: Path
    """The path in the checkpoint's folder; it may be a link."""
    size: int
    """Bytes that the file has now."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles:
    """A folder of weights and the files in it that the engine reads."""

    source: str
    """The user's words for the checkpoint."""
    folder: Path
    found_by: str
    """The way that led from the source to the folder, for people: "a folder", "in the Hugging Face cache, revision
    abc", "the model of r1/tensorrt_llm/1/model.yaml"."""
    files: tuple[WeightFile, ...]
    """The files, sorted by name. transformers reads those that the index names, TensorRT-LLM all but "consolidated"
    ones. A file that is missing or can't be accessed is left out here, and reported by `find_damage`."""
    only_indexed: bool = False
    """The engine reads the files that the index names, and not all that are in the folder."""
    download: str | None = None
    """The command that downloads the checkpoint, where it has a name on the Hugging Face hub."""
    findings: tuple[Finding, ...] = ()
    """Faults of the checkpoint; empty until a damage check has run."""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def find_checkpoints(source: str) -> tuple[CheckpointFiles, ...]:
    """Return the checkpoints that `source` means, each once.

    A source is a folder, a Hugging Face name in the local cache ("org/name", "org/name@revision"), or a model
    repository, a model's folder or a model.yaml, for which all checkpoints that it serves are returned. If a folder has
    the name, the folder is meant, as in the engines.

    :raises CheckpointError: when there is none; it names every place that was searched.
    """
    path, name = Path(source), parse_hub_name(source)
    if _exists(path):
        return _at_path(source, path)
    if name is None:
        raise CheckpointError(
            f"{safe_name(source)}: expected a checkpoint's folder, a Hugging Face name (org/name) or a model "
            "repository, found no such file or folder; correct the path"
        )
    return (_checkpoint(source, _in_cache(name)),)


@dataclass(frozen=True)
class _Location:
    folder: Path
    found_by: str
    download: str | None = None
    """The command that downloads the checkpoint."""


def _at_path(source: str, path: Path) -> tuple[CheckpointFiles, ...]:
    try:
        yamls = model_yamls(path)
        is_folder = path.is_dir()
    except OSError as error:
        raise _unreadable(path, error) from error
    if yamls:
        return _served(source, yamls)
    if not is_folder:
        raise CheckpointError(f"{path}: expected a checkpoint's folder, found a file; name its folder: {path.parent}")
    # The folder of a model in a Hugging Face cache.
    if os.path.isdir(path / "snapshots") and not any(path.glob("*.safetensors")):
        name = HubName(path.resolve().name.removeprefix("models--").replace("--", "/", 1))
        return (_checkpoint(source, _in_cache(name, path)),)
    return (_checkpoint(source, _Location(path, "a folder")),)


def _served(source: str, yamls: Sequence[Path]) -> tuple[CheckpointFiles, ...]:
    """Return the checkpoints of several models. A model without weights is passed over where another one has some."""
    locations: dict[Path, tuple[_Location, bool]] = {}
    problems: list[CheckpointError] = []
    for model_yaml in yamls:
        try:
            for served in served_models(model_yaml):
                location = _location(served)
                _, only_indexed = locations.get(location.folder.resolve(), (None, True))
                locations[location.folder.resolve()] = (location, only_indexed and served.only_indexed)
        except CheckpointError as error:
            problems.append(error)
    serious = [error for error in problems if not isinstance(error, NothingToReadError)]
    if serious or not locations:
        raise CheckpointError("; ".join(str(error) for error in serious or problems))
    return tuple(_checkpoint(source, location, only_indexed=only) for location, only in locations.values())


def _location(served: ServedModel) -> _Location:
    if _exists(served.path):
        return _Location(served.path, str(served))
    name = parse_hub_name(served.name)
    if name is None:
        raise CheckpointError(
            f"{served.model_yaml}: its {'draft ' if served.is_draft else ''}model {safe_name(served.name)} is not on "
            f"this machine: {served.path} is not there; name the checkpoint's folder itself, where it is here"
        )
    try:
        location = _in_cache(HubName(name.model, served.revision or name.revision))
    except CheckpointError as error:
        raise CheckpointError(f"{served.model_yaml}: {served.path} is no folder, and {error}") from error
    return replace(location, found_by=f"{served}, {location.found_by}")


def _in_cache(name: HubName, model_folder: Path | None = None) -> _Location:
    folder, commit = find_snapshot(name, model_folder)
    return _Location(folder, f"in the Hugging Face cache, revision {commit}", name.download)


def _checkpoint(source: str, location: _Location, *, only_indexed: bool = False) -> CheckpointFiles:
    """:raises CheckpointError: when the folder has neither weights nor an index of them."""
    folder = location.folder
    try:
        names = files_read(folder, only_indexed=only_indexed)
    except OSError as error:
        raise _unreadable(folder, error) from error
    if not names and not os.path.lexists(folder / INDEX):
        download = location.download
        fix = f"download it: {download}" if download else "name a checkpoint's folder or a model repository"
        raise CheckpointError(
            f"{folder}: expected a checkpoint, found no *.safetensors file that the engine reads, no {INDEX} and no "
            f"<version>/{MODEL_YAML}{_unfinished(folder)}; {fix}"
        )
    files = []
    for path in (folder / name for name in names):
        # ValueError: the index holds a name that no file can have. `find_damage` reports what is left out here.
        with contextlib.suppress(OSError, ValueError):
            status = os.stat(path)
            if stat.S_ISREG(status.st_mode):
                files.append(WeightFile(path=path, size=status.st_size))
    return CheckpointFiles(
        source=source,
        folder=folder,
        found_by=location.found_by,
        files=tuple(files),
        only_indexed=only_indexed,
        download=location.download,
    )


def find_damage(checkpoint: CheckpointFiles, on_file: Callable[[Path], None] = lambda _: None) -> Iterator[Finding]:
    """Find faults of the checkpoint, by its index and the headers of its files. `Finding.file` is a whole path.

    It takes a third of a second for DeepSeek's 92,000 tensors, and the time to read 163 headers.

    :param on_file: called with each file before it is opened.
    """
    folder = checkpoint.folder
    for finding in check_weights(folder, str(folder), only_indexed=checkpoint.only_indexed, on_file=on_file):
        # What is known about the download explains it.
        if finding.code == MISSING_SHARD.code:
            fix = f"finish the download: {checkpoint.download}" if checkpoint.download else finding.fix
            finding = replace(finding, message=finding.message + _unfinished(folder), fix=fix)
        yield finding


def first_faults(folders: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield why no engine could load the checkpoints in `folders`, and whether a file is damaged; one that is not on
    this machine is passed over, and so are files that this user can't read: a container may."""
    for folder in filter(os.path.isdir, folders):
        found = [one for one in check_weights(Path(folder), folder) if one.code in INCOMPLETE]
        for one in sorted(found, key=lambda one: not INCOMPLETE[one.code])[:1]:
            yield f"{safe_name(one.file)}: {one.message}; {one.fix}", INCOMPLETE[one.code]


def _unfinished(folder: Path) -> str:
    paths = unfinished_downloads(folder)
    if not paths:
        return ""
    return f"; its download is not finished: {len(paths)} *.incomplete in {paths[0].parent}"


def _exists(path: Path) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        raise _unreadable(path, error) from error
    return True


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{error.filename or path}: can't be accessed: {error.strerror}; allow this user to read and search it"
    )
