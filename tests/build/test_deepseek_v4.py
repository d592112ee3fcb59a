"""Checkpoints of DeepSeek-V4: the tensors that config.json asks for, and what `check` finds in their files."""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest

from deepseek_triton_build.arithmetic.weights import weights
from deepseek_triton_build.catalog import variant_of_model
from deepseek_triton_build.check import is_v4
from deepseek_triton_build.check.checkpoint_files import check_checkpoint, mtp_problems, read_facts
from deepseek_triton_build.check.deepseek_v4 import expected_tensors
from deepseek_triton_build.data.catalog import architectures
from support.v4_checkpoint import BYTES, DSPARK, FP8, v4_config, write_v4

# Tensors by type in the headers of the published shards: bojieli/OpenTallas data/inventory.
COUNTS = {
    "V4-Flash-0731": {"BF16": 445, "F32": 433, "F8_E4M3": 390, "F8_E8M0": 35718, "I64": 3, "I8": 35328},
    "V4-Pro-0813": {"BF16": 631, "F32": 606, "F8_E4M3": 543, "F8_E8M0": 74271, "I64": 3, "I8": 73728},
}


@pytest.mark.parametrize("model", ["V4-Flash", "V4-Flash-0731", "V4-Pro", "V4-Pro-0813"])
def test_the_tensors_are_the_published_ones(model):
    variant, checkpoint = variant_of_model(f"deepseek-ai/DeepSeek-{model}")
    parts = weights(variant.architecture, checkpoint)
    drafts = parts.mtp_experts + parts.mtp + parts.mtp_replicated
    sums = []
    for num_drafts in (1, 0):
        config = v4_config(variant.architecture.name, num_nextn_predict_layers=num_drafts)
        forms = expected_tensors(config).values()
        sums.append(sum(math.prod(shape) * BYTES[dtype] for dtype, shape in forms))
        if num_drafts and model in COUNTS:
            assert Counter(dtype for dtype, _ in forms) == COUNTS[model]
    assert sums == [checkpoint.weight_bytes, checkpoint.weight_bytes - drafts]


CUT = {"num_hidden_layers": 4, "n_routed_experts": 8}
TID2EID, SCALE, EXPERT = "layers.0.ffn.gate.tid2eid", "layers.1.attn.wq_a.scale", "layers.3.ffn.experts.7.w2.weight"
FLASH, SPARK = "deepseek-v4-flash", "deepseek-v4-flash-dspark"


def put(name, dtype=None, shape=None):
    def change(forms):
        forms[name] = [dtype or forms[name][0], shape or forms[name][1]]

    return change


def without(*beginnings):
    def change(forms):
        for name in [name for name in forms if name.startswith(beginnings)]:
            del forms[name]

    return change


def experts(dtype):
    def change(forms):
        for name in forms:
            if ".ffn.experts." in name and name.endswith("weight") and not name.startswith("mtp."):
                forms[name][0] = dtype

    return change


NVFP4 = {"quantization_config": FP8 | {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4"}}
FOLDERS = [  # architecture, keys of config.json, what is changed in the headers, precision, codes
    (FLASH, {}, {}, None, "mxfp4", []),
    (SPARK, {}, {}, None, "mxfp4", []),
    (FLASH, {"num_nextn_predict_layers": 0}, {}, None, "mxfp4", []),
    (FLASH, {}, {}, without("mtp."), "mxfp4", []),  # a draft that is not used
    (FLASH, {}, NVFP4, experts("U8"), "fp4", []),
    (FLASH, {}, {"expert_dtype": "fp8"}, experts("F8_E4M3"), "fp8", []),
    (FLASH, {}, {"expert_dtype": None}, experts("F8_E4M3"), "fp8", ["W022"]),
    (FLASH, {}, {"expert_dtype": None}, None, "mxfp4", []),  # vLLM takes fp4
    (FLASH, {}, {"quantization_config": FP8 | {"weight_block_size": [32, 32]}}, None, "mxfp4", ["W018"]),
    (FLASH, {}, {}, without(TID2EID), "mxfp4", ["W011"]),
    (SPARK, {}, {}, without("mtp.2."), "mxfp4", ["W011"]),
    (FLASH, {}, DSPARK | {"dspark_markov_rank": 256}, None, "mxfp4", ["W011"]),
    (FLASH, {}, {}, put(SCALE, dtype="F32"), "mxfp4", ["W024"]),
    (FLASH, {}, {}, put(EXPERT, shape=[4096, 2048]), "mxfp4", ["W024"]),
    (FLASH, {}, {}, put(TID2EID, shape=[129280, 8]), "mxfp4", ["W024"]),
]


def test_what_check_finds_in_the_files(tmp_path):
    found = []
    for number, (name, asked, said, change, *_) in enumerate(FOLDERS):
        folder = write_v4(tmp_path / str(number), v4_config(name, **CUT, **asked), change or (lambda _: None))
        config = v4_config(name, **CUT, **asked) | said
        (folder / "config.json").write_text(json.dumps({key: one for key, one in config.items() if one is not None}))
        facts, findings = check_checkpoint(folder, "w", folder, for_vllm=True)
        assert facts.cut is not None
        assert (facts.cut.num_layers, facts.cut.num_routed_experts) == (4, 8)
        found.append((name, asked, said, change, facts.precision, [one.code for one in findings]))
    assert found == FOLDERS


def test_config_json_may_hold_anything_or_too_little():
    config = v4_config(**CUT)
    keys = ("compress_ratios", "quantization_config", "hidden_size", "num_hidden_layers", "n_routed_experts", "hc_mult")
    wrong = [config | {key: value} for key in keys for value in (None, "4", [], {})]
    wrong += [{key: value for key, value in config.items() if key != left_out} for left_out in keys]
    wrong += [config | {key: 10**10} for key in ("num_hidden_layers", "n_routed_experts")]
    assert {len(expected_tensors(each)) for each in wrong} == {0}


def test_the_draft_tells_which_architecture_and_mtp_is_not_dspark(tmp_path):
    for name, other, codes in ((FLASH, SPARK, []), (SPARK, FLASH, ["W017"])):
        folder = write_v4(tmp_path / name, v4_config(name, **CUT))
        facts, _ = read_facts(folder, "w", for_vllm=True)
        assert (facts.architecture.name, facts.difference) == (name, "")
        assert "dspark_markov_rank" in replace(facts, architecture=architectures()[other]).difference
        assert [one.code for one in mtp_problems(facts, 1)] == codes


def test_v41_has_its_figures_in_text_config(tmp_path):
    flat = v4_config("deepseek-v4.1-flash", quantization_config=FP8 | {"weight_block_size": [32, 32]})
    outside = {key: flat.pop(key) for key in ("architectures", "model_type", "quantization_config")}
    outside["quantization_config"] |= {"expert_dtype": flat.pop("expert_dtype")}
    folder = write_v4(tmp_path / "w", v4_config(**CUT))
    (folder / "config.json").write_text(
        json.dumps(outside | {"text_config": flat | {"model_type": "deepseek_v41_text"}})
    )

    facts, findings = check_checkpoint(folder, "w", folder, for_vllm=True)

    assert is_v4(outside | {"text_config": flat})
    assert (facts.architecture.name, facts.precision, findings) == ("deepseek-v4.1-flash", "mxfp4", [])
    assert facts.difference == ""
