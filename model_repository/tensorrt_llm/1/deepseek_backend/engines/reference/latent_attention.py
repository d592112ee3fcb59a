"""Multi-head latent attention (MLA), as DeepSeek-V2 introduced it (arXiv 2405.04434).

A token's keys and values are made of one latent vector, which is all that the cache stores, with one rotary key that
all heads share. A prompt's keys and values are expanded. A decode leaves the latents as they are, and multiplies the
queries and the result by the matrix that would expand them: that matrix is absorbed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deepseek_backend.engines.reference.activations import rms_norm, softmax
from deepseek_backend.engines.reference.deepseek_config import DeepseekConfig
from deepseek_backend.engines.reference.rotary_embedding import Rotations, attention_scale
from deepseek_backend.engines.reference.tensor_files import TensorFiles

Array = npt.NDArray[np.float32]

_EPS = 1e-6
"""Epsilon of the two norms inside: the default in the published code, which gives them no rms_norm_eps."""
_QUERIES_AT_ONCE = 256
"""Tokens of a prompt whose scores exist at a time: those of 4,096 tokens and 8 heads would take 512 MB."""


class LatentAttention:
    """The attention of one layer. Activations have a column for each token."""

    def __init__(self, config: DeepseekConfig, tensors: TensorFiles, prefix: str, rotations: Rotations) -> None:
        self._heads, self._kv_rank, self._value = config.num_attention_heads, config.kv_lora_rank, config.v_head_dim
        self._nope, self._rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self._rotations = rotations
        hidden, query_width = config.hidden_size, self._heads * (self._nope + self._rope)
        kv_a = tensors.get(f"{prefix}.kv_a_proj_with_mqa.weight", self._kv_rank + self._rope, hidden)
        if config.q_lora_rank is None:
            first = tensors.get(f"{prefix}.q_proj.weight", query_width, hidden)
            first *= attention_scale(config)
            self._q_rank = query_width
        else:
            self._q_rank = config.q_lora_rank
            first = tensors.get(f"{prefix}.q_a_proj.weight", self._q_rank, hidden)
            self._q_norm = tensors.get(f"{prefix}.q_a_layernorm.weight", self._q_rank)
            self._q_b = tensors.get(f"{prefix}.q_b_proj.weight", query_width, self._q_rank)
            self._q_b *= attention_scale(config)
        self._has_q_b = config.q_lora_rank is not None
        self._query_and_latent = np.concatenate([first, kv_a])
        self._latent_norm = tensors.get(f"{prefix}.kv_a_layernorm.weight", self._kv_rank)
        kv_b_rows = self._heads * (self._nope + self._value)
        self._kv_b = tensors.get(f"{prefix}.kv_b_proj.weight", kv_b_rows, self._kv_rank)
        per_head = self._kv_b.reshape(self._heads, self._nope + self._value, self._kv_rank)
        self._keys, self._values = per_head[:, : self._nope], per_head[:, self._nope :]
        self._output = tensors.get(f"{prefix}.o_proj.weight", hidden, self._heads * self._value)

    def prefill(self, x: Array, cache: Array) -> Array:
        """Return the attention's output for a prompt `x` [hidden_size, n], and fill its `cache` [n, width]."""
        num_tokens = x.shape[1]
        query, states = self._project(x, self._rotations[:num_tokens])
        cache[:] = states
        expanded = self._kv_b @ states[:, : self._kv_rank].T
        keys, values = np.split(expanded.reshape(self._heads, -1, num_tokens), [self._nope], axis=1)
        rotary_keys = states[:, self._kv_rank :].T
        rotary_queries = self._rotated_queries(query, self._rotations[:num_tokens]).transpose(1, 0, 2)
        result = np.empty((self._heads, self._value, num_tokens), np.float32)
        for begin in range(0, num_tokens, _QUERIES_AT_ONCE):
            end = min(begin + _QUERIES_AT_ONCE, num_tokens)
            scores = query[:, : self._nope, begin:end].transpose(0, 2, 1) @ keys[:, :, :end]
            scores += rotary_queries[:, begin:end] @ rotary_keys[:, :end]
            later = np.triu_indices(end - begin, 1 + begin, end)
            scores[:, later[0], later[1]] = -np.inf
            softmax(scores)
            np.matmul(values[:, :, :end], scores.transpose(0, 2, 1), out=result[:, :, begin:end])
        return self._output @ result.reshape(-1, num_tokens)

    def decode(self, x: Array, cache: Array, positions: npt.NDArray[np.intp], lengths: Sequence[int]) -> Array:
        """Return the attention's output for one token of each row, `x` [hidden_size, n], and append it to the `cache`.

        :param cache: the layer's states, [max_num_seqs, capacity, width].
        :param positions: index of each row's token, [n].
        :param lengths: number of tokens of each row, with this one.
        """
        num_rows = x.shape[1]
        turns = self._rotations[positions]
        query, states = self._project(x, turns)
        cache[np.arange(num_rows), positions] = states
        absorbed = np.empty((num_rows, self._heads, cache.shape[-1]), np.float32)
        latent_queries = absorbed[:, :, : self._kv_rank].transpose(1, 0, 2)
        np.matmul(query[:, : self._nope].transpose(0, 2, 1), self._keys, out=latent_queries)
        absorbed[:, :, self._kv_rank :] = self._rotated_queries(query, turns)
        # The rows are as long as they are: a short one does not pay for a long one beside it.
        scores = np.full((num_rows, self._heads, max(lengths)), -np.inf, np.float32)
        for row, length in enumerate(lengths):
            np.matmul(absorbed[row], cache[row, :length].T, out=scores[row, :, :length])
        softmax(scores)
        latents = np.empty((num_rows, self._heads, self._kv_rank), np.float32)
        for row, length in enumerate(lengths):
            np.matmul(scores[row, :, :length], cache[row, :length, : self._kv_rank], out=latents[row])
        result = self._values @ latents.transpose(1, 2, 0)
        return self._output @ result.reshape(-1, num_rows)

    def _project(self, x: Array, turns: Rotations) -> tuple[Array, Array]:
        """Return the queries [heads, nope + rope, n], not rotated yet, and what the cache stores of each token."""
        both = self._query_and_latent @ x
        query, latent, rotary_key = np.split(both, [self._q_rank, self._q_rank + self._kv_rank])
        if self._has_q_b:
            query = self._q_b @ rms_norm(query, self._q_norm, _EPS)
        states = np.empty((x.shape[1], self._kv_rank + self._rope), np.float32)
        states[:, : self._kv_rank] = rms_norm(latent, self._latent_norm, _EPS).T
        states[:, self._kv_rank :] = rotary_key.T
        rotary = states[:, self._kv_rank :].view(np.complex64)
        rotary *= turns
        return query.reshape(self._heads, self._nope + self._rope, -1), states

    def _rotated_queries(self, query: Array, turns: Rotations) -> Array:
        """Return the rotary part of the queries, [n, heads, rope]."""
        rotary = np.ascontiguousarray(query[:, self._nope :].transpose(2, 0, 1))
        pairs = rotary.view(np.complex64)
        pairs *= turns[:, None]
        return rotary
