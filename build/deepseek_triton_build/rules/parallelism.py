"""Rules P: how a model instance is divided among its GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from deepseek_triton_build.arithmetic.gpu_memory import FP8_BLOCK, cut_attention_blocks
from deepseek_triton_build.data.planned_settings import GUIDE
from deepseek_triton_build.rules.rule import Deployment, RuleTable, Violation

RULES = RuleTable()
_LINEAR = "TensorRT-LLM tensorrt_llm/_torch/modules/linear.py (load_weight_shard)"
_RULES_OF_AICONFIGURATOR = "ai-dynamo/aiconfigurator, trtllm.rule"


@RULES.error(
    "P001",
    title="Tensor parallelism divides the attention heads",
    why="Each rank takes an equal share of the 128 heads, unless attention DP gives every rank all of them.",
    source="config.json of deepseek-ai/DeepSeek-V3 (num_attention_heads); " + _RULES_OF_AICONFIGURATOR,
)
def _heads(d: Deployment) -> Iterator[Violation]:
    tp = d.layout.tensor_parallel_size
    if d.architecture is not None and not d.layout.attention_dp and d.architecture.num_heads % tp:
        message = f"{d.architecture.num_heads} attention heads can't be divided by tensor_parallel_size {tp}"
        fix = "use a power of two, or set enable_attention_dp: true"
        yield Violation("tensor_parallel_size", message, fix)


@RULES.error(
    "P002",
    title="Expert parallelism divides the experts",
    why="Without a load balancer the engine asserts that each rank holds an equal number of the 256 experts.",
    source="TensorRT-LLM fused_moe_wide_ep.py; config.json of deepseek-ai/DeepSeek-V3 (n_routed_experts)",
)
def _experts(d: Deployment) -> Iterator[Violation]:
    ep = d.layout.expert_parallel_size
    # With a load balancer the slots are divided instead (M005).
    slots = d.get("moe_config.load_balancer.num_slots")
    if d.architecture is not None and not slots and d.architecture.num_routed_experts % ep:
        message = f"{d.architecture.num_routed_experts} experts can't be divided by moe_expert_parallel_size {ep}"
        yield Violation("moe_expert_parallel_size", message, "use a power of two")


@RULES.error(
    "P003",
    title="Expert parallelism divides tensor parallelism",
    why="The experts are divided over groups of the tensor-parallel ranks. A group holds whole experts, and each "
    "rank of the group holds a part of each of them.",
    source=_RULES_OF_AICONFIGURATOR,
)
def _expert_ranks(d: Deployment) -> Iterator[Violation]:
    tp, ep = d.layout.tensor_parallel_size, d.get("moe_expert_parallel_size") or 0
    if ep > 0 and tp % ep:
        message = f"moe_expert_parallel_size {ep} does not divide tensor_parallel_size {tp}"
        fix = f"use a divisor of {tp}: the experts are on the same ranks as attention"
        yield Violation("moe_expert_parallel_size", message, fix)


@RULES.error(
    "P004",
    title="The experts' tensor parallelism times expert parallelism is the number of tensor-parallel ranks",
    why="The engine refuses another mapping of ranks at start.",
    source=_RULES_OF_AICONFIGURATOR,
)
def _expert_grid(d: Deployment) -> Iterator[Violation]:
    keys = ("moe_tensor_parallel_size", "moe_expert_parallel_size", "moe_cluster_parallel_size")
    moe_tp, moe_ep, moe_cluster = (d.get(key) or 0 for key in keys)
    tp = d.layout.tensor_parallel_size
    if moe_tp > 0 and moe_ep > 0 and moe_tp * moe_ep * max(1, moe_cluster) != tp:
        message = (
            f"moe_tensor_parallel_size {moe_tp} x moe_expert_parallel_size {moe_ep} is not the number of ranks, {tp}"
        )
        yield Violation(keys[0], message, "remove moe_tensor_parallel_size: it follows from the other")


@RULES.warning(
    "P005",
    title="Tensor parallelism does not divide a W4AFP8 group of 128 values",
    why="128 INT4 values share a scale. The rule is arithmetic; the kernels' own limit is not established.",
    source=f"{GUIDE}, W4AFP8 (groups of 1 x 128)",
)
def _int4_groups(d: Deployment) -> Iterator[Violation]:
    a, layout = d.architecture, d.layout
    moe_tp = layout.tensor_parallel_size // layout.expert_parallel_size
    if a is not None and d.precision == "w4a8" and moe_tp > 1 and a.moe_intermediate_size % (128 * moe_tp):
        message = (
            f"dividing an expert's {a.moe_intermediate_size} columns among {moe_tp} ranks cuts its INT4 groups of 128"
        )
        fix = f"raise moe_expert_parallel_size to {layout.tensor_parallel_size}"
        yield Violation("moe_expert_parallel_size", message, fix)


@RULES.warning(
    "P006",
    title="MTP (multi-token prediction, DeepSeek's speculative decoding) runs without pipeline parallelism",
    why="The matrix of feature combinations says No for one-model speculation with pipeline parallelism.",
    source="TensorRT-LLM docs, features/feature-combination-matrix (main; not established for 1.2)",
)
def _mtp_pipeline(d: Deployment) -> Iterator[Violation]:
    if d.num_draft_tokens and d.pipeline_parallel_size > 1:
        message = "MTP with pipeline parallelism is not among the supported combinations"
        fix = "use tensor parallelism over all GPUs, or remove speculative_config"
        yield Violation("pipeline_parallel_size", message, fix)


@RULES.error(
    "P007",
    title="An instance that spans nodes takes whole nodes",
    why="Ranks are distributed node by node, so an incomplete node can't hold its share.",
    source=f"{GUIDE}, Multi-node",
)
def _instances(d: Deployment) -> Iterator[Violation]:
    per_node, num_gpus = d.get("gpus_per_node"), d.num_gpus
    if per_node and per_node > 0 and num_gpus > per_node and num_gpus % per_node:
        message = f"{num_gpus} GPUs (tensor x pipeline parallelism) are not whole nodes of {per_node}"
        yield Violation("gpus_per_node", message, "make tensor x pipeline a multiple of gpus_per_node")


@RULES.warning(
    "P008",
    title="gpus_per_node is the number of GPUs in a node",
    why="Rank r takes GPU r modulo gpus_per_node: with a smaller number ranks share a GPU, and with a larger one some "
    "have none. Machines with fewer GPUs than usual exist.",
    source="TensorRT-LLM tensorrt_llm/mapping.py",
)
def _gpus_per_node(d: Deployment) -> Iterator[Violation]:
    given, world = d.get("gpus_per_node"), d.num_gpus
    if not given or d.gpu is None:
        return
    node = min(world, d.gpu.gpus_per_node)
    if given < node or (given > d.gpu.gpus_per_node and world > d.gpu.gpus_per_node):
        message = f"gpus_per_node {given}: a node with {d.gpu.name} usually has {d.gpu.gpus_per_node}"
        fix = f"set gpus_per_node: {d.gpu.gpus_per_node}, or remove it, unless the nodes really have {given}"
        yield Violation("gpus_per_node", message, fix)


@RULES.error(
    "P009",
    title="Tensor parallelism divides attention's FP8 weights in whole blocks of 128 x 128",
    why="The engine divides weights and scales each for themselves and rounds up: cut blocks get a neighbour's scale, "
    "or none at all. Attention DP gives every rank all blocks.",
    source=_LINEAR,
)
def _attention_blocks(d: Deployment) -> Iterator[Violation]:
    a, tp = d.architecture, d.layout.tensor_parallel_size
    if a is None or d.layout.attention_dp or d.precision not in ("fp8", "w4a8") or a.num_heads % tp:  # P001
        return
    if cut := cut_attention_blocks(a, tp):
        message = f"tensor_parallel_size {tp} leaves a rank {cut}, which are no whole FP8 blocks of {FP8_BLOCK}"
        yield Violation("tensor_parallel_size", message, "set enable_attention_dp: true, or use fewer ranks")


@RULES.error(
    "P010",
    title="The experts' tensor parallelism divides their FP8 weights in whole blocks of 128 x 128",
    why="Each rank of a group holds an equal part of every expert's columns, with the scales of whole blocks.",
    source="TensorRT-LLM tensorrt_llm/_torch/modules/fused_moe/quantization.py; " + _LINEAR,
)
def _expert_blocks(d: Deployment) -> Iterator[Violation]:
    a, layout = d.architecture, d.layout
    ranks = layout.tensor_parallel_size // layout.expert_parallel_size
    if a is not None and d.precision == "fp8" and ranks > 1 and a.moe_intermediate_size % (FP8_BLOCK * ranks):
        message = (
            f"dividing an expert's {a.moe_intermediate_size} columns among {ranks} ranks cuts its FP8 blocks of "
            f"{FP8_BLOCK}"
        )
        yield Violation("moe_expert_parallel_size", message, "raise moe_expert_parallel_size, or use fewer ranks")


@RULES.error(
    "P011",
    title="Each pipeline stage has a layer",
    why="The layers are divided among the stages; a stage without one has nothing to run.",
    source="TensorRT-LLM tensorrt_llm/mapping.py (pp_layers)",
)
def _stages(d: Deployment) -> Iterator[Violation]:
    if d.architecture is not None and d.pipeline_parallel_size > d.architecture.num_layers:
        message = f"{d.architecture.num_layers} layers can't fill {d.pipeline_parallel_size} pipeline stages"
        yield Violation("pipeline_parallel_size", message, f"use at most {d.architecture.num_layers} stages")
