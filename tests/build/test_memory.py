"""The arithmetic of GPU memory gives the figures that were measured or published elsewhere."""

from dataclasses import replace

import pytest

from deepseek_triton_build import PlanRequest, make_plan
from deepseek_triton_build.arithmetic import GIB, minimum_gpus
from deepseek_triton_build.arithmetic.gpu_memory import (
    Layout,
    cuda_graph_batch_sizes,
    kv_bytes_per_token,
    make_budget,
    weight_bytes_per_gpu,
)
from deepseek_triton_build.arithmetic.weights import weights
from deepseek_triton_build.catalog import RELEASES, find_gpu, find_variant, load_release, variants
from deepseek_triton_build.rules.rule import Deployment

R1 = find_variant("deepseek-r1")
V32 = find_variant("deepseek-v3.2-exp")
TP8 = Layout(tensor_parallel_size=8, expert_parallel_size=8)


def test_the_shapes_of_the_fp8_checkpoint_give_its_bytes_to_the_byte():
    assert weights(R1.architecture, R1.checkpoints["fp8"]).total == 688_574_839_360


def test_the_shapes_give_the_bytes_of_every_checkpoint_which_is_of_one_variant():
    owners = {}
    for variant in variants().values():
        for weights_of in (*variant.checkpoints.values(), *variant.own_checkpoints.values()):
            for name, checkpoint in weights_of.under_each_name().items():
                assert variant.model or owners.setdefault(name, variant.name) == variant.name, name
                parts = weights(variant.architecture, checkpoint)
                left_out = parts.mtp + parts.mtp_experts if checkpoint.precision == "w4a16" else 0
                left_out -= variant.architecture.host_bytes
                assert parts.total - left_out == pytest.approx(checkpoint.weight_bytes, rel=0.01), name


# Bytes of a GPU's weights without the draft and with it, from config.json's figures alone; the totals of the last two
# lines of each pair are those of the shards' headers (bojieli/OpenTallas data/inventory).
V4_BYTES = {
    ("deepseek-v4-flash", "tp2"): (78_656_962_140, 80_476_555_336),
    ("deepseek-v4-flash", "tp4"): (39_982_248_220, 40_914_744_136),
    ("deepseek-v4-flash", "tp8"): (20_644_891_260, 21_133_838_536),
    ("deepseek-v4-flash", "dp4"): (45_629_085_916, 46_655_959_624),
    ("deepseek-v4-flash-0731", "tp4"): (39_982_248_220, 42_761_923_960),
    ("deepseek-v4-flash-0731", "dp8"): (27_232_868_572, 29_111_507_704),
    ("deepseek-v4-pro", "tp8"): (109_447_708_388, 111_305_151_624),
    ("deepseek-v4-pro", "tp16"): (56_498_337_784, 57_491_556_416),
    ("deepseek-v4-pro-0813", "tp8"): (109_447_708_388, 114_897_981_160),
    ("deepseek-v4-pro-0813", "dp16"): (80_063_061_964, 84_140_347_624),
}


def test_weights_of_v4_by_layout():
    found = {}
    for name, layout in V4_BYTES:
        variant, size, is_dp = find_variant(name), int(layout[2:]), layout.startswith("dp")
        divided = Layout(tensor_parallel_size=size, expert_parallel_size=size, attention_dp=is_dp)
        checkpoint = variant.checkpoints["mxfp4"]
        found[name, layout] = tuple(
            weight_bytes_per_gpu(variant.architecture, checkpoint, divided, mtp=mtp) for mtp in (False, True)
        )
    assert found == V4_BYTES


def test_weights_of_v41_are_at_most_those_of_its_inventory():
    variant = find_variant("deepseek-v4.1-flash")
    parts = weights(variant.architecture, variant.checkpoints["mxfp4"])
    images = 970_547_200  # their encoder, by difference
    assert parts.total + variant.architecture.host_bytes + images == variant.checkpoints["mxfp4"].weight_bytes


def test_weights_per_gpu_are_close_to_the_measured_figure():
    """79.59 GiB at TP8 was measured for V3/R1 FP8 without the MTP layer (vLLM 0.25.1 on 8 x H200)."""
    held = weight_bytes_per_gpu(R1.architecture, R1.checkpoints["fp8"], TP8, mtp=False)

    assert held / GIB == pytest.approx(79.59, rel=0.01)


KV_BYTES = [
    (R1.architecture, "bf16", 0, 70_272),
    (R1.architecture, "fp8", 0, 35_136),
    (R1.architecture, "bf16", 1, 71_424),
    (R1.architecture, "fp8", 1, 35_712),
    (R1.architecture, "fp8", 3, 35_136 + 3 * 576),  # a layer for each of three drafts
    (V32.architecture, "bf16", 0, 70_272 + 8_052),  # with the indexer's keys
]


def test_kv_cache_of_a_token():
    found = [
        (model, dtype, layers, kv_bytes_per_token(model, dtype, mtp_layers=layers))
        for model, dtype, layers, _ in KV_BYTES
    ]
    assert found == KV_BYTES


@pytest.mark.parametrize("release", RELEASES)
def test_the_releases_have_a_layer_of_the_kv_cache_for_each_draft_token(release):
    request = PlanRequest(variant="deepseek-r1", gpu="h200", release=release, mtp=3, kv_dtype="fp8")

    assert load_release(release).supports("mtp_kv_layer_per_draft")
    assert make_plan(request).budget.kv_bytes_per_token == 576 * (61 + 3)


def test_a_release_with_one_layer_for_all_drafts_has_one_more():
    features = {**load_release("1.2.1").features, "mtp_kv_layer_per_draft": False}
    one = replace(load_release("1.2.1"), features=features)
    settings = {"speculative_config.decoding_type": "MTP", "speculative_config.num_nextn_predict_layers": 3}

    assert Deployment(settings=settings, release=one).mtp_kv_layers == 1
    assert Deployment(settings=settings).mtp_kv_layers == 3
    assert Deployment(settings={}, release=one).mtp_kv_layers == 0


def test_the_cpp_sampler_takes_two_arrays_of_the_vocabulary_for_each_request():
    with_sampler, drafting = (
        make_plan(PlanRequest(variant="deepseek-r1", gpu="b200", profile="throughput", mtp=mtp)) for mtp in (0, 1)
    )

    assert with_sampler.budget.sampler == 2048 * 129_280 * 2 * 4
    assert drafting.budget.sampler == 0


def test_attention_dp_copies_attention_and_multiplies_the_kv_cache():
    checkpoint = R1.checkpoints["fp8"]
    dp = Layout(tensor_parallel_size=8, expert_parallel_size=8, attention_dp=True)
    alone = weight_bytes_per_gpu(R1.architecture, checkpoint, TP8, mtp=False)
    copied = weight_bytes_per_gpu(R1.architecture, checkpoint, dp, mtp=False)
    parts = weights(R1.architecture, checkpoint)

    assert copied - alone == pytest.approx((parts.attention + parts.dense + parts.embeddings) * 7 / 8, rel=1e-6)
    assert dp.attention_dp_size == 8
    assert TP8.attention_dp_size == 1


def test_pipeline_stages_divide_the_layers():
    checkpoint = R1.checkpoints["fp8"]
    two = Layout(tensor_parallel_size=8, expert_parallel_size=8, pipeline_parallel_size=2)

    held = weight_bytes_per_gpu(R1.architecture, checkpoint, two, mtp=False)
    assert held < 0.53 * weight_bytes_per_gpu(R1.architecture, checkpoint, TP8, mtp=False)
    assert kv_bytes_per_token(R1.architecture, "fp8", pipeline_parallel_size=2) == 576 * 31


def test_more_slots_than_experts_cost_their_share():
    checkpoint = R1.checkpoints["fp4"]
    wide = Layout(tensor_parallel_size=32, expert_parallel_size=32, attention_dp=True)
    plain = weight_bytes_per_gpu(R1.architecture, checkpoint, wide, mtp=False)
    balanced = weight_bytes_per_gpu(R1.architecture, checkpoint, wide, mtp=False, expert_slots=288)

    routed = weights(R1.architecture, checkpoint).routed_experts / 32
    assert balanced - plain == pytest.approx(routed * 32 / 256, rel=1e-6)


def test_the_batch_sizes_that_are_captured():
    eights = range(8, 129, 8)
    sizes = {1: (1,), 4: (1, 2, 4), 128: (1, 2, 4, *eights), 384: (1, 2, 4, *eights, 256, 384)}
    sizes[1024] = (1, 2, 4, *eights, 256, 512, 1024)
    assert {most: cuda_graph_batch_sizes(most) for most in sizes} == sizes


PUBLISHED_RUNS = [
    # GPU, precision, batch of a rank, max_num_tokens, graphs, KV dtype, fraction; each ran 1,024 in and 2,048 out
    pytest.param("b200", "fp4", 896, 2048, 11, "fp8", 0.93, id="B200 FP4 with FP8 KV: 7,168 at once"),
    pytest.param("b200", "fp4", 384, 1536, 10, "bf16", 0.85, id="B200 FP4 with 16-bit KV: 3,072 at once"),
    pytest.param("h200", "fp8", 128, 1151, 1, "bf16", 0.8, id="H200 FP8: 1,024 at once"),
]


@pytest.mark.parametrize(("gpu", "precision", "batch", "num_tokens", "graphs", "kv_dtype", "fraction"), PUBLISHED_RUNS)
def test_what_nvidia_ran_fits_by_this_arithmetic(gpu, precision, batch, num_tokens, graphs, kv_dtype, fraction):
    """The runs of "How to get best performance on DeepSeek-R1 in TensorRT LLM", all with attention DP on 8 GPUs."""
    budget = make_budget(
        find_gpu(gpu),
        R1.architecture,
        R1.checkpoints[precision],
        Layout(tensor_parallel_size=8, expert_parallel_size=8, attention_dp=True),
        num_cuda_graphs=graphs,
        max_num_tokens=num_tokens,
        kv_dtype=kv_dtype,
        kv_fraction=fraction,
    )

    assert budget.free > 0
    assert budget.concurrent_requests(1024, 2048) >= batch * 8


HARDWARE_TABLE = [
    # TensorRT-LLM examples/models/core/deepseek_v3/README.md, hardware requirements
    ("h100", "fp8", 16),
    ("h100", "w4a8", 8),
    ("h20-141", "fp8", 8),
    ("h20-141", "w4a8", 4),
    ("h20-96", "fp8", 8),
    ("h20-96", "w4a8", 4),
    ("h200", "fp8", 8),
    ("h200", "w4a8", 4),
    ("b200", "fp4", 4),
    ("gb200", "fp4", 4),
]


def test_the_hardware_table_follows_from_the_arithmetic_and_is_in_the_catalogue():
    found = [
        (gpu, precision, minimum_gpus(find_gpu(gpu), R1.architecture, R1.checkpoints[precision]))
        for gpu, precision, _ in HARDWARE_TABLE
    ]
    assert found == HARDWARE_TABLE
    recorded = [(gpu, precision, find_gpu(gpu).published_min_gpus[precision]) for gpu, precision, _ in HARDWARE_TABLE]
    assert recorded == HARDWARE_TABLE


@pytest.mark.parametrize("gpu", ["b200", "gb200"])
def test_fp8_fits_four_blackwell_gpus_by_arithmetic_though_eight_are_published(gpu):
    assert minimum_gpus(find_gpu(gpu), R1.architecture, R1.checkpoints["fp8"]) == 4
    assert find_gpu(gpu).published_min_gpus["fp8"] == 8


def test_the_other_variants_need_as_many():
    expected = {"h100": 16, "h200": 8, "h20-96": 8, "h20-141": 8}
    for variant in ("deepseek-v3", "deepseek-r1-0528", "deepseek-v3.1", "deepseek-v3.2-exp"):
        entry = find_variant(variant)
        found = {gpu: minimum_gpus(find_gpu(gpu), entry.architecture, entry.checkpoints["fp8"]) for gpu in expected}
        assert found == expected
