"""Rules M: the experts' back end, its limits and its load balancer."""

from collections.abc import Iterator

from deepseek_triton_build.arithmetic.gpu_memory import GIB, host_memory_to_prefetch
from deepseek_triton_build.arithmetic.weights import weights
from deepseek_triton_build.data.catalog import MoeBackendRow, MoeRefusal, find_moe_backends, moe_refusals
from deepseek_triton_build.data.type_strings import choices
from deepseek_triton_build.rules.rule import Deployment, RuleTable, UnknownFactError, Violation

RULES = RuleTable()
_BACKEND = "moe_config.backend"
BALANCER = "moe_config.load_balancer"
"""The section of the expert load balancer; releases before 1.1 take the path of a file with its settings."""
UNPUBLISHED = ("M003", "M004")
"""Warnings about what no release refuses and no document has. A plan takes it only on demand."""


@RULES.error("M001")
def _known_backend(d: Deployment) -> Iterator[Violation]:
    backend = d.settings.get(_BACKEND)
    found = None if d.release is None or backend is None else d.release.find_key(_BACKEND)
    known = [] if found is None else choices(found.type)
    if known and backend not in known and d.release is not None:
        message = f"{backend} is not a MoE back end of TensorRT-LLM {d.release.version}"
        yield Violation(_BACKEND, message, f"use one of {', '.join(known)}")


@RULES.error("M002")
def _refused_backend(d: Deployment) -> Iterator[Violation]:
    backend = d.get(_BACKEND)
    if d.gpu is None or d.precision is None or any(_known_backend(d)):
        return
    refusal = next((row for row in moe_refusals() if row.backend == backend and _is_refused(d, row)), None)
    if refusal is None:
        return
    default = "" if _BACKEND in d.settings else ", the default,"
    release = "" if d.release is None else f" in TensorRT-LLM {d.release.version}"
    message = f"MoE back end {backend}{default} is not supported for "
    message += f"{d.precision} on {d.gpu.name}{release}: {refusal.why}"
    able = dict.fromkeys(name for row in _matrix_rows(d) or _smallest_rows(d) for name in row.backends)
    instead = f"set {_BACKEND}: {' or '.join(able)}" if able else "use other weights"
    yield Violation(_BACKEND, message, instead)


def _is_refused(d: Deployment, row: MoeRefusal) -> bool:
    is_in_time = row.before is None or d.is_before(row.before)
    is_there = not row.architectures or d.gpu_architecture in row.architectures
    return d.precision in row.precisions and is_there and is_in_time


@RULES.warning("M003")
def _unpublished_backend(d: Deployment) -> Iterator[Violation]:
    backend, rows = d.get(_BACKEND), _matrix_rows(d)
    known = [*rows, *_smallest_rows(d)]
    if not known or d.gpu is None or any(_known_backend(d)) or any(_refused_backend(d)):
        return
    if any(backend in (*row.backends, *row.measured) for row in rows):
        return
    sizes = _possible_sizes(d)
    size = f" at expert parallelism {sizes[0]}" if len(sizes) == 1 else ""
    message = f"NVIDIA's support matrix does not have MoE back end {backend} for {d.precision} on {d.gpu.name}{size}"
    able = dict.fromkeys(name for row in rows for name in row.backends)
    fix = f"set {_BACKEND}: {' or '.join(able)}" if able else "use moe_expert_parallel_size 8 or less, or an NVL72"
    yield Violation(_BACKEND if able else "moe_expert_parallel_size", message, f"{fix}, or measure it first")


@RULES.note("M012")
def _measured_backend(d: Deployment) -> Iterator[Violation]:
    backend, rows = d.get(_BACKEND), _matrix_rows(d)
    sources = [row.measured[backend] for row in rows if backend in row.measured]
    if d.gpu is None or any(backend in row.backends for row in rows) or not sources or any(_refused_backend(d)):
        return
    message = f"NVIDIA's support matrix does not have MoE back end {backend} for "
    message += f"{d.precision} on {d.gpu.name}; its configurations do: {sources[0]}"
    yield Violation(_BACKEND, message, "nothing, where it was measured for your load")


def _matrix_rows(d: Deployment) -> list[MoeBackendRow]:
    """Return the matrix's lines for the deployment, for each degree of expert parallelism that it may have."""
    if d.gpu is None or d.precision is None:
        return []
    found = (find_moe_backends(d.gpu, d.precision, ep) for ep in _possible_sizes(d))
    return [row for row in found if row is not None]


def _smallest_rows(d: Deployment) -> list[MoeBackendRow]:
    row = find_moe_backends(d.gpu, d.precision, 1) if d.gpu is not None and d.precision is not None else None
    return [] if row is None else [row]


def _possible_sizes(d: Deployment) -> tuple[int, ...]:
    """Return the degree of expert parallelism; where it is not known, one of up to 8 ranks and one of more."""
    try:
        return (d.layout.expert_parallel_size,)
    except UnknownFactError:
        ranks = d.settings.get("tensor_parallel_size")
        return (1,) if isinstance(ranks, int) and ranks <= 8 else (1, 16)


@RULES.warning("M004")
def _wide_fp8(d: Deployment) -> Iterator[Violation]:
    if d.gpu_architecture != "blackwell" or d.precision != "fp8" or d.layout.expert_parallel_size <= 8:
        return
    if d.release is not None and d.is_before("1.2.0"):
        message = f"FP8 at expert parallelism above 8 is not published for TensorRT-LLM {d.release.version}"
        fix = "use TensorRT-LLM 1.2.0 or newer, fp4 weights, or moe_expert_parallel_size 8"
        yield Violation("moe_expert_parallel_size", message, fix)
    elif _has_balancer(d):
        message = "NVIDIA publishes no expert load balancer for FP8"
        yield Violation(BALANCER, message, "remove moe_config.load_balancer, or use fp4 weights")


@RULES.error("M005")
def _slots(d: Deployment) -> Iterator[Violation]:
    key = f"{BALANCER}.num_slots"
    slots, ep = d.get(key), d.layout.expert_parallel_size
    experts = d.architecture.num_routed_experts if d.architecture is not None else None
    if not slots:
        return
    if ep > 0 and slots % ep:
        message = f"num_slots {slots} can't be divided among {ep} expert-parallel ranks"
        yield Violation(key, message, f"use a multiple of {ep}, for example {-(-slots // ep) * ep}")
    if experts is not None and slots < experts:
        message = f"num_slots {slots} has no room for {experts} experts"
        yield Violation(key, message, f"use {experts} or more; {experts} + {ep} gives each rank one spare slot")


@RULES.error("M006")
def _balanced_backend(d: Deployment) -> Iterator[Violation]:
    backend = d.get(_BACKEND)
    # create_moe.py asserts this list: before 1.2 WIDEEP alone (release notes 1.2).
    able = ("WIDEEP",) if d.is_before("1.2.0") else ("WIDEEP", "CUTLASS", "TRTLLM", "CUTEDSL", "DEEPGEMM")
    if d.release is not None and _has_balancer(d) and backend not in able:
        message = f"the expert load balancer does not work with MoE back end {backend}"
        published = {name for row in _matrix_rows(d) for name in row.backends}
        usable = [name for name in able if name in published or not published]
        instead = f"set {_BACKEND}: {' or '.join(usable)}, or " if usable else ""
        yield Violation(BALANCER, message, f"{instead}remove {BALANCER}")


@RULES.note("M008")
def _host_copy(d: Deployment) -> Iterator[Violation]:
    copy = shared_expert_bytes(d)
    if copy and d.checkpoint is not None:
        shm, prefetched = copy / GIB, host_memory_to_prefetch(d.checkpoint) / GIB
        message = (
            f"the online load balancer keeps all experts in each node's shared memory: {shm:,.0f} GiB, and with the "
            f"{prefetched:,.0f} GiB for reading the checkpoint ahead {shm + prefetched:,.0f} GiB of the node's memory"
        )
        fix = f"give the container a /dev/shm of {shm:,.0f} GiB and 1 GiB for each rank, "
        fix += "or set layer_updates_per_iter: 0"
        yield Violation(f"{BALANCER}.layer_updates_per_iter", message, fix)


def shared_expert_bytes(d: Deployment) -> int:
    """Return the bytes of the copy of all routed experts in each node's /dev/shm, which the online load balancer makes
    (TensorRT-LLM examples/wide_ep/README.md); else 0."""
    updates = d.get(f"{BALANCER}.layer_updates_per_iter")
    if not updates or not _has_balancer(d) or d.architecture is None or d.checkpoint is None:
        return 0
    return int(weights(d.architecture, d.checkpoint).routed_experts)


@RULES.note("M009")
def _low_precision_combine(d: Deployment) -> Iterator[Violation]:
    key = "moe_config.use_low_precision_moe_combine"
    if d.get(key) and d.precision not in (None, "fp4", "mxfp4"):
        message = f"use_low_precision_moe_combine is described for NVFP4, not for {d.precision}"
        yield Violation(key, message, "leave it out, or compare answers and speed without it")


@RULES.note("M011")
def _unbounded_pass(d: Deployment) -> Iterator[Violation]:
    key, tokens = "moe_config.max_num_tokens", d.get("max_num_tokens")
    if d.get(_BACKEND) == "DEEPGEMM" and d.layout.attention_dp and d.get(key) is None and tokens:
        together = tokens * d.layout.attention_dp_size
        message = f"DEEPGEMM's workspace is for {together:,} tokens, max_num_tokens times the number of ranks"
        yield Violation(key, message, f"set it, for example to {tokens}: further tokens are processed in more passes")


def _has_balancer(d: Deployment) -> bool:
    given = d.settings.get(BALANCER)
    return isinstance(given, str) or bool(d.get(f"{BALANCER}.num_slots"))
