"""Rules X: what can't work with vLLM, or is known not to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from deepseek_triton_build.arithmetic.gpu_memory import FP8_BLOCK, GIB, cut_attention_blocks
from deepseek_triton_build.arithmetic.vllm_memory import bytes_beside
from deepseek_triton_build.rules.environment import RUNS_CODE
from deepseek_triton_build.rules.rule import RuleTable, Violation
from deepseek_triton_build.rules.vllm_deployment import VllmDeployment

RULES = RuleTable()
_PARALLEL = "vLLM vllm/config/parallel.py, ParallelConfig"
_SCHEDULER = "vLLM vllm/config/scheduler.py, SchedulerConfig.verify_max_model_len"
_MLA = "vLLM vllm/v1/attention/backends/mla"


@RULES.error(
    "X001",
    title="The GPU is Hopper or Blackwell",
    why="vLLM's fast kernels for MLA are for these. On Ampere one slow kernel is left, and there is no FP8 arithmetic.",
    source="vLLM vllm/platforms/cuda.py, _get_backend_priorities",
    target_only=True,
)
def _ampere(d: VllmDeployment) -> Iterator[Violation]:
    if d.gpu is not None and d.gpu.architecture == "ampere":
        message = f"{d.gpu.title} is Ampere (SM{d.gpu.sm}), for which no DeepSeek deployment is published"
        yield Violation(None, message, "use Hopper or Blackwell, for example h200")


@RULES.error(
    "X002",
    title="NVFP4 weights run on Blackwell",
    why="Hopper has no FP4 tensor cores. The guide serves them on B200 only.",
    source="vLLM recipes, DeepSeek-V3 (R1) usage guide; model cards of nvidia/DeepSeek-R1-FP4",
    target_only=True,
)
def _nvfp4(d: VllmDeployment) -> Iterator[Violation]:
    is_fp4 = d.checkpoint is not None and d.checkpoint.precision == "fp4"
    if is_fp4 and d.gpu is not None and d.gpu.architecture != "blackwell":
        message = f"{d.gpu.title} has no FP4 arithmetic: NVFP4 weights need Blackwell"
        yield Violation(None, message, "use the fp8 or w4a16 weights, or b200, gb200 or gb200-nvl72")


@RULES.error(
    "X003",
    title="W4AFP8 weights belong to TensorRT-LLM",
    why="They lie in TensorRT-LLM's and SGLang's own form, which vLLM does not read.",
    source="vLLM vllm/model_executor/layers/quantization (no MIXED_PRECISION with W4A8_AWQ experts)",
    target_only=True,
)
def _w4a8(d: VllmDeployment) -> Iterator[Violation]:
    if d.checkpoint is not None and d.checkpoint.precision == "w4a8":
        yield Violation(None, "vLLM does not read W4AFP8 weights", "use the w4a16 weights, or --engine tensorrt_llm")


@RULES.error(
    "X004",
    title="Each rank of tensor parallelism gets equal parts of attention",
    why="Heads are whole, and FP8 weights have one scale for each block of 128 x 128.",
    source="vLLM vllm/model_executor/layers/quantization/utils/fp8_utils.py, validate_fp8_block_shape",
)
def _attention_shares(d: VllmDeployment) -> Iterator[Violation]:
    ranks, a = d.get("tensor_parallel_size") or 1, d.architecture
    if a is None or ranks == 1:
        return
    if a.num_heads % ranks:
        message = f"{a.num_heads} attention heads can't be divided among {ranks} ranks"
    elif d.checkpoint is not None and d.checkpoint.precision == "fp8" and (cut := cut_attention_blocks(a, ranks)):
        message = f"{ranks} ranks would cut FP8 blocks of attention ({cut})"
    else:
        return
    yield Violation("tensor_parallel_size", message, "use --parallel dp, or fewer GPUs")


@RULES.error(
    "X005",
    title="Each rank of tensor parallelism gets whole blocks of the dense layers",
    why="FP8 weights have a scale for each block of 128 x 128, W4A16 weights one for each group of 128. vLLM does not "
    "load a share that cuts them.",
    source="vLLM vllm/model_executor/layers/quantization/utils: fp8_utils.py, validate_fp8_block_shape; "
    "marlin_utils.py, verify_marlin_supports_shape",
)
def _dense_shares(d: VllmDeployment) -> Iterator[Violation]:
    ranks, a = d.get("tensor_parallel_size") or 1, d.architecture
    if a is None or ranks == 1 or d.checkpoint is None or d.checkpoint.precision not in ("fp8", "w4a16"):
        return
    widths = {"dense layers": a.intermediate_size, "shared experts": a.num_shared_experts * a.moe_intermediate_size}
    if not d.get("enable_expert_parallel"):
        widths["routed experts"] = a.moe_intermediate_size
    for what, width in widths.items():
        if width % (FP8_BLOCK * ranks):
            message = f"{ranks} ranks would cut blocks of {FP8_BLOCK} values of the {what} ({width:,} wide)"
            yield Violation("tensor_parallel_size", message, "use --parallel dp, or fewer GPUs")
            return


@RULES.error(
    "X006",
    title="Data parallelism stays within a node",
    why="The backend starts all ranks itself, on its own node. Several nodes serve an instance each, behind a load "
    "balancer, or one instance by tensor parallelism.",
    source="vLLM vllm/engine/arg_utils.py, create_engine_config (data_parallel_size_local); this project's backend",
)
def _data_parallel_nodes(d: VllmDeployment) -> Iterator[Violation]:
    ranks = d.get("data_parallel_size") or 1
    each = (d.get("tensor_parallel_size") or 1) * (d.get("pipeline_parallel_size") or 1)
    own = d.get("data_parallel_size_local") or ranks  # vllm serve starts these, and other nodes the others
    if d.gpu is not None and ranks > 1 and own * each > d.gpu.gpus_per_node:
        what = f"{own} ranks of data parallelism" + (f" with {each} GPUs each" if each > 1 else "")
        message = f"{what} are more than a node's {d.gpu.gpus_per_node} GPUs"
        yield Violation("data_parallel_size", message, "use --parallel tp, or an instance on each node")


_BACKENDS: Mapping[str, tuple[str | None, tuple[int, ...], bool]] = {
    "FLASH_ATTN_MLA": ("hopper", (16,), False),
    "FLASHMLA": (None, (64,), True),
    "TRITON_MLA": (None, (16,), True),
    "CUTLASS_MLA": ("blackwell", (128,), True),
    "FLASHINFER_MLA": ("blackwell", (32, 64), True),
}
"""Attention backend of MLA -> the GPUs that it runs on (None: both), the KV block sizes (their multiples, for 16), and
whether it reads an FP8 KV cache (the backends' own classes, in 0.24.0, 0.25.1 and 0.33.0)."""


@RULES.error(
    "X007",
    title="The attention backend reads the KV cache's type",
    why="vLLM does not start with a backend that can't read the cache. FLASH_ATTN_MLA has no FP8.",
    source=f"{_MLA}, supported_kv_cache_dtypes",
)
def _fp8_kv(d: VllmDeployment) -> Iterator[Violation]:
    backend = d.attention_backend
    if d.has_fp8_kv and backend in _BACKENDS and not _BACKENDS[backend][2]:
        message = f"{backend} does not read an FP8 KV cache"
        yield Violation("attention_backend", message, "leave attention_backend out, or use FLASHMLA")


@RULES.error(
    "X008",
    title="The attention backend runs on the GPU",
    why="vLLM does not start with a backend that is for another architecture.",
    source=f"{_MLA}, supports_compute_capability",
)
def _backend_gpu(d: VllmDeployment) -> Iterator[Violation]:
    backend = d.attention_backend
    needed = _BACKENDS.get(backend, (None,))[0]
    if d.gpu is not None and needed not in (None, d.gpu.architecture):
        message = f"{backend} runs on {str(needed).capitalize()}, not on {d.gpu.title}"
        yield Violation("attention_backend", message, "leave attention_backend out")


@RULES.error(
    "X009",
    title="The attention backend has the KV block size",
    why="vLLM does not start with a block size that the backend has no kernel for. Without block_size it chooses one.",
    source=f"{_MLA}, get_supported_kernel_block_sizes",
)
def _block_size(d: VllmDeployment) -> Iterator[Violation]:
    backend, size = d.attention_backend, d.get("block_size")
    sizes = _BACKENDS.get(backend, (None, (), False))[1]
    if not size or not sizes:
        return
    if size % 16 if sizes == (16,) else size not in sizes:
        known = "multiples of 16" if sizes == (16,) else " or ".join(map(str, sizes))
        message = f"block_size {size} with {backend}, which has blocks of {known} tokens"
        yield Violation("block_size", message, "leave block_size out")


@RULES.error(
    "X010",
    title="Sparse attention has a backend of its own",
    why="V3.2 reads the tokens that its indexer chooses, which the backends of V3 can't.",
    source="vLLM vllm/platforms/cuda.py, _get_backend_priorities",
)
def _sparse_backend(d: VllmDeployment) -> Iterator[Violation]:
    backend = d.attention_backend
    if backend and d.architecture is not None and d.is_sparse != ("SPARSE" in backend):
        which = "a sparse one, such as FLASHMLA_SPARSE" if d.is_sparse else "one that is not sparse"
        yield Violation("attention_backend", f"{backend}: this model needs {which}", "leave attention_backend out")


@RULES.error(
    "X011",
    title="decode_context_parallel_size divides tensor_parallel_size",
    why="It reuses the GPUs of tensor parallelism.",
    source=f"{_PARALLEL}.decode_context_parallel_size",
)
def _context_parallel(d: VllmDeployment) -> Iterator[Violation]:
    size, ranks = d.get("decode_context_parallel_size") or 1, d.get("tensor_parallel_size") or 1
    if ranks % size:
        message = f"decode_context_parallel_size {size} does not divide tensor_parallel_size {ranks}"
        yield Violation("decode_context_parallel_size", message, f"use a divisor of {ranks}")


@RULES.error(
    "X012",
    title="Without chunked prefill an iteration holds the longest prompt",
    why="vLLM does not start: a longer prompt could never run.",
    source=_SCHEDULER,
)
def _whole_prompts(d: VllmDeployment) -> Iterator[Violation]:
    tokens, longest = d.get("max_num_batched_tokens"), d.max_model_len
    if d.get("enable_chunked_prefill") is False and tokens and longest and tokens < longest:
        message = f"max_num_batched_tokens {tokens:,} is less than max_model_len {longest:,}, without chunked prefill"
        yield Violation("max_num_batched_tokens", message, "leave enable_chunked_prefill out")


@RULES.error(
    "X013",
    title="An iteration holds a token of every request",
    why="vLLM does not start with more requests than tokens.",
    source=_SCHEDULER,
)
def _tokens_of_a_batch(d: VllmDeployment) -> Iterator[Violation]:
    tokens, batch = d.get("max_num_batched_tokens"), d.get("max_num_seqs")
    if tokens and batch and tokens < batch:
        message = f"max_num_batched_tokens {tokens:,} is less than max_num_seqs {batch:,}"
        yield Violation("max_num_batched_tokens", message, f"raise it to {batch} or lower max_num_seqs")


@RULES.error(
    "X014",
    title="max_model_len is within the model's context",
    why="vLLM does not start with more than max_position_embeddings.",
    source="vLLM vllm/config/model.py, get_and_verify_max_len; config.json of deepseek-ai/DeepSeek-V3",
)
def _context(d: VllmDeployment) -> Iterator[Violation]:
    longest = d.max_model_len
    most = d.architecture.max_position_embeddings if d.architecture is not None else None
    if longest and most and longest > most:
        message = f"max_model_len {longest:,} is more than the model's maximum of {most:,}"
        yield Violation("max_model_len", message, f"use {most} or less")


@RULES.error(
    "X015",
    title="Prompts fit max_model_len with room for an answer",
    why="max_model_len counts prompt and answer together; a longer prompt is refused.",
    source="vLLM vllm/config/model.py, ModelConfig.max_model_len",
)
def _input_fits(d: VllmDeployment) -> Iterator[Violation]:
    longest = d.max_model_len
    if d.isl is not None and longest and d.isl >= longest:
        message = f"prompts of {d.isl:,} tokens leave no room for an answer in max_model_len {longest:,}"
        yield Violation("max_model_len", message, f"raise it above {d.isl}")


@RULES.warning(
    "X016",
    title="MTP drafts with a layer that the checkpoint has",
    why="vLLM does not load without it. What quantizes by transformers, as most of W4A16 is, leaves the layer out.",
    source="model card of cpatonn/DeepSeek-V3.1-GPTQ-4bit; vLLM vllm/model_executor/models/deepseek_mtp.py",
)
def _mtp_layer(d: VllmDeployment) -> Iterator[Violation]:
    if d.has_mtp and d.checkpoint is not None and d.checkpoint.precision == "w4a16":
        message = "most W4A16 checkpoints have no MTP layer"
        yield Violation(
            "speculative_config.num_speculative_tokens",
            message,
            "look for layer 61 in the checkpoint, or leave --mtp out",
        )


@RULES.note(
    "X017",
    title="MTP drafts as many tokens as the layer was trained for",
    why="DeepSeek's checkpoints have one MTP layer, for one token. For more, vLLM runs it again on its own drafts, "
    "which are accepted less often.",
    source="config.json of deepseek-ai/DeepSeek-V3 (num_nextn_predict_layers 1); vLLM vllm/config/speculative.py",
)
def _draft_tokens(d: VllmDeployment) -> Iterator[Violation]:
    layers = d.architecture.num_mtp_layers if d.architecture is not None else None
    if layers and d.num_mtp_tokens > layers:
        message = f"MTP drafts {d.num_mtp_tokens} tokens with {layers} layer"
        yield Violation("speculative_config.num_speculative_tokens", message, f"--mtp {layers}, if few are accepted")


@RULES.error(
    "X018",
    title="Sampling defaults are taken beside drafted tokens",
    why="vLLM refuses requests that have these fields when it drafts tokens, so every request would be refused.",
    source="vLLM vllm/sampling_params.py, _verify_spec_decode (the version's record: limits.speculative_config)",
)
def _sampling_with_mtp(d: VllmDeployment) -> Iterator[Violation]:
    refused = d.vllm.limits.get("speculative_config", {}).get("refuses", ())
    # A field that is a mapping has a key for each of its entries.
    defaults = {key: value for key, value in d.triton.items() if key.startswith("default_sampling.")}
    given = {key.split(".")[1] for key, value in defaults.items() if value or key.count(".") > 1}
    for name in refused if d.num_draft_tokens else ():
        if name in given:
            message = f"default_sampling.{name} with drafted tokens: vLLM {d.vllm.version} refuses it"
            yield Violation(
                f"triton_config.default_sampling.{name}", message, "leave it out, or leave speculative_config out"
            )


@RULES.warning(
    "X019",
    title="The KV cache holds the planned concurrent requests",
    why="vLLM starts requests as long as there are free blocks; when these run out, it stops the last one and computes "
    "it again later.",
    source="vLLM vllm/v1/core/sched/scheduler.py (preemption); the plan's own arithmetic",
)
def _held_requests(d: VllmDeployment) -> Iterator[Violation]:
    if d.concurrency is None or d.held_requests is None or d.held_requests >= d.concurrency:
        return
    message = f"the KV cache holds {d.held_requests:,} of {d.concurrency:,} concurrent requests; the others wait"
    yield Violation("max_num_seqs", message, "to hold more, use more GPUs, shorter requests or --kv-cache-dtype fp8")


@RULES.warning(
    "X020",
    title="default_max_tokens leaves room for a prompt",
    why="The backend cuts an answer to the room that its prompt leaves in max_model_len, so a request that says "
    "nothing may take the whole context.",
    source="this project's backend: docs/configuration.md",
)
def _default_answer(d: VllmDeployment) -> Iterator[Violation]:
    answer, longest = d.triton.get("default_max_tokens"), d.max_model_len
    if isinstance(answer, int) and longest and answer >= longest:
        message = f"default_max_tokens {answer:,} leaves no room for a prompt in max_model_len {longest:,}"
        yield Violation("triton_config.default_max_tokens", message, f"use less than {longest}")


@RULES.warning(
    "X021",
    title="Some memory stays outside vLLM's share",
    why="NCCL, Triton, graphs above vLLM's estimate, and the keys of long prompts in chunks lie beside the share: 7 to "
    "10 GiB with DeepSeek. At 0.95 of an H200 a few long prompts ended the engine, or it did not load.",
    source="vLLM vllm/config/cache.py, CacheConfig.gpu_memory_utilization; measured with vLLM 0.25.1 on two H200s",
)
def _memory_share(d: VllmDeployment) -> Iterator[Violation]:
    share = d.settings.get("gpu_memory_utilization")  # vLLM's default is its own affair
    if not share or d.gpu is None or d.architecture is None:
        return
    left, beside = d.gpu.memory * (1 - share), bytes_beside(d.architecture, d.layout)
    if left < beside:
        message = (
            f"gpu_memory_utilization {share} leaves {left / GIB:.1f} GiB of a GPU, and about {beside / GIB:.1f} are "
            "taken beside it"
        )
        fitting = math.floor(100 * (1 - beside / d.gpu.memory)) / 100
        yield Violation("gpu_memory_utilization", message, f"use {fitting} or less")


@RULES.warning(
    "X022",
    title="Requests with a priority are ordered by it",
    why="vLLM looks at a request's priority with scheduling_policy: priority only, so the backend refuses the field "
    "without it.",
    source="vLLM vllm/config/scheduler.py, SchedulerConfig.policy",
)
def _priority(d: VllmDeployment) -> Iterator[Violation]:
    if d.triton and d.get("scheduling_policy") != "priority":
        message = f"scheduling_policy {d.get('scheduling_policy')}: requests with the field priority are refused"
        yield Violation("scheduling_policy", message, "use scheduling_policy: priority")


@RULES.error(
    "X023",
    title="The default temperature is within vLLM's limit",
    why="vLLM takes less than the backend's contract allows, so every request that says nothing would be refused.",
    source="vLLM vllm/sampling_params.py, SamplingParams._verify_args (the version's record: limits.temperature)",
)
def _default_temperature(d: VllmDeployment) -> Iterator[Violation]:
    given, most = d.triton.get("default_sampling.temperature"), d.vllm.limits.get("temperature", {}).get("max")
    if isinstance(given, int | float) and most is not None and given > most:
        message = f"default_sampling.temperature {given}: vLLM {d.vllm.version} takes at most {most:g}"
        yield Violation("triton_config.default_sampling.temperature", message, f"use {most:g} or less")


@RULES.note(
    "X024",
    title="No code of the checkpoint is run",
    why="vLLM has DeepSeek's models and their configuration built in. With trust_remote_code it also imports Python "
    "files that lie in the checkpoint's folder, with the server's rights.",
    source="vLLM vllm/config/model.py, ModelConfig.trust_remote_code",
)
def _remote_code(d: VllmDeployment) -> Iterator[Violation]:
    if d.get("trust_remote_code"):
        yield Violation("trust_remote_code", RUNS_CODE, "leave trust_remote_code out")
