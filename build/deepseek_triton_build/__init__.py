"""The generator: DeepSeek variant, GPUs and TensorRT-LLM release -> a Triton model repository.

    plan = make_plan(PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=8))
    write_repository(repository_files(plan, stamp="..."), Path("repository"))

Needs no GPU, no network and no torch.
"""

from deepseek_triton_build.errors import BuildError, OutputError, RefusedPlanError, UnknownNameError
from deepseek_triton_build.plan import Budget, Plan, PlanRequest, Setting, make_plan
from deepseek_triton_build.repository import File, repository_files, write_repository

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
    "make_plan",
    "repository_files",
    "write_repository",
]
