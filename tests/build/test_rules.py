"""Each rule finds its own case and nothing else."""

import re
from dataclasses import replace

import pytest
import yaml

from deepseek_triton_build import UnknownNameError, catalog, data
from deepseek_triton_build.check import CHECKS, find_code, rules_page
from deepseek_triton_build.data.own_files import entry_of, load_yaml
from deepseek_triton_build.rules import PAIR_RULES, RULES, VLLM_RULES, target_violations, violations
from deepseek_triton_build.rules.rule import CANONICAL_RELEASE, Deployment

TP, EP, PP, NODE = "tensor_parallel_size", "moe_expert_parallel_size", "pipeline_parallel_size", "gpus_per_node"
DP, BALANCE = "enable_attention_dp", "attention_dp_config.enable_balance"
BATCH, TOKENS, LENGTH = "max_batch_size", "max_num_tokens", "max_seq_len"
MOE, MOE_TOKENS, COMBINE = "moe_config.backend", "moe_config.max_num_tokens", "moe_config.use_low_precision_moe_combine"
SLOTS, UPDATES = (f"moe_config.load_balancer.{key}" for key in ("num_slots", "layer_updates_per_iter"))
KV, BLOCK, KV_TOKENS = (f"kv_cache_config.{key}" for key in ("dtype", "tokens_per_block", "max_tokens"))
REUSE, FRACTION = (f"kv_cache_config.{key}" for key in ("enable_block_reuse", "free_gpu_memory_fraction"))
GRAPH, GRAPHS, PADDING = (f"cuda_graph_config.{key}" for key in ("max_batch_size", "batch_sizes", "enable_padding"))
KIND, DRAFTS, DRAFT_LEN = (
    f"speculative_config.{key}" for key in ("decoding_type", "num_nextn_predict_layers", "max_draft_len")
)
RELAXED, TOPK, SAMPLING = (
    f"speculative_config.{key}"
    for key in ("use_relaxed_acceptance_for_thinking", "relaxed_topk", "allow_advanced_sampling")
)
PENALTY = "speculative_config.enable_penalty"
SPARSE = "sparse_attention_config.algorithm"
DRAFTING, MTP, SHORT = {KIND: "MTP"}, {KIND: "MTP", DRAFTS: 1}, {LENGTH: 3328}
CHUNKED, XGRAMMAR = {"enable_chunked_prefill": True}, {"guided_decoding_backend": "xgrammar"}
CUTLASS, DEEPGEMM, FP8_KV = {MOE: "CUTLASS"}, {MOE: "DEEPGEMM"}, {KV: "fp8"}
H100 = {TP: 16, EP: 16, BATCH: 128, TOKENS: 1152}
WIDE = {TP: 32, EP: 32, DP: True, MOE: "WIDEEP"}
BLOCKS_64 = {BLOCK: 64, REUSE: False}
V4 = {"variant": "deepseek-v4-pro", "release": "1.3.0rc29"}
V32, B200 = {"variant": "deepseek-v3.2-exp"}, {"gpu": "b200"}
FP4, NVL72 = B200 | {"precision": "fp4"}, {"gpu": "gb200-nvl72", "precision": "fp4"}


def on(*settings, variant="deepseek-r1", precision="fp8", gpu="h200", release="1.2.1", **more):
    """Return DeepSeek-R1 on 8 x H200, with any fact replaced."""
    found = catalog.find_variant(variant)
    given = {TP: 8, EP: 8}
    for mapping in settings:
        given |= mapping
    return Deployment(
        settings=given,
        variant=found,
        architecture=found.architecture,
        checkpoint=catalog.find_variant("deepseek-r1").checkpoints[precision],  # every precision, for every variant
        gpu=catalog.find_gpu(gpu),
        release=catalog.load_release(release),
        **more,
    )


def sampled(name, value):
    return {"triton": {f"default_sampling.{name}": value}}


def answers(tokens):
    return {"triton": {"default_max_tokens": tokens}}


CASES = {
    "A001": (on(CHUNKED, {TOKENS: 8224}), on(CHUNKED, {TOKENS: 8224}, **B200)),  # FlashMLA's blocks of 64 are Hopper's
    "A002": (on({TOKENS: 4096}, isl=4097), on({TOKENS: 4096}, isl=4096)),
    "A010": (on({TOKENS: 4096}, isl=4097, takes_over=True), on(CHUNKED, {TOKENS: 4096}, isl=4097, takes_over=True)),
    "A003": (on({TOKENS: 4096, LENGTH: 8192}), on(CHUNKED, {TOKENS: 4096, LENGTH: 8192})),
    "A004": (on(CHUNKED, release="1.0.0"), on(CHUNKED, release="1.1.0")),
    "A005": (on(CHUNKED, {DP: True}, release="1.0.0"), on(CHUNKED, {DP: True}, release="1.1.0")),
    "A006": (on(CHUNKED, {DP: True}, release="1.0.0", **B200), on(CHUNKED, {DP: True}, release="1.0.0")),
    "A007": (on({DP: True, BATCH: 16}), on({DP: True, BATCH: 17})),
    "A009": (on(SHORT, {TOKENS: 1151}, assumed_isl=1024), on(SHORT, CHUNKED, {TOKENS: 1152}, assumed_isl=1024)),
    "A008": (on({BALANCE: True}), on({BALANCE: True, DP: True})),
    "D001": (on(MTP, {RELAXED: True}, variant="deepseek-v3"), on(MTP, {RELAXED: True})),
    "D002": (on(MTP, {TOPK: 10}), on(MTP, {TOPK: 10, RELAXED: True})),
    "D003": (on(DRAFTING | {DRAFT_LEN: 3}), on(DRAFTING | {DRAFT_LEN: 1})),
    "D004": (on(MTP, {DRAFT_LEN: 3}), on(MTP, {DRAFT_LEN: 1})),
    "D007": (on(MTP, XGRAMMAR, release="1.1.0"), on(MTP, XGRAMMAR, release="1.2.0")),
    "D008": (on(XGRAMMAR, release="0.21.0"), on(XGRAMMAR, {"disable_overlap_scheduler": True}, release="0.21.0")),
    "D009": (on(MTP, **sampled("temperature", 0.6)), on(MTP, {SAMPLING: True}, **sampled("temperature", 0.6))),
    "D010": (on(MTP, {"sampler_type": "TRTLLMSampler"}), on({"sampler_type": "TRTLLMSampler"})),
    "D011": (on(MTP, {RELAXED: True, SAMPLING: True}), on(MTP, {SAMPLING: True})),
    "D013": (on(MTP, {DRAFT_LEN: 3}, release="1.3.0rc29"), on(MTP, release="1.3.0rc29")),
    "D014": (on(MTP, release="1.3.0rc29"), on(MTP, {PENALTY: True}, release="1.3.0rc29")),
    "E001": (on(isl=8192), on(isl=8192, environment={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:8192"})),
    "E002": (on(environment={"TLLM_OVERRIDE_LAYER_NUM": "4"}), on(environment={"TLLM_OVERRIDE_LAYER_NUM": "0"})),
    "E003": (on(environment={"TRTLLM_DG_ENABLED": "0"}), on(environment={"TRTLLM_DG_ENABLED": "0"}, precision="w4a8")),
    "E004": (on(release="0.21.0"), on({"backend": "pytorch"}, release="0.21.0")),
    "E005": (on({"load_format": "dummy"}), on({"load_format": "auto"})),
    "E006": (on({"skip_tokenizer_init": True}), on({"skip_tokenizer_init": False})),
    "E007": (on({"custom_tokenizer": "deepseek_v32"}), on({"custom_tokenizer": "deepseek_v32"}, **V32)),
    "E008": (on({"tokenizer": "deepseek-ai/DeepSeek-V3"}), on({"tokenizer": "deepseek-ai/DeepSeek-R1"})),
    "E009": (on({"reasoning_parser": "deepseek_r1"}), on({"reasoning_parser": "deepseek-r1"})),
    "E010": (on({"trust_remote_code": True}), on({"trust_remote_code": False})),
    "D012": (on(MTP, {DRAFTS: 4}), on(MTP, {DRAFTS: 3})),
    "H001": (on(gpu="a100"), on(gpu="h100")),
    "H002": (on(precision="fp4"), on(**FP4)),
    "H003": (on(precision="w4a8", **B200), on(precision="w4a8")),
    "H004": (on(precision="w4a8", **V32), on(precision="w4a8", variant="deepseek-v3")),
    "H005": (on(release="0.21.0", **B200), on(release="0.21.0", **FP4)),
    "H006": (on(release="1.1.0", **V32), on(release="1.2.0", **V32)),
    "H007": (on(precision="w4a16"), on()),
    "H009": (on(**V4), on(**V4 | {"variant": "deepseek-v4-flash"})),
    "H008": (on(gpu="rtx-pro-6000", precision="fp4"), on(gpu="b300", precision="fp4")),
    "K001": (on(FP8_KV, gpu="a100"), on(FP8_KV)),
    "K002": (on(FP8_KV, precision="w4a8"), on(precision="w4a8")),
    "K003": (on({KV: "nvfp4"}), on(FP8_KV)),
    "K004": (on(gpu="a100"), on({REUSE: False}, gpu="a100")),
    "K005": (on({FRACTION: 0.0}), on({FRACTION: 1})),
    "K006": (on({FRACTION: 0.96}), on({FRACTION: 0.95})),
    "K007": (on(DEEPGEMM, {FRACTION: 0.85}, **B200), on(DEEPGEMM, {FRACTION: 0.8}, **B200)),
    "K008": (on({BLOCK: 32}), on({BLOCK: 32}, **B200)),
    "K009": (on({FRACTION: 0.8, KV_TOKENS: 4096}), on({KV_TOKENS: 4096})),
    "K010": (on(H100, {FRACTION: 0.95}, gpu="h100"), on(H100, {FRACTION: 0.97}, gpu="h100")),  # K006 has the same cause
    "K012": (on(DEEPGEMM, {BLOCK: 64}, **V4 | B200), on(DEEPGEMM, {BLOCK: 256}, **V4 | B200)),
    "K011": (on({"dtype": "fp8"}), on({"dtype": "bfloat16"})),
    "L001": (on({BATCH: 256, GRAPH: 128}), on({BATCH: 256, GRAPH: 256})),
    "L002": (on({GRAPHS: [1, 4], GRAPH: 4}), on({GRAPHS: [4, 2, 1], GRAPH: 4}, {PADDING: True})),
    "L003": (on({LENGTH: 163841}), on({LENGTH: 163840})),
    "L004": (on(MTP, {TOKENS: 1024, BATCH: 513}), on(MTP, {TOKENS: 1024, BATCH: 512})),
    "L005": (on({"stream_interval": 0}), on({"stream_interval": 1})),
    "L006": (on({LENGTH: 2048}, isl=2048), on({LENGTH: 2048}, isl=2047)),
    "L007": (on(CHUNKED, {TOKENS: 65536, LENGTH: 65536}), on(CHUNKED, {TOKENS: 8192, LENGTH: 65536})),
    "L008": (
        on({DP: True, BATCH: 1024, TOKENS: 8192}, **B200, isl=4096),
        on({DP: True, BATCH: 1024, TOKENS: 8191}, **B200),
    ),
    "L010": (on(concurrency=512, held_requests=376), on(concurrency=376, held_requests=376)),
    "L011": (on({LENGTH: 4096}, **answers(4096)), on({LENGTH: 4096}, **answers(4095))),
    "M001": (on({MOE: "TRITON"}, release="1.0.0"), on({MOE: "TRITON"}, release="1.1.0")),
    "M002": (on(**B200), on(DEEPGEMM, **B200)),
    "M003": (on(WIDE, gpu="gb200", precision="fp4"), on(WIDE, **NVL72)),
    "M012": (on({MOE: "TRTLLM"}, **B200), on({MOE: "TRTLLM"}, **FP4)),
    "M004": (on(WIDE, gpu="gb200-nvl72", release="1.1.0"), on(WIDE, gpu="gb200-nvl72", release="1.2.0")),
    "M005": (on(WIDE, {SLOTS: 280}, **NVL72), on(WIDE, {SLOTS: 288}, **NVL72)),
    "M006": (on(CUTLASS, {SLOTS: 256}, release="1.1.0", **FP4), on(CUTLASS, {SLOTS: 256}, release="1.2.0", **FP4)),
    "M007": (on(WIDE, {DP: False}, **NVL72), on(WIDE, **NVL72)),
    "M008": (on(WIDE, {SLOTS: 288, UPDATES: 1}, **NVL72), on(WIDE, {SLOTS: 288, UPDATES: 0}, **NVL72)),
    "M009": (on({COMBINE: True}), on({COMBINE: True}, **FP4)),
    "M010": (on({MOE_TOKENS: 0}), on({MOE_TOKENS: 1})),
    "M011": (on(DEEPGEMM, {DP: True}, **B200), on(DEEPGEMM, {DP: True, MOE_TOKENS: 3200}, **B200)),
    "P001": (on({TP: 12, EP: 4}), on({TP: 12, EP: 4, DP: True})),
    "P002": (on({TP: 12, EP: 12}), on({TP: 12, EP: 4})),
    "P003": (on({TP: 4}), on({TP: 16})),
    "P004": (on({"moe_tensor_parallel_size": 2}), on({"moe_tensor_parallel_size": 1})),
    "P005": (on({TP: 32, EP: 1}, precision="w4a8"), on({TP: 16, EP: 1}, precision="w4a8")),
    "P006": (on(MTP, {PP: 2}), on(MTP)),
    "P007": (on({TP: 16, NODE: 6}), on({TP: 16, NODE: 8})),
    "P008": (on({NODE: 4}), on({NODE: 8})),
    "P009": (on(variant="tiny"), on({DP: True}, variant="tiny")),
    "P010": (on({TP: 32, EP: 1}), on({TP: 16, EP: 1})),
    "P011": (on({TP: 4, EP: 4, PP: 4}, variant="tiny"), on({TP: 4, EP: 4, PP: 3}, variant="tiny")),
    "V001": (on(FP8_KV, **V32), on(FP8_KV, **V32, **B200)),
    "V002": (on(**V32), on(BLOCKS_64, **V32)),
    "V003": (on(release="1.1.0", **V32), on(BLOCKS_64, release="1.1.0", **V32)),
    "V004": (on(CHUNKED, release="1.1.0", **V32), on(CHUNKED, **V32)),
    "V005": (on(**V32), on(BLOCKS_64, **V32)),
    "V006": (on(CHUNKED, **V32), on(**V32)),
    "V007": (on({TOKENS: 8193}, **V32), on({TOKENS: 8192}, **V32)),
    "V008": (on(MTP, {DRAFTS: 3}, release="1.1.0", **V32), on(MTP, {DRAFTS: 3}, **V32)),
    "V009": (on({SPARSE: "dsa"}), on({SPARSE: "dsa"}, **V32)),
}
"""Code -> a deployment that breaks the rule, and a neighbour that doesn't."""


def codes_of(deployment):
    return [rule.code for rule, _ in violations(deployment)]


def test_every_rule_has_a_case():
    assert sorted(CASES) == [rule.code for rule in RULES]


def test_a_rule_finds_its_case_and_not_the_neighbour():
    found = {code: (code in codes_of(broken), code in codes_of(whole)) for code, (broken, whole) in CASES.items()}
    assert found == dict.fromkeys(CASES, (True, False))


def test_a_list_of_graphs_gets_one_more_size():
    listed = on({BATCH: 256, GRAPHS: [1, 128]})
    [fix] = [violation.fix for rule, violation in violations(listed) if rule.code == "L001"]

    assert fix.startswith(f"add 256 to {GRAPHS}")


def test_advice_on_the_kv_cache_is_not_what_is_set_already():
    for code, where in (("K002", {"precision": "w4a8"}), ("V001", V32)):
        for of_checkpoint in (None, "FP8"):
            for dtype in ("auto", "fp8"):
                base = on({KV: dtype}, **where)
                checked = replace(base, checkpoint=replace(base.checkpoint, kv_cache_quant_algo=of_checkpoint))
                fixes = [violation.fix for rule, violation in violations(checked) if rule.code == code]
                assert len(fixes) == (dtype == "fp8" or of_checkpoint == "FP8")
                assert [fix for fix in fixes if (dtype == "auto") == ("dtype: auto" in fix)] == []
                assert [fix for fix in fixes if (of_checkpoint == "FP8") != ("hf_quant_config.json" in fix)] == []


def test_a_disaggregated_server_is_not_advised_as_a_whole_one():
    for code in ("A003", "A007"):
        broken, _ = CASES[code]
        pair = {**broken.settings, "cache_transceiver_config.backend": "UCX"}
        assert code not in codes_of(replace(broken, settings=pair))


OTHER_CASES = [  # a rule, settings, and whether they break it
    ("E004", {"backend": "tensorrt"}, True),
    ("E004", {"backend": "pytorch"}, False),
    ("E007", {"custom_tokenizer": "deepseek_v4"}, True),
    ("E007", {"custom_tokenizer": "deepseek"}, True),
    ("E007", {"custom_tokenizer": "package.module.Tokenizer"}, False),
    ("E007", {"custom_tokenizer": "deepseek_v3.2"}, True),
    ("E008", {"tokenizer": "meta-llama/Llama-3.1-8B"}, True),
    ("E008", {"tokenizer": "/models/DeepSeek-R1"}, False),
    ("E009", {"reasoning_parser": "qwen3"}, True),
    ("P008", {TP: 16, NODE: 16}, True),
    ("L003", {LENGTH: "200000"}, False),  # a value of a wrong type counts as not given
    ("L005", {"stream_interval": False}, False),
]
SAMPLED = [  # settings, the release, a sampling default, and whether the sampler ignores it
    ({}, "1.2.1", "temperature", 0.6, False),
    ({}, "1.0.0", "temperature", 0.6, True),  # the torch sampler of 1.0 is greedy
    ({"sampler_type": "TRTLLMSampler"}, "1.0.0", "temperature", 0.6, False),
    (MTP, "1.2.1", "top_p", 0.95, True),
    (MTP, "1.2.1", "max_tokens", 100, False),  # the backend counts
    (MTP, "1.2.1", "repetition_penalty", 1, False),  # the neutral value asks for nothing
    ({}, "1.2.1", "repetition_penalty", 1.1, True),
    ({}, "1.2.1", "guided_json_object", True, True),
    (XGRAMMAR, "1.2.1", "guided_json_object", True, False),
    (MTP, "1.2.1", "best_of", 2, True),  # chosen by logprobs
    ({}, "1.2.1", "nonsense", 2, False),  # for the schema
]


def test_other_ways_to_break_a_rule():
    assert [(code, given, code in codes_of(on(given))) for code, given, _ in OTHER_CASES] == OTHER_CASES
    found = [
        (given, release, name, value, "D009" in codes_of(on(given, release=release, **sampled(name, value))))
        for given, release, name, value, _ in SAMPLED
    ]
    assert found == SAMPLED


BACKENDS = [  # a MoE back end, where, and the code of what is said about it: an error only where the release refuses it
    ("TRTLLM", B200, "M012"),
    ("TRTLLM", {}, "M002"),
    ("CUTEDSL", FP4, "M012"),
    ("CUTEDSL", FP4 | {"release": "1.1.0"}, "M002"),
    ("CUTEDSL", B200, "M003"),
    ("DEEPGEMM", {}, "M002"),
    ("DEEPGEMM", FP4, "M002"),
    ("DEEPGEMM", {"precision": "w4a8"}, "M002"),
    ("WIDEEP", {"gpu": "h20-96"}, "M003"),
    ("TRITON", {}, "M002"),
    ("VANILLA", FP4, "M003"),
    ("CUTLASS", B200, "M002"),
]


def test_a_moe_backend_is_an_error_only_where_the_release_refuses_it():
    said = {
        (backend, *where.items()): [
            code for code in codes_of(on({MOE: backend}, {DP: True}, **where)) if code in ("M002", "M003", "M012")
        ]
        for backend, where, _ in BACKENDS
    }
    assert said == {(backend, *where.items()): [code] for backend, where, code in BACKENDS}


def test_a_rule_that_needs_an_unknown_setting_finds_nothing():
    known, unknown = on(WIDE, **NVL72), {TP, EP}
    settings = {key: value for key, value in known.settings.items() if key not in unknown}
    assert "M003" in codes_of(replace(known, settings=settings))
    assert "M003" not in codes_of(replace(known, settings=settings, unknown=frozenset(unknown)))

    # No degree of expert parallelism supports this one.
    assert "M002" in codes_of(replace(on(**B200), settings=CUTLASS, unknown=frozenset({EP})))


def test_each_code_is_unique_and_has_its_words_on_the_page(monkeypatch):
    entries, page, words = [*RULES, *PAIR_RULES, *VLLM_RULES, *CHECKS], rules_page(), load_yaml("rules.yaml")
    codes = [entry.code for entry in entries]
    assert sorted(codes) == sorted(words)
    assert [code for code in codes if page.count(f'<a id="{code.lower()}"></a>') != 1] == []
    assert [entry.code for entry in entries if not entry.source or entry.why not in page] == []
    assert [entry.code for entry in entries if entry.title.endswith(".") or not entry.why.endswith(".")] == []
    assert len({rule.title for rule in RULES}) == len(RULES)
    assert (find_code("g010").code, find_code("G010").title in page) == ("G010", True)
    with pytest.raises(UnknownNameError):
        find_code("G999")
    with pytest.raises(LookupError, match=r"^L999 .*data/rules\.yaml"):
        _ = replace(RULES[0], code="L999").why
    wrong = {"architecture": "hoper", "memory_mib": "46068 MiB", "published_min_gpus": {"fp8": "8"}}
    with pytest.raises(LookupError, match=r"^a: architecture: .*; memory_mib: .*; published_min_gpus: [^;]*$"):
        entry_of("a", catalog.Gpu, {**vars(catalog.gpus()["h200"]), **wrong})
    slips = {
        "h20e": (data.catalog, "gpus", [], dict.fromkeys(("h20", "h20e"), load_yaml("gpus.yaml")["h20-141"])),
        "trtllm-1.2.0.yaml: release: ": (data.releases, "_load", ["1.2.0"], {"release": "1.2.1"}),
        "vllm-0.31.0.yaml: vllm: ": (data.vllm, "_load", ["0.31.0"], {"vllm": "0.33.0"}),
    }
    for place, (module, load, asked, content) in slips.items():
        monkeypatch.setattr(module, "load_yaml", lambda _, content=content: content)
        with pytest.raises(LookupError, match=place):
            getattr(module, load).__wrapped__(*asked)


def test_a_violation_is_one_line_with_a_fix_and_a_known_key():
    known = {None, *catalog.load_release(CANONICAL_RELEASE).keys()}
    for broken, _ in CASES.values():
        for rule, violation in violations(broken):
            assert len(violation.message.splitlines()) == len(violation.fix.splitlines()) == 1, rule.code
            is_known = violation.key in {*known, *broken.environment}
            assert is_known or violation.key.startswith("triton_config."), rule.code


def test_a_rule_about_the_target_needs_no_settings():
    for code in (rule.code for rule in RULES if rule.target_only):
        broken, whole = ([rule.code for rule, _ in target_violations(replace(one, settings={}))] for one in CASES[code])
        assert (code in broken, code in whole) == (True, False), code


@pytest.mark.parametrize("fact", ["release", "variant", "architecture", "checkpoint", "gpu", "isl"])
def test_a_rule_ignores_unknown_facts(fact):
    for broken, whole in CASES.values():
        assert set(codes_of(replace(whole, **{fact: None}))) <= {*codes_of(whole), "A003", "A006", "V005", "V006"}
        codes_of(replace(broken, **{fact: None}))


def test_rules_ignore_unknown_keys_and_need_settings():
    assert codes_of(Deployment(settings={})) == []
    assert codes_of(on({"no_such_key": 1, "kv_cache_config.nor_this": "x"})) == codes_of(on())


JUNK = ["8", -1, 0, 1, 3.5, float("nan"), True, None, [], [None], ["a"], {}, {"a": 1}, 10**30]


B300, RTX = {"gpu": "b300", "precision": "fp4"}, {"gpu": "rtx-pro-6000", "precision": "fp4"}
NEWER_BLACKWELL = [  # what is deployed, and the errors
    (on(**B300), []),
    (on(release="1.1.0", **B300), ["H006"]),
    (on({MOE: "TRTLLM"}, FP8_KV, CHUNKED, **B300), []),
    (on(DEEPGEMM, gpu="gb300", precision="fp8"), []),
    (on(CUTLASS, gpu="gb300", precision="fp8"), ["M002"]),
    (on(gpu="b300", precision="w4a8"), ["H003"]),
    (on(FP8_KV, BLOCKS_64, DEEPGEMM, gpu="b300", **V32), []),
    (on(FP8_KV, CHUNKED, **RTX), []),
    (on({MOE: "TRTLLM"}, **RTX), ["M002"]),
    (on({MOE: "CUTEDSL"}, **RTX), ["M002"]),
    (on(release="1.1.0", **RTX), ["H006"]),
    (on(gpu="rtx-pro-6000", precision="fp8"), ["H005"]),
    (on(gpu="rtx-pro-6000", precision="w4a8"), ["H003"]),
    (on(BLOCKS_64, gpu="rtx-pro-6000", **V32), ["H005", "H006"]),
]


def test_sm103_is_as_sm100_and_sm120_has_kernels_of_its_own(subtests):
    for deployment, expected in NEWER_BLACKWELL:
        with subtests.test(f"{deployment.gpu.name} {deployment.precision} {deployment.settings}"):
            found = [rule.code for rule, _ in violations(deployment) if rule.severity == "error"]
            assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_no_value_makes_a_rule_fail(junk):
    codes = ("M008", "A001", "D009", "V008", "L002", "K007")
    keys = catalog.load_release(CANONICAL_RELEASE).keys()
    for number, key in enumerate(keys, next(at for at, each in enumerate(JUNK) if each is junk)):
        for code in (codes[number % 6], codes[(number + 3) % 6]):
            base = CASES[code][0]
            codes_of(replace(base, settings={**base.settings, key: junk}))


def test_every_feature_that_a_rule_asks_for_is_recorded():
    asked = {"deepseek_v32", "fp8_blackwell", "v32_block_reuse", "v32_chunked_prefill", "v32_mtp_above_1"}
    names = {"chunked_prefill_mla", "fp8_kv_mla"}
    asked |= {f"{name}_{gpu}" for name in names for gpu in ("hopper", "blackwell", "rtx_blackwell")}
    asked |= {"fp8_rtx_blackwell", "deepseek_v32_rtx_blackwell"}
    for version in catalog.READABLE_RELEASES:
        assert asked | {"guided_decoding_with_overlap_scheduler"} <= catalog.load_release(version).features.keys()


@pytest.mark.parametrize("release", catalog.RELEASES)
def test_what_the_hardware_table_has_breaks_nothing_whatever_the_settings(release):
    """Every published number of GPUs belongs to a model, a precision and a GPU that go together."""
    for variant in catalog.variants().values():
        for precision in variant.checkpoints:
            for gpu in catalog.gpus().values():
                if precision not in gpu.published_min_gpus:
                    continue
                target = Deployment(
                    settings={},
                    variant=variant,
                    architecture=variant.architecture,
                    checkpoint=variant.checkpoints[precision],
                    gpu=gpu,
                    release=catalog.load_release(release),
                )
                broken = {rule.code for rule, _ in target_violations(target)}
                known = {"H005", "H006"} if release < "1.2.0" else set()
                known |= {"H006", "H009"} if variant.min_release in catalog.CANDIDATES else set()
                assert broken <= known, (variant.name, precision, gpu.name)


TO_SET = re.compile(
    r"^(?:set|raise) (?P<key>[\w.]+)(?:: | to )(?P<value>[\w.-]+)|^(?:if.*)?use (?:.*for example )?(?P<number>[\d.]+)"
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


def test_advice_that_can_be_followed_mends_what_it_is_about_and_breaks_no_other_rule():
    for code, (broken, _) in CASES.items():
        errors = {rule.code for rule, _ in violations(broken) if rule.severity == "error"}
        for rule, violation in violations(broken):
            after = mended(broken, violation.key, violation.fix) if rule.code == code else None
            if after is not None:
                found = {rule.code: rule.severity for rule, _ in violations(after)}
                assert code not in found, violation.fix
                assert {name for name, severity in found.items() if severity == "error"} <= errors, violation.fix
