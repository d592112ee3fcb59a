"""The same plan for vLLM's own programs, which take everything as flags: `vllm serve` and `vllm bench serve`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.render import shell
from deepseek_triton_build.render.model_configuration import llm_arguments

if TYPE_CHECKING:
    from deepseek_triton_build.planning.plan import Plan

WITHOUT_FLAG = frozenset({"enable_mm_processor_stats", "mamba_config", "model_weights", "tokens_only"})
"""Arguments that `vllm serve` has no flag for (vLLM vllm/engine/arg_utils.py, 0.24.0 to 0.33.0)."""

_GUIDE = {"isl": 8000, "osl": 1000, "num_prompts": 16}
"""The benchmark of the guide (vLLM recipes, DeepSeek-V3 usage guide): tokens in and out of its first workload, and the
number of requests that it prints. Its 10,000 requests a second send all of them at once."""


def model_of(plan: Plan) -> str:
    return next(str(setting.value) for setting in plan.settings if setting.key == "model")


def engine_flags(plan: Plan) -> list[shell.Flag]:
    """Return the plan's engine arguments as flags of `vllm serve`, without the model.

    :raises RefusedPlanError: for an argument without a flag.
    """
    values: dict[str, Any] = {}
    reasons: dict[str, list[str]] = {}
    for setting in llm_arguments(plan):
        name, dot, key = setting.key.partition(".")
        if name == "model":
            continue
        if name in WITHOUT_FLAG:
            raise RefusedPlanError(f"vllm serve has no flag for {name}", fix="use --format triton")
        if dot:
            section = values.setdefault(name, {})
            *path, last = key.split(".")
            for part in path:
                section = section.setdefault(part, {})
            section[last] = setting.value
        else:
            values[name] = setting.value
        reasons.setdefault(name, []).append(f"{key}: {setting.comment}" if dot else setting.comment)
    return [shell.Flag(_words(name, value), "; ".join(reasons[name])) for name, value in values.items()]


def _words(name: str, value: Any) -> tuple[str, ...]:
    """Return a flag in the form that argparse takes: two flags for a switch, JSON for a mapping."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return (f"--{flag}" if value else f"--no-{flag}",)
    if isinstance(value, Mapping):
        return f"--{flag}", shell.quoted(json.dumps(value, allow_nan=False))
    if isinstance(value, list | tuple):
        return f"--{flag}", *map(shell.quoted, value)
    return f"--{flag}", shell.quoted(value)


def serve_sh(plan: Plan, *, stamp: str) -> str:
    """Return serve.sh, which starts vLLM's OpenAI-compatible server."""
    flags = engine_flags(plan)
    keys, a = {setting.key for setting in plan.settings}, plan.variant.architecture
    own = a.model_type if a is not None and a.csa is not None else ""  # vLLM calls V4's parsers after the model
    if plan.variant.thinks and "reasoning_parser" not in keys:
        reason = "the reasoning comes apart from the answer"
        flags.append(shell.Flag(("--reasoning-parser", own or "deepseek_r1"), reason))
    if own and "tool_call_parser" not in keys:
        reason = "calls of tools come apart from the text, in V4's own tags"
        flags.append(shell.Flag(("--enable-auto-tool-choice", "--tool-call-parser", own), reason))
    if asked := plan.variant.chat_template_kwargs:
        reason = "the model only thinks, and its chat format turns that on only when asked"
        flags.append(shell.Flag(_words("default_chat_template_kwargs", asked), reason))
    values = {
        **shell.script_values(plan, stamp, "serve.sh"),
        **shell.flag_values(flags),
        "title": shell.model_title(plan),
        "image": plan.image_for("vllm-serve"),
        "model": shell.quoted(model_of(plan)),
        "vllm_nodes": plan.num_nodes > 1,
    }
    return shell.filled("vllm_serve.sh", values | node_values(plan))


def node_values(plan: Plan) -> dict[str, int]:
    """Return what a script needs to run on each of several nodes."""
    return {
        "nodes": plan.num_nodes,
        "last_node": plan.num_nodes - 1,
        "gpus_per_node": plan.gpus_per_node,
        "world_size": plan.world_size,
    }


def bench_sh(plan: Plan, *, stamp: str) -> str:
    """Return bench.sh, which measures a server that runs."""
    work = plan.request.workload  # and not the one that is assumed for the sizes
    values = {
        "stamp": f"# {stamp}",
        "title": shell.model_title(plan),
        "image": plan.image_for("vllm-serve"),
        "model": shell.quoted(model_of(plan)),
        "isl": work.isl or _GUIDE["isl"],
        "osl": work.osl or _GUIDE["osl"],
        "num_prompts": work.concurrency or _GUIDE["num_prompts"],
    }
    return shell.filled("vllm_bench.sh", values)
