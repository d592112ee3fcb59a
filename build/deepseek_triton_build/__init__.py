"""The generator: DeepSeek variant, GPUs and TensorRT-LLM release -> a Triton model repository.

    plan = make_plan(PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=8))
    write_repository(repository_files(plan, version="1.0"), Path("repository"))

Needs no GPU, no network and no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepseek_triton_build.catalog.profiles import Workload
    from deepseek_triton_build.errors import BuildError, OutputError, RefusedPlanError, UnknownNameError
    from deepseek_triton_build.memory import Budget
    from deepseek_triton_build.planning.plan import Plan, make_plan
    from deepseek_triton_build.planning.request import PlanRequest
    from deepseek_triton_build.repository import File, repository_files, write_repository
    from deepseek_triton_build.settings import Setting

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
    "Workload": "deepseek_triton_build.catalog.profiles",
    "BuildError": "deepseek_triton_build.errors",
    "OutputError": "deepseek_triton_build.errors",
    "RefusedPlanError": "deepseek_triton_build.errors",
    "UnknownNameError": "deepseek_triton_build.errors",
    "Budget": "deepseek_triton_build.memory",
    "Plan": "deepseek_triton_build.planning.plan",
    "make_plan": "deepseek_triton_build.planning.plan",
    "PlanRequest": "deepseek_triton_build.planning.request",
    "File": "deepseek_triton_build.repository",
    "repository_files": "deepseek_triton_build.repository",
    "write_repository": "deepseek_triton_build.repository",
    "Setting": "deepseek_triton_build.settings",
}
"""Name -> its module, which is imported when the name is asked for: what looks at a checkpoint needs no plans."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
