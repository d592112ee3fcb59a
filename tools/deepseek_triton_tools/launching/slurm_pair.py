"""`launch slurm` for a pair: one job, in which every server has nodes of its own.

A supervisor watches tritonserver on its own machine, so each runs on the first node of its server, as a step that
overlaps with that of the ranks.

Sides that use different numbers of GPUs on a node are components of a heterogeneous job, so that each asks for nodes of
its own kind. Slurm's page on heterogeneous jobs says: only the backfill scheduler starts them, and a step runs in the
first component unless --het-group names another.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from deepseek_triton_build.text import for_comment
from deepseek_triton_tools.launching import containers, slurm
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.launching.launched_pair import LaunchedPair, PairSide
from deepseek_triton_tools.launching.start_script import LAUNCH_TAG, filled, server_environment

_NODES, _FIRST_NODE, _TAG, _NTH_NODE, _NTH_WHERE = "@NODES@", "@FIRST@", "@TAG@", "@NTH@", "@WHERE@"
_VARIABLES = {
    _NODES: '"$1"',
    _FIRST_NODE: '"${1%%,*}"',
    _TAG: '"$2"',
    _NTH_NODE: '"${nodes_of[n]%%,*}"',
    _NTH_WHERE: "${where_of[n]}",  # without quotes, because it may be several options, or none
}
"""Placeholder, which shlex leaves as it is -> what the shell puts there."""


def refusals(pair: LaunchedPair, options: LaunchOptions) -> Iterator[str]:
    yield from pair.refusals()
    if options.ready_file:
        yield "--ready-file: a pair has several servers, and one file can't tell which are ready: ask them over HTTP"
    if options.address:
        yield "--address: the servers are on several nodes, and no address belongs to all of them: leave it out"
    for side in pair.sides:
        yield from slurm.refusals(side.facts, options)


def render(pair: LaunchedPair, options: LaunchOptions) -> str:
    for side in pair.sides:
        slurm.ask_start_script(side.facts, options)
    variables = server_environment(options)
    for side in pair.sides:
        variables |= slurm.container_variables(side.facts, options)
    components = _components(pair)
    values = slurm.common_values(options) | {
        "source": for_comment(pair.source),
        "what": for_comment(pair.what),
        "directives": "\n#SBATCH hetjob\n".join(_directives(pair, sides, options) for sides in components),
        "memory_why": slurm.memory_why(pair.generation.facts),
        "python": for_comment(options.python),
        "exports": slurm.exports(variables),
        "num_nodes": str(pair.num_nodes),
        "node_lists": _node_lists(len(components)),
        "prepare": "".join(f"{line}\n" for line in _prepare(pair, options)),
        "context": _function_body(pair, pair.context, options),
        "generation": _function_body(pair, pair.generation, options),
        "starts": "\n".join(
            f"for ((n = 0; n < {side.count}; n++)); do "
            f"start {side.role} {side.facts.nodes} {option} {shlex.quote(' '.join(_where(pair, side, options)))}; done"
            for side, option in ((pair.context, "--context-server"), (pair.generation, "--server"))
        ),
        "stop": _with_variables(
            shlex.join([*_one_task(_NTH_NODE, [_NTH_WHERE]), *slurm.stop_command(pair.context.facts, options)])
        ),
        "model": shlex.quote(pair.context.facts.model),
    }
    return filled("slurm-pair.sh", values)


def _components(pair: LaunchedPair) -> list[tuple[PairSide, ...]]:
    """Return the sides of each component of the job: one component, unless the sides' nodes differ."""
    per_node = {(side.facts.ranks_per_node, side.facts.gpus_per_node) for side in pair.sides}
    return [pair.sides] if len(per_node) == 1 else [(side,) for side in pair.sides]


def _directives(pair: LaunchedPair, sides: Sequence[PairSide], options: LaunchOptions) -> str:
    return slurm.directives(
        options,
        pair.folder,
        nodes=sum(side.num_nodes for side in sides),
        ranks=sides[0].facts.ranks_per_node,
        gpus=sides[0].facts.gpus_per_node,
    )


def _node_lists(num_components: int) -> str:
    """Return the shell's words for the nodes of the job, those of the context servers first."""
    if num_components == 1:
        return '"$SLURM_JOB_NODELIST"'
    return " ".join(f'"$SLURM_JOB_NODELIST_HET_GROUP_{n}"' for n in range(num_components))


def _where(pair: LaunchedPair, side: PairSide, options: LaunchOptions) -> list[str]:
    """Return srun's options for a step on nodes of the side. A step would ask for the GPUs of the first component."""
    components = _components(pair)
    if len(components) == 1:
        return []
    gpus = slurm.gpus_option(options, side.facts.gpus_per_node)
    return [f"--het-group={components.index((side,))}", *([gpus] if gpus else [])]


def _prepare(pair: LaunchedPair, options: LaunchOptions) -> Iterator[str]:
    if not options.container:
        return
    for sides in _components(pair):
        folders = [folder for side in sides for folder in containers.created_folders(side.facts, options)]
        where = _where(pair, sides[0], options)
        yield from slurm.make_folders(sum(side.num_nodes for side in sides), dict.fromkeys(folders), where)


def _function_body(pair: LaunchedPair, side: PairSide, options: LaunchOptions) -> str:
    """Return the command that starts a server of the side, which replaces the function's shell."""
    facts, where = side.facts, _where(pair, side, options)
    tagged = ["env", f"{LAUNCH_TAG}={_TAG}"]
    step = ["srun", *where, f"--nodelist={_NODES}", f"--ntasks-per-node={facts.ranks_per_node}"]
    ranks, command = slurm.srun_options(facts, options), [str(facts.start_script), *options.server_args]
    if facts.world_size == 1:  # start.sh runs the supervisor
        rows = [step, *ranks, [*tagged, *command]]
    else:
        supervisor = slurm.supervisor(facts, options)
        rows = [_one_task(_FIRST_NODE, where), tagged, *supervisor, ["--hosts", _NODES, "--", *step], *ranks, command]
    return "  exec " + _with_variables(" \\\n    ".join(map(shlex.join, rows)))


def _one_task(node: str, where: Iterable[str]) -> list[str]:
    """Return the srun of one process on a node whose cores and GPUs a step of ranks may have already."""
    one = ["srun", "--overlap", *where, f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1"]
    return [*one, "--mpi=none", "--cpu-bind=none", "--export=ALL"]


def _with_variables(text: str) -> str:
    for placeholder, variable in _VARIABLES.items():
        text = text.replace(placeholder, variable)
    return text
