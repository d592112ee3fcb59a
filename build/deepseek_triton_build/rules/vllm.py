"""Rules X: what can't work with vLLM, or is known not to."""

import math
from collections.abc import Iterator, Mapping

from deepseek_triton_build.arithmetic.gpu_memory import FP8_BLOCK, GIB, cut_attention_blocks
from deepseek_triton_build.arithmetic.vllm_memory import bytes_beside
from deepseek_triton_build.data.own_files import contract
from deepseek_triton_build.rules import size_limits
from deepseek_triton_build.rules.hardware import nothing_published
from deepseek_triton_build.rules.rule import RuleTable, Violation, VllmDeployment

RULES = RuleTable()


@RULES.error("X002", target_only=True)
def _nvfp4(d: VllmDeployment) -> Iterator[Violation]:
    is_fp4 = d.checkpoint is not None and d.checkpoint.precision == "fp4"
    if is_fp4 and d.gpu is not None and d.gpu.sm < 100:
        message = f"{d.gpu.title} has no FP4 arithmetic: NVFP4 weights need Blackwell"
        others = "mxfp4" if d.attention == "csa" else "fp8 or w4a16"
        yield Violation(None, message, f"use the {others} weights, or a Blackwell GPU such as b200")


@RULES.error("X004")
def _attention_shares(d: VllmDeployment) -> Iterator[Violation]:
    ranks, a = d.get("tensor_parallel_size") or 1, d.architecture
    if a is None or ranks == 1:
        return
    if a.num_heads % ranks:
        message = f"{a.num_heads} attention heads can't be divided among {ranks} ranks"
    elif a.csa is not None and a.csa.o_groups % ranks:
        message = f"the {a.csa.o_groups} groups of attention's output can't be divided among {ranks} ranks"
    elif a.csa is None and d.precision == "fp8" and (cut := cut_attention_blocks(a, ranks)):
        message = f"{ranks} ranks would cut FP8 blocks of attention ({cut})"
    else:
        return
    yield Violation("tensor_parallel_size", message, "build with --parallel dp, or use fewer GPUs")


@RULES.error("X005")
def _dense_shares(d: VllmDeployment) -> Iterator[Violation]:
    ranks, a = d.get("tensor_parallel_size") or 1, d.architecture
    if a is None or ranks == 1 or d.checkpoint is None or d.checkpoint.precision not in ("fp8", "w4a16"):
        return
    widths = {"dense layers": a.intermediate_size, "shared experts": a.num_shared_experts * a.moe_intermediate_size}
    if a.csa is not None:  # its shared expert is filled up to whole blocks
        widths.clear()
    if not d.get("enable_expert_parallel"):
        widths["routed experts"] = a.moe_intermediate_size
    for what, width in widths.items():
        if width % (FP8_BLOCK * ranks):
            message = f"{ranks} ranks would cut blocks of {FP8_BLOCK} values of the {what} ({width:,} wide)"
            yield Violation("tensor_parallel_size", message, "build with --parallel dp, or use fewer GPUs")
            return


@RULES.error("X006")
def _data_parallel_nodes(d: VllmDeployment) -> Iterator[Violation]:
    ranks = d.get("data_parallel_size") or 1
    each = (d.get("tensor_parallel_size") or 1) * (d.get("pipeline_parallel_size") or 1)
    own = d.get("data_parallel_size_local") or ranks  # vllm serve starts these, and other nodes the others
    if d.gpu is not None and ranks > 1 and own * each > d.gpu.gpus_per_node:
        what = f"{own} ranks of data parallelism" + (f" with {each} GPUs each" if each > 1 else "")
        message = f"{what} are more than a node's {d.gpu.gpus_per_node} GPUs"
        yield Violation("data_parallel_size", message, "build with --parallel tp, or use an instance on each node")


# Attention backend of MLA -> the GPUs that it runs on (none: all), the KV block sizes (their multiples, for 16), and
# whether it reads an FP8 KV cache (the backends' own classes, in 0.24.0 to 0.33.0).
_BACKENDS: Mapping[str, tuple[tuple[str, ...], tuple[int, ...], bool]] = {
    "FLASH_ATTN_MLA": (("hopper",), (16,), False),
    "FLASHMLA": (("hopper", "blackwell"), (64,), True),
    "TRITON_MLA": ((), (16,), True),
    "CUTLASS_MLA": (("blackwell",), (128,), True),
    "FLASHINFER_MLA": (("blackwell",), (32, 64), True),
    "FLASHMLA_SPARSE": (("hopper", "blackwell"), (), True),
    "FLASHINFER_MLA_SPARSE": (("blackwell",), (), True),
    "FLASHINFER_MLA_SPARSE_SM120": (("rtx_blackwell",), (), True),
    "FLASHMLA_SPARSE_DSV4": (("hopper", "blackwell"), (), True),
    "FLASHMLA_SPARSE_DSV41": (("hopper", "blackwell"), (), True),
    "FLASHMLA_MEGA_ATTN_DSV41": (("blackwell",), (), True),
    "FLASHINFER_MLA_SPARSE_DSV4": (("blackwell", "rtx_blackwell"), (), True),
    "FLASHINFER_MLA_SPARSE_DSV41": (("blackwell", "rtx_blackwell"), (), True),
}


@RULES.error("X007")
def _fp8_kv(d: VllmDeployment) -> Iterator[Violation]:
    backend = d.used_backend
    if d.has_fp8_kv and backend in _BACKENDS and not _BACKENDS[backend][2]:
        message = f"{backend} does not read an FP8 KV cache"
        yield Violation("attention_backend", message, "leave attention_backend out, or use FLASHMLA")


_IN_WORDS = {"hopper": "Hopper", "blackwell": "Blackwell with SM100 or SM103", "rtx_blackwell": "SM120"}

# Kernels of the experts that are for SM100 and SM103 only (fused_moe/experts/trtllm_*_moe.py).
_SM100_EXPERTS = "flashinfer_trtllm"


@RULES.error("X008")
def _backend_gpu(d: VllmDeployment) -> Iterator[Violation]:
    chosen = {"attention_backend": (d.used_backend, _BACKENDS.get(d.used_backend, ((),))[0])}
    if d.get("moe_backend") == _SM100_EXPERTS:
        chosen["moe_backend"] = (_SM100_EXPERTS, ("blackwell",))
    for key, (backend, able) in chosen.items():
        if d.gpu is not None and able and d.gpu.architecture not in able:
            message = f"{backend} runs on {' and '.join(_IN_WORDS[name] for name in able)}, not on {d.gpu.title}"
            yield Violation(key, message, f"leave {key} out")


@RULES.error("X009")
def _block_size(d: VllmDeployment) -> Iterator[Violation]:
    backend, size = d.used_backend, d.get("block_size")
    sizes = _BACKENDS.get(backend, ((), (), False))[1]
    if d.architecture is not None and (csa := d.architecture.csa) is not None:  # those of V4.1 depend on the GPU
        backend, sizes = "V4's attention", () if csa.kv_source_layers else (256,)
    if not size or not sizes:
        return
    if size % 16 if sizes == (16,) else size not in sizes:
        known = "multiples of 16" if sizes == (16,) else " or ".join(map(str, sizes))
        message = f"block_size {size} with {backend}, which has blocks of {known} tokens"
        yield Violation("block_size", message, "leave block_size out")


_NAMES = {"mla": "one that is not sparse", "dsa": "a sparse one, such as FLASHMLA_SPARSE", "csa": "one with DSV4"}


@RULES.error("X010")
def _sparse_backend(d: VllmDeployment) -> Iterator[Violation]:
    backend, is_v4s = d.used_backend, "DSV4" in d.used_backend
    fits = not is_v4s and (d.attention == "dsa") == ("SPARSE" in backend)
    if d.attention == "csa":
        fits = is_v4s or backend == "FLASHMLA_SPARSE"
    if backend and d.attention and not fits:
        message = f"{backend}: this model needs {_NAMES[d.attention]}"
        yield Violation("attention_backend", message, "leave attention_backend out")


@RULES.error("X011")
def _context_parallel(d: VllmDeployment) -> Iterator[Violation]:
    size, ranks = d.get("decode_context_parallel_size") or 1, d.get("tensor_parallel_size") or 1
    if ranks % size:
        message = f"decode_context_parallel_size {size} does not divide tensor_parallel_size {ranks}"
        yield Violation("decode_context_parallel_size", message, f"use a divisor of {ranks}")


@RULES.error("X012")
def _whole_prompts(d: VllmDeployment) -> Iterator[Violation]:
    tokens, longest = d.get("max_num_batched_tokens"), d.longest
    if d.get("enable_chunked_prefill") is False and tokens and longest and tokens < longest:
        message = f"max_num_batched_tokens {tokens:,} is less than max_model_len {longest:,}, without chunked prefill"
        yield Violation("max_num_batched_tokens", message, "leave enable_chunked_prefill out")


@RULES.error("X013")
def _tokens_of_a_batch(d: VllmDeployment) -> Iterator[Violation]:
    tokens, batch = d.get("max_num_batched_tokens"), d.get("max_num_seqs")
    if tokens and batch and tokens < batch:
        message = f"max_num_batched_tokens {tokens:,} is less than max_num_seqs {batch:,}"
        yield Violation("max_num_batched_tokens", message, f"raise it to {batch} or lower max_num_seqs")


RULES.error("X014")(size_limits.context)
RULES.error("X015")(size_limits.input_fits)


@RULES.note("X017")
def _draft_tokens(d: VllmDeployment) -> Iterator[Violation]:
    layers = d.architecture.num_mtp_layers if d.architecture is not None and d.architecture.draft == "mtp" else None
    if layers and d.num_mtp_tokens > layers:
        message = f"MTP drafts {d.num_mtp_tokens} tokens with {layers} layer"
        yield Violation("speculative_config.num_speculative_tokens", message, f"--mtp {layers}, if few are accepted")


@RULES.error("X018")
def _default_sampling(d: VllmDeployment) -> Iterator[Violation]:
    fields, drafts = contract().SAMPLING_BY_NAME, d.num_draft_tokens > 0
    # A field that is a mapping has a key for each of its entries.
    defaults = {key.split(".")[1]: value for key, value in d.triton.items() if key.startswith("default_sampling.")}
    for name, value in defaults.items():
        is_given = name in fields and value not in (None, fields[name].neutral)
        if is_given and (why := d.vllm.why_refused(name, drafts=drafts)):
            message = f"default_sampling.{name}: {why}"
            yield Violation(f"triton_config.default_sampling.{name}", message, "leave it out")


@RULES.warning("X019")
def _held_requests(d: VllmDeployment) -> Iterator[Violation]:
    if d.concurrency is None or d.held_requests is None or d.held_requests >= d.concurrency:
        return
    message = f"the KV cache holds {d.held_requests:,} of {d.concurrency:,} concurrent requests; the others wait"
    yield Violation("max_num_seqs", message, "to hold more, use more GPUs, shorter requests or --kv-cache-dtype fp8")


RULES.warning("X020")(size_limits.default_answer)


@RULES.warning("X021")
def _memory_share(d: VllmDeployment) -> Iterator[Violation]:
    share = d.settings.get("gpu_memory_utilization")  # vLLM's default is its own affair
    if not share or d.gpu is None or d.architecture is None:
        return
    left, beside = d.gpu.memory * (1 - share), bytes_beside(d.architecture, d.layout)
    if left < beside:
        message = f"gpu_memory_utilization {share} leaves {left / GIB:.1f} GiB of a GPU, "
        message += f"and about {beside / GIB:.1f} are taken beside it"
        fitting = math.floor(100 * (1 - beside / d.gpu.memory)) / 100
        yield Violation("gpu_memory_utilization", message, f"use {fitting} or less")


@RULES.warning("X022")
def _priority(d: VllmDeployment) -> Iterator[Violation]:
    # Only this project's backend has the field, and only it has a triton_config.
    if d.triton and d.get("scheduling_policy") != "priority":
        message = f"scheduling_policy {d.get('scheduling_policy')}: requests with the field priority are refused"
        yield Violation("scheduling_policy", message, "use scheduling_policy: priority")


@RULES.error("X023")
def _default_temperature(d: VllmDeployment) -> Iterator[Violation]:
    given, most = d.triton.get("default_sampling.temperature"), d.vllm.limits.get("temperature", {}).get("max")
    if isinstance(given, int | float) and most is not None and given > most:
        message = f"default_sampling.temperature {given}: vLLM {d.vllm.version} takes at most {most:g}"
        yield Violation("triton_config.default_sampling.temperature", message, f"use {most:g} or less")


@RULES.note("X025")
def _unpublished_gpu(d: VllmDeployment) -> Iterator[Violation]:
    if d.variant is None or not d.variant.name.startswith("deepseek-v4-flash"):  # vLLM's recipe names all of these GPUs
        yield from nothing_published(d.gpu)
