"""Random DeepSeek-V3 checkpoints without a tokenizer, of all forms that the reference engine computes."""

import json

import numpy as np

from support.random_checkpoint import build_config, build_weights
from support.tensor_writing import as_bfloat16, as_float32, as_fp8, write_sharded, write_tensors
from tiny_checkpoint.architecture import CONFIG

_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "max_position_embeddings": 512,
}
_YARN = {"type": "yarn", "beta_fast": 32, "beta_slow": 1}

PRODUCTION = {key: value for key, value in CONFIG.items() if key not in ("torch_dtype", "vocab_size")}
"""The embedded checkpoint's keys: the widths of a head and a latent are those of DeepSeek-V3."""

VARIANTS = {
    "production": (PRODUCTION, 1),
    "one-query-projection": ({**_SMALL, "q_lora_rank": None, "n_group": 1, "topk_group": 1}, 1),
    "without-yarn": (
        {**_SMALL, "rms_norm_eps": 0.01, "rope_scaling": None, "first_k_dense_replace": 0, "norm_topk_prob": False},
        1,
    ),
    "mscale": (
        {
            **_SMALL,
            "rope_theta": 500,
            "rope_scaling": {
                **_YARN,
                "factor": 32,
                "original_max_position_embeddings": 16,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
            },
            "n_group": 2,
            "topk_group": 1,
            "tie_word_embeddings": True,
        },
        1,
    ),
    "fp8-shards": (
        {
            **_SMALL,
            "hidden_size": 160,
            "num_nextn_predict_layers": 1,
            "quantization_config": _FP8,
            "rope_scaling": {**_YARN, "factor": 8, "original_max_position_embeddings": 64},
        },
        2,
    ),
}
"""Name -> (keys of config.json that differ from the random checkpoint's, number of files)."""


def write_variant(name, folder, *, vocab_size=256, dequantized=False):
    """Write config.json and the weights into the existing `folder`.

    :param dequantized: write all weights as float32, also those that the variant has in FP8.
    """
    changes, num_files = VARIANTS[name]
    if dequantized:
        changes = {key: value for key, value in changes.items() if key != "quantization_config"}
    config = {**build_config(vocab_size), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    weights = _with_uneven_norms(build_weights(config, range(vocab_size)))
    weights["lm_head.weight"] /= 5
    if config["tie_word_embeddings"]:
        weights["model.embed_tokens.weight"] /= 5
        del weights["lm_head.weight"]
    for layer in range(config["num_nextn_predict_layers"]):
        weights[f"model.layers.{config['num_hidden_layers'] + layer}.eh_proj.weight"] = np.ones((2, 4), np.float32)
    stored = _stored(weights, is_fp8="quantization_config" in config)
    if num_files == 1:
        write_tensors(folder / "model.safetensors", stored)
    else:
        write_sharded(folder, stored, num_files)


def _with_uneven_norms(weights):
    """Return the weights with norms other than 1, which would hide that one is forgotten."""
    random = np.random.RandomState(1)
    return {
        name: random.uniform(0.5, 1.5, values.shape).astype(np.float32) if "norm" in name else values
        for name, values in weights.items()
    }


def _stored(weights, *, is_fp8):
    """Return the tensors as DeepSeek stores them, where `is_fp8`: linear layers in FP8, the bias in float32."""
    if not is_fp8:
        return {name: as_float32(values) for name, values in weights.items()}
    stored = {}
    for name, values in weights.items():
        if name.endswith(("_proj.weight", "_with_mqa.weight")):
            stored |= as_fp8(name, values) if "eh_proj" not in name else {name: as_bfloat16(values)}
        else:
            stored[name] = as_float32(values) if name.endswith("_bias") else as_bfloat16(values)
    return stored
