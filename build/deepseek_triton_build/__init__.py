"""The generator: DeepSeek variant, GPUs and TensorRT-LLM release -> a Triton model repository.

    plan = make_plan(PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=8))
    write_repository(repository_files(plan, version="1.0"), Path("repository"))

Needs no GPU, no network and no torch. The public modules, beside this one: `check` (check any repository), `catalog`
(what is known of models, GPUs and releases), `arithmetic` (memory, load time, warm-up) and `text`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepseek_triton_build.arithmetic import Budget
    from deepseek_triton_build.build_errors import (
        BuildError,
        NothingToCheckError,
        OutputError,
        RefusedPlanError,
        ReplacementError,
        UnknownNameError,
        UnusableCheckpointError,
    )
    from deepseek_triton_build.data.own_files import model_repository, version_dir
    from deepseek_triton_build.data.planned_settings import EnvironmentVariable, Setting, footnotes
    from deepseek_triton_build.data.profiles import DISAGGREGATED, Workload
    from deepseek_triton_build.planning.disaggregated import (
        SIDE_PROFILES,
        DisaggregatedPlan,
        DisaggregatedRequest,
        make_disaggregated_plan,
    )
    from deepseek_triton_build.planning.plan import Plan, PlanWarning, make_plan
    from deepseek_triton_build.planning.plan_request import PlanRequest
    from deepseek_triton_build.planning.target import resolve_target
    from deepseek_triton_build.planning.vllm_sizes import resolve_vllm_target
    from deepseek_triton_build.render.dynamo import dynamo_mismatch
    from deepseek_triton_build.render.folder_upgrade import FolderUpgrade, UpgradedFile, plan_upgrade
    from deepseek_triton_build.render.folder_writer import (
        backup_above,
        backups_of,
        manifests_of,
        read_manifest,
        replace_repository,
        write_repository,
    )
    from deepseek_triton_build.render.formats import (
        DEFAULT_FORMAT,
        DYNAMO,
        FORMATS,
        PAIR_FORMATS,
        format_files,
        format_request,
        pair_files,
        pair_options,
        usable_formats,
    )
    from deepseek_triton_build.render.hf_quant_config import (
        KvAlgo,
        QuantConfigChange,
        quant_config_change,
        write_quant_config,
    )
    from deepseek_triton_build.render.merge import Keep, MergeConflict
    from deepseek_triton_build.render.model_configuration import contract_tables
    from deepseek_triton_build.render.repository_files import EXIT_TIMEOUT_S, MPIRUN_SPARE_S, File, repository_files
    from deepseek_triton_build.render.stamp import build_options

# Module -> the names above that it has. A module is imported when one of its names is asked for: planner and renderers
# take three times as long to import as the catalogue, and many verbs, such as `probe`, need only `text`.
_HOMES = {
    "arithmetic": ("Budget",),
    "build_errors": (
        "BuildError",
        "NothingToCheckError",
        "OutputError",
        "RefusedPlanError",
        "ReplacementError",
        "UnknownNameError",
        "UnusableCheckpointError",
    ),
    "data.profiles": ("DISAGGREGATED", "Workload"),
    "data.own_files": ("model_repository", "version_dir"),
    "data.planned_settings": ("EnvironmentVariable", "Setting", "footnotes"),
    "planning.disaggregated": ("DisaggregatedPlan", "DisaggregatedRequest", "SIDE_PROFILES", "make_disaggregated_plan"),
    "planning.plan": ("Plan", "PlanWarning", "make_plan"),
    "planning.plan_request": ("PlanRequest",),
    "planning.target": ("resolve_target",),
    "planning.vllm_sizes": ("resolve_vllm_target",),
    "render.model_configuration": ("contract_tables",),
    "render.dynamo": ("dynamo_mismatch",),
    "render.folder_upgrade": ("FolderUpgrade", "UpgradedFile", "plan_upgrade"),
    "render.folder_writer": (
        "backup_above",
        "backups_of",
        "manifests_of",
        "read_manifest",
        "replace_repository",
        "write_repository",
    ),
    "render.formats": (
        "DEFAULT_FORMAT",
        "DYNAMO",
        "FORMATS",
        "PAIR_FORMATS",
        "format_files",
        "format_request",
        "pair_files",
        "pair_options",
        "usable_formats",
    ),
    "render.hf_quant_config": ("KvAlgo", "QuantConfigChange", "quant_config_change", "write_quant_config"),
    "render.merge": ("Keep", "MergeConflict"),
    "render.repository_files": ("EXIT_TIMEOUT_S", "File", "MPIRUN_SPARE_S", "repository_files"),
    "render.stamp": ("build_options",),
}
__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
