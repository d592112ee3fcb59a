"""DeepSeek-V4 and V4.1 on vLLM: what a plan sets, beside what the guides print, and which draft --mtp turns on."""

from pathlib import Path

import pytest
import yaml

from deepseek_triton_build import PlanRequest, RefusedPlanError, format_files, make_plan, write_repository
from deepseek_triton_build.catalog import VLLM_VERSIONS, load_vllm
from deepseek_triton_build.check import CheckOptions, check_repository
from deepseek_triton_build.data.own_files import load_yaml
from deepseek_triton_build.render.vllm_commands import engine_flags
from support.scripts import script_runner

FLASH, PRO, V41 = "deepseek-v4-flash", "deepseek-v4-pro", "deepseek-v4.1-flash"
OFFICIAL_FLASH, OFFICIAL_PRO = f"{FLASH}-0731", f"{PRO}-0813"
TP, DP = "tensor_parallel_size", "data_parallel_size"
FP4_KEYS, KEYS = "attention_config.use_fp4_indexer_cache", "attention_config.indexer_kv_dtype"


def plan_for(variant, gpu, number=None, **changes):
    return make_plan(PlanRequest(variant=variant, engine="vllm", gpu=gpu, num_gpus=number, **changes))


GUIDES = yaml.safe_load(Path(__file__).with_name("v4_guides.yaml").read_text("utf-8"))


@pytest.mark.parametrize("model", GUIDES)
def test_a_plan_has_what_the_guides_print_or_the_table_says_why_not(model, subtests):
    everywhere = GUIDES[model]["everywhere"]
    for name, guide in GUIDES[model]["guides"].items():
        with subtests.test(name):
            variant, gpu, number, *more = guide["plan"]
            plan = plan_for(variant, gpu, number, **(more[0] if more else {}))
            printed = everywhere["prints"] | guide["prints"]
            others = everywhere["instead"] | guide.get("instead", {})
            values = dict.fromkeys(printed) | plan.canonical
            assert {key: values[key] for key in printed} == printed
            # What is followed after all is not an exception any more.
            assert [key for key, (value, why) in others.items() if values.get(key) == value or not why] == []
            assert {one.name: one.value for one in plan.environment}["VLLM_ENGINE_READY_TIMEOUT_S"] == "3600"
            assert plan.unset_environment == ()


def test_the_settings_are_of_the_versions_that_have_them(subtests):
    for version in VLLM_VERSIONS:
        with subtests.test(version):
            values = plan_for(FLASH, "b200", 4, vllm=version).canonical
            is_new = not load_vllm(version).is_before("0.31.0")
            keys = {FP4_KEYS: None, KEYS: "mxfp4"} if is_new else {FP4_KEYS: True}
            assert keys.items() <= {key: values.get(key) for key in keys}.items()


def test_no_two_rows_set_the_same_for_a_deployment():
    for variant in (FLASH, OFFICIAL_PRO, V41, "deepseek-r1", "deepseek-v3.2"):
        for gpu in ("h200", "b200"):
            keys = [setting.key for setting in plan_for(variant, gpu, 8, mtp=5).settings]
            assert len(keys) == len({*keys})
    names = {"when", "since", "until", "source", "settings", "environment"}
    assert [row for row in load_yaml("vllm_settings.yaml") if row.keys() - names] == []


PARALLEL = [  # V4's KV cache is whole on each rank of TP: DP where the weights leave room, by default
    ((FLASH, "h200", 2), {DP: 2}),
    ((FLASH, "h100", 4), {DP: 4}),
    ((FLASH, "gb300", 4), {DP: 4}),
    ((FLASH, "h200", 4, {"profile": "latency"}), {TP: 4}),
    ((FLASH, "h200", 4, {"parallel": "tp"}), {TP: 4}),
    ((PRO, "b200", 8), {DP: 8}),
    ((PRO, "h200", 8), {TP: 8}),
    ((PRO, "h200", 8, {"profile": "throughput"}), {TP: 8}),
    ((V41, "h200", 8), {TP: 8}),
    ((V41, "h200", 8, {"profile": "throughput"}), {DP: 8}),
]


def test_data_parallelism_is_chosen_where_it_holds_more_requests():
    found = []
    for (variant, gpu, number, *changes), _ in PARALLEL:
        values = plan_for(variant, gpu, number, **(changes[0] if changes else {})).canonical
        found.append({key: values[key] for key in (TP, DP) if key in values})
    assert found == [expected for _, expected in PARALLEL]


def test_a_plan_takes_the_nearest_version_that_has_the_model():
    assert plan_for(V41, "h200", 8).vllm.version == "0.31.0"
    assert plan_for(V41, "h200", 8, vllm="0.33.0").vllm.version == "0.33.0"
    with pytest.raises(RefusedPlanError) as refused:
        plan_for(V41, "h200", 8, vllm="0.27.1")
    assert refused.value.suggestion == {"vllm": "0.31.0"}


def test_vllms_own_server_gets_the_models_parsers(tmp_path):
    run = script_runner(tmp_path)
    for variant, name in ((FLASH, "deepseek_v4"), (V41, "deepseek_v41")):
        plan = plan_for(variant, "h200", 8)
        parsers = ["--reasoning-parser", name, "--enable-auto-tool-choice", "--tool-call-parser", name]
        assert run(plan, "vllm-serve").argv[-5:] == parsers
        assert not any("parser" in flag.words[0] for flag in engine_flags(plan))


BUILT = [
    (FLASH, "h200", 4, {"vllm": "0.31.0"}),
    (FLASH, "h100", 4, {"vllm": "0.31.0", "mtp": 1}),
    (FLASH, "b200", 8, {"mtp": 2}),
    (FLASH, "b200", 4, {"precision": "fp4"}),
    (OFFICIAL_FLASH, "b300", 4, {"mtp": 6}),
    (OFFICIAL_FLASH, "gb300", 4, {"vllm": "0.33.0"}),
    (PRO, "b200", 8, {}),
    (OFFICIAL_PRO, "h200", 8, {"vllm": "0.33.0"}),
    (V41, "h200", 8, {}),
    (V41, "gb200", 4, {"mtp": 5}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "gpu", "number", "changes"), BUILT)
def test_check_finds_nothing_in_what_is_built(variant, gpu, number, changes, tmp_path):
    plan = plan_for(variant, gpu, number, **changes)
    for format in ("triton", "vllm-serve"):
        write_repository(format_files(format, plan, version="1"), tmp_path / format)
        report = check_repository(tmp_path / format, CheckOptions())
        assert [finding.code for finding in report.findings if finding.severity != "note"] == []
        assert [model.variant for model in report.models] == [variant]
