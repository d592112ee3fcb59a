"""`launch docker`: one container with start.sh as its first process; and what the containers of other forms share.

Compiled kernels are kept when a container ends. Without that every start compiles them again, and the first requests of
a new shape wait for seconds (sgl-project/sglang#29170, NVIDIA/TensorRT-LLM pull request 16178).
"""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from deepseek_triton_build.catalog import is_engine_variable, vllm_containers, vllm_image_name
from deepseek_triton_build.text import comment_lines, for_comment, safe_name
from deepseek_triton_tools.host.units import sized
from deepseek_triton_tools.launching import start_script
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.launching.start_script import nodes_by_hand
from deepseek_triton_tools.repository.launch_facts import LaunchFacts

KERNELS_MOUNT = "/var/cache/deepseek-triton"
"""Path inside containers."""

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
        f"no Triton container has vLLM {facts.vllm}: build an image of two lines, FROM {base} and RUN pip install "
        f"vllm=={facts.vllm}, and name it with --image"
    )


def transports(facts: LaunchFacts) -> str:
    """Return what takes /dev/shm besides tritonserver's Python backend."""
    return "NCCL and vLLM's message queues" if facts.vllm else "NCCL and Open MPI"


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


CommandPart = tuple[Sequence[str], str]
"""Words of the docker command, and the comment that gives their reason."""

_DEVICE = r"(GPU|MIG)-[\w-]+"
_GPUS = re.compile(rf"all|none|[1-9]\d*|{_DEVICE}|(\d+|{_DEVICE})(,(\d+|{_DEVICE}))+", re.ASCII)
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+")


def refusals(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    if facts.nodes > 1:
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


def unmet_requirements(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    for source in facts.mounts.values():
        if not os.path.isdir(source):
            yield f"the checkpoint {safe_name(source)} is not on this machine: docker has nothing to mount"


def render(facts: LaunchFacts, options: LaunchOptions) -> str:
    start_script.dry_run(facts.start_script, start_script.server_environment(options), options.server_args)
    lines = [
        *start_script.head(facts, "docker"),
        *comment_lines("To stop it, send SIGTERM (Ctrl-C, docker stop): it finishes open requests and then ends."),
        "set -euo pipefail",
        "",
        *comment_lines(
            "docker refuses to mount a folder that does not exist. Compiled kernels are kept here, for this image and "
            "this GPU only."
        ),
        f"mkdir -p -- {shlex.join(created_folders(facts, options))}",
        "",
        "command=(",
    ]
    for command, why in command_parts(facts, options):
        lines += [*comment_lines(why, "  "), f"  {shlex.join(command)}"]
    return "\n".join([*lines, ")", 'exec "${command[@]}"']) + "\n"


def command_parts(facts: LaunchFacts, options: LaunchOptions) -> list[CommandPart]:
    """Return the docker command in parts. The last two are the image, and what runs in it."""
    return [
        (["docker", "run", "--name", container_name(facts, options)], "The name for docker stop, logs and exec."),
        _life(facts, options),
        *_gpus(facts, options),
        *_confinement(facts),
        *_memory(facts, options),
        *_network(options),
        *_mounts(facts, options),
        *_environment(options),
        ([image_of(facts, options)], _image_why(facts, options)),
        (
            [str(facts.start_script), *options.server_args],
            "Process 1 is the supervisor: it receives the signals, and ends all processes that it started.",
        ),
    ]


def container_name(facts: LaunchFacts, options: LaunchOptions) -> str:
    slug = re.sub(r"[^a-zA-Z0-9_.-]+", "-", facts.folder.name).strip("-._")
    return options.name or f"deepseek-triton-{slug or 'server'}"


def _life(facts: LaunchFacts, options: LaunchOptions) -> CommandPart:
    words = ["--restart", options.restart] if options.restart else ["--rm"]
    why = (
        "--restart: as requested." if options.restart else "--rm: the name is free again once the container has ended."
    )
    if options.detach:
        words.append("--detach")
        why += " --detach: the container runs in the background; docker logs shows its output."
    times = options.stop_times
    words += ["--stop-timeout", str(times.docker_stop_timeout_s)]
    return (
        words,
        f"{why} --stop-timeout: docker stop must not kill before the supervisor does. Open requests get "
        f"{options.exit_timeout} s (EXIT_TIMEOUT), the supervisor kills what is left after "
        f"{times.supervisor_kill_s} s, {f'mpirun after {times.mpirun_kill_s} s, ' if facts.uses_mpi else ''}and some "
        "seconds are to spare. With docker's default of 10 s answers would be cut short.",
    )


def _gpus(facts: LaunchFacts, options: LaunchOptions) -> Iterator[CommandPart]:
    which = options.gpus or ("all" if facts.gpus_per_node else "none")
    if which == "none":
        return
    planned = f"The plan is for {facts.gpus_per_node} x {facts.gpu}. " if facts.gpu else ""
    if not which.isdecimal() and which != "all":
        which = f'"device={which}"'  # docker reads the value as CSV, where a comma would end it
    yield ["--gpus", which], f"{planned}all takes every GPU of the machine; --gpus N or 0,1 leaves some to others."


def _confinement(facts: LaunchFacts) -> Iterator[CommandPart]:
    if facts.nodes > 1 and facts.uses_mpi:
        return  # an ssh server runs there, which changes users and writes where it likes
    yield (
        ["--security-opt", "no-new-privileges", "--cap-drop", "ALL", "--cap-add", "DAC_OVERRIDE"],
        "Root in the container gets none of root's rights, now or by another program, but to read and write mounted "
        "files whoever owns them. --user, where all of them are one user's, makes this one unnecessary too.",
    )
    yield (
        ["--read-only", "--tmpfs", "/tmp:exec,mode=1777", "--env", "HOME=/tmp"],
        "Nothing in the image can be changed. Programs write to /tmp, from where the kernels that they compile are "
        "loaded (exec), and to the folders mounted below.",
    )


def _memory(facts: LaunchFacts, options: LaunchOptions) -> Iterator[CommandPart]:
    if options.ipc_host:
        yield ["--ipc", "host"], "The machine's own /dev/shm: half of its memory, unless it is mounted otherwise."
    else:
        size = options.shm_size or facts.shm_bytes
        yield (
            ["--shm-size", str(size)],
            f"/dev/shm of {sized(size)}: docker's default is 64 MiB, and {transports(facts)} and "
            "tritonserver's Python backend end with a bus error when it is full. 1 GiB for each rank and 1 GiB for "
            f"tritonserver is an assumption.{facts.expert_copy_why} Only the part that is used takes memory, and it is "
            "freed with the container.",
        )
    yield (
        ["--ulimit", "memlock=-1", "--ulimit", "stack=67108864"],
        "Pinned memory for GPUs and network cards counts as locked, and the engine's threads take stacks of up to "
        "64 MiB. NVIDIA asks for both options in its containers.",
    )
    yield ["--ulimit", "nofile=1048576:1048576"], "Each connection and each mapped shard is a file."


def _network(options: LaunchOptions) -> Iterator[CommandPart]:
    ports = (options.http_port, options.grpc_port, options.metrics_port)
    where = f"on {options.address} only" if options.address else "on all its addresses; --address limits them to one"
    if options.network == "host":
        yield ["--network", "host"], f"Ports {', '.join(map(str, ports))} are opened on the machine itself, {where}."
        return
    yield ["--network", options.network], "The network of --network."
    address = f"[{options.address}]" if ":" in (options.address or "") else options.address
    prefix = f"{address}:" if address else ""
    published = [word for port in ports for word in ("--publish", f"{prefix}{port}:{port}")]
    yield published, f"HTTP, gRPC and metrics are published on the machine, {where}."


def _mounts(facts: LaunchFacts, options: LaunchOptions) -> Iterator[CommandPart]:
    folder = str(facts.folder)
    yield ["--mount", bind(folder, folder)], "The repository, at the same path as here."
    for place, source in facts.mounts.items():
        yield ["--mount", bind(source, place)], "The checkpoint, at the path that model.yaml names."
    if facts.serving and facts.serving.names:
        hub = facts.serving.hub_cache
        yield (
            ["--mount", bind(hub, hub, writable=True), "--env", f"HF_HUB_CACHE={hub}"],
            f"The Hugging Face cache: {' and '.join(facts.serving.names)} is read from it, or downloaded into it.",
        )
        if os.environ.get("HF_TOKEN"):
            yield ["--env", "HF_TOKEN"], "The token for the download; docker takes its value from the environment."
    yield (
        ["--mount", bind(str(kernel_folder(facts, options)), KERNELS_MOUNT, writable=True)],
        "Kernels that are compiled while it runs are kept, so that the next start of "
        f"{for_comment(image_of(facts, options))} does not compile them again.",
    )
    if options.ready_file:
        parent = os.path.dirname(os.path.abspath(options.ready_file))
        yield ["--mount", bind(parent, parent, writable=True)], "The folder of --ready-file."


def _environment(options: LaunchOptions) -> Iterator[CommandPart]:
    caches = kernel_environment()
    yield (
        _env(caches),
        "Folders for the kernels of DeepGEMM (two of them), FlashInfer, vLLM, Triton, PyTorch and the driver.",
    )
    # In a network of its own the server listens on all addresses, and docker publishes on the one of --address.
    inside = options if options.network == "host" else dataclasses.replace(options, address=None)
    yield _env(start_script.server_environment(inside)), "start.sh's variables."


def _env(variables: dict[str, str]) -> list[str]:
    return [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]


def _image_why(facts: LaunchFacts, options: LaunchOptions) -> str:
    if options.image:
        return f"The image of --image; the repository was made for {facts.image or 'no container'}."
    what = f"vLLM {facts.vllm}" if facts.vllm else f"TensorRT-LLM {facts.release}"
    return f"The image that the repository was made for: it has {what}."


def bind(source: str, target: str, *, writable: bool = False) -> str:
    """Return a value of --mount. It is a line of CSV, so that unlike --volume it takes any path."""
    line = io.StringIO()
    fields = ["type=bind", f"source={source}", f"target={target}", *([] if writable else ["readonly"])]
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()
