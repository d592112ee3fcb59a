"""`launch docker`: one container of the repository's image, with start.sh as its first process."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from deepseek_triton_build.render.yaml_text import comment, one_line
from deepseek_triton_build.text import plain
from deepseek_triton_tools.host.units import sized
from deepseek_triton_tools.launching import kernel_caches, script
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.repository.launch_facts import LaunchFacts

Part = tuple[Sequence[str], str]
"""Words of the command, and why they are there."""

_DEVICE = r"(GPU|MIG)-[\w-]+"
_GPUS = re.compile(rf"all|none|[1-9]\d*|{_DEVICE}|(\d+|{_DEVICE})(,(\d+|{_DEVICE}))+", re.ASCII)
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+")


def problems(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    if facts.nodes > 1:
        yield (
            f"{facts.source} takes {facts.nodes} nodes, and this starts one container: launch ssh-setup "
            "prints how to start one on each; or launch slurm or kubernetes"
        )
    if not (options.image or facts.image):
        yield (
            f"the {facts.engine} engine was planned for no container: name with --image one that has tritonserver and "
            "the engine's packages, or launch local"
        )
    yield from wrong_values(facts, options)
    paths = [str(facts.folder), *facts.mounts, *facts.mounts.values(), str(options.cache_dir or "")]
    yield from (f"{plain(path)}: docker takes no path with a line break" for path in paths if set("\r\n") & set(path))


def wrong_values(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    if options.gpus and not _GPUS.fullmatch(options.gpus):
        yield f"--gpus: expected all, none, a number or devices such as 0,1, got {plain(options.gpus)}"
    elif options.gpus and options.gpus not in ("all", "none"):
        counted = options.gpus.isdecimal()
        yield from too_few(facts, int(options.gpus) if counted else len(set(options.gpus.split(","))))
    if options.name and not _NAME.fullmatch(options.name):
        yield (
            "--name: docker takes letters, digits and _.- after a letter or digit, two of them at least, got "
            f"{plain(options.name)}"
        )
    if options.ipc_host and options.shm_size:
        yield "--ipc-host takes the machine's /dev/shm, whose size is not --shm-size's to set"


def too_few(facts: LaunchFacts, num_gpus: int) -> Iterator[str]:
    """A rank without a GPU fails when the others have loaded."""
    if num_gpus < facts.gpus_per_node:
        yield f"--gpus: {facts.source} takes {facts.gpus_per_node} GPUs of each node, got {num_gpus}"


def lacking(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    """What this machine has to have before it is run."""
    for source in facts.mounts.values():
        if not os.path.isdir(source):
            yield f"the checkpoint {plain(source)} is not on this machine: docker has nothing to mount"


def render(facts: LaunchFacts, options: LaunchOptions) -> str:
    """
    :raises ToolError: when start.sh refuses.
    """
    script.resolved(facts, script.server_environment(options), options.server_args)
    lines = [
        *script.head(facts, "with docker"),
        *comment("Stop it with SIGTERM (Ctrl-C, docker stop): open requests get their time, and then it ends."),
        "set -euo pipefail",
        "",
        *comment(
            "docker mounts no folder that isn't there. Compiled kernels stay here, for this image and this GPU alone."
        ),
        f"mkdir -p -- {script.words(made_folders(facts, options))}",
        "",
        "command=(",
    ]
    for command, why in parts(facts, options):
        lines += [*comment(why, "  "), f"  {script.words(command)}"]
    return "\n".join([*lines, ")", 'exec "${command[@]}"']) + "\n"


def parts(facts: LaunchFacts, options: LaunchOptions, *, command: Sequence[str] = ()) -> list[Part]:
    """The command, in parts with their reasons.

    :param command: what runs in the container; start.sh unless given.
    """
    image = options.image or facts.image or ""
    return [
        (["docker", "run", "--name", container_name(facts, options)], "For docker stop, logs and exec."),
        _life(options),
        *_gpus(facts, options),
        *_memory(facts, options),
        *_network(options),
        *_mounts(facts, options, image),
        *_environment(facts, options),
        ([image], _image_why(facts, options)),
        (
            list(command) or [str(facts.start_script), *options.server_args],
            "Its process 1 is the supervisor: it takes the signals, and ends what it started.",
        ),
    ]


def container_name(facts: LaunchFacts, options: LaunchOptions) -> str:
    slug = re.sub(r"[^a-zA-Z0-9_.-]+", "-", facts.folder.name).strip("-._")
    return options.name or f"deepseek-triton-{slug or 'server'}"


def _life(options: LaunchOptions) -> Part:
    words = ["--restart", options.restart] if options.restart else ["--rm"]
    kept = "--restart: as asked for." if options.restart else "--rm: its name is free again once it has ended."
    if options.detach:
        words.append("--detach")
        kept += " --detach: it is not waited for; docker logs has what it says."
    times = options.stop_times
    words += ["--stop-timeout", str(times.docker_stop_timeout_s)]
    return (
        words,
        f"{kept} --stop-timeout: docker stop must not kill before the supervisor does: {options.exit_timeout} s for "
        f"open requests (EXIT_TIMEOUT); after {times.supervisor_kill_s} s the supervisor kills what is left, after "
        f"{times.mpirun_kill_s} s mpirun would; and some to spare. docker's own 10 s would cut answers short.",
    )


def _gpus(facts: LaunchFacts, options: LaunchOptions) -> Iterator[Part]:
    which = options.gpus or ("all" if facts.gpus_per_node else "none")
    if which == "none":
        return
    asked = f"The plan is for {facts.gpus_per_node} x {facts.gpu}." if facts.gpu else ""
    if not which.isdecimal() and which != "all":
        which = f'"device={which}"'  # docker reads the value as CSV, where a comma would end it
    yield ["--gpus", which], f"{asked} all is every GPU of the machine; --gpus N or 0,1 leaves some to others."


def _memory(facts: LaunchFacts, options: LaunchOptions) -> Iterator[Part]:
    if options.ipc_host:
        yield ["--ipc", "host"], "The machine's own /dev/shm, half of its memory unless mounted otherwise."
    else:
        size = options.shm_size or facts.shm_bytes
        yield (
            ["--shm-size", str(size)],
            f"/dev/shm of {sized(size)}: docker's own is 64 MiB, and NCCL, Open MPI and tritonserver's Python backend "
            "end with a bus error when it is full. 1 GiB for each rank and one for tritonserver is an assumption; only "
            "what is used takes memory, and it is gone with the container.",
        )
    yield (
        ["--ulimit", "memlock=-1", "--ulimit", "stack=67108864"],
        "Pinned memory for GPUs and network cards counts as locked; the engine's threads take stacks of up to 64 MiB. "
        "NVIDIA asks for both in its containers.",
    )
    yield ["--ulimit", "nofile=1048576:1048576"], "Each connection is a file, and each mapped shard."


def _network(options: LaunchOptions) -> Iterator[Part]:
    ports = (options.http_port, options.grpc_port, options.metrics_port)
    where = f"on {options.address} alone" if options.address else "on every address of it: --address sets another one"
    if options.network == "host":
        yield ["--network", "host"], f"Ports {', '.join(map(str, ports))} are the machine's own, {where}."
        return
    yield ["--network", options.network], "As asked for with --network."
    address = f"[{options.address}]" if ":" in (options.address or "") else options.address
    prefix = f"{address}:" if address else ""
    published = [word for port in ports for word in ("--publish", f"{prefix}{port}:{port}")]
    yield published, f"HTTP, gRPC and metrics of the machine, {where}."


def _mounts(facts: LaunchFacts, options: LaunchOptions, image: str) -> Iterator[Part]:
    folder = str(facts.folder)
    yield ["--mount", bind(folder, folder)], "The repository, at the same path as here."
    for place, source in facts.mounts.items():
        yield ["--mount", bind(source, place)], "The checkpoint, where model.yaml names it."
    if facts.serving and facts.serving.names:
        hub = facts.serving.hub_cache
        yield (
            ["--mount", bind(hub, hub, writable=True), "--env", f"HF_HUB_CACHE={hub}"],
            f"{' and '.join(facts.serving.names)}: a name of the Hugging Face hub, looked for in this cache and "
            "downloaded into it.",
        )
        if os.environ.get("HF_TOKEN"):
            yield ["--env", "HF_TOKEN"], "For the download; its value is taken from the environment here."
    kept = str(kernel_folder(facts, options))
    yield (
        ["--mount", bind(kept, kernel_caches.MOUNTED_AT, writable=True)],
        f"Kernels that are compiled while it runs stay, so that the next start of {one_line(image)} does not compile "
        "them again.",
    )
    if options.ready_file:
        parent = os.path.dirname(os.path.abspath(options.ready_file))
        yield ["--mount", bind(parent, parent, writable=True)], "For --ready-file."


def _environment(facts: LaunchFacts, options: LaunchOptions) -> Iterator[Part]:
    caches = [word for pair in kernel_caches.environment().items() for word in ("--env", "=".join(pair))]
    yield caches, "DeepGEMM's (two of them), FlashInfer's, Triton's, PyTorch's and the driver's kernels."
    # In a network of its own it listens everywhere, and docker where it is asked to.
    inside = options if options.network == "host" else dataclasses.replace(options, address=None)
    server = script.server_environment(inside)
    yield (
        [word for pair in server.items() for word in ("--env", "=".join(pair))],
        "start.sh's variables.",
    )


def _image_why(facts: LaunchFacts, options: LaunchOptions) -> str:
    if options.image:
        return f"As asked for with --image; the repository was made for {facts.image or 'no container'}."
    return f"What the repository was made for: it has TensorRT-LLM {facts.release}."


def kernel_folder(facts: LaunchFacts, options: LaunchOptions) -> Path:
    return kernel_caches.cache_folder(options.image or facts.image or "", facts.gpu, options.cache_dir)


def made_folders(facts: LaunchFacts, options: LaunchOptions) -> list[str]:
    """What is mounted and need not be there yet."""
    made = [str(kernel_folder(facts, options))]
    if facts.serving and facts.serving.names:
        made.append(facts.serving.hub_cache)
    if options.ready_file:
        made.append(os.path.dirname(os.path.abspath(options.ready_file)))
    return made


def bind(source: str, target: str, *, writable: bool = False) -> str:
    """The value of --mount, a line of CSV: unlike --volume's, it holds any path."""
    line = io.StringIO()
    fields = ["type=bind", f"source={source}", f"target={target}", *([] if writable else ["readonly"])]
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()
