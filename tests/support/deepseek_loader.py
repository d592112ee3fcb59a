"""What TensorRT-LLM's loader of DeepSeek-V3 reads from an FP8 checkpoint, and the shares that it makes for the ranks.

Written down from NVIDIA/TensorRT-LLM tensorrt_llm/_torch/models/modeling_deepseekv3.py@000561df (load_weights of
DeepseekV3ForCausalLM, DeepseekV3MTP, _compute_mlp_tp_size, _compute_shared_expert_tp_size) and
tensorrt_llm/_torch/modules/linear.py@00bbf71e (load_weight_shard).
"""

import json
import math
import struct

BLOCK = 128


def tensors_in(path):
    """Return the tensors of a safetensors file, by its header."""
    with path.open("rb") as file:
        [length] = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}


def published_tensors(a):
    """Return the tensors of a checkpoint as DeepSeek publishes it, with its MTP layers behind the others."""
    found = dict(_whole("model.embed_tokens.weight", a.vocab_size, a.hidden_size))
    found |= dict(_whole("model.norm.weight", a.hidden_size))
    found |= dict(_whole("lm_head.weight", a.vocab_size, a.hidden_size))
    for index in range(a.num_layers + a.num_mtp_layers):
        found |= dict(_layer(a, f"model.layers.{index}", is_dense=index < a.num_dense_layers))
    for index in range(a.num_layers, a.num_layers + a.num_mtp_layers):
        layer = f"model.layers.{index}"
        found |= dict(_whole(f"{layer}.eh_proj.weight", a.hidden_size, 2 * a.hidden_size))
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            found |= dict(_whole(f"{layer}.{norm}.weight", a.hidden_size))
        for name in ("embed_tokens", "shared_head.head"):  # the loader takes the model's own in their place
            found |= dict(_whole(f"{layer}.{name}.weight", a.vocab_size, a.hidden_size))
    return found


def _layer(a, layer, *, is_dense):
    attention = f"{layer}.self_attn"
    yield from _blocks(f"{attention}.q_a_proj", a.q_lora_rank, a.hidden_size)
    yield from _blocks(f"{attention}.q_b_proj", a.num_heads * (a.qk_nope_head_dim + a.qk_rope_head_dim), a.q_lora_rank)
    yield from _blocks(f"{attention}.kv_a_proj_with_mqa", a.kv_lora_rank + a.qk_rope_head_dim, a.hidden_size)
    yield from _blocks(f"{attention}.kv_b_proj", a.num_heads * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank)
    yield from _blocks(f"{attention}.o_proj", a.hidden_size, a.num_heads * a.v_head_dim)
    yield from _whole(f"{attention}.q_a_layernorm.weight", a.q_lora_rank)
    yield from _whole(f"{attention}.kv_a_layernorm.weight", a.kv_lora_rank)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield from _whole(f"{layer}.{norm}.weight", a.hidden_size)
    if is_dense:
        yield from _mlp(f"{layer}.mlp", a.intermediate_size, a.hidden_size)
        return
    yield from _whole(f"{layer}.mlp.gate.weight", a.num_routed_experts, a.hidden_size)
    yield f"{layer}.mlp.gate.e_score_correction_bias", ("F32", (a.num_routed_experts,))
    yield from _mlp(f"{layer}.mlp.shared_experts", a.num_shared_experts * a.moe_intermediate_size, a.hidden_size)
    for expert in range(a.num_routed_experts):
        yield from _mlp(f"{layer}.mlp.experts.{expert}", a.moe_intermediate_size, a.hidden_size)


def _mlp(name, width, hidden):
    yield from _blocks(f"{name}.gate_proj", width, hidden)
    yield from _blocks(f"{name}.up_proj", width, hidden)
    yield from _blocks(f"{name}.down_proj", hidden, width)


def _whole(name, *shape):
    yield name, ("BF16", shape)


def _blocks(name, rows, columns):
    yield f"{name}.weight", ("F8_E4M3", (rows, columns))
    yield f"{name}.weight_scale_inv", ("F32", (math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)))


def problems(tensors, a, *, tensor_parallel_size, attention_dp):
    """Return which tensors the loader can't give every rank a right share of; none where all is well.

    The experts are divided by expert parallelism over all ranks.
    """
    attention_tp = 1 if attention_dp else tensor_parallel_size
    found = []
    for index in range(a.num_layers + a.num_mtp_layers):
        layer = f"model.layers.{index}"
        found += _attention_problems(tensors, a, f"{layer}.self_attn", attention_tp)
        if index < a.num_dense_layers:
            found += _mlp_problems(tensors, f"{layer}.mlp", attention_tp)
        else:
            found += _mlp_problems(tensors, f"{layer}.mlp.shared_experts", attention_tp)
            if a.num_routed_experts % tensor_parallel_size:
                found.append(f"{layer}: {a.num_routed_experts} experts on {tensor_parallel_size} ranks")
        if index >= a.num_layers and tensors[f"{layer}.eh_proj.weight"][1][1] % attention_tp:
            found.append(f"{layer}.eh_proj: columns")  # it is split by torch.chunk
    return found


def _attention_problems(tensors, a, name, tp):
    if a.num_heads % tp:
        yield f"{name}: {a.num_heads} heads on {tp} ranks"
        return
    yield from _share_problems(tensors, f"{name}.q_b_proj", dim=0, ranks=tp)
    yield from _share_problems(tensors, f"{name}.o_proj", dim=1, ranks=tp)
    # kv_b_proj and its scales are cut into heads, and each head into keys and values.
    rows, columns = tensors[f"{name}.kv_b_proj.weight_scale_inv"][1]
    if (
        rows != a.num_heads * (a.qk_nope_head_dim // BLOCK + a.v_head_dim // BLOCK)
        or columns != a.kv_lora_rank // BLOCK
    ):
        yield f"{name}.kv_b_proj: scales of whole heads"
    # q_a_proj and kv_a_proj_with_mqa become one weight: the blocks of the second begin where those of the first end.
    parts = [tensors[f"{name}.{part}.weight"][1][0] for part in ("q_a_proj", "kv_a_proj_with_mqa")]
    scales = [tensors[f"{name}.{part}.weight_scale_inv"][1][0] for part in ("q_a_proj", "kv_a_proj_with_mqa")]
    if parts[0] % BLOCK or sum(scales) != math.ceil(sum(parts) / BLOCK):
        yield f"{name}: q_a_proj and kv_a_proj_with_mqa as one weight"


def _mlp_problems(tensors, name, tp):
    width = tensors[f"{name}.gate_proj.weight"][1][0]
    if width % BLOCK:
        yield f"{name}: {width} is no whole number of blocks"
        return
    ranks = math.gcd(width // BLOCK, tp)
    for part, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        yield from _share_problems(tensors, f"{name}.{part}", dim=dim, ranks=ranks)


def _share_problems(tensors, name, *, dim, ranks):
    """Values and scales are divided each for themselves, rounded up; a rank has scales for its own values."""
    values, scales = (tensors[f"{name}.{part}"][1][dim] for part in ("weight", "weight_scale_inv"))
    share = math.ceil(values / ranks)
    if values % ranks or share % BLOCK or math.ceil(scales / ranks) != math.ceil(share / BLOCK):
        yield f"{name}: {values} values and {scales} scales on {ranks} ranks"
