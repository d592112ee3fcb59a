"""Runs forward passes over the cache of a batch: a prompt joins, every row gets its next token, a row leaves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deepseek_backend.engines.reference.deepseek_model import Attend, DeepseekModel, LatentAttention

Array = npt.NDArray[np.float32]

_FIRST_CAPACITY = 256
"""Tokens of a row at first. It doubles as rows grow, so that a demo does not take the memory of a full context."""


class ModelRunner:
    """A model, and the cache of its rows 0..n-1, which has the latent and the rotary key of each token and layer.

    It knows token ids, hidden states and logits, but no requests. One thread at a time may use it.
    """

    def __init__(self, model: DeepseekModel, max_num_seqs: int) -> None:
        self._model = model
        self.lengths: list[int] = []
        """Number of tokens of each row in the cache."""
        config = model.config
        width = config.kv_lora_rank + config.qk_rope_head_dim
        # The system gives memory to the parts that are written, and to no others.
        self._states = np.zeros((config.num_hidden_layers, max_num_seqs, _FIRST_CAPACITY, width), np.float32)

    def prefill(self, token_ids: Sequence[int]) -> Array:
        """Add a row with a prompt; return the hidden states [len(token_ids), hidden_size] after its tokens."""
        row = len(self.lengths)
        self.lengths.append(len(token_ids))
        self._reserve(len(token_ids))

        def attend(index: int, attention: LatentAttention, x: Array) -> Array:
            return attention.prefill(x, self._states[index, row, : len(token_ids)])

        return self._forward(token_ids, attend)

    def decode(self, token_ids: Sequence[int]) -> Array:
        """Append one token to each row; return the hidden states [n, hidden_size] after these tokens."""
        positions = np.array(self.lengths, np.intp)
        self.lengths = [length + 1 for length in self.lengths]
        self._reserve(max(self.lengths))

        def attend(index: int, attention: LatentAttention, x: Array) -> Array:
            return attention.decode(x, self._states[index], positions, self.lengths)

        return self._forward(token_ids, attend)

    def logits(self, hidden: Array) -> Array:
        """Return the logits [n, vocab_size] of `hidden` [n, hidden_size]; they are large for many states."""
        return self._model.logits(hidden)

    def remove(self, row: int) -> None:
        """Remove a row; the last row takes its index."""
        length = self.lengths.pop()
        last = len(self.lengths)
        if row != last:
            self._states[:, row, :length] = self._states[:, last, :length]
            self.lengths[row] = length

    def _forward(self, token_ids: Sequence[int], attend: Attend) -> Array:
        with np.errstate(over="ignore"):  # `swiglu` says why
            return self._model.hidden_states(token_ids, attend)

    def _reserve(self, num_tokens: int) -> None:
        num_layers, max_num_seqs, filled, width = self._states.shape
        if num_tokens <= filled:
            return
        capacity = filled
        while capacity < num_tokens:
            capacity *= 2
        grown = np.zeros((num_layers, max_num_seqs, capacity, width), np.float32)
        grown[:, : len(self.lengths), :filled] = self._states[:, : len(self.lengths), :filled]
        self._states = grown
