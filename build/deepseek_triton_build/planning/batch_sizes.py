"""Batch, token and length limits for a target and a workload.

A recipe's own sizes hold for the GPUs and the workload it was published for. For any other they are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deepseek_triton_build.arithmetic.gpu_memory import KvDtype, Layout, cuda_graph_batch_sizes
from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.data.profiles import ANY_WORKLOAD, Workload
from deepseek_triton_build.planning.layout import choose_layout, choose_moe_backend, expert_slots
from deepseek_triton_build.planning.target import Target
from deepseek_triton_build.rules.attention import LOW_CONCURRENCY
from deepseek_triton_build.rules.sparse import SAFE_NUM_TOKENS

_DRAFTS = "speculative_config.num_nextn_predict_layers"
TYPICAL = Workload(isl=1024, osl=2048)
"""The lengths of the published benchmarks, for when neither request nor recipe gives any."""
MAX_SEQ_LEN = 65536
"""max_seq_len when no length is asked for: R1 reasons for tens of thousands of tokens."""
LONGEST_ANSWER = 32768
"""The maximum generation length of the evaluations in DeepSeek-R1's model card."""
KV_FRACTION = 0.8
"""The KV cache's share of free memory when the recipe gives none (the deployment guide for DeepSeek-R1)."""
_BLOCK = 64
"""Limits are multiples of it, so that they are whole KV blocks, of 32 or 64 tokens."""


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
    kv_setting: Literal["auto", "fp8"]
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
    def num_graphs(self) -> int:
        return len(self.graph_sizes) or len(cuda_graph_batch_sizes(self.graph_max_batch_size))

    @property
    def max_concurrency(self) -> int:
        """Requests that decode together, in the whole instance."""
        return self.max_batch_size * self.layout.attention_dp_size


def num_tokens_for(isl: int, max_batch_size: int, num_draft_tokens: int) -> int:
    """Return the max_num_tokens for one whole prompt while the rest of the batch decodes, in whole KV blocks.

    The published recipes follow this formula: 1,151 = 1,024 + 128 - 1; 1,160 = 1,000 + 161 - 1; 65,548 = 65,536 + 12.
    """
    return round_up(isl + max_batch_size * (1 + num_draft_tokens), _BLOCK)


def wanted_sizes(target: Target, *, attention_dp: bool) -> Sizes:
    """Return the sizes that are wanted, before any of them is made smaller to fit."""
    recipe = target.recipe
    layout = choose_layout(target, attention_dp=attention_dp)
    other_dp = attention_dp != recipe.value("enable_attention_dp", False)
    as_published = target.is_as_published and not other_dp
    computed = target.request.workload != ANY_WORKLOAD and not as_published
    draft = _num_draft_tokens(target)
    workload = target.request.workload.filled_from(recipe.workload).filled_from(TYPICAL)
    batch = _batch_size(target, layout)
    chunked = _chunked_prefill(target, workload, batch, draft, attention_dp=attention_dp)
    num_tokens = _num_tokens(target, workload, batch, draft, chunked=chunked)
    backend, _ = choose_moe_backend(target, layout)
    kv_setting = _kv_setting(target)
    return Sizes(
        layout=layout,
        workload=workload,
        max_batch_size=batch,
        max_num_tokens=num_tokens,
        max_seq_len=_seq_len(target, workload, longest_prompt=None if chunked else num_tokens),
        graph_sizes=() if computed or other_dp else tuple(recipe.value("cuda_graph_config.batch_sizes", ())),
        graph_max_batch_size=_graph_max_batch_size(target, batch, computed=computed),
        chunked_prefill=chunked,
        kv_setting=kv_setting,
        kv_dtype="fp8" if "FP8" in (kv_setting.upper(), target.checkpoint.kv_cache_quant_algo) else "bf16",
        kv_fraction=_kv_fraction(target, num_tokens),
        num_draft_tokens=draft,
        moe_backend=backend,
        moe_max_num_tokens=_moe_max_num_tokens(target, layout, num_tokens, as_published=as_published),
        expert_slots=expert_slots(target, backend),
        as_published=as_published and not computed,
    )


def _num_draft_tokens(target: Target) -> int:
    asked = target.request.mtp
    if asked is not None:
        return asked
    return int(target.recipe.value(_DRAFTS, 0)) if target.architecture.num_mtp_layers else 0


def _chunked_prefill(
    target: Target, workload: Workload, max_batch_size: int, draft: int, *, attention_dp: bool
) -> bool:
    """Tell whether long prompts go in chunks: where the recipe has it, and GPU, model and release can do it."""
    if attention_dp and target.release.is_before("1.1"):  # NVIDIA/TensorRT-LLM#5267
        return False
    if target.architecture.is_sparse:
        # The guide turns it off. It is needed all the same where a whole prompt makes an iteration that may crash
        # (NVIDIA/TensorRT-LLM#9932).
        whole = num_tokens_for(isl_of(workload), max_batch_size, draft)
        return whole > SAFE_NUM_TOKENS and target.supports("v32_chunked_prefill")
    return bool(target.recipe.value("enable_chunked_prefill", False)) and target.supports(
        f"chunked_prefill_mla_{target.gpu.architecture}"
    )


def _batch_size(target: Target, layout: Layout) -> int:
    asked = target.request.workload.concurrency
    published = int(target.recipe.value("max_batch_size", LOW_CONCURRENCY))
    if asked is None or target.is_as_published:
        return published
    return -(-asked // layout.attention_dp_size)


def _num_tokens(target: Target, workload: Workload, max_batch_size: int, draft: int, *, chunked: bool) -> int:
    published = int(target.recipe.value("max_num_tokens", 8192))
    needed = num_tokens_for(isl_of(workload), max_batch_size, draft)
    if chunked:
        limit = SAFE_NUM_TOKENS if target.architecture.is_sparse else published
        return max(limit, round_up(max_batch_size, _BLOCK))  # each request that decodes has a token in an iteration
    if target.request.workload.isl is not None and not target.is_as_published:
        return needed
    as_many_drafts = draft == target.recipe.value(_DRAFTS, 0)
    holds = target.request.workload.concurrency is None or target.is_as_published
    # The recipe may count on chunked prefill where this target has none; then a whole prompt has to fit.
    return published if holds and as_many_drafts and published >= isl_of(workload) else max(published, needed)


def _graph_max_batch_size(target: Target, max_batch_size: int, *, computed: bool) -> int:
    if target.recipe.value("cuda_graph_config", {}) is None:
        return 0
    published = target.recipe.value("cuda_graph_config.max_batch_size", max_batch_size)
    return max_batch_size if computed else int(published)


def _kv_fraction(target: Target, max_num_tokens: int) -> float:
    """Return the recipe's fraction, unless it was chosen for iterations of another size."""
    published = float(target.recipe.value("kv_cache_config.free_gpu_memory_fraction", KV_FRACTION))
    published_tokens = target.recipe.value("max_num_tokens", max_num_tokens)
    was_cut = published < KV_FRACTION and 2 * max_num_tokens <= published_tokens
    was_raised = published > KV_FRACTION and max_num_tokens >= 2 * published_tokens
    return KV_FRACTION if was_cut or was_raised else published


def _moe_max_num_tokens(target: Target, layout: Layout, max_num_tokens: int, *, as_published: bool) -> int | None:
    """Return the recipe's limit on tokens that the experts process at once; None where an iteration can't reach it."""
    published: int | None = target.recipe.value("moe_config.max_num_tokens")
    is_reached = published is not None and published < max_num_tokens * layout.attention_dp_size
    return published if is_reached or as_published else None


def _seq_len(target: Target, workload: Workload, *, longest_prompt: int | None) -> int:
    """Return max_seq_len: the lengths asked for, else the recipe's, else what goes with its iteration.

    :param longest_prompt: the tokens of an iteration where no prompt may be longer.
    """
    longest = target.architecture.max_position_embeddings
    needed = round_up(isl_of(workload) + osl_of(workload), 256)
    if target.request.workload.isl is not None or target.request.workload.osl is not None:
        chosen = needed
    elif longest_prompt is not None and _is_for_a_benchmark(target):
        chosen = seq_len_for(longest_prompt)
    else:
        chosen = target.recipe.value("max_seq_len", max(MAX_SEQ_LEN, needed))
    if chosen > longest:
        raise RefusedPlanError(
            f"{isl_of(workload):,} input and {osl_of(workload):,} output tokens are more than the {longest:,} that "
            f"{target.variant.name} reads (max_position_embeddings)",
            fix="use a smaller --isl or --osl",
        )
    return int(chosen)


def seq_len_for(longest_prompt: int) -> int:
    """Return the max_seq_len for the longest prompt and the longest answer."""
    return round_up(longest_prompt + LONGEST_ANSWER, 256)


def _is_for_a_benchmark(target: Target) -> bool:
    """Tell whether the recipe's iterations were chosen for the lengths of one benchmark, on a server that has prompts
    and answers."""
    recipe = target.recipe
    chosen = recipe.value("max_num_tokens") is not None and recipe.workload.isl is not None
    return chosen and recipe.value("max_seq_len") is None and target.profile.name not in ("ctx", "gen")


def _kv_setting(target: Target) -> Literal["auto", "fp8"]:
    if target.request.kv_dtype is not None:
        return target.request.kv_dtype
    wanted: Literal["auto", "fp8"] = target.recipe.value("kv_cache_config.dtype", "fp8")
    return wanted if fp8_kv_works(target) else "auto"


def fp8_kv_works(target: Target) -> bool:
    """Tell whether model, GPU and release support an FP8 KV cache, and whether it works with these weights."""
    if target.architecture.is_sparse and target.gpu.architecture != "blackwell":
        return False
    return target.precision != "w4a8" and target.supports(f"fp8_kv_mla_{target.gpu.architecture}")


def isl_of(workload: Workload) -> int:
    """Return the input length of a workload in tokens, the typical one when it gives none."""
    return workload.isl or TYPICAL.isl or 0


def osl_of(workload: Workload) -> int:
    """Return the output length of a workload in tokens, the typical one when it gives none."""
    return workload.osl or TYPICAL.osl or 0


def tokens_per_request(sizes: Sizes) -> int:
    """Return the KV tokens of one request of the planned lengths."""
    return isl_of(sizes.workload) + osl_of(sizes.workload)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
