"""Collects the numbers for EngineStats from TensorRT-LLM's iteration statistics (LLM.get_stats_async)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class IterationStats:
    """Numbers of the latest iteration, and sums over all iterations; all zero before the first."""

    num_queued: int = 0
    """Number of requests that the engine holds and has not scheduled."""
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    tokens_per_block: int = 0
    num_draft_tokens: int = 0
    """Sum over all iterations."""
    num_accepted_draft_tokens: int = 0
    """Sum over all iterations."""
    worked_at_s: float = 0.0
    """Time at which an iteration with requests was last reported, by time.monotonic()."""
    extra: dict[str, float] = field(default_factory=dict)

    def add(self, row: Mapping[str, Any] | str | bytes) -> None:
        """Add one iteration, as a mapping or its JSON. Sections may be missing or null."""
        values = row if isinstance(row, Mapping) else json.loads(row)
        cache = values.get("kvCacheStats") or {}
        drafts = values.get("specDecodingStats") or {}
        if _whole(values, "numActiveRequests"):
            self.worked_at_s = time.monotonic()
        self.num_queued = _whole(values, "numQueuedRequests")
        self.kv_blocks_used = _whole(cache, "usedNumBlocks")
        self.kv_blocks_total = _whole(cache, "maxNumBlocks")
        self.tokens_per_block = _whole(cache, "tokensPerBlock")
        self.num_draft_tokens += _whole(drafts, "numDraftTokens")
        self.num_accepted_draft_tokens += _whole(drafts, "numAcceptedTokens")
        self.extra = {
            "iteration_ms": float(values.get("iterLatencyMS") or 0.0),
            "kv_blocks_reused": float(cache.get("reusedBlocks") or 0),
            "kv_blocks_missed": float(cache.get("missedBlocks") or 0),
        }


def _whole(values: Mapping[str, Any], name: str) -> int:
    return int(values.get(name) or 0)
