"""Pieces that the shell scripts share: comments, exports, and mpirun with the variables that other nodes get."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepseek_triton_build.data.planned_settings import EnvironmentVariable
from deepseek_triton_build.data.rank_variables import (
    ENGINE_FAMILIES,
    ENGINE_NAMES,
    HUB_FAMILY,
    OF_ONE_NODE,
    SURROUNDINGS,
    is_for_every_rank,
)
from deepseek_triton_build.data.releases import Release
from deepseek_triton_build.text import LINE_WIDTH, comment_lines

if TYPE_CHECKING:
    from deepseek_triton_build.planning.plan import Plan

HERE = '"$(CDPATH="" cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)"'
"""The folder of the script. It is right too when the script is called by a link or when CDPATH is set."""
END_IF_REFUSED = 'if [[ -n "$refused" ]]; then exit 2; fi'


@dataclass(frozen=True)
class Flag:
    """A flag of a program, with its reason."""

    words: tuple[str, ...]
    """The flag and its values, as shell text."""
    reason: str


def flag_comments(flags: Iterable[Flag]) -> list[str]:
    """Return the flags' reasons as comments above the command. A command of several lines can hold no comments."""
    return [line for flag in flags for line in comment_lines(f"{' '.join(flag.words)}: {flag.reason}")]


def script(stamp: str, about: Iterable[str], *parts: Iterable[str], directives: Iterable[str] = ()) -> str:
    """Return a whole script: the paragraphs about it as comments, then its parts, with a blank line before each.

    :param directives: lines of #SBATCH, which have to stand before the first command.
    """
    lines = ["#!/usr/bin/env bash", f"# {stamp}"]
    for paragraph in about:
        lines += comment_lines(paragraph)
    lines += [*directives, "set -euo pipefail"]
    for part in map(list, parts):
        lines += ["", *part] if part else []
    return "\n".join(lines) + "\n"


def exports(environment: Iterable[EnvironmentVariable], script: str) -> list[str]:
    """Return the lines by which `script` exports the plan's variables. A variable that is set already keeps its value.

    That is said, because the user need not have set it: TensorRT-LLM's own image has a PYTORCH_CUDA_ALLOC_CONF
    (docker/Dockerfile.multi@00f74add).
    """
    lines: list[str] = []
    for variable in environment:
        lines += [*comment_lines(variable.comment), _export(variable.name, variable.value)]
        lines.append(f"keeps {variable.name} {quoted(variable.value)}")
    if not lines:
        return []
    return [
        "keeps() {",
        '  if [[ "${!1}" != "$2" ]]; then',
        f'    echo "{script}: note: $1=${{!1}} is kept, as it was set before; the plan has $2" >&2',
        "  fi",
        "}",
        *lines,
    ]


def _export(name: str, value: str) -> str:
    if quoted(value) == value:
        return f'export {name}="${{{name}:-{value}}}"'
    return f'[[ -n "${{{name}:-}}" ]] || export {name}={quoted(value)}'  # no quote is safe inside "${...}"


def command(*groups: Sequence[str]) -> list[str]:
    """Return one command, with each group of words on a line of its own. The words are shell text already."""
    return [" \\\n  ".join(" ".join(group) for group in groups if group)]


def quoted(value: Any) -> str:
    """Return `value` as one word of a command."""
    return shlex.quote(str(value))


def refusing(name: str) -> list[str]:
    """Define the shell function `refuse` of the script `name`: it prints what is wrong, and sets `refused`."""
    return ["refused=", "refuse() {", f'  echo "{name}: $1" >&2', "  refused=1", "}"]


def on_every_node(plan: Plan, name: str) -> list[str]:
    """Have the script `name` set the array `ranks` to the words that start a rank on each GPU. One node needs none."""
    if plan.num_nodes == 1:
        return []
    return [
        *refusing(name),
        "",
        *interface(),
        "",
        *engine_variables(),
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
    """Return the condition that Slurm has started the ranks, so that this process is one of them."""
    return f'[[ "${{SLURM_STEP_NUM_TASKS:-}}" == {plan.world_size} ]]'


def nodes_comment(plan: Plan, name: str) -> list[str]:
    """Explain how the script `name` is started on several nodes."""
    nodes, each, world = plan.num_nodes, plan.gpus_per_node, plan.world_size
    return comment_lines(
        f"{world} GPUs are {nodes} nodes of {each}. HOSTS names the nodes, separated by commas, this node first. Each "
        "node has this folder and the checkpoint at the same path, and accepts ssh from the others without a password. "
        "SSH_PORT is the port of ssh when it is not 22; SSH_ARGS are further arguments of ssh. The variables of the "
        "engine that are set here are set on the other nodes too. Under Slurm, every rank runs this script instead, "
        f"without HOSTS: srun --mpi=pmix --nodes {nodes} --ntasks-per-node {each} ./{name}"
    )


def interface() -> list[str]:
    """Export INTERFACE to NCCL and Gloo, and set the array `interface` to mpirun's arguments for it."""
    return [
        *comment_lines(
            "INTERFACE is the network interface over which the ranks reach each other. Set it when Open MPI, NCCL or "
            "Gloo chooses a wrong one, such as the bridge of a container. It changes no variable that is already set "
            "for one of them."
        ),
        "interface=()",
        'if [[ -n "${INTERFACE:-}" ]]; then',
        *indented(_SOCKETS),
        "  for parameter in btl_tcp_if_include oob_tcp_if_include; do",
        '    own="OMPI_MCA_$parameter"',
        '    if [[ -z "${!own:-}" ]]; then interface+=(-mca "$parameter" "$INTERFACE"); fi',
        "  done",
        "fi",
    ]


_SOCKETS = [f'export {name}_SOCKET_IFNAME="${{{name}_SOCKET_IFNAME:-$INTERFACE}}"' for name in ("NCCL", "GLOO")]


def network_interface() -> list[str]:
    """Export INTERFACE to NCCL and Gloo, without MPI."""
    return [
        *comment_lines(
            "INTERFACE is the network interface over which the nodes reach each other. Set it when NCCL or Gloo "
            "chooses a wrong one, such as the bridge of a container."
        ),
        'if [[ -n "${INTERFACE:-}" ]]; then',
        *indented(_SOCKETS),
        "fi",
    ]


def engine_variables() -> list[str]:
    """Set the array `engine` to the names of the engine's variables that are set."""
    names = [*(f'"${{!{family}@}}"' for family in ENGINE_FAMILIES), *ENGINE_NAMES]
    rows = textwrap.wrap(" ".join(names), LINE_WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    return [
        *comment_lines(
            "engine: the variables that are set for the engine, by these lines or by you. They have to be the same on "
            f"every rank. Those named {' or '.join(OF_ONE_NODE)} are left out: each node has its own."
        ),
        *array("names", rows),
        "engine=()",
        'for name in "${names[@]}"; do',
        '  case "$name" in',
        f"    {' | '.join(OF_ONE_NODE)}) ;;",
        '    *) if [[ -v $name ]]; then engine+=("$name"); fi ;;',
        "  esac",
        "done",
    ]


def mpirun_lines(plan: Plan, options: Sequence[str] = (), forwarded: Sequence[str] = ()) -> list[str]:
    """Set the array `ranks` to mpirun with all its arguments.

    The lines need the array `interface` and, on several nodes, the array `engine` and the function `refuse`.
    trtllm-llmapi-launch reads Slurm's variables before mpirun's (NVIDIA/TensorRT-LLM
    tensorrt_llm/llmapi/trtllm-llmapi-launch@020c89e6).

    :param options: further words for mpirun.
    :param forwarded: further variables for the ranks of other nodes.
    """
    words = " ".join([*_mpirun(plan), *options, '"${interface[@]}"'])
    count = f"-n {plan.world_size}"
    own_ranks = [
        *comment_lines(
            "In a shell inside a Slurm job, the launcher would take these variables for its rank and the number of "
            "ranks."
        ),
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
    """Return the names of the forwarded variables, as words of a `for`."""
    own = [variable.name for variable in plan.environment if not is_for_every_rank(variable.name)]
    return " ".join([*SURROUNDINGS, f'"${{!{HUB_FAMILY}@}}"', *further, *own, '"${engine[@]}"'])


def array(name: str, rows: Iterable[str]) -> list[str]:
    """Set an array, with each row on a line of its own. The rows are shell text already."""
    return [f"{name}=(", *indented(rows), ")"]


def indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def launcher(plan: Plan) -> list[str]:
    """Return the words before a program that runs on several nodes. On one node the program starts its own workers."""
    return [] if plan.num_nodes == 1 else ['"${ranks[@]}"', entry_point(plan)]


def _mpirun(plan: Plan) -> list[str]:
    """Return mpirun and its first options, without the number of ranks, which comes last."""
    words: list[str] = release_of(plan).record["mpi"]["ranks"]
    return [word for word in words if word not in ("-n", "{world_size}")]


def entry_point(plan: Plan) -> str:
    """Return trtllm-llmapi-launch: rank 0 runs the program, and all ranks run the engine's workers."""
    program: str = release_of(plan).record["mpi"]["entry_point"][0]
    return program


def release_of(plan: Plan) -> Release:
    """Return the release of a plan for TensorRT-LLM. Only such plans reach the pieces that need a release."""
    assert plan.release is not None
    return plan.release


def model_title(plan: Plan) -> str:
    """Return the model's name for people, without the remarks that follow it."""
    return plan.variant.title.partition(",")[0]


EXAMPLES = ("/app/tensorrt_llm", "/app")
"""Folders above TensorRT-LLM's examples: in its own container (NVIDIA/TensorRT-LLM docker/Dockerfile.multi@00f74add),
and in Triton's (triton-inference-server/tensorrtllm_backend dockerfile/Dockerfile.triton.trt_llm_backend@0046c234)."""


def first_file(name: str, paths: Iterable[str], *, given: str = "") -> list[str]:
    """Set the variable `name` to `given`, or else to the first path that is a file; empty when none is.

    :param given: shell text, such as "$OWN".
    """
    return [
        *array("places", paths),
        f'{name}="{given}"',
        'for place in "${places[@]}"; do',
        f'  if [[ -z "${name}" && -f "$place" ]]; then {name}="$place"; fi',
        "done",
    ]
