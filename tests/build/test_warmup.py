"""Warm-up shapes stay within the limits and reach every size; the plan writes them, and the check reads them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton_build import PlanRequest, RefusedPlanError, make_plan
from deepseek_triton_build.arithmetic import shapes_for_llm_args
from deepseek_triton_build.arithmetic.gpu_memory import cuda_graph_batch_sizes
from deepseek_triton_build.arithmetic.warmup_shapes import MAX_REQUESTS, WarmupLimits, warmup_limits, warmup_shapes
from deepseek_triton_build.catalog import RELEASES, profiles
from deepseek_triton_build.data.setting_types import MOST_WARMUP_TOKENS
from deepseek_triton_build.render.model_configuration import model_yaml
from support.checked import MODEL_YAML, check, only, serious

COUNTS = st.integers(1, 200_000)
GRAPH_SIZES = st.none() | st.lists(st.integers(1, 4096), max_size=40)


def shapes_of(batch, tokens, longest, graphs=None, ranks=1):
    limits = {"max_batch_size": batch, "max_num_tokens": tokens, "max_input_len": longest}
    return warmup_shapes(WarmupLimits(**limits, graph_batch_sizes=graphs, attention_dp_size=ranks))


@pytest.mark.slow
@given(batch=COUNTS, tokens=COUNTS, longest=COUNTS, graphs=GRAPH_SIZES, ranks=st.sampled_from([1, 8, 32]))
def test_every_shape_keeps_to_the_limits(batch, tokens, longest, graphs, ranks):
    shapes = shapes_of(batch, tokens, longest, graphs, ranks)

    assert 1 in {requests for requests, _ in shapes}
    assert len(set(shapes)) == len(shapes) <= 100
    assert list(shapes) == sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))
    for requests, length in shapes:
        assert requests <= MAX_REQUESTS
        assert 1 <= length <= longest
        each = -(-requests // ranks)
        assert each <= batch
        is_cut_by_the_backend = (requests + 1) * length > MOST_WARMUP_TOKENS
        assert requests == each * ranks or requests == 1 or is_cut_by_the_backend
        assert each * length <= tokens or (each == 1 and length <= 2 * tokens)


@pytest.mark.slow
@given(batch=st.integers(1, 4096), tokens=COUNTS, longest=COUNTS, graphs=GRAPH_SIZES)
def test_the_largest_batch_the_longest_prompt_and_every_graph_are_reached(batch, tokens, longest, graphs):
    shapes = shapes_of(batch, tokens, longest, graphs)
    batches = {requests for requests, _ in shapes}
    most = min(batch, tokens, MAX_REQUESTS)

    assert max(batches) == most
    assert min(tokens, longest) in {length for requests, length in shapes if requests == 1}
    before = 0
    for size in sorted(set(cuda_graph_batch_sizes(most) if graphs is None else graphs)):
        assert before >= most or any(before < requests <= size for requests in batches), size
        before = size


@pytest.mark.slow
@given(batch=st.integers(1, 4096), tokens=COUNTS, longest=COUNTS)
def test_neighbours_are_never_far_apart(batch, tokens, longest):
    shapes = shapes_of(batch, tokens, longest, ())
    alone = sorted(length for requests, length in shapes if requests == 1)

    for sizes in (alone, sorted({requests for requests, _ in shapes})):
        assert all(after <= 8 * before for before, after in itertools.pairwise(sizes))


def test_there_are_enough_shapes_and_not_too_many():
    assert 20 <= len(shapes_of(128, 8192, 65535)) <= 30
    assert 20 <= len(shapes_of(896, 1151, 1151, ranks=8)) <= 30
    assert len(shapes_of(1, 1, 1)) == 1
    thousands = shapes_of(4096, 8192, 8192, range(1, 4097))
    assert (len(thousands) < 80, max(thousands)[0]) == (True, 2048)


def test_under_attention_dp_every_rank_has_the_whole_batch_up_to_what_the_backend_takes():
    shapes = shapes_of(128, 1151, 1151, ranks=8)
    assert max(shapes) == (1024, 8)
    assert (8, 1151) in shapes
    assert max(shapes_of(896, 1151, 1151, ranks=8)) == (2048, 4)
    assert {requests for requests, _ in shapes_of(896, 1151, 1151, ranks=3000)} == {1, 3000}

    # Two chunks of a 64K iteration on each of 32 ranks would be more tokens than it takes.
    shapes = shapes_of(5, 65_568, 131_136, ranks=32)
    assert max(requests * length for requests, length in shapes) <= 2**22
    assert max(length for _, length in shapes) == 131_136


def test_a_prompt_in_chunks_is_one_that_needs_two():
    shapes = shapes_of(4, 100, 150)

    assert shapes[-1] == (1, 150)
    assert [shape for shape in shapes if shape[0] * shape[1] > 100] == [(1, 150)]


def test_a_limit_below_one_is_refused():
    for name in ("max_batch_size", "max_num_tokens", "max_input_len"):
        limits = {"max_batch_size": 1, "max_num_tokens": 1, "max_input_len": 1, name: 0}
        with pytest.raises(ValueError, match=f"{name}=0"):
            warmup_shapes(WarmupLimits(**limits))


LLM_ARGS = {
    "max_batch_size": 16,
    "max_num_tokens": 2048,
    "max_seq_len": 4096,
    "enable_chunked_prefill": True,
    "enable_attention_dp": True,
    "tensor_parallel_size": 8,
    "cuda_graph_config": {"enable_padding": True, "batch_sizes": [1, 4, 16]},
}


DEFAULT_GRAPHS = cuda_graph_batch_sizes(128)
NESTED = {"pytorch_backend_config": {"use_cuda_graph": True, "cuda_graph_batch_sizes": [1, 3]}}
ARGUMENTS = [  # what is given beside LLM_ARGS, and the limits that follow
    ({}, {"max_batch_size": 16, "max_num_tokens": 2048, "max_input_len": 4095, "attention_dp_size": 8}),
    ({}, {"graph_batch_sizes": (1, 4, 16)}),
    ({"enable_chunked_prefill": False}, {"max_input_len": 2048}),
    ({"max_seq_len": 100}, {"max_input_len": 99}),
    ({"max_seq_len": 1}, {"max_input_len": 1}),
    ({"max_seq_len": None}, {"max_input_len": 4096}),  # the checkpoint's length
    ({"enable_attention_dp": False}, {"attention_dp_size": 1}),
    ({"cuda_graph_config": None}, {"graph_batch_sizes": ()}),
    ({"cuda_graph_config": {"max_batch_size": 16}}, {"graph_batch_sizes": (1, 2, 4, 8, 16)}),
    ({"cuda_graph_config": {}}, {"graph_batch_sizes": DEFAULT_GRAPHS}),
    ({"max_batch_size": "x"}, {"max_batch_size": 2048}),
]
ALONE = [
    ({}, {"max_batch_size": 2048, "max_num_tokens": 8192, "max_input_len": 8192, "attention_dp_size": 1}),
    ({}, {"graph_batch_sizes": DEFAULT_GRAPHS}),
    ({"use_cuda_graph": True, "cuda_graph_batch_sizes": [1, 3], "max_batch_size": 4}, {"graph_batch_sizes": (1, 3)}),
    (NESTED | {"max_batch_size": 4}, {"graph_batch_sizes": (1, 3)}),  # 0.19.0's
]


def test_each_argument_counts(subtests):
    rows = [(LLM_ARGS | changes, expected) for changes, expected in ARGUMENTS]
    for arguments, expected in rows + ALONE:
        with subtests.test(f"{arguments} {expected}"):
            limits = warmup_limits(arguments)
            assert {name: getattr(limits, name) for name in expected} == expected


WARMUP = "triton_config.warmup"


def warmup_of(plan):
    return {setting.key: setting for setting in plan.settings if setting.key.startswith(WARMUP)}


def planned(**fields):
    return make_plan(PlanRequest(**{"variant": "deepseek-r1", "gpu": "h200", "num_gpus": 8, **fields}))


@pytest.mark.parametrize("release", RELEASES)
def test_the_plan_has_the_shapes_of_its_own_limits(release):
    plan = planned(release=release)
    settings = warmup_of(plan)

    assert settings[f"{WARMUP}.shapes"].value == [list(shape) for shape in shapes_for_llm_args(plan.canonical)]
    assert settings[f"{WARMUP}.max_s"].value == 300
    assert all(setting.reason for setting in settings.values())


def test_settings_by_hand_count():
    shapes = warmup_of(planned(overrides=(("max_batch_size", 3), ("max_num_tokens", 4096))))[f"{WARMUP}.shapes"].value
    assert max(requests for requests, _ in shapes) == 3
    assert [1, 4096] in shapes

    own = ((f"{WARMUP}.max_s", 60), (f"{WARMUP}.shapes", ((1, 8), (2, 8))))
    for overrides, expected in (
        (((WARMUP, None),), {WARMUP: None}),
        (own, {f"{WARMUP}.shapes": [[1, 8], [2, 8]], f"{WARMUP}.max_s": 60}),
    ):
        settings = warmup_of(planned(overrides=overrides))
        assert {key: setting.value for key, setting in settings.items()} == expected


def test_profiles_and_engines_without_triton_have_no_warmup():
    for name, profile in profiles().items():
        small = {"variant": "tiny", "engine": "tensorrt_llm"} if name == "rehearsal" else {"variant": "deepseek-v3"}
        plan = planned(**small, profile=name, num_gpus=profile.recipes[0].num_gpus or 8, gpu="h200")
        assert bool(warmup_of(plan)) == ("triton" in profile.formats), name
    assert warmup_of(make_plan(PlanRequest(variant="tiny"))) == {}


def test_what_the_backend_would_not_take_is_refused_by_hand():
    for name, value, message in (
        ("shapes", ((1, 64), (2,)), "expected a list of pairs"),
        ("shapes", (), "expected a list of pairs"),
        ("max_rounds", 0, "expected a whole number from 1"),
        ("max_secs", 60, "did you mean max_s?"),
    ):
        with pytest.raises(RefusedPlanError) as refused:
            planned(overrides=((f"{WARMUP}.{name}", value),))
        assert message in str(refused.value)
        assert f"{WARMUP}.{name}" in str(refused.value)


def test_shapes_are_written_in_readable_lines():
    lines = model_yaml(planned(), stamp="stamp").splitlines()
    pairs = [line for line in lines if line.strip().startswith("[")]

    assert len(pairs) > 1
    assert max(map(len, pairs)) <= 110


WRONG = [
    ("5", "T002", "", "expected a mapping or null"),
    ("{}", "T002", "", "expected shapes, found none"),
    ("{shapes: [[1, 64, 2]]}", "T002", ".shapes", "expected a list of pairs"),
    ("{shapes: [[1, 64]], max_s: no}", "T002", ".max_s", "expected a number"),
    ("{shapes: [[1, 64]], max_token: 5}", "T001", ".max_token", "is not a key of warmup"),
]


def test_what_is_wrong_with_a_warmup_is_found():
    def checked(warmup):
        return check(f"max_seq_len: 4096\n{MODEL_YAML}  warmup: {warmup}\n")

    for right in ("null", "{shapes: [[1, 64], [4, 4095]], max_tokens: 2, max_rounds: 3, max_s: 9.5}"):
        assert [finding for finding in serious(checked(right)) if "warmup" in (finding.key or "")] == []
    for warmup, code, key, message in WRONG:
        finding = only(checked(warmup), code)
        assert finding.key == f"triton_config.warmup{key}"
        assert message in finding.message
