"""Rules X about DeepSeek-V4 under vLLM: vllm/models/deepseek_v4 and deepseek_v41 in the wheels of 0.24.0 to 0.33.0."""

from collections.abc import Iterator

from deepseek_triton_build.rules.rule import RuleTable, Violation, VllmDeployment

RULES = RuleTable()

_MEGA_MOE = "deep_gemm_mega_moe"
_DSPARK_BLOCK = 5
"""Tokens that DSpark's draft was trained for (dspark_block_size), in every V4."""
_FLASHINFER = "FLASHINFER_MLA_SPARSE_DSV4"


@RULES.error("X026", target_only=True)
def _version(d: VllmDeployment) -> Iterator[Violation]:
    needed = d.variant.min_vllm if d.variant is not None else ""
    if d.variant is not None and needed and d.vllm.is_before(needed):
        message = f"vLLM {d.vllm.version} is too old for {d.variant.name}"
        yield Violation(None, message, f"use vLLM {needed} or newer")


@RULES.error("X027")
def _draft(d: VllmDeployment) -> Iterator[Violation]:
    method, own = d.get("speculative_config.method"), "" if d.architecture is None else d.architecture.draft
    tokens = d.num_draft_tokens
    key = "speculative_config.method"
    if own == "dspark" and d.has_mtp:
        fix = f"use the method dspark with {_DSPARK_BLOCK} tokens"
        yield Violation(key, f"the checkpoint has DSpark's draft, and no layer for {method}", fix)
    elif own == "mtp" and method == "dspark" and not d.get("speculative_config.model"):
        yield Violation(key, "the checkpoint has an MTP layer, and not DSpark's draft", "use the method mtp")
    elif own == method == "dspark" and 0 < tokens < _DSPARK_BLOCK and d.vllm.is_before("0.31.0"):
        message = f"DSpark drafts {tokens} tokens, and its block has {_DSPARK_BLOCK}"
        yield Violation("speculative_config.num_speculative_tokens", message, f"use {_DSPARK_BLOCK} or more")


@RULES.error("X029")
def _mega_moe(d: VllmDeployment) -> Iterator[Violation]:
    key = next((key for key in ("moe_backend", "kernel_config.moe_backend") if d.get(key) == _MEGA_MOE), None)
    a = d.architecture
    if key is None or a is None or a.csa is None:
        return
    ranks, experts = d.layout.tensor_parallel_size, a.num_routed_experts
    experts += d.get("eplb_config.num_redundant_experts") or 0
    reasons = {
        "runs on SM100 and SM103 only": d.gpu is not None and d.gpu.architecture != "blackwell",
        "needs expert parallelism": not d.get("enable_expert_parallel"),
        "reads MXFP4 experts only": d.precision not in ("mxfp4", None),
        f"can't divide {experts} experts among {ranks} ranks": experts % ranks > 0,
    }
    for reason, holds in reasons.items():
        if holds:
            yield Violation(key, f"{_MEGA_MOE} {reason}", f"leave {key} out")
            return


@RULES.error("X030")
def _kv_type(d: VllmDeployment) -> Iterator[Violation]:
    given, csa = str(d.get("kv_cache_dtype")), None if d.architecture is None else d.architecture.csa
    if csa is None or d.gpu is None:
        return
    is_blackwell = d.gpu.architecture == "blackwell"
    if is_blackwell and d.attention_backend.startswith(_FLASHINFER):
        fits = given in ("auto", "bfloat16", "fp8", "fp8_e4m3")
    elif csa.kv_source_layers:
        fits = given in ("auto", "fp8", "fp8_ds_mla") or (is_blackwell and given == "nvfp4_ds_mla")
    else:
        fits = d.has_fp8_kv or (given == "auto" and not d.vllm.is_before("0.31.0"))
    if not fits:
        message = f"V4's KV cache on {d.gpu.title} is FP8 with this attention backend, and kv_cache_dtype is {given}"
        yield Violation("kv_cache_dtype", message, "use kv_cache_dtype: fp8")


@RULES.warning("X031")
def _ignored_backend(d: VllmDeployment) -> Iterator[Violation]:
    if d.attention == "csa" and d.attention_backend and not d.used_backend:
        message = f"attention_backend {d.attention_backend} is not for V4, so vLLM ignores it"
        yield Violation("attention_backend", message, "leave attention_backend out")


@RULES.error("X032")
def _fp4_indexer(d: VllmDeployment) -> Iterator[Violation]:
    values = {"use_fp4_indexer_cache": True, "indexer_kv_dtype": "mxfp4"}
    for name, value in values.items():
        key = f"attention_config.{name}"
        is_asked = d.find(key) is not None and d.settings.get(key) == value
        if is_asked and d.gpu is not None and d.gpu.architecture != "blackwell":
            message = f"an indexer's cache in FP4 needs SM100 or SM103, and {d.gpu.title} is SM{d.gpu.sm}"
            yield Violation(key, message, f"leave {name} out")


@RULES.error("X034")
def _engram(d: VllmDeployment) -> Iterator[Violation]:
    if d.architecture is None or not d.architecture.host_bytes:
        return
    for key in [key for key, most in {"enable_dbo": 0, "ubatch_size": 1}.items() if (d.get(key) or 0) > most][:1]:
        yield Violation(key, "Engram does not work on parts of a batch (DBO)", f"leave {key} out")
    engram = d.get("engram_config") or {}
    for name in ("embedding_across_dp", "dp_shared_memory"):
        if d.get("enable_elastic_ep") and engram.get(name):
            message = f"engram_config.{name} does not work with elastic expert parallelism"
            yield Violation("engram_config", message, f"leave {name} out")


@RULES.error("X035")
def _stages(d: VllmDeployment) -> Iterator[Violation]:
    key, a = "pipeline_parallel_size", d.architecture
    if a is None or a.csa is None or not (sources := a.csa.kv_source_layers):
        return
    layers = a.num_layers // (d.get(key) or 1)
    if cut := [start for start in range(layers, a.num_layers, layers) if start not in sources]:
        message = f"a stage would begin at layer {cut[0]}, which reads the KV cache of an earlier one"
        yield Violation(key, message, f"leave {key} out")
