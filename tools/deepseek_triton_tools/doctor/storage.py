"""The repository, the checkpoint, the memory that it is loaded through, and the disks of the caches."""

import hashlib
import json
import os.path
from collections.abc import Iterator, Mapping, Sequence

from deepseek_triton_tools.doctor.findings import Expected, MachineFinding, error, ok, skipped, warning, warning_or_note
from deepseek_triton_tools.doctor.machine import Machine
from deepseek_triton_tools.host.units import sized

GIB = 2**30
INDEX = "model.safetensors.index.json"
# Free bytes. An assumption: compiled kernels of FlashInfer, Triton and DeepGEMM take a few GiB.
_CACHE_WANTED = 10 * GIB
_MOST_NAMED = 3
# Bytes that are read of one file in a repository. All files of a generated repository are smaller.
_MOST_READ = 2**20
# Bytes of a *.safetensors file's header: the limit of the format's own reader.
_LONGEST_HEADER = 100_000_000


def repository_digest(machine: Machine, folder: str) -> str:
    """Return 16 hex digits for the names, sizes and contents of its files, without __pycache__ and .git.

    Only the beginning of a large file is read, such as a checkpoint's file that lies beside model.yaml.

    :raises OSError: when a file can't be read.
    """
    digest = hashlib.sha256()
    for path in _files(machine, folder):
        size = machine.size(f"{folder}/{path}")
        # A pipe or a device has the size 0, and reading it might never end.
        beginning = machine.read_bytes(f"{folder}/{path}", _MOST_READ) if size else b""
        content = hashlib.sha256(beginning).hexdigest()
        digest.update(f"{content} {size} {path}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def _files(machine: Machine, folder: str, below: str = "") -> Iterator[str]:
    for name in machine.list_folder(f"{folder}/{below}".rstrip("/")):
        path = f"{below}{name}"
        if name in ("__pycache__", ".git"):
            continue
        if machine.is_folder(f"{folder}/{path}"):
            yield from _files(machine, folder, f"{path}/")
        else:
            yield path


def check_repository(machine: Machine, expected: Expected) -> MachineFinding:
    if expected.repository is None:
        return skipped("no repository was named")
    if machine.is_folder(expected.repository):
        return ok(f"{expected.repository}, {repository_digest(machine, expected.repository)}")
    fix = "copy it there (rsync -a), or put it on a shared file system"
    return error(f"{expected.repository} is not there", "every host needs the repository at the same path", fix)


def checkpoint_folder(machine: Machine, expected: Expected) -> str | None:
    """Return the checkpoint's folder, also for a name in the local Hugging Face cache; None when there is none."""
    if expected.checkpoint is None:
        return None
    if os.path.isabs(expected.checkpoint):
        return expected.checkpoint if machine.is_folder(expected.checkpoint) else None
    revision = expected.checkpoint.partition("@")[2]
    model = _hub_model(machine, expected)
    try:
        commit = machine.read(f"{model}/refs/{revision or 'main'}").strip()
    except OSError:
        commit = revision
    folder = f"{model}/snapshots/{commit}"
    return folder if commit and machine.is_folder(folder) else None


def hub_cache(environ: Mapping[str, str]) -> str:
    """Return the hub's cache folder, by the same rules as huggingface_hub."""
    for variable, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "/hub")):
        if value := environ.get(variable):
            return f"{value}{below}"
    return f"{_cache_home(environ)}/huggingface/hub"


def _cache_home(environ: Mapping[str, str]) -> str:
    return environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '/root')}/.cache"


def index_digest(machine: Machine, expected: Expected) -> str | None:
    """Return 16 hex digits for the checkpoint's index; None when there is none."""
    folder = checkpoint_folder(machine, expected)
    if folder is None or not machine.exists(f"{folder}/{INDEX}"):
        return None
    return hashlib.sha256(machine.read_bytes(f"{folder}/{INDEX}")).hexdigest()[:16]


def check_checkpoint(machine: Machine, expected: Expected) -> MachineFinding:
    if expected.checkpoint is None:
        return skipped("none is known" if expected.repository else "no repository was named")
    if (folder := checkpoint_folder(machine, expected)) is None:
        return _missing_checkpoint(machine, expected)
    try:
        problems, num_bytes, num_files = _inspect(machine, folder)
    except OSError as problem:
        result = f"{problem.filename or folder}: {problem.strerror}"
        return error(result, "the engine can't read it either", "give this user read access")
    if not problems:
        return ok(f"{folder}: {num_files} files, {sized(num_bytes)}")
    more = f" and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
    result = f"{folder}: {'; '.join(problems[:_MOST_NAMED])}{more}"
    return error(result, "the load fails half way, or loads wrong weights", "download or copy those files again")


def _missing_checkpoint(machine: Machine, expected: Expected) -> MachineFinding:
    assert expected.checkpoint is not None
    if os.path.isabs(expected.checkpoint):
        if machine.exists(expected.checkpoint):
            fix = f"name its folder: {os.path.dirname(expected.checkpoint)}"
            return error(f"{expected.checkpoint} is a file", "model.yaml names it", fix)
        fix = "mount or copy it there, say with --model where it is, or build again with another --model"
        return error(f"{expected.checkpoint} is not there", "the repository or --model names it", fix)
    result = f"{expected.checkpoint} is not in the Hugging Face cache"
    download = f"deepseek-triton checkpoint download {expected.checkpoint}"
    cache, size = hub_cache(machine.environ), _still_to_download(machine, expected)
    free = machine.disk(_nearest_existing(machine, cache)).free
    if size and free < size:
        cause = f"the first load would download {sized(size)} to {cache}, which has {sized(free)} free"
        fix = f"name a folder on a disk with that much in HF_HUB_CACHE, then {download}; or build again with --model"
        return error(result, cause, fix)
    cause = f"the first load downloads {sized(size) if size else 'it'}, on each host"
    return warning(result, cause, f"{download} beforehand")


def _still_to_download(machine: Machine, expected: Expected) -> int:
    """Return the bytes of a named checkpoint that the hub's cache lacks; 0 when nobody knows."""
    blobs = f"{_hub_model(machine, expected)}/blobs"
    try:
        present = sum(machine.size(f"{blobs}/{name}") for name in machine.list_folder(blobs))
    except OSError:  # nothing was downloaded yet
        present = 0
    return max(0, (expected.checkpoint_bytes or 0) - present)


def _hub_model(machine: Machine, expected: Expected) -> str:
    """Return the folder of a named checkpoint in the hub's cache."""
    name = (expected.checkpoint or "").partition("@")[0]
    return f"{hub_cache(machine.environ)}/models--{name.replace('/', '--')}"


def _inspect(machine: Machine, folder: str) -> tuple[Sequence[str], int, int]:
    """Return what is wrong with the checkpoint, the bytes found, and the number of its files."""
    names = [name for name in machine.list_folder(folder) if name.endswith(".safetensors")]
    names = [name for name in names if not name.startswith("consolidated")]
    if machine.exists(f"{folder}/{INDEX}"):
        try:
            names = sorted(set(json.loads(machine.read(f"{folder}/{INDEX}"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return [f"{INDEX} can't be parsed"], 0, len(names)
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
            problems.append(f"{name} is not a safetensors file")
        elif whole != size:
            problems.append(f"{name} has {size:,} of {whole:,} bytes")
    return problems, num_bytes, len(names)


def _whole_size(machine: Machine, path: str) -> int | None:
    """Return the file's size by its header: 8 bytes hold the length of a JSON object, whose data_offsets count from the
    byte behind it. None when the header can't be parsed."""
    length = int.from_bytes(machine.read_bytes(path, 8), "little")
    if not 0 < length < _LONGEST_HEADER:
        return None
    try:
        header = json.loads(machine.read_bytes(path, 8 + length)[8:])
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        return 8 + length + max(ends, default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None


def check_host_memory(machine: Machine, expected: Expected) -> MachineFinding:
    memory = machine.host_memory()
    cgroup = memory.tightest
    result = f"{sized(memory.headroom)} available" + (f", limited by {cgroup.path}" if cgroup else "")
    if not expected.uses_gpus or not expected.checkpoint_bytes:
        return ok(result)
    if memory.headroom < sum(expected.tables):
        cause = f"Engram's tables take {sized(sum(expected.tables))} of it, without which vLLM does not start"
        return error(result, cause, "raise the container's memory limit" if cgroup else "use a machine with more")
    result += f"; the checkpoint has {sized(expected.checkpoint_bytes)}"
    if memory.headroom >= expected.checkpoint_bytes:
        return ok(result)
    folder = checkpoint_folder(machine, expected)
    names = machine.list_folder(folder) if folder else ()
    largest = max((machine.size(f"{folder}/{name}") for name in names if name.endswith(".safetensors")), default=0)
    ranks = expected.gpus_per_node or 1
    fix = "raise the container's memory limit" if cgroup else "free memory, or use a machine with more"
    fix += "; deepseek-triton warm report says what fits"
    if largest and memory.headroom < largest * ranks:
        loaded = f"{ranks} ranks that each hold one file of {sized(largest)}"
        return error(result, f"{loaded} run out of memory and are killed (an estimate)", fix)
    cause = "not all of the checkpoint stays in the page cache, so it is read more than once"
    if cgroup and expected.is_tensorrt_llm:
        cause += "; TensorRT-LLM looks at /proc/meminfo only, so a rank may be killed (its pull request 17430)"
    return warning(result, cause, fix)


def check_disk(machine: Machine, expected: Expected) -> MachineFinding:
    """Check the folders of compiled kernels and downloads."""
    environ, name = machine.environ, expected.checkpoint
    needs = {  # folder -> free bytes
        _cache_home(environ): _CACHE_WANTED,
        environ.get("TRITON_CACHE_DIR") or f"{environ.get('HOME', '/root')}/.triton": _CACHE_WANTED,
        **{environ[name]: _CACHE_WANTED for name in ("DG_JIT_CACHE_DIR", "TILELANG_CACHE_DIR") if environ.get(name)},
        environ.get("TMPDIR") or "/tmp": GIB,
    }
    if name and not os.path.isabs(name) and checkpoint_folder(machine, expected) is None:
        needs[hub_cache(environ)] = _still_to_download(machine, expected) or _CACHE_WANTED
    too_small, closed, roomy = [], [], []
    for cache, need in needs.items():
        folder = _nearest_existing(machine, cache)
        free = machine.disk(folder).free
        roomy.append(f"{cache} {sized(free)} free")
        if not machine.can_write(folder):
            closed.append(f"{folder} can't be written to")
        elif free < need:
            too_small.append(f"{cache}: {sized(free)} free of {sized(need)} wanted")
    fix = "free some space, or move them: XDG_CACHE_HOME, HF_HUB_CACHE, TRITON_CACHE_DIR, TMPDIR"
    if closed:
        cause = "compiled kernels and downloads can't be kept, so every start makes them again"
        return warning_or_note(expected, "; ".join(dict.fromkeys(closed)), cause, fix)
    if too_small:
        cause = "compiled kernels are kept there, and the checkpoint if it is still to be downloaded"
        return warning_or_note(expected, "; ".join(too_small), cause, fix)
    return ok(", ".join(roomy))


def _nearest_existing(machine: Machine, folder: str) -> str:
    """Return the folder, or the first folder above it that exists."""
    while not machine.exists(folder) and folder not in ("/", ""):
        folder = os.path.dirname(folder)
    return folder or "/"
