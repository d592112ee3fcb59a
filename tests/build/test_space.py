"""Every variant x GPU x count x precision x profile x release gives a plan that works or a refusal that names one.

All of them are nightly; a sample has every pair of values of any two of these.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepseek_triton_build import Plan, PlanRequest, RefusedPlanError, Workload
from deepseek_triton_build.data.releases import honoured_fields
from support import space

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["sample", pytest.param("whole", marks=pytest.mark.nightly)])
def answers(request):
    requests = space.some_requests() if request.param == "sample" else space.all_requests()
    return {request: space.plan_or_refusal(request) for request in requests}


@pytest.fixture(scope="module")
def plans(answers):
    plans = [answer for answer in answers.values() if isinstance(answer, Plan)]
    assert len(plans) > 100
    return plans


def test_a_refusal_names_a_neighbour_that_works(answers):
    refused = {request: answer for request, answer in answers.items() if isinstance(answer, RefusedPlanError)}
    neighbours = {space.neighbour(request, answer) for request, answer in refused.items()}

    assert [request for request, answer in refused.items() if "\n" in str(answer) or not answer.suggestion] == []
    assert [near for near in neighbours if not isinstance(space.plan_or_refusal(near), Plan)] == []


def test_every_variant_gpu_and_profile_that_is_not_refused_by_rule_has_a_plan(plans):
    assert {plan.variant.name for plan in plans} == {request.variant for request in space.all_requests()}
    assert {plan.gpu.name for plan in plans} == set(space.gpus()) - {"a100"}
    assert {plan.profile.name for plan in plans} == set(space.profiles())
    assert {plan.release.version for plan in plans} == set(space.RELEASES)


def test_every_plan_fits_and_holds_a_request_of_the_longest_length(plans):
    assert [plan.request for plan in plans if plan.budget.free <= 0 or plan.budget.kv_cache <= 0] == []
    assert [plan.request for plan in plans if plan.budget.kv_tokens < plan.canonical["max_seq_len"]] == []


def test_only_keys_and_sampling_defaults_that_the_release_honours_are_written_with_reasons(plans):
    prefix = "triton_config.default_sampling."
    wrong = set()
    for plan in plans:
        values = {setting.key: setting.value for setting in plan.settings}
        honoured = honoured_fields(plan.release, values)
        for key in values:
            if key.startswith(prefix):
                wrong |= {key} - {f"{prefix}{name}" for name in honoured}
            elif not key.startswith("triton_config.") and plan.release.find_key(key) is None:
                wrong.add((plan.release.version, key))
        said = (*plan.settings, *plan.environment, *plan.omissions)
        wrong |= {one for one in said if not one.reason}
    assert wrong == set()


def test_check_finds_no_error_in_what_is_built(plans, tmp_path):
    """A pairwise sample; `python tests/support/space.py check` does the same with every plan in every format."""
    built = ((plan, format) for plan in space.distinct_plans(plans) for format in plan.profile.formats)
    sample = space.pairwise(built, lambda one: (*space.plan_axes(one[0]), one[1]))

    assert [line for plan, format in sample for line in space.build_and_check(plan, tmp_path / format, [format])] == []


WORKLOADS = st.builds(
    Workload,
    isl=st.none() | st.integers(1, 200_000),
    osl=st.none() | st.integers(1, 100_000),
    concurrency=st.none() | st.integers(1, 20_000),
)
JUNK = st.none() | st.booleans() | st.integers(-5, 300_000) | st.floats(allow_nan=False) | st.text(max_size=5)
BY_HAND = st.tuples(
    st.sampled_from(
        [
            "max_batch_size",
            "max_num_tokens",
            "max_seq_len",
            "enable_attention_dp",
            "enable_chunked_prefill",
            "stream_interval",
            "cuda_graph_config",
            "cuda_graph_config.max_batch_size",
            "cuda_graph_config.batch_sizes",
            "kv_cache_config.dtype",
            "kv_cache_config.free_gpu_memory_fraction",
            "kv_cache_config.enable_block_reuse",
            "kv_cache_config.tokens_per_block",
            "moe_config.backend",
            "moe_config.max_num_tokens",
            "moe_expert_parallel_size",
            "speculative_config",
            "speculative_config.num_nextn_predict_layers",
            "sampler_type",
            "guided_decoding_backend",
            "triton_config.max_inflight",
            "triton_config.default_max_tokens",
            "triton_config.default_sampling.temperature",
            "triton_config.default_sampling.seed",
        ]
    ),
    JUNK
    | st.sampled_from(["auto", "fp8", "CUTLASS", "TRTLLM", "DEEPGEMM", "TorchSampler", 0.5, 0.9, 64, 8192])
    | st.lists(st.integers(1, 64), max_size=3).map(tuple),
)
REQUESTS = st.builds(
    PlanRequest,
    variant=st.sampled_from(list(space.variants())),
    engine=st.just("tensorrt_llm"),
    gpu=st.sampled_from(list(space.gpus())),
    num_gpus=st.none() | st.sampled_from(space.GPU_COUNTS),
    precision=st.none() | st.sampled_from(list(space.PRECISIONS)),
    profile=st.sampled_from(list(space.profiles())),
    release=st.sampled_from(space.RELEASES),
    workload=WORKLOADS,
    mtp=st.none() | st.integers(0, 4),
    relaxed_acceptance=st.booleans(),
    kv_dtype=st.sampled_from([None, "auto", "fp8"]),
    pipeline_parallel_size=st.sampled_from([1, 1, 1, 2, 3]),
    allow_unpublished=st.booleans(),
    overrides=st.just(()) | st.lists(BY_HAND, max_size=3).map(tuple),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request=REQUESTS)
def test_any_request_is_planned_without_findings_or_refused_in_one_line(request, tmp_path):
    answer = space.plan_or_refusal(request)

    if isinstance(answer, RefusedPlanError):
        assert "\n" not in str(answer)
        assert answer.suggestion
        assert isinstance(space.plan_or_refusal(space.neighbour(request, answer)), Plan)
    else:
        assert space.build_and_check(answer, tmp_path / answer.profile.name) == []
        assert answer.budget.free > 0
        if not request.overrides:
            assert answer.budget.kv_tokens >= answer.canonical["max_seq_len"]
            assert answer.canonical["max_num_tokens"] >= answer.canonical["max_batch_size"]
            isl = request.workload.isl or 0
            assert answer.canonical["enable_chunked_prefill"] or answer.canonical["max_num_tokens"] >= isl
