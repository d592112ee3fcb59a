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
from deepseek_triton_build.check import check_repository
from deepseek_triton_build.data.setting_types import MOST_WARMUP_TOKENS
from deepseek_triton_build.render.model_yaml import model_yaml
from support.checked import MODEL_YAML, OPTIONS, only, serious, write

COUNTS = st.integers(1, 200_000)
GRAPH_SIZES = st.none() | st.lists(st.integers(1, 4096), max_size=40)


@given(batch=COUNTS, tokens=COUNTS, longest=COUNTS, graphs=GRAPH_SIZES, ranks=st.sampled_from([1, 8, 32]))
def test_every_shape_keeps_to_the_limits(batch, tokens, longest, graphs, ranks):
    shapes = warmup_shapes(
        WarmupLimits(
            max_batch_size=batch,
            max_num_tokens=tokens,
            max_input_len=longest,
            graph_batch_sizes=graphs,
            attention_dp_size=ranks,
        )
    )

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
    shapes = warmup_shapes(
        WarmupLimits(max_batch_size=batch, max_num_tokens=tokens, max_input_len=longest, graph_batch_sizes=graphs)
    )
    batches = {requests for requests, _ in shapes}
    most = min(batch, tokens, MAX_REQUESTS)

    assert max(batches) == most
    assert min(tokens, longest) in {length for requests, length in shapes if requests == 1}
    before = 0
    for size in sorted(set(cuda_graph_batch_sizes(most) if graphs is None else graphs)):
        assert before >= most or any(before < requests <= size for requests in batches), size
        before = size


@given(batch=st.integers(1, 4096), tokens=COUNTS, longest=COUNTS)
def test_neighbours_are_never_far_apart(batch, tokens, longest):
    shapes = warmup_shapes(
        WarmupLimits(max_batch_size=batch, max_num_tokens=tokens, max_input_len=longest, graph_batch_sizes=())
    )
    alone = sorted(length for requests, length in shapes if requests == 1)

    for sizes in (alone, sorted({requests for requests, _ in shapes})):
        assert all(after <= 8 * before for before, after in itertools.pairwise(sizes))


@pytest.mark.parametrize(
    ("limits", "fewest", "most"),
    [
        pytest.param({"max_batch_size": 128, "max_num_tokens": 8192, "max_input_len": 65535}, 20, 30, id="balanced"),
        pytest.param(
            {"max_batch_size": 896, "max_num_tokens": 1151, "max_input_len": 1151, "attention_dp_size": 8},
            20,
            30,
            id="7,168 requests",
        ),
        pytest.param({"max_batch_size": 1, "max_num_tokens": 1, "max_input_len": 1}, 1, 1, id="one of everything"),
    ],
)
def test_there_are_enough_shapes_and_not_too_many(limits, fewest, most):
    assert fewest <= len(warmup_shapes(WarmupLimits(**limits))) <= most


def test_thousands_of_graph_sizes_do_not_make_thousands_of_shapes():
    sizes = range(1, 4097)
    shapes = warmup_shapes(
        WarmupLimits(max_batch_size=4096, max_num_tokens=8192, max_input_len=8192, graph_batch_sizes=sizes)
    )

    assert len(shapes) < 80
    assert max(shapes)[0] == 2048


def test_under_attention_dp_every_rank_has_the_whole_batch():
    shapes = warmup_shapes(
        WarmupLimits(max_batch_size=128, max_num_tokens=1151, max_input_len=1151, attention_dp_size=8)
    )

    assert max(shapes) == (1024, 8)
    assert (8, 1151) in shapes


def test_no_shape_has_more_tokens_than_the_backend_takes():
    """Two chunks of a 64K iteration on each of 32 ranks would."""
    shapes = warmup_shapes(
        WarmupLimits(max_batch_size=5, max_num_tokens=65_568, max_input_len=131_136, attention_dp_size=32)
    )

    assert max(requests * length for requests, length in shapes) <= 2**22
    assert max(length for _, length in shapes) == 131_136


def test_over_all_ranks_no_more_are_sent_at_once_than_form_a_batch():
    shapes = warmup_shapes(
        WarmupLimits(max_batch_size=896, max_num_tokens=1151, max_input_len=1151, attention_dp_size=8)
    )
    many = warmup_shapes(
        WarmupLimits(max_batch_size=896, max_num_tokens=1151, max_input_len=1151, attention_dp_size=3000)
    )

    assert max(shapes) == (2048, 4)
    assert {requests for requests, _ in many} == {1, 3000}


def test_a_prompt_in_chunks_is_one_that_needs_two():
    shapes = warmup_shapes(WarmupLimits(max_batch_size=4, max_num_tokens=100, max_input_len=150))

    assert shapes[-1] == (1, 150)
    assert [shape for shape in shapes if shape[0] * shape[1] > 100] == [(1, 150)]


@pytest.mark.parametrize("name", ["max_batch_size", "max_num_tokens", "max_input_len"])
def test_a_limit_below_one_is_refused(name):
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


def test_the_limits_are_those_of_the_llm_arguments():
    assert warmup_limits(LLM_ARGS) == WarmupLimits(
        max_batch_size=16, max_num_tokens=2048, max_input_len=4095, graph_batch_sizes=(1, 4, 16), attention_dp_size=8
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param({"enable_chunked_prefill": False}, {"max_input_len": 2048}, id="no chunks"),
        pytest.param({"max_seq_len": 100}, {"max_input_len": 99}, id="short"),
        pytest.param({"max_seq_len": 1}, {"max_input_len": 1}, id="shortest"),
        pytest.param({"max_seq_len": None}, {"max_input_len": 4096}, id="the checkpoint's length"),
        pytest.param({"enable_attention_dp": False}, {"attention_dp_size": 1}, id="no attention DP"),
        pytest.param({"cuda_graph_config": None}, {"graph_batch_sizes": ()}, id="no graphs"),
        pytest.param(
            {"cuda_graph_config": {"max_batch_size": 16}}, {"graph_batch_sizes": (1, 2, 4, 8, 16)}, id="graphs up to"
        ),
        pytest.param({"cuda_graph_config": {}}, {"graph_batch_sizes": cuda_graph_batch_sizes(128)}, id="graphs"),
        pytest.param({"max_batch_size": "x"}, {"max_batch_size": 2048}, id="no number"),
    ],
)
def test_each_argument_counts(given, expected):
    limits = warmup_limits({**LLM_ARGS, **given})

    assert {name: getattr(limits, name) for name in expected} == expected


def test_without_arguments_the_limits_are_tensorrt_llms_defaults():
    assert warmup_limits({}) == WarmupLimits(
        max_batch_size=2048,
        max_num_tokens=8192,
        max_input_len=8192,
        graph_batch_sizes=cuda_graph_batch_sizes(128),
        attention_dp_size=1,
    )


def test_the_keys_of_older_releases_are_understood():
    old = {"use_cuda_graph": True, "cuda_graph_batch_sizes": [1, 3], "max_batch_size": 4}
    oldest = {"pytorch_backend_config": {"use_cuda_graph": True, "cuda_graph_batch_sizes": [1, 3]}, "max_batch_size": 4}

    assert warmup_limits(old).graph_batch_sizes == warmup_limits(oldest).graph_batch_sizes == (1, 3)


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


def test_the_shapes_follow_what_is_set_by_hand():
    shapes = warmup_of(planned(overrides=(("max_batch_size", 3), ("max_num_tokens", 4096))))[f"{WARMUP}.shapes"].value

    assert max(requests for requests, _ in shapes) == 3
    assert [1, 4096] in shapes


def test_null_turns_the_warmup_off():
    settings = warmup_of(planned(overrides=((WARMUP, None),)))

    assert {key: setting.value for key, setting in settings.items()} == {WARMUP: None}


def test_one_setting_by_hand_leaves_the_others():
    settings = warmup_of(planned(overrides=((f"{WARMUP}.max_s", 60), (f"{WARMUP}.shapes", ((1, 8), (2, 8))))))

    assert {key: setting.value for key, setting in settings.items()} == {
        f"{WARMUP}.shapes": [[1, 8], [2, 8]],
        f"{WARMUP}.max_s": 60,
    }


@pytest.mark.parametrize("profile", profiles())
def test_profiles_without_triton_have_no_warmup(profile):
    usable = profiles()[profile]
    recipe = usable.recipes[0]
    small = {"variant": "tiny", "engine": "tensorrt_llm"} if profile == "rehearsal" else {"variant": "deepseek-v3"}
    plan = planned(**small, profile=profile, num_gpus=recipe.num_gpus or 8, gpu="h200")

    assert bool(warmup_of(plan)) == ("triton" in usable.formats)


def test_embedded_engines_have_no_warmup():
    assert warmup_of(make_plan(PlanRequest(variant="tiny"))) == {}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        pytest.param("shapes", ((1, 64), (2,)), "expected a list of pairs", id="no pair"),
        pytest.param("shapes", (), "expected a list of pairs", id="none"),
        pytest.param("max_rounds", 0, "expected a whole number from 1", id="no round"),
        pytest.param("max_secs", 60, "did you mean max_s?", id="no key"),
    ],
)
def test_what_the_backend_would_not_take_is_refused_by_hand(name, value, message):
    with pytest.raises(RefusedPlanError, match=message) as refused:
        planned(overrides=((f"{WARMUP}.{name}", value),))

    assert f"{WARMUP}.{name}" in str(refused.value)


def test_shapes_are_written_in_readable_lines():
    lines = model_yaml(planned(), stamp="stamp").splitlines()
    pairs = [line for line in lines if line.strip().startswith("[")]

    assert len(pairs) > 1
    assert max(map(len, pairs)) <= 110


def checked(tmp_path, warmup):
    write(tmp_path, model_yaml=f"max_seq_len: 4096\n{MODEL_YAML}  warmup: {warmup}\n")
    return check_repository(tmp_path, OPTIONS)


@pytest.mark.parametrize("warmup", ["null", "{shapes: [[1, 64], [4, 4095]], max_tokens: 2, max_rounds: 3, max_s: 9.5}"])
def test_a_warmup_that_is_right_is_no_finding(tmp_path, warmup):
    assert [finding for finding in serious(checked(tmp_path, warmup)) if "warmup" in (finding.key or "")] == []


@pytest.mark.parametrize(
    ("warmup", "code", "key", "message"),
    [
        pytest.param("5", "T002", "", "expected a mapping or null", id="no mapping"),
        pytest.param("{}", "T002", "", "expected shapes, found none", id="no shapes"),
        pytest.param("{shapes: [[1, 64, 2]]}", "T002", ".shapes", "expected a list of pairs", id="three"),
        pytest.param("{shapes: [[1, 64]], max_s: no}", "T002", ".max_s", "expected a number", id="no number"),
        pytest.param("{shapes: [[1, 64]], max_token: 5}", "T001", ".max_token", "is not a key of warmup", id="key"),
    ],
)
def test_what_is_wrong_with_a_warmup_is_found(tmp_path, warmup, code, key, message):
    finding = only(checked(tmp_path, warmup), code)

    assert finding.key == f"triton_config.warmup{key}"
    assert message in finding.message
