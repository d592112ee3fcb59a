"""Pieces of YAML: the filled templates of `launch kubernetes`, and a model repository as a ConfigMap.

The repository's files are under keys without slashes, and are mounted at their paths.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepseek_triton_build.text import parse_yaml, safe_name
from deepseek_triton_tools import text_templates
from deepseek_triton_tools.host.units import sized
from deepseek_triton_tools.host.whole_file import sweep, whole_file
from deepseek_triton_tools.tool_errors import RepositoryError, ToolError


def filled(name: str, values: Mapping[str, Any]) -> str:
    """:param name: a file in templates/kubernetes."""
    return text_templates.filled(__package__, f"kubernetes/{name}", values)


def document(name: str, values: Mapping[str, Any]) -> str:
    """Return a whole document, with its long comments wrapped. Only here: an indented piece would be wrapped twice."""
    return text_templates.wrapped(filled(name, values))


_CONFIG_MAP = re.compile(r"-repository-[0-9a-f]{8}\.yaml$")  # a repository's, by its content


def write_documents(text: str, folder: Path) -> list[str]:
    """Write each document to a file, which is named by its kind and name; return the names.

    :raises ToolError: when the folder has other files, or can't be written to.
    """
    names = {}
    for content in text.replace("THIS_FILE", "THIS_FOLDER", 1).removesuffix("\n").split("\n---\n"):
        fields = parse_yaml(content)
        names[f"{fields['kind'].lower()}-{fields['metadata']['name']}.yaml"] = content
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        others = sorted({path.name for path in folder.iterdir()} - names.keys())
        ours = {_CONFIG_MAP.sub("", name) for name in names} - names.keys()
        for other in (name for name in others if _CONFIG_MAP.sub("", name) not in ours):
            raise ToolError(f"--output {folder}: expected no other file, got {other}: all is applied; name another")
        for name, content in names.items():
            with whole_file(folder / name) as file:
                file.write(f"{content}\n")
        for earlier in others:  # the repository before an edit, which stays in the cluster for a rollback
            (folder / earlier).unlink()
    except OSError as error:
        raise ToolError(f"--output {folder}: can't be written to: {error.strerror}") from error
    return [*names]


def mapping(values: Mapping[str, object]) -> str:
    """Write a mapping on one line. Scalars are written as JSON, which is also YAML."""
    entries = []
    for key, value in values.items():
        is_plain = key[0].isalpha() and all(character.isalnum() or character in "._/-" for character in key)
        text = mapping(value) if isinstance(value, Mapping) else json.dumps(value)
        entries.append(f"{key if is_plain else json.dumps(key)}: {text}")
    return "{" + ", ".join(entries) + "}"


def literal(value: str) -> str:
    """Escape the value of an environment variable or an argument, in which Kubernetes would replace $(NAME)."""
    return value.replace("$", "$$")


MAX_BYTES = 2**20
"""Limit of all values together (kubernetes.io, ConfigMaps: "The data stored in a ConfigMap cannot exceed 1 MiB")."""
# Characters; [-._a-zA-Z0-9] are allowed (k8s.io/apimachinery, validation.IsConfigMapKey).
_MAX_KEY = 253


@dataclass(frozen=True, kw_only=True)
class RepositoryFile:
    path: str
    """Relative path, with slashes."""
    key: str
    content: bytes
    is_executable: bool

    @property
    def item(self) -> dict[str, str | int]:
        """Entry of a volume's `items`. Only executables need a mode; the default is 0644."""
        item: dict[str, str | int] = {"key": self.key, "path": self.path}
        return item | {"mode": 0o755} if self.is_executable else item

    @property
    def lines(self) -> list[str]:
        """Lines of its entry in `data` or `binaryData`, not indented."""
        if (text := self.text) is None:
            return [f"{self.key}: {base64.b64encode(self.content).decode()}"]
        return [f"{self.key}: |", *_indented(text.split("\n")[:-1])] if text else [f'{self.key}: ""']

    @property
    def text(self) -> str | None:
        """Content as text, if a literal block of YAML keeps it: printable lines, each with its end. None otherwise."""
        try:
            text = self.content.decode("utf-8")
        except UnicodeDecodeError:
            return None
        lines = text.split("\n")
        if not text:
            return text
        is_plain = lines[-1] == "" and lines[-2].strip() != "" and not text[0].isspace()
        return text if is_plain and all(line.replace("\t", "").isprintable() for line in lines) else None


def _indented(lines: Iterable[str]) -> list[str]:
    """Indent by two. Unlike textwrap.indent this also indents a line of spaces, which are content here."""
    return [f"  {line}" if line else "" for line in lines]


def repository_files(folder: Path) -> list[RepositoryFile]:
    """Return the files in the order of their paths. Hidden files and __pycache__ are left out.

    :raises RepositoryError: when a ConfigMap can't hold them all, or a file or folder can't be read.
    """
    files: dict[str, RepositoryFile] = {}
    size = 0
    try:
        for path in _walk(folder):
            status = path.stat()
            size += status.st_size
            if size > MAX_BYTES:
                checkpoint = any(folder.rglob("*.safetensors"))
                without = ", or build it without the checkpoint that it holds: --model with the checkpoint's own path"
                raise RepositoryError(
                    f"{folder} is larger than {sized(MAX_BYTES)}, the limit of a ConfigMap: put it on a volume and "
                    f"name its claim with --repository-claim{without if checkpoint else ''}"
                )
            name = path.relative_to(folder).as_posix()
            key = re.sub(r"[^-._a-zA-Z0-9]", "_", name.replace("/", "."))
            if key in files or len(key) > _MAX_KEY:
                key = f"{key[: _MAX_KEY - 9]}.{hashlib.sha256(name.encode()).hexdigest()[:8]}"
            files[key] = RepositoryFile(
                path=name, key=key, content=path.read_bytes(), is_executable=bool(status.st_mode & 0o100)
            )
    except OSError as error:
        raise RepositoryError(f"{safe_name(str(error.filename))}: can't be read: {error.strerror}") from error
    return list(files.values())


def _walk(folder: Path) -> list[Path]:
    """:raises OSError: when a folder can't be read; its files would be missing in the pods."""

    def refuse(error: OSError) -> None:
        raise error

    paths: list[Path] = []
    for place, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        paths += [Path(place, name) for name in names if not name.startswith(".")]
        if len(paths) > MAX_BYTES:  # links lead in a circle
            break
    return sorted(paths)


def content_hash(files: Sequence[RepositoryFile]) -> str:
    """Return 8 hex digits for names, modes and contents."""
    digest = hashlib.sha256()
    for file in files:
        head = json.dumps([file.path, file.is_executable, len(file.content)])
        digest.update(head.encode() + file.content)
    return digest.hexdigest()[:8]


def data_lines(files: Sequence[RepositoryFile]) -> list[str]:
    """Return the lines of a ConfigMap's `data` and `binaryData`."""
    lines = []
    for section, is_text in (("data", True), ("binaryData", False)):
        entries = [line for file in files if (file.text is not None) == is_text for line in file.lines]
        lines += [f"{section}:", *_indented(entries)] if entries else []
    return lines
