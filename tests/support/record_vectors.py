"""Records the log-probabilities that transformers computes, which hold the reference engine where there is no torch.

    python tests/support/record_vectors.py                  # the random checkpoints of support.checkpoint_variants
    python tests/support/record_vectors.py FOLDER NAME      # a checkpoint of your own, as NAME

It needs torch and transformers 5, and writes tests/backend/recorded/NAME.npz: token_ids [n], positions [k], logprobs
[k, vocab_size] after the tokens at these positions.
"""

import json
import sys
import tempfile
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from support.checkpoint_variants import VARIANTS, write_variant

RECORDED = Path(__file__).parents[1] / "backend" / "recorded"
NUM_TOKENS = 300
POSITIONS = (0, 1, 2, 7, 40, 130, 255, 256, 299)
"""Among them the first tokens, and those at which the cache of the reference engine grows."""


def transformers_logprobs(folder, token_ids):
    """Return the log-probabilities [len(token_ids), vocab_size] by transformers, in float32."""
    import torch
    from transformers import AutoConfig, DeepseekV3ForCausalLM

    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights given to it are float32
    model = DeepseekV3ForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    differing = model.load_state_dict(_merged_experts(_float32_tensors(folder), config), strict=False)
    assert not differing.unexpected_keys
    assert differing.missing_keys == (["lm_head.weight"] if config.tie_word_embeddings else [])
    model.tie_weights()
    with torch.no_grad():
        logits = model(torch.tensor(token_ids)[None]).logits[0].double()
    return logits.log_softmax(-1).float().numpy()


def _float32_tensors(folder):
    """Return the tensors in float32, dequantized by torch."""
    import torch
    from safetensors.torch import load_file

    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    tensors = {name: values for file in files for name, values in file.items()}
    scales = {name: values for name, values in tensors.items() if name.endswith("_scale_inv")}
    result = {}
    for name, values in tensors.items():
        wide = values.float()
        if (scale := scales.get(f"{name}_scale_inv")) is not None:
            blocks = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            wide *= blocks[: wide.shape[0], : wide.shape[1]]
        if name not in scales:
            result[name] = wide
    assert all(value.dtype == torch.float32 for value in result.values())
    return result


def _merged_experts(tensors, config):
    """Return the tensors by the names of transformers 5, which stacks the experts; without layers for MTP."""
    import torch

    result = {}
    for name, values in tensors.items():
        if ".layers." in name and int(name.split(".layers.")[1].split(".")[0]) >= config.num_hidden_layers:
            continue
        if ".mlp.experts." not in name:
            result[name] = values
    for layer in range(config.first_k_dense_replace, config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts"

        def stacked(kind, prefix=prefix):
            names = [f"{prefix}.{index}.{kind}_proj.weight" for index in range(config.n_routed_experts)]
            return torch.stack([tensors[name] for name in names])

        result[f"{prefix}.gate_up_proj"] = torch.cat([stacked("gate"), stacked("up")], 1)
        result[f"{prefix}.down_proj"] = stacked("down")
    return result


def prompt(vocab_size):
    return np.random.RandomState(3).randint(0, vocab_size, NUM_TOKENS)


def record(folder, name):
    """Write the file of one checkpoint."""
    token_ids = prompt(json.loads((folder / "config.json").read_text())["vocab_size"])
    logprobs = transformers_logprobs(folder, token_ids)[list(POSITIONS)]
    RECORDED.mkdir(exist_ok=True)
    np.savez_compressed(RECORDED / f"{name}.npz", token_ids=token_ids, positions=POSITIONS, logprobs=logprobs)
    print(f"{name}: {logprobs.shape[0]} positions of {NUM_TOKENS} tokens, {logprobs.shape[1]} log-probabilities each")


def main():
    if len(sys.argv) == 3:
        record(Path(sys.argv[1]), sys.argv[2])
        return
    for name in VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            write_variant(name, Path(folder))
            record(Path(folder), name)


if __name__ == "__main__":
    main()
