"""Runs forward passes: a prompt joins the batch, every row gets its next token, a row leaves.

The runner knows token ids, hidden states and logits, but no requests. One thread at a time may use it.

Speed on the tiny checkpoint, in generated tokens/s at batch 1 / 8 / 32: one thread of a shared machine, 16 tokens in
and 128 out, greedy, best of three, transformers 5.23. The whole engine, text included, against generate() on a static
batch:

    experts       engine               generate()
    grouped_mm    513 / 2,287 / 3,786  463 / 1,924 / 3,445
    eager         538 / 2,266 / 3,678  449 / 1,727 / 3,263
    batched_mm    461 /   977 / 1,134  391 /   822 /   880

grouped_mm is transformers' default and stays. Requests that sample (temperature, top_p): 497 / 1,672 / 2,711.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepseek_backend.engines.reference.slot_cache import SlotCache


class ModelRunner:
    """A causal language model of transformers, and the cache of its rows."""

    def __init__(self, model: Any, max_num_seqs: int) -> None:
        self._model = model
        self._device: torch.device = model.device
        self._cache = SlotCache(model.config.num_hidden_layers, max_num_seqs)

    @property
    def lengths(self) -> Sequence[int]:
        """Number of tokens in the cache, for each row."""
        return self._cache.lengths

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Add a row with a prompt; return the hidden states [len(token_ids), hidden_size] after its tokens."""
        self._cache.begin_prefill(len(token_ids))
        return self._forward(torch.tensor([token_ids], device=self._device))[0]

    @torch.inference_mode()
    def decode(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Append one token to each row; return the hidden states [n, hidden_size] after these tokens."""
        position_ids, mask = self._cache.begin_decode(self._device)
        input_ids = torch.tensor(token_ids, device=self._device)[:, None]
        return self._forward(input_ids, position_ids=position_ids, attention_mask=mask)[:, 0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, vocab_size] float32 of `hidden` [n, hidden_size]; they are large for many states."""
        logits: torch.Tensor = self._model.lm_head(hidden).float()
        return logits

    @torch.inference_mode()
    def remove(self, row: int) -> None:
        """Remove a row; the last row takes its index."""
        self._cache.remove(row)

    def _forward(self, input_ids: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [rows, tokens, hidden_size] of the model without its head."""
        output = self._model.model(input_ids=input_ids, past_key_values=self._cache, use_cache=True, **inputs)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden
