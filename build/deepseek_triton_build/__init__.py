"""The generator: DeepSeek variant, GPUs and TensorRT-LLM release -> a Triton model repository.

    plan = make_plan(PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=8))
    write_repository(repository_files(plan, version="1.0"), Path("repository"))

Needs no GPU, no network and no torch.
"""

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
