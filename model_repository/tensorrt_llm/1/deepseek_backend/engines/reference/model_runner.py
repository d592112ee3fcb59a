"""Runs forward passes over the cache of a batch: a prompt joins, every row gets its next token, a row leaves.

Rows lie in slots 0..n-1 of the cache without gaps. Each has its own length. The runner knows token ids, hidden states
and logits, but no requests. One thread at a time may use it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deepseek_backend.engines.reference.deepseek_model import Attend, DeepseekModel, LatentAttention

Array = npt.NDArray[np.float32]

_FIRST_CAPACITY = 256
"""Tokens of a slot at first. It doubles as rows grow, so that a demo does not take the memory of a full context."""


class LatentCache:
    """The cache of up to `max_num_seqs` rows; `lengths[i]` is the number of tokens of row i."""

    def __init__(self, num_layers: int, max_num_seqs: int, width: int) -> None:
        self.lengths: list[int] = []
        # The system gives memory to the parts that are written, and to no others.
        self._states = np.zeros((num_layers, max_num_seqs, _FIRST_CAPACITY, width), np.float32)

    def layer(self, index: int) -> Array:
        """Return the states of one layer, [max_num_seqs, capacity, width], until the next `add` or `append`."""
        states: Array = self._states[index]
        return states

    def add(self, num_tokens: int) -> int:
        """Make room for a prompt; return its row, the last one."""
        self.lengths.append(num_tokens)
        self._reserve(num_tokens)
        return len(self.lengths) - 1

    def append(self) -> npt.NDArray[np.intp]:
        """Make room for one token in each row; return its index in each row, [n]."""
        positions = np.array(self.lengths, np.intp)
        self.lengths = [length + 1 for length in self.lengths]
        self._reserve(max(self.lengths))
        return positions

    def remove(self, row: int) -> None:
        """Remove a row; the last row takes its index."""
        length = self.lengths.pop()
        last = len(self.lengths)
        if row != last:
            self._states[:, row, :length] = self._states[:, last, :length]
            self.lengths[row] = length

    def _reserve(self, num_tokens: int) -> None:
        num_layers, max_num_seqs, capacity, width = self._states.shape
        if num_tokens <= capacity:
            return
        filled = capacity
        while capacity < num_tokens:
            capacity *= 2
        grown = np.zeros((num_layers, max_num_seqs, capacity, width), np.float32)
        grown[:, : len(self.lengths), :filled] = self._states[:, : len(self.lengths), :filled]
        self._states = grown


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
