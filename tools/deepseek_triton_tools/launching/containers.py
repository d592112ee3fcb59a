"""`launch docker`: one container that runs start.sh, or serve.sh; and what the containers of other forms share.

Compiled kernels are kept when a container ends. Without that every start compiles them again, and the first requests of
a new shape wait for seconds (sgl-project/sglang#29170, NVIDIA/TensorRT-LLM pull request 16178).
"""

import csv
import dataclasses
import io
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deepseek_triton_build.catalog import is_engine_variable, nearest_variable, vllm_containers, vllm_image_name
from deepseek_triton_build.text import for_comment, safe_name
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.host.units import sized
from deepseek_triton_tools.launching import start_script
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.launching.start_script import nodes_by_hand
from deepseek_triton_tools.repository.launch_facts import LaunchFacts

KERNELS_MOUNT = "/var/cache/deepseek-triton"
"""Path inside containers."""

LABEL = "deepseek-triton.supervisor"
"""Label of the containers: the supervisor's path in them; "" without Triton."""

KERNEL_CACHES: Mapping[str, str] = {
    # cpp/tensorrt_llm/deep_gemm/compiler.cuh; ~/.tensorrt_llm without it.
    "TRTLLM_DG_CACHE_DIR": "tensorrt_llm",
    # The deep_gemm package, which V3.2's indexer uses; ~/.deep_gemm without it.
    "DG_JIT_CACHE_DIR": "deep_gemm",
    # flashinfer/jit/env.py adds .cache/flashinfer to it; ~ without it.
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    # vllm/envs.py; ~/.cache/vllm without it, where torch.compile's graphs are.
    "VLLM_CACHE_ROOT": "vllm",
    # Triton the compiler; ~/.triton/cache without it.
    "TRITON_CACHE_DIR": "triton",
    # Of V4: hyper-connections (tilelang/env.py; ~/.tilelang/cache without it) and compressors (CuTe DSL; /tmp/USER).
    "TILELANG_CACHE_DIR": "tilelang",
    "CUTE_DSL_CACHE_DIR": "cute_dsl",
    # torch.compile; /tmp/torchinductor_USER without it.
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    # PTX that the driver has compiled; ~/.nv/ComputeCache without it.
    "CUDA_CACHE_PATH": "cuda",
}
"""Variable -> folder below the one that is kept."""


def engine_variables(environment: Mapping[str, str], *, in_container: bool) -> tuple[dict[str, str], list[str]]:
    """Return the variables of `environment` that are meant for the engine, and the names of those left out.

    A container gets no paths: a folder of this machine, such as its CUDA_HOME, is another one there, or none.
    """
    found = {name: value for name, value in environment.items() if is_engine_variable(name)}
    if not in_container:
        return found, []
    paths = [name for name, value in found.items() if value.startswith("/")]
    kept = {name: value for name, value in found.items() if name not in paths}
    return kept, [name for name in paths if name not in KERNEL_CACHES]


def image_of(facts: LaunchFacts, options: LaunchOptions) -> str:
    """Return the image's name; "" for an engine that was planned for no container."""
    return options.image or facts.image or ""


def no_image(facts: LaunchFacts) -> str:
    """Return why there is no image, and how to come by one."""
    if facts.vllm is None:
        return (
            f"the {facts.engine} engine was planned for no container: name with --image one that has tritonserver and "
            "the engine's packages"
        )
    base = vllm_image_name(next(iter(vllm_containers())))
    return (
        f"no Triton container is known to have vLLM {facts.vllm}: build an image of two lines, FROM {base} and RUN "
        f"PIP_BREAK_SYSTEM_PACKAGES=1 pip install vllm=={facts.vllm}, and name it with --image"
    )


def transports(facts: LaunchFacts) -> str:
    """Return what takes /dev/shm besides tritonserver's Python backend."""
    return "NCCL and vLLM's message queues" if facts.vllm else "NCCL and Open MPI"


def _shm_users(facts: LaunchFacts) -> str:
    return transports(facts) + (" and tritonserver's Python backend" if facts.has_triton else "")


def too_few_gpus(facts: LaunchFacts, num_gpus: int) -> Iterator[str]:
    """Yield a reason to refuse: a rank without a GPU would fail only after the other ranks have loaded."""
    if num_gpus < facts.gpus_per_node:
        yield f"--gpus: {facts.source} takes {facts.gpus_per_node} GPUs of each node, got {num_gpus}"


def kernel_environment() -> dict[str, str]:
    """Return the variables that let all compilers keep their kernels below KERNELS_MOUNT."""
    return {variable: f"{KERNELS_MOUNT}/{name}" for variable, name in KERNEL_CACHES.items()}


def cache_folder(image: str, gpu: str | None, root: Path | None = None) -> Path:
    """Return the folder for one image and one GPU: kernels of one image's compilers must not be loaded in another.

    :param root: the folder above it; ~/.cache/deepseek-triton/kernels unless given.
    """
    if root is None:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "deepseek-triton/kernels")
    return Path(os.path.abspath(root), re.sub(r"[^\w.-]+", "_", f"{image}-{gpu or 'cpu'}"))


def kernel_folder(facts: LaunchFacts, options: LaunchOptions) -> Path:
    """Return the folder on this machine in which compiled kernels are kept."""
    return cache_folder(image_of(facts, options), facts.gpu, options.cache_dir)


def created_folders(facts: LaunchFacts, options: LaunchOptions) -> list[str]:
    """Return the folders that are mounted and that the rendered script creates if they don't exist."""
    folders = [str(kernel_folder(facts, options))]
    if facts.serving and facts.serving.names:
        folders.append(facts.serving.hub_cache)
    if options.ready_file:
        folders.append(os.path.dirname(os.path.abspath(options.ready_file)))
    return folders


_DEVICE = r"(GPU|MIG)-[\w-]+"
_GPUS = re.compile(rf"all|none|[1-9]\d*|{_DEVICE}|(\d+|{_DEVICE})(,(\d+|{_DEVICE}))+", re.ASCII)
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+")


# Words of serve.sh's command line that would override what is published.
_LISTENING = re.compile(r"--(host|port)(=.*)?")


def refusals(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    if not facts.has_triton:
        if facts.nodes > 1:
            yield (
                f"{facts.source} takes {facts.nodes} nodes, and docker starts one container: run "
                f"{facts.start_script.name} in containers of your own, as its comments say, or build it with --format "
                "triton, which launch slurm and launch kubernetes start"
            )
        words = [name for name, _ in options.environment if name in ("HOST", "PORT")]
        words += [word for word in options.server_args if _LISTENING.fullmatch(word)]
        if words:
            yield f"{', '.join(words)}: say it with --address and --http-port, which is published too"
    elif facts.nodes > 1:
        if facts.uses_mpi:
            yield (
                f"{facts.source} takes {facts.nodes} nodes, and docker starts one container: use launch ssh-setup, "
                "which prints how to start one on each node, or launch slurm or kubernetes"
            )
        yield from nodes_by_hand(facts, options, "docker")
    if not image_of(facts, options):
        yield f"{no_image(facts)}, or use launch local"
    yield from invalid_options(facts, options)
    paths = [str(facts.folder), *facts.mounts, *facts.mounts.values(), str(options.cache_dir or "")]
    yield from (
        f"{safe_name(path)}: docker takes no path with a line break" for path in paths if set("\r\n") & set(path)
    )


def invalid_options(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    """Yield what is wrong with --gpus, --name, --ipc-host and --shm-size."""
    if options.gpus and not _GPUS.fullmatch(options.gpus):
        yield f"--gpus: expected all, none, a number or devices such as 0,1, got {safe_name(options.gpus)}"
    elif options.gpus and options.gpus not in ("all", "none"):
        is_number = options.gpus.isdecimal()
        yield from too_few_gpus(facts, int(options.gpus) if is_number else len(set(options.gpus.split(","))))
    if options.name and not _NAME.fullmatch(options.name):
        yield (
            "--name: docker takes letters, digits and _.- after a letter or digit, two of them at least, got "
            f"{safe_name(options.name)}"
        )
    if options.ipc_host and options.shm_size:
        yield "--ipc-host uses the machine's /dev/shm, and --shm-size can't set the size of that: give one of them"


def warnings(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    size = options.shm_size
    if size is not None and size < facts.shm_bytes:
        yield (
            f"--shm-size {sized(size)}: {sized(facts.shm_bytes)} are planned for {facts.source}, because "
            f"{_shm_users(facts)} end with a bus error when it is full: leave it out"
        )
    for name, _ in options.environment:
        if near := nearest_variable(name):
            yield f"{name} is not a variable that the engine or its libraries are known to read: did you mean {near}?"


def unmet_requirements(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    for source in facts.mounts.values():
        if not os.path.isdir(source):
            found = "a file: model.yaml has to name its folder" if os.path.isfile(source) else "not on this machine"
            yield f"the checkpoint {safe_name(source)} is {found}; docker has nothing to mount"


def render(facts: LaunchFacts, options: LaunchOptions) -> str:
    if facts.has_triton:
        start_script.dry_run(facts.start_script, start_script.server_environment(options), options.server_args)
    values = {
        "version": __version__,
        "source": for_comment(facts.source),
        "start": shlex.join([str(facts.start_script), *options.server_args]),
        "is_removed": not options.restart and not options.detach,
        "name_pattern": shlex.quote("^/?" + container_name(facts, options).replace(".", r"\.") + "$"),
        "label": LABEL,
    }
    return start_script.filled("docker.sh", values | docker_run(facts, options))


def docker_run(facts: LaunchFacts, options: LaunchOptions) -> dict[str, Any]:
    """Return the values of templates/docker-run.sh, and of what every script does around it."""
    stop, serving, image = options.stop_times, facts.serving, image_of(facts, options)
    gpus = options.gpus or ("all" if facts.gpus_per_node else "none")
    if not gpus.isdecimal() and gpus not in ("all", "none"):
        gpus = f'"device={gpus}"'  # docker reads the value as CSV, where a comma would end it
    shm_bytes = options.shm_size or facts.shm_bytes
    ports = [str(port) for port in (options.http_port, options.grpc_port, options.metrics_port)]
    ports = ports if facts.has_triton else ports[:1]
    address = f"[{options.address}]" if ":" in (options.address or "") else options.address
    published = [f"{address}:{port}:{port}" if address else f"{port}:{port}" for port in ports]
    # In a network of its own the server listens on all addresses, and docker publishes on the one of --address.
    inside = options if options.network == "host" else dataclasses.replace(options, address=None)
    variables = start_script.server_environment(inside)
    if not facts.has_triton:
        variables = {"HOST": inside.address or "0.0.0.0", "PORT": ports[0], **dict(options.environment)}
    ready_folder = options.ready_file and os.path.dirname(os.path.abspath(options.ready_file))
    hub = serving.hub_cache if serving and serving.names else None
    software = f"vLLM {facts.vllm}" if facts.vllm else f"TensorRT-LLM {facts.release}"
    return {
        "folders": shlex.join(created_folders(facts, options)),
        "name": container_name(facts, options),
        "supervisor_label": shlex.quote(f"{LABEL}={facts.supervisor if facts.has_triton else ''}"),
        "restart": options.restart and shlex.quote(options.restart),
        "detach": options.detach,
        "exit_timeout_s": options.exit_timeout,
        "supervisor_kill_s": stop.supervisor_kill_s,
        "mpirun_kill": f"mpirun after {stop.mpirun_kill_s} s, " if facts.uses_mpi else "",
        "stop_timeout_s": stop.docker_stop_timeout_s,
        "planned": f"The plan is for {facts.gpus_per_node} x {facts.gpu}. " if facts.gpu else "",
        "gpus": "" if gpus == "none" else shlex.quote(gpus),
        # Over several nodes an ssh server runs there, which changes users and writes where it likes.
        "several_nodes": facts.nodes > 1,
        "is_confined": facts.nodes == 1 or not facts.uses_mpi,
        "ipc_host": options.ipc_host,
        "shm_size": sized(shm_bytes),
        "shm_bytes": shm_bytes,
        "shm_users": _shm_users(facts),
        "shared_memory_why": facts.shared_memory_why,
        "host_network": options.network == "host",
        "network": shlex.quote(options.network),
        "ports": ", ".join(ports),
        "has_triton": facts.has_triton,
        "own_entrypoint": facts.vllm is not None and not facts.has_triton,
        "script": facts.start_script.name,
        "listens": (
            f"on {options.address} only" if options.address else "on all its addresses; --address limits them to one"
        ),
        "published": shlex.join(word for port in published for word in ("--publish", port)),
        "repository_mount": bind(str(facts.folder), str(facts.folder)),
        "checkpoint_mounts": [bind(source, place) for place, source in facts.mounts.items()],
        "hub": hub and shlex.quote(f"HF_HUB_CACHE={hub}"),
        "hub_names": " and ".join(serving.names) if serving else "",
        "hub_mount": hub and bind(hub, hub, writable=True),
        "has_token": bool(os.environ.get("HF_TOKEN")),
        "kernel_mount": bind(str(kernel_folder(facts, options)), KERNELS_MOUNT, writable=True),
        "ready_mount": ready_folder and bind(ready_folder, ready_folder, writable=True),
        "kernel_variables": _env(kernel_environment()),
        "server_variables": _env(variables),
        "image": shlex.quote(image) if image else None,
        "comment_image": for_comment(image),
        "image_why": (
            f"The image of --image; the folder was made for {facts.image or 'no container'}."
            if options.image
            else f"The image that the folder was made for: it has {software}."
        ),
    }


def container_name(facts: LaunchFacts, options: LaunchOptions) -> str:
    slug = re.sub(r"[^a-zA-Z0-9_.-]+", "-", facts.folder.name).strip("-._")
    return options.name or f"deepseek-triton-{slug or 'server'}"


def _env(variables: dict[str, str]) -> str:
    return shlex.join(word for name, value in variables.items() for word in ("--env", f"{name}={value}"))


def bind(source: str, target: str, *, writable: bool = False) -> str:
    """Return a value of --mount as a word. It is a line of CSV, so that unlike --volume it takes any path."""
    line = io.StringIO()
    fields = ["type=bind", f"source={source}", f"target={target}", *([] if writable else ["readonly"])]
    csv.writer(line, lineterminator="").writerow(fields)
    return shlex.quote(line.getvalue())
