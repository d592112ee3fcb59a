"""Text from the templates beside this module, and the values that several scripts share.

A template is shell, or another language with the same comments, with these additions:

    @@{name}        a value. With a list the line is written once for each entry, and not at all for an empty list.
    #if name        the lines up to #else or #end are kept only if the value is true; also `#if not name`
    #include file   the lines of another template, indented as this line is
    # ...           a paragraph, which is wrapped once its values are known; lines that continue it are indented by two

Blank lines that come to stand together become one.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepseek_triton_build.data import planned_settings
from deepseek_triton_build.data.releases import Release
from deepseek_triton_build.text import (
    LINE_WIDTH,
    comment_lines,
    kept_lines,
    template_lines,
    template_names,
    with_values,
)

if TYPE_CHECKING:
    from deepseek_triton_build.planning.plan import Plan

EXAMPLES = ("/app/tensorrt_llm", "/app")
"""Folders above TensorRT-LLM's examples: in its own container (NVIDIA/TensorRT-LLM docker/Dockerfile.multi@00f74add),
and in Triton's (triton-inference-server/tensorrtllm_backend dockerfile/Dockerfile.triton.trt_llm_backend@0046c234)."""


def filled(template: str, values: Mapping[str, Any]) -> str:
    """Return the text of a template with `values`: texts, numbers, lists of them, and truth values for its conditions.

    :raises KeyError: when the template needs a value that is not there.
    :raises ValueError: when it has no use for one of the values.
    """
    path = Path(__file__).with_name("templates") / template
    if unused := values.keys() - template_names(path):
        raise ValueError(f"{template}: expected to use every value, found no use of {', '.join(sorted(unused))}")
    text = "\n".join([*_written(kept_lines(template_lines(path), values), values), ""])
    return re.sub(r"\n{3,}", "\n\n", text)


def _written(lines: Iterable[str], values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines with their values, and comments wrapped."""
    paragraph = ""
    for line in lines:
        bare = line.lstrip()
        if paragraph and bare.startswith("#   "):
            paragraph += bare[3:]
            continue
        yield from _wrapped(paragraph, values)
        paragraph = line if bare.startswith("# ") else ""
        if not paragraph:
            yield from with_values(line, values)
    yield from _wrapped(paragraph, values)


def _wrapped(paragraph: str, values: Mapping[str, Any]) -> list[str]:
    indent, _, text = paragraph.partition("# ")
    return [indent + row for whole in with_values(text, values) for row in comment_lines(whole)]


@dataclass(frozen=True)
class Flag:
    """A flag of a program, with its reason."""

    words: tuple[str, ...]
    """The flag and its values, as shell text."""
    reason: str


def flag_values(flags: Sequence[Flag]) -> dict[str, list[str]]:
    """Return the flags and, for above the command, their reasons: a command of several lines can hold no comments."""
    rows = [" ".join(flag.words) for flag in flags]
    reasons = zip(rows, (flag.reason for flag in flags), strict=True)
    return {"flags": rows, "flag_comments": [line for row, why in reasons for line in comment_lines(f"{row}: {why}")]}


def script_values(plan: Plan, stamp: str, script: str) -> dict[str, Any]:
    """Return what every script with the plan's variables needs. A variable that is set already keeps its value."""
    # The script says so, because the user need not have set it: TensorRT-LLM's own image has a PYTORCH_CUDA_ALLOC_CONF
    # (docker/Dockerfile.multi@00f74add).
    lines: list[str] = []
    for variable in plan.environment:
        name, value = variable.name, quoted(variable.value)
        export = f'export {name}="${{{name}:-{value}}}"'
        if value != variable.value:  # no quote is safe inside "${...}"
            export = f'[[ -n "${{{name}:-}}" ]] || export {name}={value}'
        lines += [*comment_lines(variable.comment), export, f"keeps {name} {value}"]
    return {"stamp": f"# {stamp}", "script": script, "exports": lines}


def quoted(value: Any) -> str:
    """Return `value` as one word of a command."""
    return shlex.quote(str(value))


def engine_values() -> dict[str, Any]:
    """Return what a script needs to find the variables that are set for the engine."""
    names = [*(f'"${{!{family}@}}"' for family in planned_settings.ENGINE_FAMILIES), *planned_settings.ENGINE_NAMES]
    return {
        "engine_rows": textwrap.wrap(" ".join(names), LINE_WIDTH - 2, break_long_words=False, break_on_hyphens=False),
        "of_one_node": " or ".join(planned_settings.OF_ONE_NODE),
        "of_one_node_pattern": " | ".join(planned_settings.OF_ONE_NODE),
    }


def rank_values(plan: Plan, options: Sequence[str] = (), forwarded: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a script needs to start a rank on each GPU, on however many nodes.

    trtllm-llmapi-launch reads Slurm's variables before mpirun's (NVIDIA/TensorRT-LLM
    tensorrt_llm/llmapi/trtllm-llmapi-launch@020c89e6).

    :param options: further words for mpirun.
    :param forwarded: further variables for the ranks of other nodes.
    """
    mpirun = [word for word in release_of(plan).record["mpi"]["ranks"] if word not in ("-n", "{world_size}")]
    own = [variable.name for variable in plan.environment if not planned_settings.is_for_every_rank(variable.name)]
    return {
        **engine_values(),
        "several_nodes": plan.num_nodes > 1,
        "nodes": plan.num_nodes,
        "gpus_per_node": plan.gpus_per_node,
        "world_size": plan.world_size,
        "mpirun": " ".join([*mpirun, *options]),
        "forwarded": " ".join(
            [*planned_settings.SURROUNDINGS, f'"${{!{planned_settings.HUB_FAMILY}@}}"', *forwarded, *own]
        ),
    }


def launcher(plan: Plan) -> str:
    """Return the words before a program that runs on several nodes. On one node the program starts its own workers."""
    return "" if plan.num_nodes == 1 else f'"${{ranks[@]}}" {entry_point(plan)} '


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
    return plan.title.partition(",")[0]
