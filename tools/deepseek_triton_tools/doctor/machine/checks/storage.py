"""The repository, the checkpoint, the memory that it is loaded through, and the disks that caches are written to."""

from __future__ import annotations

import hashlib
import json
import os.path
from collections.abc import Iterator, Mapping, Sequence

from deepseek_triton_tools.doctor.machine.expected import Expected
from deepseek_triton_tools.doctor.machine.machine import Machine
from deepseek_triton_tools.doctor.machine.machine_finding import MachineFinding, error, note, ok, skipped, warning
from deepseek_triton_tools.host.units import sized

GIB = 2**30
INDEX = "model.safetensors.index.json"
_CACHE_WANTED = 10 * GIB
"""An assumption: compiled kernels of FlashInfer, Triton and DeepGEMM take a few GiB."""
_MOST_NAMED = 3
_MOST_READ = 2**20
"""Bytes of one file of a repository; a generated one's are all smaller."""
_LONGEST_HEADER = 100_000_000
"""Of a *.safetensors file, as the format's own reader has it."""


def repository_digest(machine: Machine, folder: str) -> str:
    """Of the files in it, by name, size and content; 16 hex digits. What Python leaves in __pycache__ does not count.

    Of a large file, such as a checkpoint's that lies beside model.yaml, the beginning stands for the content.

    :raises OSError: when one can't be read.
    """
    digest = hashlib.sha256()
    for path in _files(machine, folder):
        size = machine.size(f"{folder}/{path}")
        # A pipe or a device has no size, and reading it might never end.
        beginning = machine.read_bytes(f"{folder}/{path}", _MOST_READ) if size else b""
        content = hashlib.sha256(beginning).hexdigest()
        digest.update(f"{content} {size} {path}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def _files(machine: Machine, folder: str, below: str = "") -> Iterator[str]:
    for name in machine.names(f"{folder}/{below}".rstrip("/")):
        path = f"{below}{name}"
        if name in ("__pycache__", ".git"):
            continue
        if machine.is_folder(f"{folder}/{path}"):
            yield from _files(machine, folder, f"{path}/")
        else:
            yield path


def check_repository(machine: Machine, expected: Expected) -> MachineFinding:
    if expected.repository is None:
        return skipped("none was named")
    if machine.is_folder(expected.repository):
        return ok(f"{expected.repository}, {repository_digest(machine, expected.repository)}")
    cause = "every host has the repository at the same path"
    return error(f"{expected.repository} is not there", cause, "copy it there (rsync -a), or share it by the network")


def checkpoint_folder(machine: Machine, expected: Expected) -> str | None:
    """The folder, also of a name in the local Hugging Face cache; None where there is none."""
    if expected.checkpoint is None:
        return None
    if os.path.isabs(expected.checkpoint):
        return expected.checkpoint if machine.is_folder(expected.checkpoint) else None
    name, _, revision = expected.checkpoint.partition("@")
    model = f"{hub_cache(machine.environ)}/models--{name.replace('/', '--')}"
    try:
        commit = machine.read(f"{model}/refs/{revision or 'main'}").strip()
    except OSError:
        commit = revision
    folder = f"{model}/snapshots/{commit}"
    return folder if commit and machine.is_folder(folder) else None


def hub_cache(environ: Mapping[str, str]) -> str:
    """As huggingface_hub has it."""
    for variable, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "/hub")):
        if value := environ.get(variable):
            return f"{value}{below}"
    return f"{_cache_home(environ)}/huggingface/hub"


def _cache_home(environ: Mapping[str, str]) -> str:
    return environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '/root')}/.cache"


def index_digest(machine: Machine, expected: Expected) -> str | None:
    """Of the checkpoint's index; None where there is none."""
    folder = checkpoint_folder(machine, expected)
    if folder is None or not machine.exists(f"{folder}/{INDEX}"):
        return None
    return hashlib.sha256(machine.read_bytes(f"{folder}/{INDEX}")).hexdigest()[:16]


def check_checkpoint(machine: Machine, expected: Expected) -> MachineFinding:
    if expected.checkpoint is None:
        return skipped("none is known" if expected.repository else "no repository was named")
    folder = checkpoint_folder(machine, expected)
    if folder is None:
        return _absent(expected)
    try:
        problems, num_bytes, num_files = _look(machine, folder)
    except OSError as problem:
        return error(f"{problem.filename or folder}: {problem.strerror}", "the engine can't read it", "let it be read")
    said = f"{folder}: {num_files} files, {sized(num_bytes)}"
    if not problems:
        return ok(said)
    more = f" and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
    result = f"{folder}: {'; '.join(problems[:_MOST_NAMED])}{more}"
    return error(result, "the load ends in the middle, or takes wrong weights", "download or copy those files again")


def _absent(expected: Expected) -> MachineFinding:
    assert expected.checkpoint is not None
    size = f" {sized(expected.checkpoint_bytes)}" if expected.checkpoint_bytes else ""
    if os.path.isabs(expected.checkpoint):
        fix = "mount or copy it there, name it here by --model, or build again with another --model"
        return error(f"{expected.checkpoint} is not there", "the model.yaml names it", fix)
    return warning(
        f"{expected.checkpoint} is not in the Hugging Face cache",
        f"the first load downloads{size or ' it'}, on each host",
        f"hf download {expected.checkpoint.partition('@')[0]} beforehand",
    )


def _look(machine: Machine, folder: str) -> tuple[Sequence[str], int, int]:
    """What is wrong, the bytes there are, and the number of files."""
    names = [name for name in machine.names(folder) if name.endswith(".safetensors")]
    names = [name for name in names if not name.startswith("consolidated")]
    if machine.exists(f"{folder}/{INDEX}"):
        try:
            names = sorted(set(json.loads(machine.read(f"{folder}/{INDEX}"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            return [f"{INDEX} is not as it should be"], 0, len(names)
    problems = [] if names else ["no *.safetensors file"]
    if not machine.exists(f"{folder}/config.json"):
        problems.append("config.json is missing")
    num_bytes = 0
    for name in names:
        try:
            size = machine.size(f"{folder}/{name}")
            whole = _whole_size(machine, f"{folder}/{name}")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
            continue
        num_bytes += size
        if whole is None:
            problems.append(f"{name} is no safetensors file")
        elif whole != size:
            problems.append(f"{name} has {size:,} of {whole:,} bytes")
    return problems, num_bytes, len(names)


def _whole_size(machine: Machine, path: str) -> int | None:
    """Bytes by its header: 8 bytes with the length of a JSON object, whose data_offsets count from behind it."""
    length = int.from_bytes(machine.read_bytes(path, 8), "little")
    if not 0 < length < _LONGEST_HEADER:
        return None
    try:
        header = json.loads(machine.read_bytes(path, 8 + length)[8:])
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        return 8 + length + max(ends, default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def check_host_memory(machine: Machine, expected: Expected) -> MachineFinding:
    memory = machine.host_memory()
    cgroup = memory.tightest
    said = f"{sized(memory.headroom)} can be taken" + (f", by {cgroup.path}" if cgroup else "")
    if not expected.is_tensorrt_llm or not expected.checkpoint_bytes:
        return ok(said)
    said += f"; the checkpoint has {sized(expected.checkpoint_bytes)}"
    if memory.headroom >= expected.checkpoint_bytes:
        return ok(said)
    largest = _largest_file(machine, expected)
    ranks = expected.gpus_per_node or 1
    fix = "raise the container's memory limit" if cgroup else "free memory, or use a machine with more"
    fix += "; deepseek-triton warm report says what fits"
    if largest and memory.headroom < largest * ranks:
        cause = f"{ranks} ranks that each hold one file of {sized(largest)} are killed for memory (an estimate)"
        return error(said, cause, fix)
    cause = "not all of it stays in the page cache, so that it is read more than once"
    if cgroup:
        cause += "; TensorRT-LLM looks at /proc/meminfo alone, and a rank may be killed (its pull request 17430)"
    return warning(said, cause, fix)


def _largest_file(machine: Machine, expected: Expected) -> int:
    folder = checkpoint_folder(machine, expected)
    if folder is None:
        return 0
    return max((machine.size(f"{folder}/{n}") for n in machine.names(folder) if n.endswith(".safetensors")), default=0)


def check_disk(machine: Machine, expected: Expected) -> MachineFinding:
    """Where compiled kernels and downloads go."""
    folders = _caches(machine, expected)
    little, closed, said = [], [], []
    for what, wanted in folders.items():
        folder = _nearest(machine, what)
        free = machine.disk(folder).free
        said.append(f"{what} {sized(free)} free")
        if not machine.can_write(folder):
            closed.append(f"{folder} can't be written to")
        elif free < wanted:
            little.append(f"{what}: {sized(free)} free of {sized(wanted)} wanted")
    fix = "free some, or move them: XDG_CACHE_HOME, HF_HOME, TRITON_CACHE_DIR, TMPDIR"
    if closed:
        cause = "what is compiled or downloaded can't be kept, and every start does it again"
        result = "; ".join(dict.fromkeys(closed))
        return (warning if expected.is_tensorrt_llm else note)(result, cause, fix)
    if little:
        cause = "compiled kernels, and the checkpoint where it is not there yet"
        return (warning if expected.is_tensorrt_llm else note)("; ".join(little), cause, fix)
    return ok(", ".join(said))


def _caches(machine: Machine, expected: Expected) -> Mapping[str, int]:
    """Folder -> bytes wanted."""
    environ = machine.environ
    folders = {
        _cache_home(environ): _CACHE_WANTED,
        environ.get("TRITON_CACHE_DIR") or f"{environ.get('HOME', '/root')}/.triton": _CACHE_WANTED,
        environ.get("TMPDIR") or "/tmp": GIB,
    }
    name = expected.checkpoint
    if name and not os.path.isabs(name) and checkpoint_folder(machine, expected) is None:
        folders[hub_cache(environ)] = expected.checkpoint_bytes or _CACHE_WANTED
    return folders


def _nearest(machine: Machine, folder: str) -> str:
    """The folder, or the first above it that is there."""
    while not machine.exists(folder) and folder not in ("/", ""):
        folder = os.path.dirname(folder)
    return folder or "/"
