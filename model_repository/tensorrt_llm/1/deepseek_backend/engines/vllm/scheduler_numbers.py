"""Collects the numbers for EngineStats from the statistics that vLLM's schedulers send with their outputs."""

from __future__ import annotations

import logging
from typing import Any

from deepseek_backend.engines.base import EngineStats

logger = logging.getLogger(__name__)


class SchedulerNumbers:
    """The latest numbers of each engine core, and sums over all iterations. It is a stat logger of AsyncLLM too."""

    def __init__(self) -> None:
        self._is_readable = True
        self._latest: dict[int, tuple[int, float]] = {}
        """Rank of data parallelism -> its running requests and the used share of its KV cache, at last."""
        self._num_draft_tokens = 0
        self._num_accepted_draft_tokens = 0
        self._prefix_queries = 0
        self._prefix_hits = 0

    def add(self, rank: int, scheduler_stats: Any) -> None:
        """Add the SchedulerStats of one iteration. It raises nothing: that would end vLLM's output handler."""
        if self._is_readable:
            try:
                self._add(rank, scheduler_stats)
            except Exception:  # requests are served without them
                logger.exception("vLLM's scheduler statistics can't be read; their metrics stay as they are")
                self._is_readable = False

    def _add(self, rank: int, scheduler_stats: Any) -> None:
        if (drafts := scheduler_stats.spec_decoding_stats) is not None:
            self._num_draft_tokens += drafts.num_draft_tokens
            self._num_accepted_draft_tokens += drafts.num_accepted_tokens
        prefix = scheduler_stats.prefix_cache_stats
        if prefix is not None and prefix.queries:
            self._prefix_queries += prefix.queries
            self._prefix_hits += prefix.hits
        self._latest[rank] = (scheduler_stats.num_running_reqs, scheduler_stats.kv_cache_usage)

    def engine_stats(self, *, num_open: int, num_blocks: int, tokens_per_block: int) -> EngineStats:
        """Return the numbers.

        :param num_open: requests that have not had their last step. There is no iteration, and so no report, when the
            last one is aborted.
        :param num_blocks: KV cache blocks of all ranks, which have the same number each.
        :param tokens_per_block: 0 where it is not known, as before the start.
        """
        latest = list(self._latest.values())
        num_running = min(num_open, sum(running for running, _ in latest))
        usage = sum(share for _, share in latest) / len(latest) if latest and num_open else 0.0
        return EngineStats(
            num_running=num_running,
            num_waiting=num_open - num_running,
            kv_blocks_used=round(usage * num_blocks),
            kv_blocks_total=num_blocks,
            tokens_per_block=tokens_per_block,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_draft_tokens=self._num_accepted_draft_tokens,
            extra={
                "prefix_cache_queried_tokens": float(self._prefix_queries),
                "prefix_cache_hit_tokens": float(self._prefix_hits),
            },
        )

    # The rest is what AsyncLLM calls on a stat logger.

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self.add(engine_idx, scheduler_stats)

    def log(self) -> None: ...

    def log_engine_initialized(self) -> None: ...

    def record_sleep_state(self, *_: Any) -> None: ...
