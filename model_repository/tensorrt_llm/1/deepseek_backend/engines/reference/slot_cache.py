"""The KV cache of a batch whose rows join and leave: one slot for each row, with transformers' Cache interface.

Rows lie in slots 0..n-1 without gaps, padded on the right. Each row writes at its own length, and the mask hides
everything behind it. The cache stores whatever the model's attention gives it, so that the model decides on the shapes.
For MLA in transformers 5.23 these are the latent [1, kv_lora_rank] and the rotary key [1, qk_rope_head_dim] of each
token, and for V3.2 also the keys of the indexer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_FIRST_CAPACITY = 256
"""Tokens of a slot at first. It doubles as rows grow, so that a demo does not take the memory of a full context."""


@dataclass
class _Pass:
    """The current forward pass, as one object that all layers share.

    A prefill has a `slot`, and fills it from the start. A decode has `positions` [n], and writes a token to each row.
    """

    slot: int | None = None
    positions: torch.Tensor | None = None
    num_tokens: int = 0
    """Length of the longest row after this pass."""


class _SlotTensor:
    """One tensor of one layer, [max_num_seqs, ..., capacity, width], made when its shape is first known."""

    def __init__(self, max_num_seqs: int, current: _Pass) -> None:
        self._max_num_seqs = max_num_seqs
        self._current = current
        self._buffer: torch.Tensor | None = None

    def update(self, states: torch.Tensor) -> torch.Tensor:
        """Store `states` [n, ..., tokens, width]; return all states of this pass's rows, with padding."""
        buffer = self._reserve(states)
        num_tokens = self._current.num_tokens
        if self._current.slot is not None:
            buffer[self._current.slot, ..., :num_tokens, :] = states[0]
            return states  # a prefill attends only to itself
        num_rows = states.shape[0]
        rows = torch.arange(num_rows, device=states.device)
        buffer.movedim(-2, 1)[rows, self._current.positions] = states.squeeze(-2)
        return buffer[:num_rows, ..., :num_tokens, :]

    def move(self, source: int, destination: int, num_tokens: int) -> None:
        if self._buffer is not None:
            self._buffer[destination, ..., :num_tokens, :] = self._buffer[source, ..., :num_tokens, :]

    def _reserve(self, states: torch.Tensor) -> torch.Tensor:
        capacity = 0 if self._buffer is None else self._buffer.shape[-2]
        if self._buffer is not None and self._current.num_tokens <= capacity:
            return self._buffer
        capacity = max(capacity, _FIRST_CAPACITY)
        while capacity < self._current.num_tokens:
            capacity *= 2
        # Zeros, because hidden values are multiplied by 0, and 0 times a NaN of uninitialised memory is a NaN.
        grown = states.new_zeros(self._max_num_seqs, *states.shape[1:-2], capacity, states.shape[-1])
        if self._buffer is not None:
            grown[..., : self._buffer.shape[-2], :] = self._buffer
        self._buffer = grown
        return grown


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # its __init_subclass__ has no annotations
    """The tensors of one layer. transformers' attention modules prescribe the names and arguments."""

    supports_early_init = False

    def __init__(self, max_num_seqs: int, current: _Pass) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors = [_SlotTensor(max_num_seqs, current) for _ in range(3)]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tensors[0].update(key_states), self.tensors[1].update(value_states)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        return self.tensors[2].update(indexer_key_states)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: each tensor is made at its first update."""

    # transformers calls these to make the mask of a prefill. A decode brings its own mask.

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """The cache of up to `max_num_seqs` rows; `lengths[i]` is the number of tokens of row i."""

    def __init__(self, num_layers: int, max_num_seqs: int) -> None:
        self._current = _Pass()
        self._slot_layers = [_SlotLayer(max_num_seqs, self._current) for _ in range(num_layers)]
        super().__init__(layers=list(self._slot_layers))
        self.lengths: list[int] = []

    def begin_prefill(self, num_tokens: int) -> None:
        """Prepare for a forward pass over a prompt of `num_tokens`, which becomes the last row."""
        self._current.slot = len(self.lengths)
        self._current.num_tokens = num_tokens
        self.lengths.append(num_tokens)

    def begin_decode(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepare for a forward pass over one token of each row.

        :returns: position_ids [n, 1] int64, and the attention mask [n, 1, 1, longest row] bool, True where to attend.
        """
        positions = torch.tensor(self.lengths, device=device)
        self.lengths = [length + 1 for length in self.lengths]
        self._current.slot = None
        self._current.positions = positions
        self._current.num_tokens = max(self.lengths)
        mask = torch.arange(self._current.num_tokens, device=device) <= positions[:, None]
        return positions[:, None], mask[:, None, None, :]

    def remove(self, row: int) -> None:
        """Remove a row; the last row takes its index."""
        last = len(self.lengths) - 1
        if row != last:
            for layer in self._slot_layers:
                for tensor in layer.tensors:
                    tensor.move(last, row, self.lengths[last])
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()
