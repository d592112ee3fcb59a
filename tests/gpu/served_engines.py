"""Model repositories for this project's backend and for Triton's vllm_backend with the same engine arguments, and what
the scripts here read of a server's processes and of the GPUs."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from bench._harness import cpu_s

from deepseek_triton_tools.server.server_process import ServeOptions, ServerProcess
from support.server_processes import session_members

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "model_repository/tensorrt_llm/1/tiny"
OURS, THEIRS = "tensorrt_llm", "vllm_model"

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "PYTHONUNBUFFERED": "1",
    # Neither library is needed here, and both compile at the start.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    # On a host that others share, a program that uses NVLink's multicast can stop all of them.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""Of every engine here; what the caller has set already stays."""


def set_environment(more: Mapping[str, str] | None = None) -> None:
    for name, value in {**ENVIRONMENT, **(more or {})}.items():
        os.environ.setdefault(name, value)


def tiny_arguments(**more: Any) -> dict[str, Any]:
    """Engine arguments for the tiny checkpoint. The KV cache has a fixed size, so that several engines can load on one
    GPU at the same time: vLLM else measures the memory that is free, and the others' loads disturb it."""
    return {
        "model": str(TINY),
        "max_model_len": 4096,
        "max_num_seqs": 1024,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": 16 << 30,
        # A cached prefix would make the second measurement look faster than the first.
        "enable_prefix_caching": False,
        # Triton's vllm_backend is faster without them. This project's backend keeps its own counts.
        "disable_log_stats": True,
        **more,
    }


def our_repository(folder: Path, arguments: Mapping[str, Any], **triton_config: Any) -> Path:
    """This project's backend with the vLLM engine; `arguments` are those of AsyncEngineArgs."""
    model = folder / OURS
    shutil.copytree(ROOT / "model_repository/tensorrt_llm", model, ignore=shutil.ignore_patterns("tiny", "__pycache__"))
    ours = {"engine": "vllm", "decoupled": True, "max_batch_size": 0, "default_max_tokens": 256, **triton_config}
    (model / "1/model.yaml").write_text(yaml.safe_dump({**arguments, "triton_config": ours}))
    if ours["engine"] == "vllm":
        version = importlib.metadata.version("vllm").partition("+")[0]
        record = ROOT / f"build/deepseek_triton_build/data/records/vllm-{version}.yaml"
        shutil.copy(record, model / "1/release.yaml")
    return folder


_THEIR_CONFIG = 'name: "%s"\nbackend: "python"\ninstance_group [ { count: 1, kind: KIND_MODEL } ]\n'
_MOVED = {
    # vLLM 0.19 moved the first; the second is where the name always was.
    "from vllm.inputs.data import TokensPrompt": "from vllm.inputs import TokensPrompt"
}
_LOCALE = 'import locale\n\nlocale.setlocale(locale.LC_CTYPE, "C.UTF-8")  # torch reads UTF-8; the stub has none\n'


def their_repository(folder: Path, source: Path, arguments: Mapping[str, Any]) -> Path:
    """Triton's vllm_backend: `source` is the folder with its model.py and utils. The copy gets an import that newer
    releases of vLLM moved, and the locale without which torch can't be imported in Triton's stub."""
    version = folder / THEIRS / "1"
    version.mkdir(parents=True)
    for path in [source / "model.py", *sorted((source / "utils").glob("*.py"))]:
        text = path.read_text(encoding="utf-8")
        for old, new in _MOVED.items():
            text = text.replace(old, new)
        if path.name == "model.py":
            text = _LOCALE + text
        target = version / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        target.write_text(text, encoding="utf-8")
    (version / "model.json").write_text(json.dumps(dict(arguments), indent=1))
    (folder / THEIRS / "config.pbtxt").write_text(_THEIR_CONFIG % THEIRS)
    return folder


def server_of(repository: Path, log: Path, **options: Any) -> ServerProcess:
    return ServerProcess(
        ServeOptions(
            repository=repository, http_port="auto", grpc_port="auto", metrics_port="auto", log_file=log, **options
        )
    )


def start(server: ServerProcess) -> float:
    """Start it and return the seconds until it was ready."""
    began = time.monotonic()
    server.start()
    server.wait_until_ready()
    return round(time.monotonic() - began, 1)


def roles(session: int) -> dict[str, list[int]]:
    """The processes of a server's session: tritonserver, its stub with the guard that the stub forks, and the engine's
    own. First come the stub that tritonserver started, and the engine core; torch's compiler has workers beside it."""
    found: dict[str, list[int]] = {"server": [], "stub": [], "engine": []}
    for pid in session_members(session):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if pid == session:
            found["server"].append(pid)
        elif line.partition("\0")[0].endswith("triton_python_backend_stub"):
            found["stub"].insert(0 if parent_of(pid) == session else len(found["stub"]), pid)
        elif "resource_tracker" not in line:
            found["engine"].insert(0 if "EngineCore" in line else len(found["engine"]), pid)
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def cpu_by_role(session: int) -> dict[str, float]:
    return {role: sum(map(cpu_s, pids)) for role, pids in roles(session).items()}


def gpu_memory_mib() -> int | None:
    """Memory in use on all GPUs together; None on a machine without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.check_output(query, text=True).split()))


def machine() -> dict[str, Any]:
    gpus = ""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        gpus = subprocess.check_output(query, text=True).strip()
    versions = {}
    for package in ("vllm", "torch", "transformers", "numpy", "nvidia-pytriton", "grpcio"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {"gpus": gpus.splitlines(), "cores": os.cpu_count(), "versions": versions}


def wait_for(holds: Callable[[], bool], within_s: float) -> float | None:
    """Return the seconds until `holds` was true, or None when it was not within the time."""
    began = time.monotonic()
    while time.monotonic() - began < within_s:
        if holds():
            return round(time.monotonic() - began, 2)
        time.sleep(0.1)
    return None
