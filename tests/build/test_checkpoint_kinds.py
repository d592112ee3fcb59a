"""`check` and the planner know a checkpoint by its files: mixed precision, 16 bits, an FP8 KV cache, or a cut one."""

import json
import shutil
import struct

import pytest

from deepseek_triton_build import PlanRequest, RefusedPlanError, make_plan, resolve_target
from deepseek_triton_build.check import CheckOptions, check_repository, read_facts
from support.checked import MODEL_YAML, edited, only, safetensors, serious, write

R1 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "n_routed_experts": 256,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
UNQUANTIZED = {"quantization_config": None, "torch_dtype": "bfloat16"}
MIXED = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}
LAYERS = {
    **MIXED,
    "quantized_layers": {
        "model.layers.0.mlp.down_proj": {"quant_algo": "FP8_BLOCK_SCALES"},
        "model.layers.3.mlp.experts": {"quant_algo": "W4A8_AWQ"},
    },
}


def checkpoint(folder, tensors, *, quant=None, layers=None, **config):
    """Write a checkpoint of one-byte tensors, the last of which lies in a file of its own."""
    folder.mkdir()
    files = {"model-00001-of-000001.safetensors": tensors[:-1], "input_scales.safetensors": tensors[-1:]}
    for file, names in files.items():
        (folder / file).write_bytes(safetensors(dict.fromkeys(names, 1)))
    documents = {
        "model.safetensors.index.json": {"weight_map": {name: file for file, names in files.items() for name in names}},
        "config.json": R1 | config,
        "tokenizer.json": {"model": {"vocab": {"a": 1}}},
        "tokenizer_config.json": {},
        "hf_quant_config.json": quant and {"quantization": quant},
        "quant_cfg.json": layers,
    }
    for file, document in documents.items():
        if document is not None:
            (folder / file).write_text(json.dumps(document))
    return folder


def experts(*pairs):
    return [f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight" for layer, expert in pairs]


WHOLE = experts((3, 0), (60, 255), (61, 255))


def checked(weights, *, stamped=False):
    shutil.rmtree(weights.parent / "repository", ignore_errors=True)
    root = write(weights.parent / "repository", model_yaml=edited(MODEL_YAML, "deepseek-ai/DeepSeek-R1", str(weights)))
    if stamped:
        stamp = {"variant": "deepseek-r1", "gpu": "h200", "gpus": 8, "precision": "fp8", "release": "1.2.1"}
        (root / "tensorrt_llm" / "deepseek-triton.json").write_text(json.dumps(stamp))
    return check_repository(root, CheckOptions(release="1.2.1"))


def test_mixed_precision_is_w4a8(tmp_path):
    weights = checkpoint(tmp_path / "w", WHOLE, quant=MIXED, layers=LAYERS, quantization_config=None)

    report = checked(weights)

    assert only(report, "K002").message.startswith("an FP8 KV cache with W4AFP8 weights")
    assert [finding.code for finding in serious(report)] == ["K002"]
    assert report.models[0].precision == "w4a8"


def test_mixed_precision_needs_the_file_that_names_the_layers(tmp_path):
    weights = checkpoint(tmp_path / "w", WHOLE, quant=MIXED, quantization_config=None)

    assert "quant_cfg.json" in only(checked(weights), "W018").message


def test_an_fp8_cache_is_read_from_either_file(tmp_path):
    fp8 = {"quant_algo": "FP8_BLOCK_SCALES", "kv_cache_quant_algo": "FP8"}
    for name, quant, layers in (("w", MIXED, LAYERS | {"kv_cache_quant_algo": "FP8"}), ("v", fp8, None)):
        weights = checkpoint(tmp_path / name, WHOLE, quant=quant, layers=layers)
        assert read_facts(weights, "w")[0].kv_cache_quant_algo == "FP8"


def test_16_bit_weights_are_named_and_in_the_place_of_fp8_an_error_that_names_the_conversion(tmp_path):
    weights = checkpoint(tmp_path / "w", WHOLE, **UNQUANTIZED)
    report = checked(weights)
    assert serious(report) == []
    assert report.models[0].precision == "bf16"
    assert any("not quantized" in line for line in report.models[0].unchecked)

    finding = only(checked(weights, stamped=True), "W006")
    assert "16-bit" in finding.message
    assert "checkpoint quantize" in finding.fix


CUT = {"num_hidden_layers": 5, "n_routed_experts": 32, "num_nextn_predict_layers": 0}


def test_a_cut_checkpoint_is_a_warning_that_says_what_is_left(tmp_path):
    weights = checkpoint(tmp_path / "w", experts((3, 0), (4, 31)), **CUT)
    for stamped, variant in ((False, None), (True, "deepseek-r1")):
        report = checked(weights, stamped=stamped)
        [finding] = serious(report)
        assert (finding.code, finding.severity) == ("W021", "warning")
        assert "5 of 61 layers, 32 of 256 routed experts" in finding.message
        assert report.models[0].variant == variant

    target = resolve_target(PlanRequest(variant="deepseek-r1", gpu="h200", model=str(weights)))
    assert target.num_gpus == 1
    assert (target.architecture.num_layers, target.architecture.num_routed_experts) == (5, 32)
    # Attention and dense layers as in R1, 2 x 32 of the experts, and both embeddings: 3.7 GB of embeddings alone.
    assert 5e9 < target.checkpoint.weight_bytes < 10e9


@pytest.mark.parametrize("more", [(5, 0), (4, 32)], ids=["a layer", "an expert"])
def test_weights_with_more_than_config_json_says_are_not_cut_but_wrong(tmp_path, more):
    report = checked(checkpoint(tmp_path / "w", experts((3, 0), more), **CUT), stamped=True)

    assert only(report, "W016").severity == "error"


def test_another_model_with_fewer_layers_is_not_cut(tmp_path):
    weights = checkpoint(tmp_path / "w", experts((3, 0), (4, 31)), **CUT, hidden_size=2048)

    assert "hidden_size" in only(checked(weights, stamped=True), "W016").message
    with pytest.raises(RefusedPlanError, match="does not fit"):
        resolve_target(PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=1, model=str(weights)))


@pytest.mark.parametrize(("num_mtp", "num_draft_tokens"), [(0, 0), (1, 3)])
def test_mtp_is_planned_for_a_cut_checkpoint_that_has_the_layer(tmp_path, num_mtp, num_draft_tokens):
    weights = checkpoint(tmp_path / "w", experts((3, 0)), **CUT | {"num_nextn_predict_layers": num_mtp})
    request = PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=1, model=str(weights), profile="latency")

    settings = make_plan(request).canonical

    assert settings.get("speculative_config.num_nextn_predict_layers", 0) == num_draft_tokens


def test_mtp_without_the_layer_is_refused(tmp_path):
    weights = checkpoint(tmp_path / "w", experts((3, 0)), **CUT)

    with pytest.raises(RefusedPlanError, match="without its MTP layer"):
        resolve_target(PlanRequest(variant="deepseek-r1", gpu="h200", model=str(weights), mtp=1))


def test_a_whole_checkpoint_still_needs_all_gpus(tmp_path):
    weights = checkpoint(tmp_path / "w", WHOLE)

    with pytest.raises(RefusedPlanError, match="does not fit"):
        resolve_target(PlanRequest(variant="deepseek-r1", gpu="h200", num_gpus=1, model=str(weights)))


FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128]}
AWQ_CONFIG = {"quant_method": "awq", "bits": 4}
STORED = {"fp8": "F8_E4M3", "fp4": "U8", "bf16": "BF16", "w4a16": "I32"}
STATEMENTS = [  # experts, quantization_config, quant_algo of hf_quant_config.json, codes for TensorRT-LLM and for vLLM
    ("fp8", FP8_CONFIG, None, None, None),
    ("fp4", None, "NVFP4", None, None),
    ("fp4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4", None, None),
    ("w4a16", AWQ_CONFIG, None, None, None),
    ("bf16", None, None, None, None),
    ("bf16", FP8_CONFIG, None, "W022", "W022"),
    ("bf16", None, "FP8_BLOCK_SCALES", "W022", "W022"),
    ("fp8", None, None, "W022", "W022"),
    ("fp8", FP8_CONFIG, "W4A16_AWQ", "W022", "W023"),
    ("fp8", AWQ_CONFIG, None, "W022", "W022"),
    ("fp8", None, "W4A8_AWQ", "W022", "W022"),
    ("fp4", FP8_CONFIG, "NVFP4", "W023", "W022"),
    ("fp4", FP8_CONFIG, None, "W022", "W022"),
    ("fp4", None, "MIXED_PRECISION", None, None),  # U8 holds pairs of INT4 values too
]


def stored(folder, experts, config=None, algo=None):
    """Write a checkpoint whose two experts are matrices of this precision."""
    folder.mkdir()
    header = {name: {"dtype": STORED[experts], "shape": [1, 0], "data_offsets": [0, 0]} for name in WHOLE[:2]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    (folder / "config.json").write_text(json.dumps(R1 | {"quantization_config": config}))
    if algo is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": algo}}))
    return folder


def test_what_the_files_say_is_held_against_the_experts_for_each_engine(tmp_path):
    found = []
    for number, (experts, config, algo, *_) in enumerate(STATEMENTS):
        weights = stored(tmp_path / str(number), experts, config, algo)
        codes = [
            next((finding.code for finding in read_facts(weights, "w", for_vllm=vllm)[1]), None)
            for vllm in (False, True)
        ]
        found.append((experts, config, algo, *codes))
    assert found == STATEMENTS


def test_experts_alone_do_not_say_which_quantization_it_is(tmp_path):
    others = ({"quant_method": "fbgemm_fp8"}, {"quant_method": "compressed-tensors", "format": "float-quantized"})
    found = [read_facts(stored(tmp_path / config["quant_method"], "fp8", config), "w") for config in others]
    assert [(facts.precision, findings) for facts, findings in found] == [(None, []), (None, [])]


def test_a_contradiction_is_one_finding_and_its_way_out_leads_out(tmp_path):
    for experts, config, algo in (("bf16", FP8_CONFIG, None), ("fp8", None, None), ("fp8", FP8_CONFIG, "NVFP4")):
        weights = stored(tmp_path / f"{experts}{algo}", experts, config, algo)
        found = [finding for finding in serious(checked(weights, stamped=True)) if finding.code.startswith("W0")]
        assert [finding.code for finding in found if finding.code != "W014"] == ["W022"]
        if algo:
            (weights / "hf_quant_config.json").unlink()
        elif experts == "fp8":
            (weights / "config.json").write_text(json.dumps(R1))
        else:
            shutil.rmtree(weights)
            stored(weights, "fp8", FP8_CONFIG)
        assert read_facts(weights, "w")[1] == []
