"""Each rule of vLLM finds its own case and nothing else."""

from dataclasses import replace

import pytest

from deepseek_triton_build.catalog import VLLM_VERSIONS, find_gpu, find_variant, load_vllm
from deepseek_triton_build.check import CHECKS, rules_page
from deepseek_triton_build.rules import RULES, VLLM_RULES, vllm_violations
from deepseek_triton_build.rules.vllm_deployment import VllmDeployment

B200 = {"gpu": "b200"}
FP4 = {"gpu": "b200", "precision": "fp4"}
W4A16 = {"precision": "w4a16"}
V32 = {"variant": "deepseek-v3.2-exp"}
MTP = {"speculative_config.method": "mtp", "speculative_config.num_speculative_tokens": 1}


def deployed(*settings, variant="deepseek-r1", precision="fp8", gpu="h200", version="0.24.0", **more):
    """Return DeepSeek-R1 on 8 x H200, with any fact replaced."""
    found = find_variant(variant)
    given = {"tensor_parallel_size": 8, "enable_expert_parallel": True, "scheduling_policy": "priority"}
    if variant == "tiny":
        given["tensor_parallel_size"] = 4
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
    "X001": (deployed(gpu="a100"), deployed()),
    "X002": (deployed(precision="fp4"), deployed(precision="fp4", **B200)),
    "X003": (deployed(precision="w4a8"), deployed(**W4A16)),
    "X004": (deployed({"tensor_parallel_size": 256}, **FP4), deployed({"tensor_parallel_size": 128}, **FP4)),
    "X005": (deployed({"tensor_parallel_size": 32}, **W4A16), deployed({"tensor_parallel_size": 32}, **FP4)),
    "X006": (
        deployed({"tensor_parallel_size": 1, "data_parallel_size": 16}),
        deployed({"tensor_parallel_size": 1, "data_parallel_size": 8}),
    ),
    "X007": (
        deployed({"attention_backend": "FLASH_ATTN_MLA", "kv_cache_dtype": "fp8"}),
        deployed({"attention_backend": "FLASHMLA", "kv_cache_dtype": "fp8"}),
    ),
    "X008": (deployed({"attention_backend": "cutlass_mla"}), deployed({"attention_backend": "cutlass_mla"}, **B200)),
    "X009": (
        deployed({"attention_backend": "FLASHMLA", "block_size": 32}),
        deployed({"attention_backend": "FLASH_ATTN_MLA", "block_size": 32}),
    ),
    "X010": (
        deployed({"attention_backend": "FLASHMLA"}, **V32),
        deployed({"attention_backend": "FLASHMLA_SPARSE"}, **V32),
    ),
    "X011": (deployed({"decode_context_parallel_size": 3}), deployed({"decode_context_parallel_size": 4})),
    "X012": (
        deployed({"enable_chunked_prefill": False, "max_num_batched_tokens": 8192, "max_model_len": 8193}),
        deployed({"enable_chunked_prefill": False, "max_num_batched_tokens": 8192, "max_model_len": 8192}),
    ),
    "X013": (
        deployed({"max_num_batched_tokens": 511, "max_num_seqs": 512}),
        deployed({"max_num_batched_tokens": 512, "max_num_seqs": 512}),
    ),
    "X014": (deployed({"max_model_len": 163841}), deployed({"max_model_len": 163840})),
    "X015": (deployed({"max_model_len": 2048}, isl=2048), deployed({"max_model_len": 2048}, isl=2047)),
    "X016": (deployed(MTP, **W4A16), deployed(MTP)),
    "X017": (deployed(MTP, {"speculative_config.num_speculative_tokens": 2}), deployed(MTP)),
    "X018": (deployed(MTP, triton={"default_sampling.min_p": 0.1}), deployed(triton={"default_sampling.min_p": 0.1})),
    "X019": (deployed(concurrency=512, held_requests=376), deployed(concurrency=376, held_requests=376)),
    "X020": (
        deployed({"max_model_len": 4096}, triton={"default_max_tokens": 4096}),
        deployed({"max_model_len": 4096}, triton={"default_max_tokens": 4095}),
    ),
    "X021": (deployed({"gpu_memory_utilization": 0.95}), deployed({"gpu_memory_utilization": 0.94})),
    "X022": (deployed({"scheduling_policy": "fcfs"}, triton={"engine": "vllm"}), deployed(triton={"engine": "vllm"})),
    "X023": (
        deployed(triton={"default_sampling.temperature": 2.1}),
        deployed(triton={"default_sampling.temperature": 2}),
    ),
    "X024": (deployed({"trust_remote_code": True}), deployed({"trust_remote_code": False})),
}
"""Code -> a deployment that breaks the rule, and a neighbour that doesn't."""


def codes_of(deployment):
    return [rule.code for rule, _ in vllm_violations(deployment)]


def test_every_rule_has_a_case():
    assert sorted(CASES) == [rule.code for rule in VLLM_RULES]


@pytest.mark.parametrize("code", CASES)
def test_a_rule_finds_its_case_and_nothing_else(code):
    broken, whole = CASES[code]
    assert codes_of(broken) == [code]
    assert codes_of(whole) == []


@pytest.mark.parametrize("code", CASES)
@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_a_violation_is_one_line_with_a_fix_and_a_known_key(code, version):
    record = load_vllm(version)
    for rule, violation in vllm_violations(replace(CASES[code][0], vllm=record)):
        assert len(violation.message.splitlines()) == len(violation.fix.splitlines()) == 1, rule.code
        key = violation.key
        assert key is None or record.find(key) is not None or key.startswith("triton_config."), rule.code


@pytest.mark.parametrize("rule", VLLM_RULES, ids=lambda rule: rule.code)
def test_a_rule_says_why_and_who_says_so(rule):
    assert rule.source
    assert not rule.title.endswith(".")
    assert rule.why.endswith(".")
    assert rules_page().count(f'<a id="{rule.code.lower()}"></a>') == 1
    assert rule.why in rules_page()


def test_no_code_and_no_title_is_used_twice_beside_another():
    codes = [entry.code for entry in (*RULES, *VLLM_RULES, *CHECKS)]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("code", [rule.code for rule in VLLM_RULES if rule.target_only])
def test_a_rule_about_the_target_needs_no_settings(code):
    broken, whole = CASES[code]
    found = [rule.code for rule, _ in vllm_violations(replace(broken, settings={}), target_only=True)]
    assert found == [code]
    assert list(vllm_violations(replace(whole, settings={}), target_only=True)) == []


@pytest.mark.parametrize("fact", ["variant", "architecture", "checkpoint", "gpu", "isl", "concurrency"])
def test_a_rule_ignores_unknown_facts(fact):
    for broken, whole in CASES.values():
        assert codes_of(replace(whole, **{fact: None})) == []
        codes_of(replace(broken, **{fact: None}))


NGRAM = {"speculative_config.method": "ngram", "speculative_config.num_speculative_tokens": 5}
MIN_P = {"default_sampling.min_p": 0.1}


@pytest.mark.parametrize(
    ("deployment", "codes"),
    [
        pytest.param(deployed(NGRAM, **W4A16), [], id="n-grams are no MTP"),
        pytest.param(deployed(NGRAM, triton=MIN_P), ["X018"], id="but drafted tokens"),
        pytest.param(deployed({"speculative_config.method": "mtp"}, triton=MIN_P), ["X018"], id="MTP drafts one"),
        pytest.param(
            deployed(NGRAM, triton={"default_sampling.logit_bias.5": 0}), ["X018"], id="a bias of nothing too"
        ),
        pytest.param(deployed({"max_model_len": -1}, isl=2048, triton={"default_max_tokens": 1}), [], id="by memory"),
        pytest.param(deployed({"attention_config.backend": "FLASHMLA", "block_size": 32}), ["X009"], id="in section"),
        pytest.param(deployed({"data_parallel_size": 2}), ["X006"], id="two ranks of eight"),
        pytest.param(
            deployed({"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "data_parallel_size": 8}),
            ["X006"],
            id="ranks of two stages",
        ),
        pytest.param(
            deployed({"tensor_parallel_size": 1, "data_parallel_size": 16, "data_parallel_size_local": 8}),
            [],
            id="the others on other nodes",
        ),
    ],
)
def test_a_rule_sees_what_vllm_makes_of_the_settings(deployment, codes):
    assert codes_of(deployment) == codes


def test_only_mtp_takes_the_memory_of_the_mtp_layer():
    sizes = {"max_num_seqs": 128, "max_num_batched_tokens": 8192}
    none, ngram, mtp = (deployed(sizes, more).budget() for more in ({}, NGRAM, MTP))
    assert none is not None
    assert ngram is not None
    assert mtp is not None
    assert none.weights == ngram.weights < mtp.weights
    assert none.kv_bytes_per_token == ngram.kv_bytes_per_token < mtp.kv_bytes_per_token


JUNK = ["8", -1, 0, 3.5, float("nan"), True, None, [], ["a"], {}, {"a": 1}, 10**30]


@pytest.mark.slow
@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_no_value_makes_a_rule_fail(junk):
    for key in (*load_vllm("0.24.0").arguments, "speculative_config.num_speculative_tokens"):
        for code in ("X005", "X009", "X012", "X018"):
            base = CASES[code][0]
            deployment = replace(base, settings={**base.settings, key: junk})
            codes_of(deployment)
            deployment.well_typed().budget()


def test_a_default_that_may_be_given_elsewhere_does_not_count():
    assert codes_of(replace(CASES["X022"][0], settings={}, unknown=frozenset({"scheduling_policy"}))) == []
