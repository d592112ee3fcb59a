"""Small checkpoints in DeepSeek's layout, with real numbers in FP8 or bfloat16."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from deepseek_triton_tools.checkpoints.number_formats import quantize_blocks
from deepseek_triton_tools.checkpoints.shard_writer import OutputTensor, ShardWriter
from deepseek_triton_tools.checkpoints.stored_tensors import DTYPES

TINY = Path(__file__).parents[2] / "model_repository/tensorrt_llm/1/tiny"

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 1,
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "vocab_size": 96,
    "torch_dtype": "bfloat16",
}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


def write_checkpoint(folder, tensors, config, *, files=1):
    """Write the tensors, dealt over some files, with an index and config.json; the folder."""
    folder.mkdir(parents=True)
    names = list(tensors)
    weight_map = {}
    for number in range(files):
        mine = names[number::files]
        name = f"model-{number + 1:05}-of-{files:06}.safetensors"
        outputs = [OutputTensor(one, _NAMES[tensors[one].dtype], tensors[one].shape) for one in mine]
        with ShardWriter(folder / name, outputs) as writer:
            for one in mine:
                writer.write(tensors[one])
            writer.finish()
        weight_map |= dict.fromkeys(mine, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def small_checkpoint(folder, *, fp8=True, files=3, **changes):
    """A checkpoint of three layers and an MTP layer, whose kv_a_proj_with_mqa ends with half a block of rows."""
    config = {**CONFIG, **changes}
    tensors = dict(_tensors(config))
    if fp8:
        tensors = {name: array for one, weight in tensors.items() for name, array in _as_fp8(one, weight)}
        config["quantization_config"] = FP8
    return write_checkpoint(folder, tensors, config, files=files)


def write_act_scales(path, config):
    """A safetensors file of input scales for every routed expert but those of the MTP layer."""
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.w{number}.input_scale"
        for layer in range(config["first_k_dense_replace"], config["num_hidden_layers"])
        for expert in range(config["n_routed_experts"])
        for number in (1, 2, 3)
    ]
    with ShardWriter(path, [OutputTensor(name, "F32", (1,)) for name in names]) as writer:
        writer.write(np.linspace(0.01, 0.02, len(names), dtype=np.float32))
        writer.finish()
    return path


def _as_fp8(name, weight):
    if not name.endswith(("_proj.weight", "_with_mqa.weight")) or "eh_proj" in name:
        return [(name, weight)]
    values, scales = quantize_blocks(weight.astype(np.float32))
    return [(name, values), (f"{name}_scale_inv", scales)]


def _tensors(config):
    rng = np.random.default_rng(7)
    hidden, experts = config["hidden_size"], config["n_routed_experts"]

    def weight(name, *shape):
        return f"{name}.weight", (rng.standard_normal(shape) * 0.04).astype(np.float32).astype(ml_dtypes.bfloat16)

    def mlp(prefix, width):
        sizes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
        return [weight(f"{prefix}.{name}", *shape) for name, shape in sizes.items()]

    found = [weight("model.embed_tokens", config["vocab_size"], hidden), weight("model.norm", hidden)]
    for layer in range(config["num_hidden_layers"] + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layer}"
        found += [weight(f"{prefix}.input_layernorm", hidden), weight(f"{prefix}.self_attn.o_proj", hidden, 256)]
        found.append(weight(f"{prefix}.self_attn.kv_a_proj_with_mqa", 192, hidden))
        if layer < config["first_k_dense_replace"]:
            found += mlp(f"{prefix}.mlp", config["intermediate_size"])
            continue
        found.append(weight(f"{prefix}.mlp.gate", experts, hidden))
        found.append((f"{prefix}.mlp.gate.e_score_correction_bias", rng.random(experts, dtype=np.float32)))
        found += mlp(f"{prefix}.mlp.shared_experts", config["moe_intermediate_size"])
        for expert in range(experts):
            found += mlp(f"{prefix}.mlp.experts.{expert}", config["moe_intermediate_size"])
        if layer >= config["num_hidden_layers"]:
            found.append(weight(f"{prefix}.eh_proj", hidden, 2 * hidden))
    return [*found, weight("lm_head", config["vocab_size"], hidden)]
