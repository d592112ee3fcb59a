"""The pool of blocks that vLLM keeps DeepSeek-V4's KV cache in. The figures come from the code of vLLM 0.25.1 and
0.33.0, computed, where no log is named."""

from dataclasses import replace

import pytest

from deepseek_triton_build.arithmetic.block_pool import DS_MLA, block_pool
from deepseek_triton_build.arithmetic.gpu_memory import GIB, Layout
from deepseek_triton_build.arithmetic.vllm_memory import vllm_budget
from deepseek_triton_build.catalog import VLLM_VERSIONS, find_gpu, find_variant, load_vllm

NAMES = {"flash": "deepseek-v4-flash", "pro": "deepseek-v4-pro", "v4.1": "deepseek-v4.1-flash"}


def pool_of(model, version, gib=40.0, tokens=8192, draft_layers=0, form=DS_MLA):
    a = find_variant(NAMES[model]).architecture
    windows, vllm = a.num_layers + draft_layers, load_vllm(version)
    return block_pool(int(gib * GIB), a.csa, windows, vllm, tokens=tokens, drafts=0, form=form)


# Model, version, draft layers, bytes of a block; of its compressed caches, two groups of windows, states.
BLOCKS = [
    ("flash", "0.25.1", 0, 1_039_680, [1002240, 823680, 786240, 967680, 748800]),
    ("flash", "0.25.1", 1, 1_039_680, [1002240, 823680, 823680, 967680, 748800]),
    ("flash", "0.25.1", 3, 1_077_120, [1002240, 861120, 861120, 967680, 748800]),
    ("flash", "0.33.0", 0, 1_002_240, [1002240, 823680, 786240, 870912, 656640]),
    ("flash", "0.33.0", 1, 1_002_240, [1002240, 823680, 823680, 870912, 656640]),
    ("flash", "0.33.0", 3, 1_002_240, [1002240, 861120, 861120, 870912, 656640]),
    ("pro", "0.25.1", 0, 1_473_408, [1435968, 1160640, 1123200, 1382400, 1160640]),
    ("pro", "0.25.1", 1, 1_473_408, [1435968, 1160640, 1160640, 1382400, 1160640]),
    ("pro", "0.25.1", 3, 1_510_848, [1435968, 1198080, 1198080, 1382400, 1160640]),
    ("pro", "0.33.0", 0, 1_435_968, [1435968, 1160640, 1123200, 1244160, 1017792]),
    ("pro", "0.33.0", 1, 1_435_968, [1435968, 1160640, 1160640, 1244160, 1017792]),
    ("pro", "0.33.0", 3, 1_435_968, [1435968, 1198080, 1198080, 1244160, 1017792]),
]


def test_a_block_has_the_bytes_of_each_version():
    for model, version, draft_layers, size, groups in BLOCKS:
        pool = pool_of(model, version, draft_layers=draft_layers)
        assert (pool.bytes_per_block, [group.size for group in pool.groups]) == (size, groups), (model, version)


# Of 40 GiB: model, version, max_num_batched_tokens, max_model_len; blocks, and the tokens that vLLM logs.
LOGGED = [
    ("flash", "0.25.1", 8192, 8192, 41310, 113408),
    ("flash", "0.25.1", 8192, 65536, 41310, 839470),
    ("flash", "0.25.1", 8192, 131072, 41310, 1555468),
    ("flash", "0.25.1", 8192, 1048576, 41310, 6131164),
    ("flash", "0.25.1", 512, 8192, 41310, 1427896),
    ("flash", "0.25.1", 512, 65536, 41310, 5872651),
    ("flash", "0.25.1", 512, 131072, 41310, 7551721),
    ("flash", "0.25.1", 512, 1048576, 41310, 10071303),
    ("flash", "0.33.0", 8192, 8192, 42853, 104355),
    ("flash", "0.33.0", 8192, 65536, 42853, 404787),
    ("flash", "0.33.0", 8192, 131072, 42853, 780765),
    ("flash", "0.33.0", 8192, 1048576, 42853, 4169106),
    ("flash", "0.33.0", 512, 8192, 42853, 740615),
    ("flash", "0.33.0", 512, 65536, 42853, 4023516),
    ("flash", "0.33.0", 512, 131072, 42853, 5887660),
    ("flash", "0.33.0", 512, 1048576, 42853, 9901857),
    ("pro", "0.25.1", 8192, 8192, 29149, 78574),
    ("pro", "0.25.1", 8192, 65536, 29149, 582233),
    ("pro", "0.25.1", 8192, 131072, 29149, 1080185),
    ("pro", "0.25.1", 8192, 1048576, 29149, 4292226),
    ("pro", "0.25.1", 512, 8192, 29149, 986729),
    ("pro", "0.25.1", 512, 65536, 29149, 4099375),
    ("pro", "0.25.1", 512, 131072, 29149, 5291714),
    ("pro", "0.25.1", 512, 1048576, 29149, 7098221),
    ("pro", "0.33.0", 8192, 8192, 29909, 72834),
    ("pro", "0.33.0", 8192, 65536, 29909, 282518),
    ("pro", "0.33.0", 8192, 131072, 29909, 544930),
    ("pro", "0.33.0", 8192, 1048576, 29909, 2909803),
    ("pro", "0.33.0", 512, 8192, 29909, 516908),
    ("pro", "0.33.0", 512, 65536, 29909, 2808189),
    ("pro", "0.33.0", 512, 131072, 29909, 4109258),
    ("pro", "0.33.0", 512, 1048576, 29909, 6910943),
]


def test_the_capacity_is_what_vllm_logs():
    for model, version, tokens, longest, blocks, logged in LOGGED:
        pool = pool_of(model, version, tokens=tokens)
        found = (pool.num_blocks, int(pool.logged_concurrency(longest) * longest))
        assert found == (blocks, logged), (model, version, tokens, longest)


LENGTHS = (1024, 8192, 65536, 131072, 1048576)
HELD = [  # requests of LENGTHS that 40 GiB hold while all decode
    ("flash", "0.25.1", [1377, 712, 146, 76, 10]),
    ("flash", "0.33.0", [1428, 738, 151, 79, 10]),
    ("pro", "0.25.1", [971, 502, 103, 54, 7]),
    ("pro", "0.33.0", [996, 515, 106, 55, 7]),
]


def test_requests_that_decode_hold_few_blocks():
    for model, version, held in HELD:
        pool = pool_of(model, version)
        assert [pool.num_blocks // pool.held(length) for length in LENGTHS] == held, (model, version)
        assert all(pool.tokens_each(number) >= length for number, length in zip(held, LENGTHS, strict=True))


def test_logs_of_others_say_the_same():
    """HowToSpark's log of Flash with DSpark; vllm-project/vllm#44376, where 6.66 GiB are needed for 30,000 tokens, and
    5.44 GiB are enough for 13,528 (16,384 batched tokens are assumed, LLM's default there)."""
    spark = pool_of("flash", "0.25.1", 17.21, draft_layers=3)
    assert spark.logged_concurrency(2**20) * 2**20 == pytest.approx(2_555_830, rel=0.02)
    for gib, longest in ((6.66, 30_000), (5.44, 13_528)):
        assert pool_of("flash", "0.25.1", gib, tokens=16_384).longest_start == pytest.approx(longest, rel=0.02)


# Layers, GiB, and the tokens that vLLM 0.25.1 logged at 2,048 batched tokens and a max_model_len of 4,096.
H200 = [(32, 19.5, 144_789), (32, 18.28, 135_752), (6, 46.08, 2_619_997)]


def test_an_h200_logged_the_same():
    """V4-Flash's first layers with dummy weights."""
    csa = find_variant("deepseek-v4-flash").architecture.csa
    for layers, gib, logged in H200:
        cut = replace(csa, compress_ratios=csa.compress_ratios[:layers])
        pool = block_pool(int(gib * GIB), cut, layers, load_vllm("0.25.1"), tokens=2048, drafts=0, form=DS_MLA)
        assert pool.logged_concurrency(4096) * 4096 == pytest.approx(logged, rel=0.001)


def test_an_h200_had_the_room():
    """Of the 32 layers, without CUDA graphs and with them."""
    flash = find_variant("deepseek-v4-flash")
    cut = replace(flash.architecture.csa, compress_ratios=flash.architecture.csa.compress_ratios[:32])
    for cuda_graphs, available in ((False, 19.5), (True, 18.28)):
        budget = vllm_budget(
            find_gpu("h200"),
            replace(flash.architecture, num_layers=32, csa=cut),
            flash.checkpoints["mxfp4"],
            Layout(tensor_parallel_size=1, expert_parallel_size=1),
            gpu_memory_utilization=0.93,
            max_num_batched_tokens=2048,
            max_num_seqs=64,
            kv_dtype="fp8",
            vllm=load_vllm("0.25.1"),
            max_model_len=4096,
            cuda_graphs=cuda_graphs,
        )
        assert budget.kv_cache / GIB == pytest.approx(available, rel=0.03)


@pytest.mark.parametrize(("is_dp", "requests"), [(False, 20.43), (True, 156.9 / 8)])
def test_eight_b200s_have_the_room_that_was_logged(is_dp, requests):
    """V4-Flash-0731 without drafts, vLLM 0.25.0 (vllm-project/recipes#762, vllm-project/vllm#51454)."""
    flash = find_variant("deepseek-v4-flash-0731")
    budget = vllm_budget(
        find_gpu("b200"),
        flash.architecture,
        flash.checkpoints["mxfp4"],
        Layout(tensor_parallel_size=8, expert_parallel_size=8, attention_dp=is_dp),
        gpu_memory_utilization=0.95,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        kv_dtype="fp8",
        vllm=load_vllm("0.25.1"),
    )
    assert budget.pool.logged_concurrency(2**20) == pytest.approx(requests, rel=0.02)


# Version -> bytes of a block, tokens of a prompt under way at 8,192 batched ones, blocks for the check as vLLM starts.
ERAS = {
    "0.24.0": (1_039_680, 8192, 40834),
    "0.25.1": (1_039_680, 8192, 40834),
    "0.27.1": (1_002_240, 16384, 40834),
    "0.31.0": (1_002_240, 16384, 42852),
    "0.33.0": (1_002_240, 16384, 42852),
}


def test_versions_differ():
    """As their wheels' kv_cache_utils.py have it."""
    for version, facts in ERAS.items():
        pool = pool_of("flash", version)
        assert (pool.bytes_per_block, pool.in_flight, pool.checked_blocks) == facts, version


def test_blocks_for_a_prompt_keep_requests_away():
    few, many = (pool_of("flash", "0.27.1", 8.0, tokens=tokens).requests(8192, 1024) for tokens in (512, 8192))
    assert (few[1], many[1]) == (False, True)
    assert few[0] > many[0]
    assert pool_of("flash", "0.27.1", 2.0).requests(8192, 1024) == (0, True)
    assert pool_of("flash", "0.27.1", 0).tokens_each(1) == 0


@pytest.mark.parametrize("version", VLLM_VERSIONS)
@pytest.mark.parametrize("variant", ["deepseek-v4-flash", "deepseek-v4.1-flash"])
def test_a_cut_without_compressed_layers_has_windows(variant, version):
    csa = find_variant(variant).architecture.csa
    cut = replace(csa, compress_ratios=csa.compress_ratios[:2])
    pool = block_pool(GIB, cut, 2, load_vllm(version), tokens=512, drafts=0, form=DS_MLA)
    assert pool.logged_concurrency(4096) > 0
    assert pool.longest_start > 4096


def test_plain_rows_take_their_own_pages():
    """FLASHINFER_MLA_SPARSE_DSV4 on SM100."""
    for form, pages in {"bf16": {65536, 8704, 2048}, "fp8": {32768, 8704, 1024}}.items():
        assert pool_of("flash", "0.33.0", form=form).groups[0].pages.keys() == pages


# Form -> bytes of a block of V4.1, groups of windows; the last is DeepSeek's 890 bytes a token.
V41 = {
    "fp8_ds_mla": (460_224, 2),
    "mxfp8": (422_400, 2),
    "nvfp4_ds_mla": (269_280, 3),
    "nvfp4_ds_mla, fp4": (228_096, 4),
}


def test_blocks_of_v41_depend_on_the_form():
    for form, (size, windows) in V41.items():
        for draft_layers in (0, 3):
            pool = pool_of("v4.1", "0.33.0", form=form, draft_layers=draft_layers)
            assert (pool.bytes_per_block, len(pool.groups) - 2) == (size, windows), form
            assert pool.held(4096) == 16 + 5 * windows + 1
