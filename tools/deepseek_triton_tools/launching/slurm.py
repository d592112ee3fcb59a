"""`launch slurm`: a batch script, whose first process on the first node is the supervisor, with srun below it.

By the manual pages of Slurm 22.05: srun hands the signals it gets to its tasks (srun(1), SIGNALS AND ESCAPE SEQUENCES);
--signal=B: signals the batch script alone, which the supervisor has taken the place of (sbatch(1)); scancel without
--batch signals the steps, and kills them KillWait seconds later (scancel(1)).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator

from deepseek_triton_build.render.yaml_text import comment, one_line
from deepseek_triton_build.text import plain
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.launching import docker, kernel_caches, script
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.repository.launch_facts import LaunchFacts

_PLAIN = re.compile(r"[\w./:@%+=,\[\]~-]+", re.ASCII)
"""What a line of #SBATCH holds without quotes, which it reads in a way of its own."""
_MOUNTABLE = re.compile(r"[^\s,:]+")
"""Pyxis takes no others in --container-mounts (NVIDIA/pyxis#133)."""


def problems(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    directives = {
        "--partition": options.partition,
        "--account": options.account,
        "--time": options.time,
        "--job-name": options.name,
        "--log": options.log,
        "--slurm-mpi": options.slurm_mpi,
    }
    for option, value in directives.items():
        if value is not None and not _PLAIN.fullmatch(value):
            yield f"{option}: a line of #SBATCH takes no blanks or quotes, got {plain(value)}"
    for text in options.sbatch:
        if not text.startswith("-") or not text.isprintable():
            yield f"--sbatch: expected an option of sbatch, as in --sbatch=--qos=high, got {plain(text)}"
    if options.gpus and options.gpus != "none" and not options.gpus.isdecimal():
        yield f"--gpus: expected a number of each node, or none, got {plain(options.gpus)}"
    elif options.gpus and options.gpus != "none":
        yield from docker.too_few(facts, int(options.gpus))
    if options.container:
        yield from _container_problems(facts, options)
    elif options.image or options.cache_dir:
        yield "--image and --cache-dir are for a container, and --no-container does without"


def _container_problems(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    if not (options.image or facts.image):
        yield (
            f"the {facts.engine} engine was planned for no container: --image names one that has tritonserver and the "
            "engine's packages, --no-container does without"
        )
    places = [source for _, source in facts.mounts.items()] + list(facts.mounts)
    for path in dict.fromkeys([str(facts.folder), *places, *docker.made_folders(facts, options)]):
        if not _MOUNTABLE.fullmatch(path):
            yield f"{plain(path)}: pyxis mounts no path with a blank, a comma or a colon (NVIDIA/pyxis#133)"


def render(facts: LaunchFacts, options: LaunchOptions) -> str:
    """
    :raises ToolError: when start.sh refuses.
    """
    environment = script.server_environment(options)
    script.resolved(facts, environment | {"SLURM_STEP_NUM_TASKS": str(facts.world_size)}, options.server_args)
    values = {
        "version": __version__,
        "source": one_line(facts.source),
        "directives": "\n".join(f"#SBATCH {line}" for line in _directives(facts, options)),
        "grace_s": str(options.stop_times.docker_stop_timeout_s),
        "exit_timeout_s": str(options.exit_timeout),
        "kill_s": str(options.stop_times.supervisor_kill_s),
        "memory_why": _memory_why(facts),
        "port": str(options.http_port),
        "exports": _exports(environment | _in_container(facts, options)),
        "prepare": "".join(f"{line}\n" for line in _prepare(facts, options)),
        "supervision": "\n".join(_supervision(facts, options)),
        "command": _command(facts, options),
    }
    return script.filled("slurm.sh", values)


def job_name(facts: LaunchFacts, options: LaunchOptions) -> str:
    return options.name or re.sub(r"[^\w.-]+", "-", facts.folder.name, flags=re.ASCII).strip("-") or "deepseek-triton"


def _directives(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    name = job_name(facts, options)
    yield f"--job-name={name}"
    yield f"--nodes={facts.nodes}"
    yield f"--ntasks-per-node={facts.ranks_per_node}"
    gpus = options.gpus or str(facts.gpus_per_node)
    if gpus not in ("none", "0"):
        yield f"--gpus-per-node={gpus}"
        yield "--exclusive"
        yield "--mem=0"
    for option in ("partition", "account", "time"):
        if value := getattr(options, option):
            yield f"--{option}={value}"
    yield f"--output={options.log or f'{name}-%j.log'}"
    yield "--open-mode=append"
    yield f"--signal=B:TERM@{options.stop_times.docker_stop_timeout_s}"
    yield "--requeue" if options.requeue else "--no-requeue"
    yield from options.sbatch


def _memory_why(facts: LaunchFacts) -> str:
    if not facts.gpus_per_node:
        return "This engine needs no GPU."
    size = f"{facts.serving.size:,} bytes" if facts.serving else "weights"
    return (
        "--exclusive and --mem=0: all of a node, for its page cache counts as the job's memory, and each node reads "
        f"the whole checkpoint ({size})."
    )


def _in_container(facts: LaunchFacts, options: LaunchOptions) -> dict[str, str]:
    """Where things are in the container."""
    if not options.container:
        return {}
    hub = {"HF_HUB_CACHE": facts.serving.hub_cache} if facts.serving and facts.serving.names else {}
    return kernel_caches.environment() | hub


def _exports(environment: dict[str, str]) -> str:
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment.items())


def _prepare(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    """What has to be there on every node before its container is started."""
    if options.container:
        yield from comment("What is mounted has to be there; compiled kernels stay, for this image and this GPU alone.")
        command = ["srun", f"--nodes={facts.nodes}", "--ntasks-per-node=1", f"--ntasks={facts.nodes}"]
        yield script.words([*command, "mkdir", "-p", "--", *docker.made_folders(facts, options)])
        yield ""


def _supervision(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    if facts.world_size == 1:
        yield "# Every node has the repository and the checkpoint at the same path. start.sh has the supervisor."
        return
    yield from comment(
        f"Every node has the repository and the checkpoint at the same path; the first has {one_line(options.python)}, "
        "3.10 or newer, for the supervisor."
    )


def _command(facts: LaunchFacts, options: LaunchOptions) -> str:
    """One rank's start.sh has a supervisor of its own; several have one in common, in front of srun."""
    rows = [[str(facts.start_script), *options.server_args]]
    if options.container or facts.world_size > 1:
        rows = [["srun"], *_srun(facts, options), *rows]
    if facts.world_size == 1:
        return _continued(rows)
    supervisor = [[options.python, str(facts.supervisor), "run"], *_run(facts, options)]
    return f'{_continued(supervisor)} ${{hosts:+--hosts "$hosts"}} \\\n  -- {_continued(rows)}'


def _run(facts: LaunchFacts, options: LaunchOptions) -> Iterator[list[str]]:
    """The supervisor's options: the ones that start.sh gives it elsewhere."""
    yield ["--repository", str(facts.folder)]
    yield ["--ranks", str(facts.world_size), "--ranks-per-node", str(facts.ranks_per_node)]
    yield ["--http-port", str(options.http_port), "--grpc-port", str(options.grpc_port)]
    yield ["--metrics-port", str(options.metrics_port)]
    within = facts.ready_within_s if options.ready_within is None else options.ready_within
    yield ["--ready-within", str(within), "--exit-timeout", str(options.exit_timeout)]
    said = script.server_environment(options)
    for option in ("--max-restarts", "--ready-file", "--http-address"):
        variable = option.strip("-").replace("-", "_").upper()
        if variable in said:
            yield [option, said[variable]]


def _srun(facts: LaunchFacts, options: LaunchOptions) -> Iterator[list[str]]:
    yield ["--label", "--kill-on-bad-exit=1", f"--mpi={options.slurm_mpi}", "--export=ALL"]
    yield [f"--nodes={facts.nodes}", f"--ntasks={facts.world_size}", "--cpu-bind=none"]
    if options.container:
        yield [f"--container-image={enroot_image(options.image or facts.image or '')}", "--no-container-mount-home"]
        yield [f"--container-mounts={','.join(_mounts(facts, options))}"]
        if options.environment:  # of a name that the image sets as well, pyxis takes the image's value otherwise
            yield [f"--container-env={','.join(dict(options.environment))}"]


def _mounts(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
    yield f"{facts.folder}:{facts.folder}:ro"
    for place, source in facts.mounts.items():
        yield f"{source}:{place}:ro"
    if facts.serving and facts.serving.names:
        yield f"{facts.serving.hub_cache}:{facts.serving.hub_cache}"
    yield f"{docker.kernel_folder(facts, options)}:{kernel_caches.MOUNTED_AT}"
    if options.ready_file:
        parent = script.server_environment(options)["READY_FILE"].rpartition("/")[0]
        yield f"{parent}:{parent}"


def enroot_image(image: str) -> str:
    """As pyxis has it: [USER@][REGISTRY#]IMAGE[:TAG], or a squashfs file."""
    registry, slash, rest = image.partition("/")
    if "#" in image or image.startswith((".", "/")) or not slash or not set(".:") & set(registry):
        return image
    return f"{registry}#{rest}"


def _continued(rows: Iterable[list[str]]) -> str:
    return " \\\n  ".join(map(script.words, rows))
