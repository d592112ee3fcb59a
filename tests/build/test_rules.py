"""Each rule finds its own case and nothing else."""

import re
from dataclasses import replace

import pytest
import yaml

from deepseek_triton_build.catalog import (
    READABLE_RELEASES,
    RELEASES,
    find_gpu,
    find_variant,
    gpus,
    load_release,
    variants,
)
from deepseek_triton_build.check import CHECKS, rules_page
from deepseek_triton_build.rules import RULES, target_violations, violations
from deepseek_triton_build.rules.rule import CANONICAL_RELEASE, Deployment

DRAFTS = "speculative_config.num_nextn_predict_layers"
MTP = {"speculative_config.decoding_type": "MTP", DRAFTS: 1}
RELAXED = "speculative_config.use_relaxed_acceptance_for_thinking"
CHUNKED = {"enable_chunked_prefill": True}
CUTLASS = {"moe_config.backend": "CUTLASS"}
DEEPGEMM = {"moe_config.backend": "DEEPGEMM"}
FP8_KV = {"kv_cache_config.dtype": "fp8"}
FRACTION = "kv_cache_config.free_gpu_memory_fraction"
SLOTS = "moe_config.load_balancer.num_slots"
WIDE = {
    "tensor_parallel_size": 32,
    "moe_expert_parallel_size": 32,
    "enable_attention_dp": True,
    "moe_config.backend": "WIDEEP",
}
BLOCKS_64 = {"kv_cache_config.tokens_per_block": 64, "kv_cache_config.enable_block_reuse": False}
V32 = {"variant": "deepseek-v3.2-exp"}
B200 = {"gpu": "b200"}
NVL72 = {"gpu": "gb200-nvl72", "precision": "fp4"}


def deployed(*settings, variant="deepseek-r1", precision="fp8", gpu="h200", release="1.2.1", **more):
    """Return DeepSeek-R1 on 8 x H200, with any fact replaced."""
    found = find_variant(variant)
    given = {"tensor_parallel_size": 8, "moe_expert_parallel_size": 8}
    for mapping in settings:
        given |= mapping
    return Deployment(
        settings=given,
        variant=found,
        architecture=found.architecture,
        checkpoint=find_variant("deepseek-r1").checkpoints[precision],  # every precision, for every variant
        gpu=find_gpu(gpu),
        release=load_release(release),
        **more,
    )


def sampled(name, value):
    return {"triton": {f"default_sampling.{name}": value}}


CASES = {
    "A001": (
        deployed(CHUNKED, {"max_num_tokens": 8224}),
        deployed(CHUNKED, {"max_num_tokens": 8224}, **B200),  # FlashMLA's blocks of 64 are Hopper's
    ),
    "A002": (deployed({"max_num_tokens": 4096}, isl=4097), deployed({"max_num_tokens": 4096}, isl=4096)),
    "A010": (
        deployed({"max_num_tokens": 4096}, isl=4097, takes_over=True),
        deployed(CHUNKED, {"max_num_tokens": 4096}, isl=4097, takes_over=True),
    ),
    "A003": (
        deployed({"max_num_tokens": 4096, "max_seq_len": 8192}),
        deployed(CHUNKED, {"max_num_tokens": 4096, "max_seq_len": 8192}),
    ),
    "A004": (deployed(CHUNKED, release="1.0.0"), deployed(CHUNKED, release="1.1.0")),
    "A005": (
        deployed(CHUNKED, {"enable_attention_dp": True}, release="1.0.0"),
        deployed(CHUNKED, {"enable_attention_dp": True}, release="1.1.0"),
    ),
    "A006": (
        deployed(CHUNKED, {"enable_attention_dp": True}, release="1.0.0", **B200),
        deployed(CHUNKED, {"enable_attention_dp": True}, release="1.0.0"),
    ),
    "A007": (
        deployed({"enable_attention_dp": True, "max_batch_size": 16}),
        deployed({"enable_attention_dp": True, "max_batch_size": 17}),
    ),
    "A009": (
        deployed({"max_num_tokens": 1151, "max_seq_len": 3328}, assumed_isl=1024),
        deployed(CHUNKED, {"max_num_tokens": 1152, "max_seq_len": 3328}, assumed_isl=1024),
    ),
    "A008": (
        deployed({"attention_dp_config.enable_balance": True}),
        deployed({"attention_dp_config.enable_balance": True, "enable_attention_dp": True}),
    ),
    "D001": (deployed(MTP, {RELAXED: True}, variant="deepseek-v3"), deployed(MTP, {RELAXED: True})),
    "D002": (
        deployed(MTP, {"speculative_config.relaxed_topk": 10}),
        deployed(MTP, {"speculative_config.relaxed_topk": 10, RELAXED: True}),
    ),
    "D003": (
        deployed({"speculative_config.decoding_type": "MTP", "speculative_config.max_draft_len": 3}),
        deployed({"speculative_config.decoding_type": "MTP", "speculative_config.max_draft_len": 1}),
    ),
    "D004": (
        deployed(MTP, {"speculative_config.max_draft_len": 3}),
        deployed(MTP, {"speculative_config.max_draft_len": 1}),
    ),
    "D005": (
        deployed(MTP, {"max_num_tokens": 65536}, release="0.21.0", **B200),
        deployed(MTP, {"max_num_tokens": 65536}, release="1.0.0", **B200),
    ),
    "D006": (
        deployed(MTP, {"cuda_graph_config.max_batch_size": 8}, release="0.21.0", precision="fp4", **B200),
        deployed(MTP, release="0.21.0", precision="fp4", **B200),
    ),
    "D007": (
        deployed(MTP, {"guided_decoding_backend": "xgrammar"}, release="1.1.0"),
        deployed(MTP, {"guided_decoding_backend": "xgrammar"}, release="1.2.0"),
    ),
    "D008": (
        deployed({"guided_decoding_backend": "xgrammar"}, release="0.21.0"),
        deployed({"guided_decoding_backend": "xgrammar", "disable_overlap_scheduler": True}, release="0.21.0"),
    ),
    "D009": (
        deployed(MTP, **sampled("temperature", 0.6)),
        deployed(MTP, {"speculative_config.allow_advanced_sampling": True}, **sampled("temperature", 0.6)),
    ),
    "D010": (deployed(MTP, {"sampler_type": "TRTLLMSampler"}), deployed({"sampler_type": "TRTLLMSampler"})),
    "D011": (
        deployed(MTP, {RELAXED: True, "speculative_config.allow_advanced_sampling": True}),
        deployed(MTP, {"speculative_config.allow_advanced_sampling": True}),
    ),
    "E001": (deployed(isl=8192), deployed(isl=8192, environment={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:8192"})),
    "E002": (
        deployed(environment={"TLLM_OVERRIDE_LAYER_NUM": "4"}),
        deployed(environment={"TLLM_OVERRIDE_LAYER_NUM": "0"}),
    ),
    "E003": (
        deployed(environment={"TRTLLM_DG_ENABLED": "0"}),
        deployed(environment={"TRTLLM_DG_ENABLED": "0"}, precision="w4a8"),
    ),
    "E004": (deployed(release="0.21.0"), deployed({"backend": "pytorch"}, release="0.21.0")),
    "E005": (deployed({"load_format": "dummy"}), deployed({"load_format": "auto"})),
    "E006": (deployed({"skip_tokenizer_init": True}), deployed({"skip_tokenizer_init": False})),
    "E007": (deployed({"custom_tokenizer": "deepseek_v32"}), deployed({"custom_tokenizer": "deepseek_v32"}, **V32)),
    "E008": (deployed({"tokenizer": "deepseek-ai/DeepSeek-V3"}), deployed({"tokenizer": "deepseek-ai/DeepSeek-R1"})),
    "E009": (deployed({"reasoning_parser": "deepseek_r1"}), deployed({"reasoning_parser": "deepseek-r1"})),
    "E010": (deployed({"trust_remote_code": True}), deployed({"trust_remote_code": False})),
    "D012": (deployed(MTP, {DRAFTS: 4}), deployed(MTP, {DRAFTS: 3})),
    "H001": (deployed(gpu="a100"), deployed(gpu="h100")),
    "H002": (deployed(precision="fp4"), deployed(precision="fp4", **B200)),
    "H003": (deployed(precision="w4a8", **B200), deployed(precision="w4a8")),
    "H004": (deployed(precision="w4a8", **V32), deployed(precision="w4a8", variant="deepseek-v3")),
    "H005": (deployed(release="0.21.0", **B200), deployed(release="0.21.0", precision="fp4", **B200)),
    "H006": (deployed(release="1.1.0", **V32), deployed(release="1.2.0", **V32)),
    "H007": (deployed(precision="w4a16"), deployed()),
    "K001": (deployed(FP8_KV, gpu="a100"), deployed(FP8_KV)),
    "K002": (deployed(FP8_KV, precision="w4a8"), deployed(precision="w4a8")),
    "K003": (deployed({"kv_cache_config.dtype": "nvfp4"}), deployed(FP8_KV)),
    "K004": (deployed(gpu="a100"), deployed({"kv_cache_config.enable_block_reuse": False}, gpu="a100")),
    "K005": (deployed({FRACTION: 0.0}), deployed({FRACTION: 1})),
    "K006": (deployed({FRACTION: 0.96}), deployed({FRACTION: 0.95})),
    "K007": (deployed(DEEPGEMM, {FRACTION: 0.85}, **B200), deployed(DEEPGEMM, {FRACTION: 0.8}, **B200)),
    "K008": (
        deployed({"kv_cache_config.tokens_per_block": 32}),
        deployed({"kv_cache_config.tokens_per_block": 32}, **B200),
    ),
    "K009": (
        deployed({FRACTION: 0.8, "kv_cache_config.max_tokens": 4096}),
        deployed({"kv_cache_config.max_tokens": 4096}),
    ),
    "K010": (
        deployed({FRACTION: 0.97, "max_batch_size": 128, "max_num_tokens": 1152}),
        deployed({FRACTION: 0.9, "max_batch_size": 128, "max_num_tokens": 1152}),
    ),
    "K011": (deployed({"dtype": "fp8"}), deployed({"dtype": "bfloat16"})),
    "L001": (
        deployed({"max_batch_size": 256, "cuda_graph_config.max_batch_size": 128}),
        deployed({"max_batch_size": 256, "cuda_graph_config.max_batch_size": 256}),
    ),
    "L002": (
        deployed({"cuda_graph_config.batch_sizes": [1, 4], "cuda_graph_config.max_batch_size": 4}),
        deployed(
            {"cuda_graph_config.batch_sizes": [4, 2, 1], "cuda_graph_config.max_batch_size": 4},
            {"cuda_graph_config.enable_padding": True},
        ),
    ),
    "L003": (deployed({"max_seq_len": 163841}), deployed({"max_seq_len": 163840})),
    "L004": (
        deployed(MTP, {"max_num_tokens": 1024, "max_batch_size": 513}),
        deployed(MTP, {"max_num_tokens": 1024, "max_batch_size": 512}),
    ),
    "L005": (deployed({"stream_interval": 0}), deployed({"stream_interval": 1})),
    "L006": (deployed({"max_seq_len": 2048}, isl=2048), deployed({"max_seq_len": 2048}, isl=2047)),
    "L007": (
        deployed(CHUNKED, {"max_num_tokens": 65536, "max_seq_len": 65536}),
        deployed(CHUNKED, {"max_num_tokens": 8192, "max_seq_len": 65536}),
    ),
    "L008": (
        deployed({"enable_attention_dp": True, "max_batch_size": 1024, "max_num_tokens": 8192}, **B200),
        deployed({"enable_attention_dp": True, "max_batch_size": 1024, "max_num_tokens": 8191}, **B200),
    ),
    "L009": (
        deployed({"max_num_tokens": 5127, FRACTION: 0.7}, release="0.21.0"),
        deployed({"max_num_tokens": 5127, FRACTION: 0.7}, release="1.0.0"),
    ),
    "L010": (deployed(concurrency=512, held_requests=376), deployed(concurrency=376, held_requests=376)),
    "L011": (
        deployed({"max_seq_len": 4096}, triton={"default_max_tokens": 4096}),
        deployed({"max_seq_len": 4096}, triton={"default_max_tokens": 4095}),
    ),
    "M001": (
        deployed({"moe_config.backend": "TRITON"}, release="1.0.0"),
        deployed({"moe_config.backend": "TRITON"}, release="1.1.0"),
    ),
    "M002": (deployed(**B200), deployed(DEEPGEMM, **B200)),
    "M003": (deployed(WIDE, gpu="gb200", precision="fp4"), deployed(WIDE, **NVL72)),
    "M004": (deployed(WIDE, gpu="gb200-nvl72", release="1.1.0"), deployed(WIDE, gpu="gb200-nvl72", release="1.2.0")),
    "M005": (deployed(WIDE, {SLOTS: 280}, **NVL72), deployed(WIDE, {SLOTS: 288}, **NVL72)),
    "M006": (
        deployed(CUTLASS, {SLOTS: 256}, release="1.1.0", precision="fp4", **B200),
        deployed(CUTLASS, {SLOTS: 256}, release="1.2.0", precision="fp4", **B200),
    ),
    "M007": (deployed(WIDE, {"enable_attention_dp": False}, **NVL72), deployed(WIDE, **NVL72)),
    "M008": (
        deployed(WIDE, {SLOTS: 288, "moe_config.load_balancer.layer_updates_per_iter": 1}, **NVL72),
        deployed(WIDE, {SLOTS: 288, "moe_config.load_balancer.layer_updates_per_iter": 0}, **NVL72),
    ),
    "M009": (
        deployed({"moe_config.use_low_precision_moe_combine": True}),
        deployed({"moe_config.use_low_precision_moe_combine": True}, precision="fp4", **B200),
    ),
    "M010": (deployed({"moe_config.max_num_tokens": 0}), deployed({"moe_config.max_num_tokens": 1})),
    "M011": (
        deployed(DEEPGEMM, {"enable_attention_dp": True}, **B200),
        deployed(DEEPGEMM, {"enable_attention_dp": True, "moe_config.max_num_tokens": 3200}, **B200),
    ),
    "P001": (
        deployed({"tensor_parallel_size": 12, "moe_expert_parallel_size": 4}),
        deployed({"tensor_parallel_size": 12, "moe_expert_parallel_size": 4, "enable_attention_dp": True}),
    ),
    "P002": (
        deployed({"tensor_parallel_size": 12, "moe_expert_parallel_size": 12}),
        deployed({"tensor_parallel_size": 12, "moe_expert_parallel_size": 4}),
    ),
    "P003": (deployed({"tensor_parallel_size": 4}), deployed({"tensor_parallel_size": 16})),
    "P004": (deployed({"moe_tensor_parallel_size": 2}), deployed({"moe_tensor_parallel_size": 1})),
    "P005": (
        deployed({"tensor_parallel_size": 32, "moe_expert_parallel_size": 1}, precision="w4a8"),
        deployed({"tensor_parallel_size": 16, "moe_expert_parallel_size": 1}, precision="w4a8"),
    ),
    "P006": (deployed(MTP, {"pipeline_parallel_size": 2}), deployed(MTP)),
    "P007": (
        deployed({"tensor_parallel_size": 16, "gpus_per_node": 6}),
        deployed({"tensor_parallel_size": 16, "gpus_per_node": 8}),
    ),
    "P008": (deployed({"gpus_per_node": 4}), deployed({"gpus_per_node": 8})),
    "P009": (deployed(variant="tiny"), deployed({"enable_attention_dp": True}, variant="tiny")),
    "P010": (
        deployed({"tensor_parallel_size": 32, "moe_expert_parallel_size": 1}),
        deployed({"tensor_parallel_size": 16, "moe_expert_parallel_size": 1}),
    ),
    "P011": (
        deployed(
            {"tensor_parallel_size": 4, "moe_expert_parallel_size": 4, "pipeline_parallel_size": 4}, variant="tiny"
        ),
        deployed(
            {"tensor_parallel_size": 4, "moe_expert_parallel_size": 4, "pipeline_parallel_size": 3}, variant="tiny"
        ),
    ),
    "V001": (deployed(FP8_KV, **V32), deployed(FP8_KV, **V32, **B200)),
    "V002": (deployed(**V32), deployed(BLOCKS_64, **V32)),
    "V003": (deployed(release="1.1.0", **V32), deployed(BLOCKS_64, release="1.1.0", **V32)),
    "V004": (deployed(CHUNKED, release="1.1.0", **V32), deployed(CHUNKED, **V32)),
    "V005": (deployed(**V32), deployed(BLOCKS_64, **V32)),
    "V006": (deployed(CHUNKED, **V32), deployed(**V32)),
    "V007": (deployed({"max_num_tokens": 8193}, **V32), deployed({"max_num_tokens": 8192}, **V32)),
    "V008": (deployed(MTP, {DRAFTS: 3}, release="1.1.0", **V32), deployed(MTP, {DRAFTS: 3}, **V32)),
    "V009": (
        deployed({"sparse_attention_config.algorithm": "dsa"}),
        deployed({"sparse_attention_config.algorithm": "dsa"}, **V32),
    ),
}
"""Code -> a deployment that breaks the rule, and a neighbour that doesn't."""


def test_a_list_of_graphs_gets_one_more_size():
    listed = deployed({"max_batch_size": 256, "cuda_graph_config.batch_sizes": [1, 128]})
    [fix] = [violation.fix for rule, violation in violations(listed) if rule.code == "L001"]

    assert fix.startswith("add 256 to cuda_graph_config.batch_sizes")


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
@pytest.mark.parametrize("of_checkpoint", [None, "FP8"])
@pytest.mark.parametrize("code", ["K002", "V001"])
def test_advice_on_the_kv_cache_is_not_what_is_set_already(code, dtype, of_checkpoint):
    where = {"precision": "w4a8"} if code == "K002" else {"variant": "deepseek-v3.2-exp"}
    base = deployed({"kv_cache_config.dtype": dtype}, **where)
    assert base.checkpoint is not None
    checked = replace(base, checkpoint=replace(base.checkpoint, kv_cache_quant_algo=of_checkpoint))
    fixes = [violation.fix for rule, violation in violations(checked) if rule.code == code]

    assert len(fixes) == (dtype == "fp8" or of_checkpoint == "FP8")
    assert [fix for fix in fixes if (dtype == "auto") == ("dtype: auto" in fix)] == []
    assert [fix for fix in fixes if (of_checkpoint == "FP8") != ("hf_quant_config.json" in fix)] == []


PAIR = {"cache_transceiver_config.backend": "UCX"}


@pytest.mark.parametrize("code", ["A003", "A007"])
def test_a_disaggregated_server_is_not_advised_as_a_whole_one(code):
    broken, _ = CASES[code]
    assert code not in codes_of(replace(broken, settings={**broken.settings, **PAIR}))


MORE_CASES = [
    pytest.param("E004", {"backend": "tensorrt"}, True, id="another back end of 1.x"),
    pytest.param("E004", {"backend": "pytorch"}, False, id="the back end"),
    pytest.param("E007", {"custom_tokenizer": "deepseek"}, True, id="a tokenizer that is no class"),
    pytest.param("E007", {"custom_tokenizer": "package.module.Tokenizer"}, False, id="a tokenizer's class"),
    pytest.param("E007", {"custom_tokenizer": "deepseek_v3.2"}, True, id="a tokenizer with a point in its name"),
    pytest.param("E008", {"tokenizer": "meta-llama/Llama-3.1-8B"}, True, id="a tokenizer of another family"),
    pytest.param("E008", {"tokenizer": "/models/DeepSeek-R1"}, False, id="a tokenizer's folder"),
    pytest.param("E009", {"reasoning_parser": "qwen3"}, True, id="another model's parser"),
    pytest.param("P008", {"tensor_parallel_size": 16, "gpus_per_node": 16}, True, id="more GPUs than a node has"),
]


@pytest.mark.parametrize(("code", "settings", "is_broken"), MORE_CASES)
def test_other_ways_to_break_a_rule(code, settings, is_broken):
    assert (code in codes_of(deployed(settings))) is is_broken


def test_a_rule_that_needs_an_unknown_setting_finds_nothing():
    known, unknown = deployed(WIDE, **NVL72), {"tensor_parallel_size", "moe_expert_parallel_size"}
    settings = {key: value for key, value in known.settings.items() if key not in unknown}

    assert "M002" in codes_of(replace(known, settings=settings))
    assert "M002" not in codes_of(replace(known, settings=settings, unknown=frozenset(unknown)))


def test_a_back_end_that_no_degree_of_expert_parallelism_supports_is_found_without_it():
    unknown = frozenset({"moe_expert_parallel_size"})
    wrong = replace(deployed(gpu="b200"), settings={"moe_config.backend": "CUTLASS"}, unknown=unknown)

    assert "M002" in codes_of(wrong)


def codes_of(deployment):
    return [rule.code for rule, _ in violations(deployment)]


def test_every_rule_has_a_case():
    assert sorted(CASES) == [rule.code for rule in RULES]


@pytest.mark.parametrize("code", CASES)
def test_a_rule_finds_its_case_and_not_the_neighbour(code):
    broken, whole = CASES[code]
    assert code in codes_of(broken)
    assert code not in codes_of(whole)


def test_codes_and_titles_are_unique_and_in_order():
    assert [rule.code for rule in RULES] == sorted({rule.code for rule in RULES})
    assert len({rule.title for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_rule_says_why_and_who_says_so(rule):
    assert rule.title
    assert rule.source
    assert rule.releases
    assert not rule.title.endswith(".")
    assert rule.why.endswith(".")


@pytest.mark.parametrize("code", CASES)
def test_a_violation_is_one_line_with_a_fix_and_a_known_key(code):
    known = {*load_release(CANONICAL_RELEASE).keys()}
    for rule, violation in violations(CASES[code][0]):
        for text in (violation.message, violation.fix):
            assert len(text.splitlines()) == 1, rule.code
        key = violation.key
        assert key is None or key in known or key.startswith("triton_config."), rule.code


@pytest.mark.parametrize("code", [rule.code for rule in RULES if rule.target_only])
def test_a_rule_about_the_target_needs_no_settings(code):
    broken, whole = CASES[code]
    assert code in [rule.code for rule, _ in target_violations(replace(broken, settings={}))]
    assert code not in [rule.code for rule, _ in target_violations(replace(whole, settings={}))]


@pytest.mark.parametrize("fact", ["release", "variant", "architecture", "checkpoint", "gpu", "isl"])
def test_a_rule_ignores_unknown_facts(fact):
    for broken, whole in CASES.values():
        assert set(codes_of(replace(whole, **{fact: None}))) <= {*codes_of(whole), "A003", "A006", "V005", "V006"}
        codes_of(replace(broken, **{fact: None}))


def test_settings_alone_break_only_rules_about_settings():
    assert codes_of(Deployment(settings={})) == []


JUNK = ["8", -1, 0, 1, 3.5, float("nan"), True, None, [], [None], ["a"], {}, {"a": 1}, 10**30]


@pytest.mark.slow
@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_no_value_makes_a_rule_fail(junk):
    bases = [CASES[code][0] for code in ("M008", "A001", "D009", "V008", "L002", "K007")]
    keys = load_release(CANONICAL_RELEASE).keys()
    for key in keys:
        for base in bases:
            codes_of(replace(base, settings={**base.settings, key: junk}))


def test_a_value_of_a_wrong_type_counts_as_not_given():
    assert "L003" not in codes_of(deployed({"max_seq_len": "200000"}))
    assert "L005" not in codes_of(deployed({"stream_interval": False}))


def test_rules_ignore_unknown_keys():
    assert codes_of(deployed({"no_such_key": 1, "kv_cache_config.nor_this": "x"})) == codes_of(deployed())


@pytest.mark.parametrize("version", READABLE_RELEASES)
def test_every_feature_that_a_rule_asks_for_is_recorded(version):
    asked = {"deepseek_v32", "fp8_blackwell", "v32_block_reuse", "v32_chunked_prefill", "v32_mtp_above_1"}
    asked |= {
        f"{feature}_{gpu}" for feature in ("chunked_prefill_mla", "fp8_kv_mla") for gpu in ("hopper", "blackwell")
    }
    assert asked | {"guided_decoding_with_overlap_scheduler"} <= load_release(version).features.keys()


@pytest.mark.parametrize(
    ("settings", "release", "name", "value", "refused"),
    [
        pytest.param({}, "1.2.1", "temperature", 0.6, False, id="the torch sampler of 1.2 samples"),
        pytest.param({}, "1.0.0", "temperature", 0.6, True, id="that of 1.0 is greedy"),
        pytest.param(
            {"sampler_type": "TRTLLMSampler"}, "1.0.0", "temperature", 0.6, False, id="the C++ sampler of 1.0"
        ),
        pytest.param(MTP, "1.2.1", "top_p", 0.95, True, id="MTP is greedy"),
        pytest.param(MTP, "1.2.1", "max_tokens", 100, False, id="the backend counts"),
        pytest.param(MTP, "1.2.1", "repetition_penalty", 1, False, id="the neutral value asks for nothing"),
        pytest.param({}, "1.2.1", "repetition_penalty", 1.1, True, id="penalties are ignored"),
        pytest.param({}, "1.2.1", "guided_json_object", True, True, id="guided decoding needs its backend"),
        pytest.param(
            {"guided_decoding_backend": "xgrammar"}, "1.2.1", "guided_json_object", True, False, id="and then works"
        ),
        pytest.param(MTP, "1.2.1", "best_of", 2, True, id="best_of chooses by logprobs"),
        pytest.param({}, "1.2.1", "nonsense", 2, False, id="a field that nobody knows is for the schema"),
    ],
)
def test_a_sampling_default_has_to_be_honoured_by_the_sampler(settings, release, name, value, refused):
    assert ("D009" in codes_of(deployed(settings, release=release, **sampled(name, value)))) is refused


@pytest.mark.parametrize("release", RELEASES)
def test_what_the_hardware_table_has_breaks_nothing_whatever_the_settings(release):
    """Every published number of GPUs belongs to a model, a precision and a GPU that go together."""
    for variant in variants().values():
        for precision in variant.checkpoints:
            for gpu in gpus().values():
                if precision not in gpu.published_min_gpus:
                    continue
                target = Deployment(
                    settings={},
                    variant=variant,
                    architecture=variant.architecture,
                    checkpoint=variant.checkpoints[precision],
                    gpu=gpu,
                    release=load_release(release),
                )
                broken = {rule.code for rule, _ in target_violations(target)}
                assert broken <= ({"H005", "H006"} if release < "1.2.0" else set()), (variant.name, precision, gpu.name)


def test_the_page_lists_every_rule_and_every_check_once():
    page = rules_page()
    for entry in (*RULES, *CHECKS):
        assert page.count(f'<a id="{entry.code.lower()}"></a>') == 1, entry.code
        assert entry.why in page, entry.code


def test_rules_and_checks_share_no_code():
    assert not {rule.code for rule in RULES} & {check.code for check in CHECKS}


TO_SET = re.compile(
    r"^(?:set|raise) (?P<key>[\w.]+)(?:: | to )(?P<value>[\w.-]+)|^use (?:.*for example )?(?P<number>[\d.]+)"
)
TO_REMOVE = re.compile(r"^remove (?P<key>[\w.]+)")


def mended(deployment, key, fix):
    """Return `deployment` after the advice, where it says which value to set or to remove; None where it does not."""
    settings = dict(deployment.settings)
    if found := TO_SET.match(fix):
        named = found["key"]
        settings[named if named and named != "it" else str(key)] = yaml.safe_load(found["value"] or found["number"])
    elif found := TO_REMOVE.match(fix):
        gone = str(key) if found["key"] == "it" else found["key"]
        if not any(name == gone or name.startswith(f"{gone}.") for name in settings):
            return None  # a variable, or a setting of the backend
        settings = {name: value for name, value in settings.items() if name != gone and not name.startswith(f"{gone}.")}
    else:
        return None
    return None if str(key).startswith("triton_config.") else replace(deployment, settings=settings)


@pytest.mark.parametrize("code", CASES)
def test_advice_that_can_be_followed_mends_what_it_is_about_and_breaks_no_other_rule(code):
    broken, _ = CASES[code]
    errors = {rule.code for rule, _ in violations(broken) if rule.severity == "error"}
    for rule, violation in violations(broken):
        after = mended(broken, violation.key, violation.fix) if rule.code == code else None
        if after is not None:
            found = {rule.code: rule.severity for rule, _ in violations(after)}
            assert code not in found, violation.fix
            assert {name for name, severity in found.items() if severity == "error"} <= errors, violation.fix
