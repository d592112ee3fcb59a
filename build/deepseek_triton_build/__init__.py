"""The generator: DeepSeek variant, GPUs and TensorRT-LLM release -> a Triton model repository.

    plan = make_plan(PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=8))
    write_repository(repository_files(plan, version="1.0"), Path("repository"))

Needs no GPU, no network and no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepseek_triton_build.arithmetic.gpu_memory import Budget
    from deepseek_triton_build.build_errors import BuildError, OutputError, RefusedPlanError, UnknownNameError
    from deepseek_triton_build.data.catalog.profiles import Workload
    from deepseek_triton_build.data.planned_settings import Setting
    from deepseek_triton_build.planning.plan import Plan, make_plan
    from deepseek_triton_build.planning.plan_request import PlanRequest
    from deepseek_triton_build.render.folder_writer import write_repository
    from deepseek_triton_build.render.repository_files import File, repository_files

__all__ = [
    "Budget",
    "BuildError",
    "File",
    "OutputError",
    "Plan",
    "PlanRequest",
    "RefusedPlanError",
    "Setting",
    "UnknownNameError",
    "Workload",
    "make_plan",
    "repository_files",
    "write_repository",
]

_HOMES = {
    "Workload": "deepseek_triton_build.data.catalog.profiles",
    "BuildError": "deepseek_triton_build.build_errors",
    "OutputError": "deepseek_triton_build.build_errors",
    "RefusedPlanError": "deepseek_triton_build.build_errors",
    "UnknownNameError": "deepseek_triton_build.build_errors",
    "Budget": "deepseek_triton_build.arithmetic.gpu_memory",
    "Plan": "deepseek_triton_build.planning.plan",
    "make_plan": "deepseek_triton_build.planning.plan",
    "PlanRequest": "deepseek_triton_build.planning.plan_request",
    "File": "deepseek_triton_build.render.repository_files",
    "repository_files": "deepseek_triton_build.render.repository_files",
    "write_repository": "deepseek_triton_build.render.folder_writer",
    "Setting": "deepseek_triton_build.data.planned_settings",
}
"""Name -> its module, which is imported when the name is asked for: what looks at a checkpoint needs no plans."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
