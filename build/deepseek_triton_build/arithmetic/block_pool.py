"""vLLM's KV cache of DeepSeek-V4: one pool of equal blocks, from which a request takes some for each group of caches.

Read in the wheels of 0.24.0, 0.25.1, 0.27.1, 0.31.0 and 0.33.0: vllm/v1/core/kv_cache_utils.py (0.33.0:
kv_cache_planning.py, too), vllm/v1/kv_cache_interface.py and vllm/models/deepseek_v4.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepseek_triton_build.data.vllm import VllmVersion

BLOCK_TOKENS, _WINDOW_BLOCK, _WINDOW = 256, 64, 128
"""Tokens of a block of the compressed caches (block_size, which has to be 256) and of the windows; a window."""
_ROWS: Mapping[str, tuple[int, int]] = {"fp8_ds_mla": (584, 576), "fp8": (512, 512), "bf16": (1024, 512)}
"""Form -> bytes of a token's 512 values, and of what a page is a multiple of. fp8_ds_mla has 448 values in FP8, 64 in
16 bits and eight bytes of scales; the other two are FLASHINFER_MLA_SPARSE_DSV4's on SM100."""
_INDEX_ROW = 132
"""Bytes of an indexer's key: 128 in FP8 and a scale. SM100's FP4 cache takes the same page."""


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Caches of several layers that share their block numbers: one block holds `tokens` tokens of each."""

    pages: Mapping[int, int]
    """Bytes of a page, a layer's part of a block -> number of layers."""
    tokens: int
    kept: int | None = None
    """Tokens before those of this step that are still needed; None: all."""

    @property
    def size(self) -> int:
        """Bytes of the pages of all layers."""
        return sum(page * layers for page, layers in self.pages.items())

    def blocks(self, length: int, step: int) -> int:
        if self.kept is None:
            return -(-length // self.tokens)
        return -(-min(self.kept + step, length) // self.tokens) + 1  # a window may begin within a block


@dataclass(frozen=True, kw_only=True)
class BlockPool:
    """The KV cache of one rank."""

    num_blocks: int
    """Each serves any group."""
    bytes_per_block: int
    checked_blocks: int
    """Blocks by the arithmetic of vLLM's check as it starts."""
    groups: Sequence[CacheGroup]
    """The compressed caches first."""
    weighs_groups: bool
    """Whether the capacity that vLLM logs counts a group's blocks by the bytes of its pages."""
    in_flight: int
    """Tokens of a prompt that may be under way, for which vLLM sets blocks aside."""
    decoded: int
    """Tokens of a request in a step of decoding, drafts included."""

    def held(self, length: int) -> int:
        """Return the blocks of a request that decodes and has `length` tokens."""
        return self._blocks(length, self.decoded)

    def reserved(self, length: int) -> int:
        """Return the blocks that have to be free before a prompt of `length` tokens is admitted."""
        return self._blocks(length, self.in_flight)

    @property
    def longest_start(self) -> int:
        """The largest max_model_len with which vLLM starts."""
        return self._longest(self.checked_blocks, self.in_flight)

    def tokens_each(self, requests: int) -> int:
        """Return the tokens of each of so many requests that decode at once."""
        return self._longest(self.num_blocks // requests, self.decoded)

    def requests(self, isl: int, osl: int) -> tuple[int, bool]:
        """Return how many requests of these lengths there are at once, and whether more would find room if no blocks
        were set aside for a prompt: the last one is admitted while the others hold theirs."""
        held = self.held(isl + osl)
        admitted = max(0, (self.num_blocks - self.reserved(isl)) // held + 1)
        return min(self.num_blocks // held, admitted), admitted < self.num_blocks // held

    def logged_concurrency(self, max_model_len: int) -> float:
        """Return vLLM's "Maximum concurrency"; times `max_model_len` it is the tokens of its "GPU KV cache size"."""
        blocks = self.reserved(max_model_len)
        if self.weighs_groups:
            size = sum(group.blocks(max_model_len, self.in_flight) * group.size for group in self.groups)
            blocks = -(-size // self.groups[0].size)
        return self.num_blocks / blocks

    def _blocks(self, length: int, step: int) -> int:
        return sum(group.blocks(length, step) for group in self.groups)

    def _longest(self, blocks: int, step: int) -> int:
        lengths = range(max(0, blocks) * BLOCK_TOKENS + 1)
        return max(0, bisect_right(lengths, blocks, key=lambda length: self._blocks(length, step)) - 1)


def block_pool(
    memory: int,
    compress_ratios: Sequence[int],
    vllm: VllmVersion,
    *,
    max_num_batched_tokens: int,
    draft_layers: int = 0,
    num_draft_tokens: int = 0,
    async_scheduling: bool = True,
    rows: str = "fp8_ds_mla",
) -> BlockPool:
    """Return the pool of `memory` bytes.

    :param compress_ratios: of each layer but the draft's, which have windows alone.
    """
    row, alignment = _ROWS[rows]

    def page(size: int) -> int:
        return -(-size // alignment) * alignment

    num_indexed, num_others = compress_ratios.count(4), compress_ratios.count(128)
    counts = (num_indexed, num_others, len(compress_ratios) + draft_layers, num_indexed)
    main, indexer = page(_WINDOW_BLOCK * row), page(_WINDOW_BLOCK * _INDEX_ROW)
    compressed = {main: num_indexed, indexer: num_indexed, page(BLOCK_TOKENS // 128 * row): num_others}
    # The compressors' states: keys and gates of 32 bits, 2 x 1024 and 2 x 256 of a token, and 2 x 512.
    is_padded = vllm.is_before("0.27.1")  # to the next page of the compressed caches
    state, indexer_state = main if is_padded else page(4 * 2048 * 4), page(4 * 512 * 4)
    # The windows' layers in groups as large as the others', so that the fewest places stay empty.
    share = min(
        range(max(counts[:2]), max(counts) + 1), key=lambda size: (sum(-count % size for count in counts), -size)
    )
    number = -(-counts[2] // share)
    groups = (
        CacheGroup(pages=compressed, tokens=BLOCK_TOKENS),
        *(
            CacheGroup(pages={main: len(range(first, counts[2], number))}, tokens=_WINDOW_BLOCK, kept=_WINDOW - 1)
            for first in range(number)
        ),
        CacheGroup(pages={state: num_indexed, indexer_state: num_indexed}, tokens=4, kept=7),
        CacheGroup(pages={state: num_others}, tokens=8, kept=_WINDOW - 1),
    )
    size = max(group.size for group in groups)
    if is_padded:  # each page size has as many places as the group with most of it
        size = sum(page * max(group.pages.get(page, 0) for group in groups) for page in compressed)
    checked = size
    if vllm.is_before("0.31.0"):  # every page size for each layer of the largest group
        checked = max(max(group.pages.values()) for group in groups) * sum(compressed)
    return BlockPool(
        num_blocks=memory // size,
        bytes_per_block=size,
        checked_blocks=memory // checked - 1,  # vLLM uses all but one
        groups=groups,
        weighs_groups=is_padded,
        in_flight=max_num_batched_tokens * (1 if is_padded or not async_scheduling else 2),
        decoded=1 + num_draft_tokens,
    )
