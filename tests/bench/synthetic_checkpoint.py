"""A checkpoint in DeepSeek-V3's layout, of any size, for what reads checkpoints, whatever the values.

The tensors have DeepSeek-V3's names, data types and order, and lie in 163 shards as its 91,991 do; their widths are
scaled so that all take about the size that is asked for. Below 1 GB there are 4 layers of 8 experts, in 4 shards. The
content is noise, another in each shard, of finite numbers; a sparse one has none, and a file system that knows holes
stores the headers alone.
"""

import json
import math
import os
import random
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

NUM_SHARDS = 163
NUM_SHARDS_SMALL = 4
SMALL = 10**9
"""Bytes, from which on all layers and experts are there."""
BLOCK = 128
"""An FP8 weight has a 32-bit scale for each 128 x 128 of its values."""
MULTIPLE = 8
"""Of which widths are."""
NOISE_BYTES = 4 * 2**20
"""That repeat within a shard: more than the file systems that compress look at together."""

BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1}

CONFIG: Mapping[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""What deepseek-ai/DeepSeek-V3's config.json says of shapes."""
WIDTHS = ("hidden_size", "intermediate_size", "kv_lora_rank", "moe_intermediate_size", "q_lora_rank", "vocab_size")


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * BYTES[self.dtype]


def make_checkpoint(
    folder: Path,
    *,
    size: int | None,
    num_shards: int | None = None,
    sparse: bool = False,
    seed: int = 0,
    fewer: Mapping[str, int] | None = None,
) -> int:
    """Writes one into `folder`, which is made, and brings it to the disk; the bytes of its tensors.

    :param size: about so many bytes of tensors; None: as published.
    :param fewer: numbers of layers or experts in config.json, in place of the published ones.
    :raises ValueError: for a size or number of shards that can't be.
    :raises OSError: when it can't be written, or `folder` is there and not empty.
    """
    config = {**CONFIG, **(fewer or {})} if size is None else config_of(size)
    tensors = list(tensors_of(config))
    is_small = fewer or config["n_routed_experts"] < CONFIG["n_routed_experts"]
    shards = deal(tensors, num_shards or (NUM_SHARDS_SMALL if is_small else NUM_SHARDS))
    total = sum(tensor.size for tensors in shards.values() for tensor in tensors)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty")
    free = shutil.disk_usage(folder).free
    if total > free and not sparse:
        raise OSError(f"{folder}: {total:,} bytes are more than the {free:,} that are free there")
    for name, tensors in shards.items():
        _write(folder / name, tensors, None if sparse else _noise(random.Random(f"{seed} {name}")))
    weight_map = {tensor.name: name for name, tensors in shards.items() for tensor in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    for name, document in (("model.safetensors.index.json", index), ("config.json", config)):
        (folder / name).write_text(json.dumps(document, indent=2) + "\n")
    return total


def config_of(size: int) -> dict[str, Any]:
    """A config.json whose tensors take about `size` bytes.

    :raises ValueError: when that is too few or more than DeepSeek-V3 has.
    """
    config = dict(CONFIG)
    if size < SMALL:
        config |= {"num_hidden_layers": 4, "n_routed_experts": 8}
    least, most = _total(_scaled(config, 0)), _total(config)
    if not least <= size <= most:
        raise ValueError(f"expected a size from {least:,} to {most:,} bytes, got {size:,}")
    low, high = 0.0, 1.0
    for _ in range(16):  # finer than a step of the widths
        factor = (low + high) / 2
        if _total(_scaled(config, factor)) <= size:
            low = factor
        else:
            high = factor
    return _scaled(config, low)


def tensors_of(config: Mapping[str, Any]) -> Iterator[Tensor]:
    """In the order in which they lie over DeepSeek-V3's shards: the layer for multi-token prediction is last."""
    hidden, vocab, num_layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    yield Tensor("model.embed_tokens.weight", "BF16", (vocab, hidden))
    for layer in range(num_layers):
        yield from _layer(config, layer)
    yield Tensor("lm_head.weight", "BF16", (vocab, hidden))
    yield Tensor("model.norm.weight", "BF16", (hidden,))
    for layer in range(num_layers, num_layers + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layer}"
        yield from _layer(config, layer)
        yield Tensor(f"{prefix}.embed_tokens.weight", "BF16", (vocab, hidden))
        yield Tensor(f"{prefix}.enorm.weight", "BF16", (hidden,))
        yield Tensor(f"{prefix}.hnorm.weight", "BF16", (hidden,))
        yield Tensor(f"{prefix}.eh_proj.weight", "BF16", (hidden, 2 * hidden))
        yield Tensor(f"{prefix}.shared_head.norm.weight", "BF16", (hidden,))
        yield Tensor(f"{prefix}.shared_head.head.weight", "BF16", (vocab, hidden))


def deal(tensors: list[Tensor], num_shards: int) -> dict[str, list[Tensor]]:
    """File -> its tensors, one after another and about the same in bytes.

    :raises ValueError: when a shard would have none.
    """
    total, before = sum(tensor.size for tensor in tensors), 0
    shards: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        shards.setdefault((before + tensor.size // 2) * num_shards // total, []).append(tensor)
        before += tensor.size
    if len(shards) < num_shards:
        raise ValueError(f"expected at most {len(shards)} shards for {len(tensors)} tensors so large, got {num_shards}")
    return {f"model-{number + 1:05}-of-{num_shards:06}.safetensors": shard for number, shard in shards.items()}


def _layer(config: Mapping[str, Any], layer: int) -> Iterator[Tensor]:
    hidden, prefix = config["hidden_size"], f"model.layers.{layer}"
    yield from _attention(config, f"{prefix}.self_attn")
    if layer < config["first_k_dense_replace"]:
        yield from _mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
    else:
        width, num_experts = config["moe_intermediate_size"], config["n_routed_experts"]
        yield Tensor(f"{prefix}.mlp.gate.weight", "BF16", (num_experts, hidden))
        yield Tensor(f"{prefix}.mlp.gate.e_score_correction_bias", "F32", (num_experts,))
        yield from _mlp(f"{prefix}.mlp.shared_experts", hidden, width * config["n_shared_experts"])
        for expert in range(num_experts):
            yield from _mlp(f"{prefix}.mlp.experts.{expert}", hidden, width)
    yield Tensor(f"{prefix}.input_layernorm.weight", "BF16", (hidden,))
    yield Tensor(f"{prefix}.post_attention_layernorm.weight", "BF16", (hidden,))


def _attention(config: Mapping[str, Any], prefix: str) -> Iterator[Tensor]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    yield from _linear(f"{prefix}.q_a_proj", q_rank, hidden)
    yield Tensor(f"{prefix}.q_a_layernorm.weight", "BF16", (q_rank,))
    yield from _linear(f"{prefix}.q_b_proj", heads * (nope + rope), q_rank)
    yield from _linear(f"{prefix}.kv_a_proj_with_mqa", kv_rank + rope, hidden)
    yield Tensor(f"{prefix}.kv_a_layernorm.weight", "BF16", (kv_rank,))
    yield from _linear(f"{prefix}.kv_b_proj", heads * (nope + value), kv_rank)
    yield from _linear(f"{prefix}.o_proj", hidden, heads * value)


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[Tensor]:
    yield from _linear(f"{prefix}.gate_proj", width, hidden)
    yield from _linear(f"{prefix}.up_proj", width, hidden)
    yield from _linear(f"{prefix}.down_proj", hidden, width)


def _linear(prefix: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield Tensor(f"{prefix}.weight", "F8_E4M3", (rows, columns))
    yield Tensor(f"{prefix}.weight_scale_inv", "F32", (math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)))


def _scaled(config: Mapping[str, Any], factor: float) -> dict[str, Any]:
    widths = {key: max(MULTIPLE, round(config[key] * factor / MULTIPLE) * MULTIPLE) for key in WIDTHS}
    heads = max(1, round(config["num_attention_heads"] * factor))
    return {**config, **widths, "num_attention_heads": heads, "num_key_value_heads": heads}


def _total(config: Mapping[str, Any]) -> int:
    """Of all tensors, without a list of them: each expert more is as much more."""
    one, two = (sum(tensor.size for tensor in tensors_of({**config, "n_routed_experts": n})) for n in (1, 2))
    return one + (config["n_routed_experts"] - 1) * (two - one)


def _noise(rng: random.Random) -> Mapping[str, bytes]:
    """Data type -> numbers of it."""
    no_nan = bytes(byte & ~1 if byte & 0x7F == 0x7F else byte for byte in range(256))
    finite = bytes(byte & 0xBF if byte & 0x7F == 0x7F else byte for byte in range(256))
    halves = bytearray(rng.randbytes(NOISE_BYTES))
    halves[1::2] = halves[1::2].translate(finite)
    scales = (struct.pack("<f", rng.uniform(1e-4, 4e-4)) for _ in range(NOISE_BYTES // 4))
    return {"F8_E4M3": rng.randbytes(NOISE_BYTES).translate(no_nan), "BF16": bytes(halves), "F32": b"".join(scales)}


def _write(path: Path, tensors: Iterable[Tensor], noise: Mapping[str, bytes] | None) -> None:
    ordered = sorted(tensors, key=lambda tensor: (-BYTES[tensor.dtype], tensor.name))  # as the safetensors library does
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        begin, end = end, end + tensor.size
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the library aligns the tensors so
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        if noise is None:
            file.truncate(file.tell() + end)
        else:
            for tensor in ordered:
                _fill(file, tensor.size, noise[tensor.dtype])
        file.flush()
        os.fsync(file.fileno())


def _fill(file: BinaryIO, size: int, noise: bytes) -> None:
    # The noise goes on from tensor to tensor, so that tensors differ. Its place is a multiple of a number's bytes.
    begin = file.tell() // 8 * 8 % len(noise)
    written = file.write(memoryview(noise)[begin : begin + size])
    while written < size:
        written += file.write(memoryview(noise)[: size - written])
