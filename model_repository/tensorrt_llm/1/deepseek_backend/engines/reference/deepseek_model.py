"""The DeepSeek-V3 forward pass in numpy: its weights as float32, its layers, and its head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from deepseek_backend.engines.reference.activations import rms_norm
from deepseek_backend.engines.reference.deepseek_config import DeepseekConfig
from deepseek_backend.engines.reference.feed_forward import GatedMlp, MixtureOfExperts
from deepseek_backend.engines.reference.latent_attention import LatentAttention
from deepseek_backend.engines.reference.rotary_embedding import Rotations, rotations
from deepseek_backend.engines.reference.tensor_files import TensorFiles

Array = npt.NDArray[np.float32]
Attend = Callable[[int, LatentAttention, Array], Array]
"""Computes the attention of a layer, as a prefill or a decode: (index of the layer, its attention, its input)."""


class _Layer:
    def __init__(self, config: DeepseekConfig, tensors: TensorFiles, index: int, turns: Rotations) -> None:
        prefix = f"model.layers.{index}"
        hidden = config.hidden_size
        self.attention_norm = tensors.get(f"{prefix}.input_layernorm.weight", hidden)
        self.attention = LatentAttention(config, tensors, f"{prefix}.self_attn", turns)
        self.mlp_norm = tensors.get(f"{prefix}.post_attention_layernorm.weight", hidden)
        self.mlp: GatedMlp | MixtureOfExperts
        if index < config.first_k_dense_replace:
            self.mlp = GatedMlp(tensors, f"{prefix}.mlp", hidden, config.intermediate_size)
        else:
            self.mlp = MixtureOfExperts(config, tensors, f"{prefix}.mlp")


class DeepseekModel:
    """A loaded model without a cache. Inside, activations have a column for each token."""

    def __init__(self, config: DeepseekConfig, tensors: TensorFiles) -> None:
        """Load the weights. The layers for multi-token prediction, which follow the others, are left out.

        :raises EngineError: when a tensor is missing or has another shape.
        """
        self.config = config
        table = (config.vocab_size, config.hidden_size)
        self._embedding = tensors.get("model.embed_tokens.weight", *table)
        turns = rotations(config)
        self._layers = [_Layer(config, tensors, index, turns) for index in range(config.num_hidden_layers)]
        self._norm = tensors.get("model.norm.weight", config.hidden_size)
        self._head = self._embedding if config.tie_word_embeddings else tensors.get("lm_head.weight", *table)

    def hidden_states(self, token_ids: Sequence[int], attend: Attend) -> Array:
        """Return the states [len(token_ids), hidden_size] after the last layer and its norm."""
        eps = self.config.rms_norm_eps
        x = np.ascontiguousarray(self._embedding[list(token_ids)].T)
        for index, layer in enumerate(self._layers):
            x += attend(index, layer.attention, rms_norm(x, layer.attention_norm, eps))
            x += layer.mlp(rms_norm(x, layer.mlp_norm, eps))
        return rms_norm(x, self._norm, eps).T

    def logits(self, hidden: Array) -> Array:
        """Return the logits [n, vocab_size] of `hidden` [n, hidden_size]."""
        return np.ascontiguousarray((self._head @ hidden.T).T)
