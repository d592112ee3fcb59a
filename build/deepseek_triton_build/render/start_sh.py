"""start.sh: runs the repository it lies in, under the supervisor that lies beside the backend."""

from __future__ import annotations

from typing import Any

from deepseek_triton_build.arithmetic.gpu_memory import (
    ASSUMED_RATE,
    ENGINE_START_S,
    SMALL_READY_WITHIN_S,
    load_s,
    ready_within_s,
)
from deepseek_triton_build.data.rank_variables import is_engine_variable
from deepseek_triton_build.planning.plan import Plan
from deepseek_triton_build.planning.plan_request import PYTHON_BACKEND
from deepseek_triton_build.render import shell
from deepseek_triton_build.render.vllm_commands import engine_flags, model_of, node_values

NAME = "start.sh"
EXIT_TIMEOUT_S = 30
"""Seconds that open requests have to finish: tritonserver's own default of --exit-timeout-secs."""
MPIRUN_SPARE_S = 20
"""Seconds that mpirun waits beyond the exit timeout before it kills. The supervisor kills 15 s after the timeout."""
_MAX_RESTARTS = 3
_TAG = "DEEPSEEK_TRITON_LAUNCH"
"""The variable by which the processes of one launch are known."""


def start_sh(plan: Plan, *, stamp: str) -> str:
    """Return start.sh. It runs TensorRT-LLM and vLLM in a stock Triton container; other engines run where tritonserver
    is."""
    ready_within, why_ready_within = _ready_within(plan)
    values = {
        **shell.script_values(plan, stamp, NAME),
        "tensorrt_llm": plan.release is not None,
        "vllm": plan.vllm is not None,
        "vllm_nodes": plan.vllm is not None and plan.num_nodes > 1,
        "engine_rows": [],
        "where": "where tritonserver and the engine's packages are installed",
        "for_slurm": False,
        "same_in_slurm": "",
        "exit_timeout": EXIT_TIMEOUT_S,
        "ready_within": ready_within,
        "why_ready_within": why_ready_within,
        "restarts": _MAX_RESTARTS,
        "why_restarts": "The pauses between restarts grow.",
        "own_backend": plan.request.backend_name if plan.request.backend_name != PYTHON_BACKEND else "",
        "programs": "python3 | tritonserver",
    }
    own = [variable.name for variable in plan.environment if not is_engine_variable(variable.name)]
    exported = [_TAG, *own]
    if plan.release is not None:
        exported = [_TAG, "PYTHONPATH", *own, '"${engine[@]}"']
        values |= _tensorrt_llm_values(plan)
        exported += ["OMPI_MCA_btl_tcp_if_include"] if values["for_slurm"] else []
    elif plan.vllm is not None:
        exported = [_TAG, "SPT_NOENV", *own, '"${engine[@]}"', *(["MASTER_ADDR"] if plan.num_nodes > 1 else [])]
        values |= {**shell.engine_values(), "where": f"where tritonserver and vLLM {plan.vllm.version} are installed"}
        values |= _vllm_node_values(plan) if plan.num_nodes > 1 else {}
    if plan.image is not None:
        values["where"] = f"in {plan.image}, where nothing has to be installed"
    return shell.filled("start.sh", {**values, "exported": " ".join(exported)})


def _tensorrt_llm_values(plan: Plan) -> dict[str, Any]:
    options = ["--tag-output"]
    if plan.num_nodes == 1:
        options += ["-mca", "odls_base_sigkill_timeout", f'"$((exit_timeout + {MPIRUN_SPARE_S}))"']
    # A Slurm step of one task tells nothing, because every other job has one too.
    for_slurm = plan.world_size > 1
    launch = shell.entry_point(plan)
    return {
        **shell.rank_values(plan, options, [_TAG]),
        "launch": launch,
        "programs": f"python3 | mpirun | {launch} | tritonserver",
        "for_slurm": for_slurm,
        "same_in_slurm": ", the same for all ranks of a Slurm step" if for_slurm else "",
    }


def _vllm_node_values(plan: Plan) -> dict[str, Any]:
    """The server runs on node 0, and vLLM's own program without a server elsewhere. Under Slurm the supervisor has
    started the script on every node."""
    carried = f'"$repository/tensorrt_llm/1/{plan.variant.model}"'
    model = carried if plan.carries_checkpoint else shell.quoted(model_of(plan))
    flags = [" ".join(flag.words) for flag in engine_flags(plan)]
    return {
        **node_values(plan),
        "vllm_serve": [f"vllm serve {model}", *flags, '"${node[@]}"'],
        "restarts": 0,
        "why_restarts": "The default is 0, because the other nodes have to be started again, too.",
    }


def _ready_within(plan: Plan) -> tuple[int, str]:
    """Return the seconds a start may take, and how they were computed."""
    if plan.checkpoint is None:
        assumed = SMALL_READY_WITHIN_S
        return assumed, f"{assumed} s are assumed for a small model, which takes a few seconds."
    size, whole = plan.checkpoint.weight_bytes, ready_within_s(plan.checkpoint.weight_bytes)
    rate = ASSUMED_RATE // 10**6
    return whole, (
        f"{size:,} bytes of weights ({plan.checkpoint.bytes_status}) at {rate} MB/s, which users report for a first "
        f"load from a slow disk, take {load_s(size):,} s. {ENGINE_START_S:,} s more are assumed for kernels and CUDA "
        f"graphs. Rounded up to whole minutes, that is {whole:,} s."
    )
