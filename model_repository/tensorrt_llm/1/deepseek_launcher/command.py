"""The command that is to be run, which other programs define: its options, and the model repository that it serves.

Triton's Python backend starts its stub by a line of shell in which the repository's path stands without quotes
(triton-inference-server/python_backend src/stub_launcher.cc@00bec0aa), and trtllm-llmapi-launch does the same with the
words of its command (NVIDIA/TensorRT-LLM tensorrt_llm/llmapi/trtllm-llmapi-launch@020c89e6). A link stands in for a
path that a shell would split or expand.
"""

import hashlib
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from deepseek_launcher.launch_tag import shared_memory


def option(command: Sequence[str], name: str) -> str | None:
    """Return the last value given as `NAME VALUE` or `NAME=VALUE`; None when the option is not there."""
    value = None
    for word, following in zip(command, [*command[1:], ""], strict=True):
        word_name, equals, rest = word.partition("=")
        if word_name == name:
            value = rest if equals else following
    return value


def seconds(command: Sequence[str], name: str, default: float) -> float:
    """Return the option's value; `default` when it is not there or is no number."""
    try:
        return float(option(command, name) or default)
    except ValueError:
        return default


INDEX = "model.safetensors.index.json"
# Only the size of a larger file is hashed, such as weights that lie in the repository.
_WHOLE_FILE_BYTES = 4 << 20
_MODEL = re.compile(r"""^model:\s*(?:"([^"]+)"|'([^']+)'|([^\s#]+))""", re.MULTILINE)


def served_repository(command: Sequence[str]) -> Path | None:
    """Return the model repository that `command` gives to tritonserver."""
    folder = option(command, "--model-repository") or option(command, "--model-store")
    return Path(folder) if folder else None


def repository_hash(repository: Path) -> str:
    """Return a hash over the names and contents of the models' files, 16 hex digits.

    Files beside the models are left out: a log that grows there would give each rank another hash.

    :raises OSError: when a file can't be read.
    """
    digest = hashlib.sha256()
    paths = []
    for configuration in repository.glob("*/config.pbtxt"):
        for path in configuration.parent.rglob("*"):
            inside = path.relative_to(repository).parts
            if path.is_file() and not any(part == "__pycache__" or part.startswith(".") for part in inside):
                paths.append(path)
    for path in sorted(paths):
        digest.update(os.fsencode(path.relative_to(repository)) + f"\0{path.stat().st_size}\0".encode())
        if path.stat().st_size <= _WHOLE_FILE_BYTES:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def checkpoint_hash(repository: Path) -> str | None:
    """Return a hash over the indexes of the checkpoints that the model.yaml files name; None without an index.

    :raises OSError: when a file can't be read.
    """
    digest = hashlib.sha256()
    has_index = False
    for path in sorted(repository.glob("*/*/model.yaml")):
        match = _MODEL.search(path.read_text(encoding="utf-8", errors="replace"))
        index = (path.parent / next(filter(None, match.groups())) / INDEX) if match else None
        if index is not None and index.is_file():
            digest.update(index.read_bytes())
            has_index = True
    return digest.hexdigest()[:16] if has_index else None


def with_plain_path(command: Sequence[str], launch: str, *, make: bool) -> list[str]:
    """Return `command` with a link in place of a repository's path that needs quotes.

    The link lies among the launch's shared memory and is removed with it.

    :param make: make the link, too. One rank of a node has to.
    :raises OSError: when the link can't be made.
    """
    repository = served_repository(command)
    if repository is None or shlex.quote(str(repository)) == str(repository):
        return list(command)
    link = shared_memory(launch, "repository")
    if make:
        link.unlink(missing_ok=True)
        link.symlink_to(repository.absolute())
    path, words = str(repository), list(command)
    for place, word in enumerate(words):
        if word == path or (word.startswith("--model-") and word.endswith(f"={path}")):
            words[place] = str(link).join(word.rsplit(path, 1))
    return words
