"""GPU memory by arithmetic: weights from the shapes, KV cache per token, workspace, what is free; the time of a load.

The weights are exact: 79.29 GiB a GPU for the FP8 checkpoint at TP8; 79.59 GiB were measured (vLLM 0.25.1 on 8 x H200).
The workspace is an estimate; each of its constants says what it rests on.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from deepseek_triton_build.arithmetic.block_pool import BlockPool
from deepseek_triton_build.arithmetic.weights import weights
from deepseek_triton_build.data.catalog import Architecture, Gpu, KnownCheckpoint

GIB = 2**30

KvDtype = Literal["bf16", "fp8"]
KV_BYTES: Mapping[KvDtype, int] = {"bf16": 2, "fp8": 1}
"""KV dtype -> bytes of one value."""

CONTEXT_BYTES = GIB
"""Bytes of the CUDA context and the communication buffers of one process: about 1 GiB, an estimate."""
CUDA_GRAPH_BYTES = 200 * 10**6
"""Bytes of one batch size's graph: "up to 200 MB", says TensorRT-LLM's llm_args.py of cuda_graph_config."""
ACTIVATION_BYTES_PER_TOKEN = int(3.2 * GIB) // 8192
"""Activations of each token of an iteration. vLLM 0.25.1 took 3.2 GiB on 8 x H200 for 8,192 tokens; for TensorRT-LLM
that is an estimate."""
SAMPLER_BYTES_PER_LOGIT = 8
"""Bytes that the C++ sampler (TRTLLMSampler) takes for each entry of the vocabulary and each request of the largest
batch: a copy of the logits and, once a request has a penalty, the number of occurrences, four bytes each (TensorRT-LLM
cpp/tensorrt_llm/layers/penaltyLayer.cpp). What its top-p kernels take while they run is not counted."""
INDEXER_SCALE_BYTES = 4
"""Scale beside each FP8 key of the sparse attention's indexer: one 32-bit scale a token and layer is assumed."""
PREFETCH_SHARE = 0.9
"""The engine prefetches a checkpoint into the page cache if it is smaller than this share of the available host
memory (TensorRT-LLM's weight_loader.py)."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one model instance is divided among its GPUs."""

    tensor_parallel_size: int
    expert_parallel_size: int
    pipeline_parallel_size: int = 1
    attention_dp: bool = False

    @property
    def num_gpus(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def attention_dp_size(self) -> int:
        """Number of ranks with their own requests, KV cache and batch: the instance's are the sum of theirs."""
        return self.tensor_parallel_size if self.attention_dp else 1


def weight_bytes_per_gpu(
    architecture: Architecture, checkpoint: KnownCheckpoint, layout: Layout, *, mtp: bool, expert_slots: int = 0
) -> int:
    """Return the bytes of weights on the GPU that holds most.

    :param mtp: whether the MTP layer is loaded.
    :param expert_slots: slots of the expert load balancer where it has more than there are experts, else 0.
    """
    parts = weights(architecture, checkpoint)
    tp, pp = layout.tensor_parallel_size, layout.pipeline_parallel_size
    # Attention DP keeps attention, dense layers and embeddings whole on every rank.
    split = 1 if layout.attention_dp else tp
    experts = parts.routed_experts * max(1.0, expert_slots / architecture.num_routed_experts) / tp
    layers = experts + (parts.attention + parts.dense) / split + parts.replicated + parts.hash_tables / 2
    extra = parts.mtp_experts / tp + parts.mtp / split + parts.mtp_replicated if mtp else 0.0
    fullest_stage = math.ceil(architecture.num_layers / pp) / architecture.num_layers
    return int(layers * fullest_stage + parts.embeddings / split + extra)


def kv_bytes_per_token(
    architecture: Architecture, kv_dtype: KvDtype, *, mtp_layers: int = 0, pipeline_parallel_size: int = 1
) -> int:
    """Return the bytes of KV cache for one token on one GPU. Every tensor-parallel rank holds MLA's latent whole.

    :param mtp_layers: the layers that MTP adds to the cache.
    """
    a = architecture
    if a.csa is not None:
        ratios = [ratio for ratio in a.csa.compress_ratios if ratio]
        # An FP8 record of 584 bytes; ratio-4 layers have keys of the indexer, too. Windows and states are not counted.
        return int(sum((584 + (132 if ratio == 4 else 0)) / ratio for ratio in ratios))
    latent = (a.kv_lora_rank + a.qk_rope_head_dim) * KV_BYTES[kv_dtype]
    indexer = a.index_head_dim + INDEXER_SCALE_BYTES if a.attention == "dsa" else 0
    layers = math.ceil(a.num_layers / pipeline_parallel_size) + mtp_layers
    return (latent + indexer) * layers


@dataclass(frozen=True, kw_only=True)
class Budget:
    """GPU memory of one rank, in bytes, and the KV tokens that it leaves room for."""

    memory: int
    weights: int
    context: int
    cuda_graphs: int
    activations: int
    sampler: int
    kv_cache: int
    kv_bytes_per_token: int
    attention_dp_size: int = 1
    """Number of KV caches in the instance that hold different requests."""
    pool: BlockPool | None = None
    """The KV cache where it is blocks and no number of bytes a token."""

    @property
    def workspace(self) -> int:
        """Bytes beside weights and KV cache: CUDA context, CUDA graphs, activations and sampler."""
        return self.context + self.cuda_graphs + self.activations + self.sampler

    @property
    def free(self) -> int:
        """Bytes that stay free; negative when the plan doesn't fit."""
        return self.memory - self.weights - self.workspace - self.kv_cache

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache of one rank holds; of blocks, those of one request that has them all."""
        return self.tokens_each(1)

    @property
    def longest_start(self) -> int:
        """The longest request with which the engine starts."""
        return self.kv_tokens if self.pool is None else self.pool.longest_start

    def tokens_each(self, requests: int) -> int:
        """Return the tokens that each of so many requests of a rank may have."""
        if self.pool is not None:
            return self.pool.tokens_each(requests)
        return max(0, self.kv_cache) // self.kv_bytes_per_token // requests

    @property
    def total_kv_tokens(self) -> int:
        """Tokens that the KV caches of the instance hold."""
        return self.kv_tokens * self.attention_dp_size

    def concurrent_requests(self, isl: int, osl: int) -> int:
        """Return how many requests of these input and output lengths the instance's KV caches hold at once."""
        held = self.kv_tokens // (isl + osl) if self.pool is None else self.pool.requests(isl, osl)[0]
        return held * self.attention_dp_size


def make_budget(
    gpu: Gpu,
    architecture: Architecture,
    checkpoint: KnownCheckpoint,
    layout: Layout,
    *,
    num_cuda_graphs: int,
    max_num_tokens: int,
    kv_dtype: KvDtype,
    kv_fraction: float,
    moe_max_num_tokens: int | None = None,
    mtp_layers: int = 0,
    expert_slots: int = 0,
    sampler_batch: int = 0,
) -> Budget:
    """Return how a rank's memory is used. A negative KV cache or free memory means that it doesn't fit.

    :param kv_fraction: free_gpu_memory_fraction, the KV cache's share of what weights, graphs and one iteration leave.
    :param mtp_layers: the layers that MTP adds to the KV cache; they all share the checkpoint's one layer of weights.
    :param sampler_batch: max_batch_size where the C++ sampler is chosen, else 0.
    """
    held = weight_bytes_per_gpu(architecture, checkpoint, layout, mtp=mtp_layers > 0, expert_slots=expert_slots)
    graphs = num_cuda_graphs * CUDA_GRAPH_BYTES
    activations = ACTIVATION_BYTES_PER_TOKEN * _tokens_at_once(layout, max_num_tokens, moe_max_num_tokens)
    sampler = sampler_batch * architecture.vocab_size * SAMPLER_BYTES_PER_LOGIT
    left = gpu.memory - held - CONTEXT_BYTES - graphs - activations - sampler
    return Budget(
        memory=gpu.memory,
        weights=held,
        context=CONTEXT_BYTES,
        cuda_graphs=graphs,
        activations=activations,
        sampler=sampler,
        kv_cache=int(left * kv_fraction),
        kv_bytes_per_token=kv_bytes_per_token(
            architecture, kv_dtype, mtp_layers=mtp_layers, pipeline_parallel_size=layout.pipeline_parallel_size
        ),
        attention_dp_size=layout.attention_dp_size,
    )


def cuda_graph_batch_sizes(max_batch_size: int) -> tuple[int, ...]:
    """Return the batch sizes that TensorRT-LLM captures for cuda_graph_config.max_batch_size with padding.

    They are 1, 2, 4, each multiple of 8 up to 128, then powers of two, and the maximum (1.0 to 1.2.1, llm_args.py).
    """
    if max_batch_size < 1:
        return ()
    sizes = [1, 2, 4, *range(8, 129, 8)]
    while sizes[-1] * 2 <= max_batch_size:
        sizes.append(sizes[-1] * 2)
    return tuple(sorted({*(size for size in sizes if size <= max_batch_size), max_batch_size}))


GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of GPUs that a plan can have: powers of two, as they divide 128 attention heads and 256 experts."""
_LEAST_NUM_TOKENS = 2048
LEAST_KV_TOKENS = 8192
"""KV tokens of one request that a deployment has to hold at least: a smaller one is of no use."""


def minimum_gpus(gpu: Gpu, architecture: Architecture, checkpoint: KnownCheckpoint) -> int | None:
    """Return the fewest GPUs whose memory holds the weights, a small workspace and one request of 8,192 tokens.

    None when no number in GPU_COUNTS is enough. Only memory is considered, not what is published.
    """
    for count in GPU_COUNTS:
        layout = Layout(tensor_parallel_size=count, expert_parallel_size=count)
        budget = make_budget(
            gpu,
            architecture,
            checkpoint,
            layout,
            num_cuda_graphs=1,
            max_num_tokens=_LEAST_NUM_TOKENS,
            kv_dtype="bf16",
            kv_fraction=1.0,
        )
        if budget.kv_tokens >= LEAST_KV_TOKENS:
            return count
    return None


def host_memory_to_prefetch(checkpoint: KnownCheckpoint) -> int:
    """Return the available bytes that each node needs for prefetching the checkpoint, which each node reads whole."""
    return math.ceil(checkpoint.weight_bytes / PREFETCH_SHARE)


def _tokens_at_once(layout: Layout, max_num_tokens: int, moe_max_num_tokens: int | None) -> int:
    """Return the tokens whose activations take memory at the same time.

    Under attention DP without all-to-all each rank gathers the tokens of every rank, in chunks of
    moe_config.max_num_tokens where it is set (TensorRT-LLM fused_moe_cutlass.py). Expert parallelism doesn't divide the
    workspace: it has top_k rows for each token of the chunk, in two buffers of hidden_size 16-bit values
    (moe_kernels.cu, getWorkspaceDeviceBufferSizes), which is 0.23 MB of the 0.42 MB that a token is assumed to take.
    """
    together = max_num_tokens * layout.attention_dp_size
    return max(max_num_tokens, min(together, moe_max_num_tokens or together))


# Which numbers of GPUs get equal shares of a model
#
# FP8 weights have a scale for each block of 128 x 128 values. TensorRT-LLM divides the values and the scales among the
# ranks each for themselves, and rounds up (load_weight_shard in tensorrt_llm/_torch/modules/linear.py), so a share has
# to be whole blocks. The vocabulary need not divide: the engine pads it (tensorrt_llm/_torch/modules/embedding.py).
# Neither need the dense layers and the shared experts: as many ranks divide them as get whole blocks
# (_compute_mlp_tp_size and _compute_shared_expert_tp_size in tensorrt_llm/_torch/models/modeling_deepseekv3.py).

FP8_BLOCK = 128
"""Rows and columns of an FP8 weight that share a scale."""
LARGEST_EXPERT_PARALLEL = 8
"""Ranks of expert parallelism above which the support matrix of MoE back ends has wide EP only."""


def cut_attention_blocks(architecture: Architecture, tensor_parallel_size: int) -> str:
    """Return which FP8 blocks of attention such a division cuts, in words; an empty string for none.

    The heads have to be divisible by the size.
    """
    a = architecture
    heads = a.num_heads // tensor_parallel_size
    widths = {
        "q_b_proj": a.qk_nope_head_dim + a.qk_rope_head_dim,
        "kv_b_proj": a.qk_nope_head_dim + a.v_head_dim,
        "o_proj": a.v_head_dim,
    }
    cut = (f"{heads} x {width} of {name}" for name, width in widths.items() if heads * width % FP8_BLOCK)
    return next(cut, "")


def divides_attention(architecture: Architecture, precision: str, tensor_parallel_size: int) -> bool:
    """Tell whether each rank gets an equal share of the heads, and of FP8 projections whole blocks."""
    if architecture.num_heads % tensor_parallel_size:
        return False
    return precision == "fp4" or not cut_attention_blocks(architecture, tensor_parallel_size)


def divides_experts(architecture: Architecture, precision: str, tensor_parallel_size: int) -> bool:
    """Tell whether each rank gets an equal share of the experts, of up to LARGEST_EXPERT_PARALLEL groups of ranks."""
    expert_parallel_size = min(tensor_parallel_size, LARGEST_EXPERT_PARALLEL)
    if architecture.num_routed_experts % expert_parallel_size or tensor_parallel_size % expert_parallel_size:
        return False
    ranks = tensor_parallel_size // expert_parallel_size
    return precision != "fp8" or architecture.moe_intermediate_size % (FP8_BLOCK * ranks) == 0


ASSUMED_RATE = 200 * 10**6
"""Bytes a second that weights are assumed to be read at. Users report an hour for the first load of 640 GB, which is
180 MB/s (NVIDIA/TensorRT-LLM#3879, sgl-project/sglang#3825). A late deadline costs nothing while all is well."""
ENGINE_START_S = 1800
"""Seconds to compile kernels and capture CUDA graphs after the weights are loaded. An assumption."""
SMALL_READY_WITHIN_S = 600
"""Seconds for the embedded engines, whose models are small: Python and its packages take seconds. An assumption."""


def load_s(size: int, rate: int | None = None) -> int:
    """Return the whole seconds to read `size` bytes at `rate` bytes a second, ASSUMED_RATE when it is not given."""
    return math.ceil(size / (rate or ASSUMED_RATE))


def ready_within_s(size: int, rate: int | None = None) -> int:
    """Return the seconds, whole minutes, within which a server with `size` bytes of weights has to be ready."""
    return 60 * math.ceil((load_s(size, rate) + ENGINE_START_S) / 60)
