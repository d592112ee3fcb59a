"""Pieces of the shell scripts: what they export, where their ranks run, and the command itself."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from deepseek_triton_build.data.planned_settings import EnvironmentVariable
from deepseek_triton_build.planning.plan import Plan
from deepseek_triton_build.render.yaml_text import comment

HERE = '"$(CDPATH="" cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)"'
"""The folder the script lies in, also where a link leads to the script, and CDPATH would lead elsewhere."""

_FORWARDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "HF_HOME", "HF_TOKEN")
"""Variables that the ranks of other nodes need besides the plan's own."""
_FORWARDED_PREFIXES = ("NCCL_", "UCX_", "GLOO_")
"""What the network between nodes is tuned by; every variable of such a name goes along."""


def script(stamp: str, about: Iterable[str], *parts: Iterable[str]) -> str:
    """A whole script: what it is for, then its parts, a blank line before each."""
    lines = ["#!/usr/bin/env bash", f"# {stamp}"]
    for paragraph in about:
        lines += comment(paragraph)
    lines.append("set -euo pipefail")
    for part in map(list, parts):
        lines += ["", *part] if part else []
    return "\n".join(lines) + "\n"


def exports(environment: Iterable[EnvironmentVariable]) -> list[str]:
    """The plan's variables; what the user has set stays."""
    lines = []
    for variable in environment:
        lines += comment(variable.comment)
        lines.append(_export(variable.name, variable.value))
    return lines


def _export(name: str, value: str) -> str:
    if quoted(value) == value:
        return f'export {name}="${{{name}:-{value}}}"'
    return f'[[ -n "${{{name}:-}}" ]] || export {name}={quoted(value)}'  # no quote is safe inside "${...}"


def command(*groups: Sequence[str]) -> list[str]:
    """One command over several lines, a group of words on each. Words are shell text already."""
    return [" \\\n  ".join(" ".join(group) for group in groups if group)]


def quoted(value: Any) -> str:
    """`value` as one word of a command."""
    return shlex.quote(str(value))


def refusing(name: str) -> list[str]:
    """Defines `refuse`, which says what is wrong; `refused` is set then.

    :param name: the script's, for its messages.
    """
    return ["refused=", "refuse() {", f'  echo "{name}: $1" >&2', "  refused=1", "}"]


END_IF_REFUSED = 'if [[ -n "$refused" ]]; then exit 2; fi'


def on_every_node(plan: Plan, name: str) -> list[str]:
    """Sets the array `ranks` to what starts one rank per GPU over the plan's nodes; nothing on one node.

    :param name: the script's, for its error message.
    """
    if plan.num_nodes == 1:
        return []
    return [
        *refusing(name),
        "",
        *interface(),
        "",
        *nodes_comment(plan, name),
        f"if {in_slurm_step(plan)}; then",
        "  ranks=()",
        "else",
        *indented(mpirun_lines(plan)),
        "fi",
        END_IF_REFUSED,
    ]


def in_slurm_step(plan: Plan) -> str:
    """The condition that Slurm has made the ranks, and that this is one of them."""
    return f'[[ "${{SLURM_STEP_NUM_TASKS:-}}" == {plan.world_size} ]]'


def nodes_comment(plan: Plan, name: str) -> list[str]:
    nodes, each, world = plan.num_nodes, plan.gpus_per_node, plan.world_size
    return comment(
        f"{world} GPUs are {nodes} nodes of {each}: HOSTS names them, separated by commas, this one first. Each has "
        "this folder and the checkpoint at the same path and takes ssh from the others without a password, at SSH_PORT "
        "when it is not 22; SSH_ARGS are further arguments of ssh. What is set here of NCCL_*, UCX_* and GLOO_* is set "
        "there too. Under Slurm this script is run by every rank instead, without HOSTS: "
        f"srun --mpi=pmix --nodes {nodes} --ntasks-per-node {each} ./{name}"
    )


def interface() -> list[str]:
    """Exports INTERFACE to NCCL and Gloo, and sets the array `interface` to mpirun's arguments for it."""
    return [
        *comment(
            "INTERFACE is the network interface by which the ranks see each other, where Open MPI, NCCL or Gloo takes "
            "a wrong one, such as a bridge of containers. What one of them was told by its own variable stays."
        ),
        "interface=()",
        'if [[ -n "${INTERFACE:-}" ]]; then',
        '  export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$INTERFACE}"',
        '  export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$INTERFACE}"',
        "  for parameter in btl_tcp_if_include oob_tcp_if_include; do",
        '    own="OMPI_MCA_$parameter"',
        '    if [[ -z "${!own:-}" ]]; then interface+=(-mca "$parameter" "$INTERFACE"); fi',
        "  done",
        "fi",
    ]


def mpirun_lines(plan: Plan, options: Sequence[str] = (), forwarded: Sequence[str] = ()) -> list[str]:
    """Sets `ranks` to mpirun with all its arguments. Needs `interface` and, on several nodes, `refuse`.

    trtllm-llmapi-launch asks Slurm's variables before mpirun's (NVIDIA/TensorRT-LLM
    tensorrt_llm/llmapi/trtllm-llmapi-launch@020c89e6).

    :param options: further words for mpirun.
    :param forwarded: further variables for the ranks of other nodes.
    """
    words = " ".join([*_mpirun(plan), *options, '"${interface[@]}"'])
    count = f"-n {plan.world_size}"
    own_ranks = [
        *comment("In a shell that Slurm gave: the launcher would take these for the rank and the number of ranks."),
        "unset SLURM_PROCID SLURM_NTASKS",
    ]
    if plan.num_nodes == 1:
        return [*own_ranks, *array("ranks", [words, count])]
    return [
        *own_ranks,
        *_hosts(plan),
        f"printf -v slots '%s:{plan.gpus_per_node},' \"${{hosts[@]}}\"",
        *array("ranks", [words, '-H "${slots%,}"']),
        'ssh="${SSH_PORT:+-p $SSH_PORT}${SSH_ARGS:+ $SSH_ARGS}"',
        'if [[ -n "$ssh" ]]; then ranks+=(-mca plm_rsh_args "${ssh# }"); fi',
        f"for name in {_forwarded(plan, forwarded)}; do",
        '  if [[ -v $name ]]; then ranks+=(-x "$name"); fi',
        "done",
        f"ranks+=({count})",
    ]


def _hosts(plan: Plan) -> list[str]:
    nodes = plan.num_nodes
    return [
        "IFS=', ' read -ra hosts <<< \"${HOSTS:-}\"",
        'different="$(printf \'%s\\n\' "${hosts[@]}" | sort -u | grep -c . || true)"',
        f'if [[ "${{#hosts[@]}} $different" != "{nodes} {nodes}" ]]; then',
        f'  refuse "expected {nodes} different nodes, as in HOSTS=node1,node2; got ${{HOSTS:-none}}"',
        "fi",
    ]


def _forwarded(plan: Plan, further: Sequence[str]) -> str:
    """Their names, as words of a `for`."""
    own = [variable.name for variable in plan.environment if not variable.name.startswith(_FORWARDED_PREFIXES)]
    return " ".join([*_FORWARDED, *further, *own, *(f'"${{!{prefix}@}}"' for prefix in _FORWARDED_PREFIXES)])


def array(name: str, rows: Iterable[str]) -> list[str]:
    """An array over several lines. Words are shell text already."""
    return [f"{name}=(", *indented(rows), ")"]


def indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def launcher(plan: Plan) -> list[str]:
    """The words before a program that runs over several nodes; on one node it starts its own workers."""
    return [] if plan.num_nodes == 1 else ['"${ranks[@]}"', entry_point(plan)]


def _mpirun(plan: Plan) -> list[str]:
    """mpirun and its first options; the number of ranks comes last."""
    assert plan.release is not None
    words: list[str] = plan.release.record["mpi"]["ranks"]
    return [word for word in words if word not in ("-n", "{world_size}")]


def entry_point(plan: Plan) -> str:
    """trtllm-llmapi-launch: rank 0 runs the program, all of them run the engine's workers."""
    assert plan.release is not None
    program: str = plan.release.record["mpi"]["entry_point"][0]
    return program
