"""Plans for vLLM: what a request gets, what is refused and what works instead, and the memory."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton_build import (
    Plan,
    PlanRequest,
    RefusedPlanError,
    UnknownNameError,
    Workload,
    format_files,
    make_plan,
    usable_formats,
    write_repository,
)
from deepseek_triton_build.arithmetic.gpu_memory import GIB, GPU_COUNTS, Layout
from deepseek_triton_build.arithmetic.vllm_memory import captured_sizes, vllm_budget
from deepseek_triton_build.catalog import PRECISIONS, VLLM_VERSIONS, find_gpu, find_variant, gpus, load_vllm, variants
from deepseek_triton_build.check import CheckOptions, check_repository
from deepseek_triton_build.data.type_strings import fits
from deepseek_triton_build.planning.vllm_sizes import VLLM_PROFILES
from deepseek_triton_build.render.model_configuration import model_yaml
from deepseek_triton_build.rules.rule import VllmDeployment
from support.space import neighbour, plan_or_refusal

GOLDEN = Path(__file__).with_name("golden_vllm")


def wanted(variant="deepseek-r1", gpu="h200", **changes):
    return PlanRequest(variant=variant, gpu=gpu, engine="vllm", **changes)


def values_of(plan):
    return {setting.key: setting.value for setting in plan.settings}


# Memory


# On H200s, by vLLM 0.25.1: GPUs, precision, layers, DP, share, tokens and batch; GiB, tokens of a rank, and how near.
MEASURED = [
    (8, "fp8", 61, False, 0.85, 8192, 64, 79.59, 550_944, 0.03),
    (4, "w4a16", 61, False, 0.85, 8192, 64, 86.74, 416_480, 0.03),
    (2, "fp8", 17, False, 0.88, 32768, 256, 78.02, 1_665_088, 0.11),
    (2, "fp8", 17, True, 0.88, 8192, 64, 82.22, 1_543_072, 0.03),
]


@pytest.mark.parametrize(
    ("gpus", "precision", "layers", "is_dp", "share", "tokens", "batch", "weights", "kv_tokens", "within"), MEASURED
)
def test_the_arithmetic_is_near_what_was_measured(
    gpus, precision, layers, is_dp, share, tokens, batch, weights, kv_tokens, within
):
    r1 = find_variant("deepseek-r1")
    budget = vllm_budget(
        find_gpu("h200"),
        replace(r1.architecture, num_layers=layers),
        r1.checkpoints[precision],
        Layout(tensor_parallel_size=gpus, expert_parallel_size=gpus, attention_dp=is_dp),
        gpu_memory_utilization=share,
        max_num_batched_tokens=tokens,
        max_num_seqs=batch,
        kv_dtype="bf16",
        vllm=load_vllm("0.25.1"),
    )

    assert budget.weights / GIB == pytest.approx(weights, rel=0.03)
    assert budget.kv_tokens == pytest.approx(kv_tokens, rel=within)


def test_data_parallelism_keeps_attention_whole_and_multiplies_the_kv_cache():
    tp, dp = (make_plan(wanted(num_gpus=8, parallel=way)) for way in ("tp", "dp"))

    assert dp.budget.weights - tp.budget.weights > 14 * GIB
    assert dp.budget.kv_tokens < tp.budget.kv_tokens < dp.budget.total_kv_tokens
    assert dp.max_concurrency == 8 * tp.max_concurrency


def test_the_captured_sizes_end_at_twice_a_full_batch():
    assert captured_sizes(4, 0) == (1, 2, 4, 8)
    assert captured_sizes(4, 1) == (1, 2, 4, 8, 16)
    assert captured_sizes(1024, 0)[-2:] == (496, 512)


EIGHT, FOUR_B200 = {"num_gpus": 8}, {"gpu": "b200", "num_gpus": 4, "precision": "fp4"}
FEWEST = [  # GPUs that fit
    ({}, 8),
    ({"gpu": "h100"}, 16),
    ({"gpu": "b200"}, 4),
    ({"precision": "w4a16"}, 4),
    ({"gpu": "h100", "precision": "w4a16"}, 8),
    ({"profile": "throughput"}, 8),
    ({"variant": "tiny"}, 1),
]


def test_the_fewest_gpus_that_fit_are_chosen():
    assert [(changes, make_plan(wanted(**changes)).world_size) for changes, _ in FEWEST] == FEWEST


LONG, MANY = Workload(isl=200_000, osl=1000), Workload(isl=8192, osl=1024, concurrency=512)
V4 = [  # the most and the fewest of max_num_batched_tokens, and whether a prompt's blocks keep requests away
    ("deepseek-v4-flash", "h200", 2, {}, 4096, 4096, False),
    ("deepseek-v4-flash", "h100", 4, {"mtp": 1}, 4096, 4096, False),
    ("deepseek-v4-flash-0731", "b200", 8, {"mtp": 5}, 8192, 8192, False),
    ("deepseek-v4-pro", "h200", 8, {"workload": LONG}, 2048, 512, False),
    ("deepseek-v4-pro", "h200", 8, {"workload": MANY}, 2048, 512, False),
    ("deepseek-v4-pro", "h200", 8, {"profile": "long-64k"}, 4096, 4096, True),
    ("deepseek-v4-pro", "b300", 8, {}, 8192, 8192, False),
    ("deepseek-v4.1-flash", "b200", 4, {"vllm": "0.33.0"}, 8192, 8192, False),
]


@pytest.mark.parametrize(("variant", "gpu", "gpus", "more", "most", "fewest", "is_away"), V4)
def test_prompts_of_v4_leave_room_for_a_batch(variant, gpu, gpus, more, most, fewest, is_away):
    plan = make_plan(wanted(variant, gpu, num_gpus=gpus, **more))
    held, found = plan.budget.pool.requests(plan.workload.isl, plan.workload.osl)
    assert fewest <= plan.canonical["max_num_batched_tokens"] <= most
    assert found == is_away
    assert plan.budget.longest_start >= plan.canonical["max_model_len"]
    assert not is_away or held >= plan.max_concurrency


def test_v4_needs_two_h200s():
    with pytest.raises(RefusedPlanError, match=r"145\.\d GiB") as refused:
        make_plan(wanted("deepseek-v4-flash", num_gpus=1))
    assert refused.value.suggestion == {"num_gpus": 2}


NVFP4 = {"kv_cache_dtype": "nvfp4_ds_mla"}
FORMS = [  # bytes of a block
    ("deepseek-v4-flash", {}, 1_002_240),
    ("deepseek-v4-flash", {"attention_backend": "FLASHINFER_MLA_SPARSE_DSV4", "kv_cache_dtype": "fp8"}, 891_392),
    ("deepseek-v4.1-flash", {}, 422_400),
    ("deepseek-v4.1-flash", NVFP4, 269_280),
    ("deepseek-v4.1-flash", NVFP4 | {"attention_config.indexer_kv_dtype": "mxfp4"}, 228_096),
]


@pytest.mark.parametrize(("variant", "more", "size"), FORMS)
def test_arguments_say_how_v4_stores_its_cache(variant, more, size):
    v4 = find_variant(variant)
    deployment = VllmDeployment(
        settings={"tensor_parallel_size": 8, "max_num_batched_tokens": 8192, "max_num_seqs": 64} | more,
        vllm=load_vllm("0.33.0"),
        variant=v4,
        architecture=v4.architecture,
        checkpoint=v4.checkpoints["mxfp4"],
        gpu=find_gpu("b200"),
    )
    assert deployment.budget().pool.bytes_per_block == size


# Parallelism and settings


TP, DP = "tensor_parallel_size", "data_parallel_size"
DRAFTS = {"speculative_config.method": "mtp", "speculative_config.num_speculative_tokens": 1}
FP4 = {"model": "nvidia/DeepSeek-R1-FP4", "kv_cache_dtype": "fp8", "moe_backend": "flashinfer_trtllm"}
SETTINGS = [
    (EIGHT, {TP: 8}),
    (EIGHT | {"parallel": "dp"}, {DP: 8}),
    (EIGHT | {"profile": "throughput"}, {DP: 8}),
    (EIGHT | {"profile": "throughput", "parallel": "tp"}, {TP: 8}),
    (FOUR_B200, FP4 | {TP: 4, "attention_backend": "CUTLASS_MLA"}),
    (EIGHT | {"gpu": "b200", "parallel": "dp"}, {DP: 8}),
    (EIGHT | {"gpu": "rtx-pro-6000", "precision": "fp4"}, {TP: 8, "kv_cache_dtype": "fp8"}),
    ({"gpu": "h100"}, {TP: 16, "nnodes": 2}),
    ({"gpu": "h100", "num_gpus": 16, "pipeline_parallel_size": 2}, {TP: 8, "pipeline_parallel_size": 2, "nnodes": 2}),
    ({"mtp": 1}, DRAFTS),
    ({"variant": "deepseek-v3.2-exp"}, {"tokenizer_mode": "deepseek_v32"}),
    ({"variant": "deepseek-v3.2-speciale"}, {"tokenizer_mode": "deepseek_v32"}),
    ({"kv_dtype": "fp8"}, {"kv_cache_dtype": "fp8"}),
    ({"variant": "tiny", "num_gpus": 4}, {TP: 4, "model": "tiny"}),
    ({"variant": "tiny-r1", "num_gpus": 8}, {DP: 8}),
]
COMMON = {"enable_expert_parallel": True, "triton_config.engine": "vllm", "scheduling_policy": "priority"}


def test_what_a_request_gets(subtests):
    for changes, expected in SETTINGS:
        with subtests.test(f"{changes}"):
            values = values_of(make_plan(wanted(**changes)))
            assert (expected | COMMON | {"trust_remote_code": False}).items() <= values.items()
            assert (TP in values) != (DP in values)
            assert ("attention_backend" in values) == (changes.get("gpu") == "b200")


def lengths(isl, osl):
    return {"workload": Workload(isl=isl, osl=osl)}


LIMITS = [  # max_model_len, max_num_batched_tokens, max_num_seqs
    ({}, 65536, 16384, 128),
    ({"profile": "latency"}, 65536, 8192, 32),
    ({"profile": "throughput"}, 65536, 8192, 256),
    ({"profile": "long-64k"}, 66560, 32768, 16),
    (lengths(8000, 1000), 9216, 32768, 128),
    (lengths(1000, 8000), 9216, 16384, 128),
    ({"workload": Workload(concurrency=512)}, 65536, 16384, 512),
    ({"workload": Workload(concurrency=500), "parallel": "dp"}, 65536, 8192, 63),  # of each rank
    ({"variant": "tiny"}, 4096, 1024, 8),
]
SHARES = [  # of the memory, and GiB that are left for what is taken beside it
    ({}, 0.9, 7.1),
    ({"parallel": "dp"}, 0.9, 9.7),
    ({"gpu": "b200"}, 0.95, 7.4),
    (EIGHT | {"gpu": "b200", "parallel": "dp"}, 0.9, 9.7),
    ({"gpu": "h100"}, 0.9, 6.9),
]


def test_the_limits_and_the_share_of_the_memory():
    found = []
    for changes, *_ in LIMITS:
        values = values_of(make_plan(wanted(**changes)))
        found.append((changes, values["max_model_len"], values["max_num_batched_tokens"], values["max_num_seqs"]))
    assert found == LIMITS
    for changes, share, beside in SHARES:
        plan = make_plan(wanted(**changes))
        assert values_of(plan)["gpu_memory_utilization"] == share
        assert plan.budget.free > beside * GIB


BLACKWELL = {"VLLM_ATTENTION_BACKEND": "CUTLASS_MLA"}
VARIABLES = [  # of the published recipes, which the plan leaves
    ({}, {"VLLM_USE_DEEP_GEMM": "1"}),
    ({"precision": "w4a16"}, {}),
    ({"gpu": "b200"}, BLACKWELL | {"VLLM_USE_FLASHINFER_MOE_FP4": "1"}),
    ({"gpu": "b200", "precision": "fp8"}, BLACKWELL | {"VLLM_USE_FLASHINFER_MOE_FP8": "1"}),
]


def test_variables_of_the_recipes_are_left_out():
    found = [(changes, make_plan(wanted(**changes)).unset_environment) for changes, _ in VARIABLES]
    assert [(changes, {one.name: one.value for one in unset}) for changes, unset in found] == VARIABLES


def test_what_does_not_fit_is_made_smaller_and_the_reasons_say_so():
    plan = make_plan(wanted(gpu="b200", num_gpus=4, precision="fp8", profile="long-64k"))
    reasons = {setting.key: setting.reason for setting in plan.settings}

    assert values_of(plan)["max_num_batched_tokens"] < 32768
    assert "made smaller" in reasons["max_num_batched_tokens"]
    assert plan.budget.kv_tokens >= values_of(plan)["max_model_len"]


def test_settings_by_hand_change_the_budget():
    usual = make_plan(wanted(num_gpus=8))
    overrides = (("gpu_memory_utilization", 0.85), ("enable_prefix_caching", False), ("triton_config.drain_s", 5))
    own = make_plan(wanted(num_gpus=8, overrides=overrides))

    assert own.budget.kv_tokens < usual.budget.kv_tokens
    assert values_of(own)["enable_prefix_caching"] is False
    assert values_of(own)["triton_config.drain_s"] == 5
    assert {s.key: s.reason for s in own.settings}["gpu_memory_utilization"] == "set by hand instead of 0.9"


def test_where_the_version_runs():
    for version in VLLM_VERSIONS:
        plan = make_plan(wanted(num_gpus=8, vllm=version))
        month = {"0.24.0": "26.07", "0.27.1": "26.08"}.get(version)
        in_container = f"nvcr.io/nvidia/tritonserver:{month}-vllm-python-py3" if month else None
        assert (plan.vllm, plan.image) == (load_vllm(version), in_container)
        assert plan.image_for("vllm-serve") == f"vllm/vllm-openai:v{version}"
    for version in ("0.23.0", "latest"):
        with pytest.raises(UnknownNameError, match="vLLM version"):
            make_plan(wanted(vllm=version))


def test_min_p_is_left_out_of_the_defaults_beside_mtp(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "min_p": 0.1}')
    plan = make_plan(wanted(num_gpus=8, mtp=1, model=str(tmp_path)))

    assert "triton_config.default_sampling.min_p" not in values_of(plan)
    assert values_of(plan)["triton_config.default_sampling.temperature"] == 0.6
    assert [omission.key for omission in plan.omissions] == ["triton_config.default_sampling.min_p"]


# Refusals


def by_hand(key, value):
    return {"overrides": ((key, value),)}


FOUR_H100 = {"num_gpus": 4, "gpu": "h100", "precision": "w4a16"}
REFUSED = [
    ({"num_gpus": 4}, "weights take 158.0 GiB a GPU"),
    ({"num_gpus": 4}, "what works: --gpus 8, or --precision w4a16"),
    (FOUR_H100, "86.6 GiB a GPU"),
    (FOUR_H100, "works: --gpus 8"),
    ({"num_gpus": 3}, "3 GPUs can't share"),
    ({"precision": "fp4"}, "X002"),
    ({"precision": "w4a8"}, "what works: --precision"),
    ({"gpu": "a100"}, "X001"),
    ({"num_gpus": 16, "parallel": "dp"}, "X006"),
    ({"num_gpus": 16, "parallel": "dp", "pipeline_parallel_size": 2}, "X006"),
    ({"variant": "tiny", "num_gpus": 8, "parallel": "tp"}, "X005"),
    ({"profile": "wide-ep"}, "is for TensorRT-LLM"),
    ({"relaxed_acceptance": True}, "no relaxed acceptance"),
    ({"release": "1.1.0"}, "leave --trtllm out"),
    ({"preset": "x"}, "simulated engine"),
    (lengths(163840, 1), "more than the 163,840"),
    ({"variant": "deepseek-v4-flash", "num_gpus": 16, "parallel": "tp"}, "X004"),
    ({"variant": "deepseek-v4-flash", "num_gpus": 1}, "what works: --gpus 2"),
    ({"variant": "deepseek-v4.1-flash", "vllm": "0.27.1"}, "what works: --vllm 0.31.0"),
    ({"variant": "deepseek-v4-pro-0813", "num_gpus": 8, "mtp": 2}, "X027"),
    (by_hand("max_batch_size", 8), "it has max_num_seqs"),
    (by_hand("max_num_seq", 8), "did you mean max_num_seqs?"),
    (by_hand("max_num_seqs", "x"), "expected a whole number"),
    (by_hand("max_num_seqs", 0), "whole number from 1"),
    (by_hand("max_num_seqs", None), "from 1, as other settings"),
    (by_hand("max_num_batched_tokens", None), "got null"),
    (by_hand("max_model_len", None), "got null"),
    (by_hand("max_model_len", -1), "got -1"),
    (by_hand("speculative_config.num_speculative_token", 1), "mean speculative_config.num_speculative_tokens?"),
    (by_hand("enforce_eager.x", 1), "has no argument"),
    (by_hand("tensor_parallel_size", 4), "use --gpus and --parallel"),
    (by_hand("gpu_memory_utilization", 0.5), "--set leaves room for 0"),
    (by_hand("triton_config.engin", 1), "did you mean engine?"),
]


@pytest.mark.slow
def test_what_cannot_work_is_refused_in_one_line(subtests):
    for changes, expected in REFUSED:
        with subtests.test(f"{changes}: {expected}"):
            with pytest.raises(RefusedPlanError) as caught:
                make_plan(wanted(**changes))
            assert expected in str(caught.value)
            assert "\n" not in str(caught.value)
            assert isinstance(plan_or_refusal(neighbour(wanted(**changes), caught.value)), Plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value"), [("hf_overrides.rope_theta", 1), ("kv_transfer_config.kv_connector", "x"), ("max_model_len", 1)]
)
def test_what_vllm_takes_is_written_and_checks(key, value, tmp_path):
    plan = make_plan(wanted(overrides=((key, value), ("triton_config.default_max_tokens", 1))))
    write_repository(format_files("triton", plan, version="1"), tmp_path / "r1")

    assert values_of(plan)[key] == value
    assert [finding for finding in check_repository(tmp_path / "r1").findings if finding.severity == "error"] == []


# The whole space


AXES = {
    "variant": st.sampled_from([name for name, variant in variants().items() if "vllm" in variant.engines]),
    "gpu": st.sampled_from(list(gpus())),
    "num_gpus": st.sampled_from([None, *GPU_COUNTS]),
    "precision": st.sampled_from([None, *PRECISIONS]),
    "profile": st.sampled_from(["balanced", *VLLM_PROFILES, "wide-ep", "ctx"]),
    "vllm": st.sampled_from(VLLM_VERSIONS),
    "parallel": st.sampled_from([None, "tp", "dp"]),
    "mtp": st.sampled_from([None, 0, 1, 3]),
    "kv_dtype": st.sampled_from([None, "auto", "fp8"]),
    "pipeline_parallel_size": st.sampled_from([1, 2, 3]),
    "workload": st.builds(
        Workload,
        isl=st.none() | st.integers(1, 200_000),
        osl=st.none() | st.integers(1, 200_000),
        concurrency=st.none() | st.integers(1, 20_000),
    ),
}


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.fixed_dictionaries(AXES))
def test_every_request_gets_a_plan_that_fits_or_a_neighbour_that_does(axes):
    request = PlanRequest(engine="vllm", **axes)
    answer = plan_or_refusal(request)
    if isinstance(answer, RefusedPlanError):
        assert "\n" not in str(answer)
        assert answer.suggestion
        request = neighbour(request, answer)
        answer = plan_or_refusal(request)
    _assert_sound(answer)


def _assert_sound(plan):
    values = values_of(plan)
    assert plan.budget.kv_tokens >= values["max_model_len"]
    assert plan.budget.free > 0
    assert values["max_num_batched_tokens"] >= values["max_num_seqs"]
    for setting in plan.settings:
        assert setting.reason
        if not setting.key.startswith("triton_config."):
            known = plan.vllm.find(setting.key)
            assert fits(setting.value, known.type), setting
    assert {variable.name for variable in plan.environment} <= plan.vllm.environment
    most = values["max_num_seqs"] * plan.layout.attention_dp_size
    for requests, tokens in values["triton_config.warmup.shapes"]:
        assert requests <= most
        assert tokens < values["max_model_len"]


@pytest.mark.nightly  # test_every_request_gets_a_plan_that_fits_or_a_neighbour_that_does is its sample
def test_every_plain_request_gets_a_plan_or_a_neighbour():
    names = [name for name, variant in variants().items() if "vllm" in variant.engines]
    for axes in itertools.product(names, gpus(), (None, *GPU_COUNTS), PRECISIONS, VLLM_PROFILES):
        variant, gpu, number, precision, profile = axes
        request = wanted(variant, gpu, num_gpus=number, precision=precision, profile=profile)
        answer = plan_or_refusal(request)
        if isinstance(answer, RefusedPlanError):
            answer = plan_or_refusal(neighbour(request, answer))
        _assert_sound(answer)


# Goldens: python tests/build/test_vllm_plan.py writes them

GOLDENS = {
    "r1-fp8-h200x8-tp": wanted("deepseek-r1-0528", num_gpus=8),
    "r1-fp8-h200x8-dp": wanted("deepseek-r1-0528", num_gpus=8, parallel="dp"),
    "r1-fp4-b200x4-tp": wanted(gpu="b200", num_gpus=4, precision="fp4"),
    "r1-fp4-b200x4-dp": wanted(gpu="b200", num_gpus=4, precision="fp4", parallel="dp"),
    "r1-w4a16-h200x4": wanted(num_gpus=4, precision="w4a16"),
    "v3.2-fp8-h200x8": wanted("deepseek-v3.2-exp", num_gpus=8),
    "tiny-h200x1": wanted("tiny", num_gpus=1),
}


def golden_text(request):
    return model_yaml(make_plan(request), stamp="golden")


@pytest.mark.parametrize("name", GOLDENS)
def test_the_settings_are_those_of_the_golden_file_and_check_finds_nothing_wrong(name, tmp_path):
    plan = make_plan(GOLDENS[name])
    assert golden_text(GOLDENS[name]) == (GOLDEN / f"{name}.yaml").read_text("utf-8")
    for format in {"triton", "vllm-serve"} & {*usable_formats(plan)}:
        write_repository(format_files(format, plan, version="1"), tmp_path / format)
        report = check_repository(tmp_path / format, CheckOptions())
        assert [finding.code for finding in report.findings if finding.severity != "note"] == []
        assert [model.variant for model in report.models] == [plan.variant.name]


def test_a_plan_for_tensorrt_llm_does_not_depend_on_vllm():
    request = PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=8)
    assert make_plan(request).vllm is None
    assert make_plan(replace(request, engine="vllm")).release is None


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, request in GOLDENS.items():
        (GOLDEN / f"{name}.yaml").write_text(golden_text(request), "utf-8")
