"""vLLM's KV cache of DeepSeek-V4: one pool of equal blocks, from which a request takes some for each group of caches.

Read in the wheels of 0.24.0, 0.25.1, 0.27.1, 0.31.0 and 0.33.0: vllm/v1/core/kv_cache_utils.py (0.33.0:
kv_cache_planning.py, too), vllm/v1/kv_cache_interface.py, vllm/models/deepseek_v4 and deepseek_v41.
"""

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepseek_triton_build.data.catalog import CompressedAttention
from deepseek_triton_build.data.vllm import VllmVersion

BLOCK_TOKENS = 256
"""Tokens of a block of the compressed caches: block_size, which has to be this."""
DS_MLA = "fp8_ds_mla"
_FORMS: Mapping[str, tuple[int, int, int, int, int]] = {
    DS_MLA: (584, 584, 132, 576, 1),
    # FLASHINFER_MLA_SPARSE_DSV4's plain rows on SM100.
    "fp8": (512, 512, 132, 512, 1),
    "bf16": (1024, 1024, 132, 512, 1),
    # V4.1's on SM100: FlashMLA's, and FLASHMLA_MEGA_ATTN_DSV41's, the default where its conditions hold.
    "mxfp8": (528, 528, 132, 512, 528),
    "nvfp4_ds_mla": (288, 528, 132, 512, 528),
    "nvfp4_ds_mla, fp4": (288, 528, 68, 512, 528),
}
"""Form -> bytes of a compressed entry, of a window's token and of an indexer's key; what pages and blocks are multiples
of."""


@dataclass(frozen=True)
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
    """Tokens of a prompt that may be under way: blocks for so many have to be free before it is admitted."""
    decoded: int
    """Tokens of a request in a step of decoding, drafts included."""

    def held(self, length: int) -> int:
        """Return the blocks of a request that decodes and has `length` tokens."""
        return self._blocks(length, self.decoded)

    @property
    def longest_start(self) -> int:
        """The largest max_model_len with which vLLM starts."""
        return self._longest(self.checked_blocks, self.in_flight)

    def tokens_each(self, requests: int) -> int:
        """Return the tokens of each of so many requests that decode at once."""
        return self._longest(self.num_blocks // requests, self.decoded)

    def requests(self, isl: int, osl: int) -> tuple[int, bool]:
        """Return how many requests of these lengths there are at once, and whether more than a tenth of them would be
        added if no blocks were set aside for a prompt: the last one is admitted while the others hold theirs."""
        held = self.held(isl + osl)
        admitted = max(0, (self.num_blocks - self._blocks(isl, self.in_flight)) // held + 1)
        return min(self.num_blocks // held, admitted), admitted * 1.1 < self.num_blocks // held

    def logged_concurrency(self, max_model_len: int) -> float:
        """Return vLLM's "Maximum concurrency"; times `max_model_len` it is the tokens of its "GPU KV cache size"."""
        blocks = self._blocks(max_model_len, self.in_flight)
        if self.weighs_groups:
            size = sum(group.blocks(max_model_len, self.in_flight) * group.size for group in self.groups)
            blocks = -(-size // max(1, self.groups[0].size))
        return self.num_blocks / blocks

    def _blocks(self, length: int, step: int) -> int:
        return sum(group.blocks(length, step) for group in self.groups)

    def _longest(self, blocks: int, step: int) -> int:
        lengths = range(max(0, blocks) * BLOCK_TOKENS + 1)
        return max(0, bisect_right(lengths, blocks, key=lambda length: self._blocks(length, step)) - 1)


def block_pool(
    memory: int, csa: CompressedAttention, windows: int, vllm: VllmVersion, *, tokens: int, drafts: int, form: str
) -> BlockPool:
    """Return the pool of `memory` bytes.

    :param windows: layers with a window: all of them, and those of the draft.
    :param tokens: max_num_batched_tokens.
    :param drafts: tokens that are drafted a step.
    """
    row, window_row, index_row, page_multiple, block_multiple = _FORMS[form]

    def page(size: int) -> int:
        return -(-size // page_multiple) * page_multiple

    own, kept, by_layer = csa.kv_source_layers, csa.sliding_window - 1, dict(enumerate(csa.compress_ratios))
    ratios = Counter(by_layer.get(layer, 0) for layer in own or by_layer)
    window_tokens, compressed = 32 if own else 64, Counter[int]()
    window = page(window_tokens * window_row)
    for ratio in filter(None, ratios):
        compressed[page(BLOCK_TOKENS // ratio * row)] += ratios[ratio]
        if own or ratio == 4:
            compressed[page(BLOCK_TOKENS // ratio * index_row)] += ratios[ratio]
    first = CacheGroup(compressed, BLOCK_TOKENS)
    is_padded = vllm.is_before("0.27.1")  # the states' pages, to the next of the compressed caches
    if own:  # V4.1: as many windows as a block has room for; a ring of 32-bit rows, whatever the length
        share, states = max(1, first.size // window), [CacheGroup({8 * 1024 * 4: ratios[2]}, sys.maxsize)]
    else:  # the layers of a group of windows leave the fewest places of all groups empty
        counts = (ratios[4], ratios[4], ratios[128], windows)
        sizes = range(max(1, *counts[:3]), windows + 1)
        share = min(sizes, key=lambda size: (sum(-count % size for count in counts), -size))
        # Keys and gates of 32 bits: of four tokens 2048 and, for the indexer, 512; of eight tokens 1024.
        state, indexer_state = window if is_padded else page(4 * 2048 * 4), page(4 * 512 * 4)
        states = [
            CacheGroup({state: ratios[4], indexer_state: ratios[4]}, 4, 7),
            CacheGroup({state: ratios[128]}, 8, kept),
        ]
    number = -(-windows // share)
    split = (len(range(start, windows, number)) for start in range(number))
    groups = (first, *(CacheGroup({window: layers}, window_tokens, kept) for layers in split), *states)
    size = -(-max(group.size for group in groups) // block_multiple) * block_multiple
    if is_padded:  # each page size has as many places as the group with most of it
        size = max(size, sum(page * max(group.pages.get(page, 0) for group in groups) for page in compressed))
    checked = size
    if vllm.is_before("0.31.0"):  # every page size for each layer of the largest group
        checked = max(size, max(n for group in groups for n in group.pages.values()) * sum(compressed))
    return BlockPool(
        num_blocks=memory // size,
        bytes_per_block=size,
        checked_blocks=memory // checked - 1,  # vLLM uses all but one
        groups=groups,
        weighs_groups=is_padded,
        in_flight=tokens if is_padded else 2 * tokens,  # the steps under way, with async_scheduling, the default
        decoded=1 + drafts,
    )
