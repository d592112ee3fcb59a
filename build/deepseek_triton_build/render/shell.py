"""Pieces of the shell scripts: what they export, where their ranks run, and the command itself."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from deepseek_triton_build.planning.plan import Plan
from deepseek_triton_build.render.text import comment
from deepseek_triton_build.settings import EnvironmentVariable

HERE = '"$(CDPATH= cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)"'
"""The folder the script lies in, also where a link leads to the script, and CDPATH would lead elsewhere."""

_FORWARDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "HF_HOME", "HF_TOKEN")
"""Variables that the ranks of other nodes need besides the plan's own."""
_FORWARDED_PREFIXES = ("NCCL_", "UCX_")
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


def on_every_node(plan: Plan, name: str) -> list[str]:
    """Sets the array `ranks` to what starts one rank per GPU over the plan's nodes; nothing on one node.

    :param name: the script's, for its error message.
    """
    if plan.num_nodes == 1:
        return []
    nodes, each, world = plan.num_nodes, plan.gpus_per_node, plan.world_size
    own = [variable.name for variable in plan.environment if not variable.name.startswith(_FORWARDED_PREFIXES)]
    forwarded = " ".join([*_FORWARDED, *own, *(f'"${{!{prefix}@}}"' for prefix in _FORWARDED_PREFIXES)])
    mpirun = " ".join(word for word in _mpirun(plan) if word not in ("-n", "{world_size}"))
    return [
        *comment(
            f"{world} GPUs are {nodes} nodes of {each}: HOSTS names them, separated by commas, this one first. Each "
            "has this folder and the checkpoint at the same path and takes ssh from the others without a password, at "
            "SSH_PORT when it is not 22; what is set here of NCCL_* and UCX_* is set there too. Under Slurm this "
            "script is run by every rank instead, without HOSTS: "
            f"srun --mpi=pmix --nodes {nodes} --ntasks-per-node {each} ./{name}"
        ),
        f'if [[ "${{SLURM_STEP_NUM_TASKS:-}}" == {world} ]]; then',
        "  ranks=()",
        "else",
        "  IFS=', ' read -ra hosts <<< \"${HOSTS:-}\"",
        '  different="$(printf \'%s\\n\' "${hosts[@]}" | sort -u | grep -c . || true)"',
        f'  if [[ "${{#hosts[@]}} $different" != "{nodes} {nodes}" ]]; then',
        f'    echo "{name}: expected {nodes} different nodes, as in HOSTS=node1,node2; got ${{HOSTS:-none}}" >&2',
        "    exit 2",
        "  fi",
        f"  printf -v slots '%s:{each},' \"${{hosts[@]}}\"",
        f'  ranks=({mpirun} -H "${{slots%,}}")',
        '  if [[ -n "${SSH_PORT:-}" ]]; then ranks+=(-mca plm_rsh_args "-p $SSH_PORT"); fi',
        f"  for name in {forwarded}; do",
        '    if [[ -v $name ]]; then ranks+=(-x "$name"); fi',
        "  done",
        f"  ranks+=(-n {world})",
        "fi",
    ]


def launcher(plan: Plan) -> list[str]:
    """The words before a program that runs over several nodes; on one node it starts its own workers."""
    return [] if plan.num_nodes == 1 else ['"${ranks[@]}"', _entry_point(plan)]


def triton_launcher(plan: Plan) -> list[str]:
    """The words before tritonserver, which can't start workers of its own."""
    if plan.release is None:
        return []
    ranks = (
        ['"${ranks[@]}"'] if plan.num_nodes > 1 else [word.format(world_size=plan.world_size) for word in _mpirun(plan)]
    )
    return [*ranks, _entry_point(plan)]


def _mpirun(plan: Plan) -> list[str]:
    assert plan.release is not None
    words: list[str] = plan.release.record["mpi"]["ranks"]
    return words


def _entry_point(plan: Plan) -> str:
    """trtllm-llmapi-launch: rank 0 runs the program, all of them run the engine's workers."""
    assert plan.release is not None
    program: str = plan.release.record["mpi"]["entry_point"][0]
    return program
