"""The sizes that fit: those that are wanted, made smaller until one request of the longest length fits the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from deepseek_triton_build.arithmetic.gpu_memory import GIB, Budget, make_budget
from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.data.catalog.profiles import ANY_WORKLOAD
from deepseek_triton_build.data.releases.spelling import spell
from deepseek_triton_build.planning.batch_sizes import (
    OOM_NUM_TOKENS,
    Sizes,
    isl_of,
    least_tokens,
    num_tokens_for,
    osl_of,
    round_up,
    wanted_sizes,
)
from deepseek_triton_build.planning.layout import (
    WIDE_EP,
    wants_attention_dp,
)
from deepseek_triton_build.planning.target import Target


def choose_sizes(target: Target) -> tuple[Sizes, Budget]:
    """The sizes, and the memory they take.

    :raises RefusedPlanError: when even the smallest do not fit.
    """
    wanted = _with_the_best_iteration(target, wanted_sizes(target, attention_dp=wants_attention_dp(target)))
    if wanted.layout.attention_dp and wanted.moe_backend != WIDE_EP and not _fits(target, wanted):
        budget = make_plan_budget(target, wanted)
        reason = (
            f"off: the {budget.weights / GIB:.1f} GiB of weights that attention DP keeps on every GPU, and the "
            "iterations of all ranks together, leave no room for a KV cache"
        )
        wanted = replace(wanted_sizes(target, attention_dp=False), attention_dp_reason=reason)
    wanted = _no_larger_than_the_cache(target, wanted)
    for sizes in _ever_smaller(wanted):
        budget = make_plan_budget(target, sizes)
        if budget.kv_tokens >= sizes.max_seq_len:
            return sizes, budget
    raise RefusedPlanError(_no_room(target, wanted))


def _fits(target: Target, sizes: Sizes) -> bool:
    """One request of the planned lengths."""
    return make_plan_budget(target, sizes).kv_tokens >= least_tokens(sizes)


def _with_the_best_iteration(target: Target, wanted: Sizes) -> Sizes:
    """Under attention DP the experts see the tokens of every rank at once. Where their activations crowd out the KV
    cache, they take them in parts, or the iterations become smaller."""
    if not wanted.layout.attention_dp or target.is_as_published:
        return wanted
    asked = target.request.workload.concurrency or wanted.max_concurrency
    best, most = wanted, 0
    for sizes in _smaller_iterations(target, wanted):
        budget = make_plan_budget(target, sizes)
        held = budget.concurrent_requests(isl_of(sizes.workload), osl_of(sizes.workload))
        if held >= asked and budget.kv_tokens >= sizes.max_seq_len:
            return sizes
        if held > most * _WORTH_IT:
            best, most = sizes, held
    return best


def _smaller_iterations(target: Target, wanted: Sizes) -> Iterator[Sizes]:
    yield wanted
    sizes = wanted
    key = spell({"moe_config.max_num_tokens": 1}, target.release.version)
    is_known = all(target.release.find_key(name) for name in key)
    if is_known and sizes.moe_max_num_tokens is None and sizes.moe_backend != WIDE_EP:
        sizes = replace(sizes, moe_max_num_tokens=max(sizes.max_num_tokens, OOM_NUM_TOKENS), as_published=False)
        yield sizes
    fewer = _fewer_tokens(sizes)
    if fewer < sizes.max_num_tokens:
        bound = None if sizes.moe_max_num_tokens is None else min(sizes.moe_max_num_tokens, fewer)
        yield replace(sizes, max_num_tokens=fewer, moe_max_num_tokens=bound, as_published=False)


def _no_larger_than_the_cache(target: Target, wanted: Sizes) -> Sizes:
    """Other requests than the published ones, but no more at once than the KV cache holds."""
    workload = target.request.workload
    if workload == ANY_WORKLOAD or target.is_as_published:
        return wanted
    sizes = wanted
    for _ in range(_ROUNDS):
        held = max(1, make_plan_budget(target, sizes).kv_tokens // least_tokens(sizes))
        if held >= sizes.max_batch_size:
            break
        sizes = _with_batch(sizes, held)
    if sizes.max_batch_size == wanted.max_batch_size:
        return wanted
    asked = "were asked for" if workload.concurrency else "were published"
    return replace(sizes, shrunk=f"{wanted.max_concurrency:,} {asked}, and the KV cache holds no more of these lengths")


_WORTH_IT = 1.25
"""How many times the requests a smaller iteration has to hold, for it makes prompts slower."""
_ROUNDS = 4
"""A smaller batch has fewer graphs and smaller iterations, so the cache holds a little more; it settles at once."""


def _with_batch(sizes: Sizes, max_batch_size: int) -> Sizes:
    """`sizes` for a smaller batch."""
    whole = num_tokens_for(isl_of(sizes.workload), max_batch_size, sizes.num_draft_tokens)
    return replace(
        sizes,
        max_batch_size=max_batch_size,
        max_num_tokens=sizes.max_num_tokens if sizes.chunked_prefill else min(sizes.max_num_tokens, max(whole, 1024)),
        graph_sizes=(),
        graph_max_batch_size=min(max_batch_size, sizes.graph_max_batch_size),
        as_published=False,
    )


def _ever_smaller(wanted: Sizes) -> Iterator[Sizes]:
    """`wanted`, then with fewer tokens an iteration, then smaller batches, then shorter requests."""
    yield wanted
    sizes = wanted
    fewer = _fewer_tokens(sizes)
    if fewer < sizes.max_num_tokens:
        sizes = replace(sizes, max_num_tokens=fewer, as_published=False, shrunk=_because(wanted, "max_num_tokens"))
        yield sizes
    while sizes.max_batch_size > 8:
        smaller = _with_batch(sizes, sizes.max_batch_size // 2)
        sizes = replace(smaller, shrunk=_because(wanted, "max_num_tokens and max_batch_size"))
        yield sizes
    while sizes.max_seq_len // 2 >= max(8192, round_up(least_tokens(wanted), 256)):
        sizes = replace(
            sizes, max_seq_len=sizes.max_seq_len // 2, shrunk=_because(wanted, "the limits and max_seq_len")
        )
        yield sizes


def _fewer_tokens(sizes: Sizes) -> int:
    """The guide's way out of memory trouble, or what a whole prompt takes."""
    whole = num_tokens_for(isl_of(sizes.workload), 1, sizes.num_draft_tokens)
    return OOM_NUM_TOKENS if sizes.chunked_prefill else max(OOM_NUM_TOKENS, whole)


def _because(wanted: Sizes, what: str) -> str:
    earlier = f"{wanted.shrunk}; " if wanted.shrunk else ""
    return f"{earlier}{what} made smaller, until one request of max_seq_len fits the KV cache"


def _no_room(target: Target, wanted: Sizes) -> str:
    budget = make_plan_budget(target, wanted)
    return (
        f"{target.variant.name} ({target.precision}) on {target.num_gpus} x {target.gpu.name}: of "
        f"{budget.memory / GIB:.0f} GiB a GPU, {budget.weights / GIB:.1f} are weights and {budget.workspace / GIB:.1f} "
        f"workspace, which leaves no room for a request of {least_tokens(wanted):,} tokens; take more GPUs or shorter "
        "requests"
    )


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
