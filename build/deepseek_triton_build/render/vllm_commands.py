"""The same plan for vLLM's own programs, which take everything as flags: `vllm serve` and `vllm bench serve`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.render import shell
from deepseek_triton_build.render.model_yaml import llm_arguments
from deepseek_triton_build.text import comment_lines

if TYPE_CHECKING:
    from deepseek_triton_build.planning.plan import Plan

WITHOUT_FLAG = frozenset({"enable_mm_processor_stats", "mamba_config", "model_weights", "tokens_only"})
"""Arguments that `vllm serve` has no flag for (vLLM vllm/engine/arg_utils.py, 0.24.0 to 0.33.0)."""

_WORKLOADS = (("prompt-heavy", 8000, 1000), ("decode-heavy", 1000, 8000), ("balanced", 1000, 1000))
_BATCHES = (1, 16, 32, 64, 128, 256, 512)
_PROMPTS = 16
_REQUEST_RATE = 10000
"""The benchmark of the guide (vLLM recipes, DeepSeek-V3 usage guide): its workloads with tokens in and out, the numbers
of requests that it tries, the one that it prints, and its requests a second, which send all of them at once."""


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
            _set(values.setdefault(name, {}), key.split("."), setting.value)
        else:
            values[name] = setting.value
        reasons.setdefault(name, []).append(f"{key}: {setting.comment}" if dot else setting.comment)
    return [shell.Flag(_words(name, value), "; ".join(reasons[name])) for name, value in values.items()]


def _set(section: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        section = section.setdefault(name, {})
    section[path[-1]] = value


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
    flags = [*engine_flags(plan), *_reasoning_parser(plan)]
    command = shell.command(
        ["exec", "vllm", "serve", shell.quoted(model_of(plan))],
        ["--host", '"${HOST:-localhost}"', "--port", '"${PORT:-8000}"'],
        *(flag.words for flag in flags),
        *([['"${node[@]}"']] if plan.num_nodes > 1 else []),
        ['"$@"'],
    )
    return shell.script(
        stamp,
        [
            f"Serves {shell.model_title(plan)} with vllm serve, in {plan.image_for('vllm-serve')}. HOST and PORT set "
            "the address it listens on. Further arguments go to vllm serve, and the last of a flag counts: "
            "--no-enable-prefix-caching before a benchmark, so that a repeated prompt is computed again.",
        ],
        shell.exports(plan.environment, "serve.sh"),
        node_lines(plan, "serve.sh"),
        [*shell.flag_comments(flags), *command],
    )


def _reasoning_parser(plan: Plan) -> Iterator[shell.Flag]:
    """Yield the flag that separates R1's reasoning from its answer."""
    asked = any(setting.key == "reasoning_parser" for setting in plan.settings)
    if plan.variant.thinks and not asked:
        yield shell.Flag(("--reasoning-parser", "deepseek_r1"), "the reasoning comes apart from the answer")


def node_lines(plan: Plan, name: str) -> list[str]:
    """Have the script `name` set `node_rank` and the array `node` to the flags of this node. One node needs none."""
    if plan.num_nodes == 1:
        return []
    nodes, each = plan.num_nodes, plan.gpus_per_node
    return [
        *shell.refusing(name),
        *comment_lines(
            f"{plan.world_size} GPUs are {nodes} nodes of {each}, each of which runs this script: NODE_RANK is the "
            "node's number, and MASTER_ADDR the name or address at which the others reach node 0, which answers "
            "requests. Each node has this folder and the checkpoint at the same path. Under Slurm, srun's number of "
            f"the process is the node's: srun --nodes {nodes} --ntasks-per-node 1 ./{name}"
        ),
        f'if [[ "${{SLURM_STEP_NUM_TASKS:-}}" == {nodes} ]]; then NODE_RANK="${{NODE_RANK:-$SLURM_PROCID}}"; fi',
        f'if [[ ! "${{NODE_RANK:-}}" =~ ^(0|[1-9][0-9]{{0,3}})$ || "${{NODE_RANK:-}}" -ge {nodes} ]]; then',
        f"  refuse \"expected 0 to {nodes - 1} as NODE_RANK, the number of this node; got '${{NODE_RANK:-}}'\"",
        "fi",
        *comment_lines("vLLM listens at MASTER_ADDR, so that a name has to become an address."),
        'read -r MASTER_ADDR _ < <(getent ahosts "${MASTER_ADDR:-}" || echo "${MASTER_ADDR:-}") || true',
        "export MASTER_ADDR",
        'if [[ ! "$MASTER_ADDR" =~ [.:] || "$MASTER_ADDR" == 127.* ]]; then',
        "  refuse \"expected as MASTER_ADDR where the other nodes reach node 0, such as 10.0.0.1; got '$MASTER_ADDR'\"",
        "fi",
        *shell.network_interface(),
        'node_rank="${NODE_RANK:-0}"',
        'node=(--node-rank "$node_rank" --master-addr "$MASTER_ADDR")',
        'if [[ "$node_rank" != 0 ]]; then node+=(--headless); fi',
        *([shell.END_IF_REFUSED] if name != "start.sh" else []),
    ]


def bench_sh(plan: Plan, *, stamp: str) -> str:
    """Return bench.sh, which measures a server that runs."""
    work = plan.request.workload  # and not the one that is assumed for the sizes
    isl, osl = (work.isl or _WORKLOADS[0][1]), (work.osl or _WORKLOADS[0][2])
    listed = ", ".join(f"{name} {given} in and {made} out" for name, given, made in _WORKLOADS)
    return shell.script(
        stamp,
        [
            f"Measures {shell.model_title(plan)} with vllm bench serve, in {plan.image_for('vllm-serve')}, on the "
            "server of serve.sh, which is started with --no-enable-prefix-caching for it. ISL and OSL are tokens in "
            "and out, NUM_PROMPTS how many requests are sent at once, REQUEST_RATE how many a second; HOST and PORT "
            f"say where the server is. The guide's workloads: {listed}; its numbers of requests: "
            f"{', '.join(map(str, _BATCHES))}. Further arguments go to vllm bench serve.",
        ],
        shell.command(
            ["exec", "vllm", "bench", "serve"],
            ["--model", shell.quoted(model_of(plan))],
            ["--host", '"${HOST:-localhost}"', "--port", '"${PORT:-8000}"'],
            ["--dataset-name", "random"],
            ["--random-input-len", f'"${{ISL:-{isl}}}"'],
            ["--random-output-len", f'"${{OSL:-{osl}}}"'],
            ["--request-rate", f'"${{REQUEST_RATE:-{_REQUEST_RATE}}}"'],
            ["--num-prompts", f'"${{NUM_PROMPTS:-{work.concurrency or _PROMPTS}}}"'],
            ["--ignore-eos"],
            ['"$@"'],
        ),
    )
