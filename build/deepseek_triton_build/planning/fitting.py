"""The sizes that fit: the wanted ones, made smaller until one request of the longest length fits the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from deepseek_triton_build.arithmetic.gpu_memory import GIB, Budget, make_budget
from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.data.profiles import ANY_WORKLOAD
from deepseek_triton_build.data.spelling import spell
from deepseek_triton_build.planning.batch_sizes import (
    Sizes,
    isl_of,
    num_tokens_for,
    osl_of,
    round_up,
    tokens_per_request,
    wanted_sizes,
)
from deepseek_triton_build.planning.layout import WIDE_EP, wants_attention_dp
from deepseek_triton_build.planning.target import Target
from deepseek_triton_build.rules.rule import MTP_KV_LAYERS
from deepseek_triton_build.rules.size_limits import OOM_NUM_TOKENS


def choose_sizes(target: Target) -> tuple[Sizes, Budget]:
    """Return the sizes that fit, and the memory they take.

    :raises RefusedPlanError: when even the smallest sizes don't fit.
    """
    wanted = _with_the_best_iteration(target, wanted_sizes(target, attention_dp=wants_attention_dp(target)))
    budget = make_plan_budget(target, wanted)
    no_request_fits = budget.kv_tokens < tokens_per_request(wanted)
    if wanted.layout.attention_dp and wanted.moe_backend != WIDE_EP and no_request_fits:
        reason = (
            f"off: attention DP would keep {budget.weights / GIB:.1f} GiB of weights on every GPU, which leaves no "
            "room for a KV cache beside the iterations of all ranks"
        )
        wanted = replace(wanted_sizes(target, attention_dp=False), attention_dp_reason=reason)
    wanted = _no_larger_than_the_cache(target, wanted)
    for sizes in _smaller_and_smaller(wanted):
        budget = make_plan_budget(target, sizes)
        if budget.kv_tokens >= sizes.max_seq_len:
            return sizes, budget
    raise RefusedPlanError(_no_room(target, wanted), fix="use more GPUs or shorter requests")


def _with_the_best_iteration(target: Target, wanted: Sizes) -> Sizes:
    """Return `wanted` with an iteration that leaves enough room for the KV cache.

    Under attention DP the experts see the tokens of all ranks at once. Where their activations leave too little for the
    KV cache, the experts process the tokens in parts, or the iterations become smaller.
    """
    if not wanted.layout.attention_dp or wanted.as_published:
        return wanted
    asked = target.request.workload.concurrency or wanted.max_concurrency
    best, most = wanted, 0
    for sizes in _smaller_iterations(target, wanted):
        budget = make_plan_budget(target, sizes)
        held = budget.concurrent_requests(isl_of(sizes.workload), osl_of(sizes.workload))
        if held >= asked and budget.kv_tokens >= sizes.max_seq_len:
            return sizes
        if held > most * _LEAST_GAIN:
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
    """Return `wanted` with no larger a batch than the KV cache holds, for other requests than the published ones."""
    workload = target.request.workload
    if workload == ANY_WORKLOAD or target.is_as_published:
        return wanted
    sizes = wanted
    for _ in range(_ROUNDS):
        held = max(1, make_plan_budget(target, sizes).kv_tokens // tokens_per_request(sizes))
        if held >= sizes.max_batch_size:
            break
        sizes = _with_batch(sizes, held)
    if sizes.max_batch_size == wanted.max_batch_size:
        return wanted
    origin = "asked for" if workload.concurrency else "published"
    shrunk = f"{wanted.max_concurrency:,} were {origin}, but the KV cache holds no more requests of these lengths"
    return replace(sizes, shrunk=shrunk)


_LEAST_GAIN = 1.25
"""Factor by which a smaller iteration has to raise the number of requests held, as it makes prompts slower."""
_ROUNDS = 4
"""Rounds of shrinking the batch. A smaller batch has fewer graphs and smaller iterations, so the cache holds a little
more; that settles at once."""


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
    yield wanted
    sizes = wanted
    fewer = _fewer_tokens(sizes)
    if fewer < sizes.max_num_tokens:
        sizes = replace(sizes, max_num_tokens=fewer, as_published=False, shrunk=_shrunk_text(wanted, "max_num_tokens"))
        yield sizes
    while sizes.max_batch_size > 8:
        smaller = _with_batch(sizes, sizes.max_batch_size // 2)
        sizes = replace(smaller, shrunk=_shrunk_text(wanted, "max_num_tokens and max_batch_size"))
        yield sizes
    while sizes.max_seq_len // 2 >= max(8192, round_up(tokens_per_request(wanted), 256)):
        sizes = replace(
            sizes, max_seq_len=sizes.max_seq_len // 2, shrunk=_shrunk_text(wanted, "the limits and max_seq_len")
        )
        yield sizes


def _fewer_tokens(sizes: Sizes) -> int:
    """Return the max_num_tokens that the guide advises when memory runs out, or what a whole prompt takes."""
    whole = num_tokens_for(isl_of(sizes.workload), 1, sizes.num_draft_tokens)
    return OOM_NUM_TOKENS if sizes.chunked_prefill else max(OOM_NUM_TOKENS, whole)


def _shrunk_text(wanted: Sizes, what: str) -> str:
    earlier = f"{wanted.shrunk}; " if wanted.shrunk else ""
    return f"{earlier}{what} made smaller until one request of max_seq_len fits the KV cache"


def _no_room(target: Target, wanted: Sizes) -> str:
    budget = make_plan_budget(target, wanted)
    return (
        f"{target.variant.name} ({target.precision}) on {target.num_gpus} x {target.gpu.name}: of "
        f"{budget.memory / GIB:.0f} GiB a GPU, weights take {budget.weights / GIB:.1f} and workspace "
        f"{budget.workspace / GIB:.1f}, which leaves no room for a request of {tokens_per_request(wanted):,} tokens"
    )


def make_plan_budget(target: Target, sizes: Sizes) -> Budget:
    """Return the memory of one GPU under `sizes`."""
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
        mtp_layers=_mtp_layers(target, sizes),
        expert_slots=sizes.expert_slots,
        sampler_batch=0 if sizes.num_draft_tokens else sizes.max_batch_size,  # as choices/decoding.py chooses it
    )


def _mtp_layers(target: Target, sizes: Sizes) -> int:
    per_draft = target.release.supports(MTP_KV_LAYERS) is not False
    return sizes.num_draft_tokens if per_draft else min(1, sizes.num_draft_tokens)
