"""Rules H: which GPUs, weights and releases go together. Rules P: how an instance is divided among its GPUs."""

from collections.abc import Iterator

from deepseek_triton_build.arithmetic.gpu_memory import FP8_BLOCK, cut_attention_blocks
from deepseek_triton_build.data.catalog import Gpu
from deepseek_triton_build.rules.rule import Deployment, RuleTable, Violation

RULES = RuleTable()
_MOST_EXPERTS_ON_HOPPER = 256


@RULES.error("H003", target_only=True)
def _w4a8(d: Deployment) -> Iterator[Violation]:
    if d.gpu is not None and d.precision == "w4a8" and d.gpu.sm >= 100:
        message = f"W4AFP8 weights are supported on Hopper only, not yet on {d.gpu.title}"
        yield Violation(None, message, "use the fp4 weights, or a Hopper GPU")
    elif d.precision == "w4a8" and d.release is not None and d.supports("w4afp8_hopper") is False:
        message = f"TensorRT-LLM {d.release.version} has no kernels for W4AFP8 weights"
        yield Violation(None, message, "use TensorRT-LLM 0.21.0 or newer, or the fp8 weights")


@RULES.error("H005", target_only=True)
def _fp8_blackwell(d: Deployment) -> Iterator[Violation]:
    if d.release is None or d.precision != "fp8" or d.supports(f"fp8_{d.gpu_architecture}") is not False:
        return
    which = "SM120" if d.gpu_architecture == "rtx_blackwell" else "Blackwell"
    message = f"TensorRT-LLM {d.release.version} has no FP8 block-scale kernels for {which}"
    newer = "" if which == "SM120" else "TensorRT-LLM 1.0.0 or newer, or "
    yield Violation(None, message, f"use {newer}the fp4 weights")


@RULES.error("H006", target_only=True)
def _release(d: Deployment) -> Iterator[Violation]:
    if d.release is None:
        return
    needed = d.variant.min_release if d.variant is not None else ""
    if needed and d.is_before(needed):
        name = d.variant.name if d.variant is not None else "it"
        message = f"TensorRT-LLM {d.release.version} is too old for {name}"
        yield Violation(None, message, f"use TensorRT-LLM {needed} or newer")
    elif d.gpu is not None and d.gpu.min_release and d.is_before(d.gpu.min_release):
        message = f"TensorRT-LLM {d.release.version} is too old for {d.gpu.name}: {d.gpu.min_release_source}"
        yield Violation(None, message, f"use TensorRT-LLM {d.gpu.min_release} or newer")
    elif d.attention == "dsa" and d.supports(f"deepseek_v32_{d.gpu_architecture}") is False:
        message = f"TensorRT-LLM {d.release.version} has no sparse attention, which V3.2 needs, on SM120"
        yield Violation(None, message, "use another GPU, or build with --engine vllm")
    elif d.attention == "dsa" and d.supports("deepseek_v32") is False:
        message = f"TensorRT-LLM {d.release.version} has no sparse attention, which V3.2 needs"
        yield Violation(None, message, "use TensorRT-LLM 1.2.0 or newer")


@RULES.error("H009", target_only=True)
def _v4_pro(d: Deployment) -> Iterator[Violation]:
    experts = d.architecture.num_routed_experts if d.architecture is not None else 0
    if d.attention == "csa" and d.gpu_architecture == "hopper" and experts > _MOST_EXPERTS_ON_HOPPER:
        message = f"TensorRT-LLM has no kernel on Hopper for the {experts} experts of V4-Pro"
        yield Violation(None, message, "use Blackwell or V4-Flash, or build with --engine vllm")


@RULES.note("H008")
def _unpublished_gpu(d: Deployment) -> Iterator[Violation]:
    yield from nothing_published(d.gpu)


def nothing_published(gpu: Gpu | None) -> Iterator[Violation]:
    """Yield a GPU's source, where nobody publishes DeepSeek on it; Ampere has errors of its own."""
    if gpu is not None and not gpu.published_min_gpus and gpu.architecture != "ampere":
        message = f"no number of {gpu.title} is published for DeepSeek: {gpu.published_source}"
        yield Violation(None, message, "try it with one request and a few answers, before anything depends on it")


@RULES.error("P001")
def _heads(d: Deployment) -> Iterator[Violation]:
    tp = d.layout.tensor_parallel_size
    if d.architecture is not None and not d.layout.attention_dp and d.architecture.num_heads % tp:
        message = f"{d.architecture.num_heads} attention heads can't be divided by tensor_parallel_size {tp}"
        fix = "use a power of two, or set enable_attention_dp: true"
        yield Violation("tensor_parallel_size", message, fix)


@RULES.error("P002")
def _experts(d: Deployment) -> Iterator[Violation]:
    ep = d.layout.expert_parallel_size
    # With a load balancer the slots are divided instead (M005).
    slots = d.get("moe_config.load_balancer.num_slots")
    if d.architecture is not None and not slots and d.architecture.num_routed_experts % ep:
        message = f"{d.architecture.num_routed_experts} experts can't be divided by moe_expert_parallel_size {ep}"
        fix = f"use a power of two up to tensor_parallel_size {d.layout.tensor_parallel_size}"
        yield Violation("moe_expert_parallel_size", message, fix)


@RULES.error("P003")
def _expert_ranks(d: Deployment) -> Iterator[Violation]:
    tp, ep = d.layout.tensor_parallel_size, d.get("moe_expert_parallel_size") or 0
    if ep > 0 and tp % ep:
        message = f"moe_expert_parallel_size {ep} does not divide tensor_parallel_size {tp}"
        fix = f"use a divisor of {tp}: the experts are on the same ranks as attention"
        yield Violation("moe_expert_parallel_size", message, fix)


@RULES.error("P004")
def _expert_grid(d: Deployment) -> Iterator[Violation]:
    keys = ("moe_tensor_parallel_size", "moe_expert_parallel_size", "moe_cluster_parallel_size")
    moe_tp, moe_ep, moe_cluster = (d.get(key) or 0 for key in keys)
    tp = d.layout.tensor_parallel_size
    if moe_tp > 0 and moe_ep > 0 and moe_tp * moe_ep * max(1, moe_cluster) != tp:
        message = f"moe_tensor_parallel_size {moe_tp} x moe_expert_parallel_size "
        message += f"{moe_ep} is not the number of ranks, {tp}"
        yield Violation(keys[0], message, "remove moe_tensor_parallel_size: it follows from the other")


@RULES.warning("P005")
def _int4_groups(d: Deployment) -> Iterator[Violation]:
    a, layout = d.architecture, d.layout
    moe_tp = layout.tensor_parallel_size // layout.expert_parallel_size
    if a is not None and d.precision == "w4a8" and moe_tp > 1 and a.moe_intermediate_size % (128 * moe_tp):
        message = f"dividing an expert's {a.moe_intermediate_size} columns "
        message += f"among {moe_tp} ranks cuts its INT4 groups of 128"
        fix = f"raise moe_expert_parallel_size to {layout.tensor_parallel_size}"
        yield Violation("moe_expert_parallel_size", message, fix)


@RULES.error("P007")
def _instances(d: Deployment) -> Iterator[Violation]:
    per_node, num_gpus = d.get("gpus_per_node"), d.num_gpus
    if per_node and per_node > 0 and num_gpus > per_node and num_gpus % per_node:
        message = f"{num_gpus} GPUs (tensor x pipeline parallelism) are not whole nodes of {per_node}"
        yield Violation("gpus_per_node", message, "make tensor x pipeline a multiple of gpus_per_node")


@RULES.warning("P008")
def _gpus_per_node(d: Deployment) -> Iterator[Violation]:
    given, world = d.get("gpus_per_node"), d.num_gpus
    if not given or d.gpu is None:
        return
    # Machines with fewer GPUs than usual exist, so only a number that shares or skips GPUs is wrong.
    node = min(world, d.gpu.gpus_per_node)
    if given < node or (given > d.gpu.gpus_per_node and world > d.gpu.gpus_per_node):
        message = f"gpus_per_node {given}: a node with {d.gpu.name} usually has {d.gpu.gpus_per_node}"
        fix = f"set gpus_per_node: {d.gpu.gpus_per_node}, or remove it, unless the nodes really have {given}"
        yield Violation("gpus_per_node", message, fix)


@RULES.error("P009")
def _attention_blocks(d: Deployment) -> Iterator[Violation]:
    a, tp = d.architecture, d.layout.tensor_parallel_size
    if a is None or d.layout.attention_dp or d.precision not in ("fp8", "w4a8") or a.num_heads % tp:  # P001
        return
    if cut := cut_attention_blocks(a, tp):
        message = f"tensor_parallel_size {tp} leaves a rank {cut}, which are no whole FP8 blocks of {FP8_BLOCK}"
        yield Violation("tensor_parallel_size", message, "set enable_attention_dp: true, or use fewer ranks")


@RULES.error("P010")
def _expert_blocks(d: Deployment) -> Iterator[Violation]:
    a, layout = d.architecture, d.layout
    ranks = layout.tensor_parallel_size // layout.expert_parallel_size
    if a is not None and d.precision == "fp8" and ranks > 1 and a.moe_intermediate_size % (FP8_BLOCK * ranks):
        message = f"dividing an expert's {a.moe_intermediate_size} columns "
        message += f"among {ranks} ranks cuts its FP8 blocks of {FP8_BLOCK}"
        yield Violation("moe_expert_parallel_size", message, "raise moe_expert_parallel_size, or use fewer ranks")


@RULES.error("P011")
def _stages(d: Deployment) -> Iterator[Violation]:
    if d.architecture is not None and d.pipeline_parallel_size > d.architecture.num_layers:
        message = f"{d.architecture.num_layers} layers can't fill {d.pipeline_parallel_size} pipeline stages"
        yield Violation("pipeline_parallel_size", message, f"use at most {d.architecture.num_layers} stages")
