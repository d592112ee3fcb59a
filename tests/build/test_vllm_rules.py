"""Each rule of vLLM finds its own case and nothing else."""

import itertools
from dataclasses import replace

import pytest

from deepseek_triton_build.catalog import VLLM_VERSIONS, find_gpu, find_variant, load_vllm
from deepseek_triton_build.rules import VLLM_RULES, target_violations, violations
from deepseek_triton_build.rules.rule import VllmDeployment

B200 = {"gpu": "b200"}
FP4 = {"gpu": "b200", "precision": "fp4"}
W4A16 = {"precision": "w4a16"}
V32 = {"variant": "deepseek-v3.2-exp"}
FLASH, PRO, V41 = (
    {"variant": f"deepseek-v4{name}", "precision": "mxfp4", "version": version}
    for name, version in (("-flash", "0.25.1"), ("-pro-0813", "0.25.1"), (".1-flash", "0.33.0"))
)
DSPARK = {"speculative_config.method": "dspark", "speculative_config.num_speculative_tokens": 5}
KV, MOE, FP8_KV = "kv_cache_dtype", "moe_backend", {"kv_cache_dtype": "fp8"}
MEGA, FP4_INDEXER = {MOE: "deep_gemm_mega_moe"}, {"attention_config.use_fp4_indexer_cache": True}
PP = "pipeline_parallel_size"
TP, DP, ATTENTION, CHUNKS = "tensor_parallel_size", "data_parallel_size", "attention_backend", "enable_chunked_prefill"
TOKENS, BATCH, LENGTH = "max_num_batched_tokens", "max_num_seqs", "max_model_len"
MTP = {"speculative_config.method": "mtp", "speculative_config.num_speculative_tokens": 1}


def on(*settings, variant="deepseek-r1", precision="fp8", gpu="h200", version="0.24.0", **more):
    """Return DeepSeek-R1 on 8 x H200, with any fact replaced."""
    found = find_variant(variant)
    given = {"tensor_parallel_size": 8, "enable_expert_parallel": True, "scheduling_policy": "priority"}
    if variant == "tiny":
        given["tensor_parallel_size"] = 4
    if variant.startswith("deepseek-v4"):
        given |= FP8_KV
    for mapping in settings:
        given |= mapping
    return VllmDeployment(
        settings=given,
        vllm=load_vllm(version),
        variant=found,
        architecture=found.architecture,
        checkpoint=found.checkpoints[precision],
        gpu=find_gpu(gpu),
        **more,
    )


CASES = {
    "X001": (on(gpu="a100"), on()),
    "X002": (on(precision="fp4"), on(precision="fp4", **B200)),
    "X003": (on(precision="w4a8"), on(**W4A16)),
    "X004": (on({TP: 256}, **FP4), on({TP: 128}, **FP4)),
    "X005": (on({TP: 32}, **W4A16), on({TP: 32}, **FP4)),
    "X006": (on({TP: 1, DP: 16}), on({TP: 1, DP: 8})),
    "X007": (
        on({ATTENTION: "FLASH_ATTN_MLA", "kv_cache_dtype": "fp8"}),
        on({ATTENTION: "FLASHMLA", "kv_cache_dtype": "fp8"}),
    ),
    "X008": (on({ATTENTION: "cutlass_mla"}), on({ATTENTION: "cutlass_mla"}, **B200)),
    "X009": (on({ATTENTION: "FLASHMLA", "block_size": 32}), on({ATTENTION: "FLASH_ATTN_MLA", "block_size": 32})),
    "X010": (on({ATTENTION: "FLASHMLA"}, **V32), on({ATTENTION: "FLASHMLA_SPARSE"}, **V32)),
    "X011": (on({"decode_context_parallel_size": 3}), on({"decode_context_parallel_size": 4})),
    "X012": (on({CHUNKS: False, TOKENS: 8192, LENGTH: 8193}), on({CHUNKS: False, TOKENS: 8192, LENGTH: 8192})),
    "X013": (on({TOKENS: 511, BATCH: 512}), on({TOKENS: 512, BATCH: 512})),
    "X014": (on({LENGTH: 163841}), on({LENGTH: 163840})),
    "X015": (on({LENGTH: 2048}, isl=2048), on({LENGTH: 2048}, isl=2047)),
    "X016": (on(MTP, **W4A16), on(MTP)),
    "X017": (on(MTP, {"speculative_config.num_speculative_tokens": 2}), on(MTP)),
    "X018": (on(MTP, triton={"default_sampling.min_p": 0.1}), on(triton={"default_sampling.min_p": 0.1})),
    "X019": (on(concurrency=512, held_requests=376), on(concurrency=376, held_requests=376)),
    "X020": (
        on({LENGTH: 4096}, triton={"default_max_tokens": 4096}),
        on({LENGTH: 4096}, triton={"default_max_tokens": 4095}),
    ),
    "X021": (on({"gpu_memory_utilization": 0.95}), on({"gpu_memory_utilization": 0.94})),
    "X022": (on({"scheduling_policy": "fcfs"}, triton={"engine": "vllm"}), on(triton={"engine": "vllm"})),
    "X023": (on(triton={"default_sampling.temperature": 2.1}), on(triton={"default_sampling.temperature": 2})),
    "X024": (on({"trust_remote_code": True}), on({"trust_remote_code": False})),
    "X025": (on(gpu="rtx-pro-6000", version="0.33.0"), on(gpu="gb300")),
    "X026": (on(**V41 | {"version": "0.25.1"}), on(**V41)),
    "X027": (on(MTP, **PRO), on(DSPARK, **PRO)),
    "X028": (on({"decode_context_parallel_size": 2}, **PRO), on({"decode_context_parallel_size": 2})),
    "X029": (on(MEGA, **PRO), on(MEGA, **PRO, **B200)),
    "X030": (on({KV: "auto"}, **PRO), on({KV: "auto"}, **PRO | {"version": "0.33.0"})),
    "X031": (on({ATTENTION: "flashinfer_mla"}, **PRO), on({ATTENTION: "FLASHMLA_SPARSE_DSV4"}, **PRO)),
    "X032": (on(FP4_INDEXER, **PRO), on(FP4_INDEXER, **PRO, **B200)),
    "X033": (on({"disable_hybrid_kv_cache_manager": True}, **PRO), on({"disable_hybrid_kv_cache_manager": True})),
    "X034": (on({"enable_dbo": True}, **V41), on({"enable_dbo": True}, **V41 | {"variant": "deepseek-v4-flash"})),
    "X035": (on({TP: 2, PP: 4}, **V41), on({TP: 4, PP: 2}, **V41)),
}
"""Code -> a deployment that breaks the rule, and a neighbour that doesn't."""


def codes_of(deployment):
    return [rule.code for rule, _ in violations(deployment) if rule.issue is None]


def test_every_rule_has_a_case():
    assert sorted(CASES) == [rule.code for rule in VLLM_RULES]


def test_a_rule_finds_its_case_and_nothing_else():
    found = {code: (codes_of(broken), codes_of(whole)) for code, (broken, whole) in CASES.items()}
    assert found == {code: ([code], []) for code in CASES}


def test_sm103_has_the_back_ends_of_sm100_and_sm120_others():
    sparse = ("FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120")
    chosen = [on({ATTENTION: name}) for name in ("CUTLASS_MLA", "FLASHMLA", "TRITON_MLA", "FLASH_ATTN_MLA")]
    chosen += [on({"moe_backend": "flashinfer_trtllm"}), *(on({ATTENTION: name}, **V32) for name in sparse)]
    runs = {
        gpu: ["X008" not in codes_of(replace(one, gpu=find_gpu(gpu))) for one in chosen]
        for gpu in ("b200", "gb300", "rtx-pro-6000")
    }
    sm100 = [True, True, True, False, True, True, True, False]
    assert runs == {"b200": sm100, "gb300": sm100, "rtx-pro-6000": [False, False, True, *[False] * 4, True]}


def test_a_violation_is_one_line_with_a_fix_and_a_known_key():
    for version in VLLM_VERSIONS:
        record = load_vllm(version)
        for broken, _ in CASES.values():
            for rule, violation in violations(replace(broken, vllm=record)):
                assert len(violation.message.splitlines()) == len(violation.fix.splitlines()) == 1, rule.code
                key = violation.key
                assert key is None or record.find(key) is not None or key.startswith("triton_config."), rule.code


def test_a_rule_about_the_target_needs_no_settings():
    for code in (rule.code for rule in VLLM_RULES if rule.target_only):
        found = [target_violations(replace(one, settings={})) for one in CASES[code]]
        assert [[rule.code for rule, _ in each] for each in found] == [[code], []]


@pytest.mark.parametrize("fact", ["variant", "architecture", "checkpoint", "gpu", "isl", "concurrency"])
def test_a_rule_ignores_unknown_facts(fact):
    for broken, whole in CASES.values():
        assert codes_of(replace(whole, **{fact: None})) == []
        codes_of(replace(broken, **{fact: None}))


NGRAM = {"speculative_config.method": "ngram", "speculative_config.num_speculative_tokens": 5}
MIN_P = {"default_sampling.min_p": 0.1}


def test_a_rule_sees_what_vllm_makes_of_the_settings():
    found = [
        codes_of(on(NGRAM, **W4A16)),  # n-grams are no MTP
        codes_of(on(NGRAM, triton=MIN_P)),  # but drafted tokens
        codes_of(on({"speculative_config.method": "mtp"}, triton=MIN_P)),
        codes_of(on(NGRAM, triton={"default_sampling.logit_bias.5": 0})),
        codes_of(replace(on(triton=MIN_P), vllm=replace(load_vllm("0.24.0"), sampling_params=()))),
        codes_of(on({LENGTH: -1}, isl=2048, triton={"default_max_tokens": 1})),  # as much as fits
        codes_of(on({"attention_config.backend": "FLASHMLA", "block_size": 32})),
        codes_of(on({DP: 2})),  # two ranks of eight
        codes_of(on({TP: 1, "pipeline_parallel_size": 2, DP: 8})),
        codes_of(on({TP: 1, DP: 16, "data_parallel_size_local": 8})),  # the others on other nodes
    ]
    assert found == [[], *[["X018"]] * 4, [], ["X009"], ["X006"], ["X006"], []]


def test_only_mtp_takes_the_memory_of_the_mtp_layer():
    sizes = {"max_num_seqs": 128, "max_num_batched_tokens": 8192}
    none, ngram, mtp = (on(sizes, more).budget() for more in ({}, NGRAM, MTP))
    assert none.weights == ngram.weights < mtp.weights
    assert none.kv_bytes_per_token == ngram.kv_bytes_per_token < mtp.kv_bytes_per_token


def test_what_works_with_v4_depends_on_gpu_checkpoint_and_version():
    engram, flashinfer = {"enable_elastic_ep": True}, {ATTENTION: "FLASHINFER_MLA_SPARSE_DSV4"}
    bf16, nvfp4, four = {KV: "bfloat16"}, {KV: "nvfp4_ds_mla"}, {"speculative_config.num_speculative_tokens": 4}
    rtx, newest = {"gpu": "rtx-pro-6000"}, {"version": "0.33.0"}
    rows = [
        (on({TP: 16}, **FLASH), ["X004"]),  # eight groups of output
        (on({TP: 16}, **PRO), []),
        (on({TP: 32}, **PRO), ["X004"]),
        (on({TP: 16, "enable_expert_parallel": False}, **PRO), []),  # no FP8 blocks to cut
        (on({"block_size": 64}, **PRO), ["X009"]),
        (on({"block_size": 256}, **PRO), []),
        (on({"block_size": 128}, **V41), []),
        (on({ATTENTION: "FLASH_ATTN_MLA", "block_size": 256}, **PRO), ["X031"]),
        (on({ATTENTION: "FLASHINFER_MLA_SPARSE"}, **PRO, **B200), ["X010"]),
        (on({ATTENTION: "FLASHMLA_SPARSE_DSV4"}, **V32), ["X010"]),
        (on({ATTENTION: "FLASHMLA_SPARSE_DSV4"}, **PRO, **rtx), ["X008", "X025"]),
        (on(**FLASH, **rtx), []),
        (on(flashinfer, **PRO), ["X008"]),
        (on(flashinfer, bf16, **PRO, **B200), []),
        (on(bf16, **PRO, **B200), ["X030"]),
        (on(nvfp4, **V41, **B200), []),
        (on(nvfp4, **V41), ["X030"]),
        (on(MEGA, **FLASH | FP4), ["X029"]),
        (on(MEGA, {"enable_expert_parallel": False}, **PRO, **B200), ["X029"]),
        (on(MEGA, {TP: 1, DP: 5}, **PRO, **B200), ["X029"]),
        (on({"kernel_config.moe_backend": MEGA[MOE]}, **PRO), ["X029"]),
        (on({"attention_config.indexer_kv_dtype": "mxfp4"}, **PRO | newest), ["X032"]),
        (on(MTP, **FLASH), []),
        (on(DSPARK, **FLASH), ["X027"]),
        (on(MTP, **V41), ["X027"]),
        (on(DSPARK, four, **PRO), ["X027"]),
        (on(DSPARK, four, **PRO | newest), []),
        (on(precision="fp4", variant="deepseek-v4-pro"), ["X002"]),
        (on(engram, **V41), []),
        (on(engram, {"engram_config": {"dp_shared_memory": True}}, **V41), ["X034"]),
        (on({"ubatch_size": 2}, **V41), ["X034"]),
    ]
    assert [codes_of(deployment) for deployment, _ in rows] == [codes for _, codes in rows]


JUNK = ["8", -1, 0, 3.5, float("nan"), True, None, [], ["a"], {}, {"a": 1}, 10**30]


@pytest.mark.slow
@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_no_value_makes_a_rule_fail(junk):
    keys = (*load_vllm("0.24.0").arguments, "speculative_config.num_speculative_tokens")
    for key, code in zip(keys, itertools.cycle(("X005", "X009", "X012", "X018")), strict=False):
        base = CASES[code][0]
        deployment = replace(base, settings={**base.settings, key: junk})
        codes_of(deployment)
        deployment.well_typed().budget()


def test_a_default_that_may_be_given_elsewhere_does_not_count():
    assert codes_of(replace(CASES["X022"][0], settings={}, unknown=frozenset({"scheduling_policy"}))) == []
