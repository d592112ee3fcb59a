"""The generator: DeepSeek variant, GPUs and TensorRT-LLM release -> a Triton model repository.

    plan = make_plan(PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=8))
    write_repository(repository_files(plan, version="1.0"), Path("repository"))

Needs no GPU, no network and no torch. The public modules, beside this one: `check` (check any repository), `catalog`
(what is known of models, GPUs and releases), `arithmetic` (memory, load time, warm-up) and `text`.
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
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
    from deepseek_triton_build.data.own_files import backend_module, model_repository, version_dir
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


def lazy_names(package: str, file: str) -> tuple[list[str], Callable[[str], Any]]:
    """Return the names that a package's file imports for type checkers, and the `__getattr__` that finds them.

    A module is imported when one of its names is asked for: planner and renderers take three times as long to import as
    the catalogue, and many verbs, such as `probe`, need only `text`.
    """
    imports = (node for node in ast.walk(ast.parse(Path(file).read_bytes())) if isinstance(node, ast.ImportFrom))
    homes = {alias.name: node.module for node in imports for alias in node.names if node.col_offset}

    def find(name: str) -> Any:
        if (home := homes.get(name)) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    return sorted(homes), find


__all__, __getattr__ = lazy_names(__name__, __file__)
