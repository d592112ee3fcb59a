"""How large: parallelism, batch, token and length limits for a target and a workload, and what memory they leave.

A recipe's own sizes hold for the GPUs and the workload it was published for. For anything else they are computed, and
made smaller until one request of the longest length fits the KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from deepseek_triton_build.catalog.profiles import NOTHING_SAID, Workload
from deepseek_triton_build.errors import RefusedPlanError
from deepseek_triton_build.memory import GIB, Budget, KvDtype, Layout, cuda_graph_batch_sizes, make_budget
from deepseek_triton_build.planning.target import Target
from deepseek_triton_build.rules.rule import Deployment

TYPICAL = Workload(isl=1024, osl=2048)
"""The lengths of the published benchmarks, where nothing else is said."""
LOW_CONCURRENCY = 128
"""Up to here attention DP off and CUDA graphs on are faster (TensorRT-LLM 0.19, examples/deepseek_v3/README.md)."""
MAX_SEQ_LEN = 65536
"""Of a server for people, where no length is asked for: R1 reasons for tens of thousands of tokens."""
LARGEST_EXPERT_PARALLEL = 8
"""Past it the support matrix of MoE back ends knows wide EP only."""
OOM_NUM_TOKENS = 3072
"""What the DeepSeek-V3 guide reduces max_num_tokens to when memory runs out."""
SPARSE_NUM_TOKENS = 8192
"""The largest max_num_tokens that V3.2 has not been seen to crash with (NVIDIA/TensorRT-LLM#9932)."""
DEFAULT_GRAPH_SIZE = 128
"""The largest batch that is captured when cuda_graph_config says nothing (llm_args.py)."""
_BLOCK = 64
"""Limits are whole KV blocks, of 32 or 64 tokens."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The numbers of a plan."""

    layout: Layout
    workload: Workload
    """Filled: every field is a number, but concurrency where nothing bounds it."""
    max_batch_size: int
    """Of one rank; under attention DP each rank has its own."""
    max_num_tokens: int
    max_seq_len: int
    graph_sizes: tuple[int, ...]
    """Batch sizes given one by one; empty: those that graph_max_batch_size stands for."""
    graph_max_batch_size: int
    """0: no graphs."""
    chunked_prefill: bool
    kv_setting: Literal["auto", "fp8"]
    """kv_cache_config.dtype; auto is the checkpoint's own."""
    kv_dtype: KvDtype
    """What it comes to."""
    kv_fraction: float
    num_draft_tokens: int
    moe_max_num_tokens: int | None
    expert_slots: int
    as_published: bool
    """Nothing had to be computed again."""
    shrunk: str = ""
    """What was made smaller to fit, for the reader; empty when nothing was."""

    @property
    def num_graphs(self) -> int:
        return len(self.graph_sizes) or len(cuda_graph_batch_sizes(self.graph_max_batch_size))

    @property
    def max_concurrency(self) -> int:
        """Requests that decode together, over the whole instance."""
        return self.max_batch_size * self.layout.attention_dp_size


def choose_sizes(target: Target) -> tuple[Sizes, Budget]:
    """The sizes, and the memory they take.

    :raises RefusedPlanError: when even the smallest do not fit.
    """
    wanted = _wanted(target, attention_dp=_wants_attention_dp(target))
    if wanted.layout.attention_dp and make_plan_budget(target, wanted).kv_tokens < _least_tokens(wanted):
        wanted = replace(
            _wanted(target, attention_dp=False),
            shrunk="attention DP is off: the weights it keeps on every GPU leave no room for a KV cache",
        )
    for sizes in _ever_smaller(wanted):
        budget = make_plan_budget(target, sizes)
        if budget.kv_tokens >= sizes.max_seq_len:
            return sizes, budget
    raise RefusedPlanError(_no_room(target, wanted))


def make_plan_budget(target: Target, sizes: Sizes) -> Budget:
    """The memory of one GPU under `sizes`."""
    return make_budget(
        target.gpu,
        target.architecture,
        target.checkpoint,
        sizes.layout,
        num_cuda_graphs=sizes.num_graphs,
        max_num_tokens=sizes.max_num_tokens,
        moe_max_num_tokens=sizes.moe_max_num_tokens,
        kv_dtype=sizes.kv_dtype,
        kv_fraction=sizes.kv_fraction,
        mtp=sizes.num_draft_tokens > 0,
        expert_slots=sizes.expert_slots,
    )


def budget_of(target: Target, deployment: Deployment) -> Budget:
    """The memory of one GPU under settings, whoever chose them."""
    given = deployment.get
    graph_sizes = given("cuda_graph_config.batch_sizes")
    graph_max = given("cuda_graph_config.max_batch_size") or DEFAULT_GRAPH_SIZE
    return make_budget(
        target.gpu,
        target.architecture,
        target.checkpoint,
        deployment.layout,
        num_cuda_graphs=len(graph_sizes or cuda_graph_batch_sizes(graph_max)) if deployment.has_cuda_graphs else 0,
        max_num_tokens=given("max_num_tokens"),
        moe_max_num_tokens=given("moe_config.max_num_tokens"),
        kv_dtype="fp8" if deployment.has_fp8_kv else "bf16",
        kv_fraction=given("kv_cache_config.free_gpu_memory_fraction"),
        mtp=deployment.num_draft_tokens > 0,
        expert_slots=given("moe_config.load_balancer.num_slots") or 0,
    )


def num_tokens_for(isl: int, max_batch_size: int, num_draft_tokens: int) -> int:
    """max_num_tokens that takes one whole prompt while the rest of the batch decodes, in whole KV blocks.

    The published recipes follow it: 1,151 = 1,024 + 128 - 1; 1,160 = 1,000 + 161 - 1; 65,548 = 65,536 + 12.
    """
    return _round_up(isl + max_batch_size * (1 + num_draft_tokens), _BLOCK)


def _wanted(target: Target, *, attention_dp: bool) -> Sizes:
    """Before anything is made smaller."""
    request, recipe = target.request, _Published(target)
    draft = request.mtp if request.mtp is not None else recipe.get("speculative_config.num_nextn_predict_layers", 0)
    layout = _layout(target, recipe, attention_dp)
    as_published = target.is_as_published and attention_dp == recipe.get("enable_attention_dp", False)
    workload = request.workload.filled_from(target.recipe.workload).filled_from(TYPICAL)
    chunked = _chunked_prefill(target, recipe, attention_dp)
    batch = _batch_size(target, recipe, layout)
    computed = request.workload != NOTHING_SAID and not as_published
    kv_setting = _kv_setting(target, recipe)
    return Sizes(
        layout=layout,
        workload=workload,
        max_batch_size=batch,
        max_num_tokens=_num_tokens(target, recipe, workload, batch, draft, chunked=chunked),
        max_seq_len=_seq_len(target, recipe, workload),
        graph_sizes=() if computed else tuple(recipe.get("cuda_graph_config.batch_sizes", ())),
        graph_max_batch_size=_graph_max_batch_size(recipe, batch, computed=computed),
        chunked_prefill=chunked,
        kv_setting=kv_setting,
        kv_dtype="fp8" if "FP8" in (kv_setting.upper(), target.checkpoint.kv_cache_quant_algo) else "bf16",
        kv_fraction=recipe.get("kv_cache_config.free_gpu_memory_fraction", 0.8),
        num_draft_tokens=draft,
        moe_max_num_tokens=recipe.get("moe_config.max_num_tokens", None),
        expert_slots=recipe.get("moe_config.load_balancer.num_slots", 0),
        as_published=not computed and as_published,
    )


class _Published:
    """The values of the recipe's settings."""

    def __init__(self, target: Target) -> None:
        self._values = {setting.key: setting.value for setting in target.recipe.settings}

    def get(self, key: str, default: Any) -> Any:
        return self._values.get(key, default)


def _wants_attention_dp(target: Target) -> bool:
    published = bool(_Published(target).get("enable_attention_dp", False))
    asked = target.request.workload.concurrency
    if asked is None or target.is_as_published or target.profile.name == "latency":
        return published
    return asked > LOW_CONCURRENCY


def _layout(target: Target, recipe: _Published, attention_dp: bool) -> Layout:
    pp = target.request.pipeline_parallel_size
    if target.num_gpus % pp:
        raise RefusedPlanError(
            f"{target.num_gpus} GPUs do not make {pp} pipeline stages of one size; use a divisor of {target.num_gpus}"
        )
    tp = target.num_gpus // pp
    published = recipe.get("moe_expert_parallel_size", None)
    same_size = published is not None and target.recipe.num_gpus in (None, target.num_gpus)
    ep = min(published, tp) if same_size else min(tp, LARGEST_EXPERT_PARALLEL)
    return Layout(
        tensor_parallel_size=tp, expert_parallel_size=ep, pipeline_parallel_size=pp, attention_dp=attention_dp
    )


def _chunked_prefill(target: Target, recipe: _Published, attention_dp: bool) -> bool:
    """Long prompts in pieces: where the recipe has it and the GPU, the model and the release can."""
    if attention_dp and target.release.version < "1.1":  # NVIDIA/TensorRT-LLM#5267
        return False
    if target.architecture.is_sparse:
        # Off by the guide. A prompt of more than 8,192 tokens leaves no choice: larger iterations crash (#9932).
        isl = target.request.workload.isl or target.recipe.workload.isl or 0
        return isl >= SPARSE_NUM_TOKENS and target.supports("v32_chunked_prefill")
    return bool(recipe.get("enable_chunked_prefill", False)) and target.supports(
        f"chunked_prefill_mla_{target.gpu.architecture}"
    )


def _batch_size(target: Target, recipe: _Published, layout: Layout) -> int:
    asked = target.request.workload.concurrency
    published = int(recipe.get("max_batch_size", LOW_CONCURRENCY))
    if asked is None or target.is_as_published:
        return published
    return -(-asked // layout.attention_dp_size)


def _num_tokens(
    target: Target, recipe: _Published, workload: Workload, max_batch_size: int, draft: int, *, chunked: bool
) -> int:
    published = int(recipe.get("max_num_tokens", 8192))
    needed = num_tokens_for(_isl(workload), max_batch_size, draft)
    if chunked:
        return min(published, SPARSE_NUM_TOKENS) if target.architecture.is_sparse else published
    if target.request.workload.isl is not None and not target.is_as_published:
        return needed
    as_many_drafts = draft == recipe.get("speculative_config.num_nextn_predict_layers", 0)
    holds = target.request.workload.concurrency is None or target.is_as_published
    # Chunks that the recipe counts on may not be had here; then a whole prompt has to fit.
    return published if holds and as_many_drafts and published >= _isl(workload) else max(published, needed)


def _graph_max_batch_size(recipe: _Published, max_batch_size: int, *, computed: bool) -> int:
    if recipe.get("cuda_graph_config", {}) is None:
        return 0
    return max_batch_size if computed else int(recipe.get("cuda_graph_config.max_batch_size", max_batch_size))


def _seq_len(target: Target, recipe: _Published, workload: Workload) -> int:
    longest = target.architecture.max_position_embeddings
    needed = _round_up(_isl(workload) + _osl(workload), 256)
    if target.request.workload.isl is not None or target.request.workload.osl is not None:
        chosen = needed
    else:
        chosen = recipe.get("max_seq_len", max(MAX_SEQ_LEN, needed))
    if chosen > longest:
        raise RefusedPlanError(
            f"{_isl(workload):,} tokens in and {_osl(workload):,} out are more than {target.variant.name} reads: "
            f"{longest:,} (max_position_embeddings); use a smaller --isl or --osl"
        )
    return int(chosen)


def _kv_setting(target: Target, recipe: _Published) -> Literal["auto", "fp8"]:
    if target.request.kv_dtype is not None:
        return target.request.kv_dtype
    wanted: Literal["auto", "fp8"] = recipe.get("kv_cache_config.dtype", "fp8")
    return wanted if fp8_kv_works(target) else "auto"


def fp8_kv_works(target: Target) -> bool:
    """An FP8 KV cache is supported for this model, GPU and release, and known to work with these weights."""
    if target.architecture.is_sparse and target.gpu.architecture != "blackwell":
        return False
    return target.precision != "w4a8" and target.supports(f"fp8_kv_mla_{target.gpu.architecture}")


def _isl(workload: Workload) -> int:
    return workload.isl or TYPICAL.isl or 0


def _osl(workload: Workload) -> int:
    return workload.osl or TYPICAL.osl or 0


def _least_tokens(sizes: Sizes) -> int:
    return _isl(sizes.workload) + _osl(sizes.workload)


def _ever_smaller(wanted: Sizes) -> Iterator[Sizes]:
    """`wanted`, then with fewer tokens an iteration, then smaller batches, then shorter requests."""
    yield wanted
    sizes = wanted
    least = num_tokens_for(_isl(sizes.workload), 1, sizes.num_draft_tokens)
    fewer = OOM_NUM_TOKENS if sizes.chunked_prefill else max(OOM_NUM_TOKENS, least)
    if fewer < sizes.max_num_tokens:
        sizes = replace(sizes, max_num_tokens=fewer, as_published=False, shrunk=_because(wanted, "max_num_tokens"))
        yield sizes
    while sizes.max_batch_size > 8:
        batch = sizes.max_batch_size // 2
        sizes = replace(
            sizes,
            max_batch_size=batch,
            graph_sizes=(),
            graph_max_batch_size=min(batch, sizes.graph_max_batch_size),
            as_published=False,
            shrunk=_because(wanted, "max_num_tokens and max_batch_size"),
        )
        yield sizes
    while sizes.max_seq_len // 2 >= max(8192, _round_up(_least_tokens(wanted), 256)):
        sizes = replace(
            sizes, max_seq_len=sizes.max_seq_len // 2, shrunk=_because(wanted, "the limits and max_seq_len")
        )
        yield sizes


def _because(wanted: Sizes, what: str) -> str:
    earlier = f"{wanted.shrunk}; " if wanted.shrunk else ""
    return f"{earlier}{what} made smaller, until one request of max_seq_len fits the KV cache"


def _no_room(target: Target, wanted: Sizes) -> str:
    budget = make_plan_budget(target, wanted)
    return (
        f"{target.variant.name} ({target.precision}) on {target.num_gpus} x {target.gpu.name}: of "
        f"{budget.memory / GIB:.0f} GiB a GPU, {budget.weights / GIB:.1f} are weights and {budget.workspace / GIB:.1f} "
        f"workspace, which leaves no room for a request of {_least_tokens(wanted):,} tokens; take more GPUs or shorter "
        "requests"
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
