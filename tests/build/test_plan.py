import pytest

from deepseek_triton_build import PlanRequest, RefusedPlanError, UnknownNameError, make_plan
from deepseek_triton_build.releases import RELEASES

GIB = 2**30


def r1(**changes):
    return make_plan(PlanRequest(**({"variant": "deepseek-r1", "gpu": "h200", "num_gpus": 8} | changes)))


def values(plan):
    return {setting.key: setting.value for setting in plan.settings}


def test_r1_on_eight_h200_is_tensor_parallel_over_all_of_them():
    chosen = values(r1())

    assert chosen["model"] == "deepseek-ai/DeepSeek-R1"
    assert chosen["tensor_parallel_size"] == chosen["moe_expert_parallel_size"] == 8
    assert chosen["moe_config.backend"] == "CUTLASS"
    assert chosen["triton_config.engine"] == "tensorrt_llm"
    assert chosen["triton_config.default_sampling.temperature"] == 0.6


def test_every_setting_has_a_reason():
    assert [s.key for s in (*r1().settings, *make_plan(PlanRequest(variant="tiny")).settings) if not s.reason] == []


def test_weights_per_gpu_are_close_to_the_measured_figure():
    """79.59 GiB at TP8 was measured for V3/R1 FP8 (vLLM 0.25.1 on 8 x H200)."""
    assert r1().budget.weights / GIB == pytest.approx(79.59, rel=0.03)


def test_a_full_batch_of_default_requests_fits_the_kv_cache():
    plan = r1()
    chosen = values(plan)

    assert chosen["max_batch_size"] * (chosen["triton_config.default_max_tokens"] + 1024) <= plan.budget.kv_tokens
    assert plan.budget.weights + plan.budget.reserved + plan.budget.kv_cache < plan.budget.memory


def test_chunked_prefill_has_whole_blocks():
    chosen = values(r1())

    assert chosen["enable_chunked_prefill"]
    assert chosen["max_num_tokens"] % 32 == 0  # tokens_per_block's default


@pytest.mark.parametrize("release", RELEASES)
def test_only_keys_of_the_release_are_planned(release):
    plan = r1(release=release)
    known = plan.release.keys()

    assert [k for k in values(plan) if not k.startswith("triton_config.") and k not in known] == []


def test_a_preset_nobody_knows_is_refused_before_anything_is_written():
    with pytest.raises(UnknownNameError, match="unknown preset 'fast': known so far: b200x8"):
        make_plan(PlanRequest(variant="tiny", engine="simulated", preset="fast"))


def test_a_checkpoint_folder_replaces_the_name():
    assert values(r1(model="/models/r1"))["model"] == "/models/r1"


@pytest.mark.parametrize(
    ("changes", "error", "expected"),
    [
        pytest.param({"variant": "deepsek-r1"}, UnknownNameError, "did you mean 'deepseek-r1'?", id="variant"),
        pytest.param({"variant": "deepseek-v3"}, UnknownNameError, "'deepseek-v3': known so far:", id="other variant"),
        pytest.param({"gpu": "h20"}, UnknownNameError, "unknown GPU 'h20': known so far: h200", id="gpu"),
        pytest.param({"gpu": None}, RefusedPlanError, "needs --gpu", id="no gpu"),
        pytest.param({"num_gpus": 4}, RefusedPlanError, "needs 8 x h200, got 4", id="too few"),
        pytest.param({"num_gpus": 16}, RefusedPlanError, "more than one node", id="two nodes"),
        pytest.param({"engine": "vllm"}, UnknownNameError, "unknown engine 'vllm'", id="engine"),
        pytest.param({"engine": "transformers"}, RefusedPlanError, "runs on: tensorrt_llm", id="wrong engine"),
        pytest.param({"preset": "x"}, RefusedPlanError, "simulated engine", id="preset without the twin"),
        pytest.param({"release": "0.20.0"}, UnknownNameError, "unknown TensorRT-LLM release '0.20.0'", id="release"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(changes, error, expected):
    with pytest.raises(error) as caught:
        r1(**changes)

    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
