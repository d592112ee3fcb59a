"""Runs forward passes: a prompt joins the batch, every row gets its next token, a row leaves.

The runner knows token ids, hidden states and logits, but no requests. One thread at a time may use it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deepseek_backend.engines.reference.deepseek_model import Attend, DeepseekModel
from deepseek_backend.engines.reference.latent_attention import LatentAttention
from deepseek_backend.engines.reference.latent_cache import LatentCache

Array = npt.NDArray[np.float32]


class ModelRunner:
    """A model, and the cache of its rows."""

    def __init__(self, model: DeepseekModel, max_num_seqs: int) -> None:
        self._model = model
        config = model.config
        width = config.kv_lora_rank + config.qk_rope_head_dim
        self._cache = LatentCache(config.num_hidden_layers, max_num_seqs, width)

    @property
    def lengths(self) -> Sequence[int]:
        """Number of tokens in the cache, for each row."""
        return self._cache.lengths

    def prefill(self, token_ids: Sequence[int]) -> Array:
        """Add a row with a prompt; return the hidden states [len(token_ids), hidden_size] after its tokens."""
        row = self._cache.add(len(token_ids))

        def attend(index: int, attention: LatentAttention, x: Array) -> Array:
            return attention.prefill(x, self._cache.layer(index)[row, : len(token_ids)])

        return self._forward(token_ids, attend)

    def decode(self, token_ids: Sequence[int]) -> Array:
        """Append one token to each row; return the hidden states [n, hidden_size] after these tokens."""
        positions = self._cache.append()

        def attend(index: int, attention: LatentAttention, x: Array) -> Array:
            return attention.decode(x, self._cache.layer(index), positions, self._cache.lengths)

        return self._forward(token_ids, attend)

    def logits(self, hidden: Array) -> Array:
        """Return the logits [n, vocab_size] of `hidden` [n, hidden_size]; they are large for many states."""
        return self._model.logits(hidden)

    def remove(self, row: int) -> None:
        """Remove a row; the last row takes its index."""
        self._cache.remove(row)

    def _forward(self, token_ids: Sequence[int], attend: Attend) -> Array:
        with np.errstate(over="ignore"):  # activations.swiglu says why
            return self._model.hidden_states(token_ids, attend)
