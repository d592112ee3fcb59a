"""The planner's decisions and their reasons."""

import json

import pytest

from deepseek_triton_build import PlanRequest, RefusedPlanError, UnknownNameError, Workload, format_request, make_plan
from deepseek_triton_build.catalog import RELEASES

GIB = 2**30


def planned(**changes):
    return make_plan(PlanRequest(**({"variant": "deepseek-r1", "gpu": "h200", "num_gpus": 8} | changes)))


def values(plan):
    return {setting.key: setting.value for setting in plan.settings}


def reason(plan, key):
    return next(setting.comment for setting in plan.settings if setting.key == key)


def omitted(plan):
    return {omission.key for omission in plan.omissions}


def environment(plan):
    return {variable.name: variable.value for variable in plan.environment}


B200 = {"gpu": "b200", "num_gpus": 8}
V32 = {"variant": "deepseek-v3.2-exp"}


def test_r1_on_eight_h200_is_tensor_parallel_over_all_of_them():
    chosen = values(planned())

    assert chosen["model"] == "deepseek-ai/DeepSeek-R1"
    assert chosen["tensor_parallel_size"] == chosen["moe_expert_parallel_size"] == 8
    assert chosen["moe_config.backend"] == "CUTLASS"
    assert chosen["triton_config.engine"] == "tensorrt_llm"
    assert chosen["triton_config.default_sampling.temperature"] == 0.6


@pytest.mark.parametrize("changes", [{}, B200, V32, {"profile": "throughput"}, {"profile": "latency"}], ids=str)
def test_every_line_has_a_reason(changes):
    plan = planned(**changes)

    assert [setting.key for setting in plan.settings if not setting.reason] == []
    assert [variable.name for variable in plan.environment if not variable.reason] == []
    assert [omission.key for omission in plan.omissions if not omission.reason] == []


def test_the_tiny_model_needs_no_gpu():
    plan = make_plan(PlanRequest(variant="tiny"))

    assert plan.engine == "reference"
    assert plan.budget is None
    assert all(setting.reason for setting in plan.settings)


def test_a_full_batch_of_default_requests_fits_the_kv_cache():
    plan = planned()
    chosen = values(plan)

    assert chosen["max_batch_size"] * (chosen["triton_config.default_max_tokens"] + 1024) <= plan.budget.kv_tokens
    assert plan.budget.free > 0


def test_chunked_prefill_has_whole_blocks():
    chosen = values(planned())

    assert chosen["enable_chunked_prefill"]
    assert chosen["max_num_tokens"] % 64 == 0


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("profile", ["balanced", "throughput", "latency"])
def test_only_keys_of_the_release_are_planned(release, profile):
    plan = planned(release=release, profile=profile)
    known = plan.release.keys()

    assert [k for k in values(plan) if not k.startswith("triton_config.") and k not in known] == []


def test_few_requests_run_without_attention_dp_and_many_with_it():
    few = planned(workload=Workload(isl=1024, osl=1024, concurrency=128))
    many = planned(workload=Workload(isl=1024, osl=1024, concurrency=1024))

    assert values(few)["enable_attention_dp"] is False
    assert values(few)["max_batch_size"] == 128
    assert values(many)["enable_attention_dp"] is True
    assert values(many)["max_batch_size"] == 128  # on each of 8 ranks
    assert many.max_concurrency == 1024
    assert "CUDA graphs" in reason(few, "enable_attention_dp")


def test_the_limits_follow_from_the_lengths():
    chosen = values(planned(profile="throughput", workload=Workload(isl=2000, osl=500, concurrency=800)))

    assert chosen["max_seq_len"] == 2560  # whole blocks of 256
    assert chosen["max_num_tokens"] >= 2000 + 100
    assert chosen["max_batch_size"] == 100
    assert chosen["cuda_graph_config.max_batch_size"] == 100
    assert chosen["triton_config.default_max_tokens"] == 500


def test_more_than_the_checkpoint_reads_is_refused():
    with pytest.raises(RefusedPlanError, match="163,840"):
        planned(workload=Workload(isl=163_840, osl=1024))


def test_the_memory_fallback_is_named():
    assert "3072" in reason(planned(), "max_num_tokens")


def test_sixteen_h100_are_two_nodes():
    plan = planned(gpu="h100", num_gpus=16)

    assert (plan.num_nodes, plan.gpus_per_node, plan.world_size) == (2, 8, 16)
    assert values(plan)["tensor_parallel_size"] == 16
    assert values(plan)["moe_expert_parallel_size"] == 8


def test_pipeline_stages_can_be_asked_for():
    plan = planned(gpu="h100", num_gpus=16, pipeline_parallel_size=2)

    assert (values(plan)["tensor_parallel_size"], values(plan)["pipeline_parallel_size"]) == (8, 2)
    assert plan.world_size == 16


def test_no_more_requests_are_planned_than_the_kv_cache_holds():
    plan = planned(workload=Workload(isl=8192, osl=1024, concurrency=4096))

    assert plan.max_concurrency <= plan.budget.concurrent_requests(8192, 1024)
    assert [warned.rule.code for warned in plan.warnings if warned.rule.severity == "warning"] == ["L010"]
    assert "holds no more" in reason(plan, "max_batch_size")


@pytest.mark.parametrize(
    "workload",
    [Workload(isl=8192, osl=1024), Workload(concurrency=48), Workload(concurrency=512), Workload(isl=100, osl=100)],
    ids=str,
)
@pytest.mark.parametrize("profile", ["balanced", "throughput", "latency", "long-64k", "quickstart"])
def test_no_workload_doubles_the_gpus_unasked(profile, workload):
    usual, asked = planned(profile=profile, num_gpus=None), planned(profile=profile, num_gpus=None, workload=workload)

    assert asked.world_size == usual.world_size


def test_attention_dp_makes_room_before_it_is_given_up():
    plan = planned(gpu="h100", num_gpus=16, workload=Workload(isl=8192, osl=8192, concurrency=2000))

    assert values(plan)["enable_attention_dp"] is True
    assert values(plan)["moe_config.max_num_tokens"] <= 8192
    assert plan.budget.concurrent_requests(8192, 8192) > 300


@pytest.mark.parametrize("rows", [1, 128])
def test_attention_dp_that_is_set_by_hand_makes_room_too(rows):
    """Without chunks, each of 32 ranks would gather 32 x 8,192 tokens for its experts."""
    plan = planned(num_gpus=32, overrides=(("enable_attention_dp", True), ("max_batch_size", rows)))

    assert values(plan)["moe_config.max_num_tokens"] == 8192
    assert plan.max_concurrency == 32 * rows
    assert reason(plan, "enable_attention_dp") == "set by hand"
    assert plan.budget.workspace < 10 * GIB


def test_attention_dp_that_is_turned_off_by_hand_takes_its_settings_along():
    chosen = values(planned(profile="throughput", overrides=(("enable_attention_dp", False),)))

    assert chosen["enable_attention_dp"] is False
    assert not [key for key in chosen if key.startswith("attention_dp_config")]


def test_reasons_are_of_the_workload_that_is_asked_for():
    plan = planned(profile="throughput", workload=Workload(isl=6000, osl=700, concurrency=700))

    assert "128 requests" not in reason(plan, "max_batch_size")
    assert "tokens a GPU" in reason(plan, "kv_cache_config.free_gpu_memory_fraction")


def test_the_rows_of_an_expert_count_the_drafts():
    plain, drafting = (
        planned(profile="latency", mtp=mtp, workload=Workload(isl=1024, osl=1024, concurrency=256)) for mtp in (0, 3)
    )

    assert "8 rows" in reason(plain, "moe_config.backend")
    assert "32 rows" in reason(drafting, "moe_config.backend")


def test_wide_ep_keeps_attention_dp_whatever_the_concurrency():
    chosen = values(planned(gpu="gb200-nvl72", num_gpus=32, profile="wide-ep", workload=Workload(concurrency=64)))

    assert chosen["moe_config.backend"] == "WIDEEP"
    assert chosen["enable_attention_dp"] is True


def test_wide_ep_takes_the_recipe_of_as_many_gpus():
    chosen = values(planned(gpu="gb200-nvl72", num_gpus=64, profile="wide-ep", workload=Workload(isl=2000)))

    assert chosen["moe_expert_parallel_size"] == 64
    assert chosen["moe_config.load_balancer.num_slots"] % 64 == 0


def test_without_wide_ep_there_is_no_load_balancer():
    plan = planned(gpu="gb200-nvl72", num_gpus=8, profile="wide-ep", precision="fp4")

    assert [key for key in values(plan) if "load_balancer" in key] == []


def test_long_prompts_of_v32_go_in_chunks_that_do_not_crash():
    chosen = values(planned(**V32, profile="throughput", workload=Workload(isl=20_000, osl=100)))

    assert chosen["enable_chunked_prefill"] is True
    assert chosen["max_num_tokens"] == 8192


@pytest.mark.parametrize("isl", [7000, 8100, 8192, 9000])
def test_v32_never_has_iterations_that_crash(isl):
    assert values(planned(**V32, profile="throughput", workload=Workload(isl=isl)))["max_num_tokens"] <= 8192


def test_the_transfer_buffer_takes_the_longest_prompt():
    chosen = values(planned(profile="gen", mtp=3))

    assert chosen["cache_transceiver_config.max_tokens_in_buffer"] >= chosen["max_num_tokens"]


def test_default_max_tokens_leaves_room_for_the_prompt():
    plan = planned(profile="long-64k")
    chosen = values(plan)

    assert chosen["triton_config.default_max_tokens"] + plan.workload.isl <= chosen["max_seq_len"]


def test_a_fuller_workload_keeps_the_recipe():
    few = planned(**B200, profile="latency", workload=Workload(concurrency=4))
    more = planned(**B200, profile="latency", workload=Workload(isl=1024, osl=1024, concurrency=4))

    assert few.recipe.id == more.recipe.id == "b200-fp4-few-requests"
    assert values(more)["max_batch_size"] == 4


def test_attention_dp_divides_the_experts_of_the_mtp_layer():
    plain, drafting = (planned(profile="throughput", mtp=mtp) for mtp in (0, 1))

    assert (drafting.budget.weights - plain.budget.weights) / GIB == pytest.approx(5.2, abs=0.2)


def test_the_users_own_checkpoint_may_have_an_unpublished_precision():
    plan = planned(variant="deepseek-v3", gpu="b200", num_gpus=4, precision="fp4", model="/models/V3-FP4")

    assert values(plan)["model"] == "/models/V3-FP4"
    assert plan.checkpoint.weight_bytes == pytest.approx(423.6e9, rel=0.01)


@pytest.mark.parametrize("field", ["isl", "osl", "concurrency"])
def test_a_workload_counts_from_one(field):
    with pytest.raises(RefusedPlanError, match=f"{field} 0"):
        planned(workload=Workload(**{field: 0}))


def test_gb200_trays_have_four_gpus():
    assert planned(gpu="gb200", precision="fp8").num_nodes == 2


def test_the_gemm_kernel_of_hopper_is_named_with_its_threshold():
    assert "swapAB below 32" in reason(planned(), "moe_config.backend")
    assert "swapAB below 64" in reason(planned(gpu="h20-141"), "moe_config.backend")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "expected", "words"),
    [
        pytest.param({}, "fp8", "FlashMLA", id="Hopper"),
        pytest.param(B200, "fp8", "trtllm-gen", id="Blackwell"),
        pytest.param({"precision": "w4a8", "num_gpus": 4}, "auto", "16 bit", id="W4A8"),
        pytest.param(V32, "auto", "16 bit", id="V3.2 on Hopper"),
        pytest.param(V32 | B200, "fp8", "trtllm-gen", id="V3.2 on Blackwell"),
        pytest.param({"kv_dtype": "auto"}, "auto", "the checkpoint's own", id="asked for"),
    ],
)
def test_the_kv_cache_is_fp8_where_that_works(changes, expected, words):
    plan = planned(**changes)

    assert values(plan)["kv_cache_config.dtype"] == expected
    assert words in reason(plan, "kv_cache_config.dtype")


def test_v32_has_its_special_settings():
    chosen = values(planned(**V32))

    assert chosen["kv_cache_config.tokens_per_block"] == 64
    assert chosen["kv_cache_config.enable_block_reuse"] is False
    assert chosen["enable_chunked_prefill"] is False
    assert chosen["max_num_tokens"] <= 8192


def test_v32_may_be_given_what_newer_releases_have_with_a_warning():
    plan = planned(**V32, overrides=(("kv_cache_config.enable_block_reuse", True),))

    assert values(plan)["kv_cache_config.enable_block_reuse"] is True
    found = {warned.violation.key: warned.rule.severity for warned in plan.warnings}
    assert found["kv_cache_config.enable_block_reuse"] == "warning"


def test_mtp_keeps_the_model_cards_sampling_where_the_release_can():
    new, old = (planned(mtp=1, release=release) for release in ("1.2.1", "1.1.0"))

    assert values(new)["speculative_config.allow_advanced_sampling"] is True
    assert values(new)["triton_config.default_sampling.temperature"] == 0.6
    assert "triton_config.default_sampling.temperature" in omitted(old)
    assert "triton_config.default_sampling.temperature" not in values(old)


def test_mtp_chooses_its_own_sampler():
    assert "sampler_type" not in values(planned(mtp=3))
    assert values(planned())["sampler_type"] == "TRTLLMSampler"


def test_relaxed_acceptance_is_for_r1():
    chosen = values(planned(mtp=3, relaxed_acceptance=True))
    assert chosen["speculative_config.relaxed_topk"] == 10
    assert "speculative_config.allow_advanced_sampling" not in chosen

    with pytest.raises(RefusedPlanError, match="R1"):
        planned(variant="deepseek-v3", mtp=3, relaxed_acceptance=True)


def test_relaxed_acceptance_needs_mtp():
    with pytest.raises(RefusedPlanError, match="--mtp"):
        planned(relaxed_acceptance=True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param(B200 | {"release": "1.1.0"}, {"TRTLLM_ENABLE_PDL": "1"}, id="PDL before 1.2"),
        pytest.param(B200, {}, id="PDL by itself"),
        pytest.param(
            {"workload": Workload(isl=8192, osl=1024)},
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:8192"},
            id="8K/1K on H200",
        ),
        pytest.param(
            {"workload": Workload(isl=8192, osl=1024), "release": "1.0.0"},
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:8192"},
            id="8K/1K on H200, older PyTorch",
        ),
        pytest.param({"profile": "throughput"}, {"TRTLLM_DG_JIT_USE_NVCC": "1"}, id="DeepGEMM through NVCC"),
    ],
)
def test_the_environment(changes, expected):
    assert environment(planned(**changes)) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param(
            {},
            {
                "TRTLLM_DG_ENABLED": "0 turns it off",
                "TRTLLM_DG_JIT_USE_NVCC": "needs CUDA 12.3",
                "CUDA_HOME": "only NVCC needs it",
                "TRTLLM_DG_JIT_DUMP_CUBIN": "to keep NVRTC's kernels on disk",
                "TRTLLM_DG_JIT_DEBUG": "prints how each kernel is compiled",
            },
            id="DeepGEMM through NVRTC",
        ),
        pytest.param(
            {"profile": "throughput"},
            {
                "TRTLLM_DG_ENABLED": "0 turns it off",
                "CUDA_HOME": "$CUDA_HOME/bin/nvcc, or without CUDA_HOME the nvcc on PATH",
                "TRTLLM_DG_JIT_DUMP_CUBIN": "without effect here",
                "TRTLLM_DG_JIT_DEBUG": "prints",
            },
            id="DeepGEMM through NVCC",
        ),
        pytest.param({"precision": "w4a8", "num_gpus": 4}, {}, id="no DeepGEMM"),
        pytest.param(B200, {"TRTLLM_ENABLE_PDL": "by itself from 1.2"}, id="PDL by itself"),
        pytest.param(B200 | {"release": "1.1.0"}, {}, id="PDL before 1.2"),
        pytest.param(
            B200 | {"profile": "ctx"},
            {"TRTLLM_ENABLE_PDL": "by itself", "TRTLLM_USE_UCX_KVCACHE": "cache_transceiver_config.backend says it"},
            id="UCX",
        ),
        pytest.param({"variant": "tiny", "gpu": None, "num_gpus": None}, {}, id="another engine"),
    ],
)
def test_variables_that_the_plan_does_not_set_have_a_reason(changes, expected):
    unset = {variable.name: variable for variable in planned(**changes).unset_environment}

    assert unset.keys() == expected.keys()
    assert [name for name, part in expected.items() if part not in unset[name].reason] == []
    assert all(variable.value and variable.source for variable in unset.values())


def test_the_users_own_settings_come_last():
    plan = planned(overrides=(("max_num_tokens", 3072), ("triton_config.max_inflight", 64)))

    assert values(plan)["max_num_tokens"] == 3072
    assert "set by hand" in reason(plan, "max_num_tokens")
    assert values(plan)["triton_config.max_inflight"] == 64


def test_the_budget_is_that_of_the_final_settings():
    plan, less = planned(), planned(overrides=(("kv_cache_config.free_gpu_memory_fraction", 0.4),))

    assert less.budget.kv_cache == pytest.approx(plan.budget.kv_cache / 2, abs=1)
    assert values(less)["triton_config.default_max_tokens"] < values(plan)["triton_config.default_max_tokens"]


def test_settings_by_hand_that_leave_no_memory_are_refused():
    with pytest.raises(RefusedPlanError, match="leaves room for"):
        planned(overrides=(("kv_cache_config.free_gpu_memory_fraction", 0.001),))


def test_graph_sizes_given_one_by_one_replace_the_largest():
    chosen = values(planned(overrides=(("cuda_graph_config.batch_sizes", (1, 2, 128)),)))

    assert chosen["cuda_graph_config.batch_sizes"] == [1, 2, 128]
    assert "cuda_graph_config.max_batch_size" not in chosen


def test_a_section_can_be_turned_off_by_hand():
    chosen = values(planned(overrides=(("cuda_graph_config", None),)))

    assert chosen["cuda_graph_config"] is None
    assert [key for key in chosen if key.startswith("cuda_graph_config.")] == []


def test_mtp_turned_off_by_hand_costs_no_memory():
    with_it, without = (
        planned(profile="quickstart"),
        planned(profile="quickstart", overrides=(("speculative_config", None),)),
    )

    assert without.budget.weights < with_it.budget.weights


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        pytest.param("kv_cache_config", 5, "expected a mapping", id="section"),
        pytest.param(
            "speculative_config.num_nextn_predict_layers", 2, "use --mtp N, which sets both", id="half a section"
        ),
        pytest.param("backend", "tensorrt", "pytorch only", id="backend"),
        pytest.param("max_batch_size", "many", "expected a whole number from 1 or null, got 'many'", id="type"),
        pytest.param("max_batch_size", 0, "expected a whole number from 1", id="range"),
        pytest.param("moe_config.backend", "CUTLAS", "one of CUTLASS", id="choice"),
        pytest.param("tensor_parallel_size", 4, "use --gpus", id="others depend on it"),
        pytest.param("triton_config.max_inflght", 4, "did you mean max_inflight?", id="backend's key"),
        pytest.param("triton_config.max_inflight", "x", "expected a whole number", id="backend's value"),
        pytest.param("triton_config.default_sampling.temprature", 1, "did you mean temperature?", id="sampling field"),
    ],
)
def test_a_setting_by_hand_is_checked(key, value, expected):
    with pytest.raises(RefusedPlanError) as caught:
        planned(overrides=((key, value),))

    assert expected in str(caught.value)


def test_the_container_asked_for_is_the_one_named():
    assert planned(container="26.05").image == "nvcr.io/nvidia/tritonserver:26.05-trtllm-python-py3"
    assert planned().image == "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"


def test_a_release_that_is_only_read_is_refused():
    with pytest.raises(RefusedPlanError, match=r"0\.19\.0 can be checked only.*what works: --trtllm 1\.2\.1"):
        planned(release="0.19.0")


def test_a_setting_the_release_lacks_is_refused():
    with pytest.raises(RefusedPlanError, match="did you mean"):
        planned(overrides=(("max_num_token", 3072),))


def test_a_setting_that_breaks_a_rule_is_refused():
    with pytest.raises(RefusedPlanError, match="moe_config"):
        planned(overrides=(("moe_config.backend", "DEEPGEMM"),))


def test_what_fits_and_is_not_published_has_to_be_asked_for():
    request = {"gpu": "b200", "num_gpus": 4, "precision": "fp8"}
    with pytest.raises(RefusedPlanError, match=r"not published.*--allow-unpublished") as caught:
        planned(**request)

    assert caught.value.suggestion == {"num_gpus": 8}
    assert planned(**request, allow_unpublished=True).world_size == 4


def test_a_checkpoint_folder_replaces_the_name():
    assert values(planned(model="/models/r1"))["model"] == "/models/r1"


def test_the_checkpoints_own_sampling_comes_before_the_model_cards(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.9, "top_p": 0.8}))
    plan = planned(model=str(tmp_path))

    assert values(plan)["triton_config.default_sampling.temperature"] == 0.9
    assert "generation_config.json" in reason(plan, "triton_config.default_sampling.temperature")


@pytest.mark.parametrize(("algo", "expected"), [("FP8", 35_136), (None, 70_272)])
def test_the_checkpoints_files_say_what_auto_is(tmp_path, algo, expected):
    quantization = {"quant_algo": "FP8_BLOCK_SCALES", "kv_cache_quant_algo": algo}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    plan = planned(model=str(tmp_path), kv_dtype="auto")

    assert values(plan)["kv_cache_config.dtype"] == "auto"
    assert plan.budget.kv_bytes_per_token == expected
    assert "the checkpoint's own" in reason(plan, "kv_cache_config.dtype")


def test_an_unknown_preset_is_refused_before_anything_is_written():
    with pytest.raises(UnknownNameError, match="unknown preset 'fast': known so far: b200x8"):
        make_plan(PlanRequest(variant="tiny", engine="simulated", preset="fast"))


@pytest.mark.parametrize(
    ("changes", "error", "expected"),
    [
        pytest.param({"variant": "deepsek-r1"}, UnknownNameError, "did you mean 'deepseek-r1'?", id="variant"),
        pytest.param({"gpu": "h20"}, UnknownNameError, "did you mean 'h20-96' or 'h20-141'?", id="gpu"),
        pytest.param({"precision": "int8"}, UnknownNameError, "unknown precision 'int8'", id="precision"),
        pytest.param({"profile": "fast"}, UnknownNameError, "unknown profile 'fast'", id="profile"),
        pytest.param({"gpu": None}, RefusedPlanError, "needs --gpu", id="no gpu"),
        pytest.param({"num_gpus": 4}, RefusedPlanError, "what works: --gpus 8", id="too few"),
        pytest.param({"num_gpus": 6}, RefusedPlanError, "128 attention heads", id="odd number"),
        pytest.param({"gpu": "h100"}, RefusedPlanError, "what works: --gpus 16", id="FP8 on eight H100"),
        pytest.param({"precision": "fp4"}, RefusedPlanError, "Blackwell", id="FP4 on Hopper"),
        pytest.param({"gpu": "b200", "precision": "w4a8"}, RefusedPlanError, "W4AFP8", id="W4A8 on Blackwell"),
        pytest.param({"gpu": "a100"}, RefusedPlanError, "Ampere", id="Ampere"),
        pytest.param(V32 | {"release": "1.1.0"}, RefusedPlanError, "what works: --trtllm 1.2.1", id="V3.2 on 1.1"),
        pytest.param(
            {"variant": "deepseek-v3", "precision": "w4a8"}, RefusedPlanError, "--model has to", id="your own"
        ),
        pytest.param(V32 | {"precision": "w4a8"}, RefusedPlanError, "W4AFP8 is for V3 and R1", id="V3.2 in W4A8"),
        pytest.param({"engine": "sglang"}, UnknownNameError, "unknown engine 'sglang'", id="engine"),
        pytest.param({"engine": "reference"}, RefusedPlanError, "runs on: tensorrt_llm, vllm", id="wrong engine"),
        pytest.param({"precision": "w4a16"}, RefusedPlanError, "what works: --engine vllm", id="W4A16"),
        pytest.param({"vllm": "0.25.1"}, RefusedPlanError, "--vllm is for --engine vllm", id="vLLM's version"),
        pytest.param({"parallel": "dp"}, RefusedPlanError, "--parallel is for --engine vllm", id="vLLM's parallelism"),
        pytest.param({"preset": "x"}, RefusedPlanError, "simulated engine", id="preset without the simulated engine"),
        pytest.param({"release": "0.20.0"}, RefusedPlanError, "use 0.21.0", id="release without a record"),
        pytest.param({"release": "1.2.2"}, UnknownNameError, "unknown TensorRT-LLM release '1.2.2'", id="release"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(changes, error, expected):
    with pytest.raises(error) as caught:
        planned(**changes)

    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "variant", "precision", "gigabytes"),
    [
        pytest.param("nvidia/DeepSeek-R1-FP4", "deepseek-r1", "fp4", 424, id="the published one"),
        pytest.param("nvidia/DeepSeek-R1-FP4-v2", "deepseek-r1", "fp4", 413, id="its second version"),
        pytest.param("/models/DeepSeek-R1-0528-FP4-v2", "deepseek-r1-0528", "fp4", 413, id="a folder called like it"),
        pytest.param("/models/mine", "deepseek-r1", "fp4", 424, id="a folder called otherwise"),
        pytest.param("nvidia/DeepSeek-V3.2-NVFP4", "deepseek-v3.2-exp", "fp4", 415, id="of a sister model"),
        pytest.param("/models/mine", "deepseek-v3", "fp4", 424, id="weights that nobody publishes"),
    ],
)
def test_the_checkpoint_that_is_named_has_its_own_size(model, variant, precision, gigabytes):
    plan = make_plan(PlanRequest(variant=variant, gpu="b200", precision=precision, model=model))

    assert round(plan.checkpoint.weight_bytes / 1e9) == gigabytes
    assert plan.settings[0].value == model


def test_a_checkpoint_of_a_sister_model_says_whose_it_is():
    plan = make_plan(
        PlanRequest(variant="deepseek-v3.2-exp", gpu="b200", precision="fp4", model="nvidia/DeepSeek-V3.2-NVFP4")
    )

    assert plan.settings[0].reason.startswith("DeepSeek-V3.2, planned as deepseek-v3.2-exp")
    assert plan.checkpoint.kv_cache_quant_algo == "FP8"


THROUGHPUT = {"gpu": "h200", "profile": "throughput"}


def warnings_of(plan):
    return {warned.rule.code: (warned.rule.severity, warned.violation.message) for warned in plan.warnings}


def test_a_benchmarks_limits_are_a_warning_where_no_workload_was_given():
    plan = planned(**THROUGHPUT)
    severity, message = warnings_of(plan)["A009"]

    assert severity == "warning"
    assert "prompts of 1,024 tokens; those of more than 1,151 are refused" in message
    assert "A003" not in warnings_of(plan)


def test_a_benchmarks_limits_match_each_other():
    """1,151 tokens of prompt, and the 32,768 of an answer that R1's model card allows."""
    chosen = values(planned(**THROUGHPUT))

    assert chosen["max_num_tokens"] + 32_768 <= chosen["max_seq_len"] == 34_048


@pytest.mark.parametrize(
    ("request_fields", "max_seq_len"),
    [
        pytest.param(THROUGHPUT | {"workload": Workload(isl=1024, osl=2048)}, 3072, id="a workload was given"),
        pytest.param({"gpu": "h200"}, 65536, id="prompts in chunks"),
        pytest.param({"gpu": "b200", "profile": "throughput"}, 65536, id="a serving configuration, for no lengths"),
        pytest.param({"gpu": "h200", "profile": "latency"}, 65536, id="the engine's own max_num_tokens"),
        pytest.param({"gpu": "h200", "profile": "gen"}, 65536, id="a generation server"),
        pytest.param({"gpu": "h200", "profile": "quickstart"}, 2048, id="the recipe's own"),
    ],
)
def test_other_plans_keep_their_max_seq_len(request_fields, max_seq_len):
    assert values(planned(**request_fields))["max_seq_len"] == max_seq_len


@pytest.mark.parametrize("gpu", ["h100", "h200", "h20-96", "h20-141", "b200"])
@pytest.mark.parametrize("profile", ["balanced", "throughput", "wide-ep"])
def test_an_evaluation_is_planned_for_its_own_prompts(gpu, profile):
    request = PlanRequest(variant="deepseek-r1", gpu=gpu, profile=profile)
    chosen = make_plan(format_request("trtllm-eval", request)).canonical

    assert chosen["enable_chunked_prefill"] or chosen["max_num_tokens"] >= 8192 or chosen["max_seq_len"] <= 8192
    assert chosen["max_seq_len"] >= 8192 + 32768 or profile == "wide-ep"
    assert format_request("trtllm-bench", request) is request


def test_an_evaluations_workload_can_be_given():
    request = PlanRequest(variant="deepseek-r1", **THROUGHPUT, workload=Workload(isl=1024, osl=256))

    assert format_request("trtllm-eval", request) is request


@pytest.mark.parametrize(
    ("request_fields", "ways"),
    [
        pytest.param(
            {"gpu": "h100", "num_gpus": 8}, "--gpus 16, or --precision w4a8, or --gpu h200", id="FP8 on eight H100"
        ),
        pytest.param({"num_gpus": 4}, "--gpus 8, or --precision w4a8, or --gpu b200", id="FP8 on four H200"),
        pytest.param(
            {"gpu": "b200", "precision": "fp8", "num_gpus": 4},
            "--gpus 8, or --precision fp4, or --allow-unpublished",
            id="fits, but is not published",
        ),
        pytest.param(
            {"relaxed_acceptance": True}, "--mtp 3, or without --relaxed-acceptance", id="no drafts to accept"
        ),
        pytest.param(
            {"variant": "deepseek-v3.2-exp", "relaxed_acceptance": True},
            "without --relaxed-acceptance",
            id="no drafts, and not for the model",
        ),
        pytest.param(
            {"variant": "deepseek-v3.2-exp", "kv_dtype": "fp8"}, "without --kv-cache-dtype, or --gpu b200", id="V001"
        ),
        pytest.param({"precision": "fp4"}, "--precision fp8, or --gpu b200", id="H002"),
    ],
)
def test_a_refusal_gives_one_piece_of_advice_which_holds_every_way_that_works(request_fields, ways):
    with pytest.raises(RefusedPlanError) as caught:
        planned(**request_fields)

    cause, _, advice = str(caught.value).partition("; what works: ")
    assert advice == ways
    assert "; use " not in cause
    assert "; set " not in cause
    assert "; add " not in cause


@pytest.mark.parametrize(
    ("request_fields", "fix"),
    [
        pytest.param({"overrides": (("max_num_tokens", 8200),)}, "; use 8192", id="a setting"),
        pytest.param({"workload": Workload(isl=200_000)}, "; use a smaller --isl or --osl", id="a workload"),
    ],
)
def test_where_only_a_value_is_wrong_the_advice_is_about_the_value(request_fields, fix):
    with pytest.raises(RefusedPlanError) as caught:
        planned(**request_fields)

    assert str(caught.value).endswith(fix)
    assert "what works" not in str(caught.value)
