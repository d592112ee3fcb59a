"""The sizes of a TensorRT-LLM deployment: its parallelism, and batch, token and length limits that fit the memory.

A recipe's own sizes hold for the GPUs and the workload it was published for. For any other they are computed. What is
wanted is then made smaller until one request of the longest length fits the KV cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from deepseek_triton_build.arithmetic.gpu_memory import (
    GIB,
    LARGEST_EXPERT_PARALLEL,
    Budget,
    KvDtype,
    Layout,
    cuda_graph_batch_sizes,
    divides_attention,
    make_budget,
)
from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.data.catalog import MoeBackendRow, find_moe_backends
from deepseek_triton_build.data.profiles import ANY_WORKLOAD, Workload
from deepseek_triton_build.data.spelling import spell
from deepseek_triton_build.data.type_strings import choices
from deepseek_triton_build.planning.target import (
    MAX_SEQ_LEN,
    TYPICAL,
    Target,
    refuse_longer_than_the_model_reads,
    refuse_uneven_stages,
    round_up,
)
from deepseek_triton_build.rules.attention import LOW_CONCURRENCY, SAFE_NUM_TOKENS
from deepseek_triton_build.rules.moe import BALANCER
from deepseek_triton_build.rules.rule import MTP_KV_LAYERS
from deepseek_triton_build.rules.size_limits import OOM_NUM_TOKENS

WIDE_EP = "WIDEEP"
LONGEST_ANSWER = 32768
"""The maximum generation length of the evaluations in DeepSeek-R1's model card."""
KV_FRACTION = 0.8
"""The KV cache's share of free memory when the recipe gives none (the deployment guide for DeepSeek-R1)."""
# Limits are multiples of it, so that they are whole KV blocks, of 32 or 64 tokens.
_BLOCK = 64
_DRAFTS = "speculative_config.num_nextn_predict_layers"
# Factor by which a smaller iteration has to raise the number of requests held, as it makes prompts slower.
_LEAST_GAIN = 1.25
# Rounds of shrinking the batch. A smaller batch has fewer graphs and smaller iterations, so the cache holds a little
# more; that settles at once.
_ROUNDS = 4


_KvSetting = Literal["auto", "fp8", "fp8_ds_mla"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The numbers of a plan."""

    layout: Layout
    workload: Workload
    """The workload, filled in: both lengths are numbers; concurrency may be None."""
    max_batch_size: int
    """Largest batch of one rank. Under attention DP each rank has its own batch."""
    max_num_tokens: int
    max_seq_len: int
    graph_sizes: tuple[int, ...]
    """Batch sizes of CUDA graphs that are listed; empty: those that graph_max_batch_size stands for."""
    graph_max_batch_size: int
    """Largest batch size of the CUDA graphs; 0 for none."""
    chunked_prefill: bool
    kv_setting: _KvSetting
    """kv_cache_config.dtype; "auto" is the checkpoint's own dtype."""
    kv_dtype: KvDtype
    """The dtype that the KV cache really has."""
    kv_fraction: float
    num_draft_tokens: int
    moe_backend: str
    moe_max_num_tokens: int | None
    expert_slots: int
    as_published: bool
    """Whether all sizes are the recipe's own."""
    attention_dp_reason: str = ""
    """Why attention DP is off though it was wanted; empty otherwise."""
    shrunk: str = ""
    """The limits that were made smaller so that they fit, in words; empty when none was."""

    @property
    def max_concurrency(self) -> int:
        """Requests that decode together, in the whole instance."""
        return self.max_batch_size * self.layout.attention_dp_size

    @property
    def tokens_per_request(self) -> int:
        """KV tokens of one request of the planned lengths."""
        return isl_of(self.workload) + (self.workload.osl or TYPICAL.osl or 0)


def isl_of(workload: Workload) -> int:
    """Return the input length of a workload in tokens, the typical one when it gives none."""
    return workload.isl or TYPICAL.isl or 0


def seq_len_for(longest_prompt: int) -> int:
    """Return the max_seq_len for the longest prompt and the longest answer."""
    return round_up(longest_prompt + LONGEST_ANSWER, 256)


def num_tokens_for(isl: int, max_batch_size: int, num_draft_tokens: int) -> int:
    """Return the max_num_tokens for one whole prompt while the rest of the batch decodes, in whole KV blocks.

    The published recipes follow this formula: 1,151 = 1,024 + 128 - 1; 1,160 = 1,000 + 161 - 1; 65,548 = 65,536 + 12.
    """
    return round_up(isl + max_batch_size * (1 + num_draft_tokens), _BLOCK)


# How one model instance is divided among its GPUs


def choose_layout(target: Target, *, attention_dp: bool) -> Layout:
    """Return the parallelism of the target, or raise RefusedPlanError if its stages don't divide its GPUs."""
    stages = target.request.pipeline_parallel_size
    refuse_uneven_stages(target.num_gpus, stages)
    tensor = target.num_gpus // stages
    published = target.recipe.value("moe_expert_parallel_size")
    is_for_these = published is not None and target.recipe.num_gpus in (None, target.num_gpus)
    return Layout(
        tensor_parallel_size=tensor,
        expert_parallel_size=min(published if is_for_these else LARGEST_EXPERT_PARALLEL, tensor),
        pipeline_parallel_size=stages,
        attention_dp=attention_dp,
    )


def needs_attention_dp(target: Target) -> bool:
    """Tell whether tensor parallelism can't divide the attention of the target."""
    ranks = max(1, target.num_gpus // max(1, target.request.pipeline_parallel_size))
    return not divides_attention(target.architecture, target.precision, ranks)


def _wants_attention_dp(target: Target) -> bool:
    """Tell whether attention DP should be on: as set by hand or else as published, but for another concurrency on for
    many requests and off for few, which it serves slower. Wide EP doesn't run without it, and neither do GPUs that
    can't share the heads."""
    if needs_attention_dp(target):
        return True
    by_hand = dict(target.request.overrides).get("enable_attention_dp")
    if isinstance(by_hand, bool):  # the sizes that fit depend on it
        return by_hand
    published = bool(target.recipe.value("enable_attention_dp", False))
    concurrency = target.request.workload.concurrency
    is_wide = target.recipe.value("moe_config.backend") == WIDE_EP
    if concurrency is None or target.is_as_published or is_wide or target.profile.name == "latency":
        return published
    return concurrency > LOW_CONCURRENCY


def choose_moe_backend(target: Target, layout: Layout) -> tuple[str, MoeBackendRow]:
    """Return the MoE back end and its line in the support matrix.

    The back end is the recipe's where the line has it, else the line's default, or what the release has of the others.

    :raises RefusedPlanError: where no back end is published, and the request does not ask for one all the same.
    """
    row = find_moe_backends(target.gpu, target.precision, layout.expert_parallel_size)
    if row is None and target.request.takes_unpublished_experts:
        row = find_moe_backends(target.gpu, target.precision, 1)
    if row is None:
        raise RefusedPlanError(
            f"no MoE back end is published for {target.precision} on {target.gpu.name} with expert parallelism "
            f"{layout.expert_parallel_size} (support matrix of the TensorRT-LLM deployment guide for DeepSeek-R1)"
        )
    published = target.recipe.value("moe_config.backend")
    usual = published if published in row.backends else row.default
    field = next(map(target.release.find_key, spell({"moe_config.backend": usual}, target.release.version)))
    taken = choices(field.type) if field is not None else []
    names = (usual, *row.backends, *row.measured)
    return next((name for name in names if not taken or name in taken), usual), row


def _has_key(target: Target, canonical_key: str) -> bool:
    return all(map(target.release.find_key, spell({canonical_key: 1}, target.release.version)))


# The sizes that are wanted


def _wanted_sizes(target: Target, *, attention_dp: bool) -> Sizes:
    recipe, asked = target.recipe, target.request.workload
    layout = choose_layout(target, attention_dp=attention_dp)
    other_dp = attention_dp != recipe.value("enable_attention_dp", False)
    as_published = target.is_as_published and not other_dp
    computed = asked != ANY_WORKLOAD and not as_published
    draft = target.request.mtp
    if draft is None:
        draft = int(recipe.value(_DRAFTS, 0)) if target.architecture.num_mtp_layers else 0
    workload = asked.filled_from(recipe.workload).filled_from(TYPICAL)
    batch = int(recipe.value("max_batch_size", LOW_CONCURRENCY))
    if asked.concurrency is not None and not target.is_as_published:
        batch = -(-asked.concurrency // layout.attention_dp_size)
    chunked = _chunked_prefill(target, num_tokens_for(isl_of(workload), batch, draft), attention_dp=attention_dp)
    num_tokens = _num_tokens(target, workload, batch, draft, chunked=chunked)
    backend, _ = choose_moe_backend(target, layout)
    has_balancer = backend == WIDE_EP and _has_key(target, BALANCER)
    usual_kv: _KvSetting = recipe.value("kv_cache_config.dtype", "fp8") if fp8_kv_works(target) else "auto"
    kv_setting = target.request.kv_dtype or usual_kv
    graphs = int(recipe.value("cuda_graph_config.max_batch_size", batch))
    if computed:
        graphs = batch
    if recipe.value("cuda_graph_config", {}) is None:
        graphs = 0
    # The recipe's fraction holds unless it was chosen for iterations of another size.
    fraction = float(recipe.value("kv_cache_config.free_gpu_memory_fraction", KV_FRACTION))
    published_tokens = recipe.value("max_num_tokens", num_tokens)
    was_cut = fraction < KV_FRACTION and 2 * num_tokens <= published_tokens
    was_raised = fraction > KV_FRACTION and num_tokens >= 2 * published_tokens
    # An iteration may not reach the recipe's limit on tokens that the experts process at once.
    moe_tokens: int | None = recipe.value("moe_config.max_num_tokens")
    is_reached = moe_tokens is not None and moe_tokens < num_tokens * layout.attention_dp_size
    return Sizes(
        layout=layout,
        workload=workload,
        max_batch_size=batch,
        max_num_tokens=num_tokens,
        max_seq_len=_seq_len(target, workload, longest_prompt=None if chunked else num_tokens),
        graph_sizes=() if computed or other_dp else tuple(recipe.value("cuda_graph_config.batch_sizes", ())),
        graph_max_batch_size=graphs,
        chunked_prefill=chunked,
        kv_setting=kv_setting,
        kv_dtype="fp8" if kv_setting != "auto" or target.checkpoint.kv_cache_quant_algo == "FP8" else "bf16",
        kv_fraction=KV_FRACTION if was_cut or was_raised else fraction,
        num_draft_tokens=draft,
        moe_backend=backend,
        moe_max_num_tokens=moe_tokens if is_reached or as_published else None,
        expert_slots=int(recipe.value(f"{BALANCER}.num_slots", 0)) if has_balancer else 0,
        as_published=as_published and not computed,
    )


def _chunked_prefill(target: Target, whole_prompt: int, *, attention_dp: bool) -> bool:
    """Tell whether long prompts go in chunks: where the recipe has it, and GPU, model and release can do it.

    :param whole_prompt: tokens of an iteration with a whole prompt.
    """
    if attention_dp and target.release.is_before("1.1"):  # NVIDIA/TensorRT-LLM#5267
        return False
    if target.architecture.attention == "dsa":
        # The guide turns it off. It is needed all the same where a whole prompt makes an iteration that may crash
        # (NVIDIA/TensorRT-LLM#9932).
        return whole_prompt > SAFE_NUM_TOKENS and target.supports("v32_chunked_prefill")
    return bool(target.recipe.value("enable_chunked_prefill", False)) and target.supports(
        f"chunked_prefill_mla_{target.gpu.architecture}"
    )


def _num_tokens(target: Target, workload: Workload, max_batch_size: int, draft: int, *, chunked: bool) -> int:
    published = int(target.recipe.value("max_num_tokens", 8192))
    needed = num_tokens_for(isl_of(workload), max_batch_size, draft)
    asked = target.request.workload
    if chunked:
        limit = SAFE_NUM_TOKENS if target.architecture.attention == "dsa" else published
        return max(limit, round_up(max_batch_size, _BLOCK))  # each request that decodes has a token in an iteration
    if asked.isl is not None and not target.is_as_published:
        return needed
    holds = (asked.concurrency is None or target.is_as_published) and draft == target.recipe.value(_DRAFTS, 0)
    # The recipe may count on chunked prefill where this target has none; then a whole prompt has to fit.
    return published if holds and published >= isl_of(workload) else max(published, needed)


def _seq_len(target: Target, workload: Workload, *, longest_prompt: int | None) -> int:
    """Return max_seq_len: the lengths asked for, else the recipe's, else what goes with its iteration.

    :param longest_prompt: the tokens of an iteration where no prompt may be longer.
    """
    asked, recipe = target.request.workload, target.recipe
    # The recipe's iterations were chosen for the lengths of one benchmark, on a server that has prompts and answers.
    is_for_a_benchmark = (
        recipe.value("max_num_tokens") is not None
        and recipe.workload.isl is not None
        and recipe.value("max_seq_len") is None
        and target.profile.name not in ("ctx", "gen")
    )
    needed = round_up(isl_of(workload) + (workload.osl or TYPICAL.osl or 0), 256)
    if asked.isl is not None or asked.osl is not None:
        chosen = needed
    elif longest_prompt is not None and is_for_a_benchmark:
        chosen = seq_len_for(longest_prompt)
    else:
        chosen = recipe.value("max_seq_len", max(MAX_SEQ_LEN, needed))
    refuse_longer_than_the_model_reads(target, workload, chosen)
    return int(chosen)


def fp8_kv_works(target: Target) -> bool:
    """Tell whether model, GPU and release support an FP8 KV cache, and whether it works with these weights."""
    if target.architecture.attention == "dsa" and target.gpu.architecture != "blackwell":
        return False
    return target.precision != "w4a8" and target.supports(f"fp8_kv_mla_{target.gpu.architecture}")


# The sizes that fit


def choose_sizes(target: Target) -> tuple[Sizes, Budget]:
    """Return the sizes that fit, and the memory they take.

    :raises RefusedPlanError: when even the smallest sizes don't fit.
    """
    wanted = _with_the_best_iteration(target, _wanted_sizes(target, attention_dp=_wants_attention_dp(target)))
    budget = _budget(target, wanted)
    no_request_fits = budget.kv_tokens < wanted.tokens_per_request
    if wanted.layout.attention_dp and wanted.moe_backend != WIDE_EP and no_request_fits:
        reason = f"off: attention DP would keep {budget.weights / GIB:.1f} GiB of weights on every GPU, "
        reason += "which leaves no room for a KV cache beside the iterations of all ranks"
        wanted = replace(_wanted_sizes(target, attention_dp=False), attention_dp_reason=reason)
    wanted = _no_larger_than_the_cache(target, wanted)
    for sizes in _smaller_and_smaller(wanted):
        budget = _budget(target, sizes)
        if budget.kv_tokens >= sizes.max_seq_len:
            return sizes, budget
    budget = _budget(target, wanted)
    raise RefusedPlanError(
        f"{target.variant.name} ({target.precision}) on {target.num_gpus} x {target.gpu.name}: of "
        f"{budget.memory / GIB:.0f} GiB a GPU, weights take {budget.weights / GIB:.1f} and workspace "
        f"{budget.workspace / GIB:.1f}, which leaves no room for a request of {wanted.tokens_per_request:,} tokens",
        fix="use more GPUs or shorter requests",
    )


def _with_the_best_iteration(target: Target, wanted: Sizes) -> Sizes:
    """Return `wanted` with an iteration that leaves enough room for the KV cache.

    Under attention DP the experts see the tokens of all ranks at once. Where their activations leave too little for the
    KV cache, the experts process the tokens in parts, or the iterations become smaller.
    """
    if not wanted.layout.attention_dp or wanted.as_published:
        return wanted
    needed = target.request.workload.concurrency or wanted.max_concurrency
    best, most = wanted, 0
    for sizes in _smaller_iterations(target, wanted):
        budget = _budget(target, sizes)
        held = budget.concurrent_requests(isl_of(sizes.workload), sizes.workload.osl or 0)
        if held >= needed and budget.kv_tokens >= sizes.max_seq_len:
            return sizes
        if held > most * _LEAST_GAIN:
            best, most = sizes, held
    return best


def _smaller_iterations(target: Target, wanted: Sizes) -> Iterator[Sizes]:
    yield wanted
    sizes = wanted
    has_key = _has_key(target, "moe_config.max_num_tokens")
    if has_key and sizes.moe_max_num_tokens is None and sizes.moe_backend != WIDE_EP:
        sizes = replace(sizes, moe_max_num_tokens=max(sizes.max_num_tokens, OOM_NUM_TOKENS), as_published=False)
        yield sizes
    fewer = fewer_tokens(sizes)
    if fewer < sizes.max_num_tokens:
        bound = None if sizes.moe_max_num_tokens is None else min(sizes.moe_max_num_tokens, fewer)
        yield replace(sizes, max_num_tokens=fewer, moe_max_num_tokens=bound, as_published=False)


def _no_larger_than_the_cache(target: Target, wanted: Sizes) -> Sizes:
    """Return `wanted` with no larger a batch than the KV cache holds, for other requests than the published ones."""
    workload = target.request.workload
    if workload == ANY_WORKLOAD or target.is_as_published:
        return wanted
    sizes = wanted
    for _ in range(_ROUNDS):
        held = max(1, _budget(target, sizes).kv_tokens // sizes.tokens_per_request)
        if held >= sizes.max_batch_size:
            break
        sizes = _with_batch(sizes, held)
    if sizes.max_batch_size == wanted.max_batch_size:
        return wanted
    origin = "asked for" if workload.concurrency else "published"
    shrunk = f"{wanted.max_concurrency:,} were {origin}, but the KV cache holds no more requests of these lengths"
    return replace(sizes, shrunk=shrunk)


def _with_batch(sizes: Sizes, max_batch_size: int) -> Sizes:
    """Return `sizes` with a smaller batch."""
    whole = num_tokens_for(isl_of(sizes.workload), max_batch_size, sizes.num_draft_tokens)
    return replace(
        sizes,
        max_batch_size=max_batch_size,
        max_num_tokens=sizes.max_num_tokens if sizes.chunked_prefill else min(sizes.max_num_tokens, max(whole, 1024)),
        graph_sizes=(),
        graph_max_batch_size=min(max_batch_size, sizes.graph_max_batch_size),
        as_published=False,
    )


def _smaller_and_smaller(wanted: Sizes) -> Iterator[Sizes]:
    """Yield `wanted`, then sizes with fewer tokens an iteration, then smaller batches, then shorter requests."""
    before = f"{wanted.shrunk}; " if wanted.shrunk else ""
    why = "made smaller until one request of max_seq_len fits the KV cache"
    yield wanted
    sizes = wanted
    fewer = fewer_tokens(sizes)
    if fewer < sizes.max_num_tokens:
        sizes = replace(sizes, max_num_tokens=fewer, as_published=False, shrunk=f"{before}max_num_tokens {why}")
        yield sizes
    while sizes.max_batch_size > 8:
        smaller = _with_batch(sizes, sizes.max_batch_size // 2)
        sizes = replace(smaller, shrunk=f"{before}max_num_tokens and max_batch_size {why}")
        yield sizes
    while sizes.max_seq_len // 2 >= max(8192, round_up(wanted.tokens_per_request, 256)):
        sizes = replace(sizes, max_seq_len=sizes.max_seq_len // 2, shrunk=f"{before}the limits and max_seq_len {why}")
        yield sizes


def fewer_tokens(sizes: Sizes) -> int:
    """Return the max_num_tokens that the guide advises when memory runs out, or what a whole prompt takes."""
    whole = num_tokens_for(isl_of(sizes.workload), 1, sizes.num_draft_tokens)
    return OOM_NUM_TOKENS if sizes.chunked_prefill else max(OOM_NUM_TOKENS, whole)


def _budget(target: Target, sizes: Sizes) -> Budget:
    """Return the memory of one GPU under `sizes`."""
    has_layer_a_draft = target.release.supports(MTP_KV_LAYERS) is not False
    return make_budget(
        target.gpu,
        target.architecture,
        target.checkpoint,
        sizes.layout,
        num_cuda_graphs=len(sizes.graph_sizes or cuda_graph_batch_sizes(sizes.graph_max_batch_size)),
        max_num_tokens=sizes.max_num_tokens,
        moe_max_num_tokens=sizes.moe_max_num_tokens,
        kv_dtype=sizes.kv_dtype,
        kv_fraction=sizes.kv_fraction,
        mtp_layers=sizes.num_draft_tokens if has_layer_a_draft else min(1, sizes.num_draft_tokens),
        expert_slots=sizes.expert_slots,
        sampler_batch=0 if sizes.num_draft_tokens else sizes.max_batch_size,  # as trtllm_settings.py chooses it
    )
