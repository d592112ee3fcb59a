"""The planner's decisions and their reasons."""

import json

import pytest

from deepseek_triton_build import PlanRequest, RefusedPlanError, UnknownNameError, Workload, format_request, make_plan
from deepseek_triton_build.catalog import RELEASES, load_release

GIB = 2**30
R1 = {"variant": "deepseek-r1", "gpu": "h200", "num_gpus": 8}
ANY = {"num_gpus": None}
B200 = {"gpu": "b200"}
NVL72 = {"gpu": "gb200-nvl72", "profile": "wide-ep"}
SIXTEEN = {"gpu": "h100", "num_gpus": 16}
V32 = {"variant": "deepseek-v3.2-exp"}
FAST, FULL = {"profile": "latency"}, {"profile": "throughput"}
ABSENT = object()

DP, CHUNKS, LOADER = "enable_attention_dp", "enable_chunked_prefill", "moe_config.load_balancer.num_slots"
TEMPERATURE, MAX_TOKENS = "triton_config.default_sampling.temperature", "triton_config.default_max_tokens"
KV_DTYPE, REUSE = "kv_cache_config.dtype", "kv_cache_config.enable_block_reuse"
FRACTION = "kv_cache_config.free_gpu_memory_fraction"
GRAPHS, GRAPH_SIZES = "cuda_graph_config.max_batch_size", "cuda_graph_config.batch_sizes"


def planned(**changes):
    return make_plan(PlanRequest(**(R1 | changes)))


def values(plan):
    return {setting.key: setting.value for setting in plan.settings}


def reason(plan, key):
    return next(setting.comment for setting in plan.settings if setting.key == key)


def environment(plan):
    return {variable.name: variable.value for variable in plan.environment}


def lengths(isl, osl, concurrency=None):
    return {"workload": Workload(isl=isl, osl=osl, concurrency=concurrency)}


def requests(concurrency):
    return {"workload": Workload(concurrency=concurrency)}


def by_hand(*overrides):
    return {"overrides": overrides}


SETTINGS = [
    ({}, {"model": "deepseek-ai/DeepSeek-R1", "tensor_parallel_size": 8, "moe_expert_parallel_size": 8}),
    ({}, {"moe_config.backend": "CUTLASS", "triton_config.engine": "tensorrt_llm", TEMPERATURE: 0.6, CHUNKS: True}),
    ({"model": "/models/r1"}, {"model": "/models/r1"}),
    # Attention DP, and the limits of each rank
    (lengths(1024, 1024, 128), {DP: False, "max_batch_size": 128}),
    (lengths(1024, 1024, 1024), {DP: True, "max_batch_size": 128}),
    (NVL72 | {"num_gpus": 32} | requests(64), {DP: True, "moe_config.backend": "WIDEEP"}),
    (NVL72 | {"num_gpus": 64} | lengths(2000, None), {"moe_expert_parallel_size": 64, LOADER: 320}),
    (NVL72 | {"num_gpus": 8, "precision": "fp4"}, {LOADER: ABSENT, "moe_config.load_balancer": ABSENT}),
    (FULL | by_hand((DP, False)), {DP: False, "attention_dp_config.enable_balance": ABSENT}),
    # The limits follow from the lengths, in whole blocks of 256
    (FULL | lengths(2000, 500, 800), {"max_seq_len": 2560, "max_batch_size": 100, GRAPHS: 100, MAX_TOKENS: 500}),
    (FULL | lengths(1024, 2048), {"max_seq_len": 3072}),
    # Reasoning ends by itself: DeepSeek's own length of an answer, where the context and the backend accept it
    (ANY, {"max_seq_len": 65536, MAX_TOKENS: 32_768}),
    (ANY | by_hand(("triton_config.max_inflight_tokens", 20_000)), {MAX_TOKENS: 20_000 - 1024}),
    (ANY | by_hand(("max_seq_len", 4096), ("max_batch_size", 16)), {MAX_TOKENS: 4096 - 1024}),
    ({"variant": "deepseek-v3.2-speciale", **B200}, {MAX_TOKENS: 65_536 - 1024}),
    (ANY | B200 | FULL, {"max_seq_len": 65536}),
    (ANY | FAST, {"max_seq_len": 65536}),
    ({"profile": "gen"}, {"max_seq_len": 65536}),
    ({"profile": "quickstart"}, {"max_seq_len": 2048}),
    # 1,151 tokens of prompt, and the 32,768 of an answer that R1's model card allows
    (ANY | FULL, {"max_seq_len": 34_048, "max_num_tokens": 1151}),
    (SIXTEEN, {"tensor_parallel_size": 16, "moe_expert_parallel_size": 8}),
    (SIXTEEN | {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}),
    # V3.2
    (V32, {"kv_cache_config.tokens_per_block": 64, REUSE: False, CHUNKS: False, "max_num_tokens": 8192}),
    (V32 | FULL | lengths(20_000, 100), {CHUNKS: True, "max_num_tokens": 8192}),
    (V32 | FULL | lengths(9000, None), {"max_num_tokens": 8192}),
    # MTP: its own sampler, and the model card's sampling where the release can
    ({}, {"sampler_type": "TRTLLMSampler"}),
    ({"mtp": 3}, {"sampler_type": ABSENT}),
    ({"mtp": 1}, {"speculative_config.allow_advanced_sampling": True, TEMPERATURE: 0.6}),
    ({"mtp": 1, "release": "1.1.0"}, {TEMPERATURE: ABSENT}),
    (
        {"mtp": 3, "relaxed_acceptance": True},
        {"speculative_config.relaxed_topk": 10, "speculative_config.allow_advanced_sampling": ABSENT},
    ),
    # By hand
    (by_hand(("max_num_tokens", 3072), ("triton_config.max_inflight", 64)), {"max_num_tokens": 3072}),
    (by_hand(("max_num_tokens", 3072), ("triton_config.max_inflight", 64)), {"triton_config.max_inflight": 64}),
    (by_hand((GRAPH_SIZES, (1, 2, 128))), {GRAPH_SIZES: [1, 2, 128], GRAPHS: ABSENT}),
    (by_hand(("cuda_graph_config", None)), {"cuda_graph_config": None, GRAPHS: ABSENT}),
]


def test_what_a_request_gets(subtests):
    for changes, expected in SETTINGS:
        with subtests.test(f"{changes}"):
            chosen = values(planned(**changes))
            assert {key: chosen.get(key, ABSENT) for key in expected} == expected


REASONS = [
    (lengths(1024, 1024, 128), DP, "CUDA graphs"),
    ({}, "max_num_tokens", "3072"),  # the fallback if the memory is less
    (FULL | lengths(6000, 700, 700), FRACTION, "tokens a GPU"),
    (FAST | {"mtp": 0} | lengths(1024, 1024, 256), "moe_config.backend", "8 rows"),
    (FAST | {"mtp": 3} | lengths(1024, 1024, 256), "moe_config.backend", "32 rows"),  # the drafts count
    ({}, "moe_config.backend", "swapAB below 32"),
    ({"gpu": "h20-141"}, "moe_config.backend", "swapAB below 64"),
    (lengths(8192, 1024, 4096), "max_batch_size", "holds no more"),
    (by_hand(("max_num_tokens", 3072)), "max_num_tokens", "set by hand"),
    (ANY, MAX_TOKENS, "model card"),
    (by_hand(("triton_config.max_inflight_tokens", 20_000)), MAX_TOKENS, "within triton_config.max_inflight_tokens"),
]


def test_reasons_are_of_the_request(subtests):
    for changes, key, words in REASONS:
        with subtests.test(f"{changes}: {words}"):
            assert words in reason(planned(**changes), key)
    assert "128 requests" not in reason(planned(**FULL, **lengths(6000, 700, 700)), "max_batch_size")
    assert "3072" not in reason(planned(profile="latency", **lengths(4096, 4096)), "max_num_tokens")  # refused: A002


KV_CACHES = [  # FP8 where that works
    ({}, "fp8", "FlashMLA"),
    (B200, "fp8", "trtllm-gen"),
    ({"precision": "w4a8", "num_gpus": 4}, "auto", "16 bit"),
    (V32, "auto", "16 bit"),
    (V32 | B200, "fp8", "trtllm-gen"),
    ({"kv_dtype": "auto"}, "auto", "the checkpoint's own"),
]


def test_the_kv_cache(subtests):
    for changes, expected, words in KV_CACHES:
        with subtests.test(f"{changes}"):
            plan = planned(**changes)
            assert values(plan)[KV_DTYPE] == expected
            assert words in reason(plan, KV_DTYPE)


def test_every_line_has_a_reason_and_a_key_of_the_release():
    for changes in ({}, B200, V32, FULL, FAST, *({"release": release, **FAST} for release in RELEASES)):
        plan = planned(**changes)
        keys = {key for key in values(plan) if not key.startswith("triton_config.")}
        assert keys <= set(plan.release.keys())
        assert [setting.key for setting in plan.settings if not setting.reason] == []
        assert [variable.name for variable in plan.environment if not variable.reason] == []
        assert [omission.key for omission in plan.omissions if not omission.reason] == []


def test_the_tiny_model_needs_no_gpu():
    plan = make_plan(PlanRequest(variant="tiny"))

    assert plan.engine == "reference"
    assert plan.budget is None
    assert all(setting.reason for setting in plan.settings)


def test_a_full_batch_of_default_requests_fits_the_kv_cache_in_whole_blocks():
    plan = planned(variant="deepseek-v3")
    chosen = values(plan)

    assert chosen["max_batch_size"] * (chosen[MAX_TOKENS] + 1024) <= plan.budget.kv_tokens
    assert plan.budget.free > 0
    assert chosen["max_num_tokens"] % 64 == 0


def test_the_layout():
    assert planned(**lengths(1024, 1024, 1024)).max_concurrency == 1024
    plan = planned(**SIXTEEN)
    assert (plan.num_nodes, plan.gpus_per_node, plan.world_size) == (2, 8, 16)
    assert planned(**SIXTEEN, pipeline_parallel_size=2).world_size == 16
    assert planned(gpu="gb200", precision="fp8").num_nodes == 2  # trays of four


def test_no_more_requests_are_planned_than_the_kv_cache_holds():
    plan = planned(**lengths(8192, 1024, 4096))

    assert plan.max_concurrency <= plan.budget.concurrent_requests(8192, 1024)
    assert [warned.rule.code for warned in plan.warnings if warned.rule.severity == "warning"] == ["L010"]


def test_no_workload_doubles_the_gpus_unasked():
    for profile in ("balanced", "throughput", "latency", "long-64k", "quickstart"):
        usual = planned(profile=profile, num_gpus=None).world_size
        for workload in (lengths(8192, 1024), requests(48), requests(512), lengths(100, 100)):
            assert planned(profile=profile, num_gpus=None, **workload).world_size == usual, (profile, workload)


def test_attention_dp_makes_room_before_it_is_given_up():
    plan = planned(**SIXTEEN, **lengths(8192, 8192, 2000))

    assert values(plan)[DP] is True
    assert values(plan)["moe_config.max_num_tokens"] <= 8192
    assert plan.budget.concurrent_requests(8192, 8192) > 300


def test_attention_dp_that_is_set_by_hand_makes_room_too():
    """Without chunks, each of 32 ranks would gather 32 x 8,192 tokens for its experts."""
    for rows in (1, 128):
        plan = planned(num_gpus=32, overrides=((DP, True), ("max_batch_size", rows)))
        assert values(plan)["moe_config.max_num_tokens"] == 8192
        assert plan.max_concurrency == 32 * rows
        assert reason(plan, DP) == "set by hand"
        assert plan.budget.workspace < 10 * GIB


def test_limits_leave_room_for_each_other():
    gen, long = planned(profile="gen", mtp=3), planned(profile="long-64k")

    assert gen.canonical["cache_transceiver_config.max_tokens_in_buffer"] >= gen.canonical["max_num_tokens"]
    assert values(long)[MAX_TOKENS] + long.workload.isl <= values(long)["max_seq_len"]
    assert values(planned(**FULL, **lengths(2000, 500, 800)))["max_num_tokens"] >= 2000 + 100


def test_a_fuller_workload_keeps_the_recipe():
    few, more = planned(**B200, **FAST, **requests(4)), planned(**B200, **FAST, **lengths(1024, 1024, 4))

    assert few.recipe.id == more.recipe.id == "b200-fp4-few-requests"
    assert values(more)["max_batch_size"] == 4


def test_attention_dp_divides_the_experts_of_the_mtp_layer():
    plain, drafting = (planned(**FULL, mtp=mtp) for mtp in (0, 1))

    assert (drafting.budget.weights - plain.budget.weights) / GIB == pytest.approx(5.2, abs=0.2)


def test_v32_may_be_given_what_newer_releases_have_with_a_warning():
    plan = planned(**V32, **by_hand((REUSE, True)))

    assert values(plan)[REUSE] is True
    assert {warned.violation.key: warned.rule.severity for warned in plan.warnings}[REUSE] == "warning"


def test_what_a_release_can_not_have_is_an_omission():
    assert TEMPERATURE in {omission.key for omission in planned(mtp=1, release="1.1.0").omissions}
    guided = {"mtp": 3, "release": "1.2.1", "overrides": (("guided_decoding_backend", "xgrammar"),)}
    assert "guided_decoding_backend" not in {omission.key for omission in planned(**guided).omissions}


ENVIRONMENTS = [
    (B200 | {"release": "1.1.0"}, {"TRTLLM_ENABLE_PDL": "1"}),
    (B200, {}),
    (lengths(8192, 1024), {"PYTORCH_ALLOC_CONF": "max_split_size_mb:8192"}),
    (lengths(8192, 1024) | {"release": "1.0.0"}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:8192"}),
    (FULL, {"TRTLLM_DG_JIT_USE_NVCC": "1"}),
]
DEEP_GEMM = {"TRTLLM_DG_ENABLED": "0 turns it off", "TRTLLM_DG_JIT_DEBUG": "prints"}
NVRTC = {"TRTLLM_DG_JIT_USE_NVCC": "needs CUDA 12.3", "CUDA_HOME": "only NVCC needs it"}
NVCC = {"CUDA_HOME": "$CUDA_HOME/bin/nvcc", "TRTLLM_DG_JIT_DUMP_CUBIN": "without effect here"}
UNSET = [  # variables that the plan leaves, and why
    ({}, DEEP_GEMM | NVRTC | {"TRTLLM_DG_JIT_DUMP_CUBIN": "to keep NVRTC's kernels on disk"}),
    (FULL, DEEP_GEMM | NVCC),
    ({"precision": "w4a8", "num_gpus": 4}, {}),
    (B200, {"TRTLLM_ENABLE_PDL": "by itself from 1.2"}),
    (B200 | {"release": "1.1.0"}, {}),
    (
        B200 | {"profile": "ctx"},
        {"TRTLLM_ENABLE_PDL": "by itself", "TRTLLM_USE_UCX_KVCACHE": "cache_transceiver_config.backend says it"},
    ),
    ({"variant": "tiny", "gpu": None, "num_gpus": None}, {}),
]


def test_the_environment(subtests):
    for changes, expected in ENVIRONMENTS:
        with subtests.test(f"{changes}"):
            assert environment(planned(**changes)) == expected
    for changes, expected in UNSET:
        with subtests.test(f"unset: {changes}"):
            unset = {variable.name: variable for variable in planned(**changes).unset_environment}
            assert unset.keys() == expected.keys()
            assert [name for name, part in expected.items() if part not in unset[name].reason] == []
            assert all(variable.value and variable.source for variable in unset.values())


def test_the_budget_is_that_of_the_final_settings():
    plan, less = planned(variant="deepseek-v3"), planned(variant="deepseek-v3", **by_hand((FRACTION, 0.4)))
    assert less.budget.kv_cache == pytest.approx(plan.budget.kv_cache / 2, abs=1)
    assert values(less)[MAX_TOKENS] < values(plan)[MAX_TOKENS]

    drafting, without = (
        planned(profile="quickstart", overrides=overrides) for overrides in ((), (("speculative_config", None),))
    )
    assert without.budget.weights < drafting.budget.weights


def test_the_container_asked_for_is_the_one_named():
    assert planned(release="1.2.1", container="26.05").image == "nvcr.io/nvidia/tritonserver:26.05-trtllm-python-py3"
    assert planned().image == f"nvcr.io/nvidia/tritonserver:{load_release(RELEASES[0]).containers[0]}-trtllm-python-py3"


def test_the_checkpoints_own_sampling_comes_before_the_model_cards(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.9, "top_p": 0.8}))
    plan = planned(model=str(tmp_path))

    assert values(plan)[TEMPERATURE] == 0.9
    assert "generation_config.json" in reason(plan, TEMPERATURE)


@pytest.mark.parametrize(("algo", "expected"), [("FP8", 35_136), (None, 70_272)])
def test_the_checkpoints_files_say_what_auto_is(tmp_path, algo, expected):
    quantization = {"quant_algo": "FP8_BLOCK_SCALES", "kv_cache_quant_algo": algo}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    plan = planned(model=str(tmp_path), kv_dtype="auto")

    assert values(plan)[KV_DTYPE] == "auto"
    assert plan.budget.kv_bytes_per_token == expected


SIMULATED = {"variant": "tiny", "engine": "simulated", "gpu": None, "num_gpus": None}
REFUSED = [
    ({"variant": "deepsek-r1"}, "did you mean 'deepseek-r1'?"),
    ({"gpu": "h20"}, "did you mean 'h20-96' or 'h20-141'?"),
    ({"precision": "int8"}, "unknown precision 'int8'"),
    ({"profile": "fast"}, "unknown profile 'fast'"),
    ({"profile": "disagg"}, "unknown profile 'disagg': a pair"),
    ({"engine": "sglang"}, "unknown engine 'sglang'"),
    ({"release": "1.2.9"}, "unknown TensorRT-LLM release '1.2.9'"),
    (SIMULATED | {"preset": "fast"}, "unknown preset 'fast': known so far: b200x8"),
    ({"gpu": None}, "needs --gpu"),
    ({"num_gpus": 4}, "what works: --gpus 8"),
    ({"num_gpus": 6}, "128 attention heads"),
    ({"gpu": "h100"}, "what works: --gpus 16"),
    ({"precision": "fp4"}, "Blackwell"),
    (B200 | {"precision": "w4a8"}, "W4AFP8"),
    ({"gpu": "a100"}, "Ampere"),
    (V32 | {"release": "1.1.0"}, f"what works: --trtllm {RELEASES[0]}"),
    ({"variant": "deepseek-v3", "precision": "w4a8"}, "--model has to"),
    (V32 | {"precision": "w4a8"}, "W4AFP8 is for V3 and R1"),
    ({"engine": "reference"}, "what works: --engine tensorrt_llm, or --engine vllm"),
    ({"precision": "w4a16", "allow_unpublished": True}, "what works: --engine vllm without --allow-unpublished"),
    ({"engine": "reference", "preset": "x", "container": "26.07"}, "tensorrt_llm without --preset and --image"),
    ({"vllm": "0.25.1"}, "--vllm is for --engine vllm"),
    ({"parallel": "dp"}, "--parallel is for --engine vllm"),
    ({"preset": "x"}, "simulated engine"),
    ({"release": "0.20.0"}, "use 0.21.0"),
    ({"release": "0.19.0"}, "0.19.0 can be checked only"),
    ({"release": "0.19.0"}, f"what works: --trtllm {RELEASES[0]}"),
    ({"variant": "deepseek-v3", "mtp": 3, "relaxed_acceptance": True}, "R1"),
    ({"relaxed_acceptance": True}, "--mtp"),
    (lengths(163_840, 1024), "163,840"),
    (lengths(0, None), "isl 0"),
    (lengths(None, 0), "osl 0"),
    (requests(0), "concurrency 0"),
    (by_hand((FRACTION, 0.001)), "leaves room for"),
    (by_hand(("max_num_token", 3072)), "did you mean"),
    (by_hand(("use_cuda_graph", True)), "has cuda_graph_config instead"),
    (by_hand(("moe_config.backend", "DEEPGEMM")), "moe_config"),
    (by_hand(("kv_cache_config", 5)), "expected a mapping"),
    (by_hand(("speculative_config.num_nextn_predict_layers", 2)), "use --mtp N, which sets both"),
    (by_hand(("backend", "tensorrt")), "pytorch only"),
    (by_hand(("max_batch_size", "many")), "expected a whole number from 1 or null, got 'many'"),
    (by_hand(("max_batch_size", 0)), "expected a whole number from 1"),
    (by_hand(("moe_config.backend", "CUTLAS")), "one of CUTLASS"),
    (by_hand(("tensor_parallel_size", 4)), "use --gpus"),
    (by_hand(("triton_config.max_inflght", 4)), "did you mean max_inflight?"),
    (by_hand(("triton_config.max_inflight", "x")), "expected a whole number"),
    (by_hand(("triton_config.engine", "vllm")), "use --engine"),
    (by_hand(("context_parallel_size", 2)), "no ranks for it"),
    (by_hand(("triton_config.default_sampling.temprature", 1)), "did you mean temperature?"),
]
UNKNOWN = ("unknown", "did you mean '")


@pytest.mark.slow
def test_what_cannot_work_is_refused_in_one_line(subtests):
    for changes, expected in REFUSED:
        with subtests.test(f"{changes}: {expected}"):
            error = UnknownNameError if expected.startswith(UNKNOWN) else RefusedPlanError
            with pytest.raises(error) as caught:
                planned(**changes)
            assert expected in str(caught.value)
            assert "\n" not in str(caught.value)


def test_what_fits_and_is_not_published_has_to_be_asked_for():
    request = {"gpu": "b200", "num_gpus": 4, "precision": "fp8"}
    with pytest.raises(RefusedPlanError, match=r"not published.*--allow-unpublished") as caught:
        planned(**request)

    assert caught.value.suggestion == {"num_gpus": 8}
    assert planned(**request, allow_unpublished=True).world_size == 4


CHECKPOINTS = [  # gigabytes of the checkpoint that is named: a published one, or a folder called like it
    ("nvidia/DeepSeek-R1-FP4", "deepseek-r1", 424),
    ("nvidia/DeepSeek-R1-FP4-v2", "deepseek-r1", 413),
    ("/models/DeepSeek-R1-0528-FP4-v2", "deepseek-r1-0528", 413),
    ("/models/mine", "deepseek-r1", 424),
    ("nvidia/DeepSeek-V3.2-NVFP4", "deepseek-v3.2", 415),
    ("nvidia/DeepSeek-V3-FP4", "deepseek-v3", 424),
    ("/models/mine", "deepseek-v3", 424),  # weights that nobody publishes
]


def test_the_checkpoint_that_is_named_has_its_own_size():
    plans = [planned(variant=v, model=m, gpu="b200", num_gpus=None, precision="fp4") for m, v, _ in CHECKPOINTS]
    found = [(one.settings[0].value, one.variant.name, round(one.checkpoint.weight_bytes / 1e9)) for one in plans]

    assert found == CHECKPOINTS
    assert plans[4].checkpoint.kv_cache_quant_algo == "FP8"
    assert "; vLLM's recipes name this checkpoint" in plans[5].title
    sister = planned(variant="deepseek-v3.1", model="deepseek-ai/DeepSeek-V3.1-Terminus", num_gpus=8)
    assert sister.settings[0].reason.startswith("DeepSeek-V3.1-Terminus, planned as deepseek-v3.1, whose")


def test_a_benchmarks_limits_are_a_warning_where_no_workload_was_given():
    warned = {warned.rule.code: warned for warned in planned(**FULL, num_gpus=None).warnings}

    assert warned["A009"].rule.severity == "warning"
    assert "of 1,024 tokens; those of more than 1,151 are refused" in warned["A009"].violation.message
    assert "A003" not in warned


def test_an_evaluation_is_planned_for_its_own_prompts():
    for gpu in ("h100", "h200", "h20-96", "h20-141", "b200"):
        for profile in ("balanced", "throughput", "wide-ep"):
            request = PlanRequest(variant="deepseek-r1", gpu=gpu, profile=profile)
            chosen = make_plan(format_request("trtllm-eval", request)).canonical
            assert chosen[CHUNKS] or chosen["max_num_tokens"] >= 8192 or chosen["max_seq_len"] <= 8192
            assert chosen["max_seq_len"] >= 8192 + 32768 or profile == "wide-ep"
            assert format_request("trtllm-bench", request) is request

    asked = PlanRequest(variant="deepseek-r1", gpu="h200", **FULL, **lengths(1024, 256))
    assert format_request("trtllm-eval", asked) is asked


WAYS = [
    (SIXTEEN | {"num_gpus": 8}, "--gpus 16, or --precision w4a8, or --gpu h200"),
    ({"num_gpus": 4}, "--gpus 8, or --precision w4a8, or --gpu b200"),
    (B200 | {"precision": "fp8", "num_gpus": 4}, "--gpus 8, or --precision fp4, or --allow-unpublished"),
    ({"relaxed_acceptance": True}, "--mtp 3, or without --relaxed-acceptance"),
    (V32 | {"relaxed_acceptance": True}, "without --relaxed-acceptance"),
    (V32 | {"kv_dtype": "fp8"}, "without --kv-cache-dtype, or --gpu b200"),
    ({"precision": "fp4"}, "--precision fp8, or --gpu b200"),
    ({"engine": "reference", "release": "1.2.1"}, "--engine tensorrt_llm, or --engine vllm without --trtllm"),
    (V32 | {"release": "1.1.0", "container": "26.02"}, "--trtllm 1.2.1 without --image"),
    (by_hand(("max_seq_len", 200_000)), "; use 163840 or less"),  # only a value is wrong
    (lengths(200_000, None), "; use a smaller --isl or --osl"),
]


@pytest.mark.slow
def test_a_refusal_gives_one_piece_of_advice_which_holds_every_way_that_works(subtests):
    for changes, ways in WAYS:
        with subtests.test(f"{changes}"):
            with pytest.raises(RefusedPlanError) as caught:
                planned(**changes)
            cause, _, advice = str(caught.value).partition("; what works: ")
            if ways.startswith("; "):
                assert (cause.endswith(ways), advice) == (True, "")
            else:
                assert advice == ways
                assert not any(word in cause for word in ("; use ", "; set ", "; add "))
