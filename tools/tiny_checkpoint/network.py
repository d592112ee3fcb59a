"""DeepSeek-V3's network for training: multi-head latent attention, routed experts and the layer that predicts ahead.

Weights and activations go through FP8 and back, as DeepSeek stores it: E4M3 values in blocks of 128 x 128 with one
float32 scale each. So rounding them at the end changes nothing.

The experts are computed as one wide MLP whose parts that a token did not choose are multiplied by zero: with eight
small experts that is faster than gathering, and the gradients are the same.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BLOCK = 128
LARGEST = 448.0
"""The largest number that E4M3 holds."""


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return E4M3 values of the shape of `weight` [rows, columns], and weight_scale_inv [row blocks, column blocks].

    A value times the scale of its block is the weight. The last block of rows may be smaller, as in
    kv_a_proj_with_mqa, whose 576 rows end with half a block.
    """
    rows, columns = weight.shape
    blocks = _blocks(weight)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=1e-12) / LARGEST
    values = (blocks / scale).to(torch.float8_e4m3fn).reshape(-1, blocks.shape[2] * BLOCK)[:rows, :columns]
    return values.contiguous(), scale[:, 0, :, 0].contiguous()


def rounded_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` [rows, columns] as it comes back from FP8; gradients pass as if it were unchanged."""
    with torch.no_grad():
        rows, columns = weight.shape
        blocks = _blocks(weight)
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=1e-12) / LARGEST
        back = (blocks / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale
        difference = back.reshape(-1, blocks.shape[2] * BLOCK)[:rows, :columns] - weight
    return weight + difference


def rounded_activation(states: torch.Tensor) -> torch.Tensor:
    """Return `states` [..., width] as they come back from FP8 in groups of 128, the dynamic scheme of the engines."""
    with torch.no_grad():
        groups = states.float().unflatten(-1, (-1, BLOCK))
        scale = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-6) / LARGEST
        back = (groups / scale).to(torch.float8_e4m3fn).float() * scale
        difference = back.flatten(-2).to(states.dtype) - states
    return states + difference


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` as [row blocks, 128, column blocks, 128], padded with zeros."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))


class Linear(nn.Module):
    """A linear layer without bias that computes with what FP8 leaves of its weight [out, in] and its input."""

    def __init__(self, columns: int, rows: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) * gain * columns**-0.5)
        self.rounded = True

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if not self.rounded:
            return F.linear(states, self.weight)
        return F.linear(rounded_activation(states), rounded_weight(self.weight))


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        wide = states.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, config: dict[str, Any], residual_gain: float) -> None:
        super().__init__()
        hidden, heads, eps = config["hidden_size"], config["num_attention_heads"], config["rms_norm_eps"]
        self.heads, self.nope, self.rope = heads, config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        self.value, self.latent = config["v_head_dim"], config["kv_lora_rank"]
        self.q_a_proj = Linear(hidden, config["q_lora_rank"])
        self.q_a_layernorm = RMSNorm(config["q_lora_rank"], eps)
        self.q_b_proj = Linear(config["q_lora_rank"], heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = Linear(hidden, self.latent + self.rope)
        self.kv_a_layernorm = RMSNorm(self.latent, eps)
        self.kv_b_proj = Linear(self.latent, heads * (self.nope + self.value))
        self.o_proj = Linear(heads * self.value, hidden, residual_gain)
        self.scale = (self.nope + self.rope) ** -0.5 * _mscale(config["rope_scaling"]) ** 2

    def forward(self, states: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Attend. `states` is [rows, tokens, hidden], `angles` [tokens, rope / 2], `mask` [rows, 1, tokens, tokens]."""
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(states))).unflatten(-1, (self.heads, -1))
        latent, key_rope = self.kv_a_proj_with_mqa(states).split([self.latent, self.rope], -1)
        both = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        key_nope, value = both.split([self.nope, self.value], -1)
        query_nope, query_rope = query.split([self.nope, self.rope], -1)
        query = torch.cat([query_nope, _rotate(query_rope, angles)], -1)
        key_rope = _rotate(key_rope[:, :, None], angles).expand(-1, -1, self.heads, -1)
        key = torch.cat([key_nope, key_rope], -1)
        # The fused kernels want one width for all three, so the values are padded to that of the keys.
        value = F.pad(value, (0, self.rope))
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask, scale=self.scale
        )
        output: torch.Tensor = self.o_proj(mixed.transpose(1, 2)[..., : self.value].flatten(-2))
        return output


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int, residual_gain: float) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, width)
        self.up_proj = Linear(hidden, width)
        self.down_proj = Linear(width, hidden, residual_gain)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))
        return output


class Experts(nn.Module):
    """Routed and shared experts. The routed ones lie in one matrix each, expert after expert."""

    def __init__(self, config: dict[str, Any], residual_gain: float) -> None:
        super().__init__()
        hidden, width, count = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
        self.count, self.width = count, width
        self.groups, self.chosen_groups = config["n_group"], config["topk_group"]
        self.chosen, self.factor = config["num_experts_per_tok"], config["routed_scaling_factor"]
        self.gate = nn.Parameter(torch.randn(count, hidden) * hidden**-0.5)
        self.gate_proj = Linear(hidden, count * width)
        self.up_proj = Linear(hidden, count * width)
        self.down_proj = nn.Parameter(torch.randn(count, hidden, width) * residual_gain * width**-0.5)
        self.shared_experts = MLP(hidden, width * config["n_shared_experts"], residual_gain)
        self.bias: torch.Tensor
        self.load: torch.Tensor
        self.register_buffer("bias", torch.zeros(count))
        self.register_buffer("load", torch.zeros(count))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        weights = self.routing_weights(states)
        parts = (F.silu(self.gate_proj(states)) * self.up_proj(states)).unflatten(-1, (self.count, self.width))
        down = rounded_weight(self.down_proj.flatten(0, 1)).unflatten(0, (self.count, -1))
        parts = rounded_activation(parts) * weights[..., None].to(parts.dtype)
        output: torch.Tensor = F.linear(parts.flatten(-2), down.transpose(0, 1).flatten(1)) + self.shared_experts(
            states
        )
        return output

    def routing_weights(self, states: torch.Tensor) -> torch.Tensor:
        """Return the weight of each expert [..., experts] float32, 0 for those that a token does not choose."""
        with torch.autocast(states.device.type, enabled=False):
            scores = F.linear(states.float(), self.gate).sigmoid()
        with torch.no_grad():
            choice = scores + self.bias
            groups = choice.unflatten(-1, (self.groups, -1))
            best = groups.topk(2, -1).values.sum(-1).topk(self.chosen_groups, -1).indices
            open_groups = torch.zeros_like(groups[..., 0]).scatter(-1, best, 1.0)
            choice = torch.where(open_groups[..., None] > 0, groups, -1.0).flatten(-2)
            chosen = torch.zeros_like(scores).scatter(-1, choice.topk(self.chosen, -1).indices, 1.0)
            if self.training:
                self.load += chosen.flatten(0, -2).sum(0)
        kept = scores * chosen
        return kept / (kept.sum(-1, keepdim=True) + 1e-20) * self.factor

    @torch.no_grad()
    def balance(self, step_size: float) -> None:
        """Raise the bias of experts that had less than their share since the last call, lower that of the others.

        The smallest bias is kept at 0. Only differences matter, and a sum that is never negative is treated alike by
        engines that hide a closed group behind 0 and those that hide it behind minus infinity.
        """
        self.bias += step_size * torch.sign(self.load.mean() - self.load)
        self.bias -= self.bias.min()
        self.load.zero_()


class DecoderLayer(nn.Module):
    def __init__(self, config: dict[str, Any], *, is_dense: bool) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        residual_gain = (2 * config["num_hidden_layers"]) ** -0.5
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(config, residual_gain)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp: nn.Module
        if is_dense:
            self.mlp = MLP(hidden, config["intermediate_size"], residual_gain)
        else:
            self.mlp = Experts(config, residual_gain)

    def forward(self, states: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        states = states + self.self_attn(self.input_layernorm(states), angles, mask)
        output: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output


class Network(nn.Module):
    """The whole model, with its multi-token-prediction layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps, vocab_size = config["hidden_size"], config["rms_norm_eps"], config["vocab_size"]
        self.config = config
        self.embed_tokens = nn.Embedding(vocab_size, hidden)
        nn.init.normal_(self.embed_tokens.weight, std=hidden**-0.5)
        self.layers = nn.ModuleList(
            DecoderLayer(config, is_dense=layer < config["first_k_dense_replace"])
            for layer in range(config["num_hidden_layers"])
        )
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, vocab_size, bias=False)
        nn.init.normal_(self.lm_head.weight, std=hidden**-0.5)
        self.enorm, self.hnorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.next_layer = DecoderLayer(config, is_dense=False)
        self.next_norm = RMSNorm(hidden, eps)

    def forward(self, token_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the normed states [rows, tokens, hidden] of `token_ids` [rows, tokens]."""
        angles = rotary_angles(self.config, token_ids.shape[1], token_ids.device)
        states = self.embed_tokens(token_ids)
        for layer in self.layers:
            states = layer(states, angles, mask)
        output: torch.Tensor = self.norm(states)
        return output

    def predict_ahead(self, states: torch.Tensor, next_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return normed states [rows, tokens, hidden] from which lm_head tells the token after `next_ids`.

        :param states: what `forward` has returned.
        :param next_ids: the token after each position, [rows, tokens].
        """
        angles = rotary_angles(self.config, next_ids.shape[1], next_ids.device)
        joined = torch.cat([self.enorm(self.embed_tokens(next_ids)), self.hnorm(states)], -1)
        output: torch.Tensor = self.next_norm(self.next_layer(self.eh_proj(joined), angles, mask))
        return output

    def experts(self) -> Iterator[Experts]:
        for module in self.modules():
            if isinstance(module, Experts):
                yield module

    def round_to_fp8(self, *, is_on: bool) -> None:
        """Choose whether weights and activations go through FP8."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.rounded = is_on


def causal_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """Return the mask [rows, 1, tokens, tokens] bool in which a token sees its own document up to itself.

    :param document_ids: number of the document of each token, [rows, tokens].
    """
    length = document_ids.shape[1]
    same = document_ids[:, :, None] == document_ids[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    return (same & causal)[:, None]


def rotary_angles(config: dict[str, Any], length: int, device: torch.device) -> torch.Tensor:
    """Return the angle of each pair at each position, [length, rope / 2] float32, stretched by YaRN."""
    width, theta, scaling = config["qk_rope_head_dim"], config["rope_theta"], config["rope_scaling"]
    pairs = torch.arange(0, width, 2, dtype=torch.float32, device=device)
    frequency = theta ** -(pairs / width)

    def pair_that_turns(turns: float) -> float:
        """Return the pair, a fraction, that makes so many turns over the original context."""
        context = scaling["original_max_position_embeddings"]
        return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(scaling["beta_fast"])), 0)
    high = min(math.ceil(pair_that_turns(scaling["beta_slow"])), width - 1)
    stretched = ((pairs / 2 - low) / max(high - low, 0.001)).clamp(0, 1)
    frequency = frequency / scaling["factor"] * stretched + frequency * (1 - stretched)
    return torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequency


def _mscale(scaling: dict[str, Any]) -> float:
    return 0.1 * float(scaling["mscale_all_dim"]) * math.log(scaling["factor"]) + 1.0


def _rotate(states: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn neighbouring pairs of `states` [rows, tokens, heads, width] by `angles` [tokens, width / 2]."""
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
    even, odd = states.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cosine - odd * sine, odd * cosine + even * sine], -1).flatten(-2)
    return turned.to(states.dtype)
