"""Makes the checkpoint of a trained network, in FP8 as DeepSeek stores it.

`python -m tiny_checkpoint.export TRAINED CHECKPOINT` reads network.pt and the tokenizer's files from TRAINED.
"""

import argparse
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from tiny_checkpoint.architecture import CONFIG
from tiny_checkpoint.network import quantize_blocks

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    *("r1/tokenizer_config.json", "v4/tokenizer_config.json"),
)
_ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


def checkpoint_tensors(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint, by DeepSeek's names, of the network's `state`."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor, is_fp8 in _tensors(state):
        if is_fp8:
            values, scale = quantize_blocks(tensor.float())
            tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = values, scale
        else:
            # Routing compares the biases with scores of float32, so DeepSeek keeps them in float32.
            dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
            tensors[name] = tensor.to(dtype).contiguous().clone()
    return tensors


def _tensors(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Return name, values and whether they become FP8; the name of an FP8 tensor comes without `.weight`."""
    yield "model.embed_tokens.weight", state["embed_tokens.weight"], False
    layers: int = CONFIG["num_hidden_layers"]
    for layer in range(layers):
        yield from _layer(state, f"layers.{layer}", f"model.layers.{layer}")
    yield "model.norm.weight", state["norm.weight"], False
    yield "lm_head.weight", state["lm_head.weight"], False
    ahead = f"model.layers.{layers}"
    yield f"{ahead}.embed_tokens.weight", state["embed_tokens.weight"], False
    for name in ("enorm", "hnorm", "eh_proj"):
        yield f"{ahead}.{name}.weight", state[f"{name}.weight"], False
    yield from _layer(state, "next_layer", ahead)
    yield f"{ahead}.shared_head.norm.weight", state["next_norm.weight"], False
    yield f"{ahead}.shared_head.head.weight", state["lm_head.weight"], False


def _layer(state: dict[str, torch.Tensor], source: str, name: str) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for norm in ("input_layernorm", "post_attention_layernorm", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"):
        yield f"{name}.{norm}.weight", state[f"{source}.{norm}.weight"], False
    for projection in _ATTENTION:
        yield f"{name}.self_attn.{projection}", state[f"{source}.self_attn.{projection}.weight"], True
    if f"{source}.mlp.gate" not in state:
        for projection in _MLP:
            yield f"{name}.mlp.{projection}", state[f"{source}.mlp.{projection}.weight"], True
        return
    yield f"{name}.mlp.gate.weight", state[f"{source}.mlp.gate"], False
    yield f"{name}.mlp.gate.e_score_correction_bias", state[f"{source}.mlp.bias"], False
    for projection in _MLP:
        yield f"{name}.mlp.shared_experts.{projection}", state[f"{source}.mlp.shared_experts.{projection}.weight"], True
    count, width = CONFIG["n_routed_experts"], CONFIG["moe_intermediate_size"]
    for expert in range(count):
        for projection in ("gate_proj", "up_proj"):
            every = state[f"{source}.mlp.{projection}.weight"].unflatten(0, (count, width))
            yield f"{name}.mlp.experts.{expert}.{projection}", every[expert], True
        yield f"{name}.mlp.experts.{expert}.down_proj", state[f"{source}.mlp.down_proj"][expert], True


def export(trained: Path, checkpoint: Path) -> None:
    """Write the checkpoint, and the checksums of its files."""
    state = torch.load(trained / "network.pt", map_location="cpu", weights_only=True)
    for name in TOKENIZER_FILES:
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(trained / name, checkpoint / name)
    (checkpoint / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    save_file(checkpoint_tensors(state), checkpoint / "model.safetensors", metadata={"format": "pt"})
    files = sorted([*TOKENIZER_FILES, "config.json", "model.safetensors"])
    sums = [f"{hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()}  {name}\n" for name in files]
    (checkpoint / "checksums.sha256").write_text("".join(sums), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the checkpoint of a trained network.")
    parser.add_argument("trained", type=Path, help="folder that tiny_checkpoint.train has written")
    parser.add_argument("checkpoint", type=Path, help="folder to write")
    args = parser.parse_args()
    export(args.trained, args.checkpoint)
    size = sum(file.stat().st_size for file in args.checkpoint.rglob("*") if file.is_file())
    print(f"{args.checkpoint}: {size / 2**20:.2f} MiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
