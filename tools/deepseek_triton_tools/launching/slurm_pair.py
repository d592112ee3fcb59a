"""`launch slurm` for a pair: one job, in which every server has nodes of its own.

A supervisor watches tritonserver on its own machine, so each runs on the first node of its server, as a step that
overlaps with that of the ranks.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from deepseek_triton_build.text import for_comment
from deepseek_triton_tools.launching import containers, slurm
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.launching.launched_pair import LaunchedPair, PairSide
from deepseek_triton_tools.launching.start_script import LAUNCH_TAG, filled, server_environment

_NODES, _FIRST_NODE, _TAG, _NTH_NODE = "@NODES@", "@FIRST@", "@TAG@", "@NTH@"
_VARIABLES = {_NODES: '"$1"', _FIRST_NODE: '"${1%%,*}"', _TAG: '"$2"', _NTH_NODE: '"${nodes_of[n]%%,*}"'}
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
    facts = [side.facts for side in pair.sides]
    variables = server_environment(options)
    for side in pair.sides:
        variables |= slurm.container_variables(side.facts, options)
    values = slurm.common_values(options) | {
        "source": for_comment(pair.source),
        "what": for_comment(pair.what),
        "directives": slurm.directives(
            options,
            pair.folder,
            nodes=pair.num_nodes,
            ranks=max(one.ranks_per_node for one in facts),
            gpus=max(one.gpus_per_node for one in facts),
        ),
        "memory_why": slurm.memory_why(pair.generation.facts),
        "python": for_comment(options.python),
        "exports": slurm.exports(variables),
        "num_nodes": str(pair.num_nodes),
        "prepare": "".join(f"{line}\n" for line in _prepare(pair, options)),
        "context": _function_body(pair.context, options),
        "generation": _function_body(pair.generation, options),
        "starts": "\n".join(
            f"for ((n = 0; n < {side.count}; n++)); do start {side.role} {side.facts.nodes} {option}; done"
            for side, option in ((pair.context, "--context-server"), (pair.generation, "--server"))
        ),
        "stop": _stop(pair, options),
        "model": shlex.quote(pair.context.facts.model),
    }
    return filled("slurm-pair.sh", values)


def _prepare(pair: LaunchedPair, options: LaunchOptions) -> Iterator[str]:
    if options.container:
        folders = [folder for side in pair.sides for folder in containers.created_folders(side.facts, options)]
        yield from slurm.make_folders(pair.num_nodes, dict.fromkeys(folders))


def _function_body(side: PairSide, options: LaunchOptions) -> str:
    """Return the command that starts a server of the side, which replaces the function's shell."""
    facts = side.facts
    tagged = ["env", f"{LAUNCH_TAG}={_TAG}"]
    where = ["srun", f"--nodelist={_NODES}", f"--ntasks-per-node={facts.ranks_per_node}"]
    ranks, command = slurm.srun_options(facts, options), [str(facts.start_script), *options.server_args]
    if facts.world_size == 1:  # start.sh runs the supervisor
        rows = [where, *ranks, [*tagged, *command]]
    else:
        supervisor = slurm.supervisor(facts, options)
        rows = [_one_task(_FIRST_NODE), tagged, *supervisor, ["--hosts", _NODES, "--", *where], *ranks, command]
    return "  exec " + _with_variables(" \\\n    ".join(map(shlex.join, rows)))


def _stop(pair: LaunchedPair, options: LaunchOptions) -> str:
    """Return the command that stops the n-th server, up to its tag."""
    supervisor = [options.python, str(pair.context.facts.supervisor), "stop"]
    return _with_variables(shlex.join([*_one_task(_NTH_NODE), *supervisor]))


def _one_task(node: str) -> list[str]:
    """Return the srun of one process on a node whose cores and GPUs a step of ranks may have already."""
    one = ["srun", "--overlap", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1"]
    return [*one, "--mpi=none", "--cpu-bind=none", "--export=ALL"]


def _with_variables(text: str) -> str:
    for placeholder, variable in _VARIABLES.items():
        text = text.replace(placeholder, variable)
    return text
