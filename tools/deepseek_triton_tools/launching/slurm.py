"""`launch slurm`: templates/slurm.sh filled in, a batch script that becomes the supervisor, with srun below it.

In a container, start.sh of a single rank runs the supervisor below srun, and the script tells it when to stop.

The manual pages of Slurm 22.05 say: srun passes the signals it gets to its tasks (srun(1), SIGNALS AND ESCAPE
SEQUENCES). SIGTERM is an exception: 22.05.8 says "forcing job termination" and kills them. --signal=B: signals only the
batch script (sbatch(1)), whose process is the supervisor by then. scancel without --batch signals the steps, and kills
them KillWait seconds later (scancel(1)).

A pair is one job, in which every server has nodes of its own. A supervisor watches tritonserver on its own machine, so
each runs on the first node of its server, as a step that overlaps with that of the ranks. Sides that use different
numbers of GPUs on a node are components of a heterogeneous job, so that each asks for nodes of its own kind. Slurm's
page on heterogeneous jobs says: only the backfill scheduler starts them, and a step runs in the first component unless
--het-group names another.
"""

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from deepseek_triton_build.text import enroot_image, for_comment, safe_name
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.launching import containers, start_script
from deepseek_triton_tools.launching.launch_settings import LaunchedPair, LaunchOptions, PairSide
from deepseek_triton_tools.repository.launch_facts import LaunchFacts

# Values that need no quotes on a line of #SBATCH, which has its own rules for quotes.
_PLAIN = re.compile(r"[\w./:@%+=,\[\]~-]+", re.ASCII)
# Seconds after the end of tritonserver in which vLLM's other nodes are left alone.
_NODES_END_S = 10
# Folder that enroot shares with its containers, unlike /tmp (NVIDIA/enroot conf/mounts/10-system.fstab).
_SHARED_FOLDER = "/dev/shm"
# Paths that pyxis takes in --container-mounts (NVIDIA/pyxis#133).
_MOUNTABLE = re.compile(r"[^\s,:]+")


def refusals(facts: LaunchFacts, options: LaunchOptions) -> Iterator[str]:
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
            yield f"{option}: a line of #SBATCH takes no blanks or quotes, got {safe_name(value)}"
    for text in options.sbatch:
        if not text.startswith("-") or not text.isprintable():
            yield f"--sbatch: expected an option of sbatch, as in --sbatch=--qos=high, got {safe_name(text)}"
    if options.gpus and options.gpus != "none" and not options.gpus.isdecimal():
        yield f"--gpus: expected a number for each node, or none, got {safe_name(options.gpus)}"
    elif options.gpus and options.gpus != "none":
        yield from containers.too_few_gpus(facts, int(options.gpus))
    if options.container:
        if not containers.image_of(facts, options):
            yield f"{containers.no_image(facts)}, or use --no-container"
        paths = [str(facts.folder), *facts.mounts.values(), *facts.mounts]
        for path in dict.fromkeys([*paths, *containers.created_folders(facts, options)]):
            if not _MOUNTABLE.fullmatch(path):
                yield f"{safe_name(path)}: pyxis mounts no path with a blank, a comma or a colon (NVIDIA/pyxis#133)"
    elif options.image or options.cache_dir:
        yield "--image and --cache-dir are for a container, and --no-container uses none: leave one of them out"


def render(facts: LaunchFacts, options: LaunchOptions) -> str:
    ask_start_script(facts, options)
    waits, start = _waits(facts, options), shlex.join([str(facts.start_script), *options.server_args])
    folders = containers.created_folders(facts, options) if options.container else []
    values = common_values(options) | {
        "source": for_comment(facts.source),
        "directives": directives(
            options, facts.folder, nodes=facts.nodes, ranks=facts.ranks_per_node, gpus=facts.gpus_per_node
        ),
        "memory_why": memory_why(facts),
        "becomes": "" if waits else ", and by then that process is the supervisor",
        "exports": start_script.exports(script_variables(options, facts)),
        "python": for_comment(options.python),
        "python_why": "to tell the supervisor in the container when to stop" if waits else "for the supervisor",
        "needs_master": start_script.needs_master(facts),
        "master": start_script.MASTER,
        "folders": [make_folders(facts.nodes, folders)] if folders else [],
        # start.sh of a single rank runs its own supervisor; several ranks share one, which runs srun.
        "several_ranks": facts.world_size > 1,
        "starts_alone": facts.world_size == 1 and not waits,
        "waits": waits,
        "supervisor": continued(supervisor(facts, options)),
        "ranks": continued([["srun"], *srun_options(facts, options), [str(facts.start_script), *options.server_args]]),
        "step": continued([["srun"], *srun_options(facts, options)]),
        "start": start,
        "stop": shlex.join([options.python, str(facts.supervisor), "stop"]),
    }
    return start_script.filled("slurm.sh", values)


def ask_start_script(facts: LaunchFacts, options: LaunchOptions) -> None:
    """:raises ToolError: when start.sh refuses."""
    in_step = start_script.server_environment(options) | {"SLURM_STEP_NUM_TASKS": str(facts.world_size)}
    if start_script.needs_master(facts):
        in_step |= start_script.FIRST_NODE
    start_script.dry_run(facts.start_script, in_step, options.server_args)


def common_values(options: LaunchOptions) -> dict[str, Any]:
    return {
        "version": __version__,
        "grace_s": str(options.stop_times.docker_stop_timeout_s),
        "exit_timeout_s": str(options.exit_timeout),
        "kill_s": str(options.stop_times.supervisor_kill_s),
        "port": str(options.http_port),
    }


def directives(options: LaunchOptions, folder: Path, *, nodes: int, ranks: int, gpus: int) -> list[str]:
    """Return the options of sbatch.

    :param ranks: of each node.
    :param gpus: of each node; 0 for engines that use none.
    """
    slug = re.sub(r"[^\w.-]+", "-", folder.name, flags=re.ASCII).strip("-")
    name = options.name or slug or "deepseek-triton"
    gpus_per_node = gpus_option(options, gpus)
    limits = {name: getattr(options, name) for name in ("partition", "account", "time")}
    return [
        f"--job-name={name}",
        f"--nodes={nodes}",
        f"--ntasks-per-node={ranks}",
        *([gpus_per_node, "--exclusive", "--mem=0"] if gpus_per_node else []),
        *(f"--{option}={value}" for option, value in limits.items() if value),
        f"--output={options.log or f'{name}-%j.log'}",
        "--open-mode=append",
        f"--signal=B:TERM@{options.stop_times.docker_stop_timeout_s}",
        "--requeue" if options.requeue else "--no-requeue",
        *options.sbatch,
    ]


def gpus_option(options: LaunchOptions, gpus_per_node: int) -> str:
    """Return the option for a node's GPUs; empty without any."""
    gpus = options.gpus or str(gpus_per_node)
    return "" if gpus in ("none", "0") else f"--gpus-per-node={gpus}"


def memory_why(facts: LaunchFacts) -> str:
    if not facts.gpus_per_node:
        return "This engine needs no GPU."
    size = f"{facts.serving.size:,} bytes" if facts.serving else "weights"
    return (
        "--exclusive and --mem=0 take all of a node: its page cache counts as the job's memory, and each node reads "
        f"the whole checkpoint ({size})."
    )


def script_variables(options: LaunchOptions, *servers: LaunchFacts) -> dict[str, str]:
    """Return what the batch script sets; for a container, where things are in it too, where --env doesn't say it."""
    hubs = [facts.serving.hub_cache for facts in servers if facts.serving and facts.serving.names]
    places = containers.kernel_environment() | ({"HF_HUB_CACHE": hubs[-1]} if hubs else {}) if options.container else {}
    # The supervisor's record is there. Outside of the container, `supervise.py stop` has to find it.
    record = {"XDG_RUNTIME_DIR": _SHARED_FOLDER} if any(_waits(facts, options) for facts in servers) else {}
    return places | start_script.server_environment(options) | record


def make_folders(nodes: int, folders: Iterable[str], where: Iterable[str] = ()) -> str:
    """Return the command that makes the folders on every node.

    :param where: further options of srun.
    """
    command = ["srun", *where, f"--nodes={nodes}", "--ntasks-per-node=1", f"--ntasks={nodes}"]
    return shlex.join([*command, "mkdir", "-p", "--", *folders])


def _waits(facts: LaunchFacts, options: LaunchOptions) -> bool:
    """Whether the batch script waits for srun, below which the supervisor runs, instead of becoming the supervisor."""
    return facts.world_size == 1 and options.container


def supervisor(facts: LaunchFacts, options: LaunchOptions) -> Iterator[list[str]]:
    """Yield the rows of the supervisor's command. In other forms start.sh gives its options."""
    yield [options.python, str(facts.supervisor), "run"]
    yield ["--repository", str(facts.folder)]
    yield ["--ranks", str(facts.world_size), "--ranks-per-node", str(facts.ranks_per_node)]
    yield ["--http-port", str(options.http_port), "--grpc-port", str(options.grpc_port)]
    yield ["--metrics-port", str(options.metrics_port)]
    within = facts.ready_within_s if options.ready_within is None else options.ready_within
    yield ["--ready-within", str(within), "--exit-timeout", str(options.exit_timeout)]
    variables = start_script.server_environment(options)
    for option in ("--max-restarts", "--ready-file", "--http-address"):
        variable = option.strip("-").replace("-", "_").upper()
        if variable in variables:
            yield [option, variables[variable]]


def srun_options(facts: LaunchFacts, options: LaunchOptions) -> Iterator[list[str]]:
    yield ["--label", "--kill-on-bad-exit=1", f"--mpi={options.slurm_mpi}", "--export=ALL"]
    if start_script.needs_master(facts):  # the other nodes of vLLM don't end by themselves
        yield [f"--wait={_NODES_END_S}"]
    yield [f"--nodes={facts.nodes}", f"--ntasks={facts.world_size}", "--cpu-bind=none"]
    if options.container:
        yield [f"--container-image={enroot_image(containers.image_of(facts, options))}", "--no-container-mount-home"]
        mounts = [f"{facts.folder}:{facts.folder}:ro"]
        mounts += [f"{source}:{place}:ro" for place, source in facts.mounts.items()]
        if facts.serving and facts.serving.names:
            mounts.append(f"{facts.serving.hub_cache}:{facts.serving.hub_cache}")
        mounts.append(f"{containers.kernel_folder(facts, options)}:{containers.KERNELS_MOUNT}")
        if options.ready_file:
            parent = start_script.server_environment(options)["READY_FILE"].rpartition("/")[0]
            mounts.append(f"{parent}:{parent}")
        yield [f"--container-mounts={','.join(mounts)}"]
        if options.environment:  # without this pyxis prefers the image's value of a variable that the image sets too
            yield [f"--container-env={','.join(dict(options.environment))}"]


def continued(rows: Iterable[list[str]]) -> str:
    return " \\\n  ".join(map(shlex.join, rows))


_NODES, _FIRST_NODE, _TAG, _NTH_NODE, _NTH_WHERE = "@NODES@", "@FIRST@", "@TAG@", "@NTH@", "@WHERE@"
# Placeholder, which shlex leaves as it is -> what the shell puts there.
_VARIABLES = {
    _NODES: '"$1"',
    _FIRST_NODE: '"${1%%,*}"',
    _TAG: '"$2"',
    _NTH_NODE: '"${nodes_of[n]%%,*}"',
    _NTH_WHERE: "${where_of[n]}",  # without quotes, because it may be several options, or none
}


def pair_refusals(pair: LaunchedPair, options: LaunchOptions) -> Iterator[str]:
    yield from pair.refusals()
    if options.ready_file:
        yield "--ready-file: a pair has several servers, and one file can't tell which are ready: ask them over HTTP"
    if options.address:
        yield "--address: the servers are on several nodes, and no address belongs to all of them: leave it out"
    for side in pair.sides:
        yield from refusals(side.facts, options)


def render_pair(pair: LaunchedPair, options: LaunchOptions) -> str:
    for side in pair.sides:
        ask_start_script(side.facts, options)
    variables = script_variables(options, *(side.facts for side in pair.sides))
    components = _components(pair)
    requests = [
        directives(
            options,
            pair.folder,
            nodes=sum(side.num_nodes for side in sides),
            ranks=sides[0].facts.ranks_per_node,
            gpus=sides[0].facts.gpus_per_node,
        )
        for sides in components
    ]
    folders = []
    for sides in components if options.container else ():
        names = dict.fromkeys(name for side in sides for name in containers.created_folders(side.facts, options))
        where = _where(pair, sides[0], options)
        folders.append(make_folders(sum(side.num_nodes for side in sides), names, where))
    # Of several components each has a list of its own; the nodes of the context servers come first.
    groups = [f"_HET_GROUP_{n}" for n in range(len(components))] if len(components) > 1 else [""]
    stop = [options.python, str(pair.context.facts.supervisor), "stop"]
    values = common_values(options) | {
        "source": for_comment(pair.source),
        "what": for_comment(pair.what),
        "directives": [line for component in requests for line in ("hetjob", *component)][1:],
        "memory_why": memory_why(pair.generation.facts),
        "python": for_comment(options.python),
        "exports": start_script.exports(variables),
        "num_nodes": str(pair.num_nodes),
        "node_lists": " ".join(f'"$SLURM_JOB_NODELIST{group}"' for group in groups),
        "folders": folders,
        "context": _function_body(pair, pair.context, options),
        "generation": _function_body(pair, pair.generation, options),
        "counts": [side.count for side in pair.sides],
        "starts": [
            f"{side.role} {side.facts.nodes} {option} {shlex.quote(' '.join(_where(pair, side, options)))}"
            for side, option in ((pair.context, "--context-server"), (pair.generation, "--server"))
        ],
        "stop": _with_variables(shlex.join([*_one_task(_NTH_NODE, [_NTH_WHERE]), *stop])),
        "model": shlex.quote(pair.context.facts.model),
    }
    return start_script.filled("slurm-pair.sh", values)


def _components(pair: LaunchedPair) -> list[tuple[PairSide, ...]]:
    """Return the sides of each component of the job: one component, unless the sides' nodes differ."""
    per_node = {(side.facts.ranks_per_node, side.facts.gpus_per_node) for side in pair.sides}
    return [pair.sides] if len(per_node) == 1 else [(side,) for side in pair.sides]


def _where(pair: LaunchedPair, side: PairSide, options: LaunchOptions) -> list[str]:
    """Return srun's options for a step on nodes of the side. A step would ask for the GPUs of the first component."""
    components = _components(pair)
    if len(components) == 1:
        return []
    gpus = gpus_option(options, side.facts.gpus_per_node)
    return [f"--het-group={components.index((side,))}", *([gpus] if gpus else [])]


def _function_body(pair: LaunchedPair, side: PairSide, options: LaunchOptions) -> str:
    """Return the command that starts a server of the side, which replaces the function's shell."""
    facts, where = side.facts, _where(pair, side, options)
    tagged = ["env", f"{start_script.LAUNCH_TAG}={_TAG}"]
    step = ["srun", *where, f"--nodelist={_NODES}", f"--ntasks-per-node={facts.ranks_per_node}"]
    ranks, command = srun_options(facts, options), [str(facts.start_script), *options.server_args]
    if facts.world_size == 1:  # start.sh runs the supervisor
        rows = [step, *ranks, [*tagged, *command]]
    else:
        run = supervisor(facts, options)
        rows = [_one_task(_FIRST_NODE, where), tagged, *run, ["--hosts", _NODES, "--", *step], *ranks, command]
    return "  exec " + _with_variables(" \\\n    ".join(map(shlex.join, rows)))


def _one_task(node: str, where: Iterable[str]) -> list[str]:
    """Return the srun of one process on a node whose cores and GPUs a step of ranks may have already."""
    one = ["srun", "--overlap", *where, f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1"]
    return [*one, "--mpi=none", "--cpu-bind=none", "--export=ALL"]


def _with_variables(text: str) -> str:
    for placeholder, variable in _VARIABLES.items():
        text = text.replace(placeholder, variable)
    return text
