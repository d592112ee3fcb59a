"""The generator's public modules: their names, and what the root imports."""

import subprocess
import sys
from types import ModuleType

import pytest

import deepseek_triton_build as package
from deepseek_triton_build import arithmetic, catalog, check

ROOT = [
    "DEFAULT_FORMAT",
    "DISAGGREGATED",
    "DYNAMO",
    "EXIT_TIMEOUT_S",
    "FORMATS",
    "MPIRUN_SPARE_S",
    "PAIR_FORMATS",
    "SIDE_PROFILES",
    "Budget",
    "BuildError",
    "DisaggregatedPlan",
    "DisaggregatedRequest",
    "EnvironmentVariable",
    "File",
    "FolderUpgrade",
    "Keep",
    "KvAlgo",
    "MergeConflict",
    "NothingToCheckError",
    "OutputError",
    "Plan",
    "PlanRequest",
    "PlanWarning",
    "QuantConfigChange",
    "RefusedPlanError",
    "ReplacementError",
    "Setting",
    "UnknownNameError",
    "UnusableCheckpointError",
    "UpgradedFile",
    "Workload",
    "backup_above",
    "backups_of",
    "build_options",
    "contract_page",
    "dynamo_mismatch",
    "footnotes",
    "format_files",
    "format_request",
    "make_disaggregated_plan",
    "make_plan",
    "manifests_of",
    "model_repository",
    "pair_files",
    "pair_options",
    "plan_upgrade",
    "quant_config_change",
    "read_manifest",
    "replace_repository",
    "repository_files",
    "resolve_target",
    "resolve_vllm_target",
    "usable_formats",
    "version_dir",
    "write_quant_config",
    "write_repository",
]
CHECK = [
    "CHECKS",
    "INDEX",
    "MANIFEST",
    "MISSING_SHARD",
    "MODEL_GONE",
    "MODEL_NOT_HERE",
    "CheckCode",
    "CheckOptions",
    "CheckedModel",
    "CheckpointFacts",
    "Finding",
    "Header",
    "HeaderEntry",
    "HeaderError",
    "Report",
    "Stamp",
    "check_repository",
    "check_weights",
    "files_read",
    "is_inside",
    "read_bytes",
    "read_facts",
    "read_header",
    "read_json_object",
    "read_stamp",
    "read_yaml",
    "rules_page",
]
CATALOG = [
    "DEFAULT_PROFILE",
    "DEFAULT_RELEASE",
    "DEFAULT_VLLM",
    "PRECISIONS",
    "PRECISION_ALIASES",
    "READABLE_RELEASES",
    "RELEASES",
    "VLLM_VERSIONS",
    "Architecture",
    "Gpu",
    "KnownCheckpoint",
    "Profile",
    "Recipe",
    "Release",
    "Variant",
    "VllmVersion",
    "container_month",
    "container_tag",
    "containers",
    "cut_summary",
    "find_gpu",
    "find_precision",
    "find_variant",
    "gpus",
    "is_engine_variable",
    "is_for_every_rank",
    "json_twins",
    "load_release",
    "load_vllm",
    "profiles",
    "release_for_container",
    "variant_of_folder",
    "variant_of_model",
    "variants",
    "vllm_containers",
    "vllm_for_container",
    "vllm_image_name",
]
ARITHMETIC = [
    "ASSUMED_RATE",
    "ENGINE_START_S",
    "GIB",
    "PREFETCH_SHARE",
    "Budget",
    "load_s",
    "minimum_gpus",
    "ready_within_s",
    "shapes_for_llm_args",
]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        pytest.param(package, ROOT, id="root"),
        pytest.param(check, CHECK, id="check"),
        pytest.param(catalog, CATALOG, id="catalog"),
        pytest.param(arithmetic, ARITHMETIC, id="arithmetic"),
    ],
)
def test_public_names(module, names):
    assert module.__all__ == names
    assert all(hasattr(module, name) for name in names)  # the root finds a name when it is asked for
    held = {name for name, value in vars(module).items() if name[0] != "_" and not isinstance(value, ModuleType)}
    assert held - {"annotations", "TYPE_CHECKING", "Any", "import_module"} == set(names)


def test_the_root_has_no_other_names():
    with pytest.raises(AttributeError, match="has no attribute 'build'"):
        _ = package.build


def test_the_root_imports_nothing_heavy():
    """A plan needs PyYAML alone."""
    code = "import sys; from deepseek_triton_build import *; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()

    assert {"numpy", "grpc", "tritonclient", "google.protobuf", "httpx", "rich"}.isdisjoint(loaded)
    assert "deepseek_triton_build.check" not in loaded
