"""The cache of a batch whose rows join and leave: for each token and layer its latent and its rotary key.

Rows lie in slots 0..n-1 without gaps. Each has its own length.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
