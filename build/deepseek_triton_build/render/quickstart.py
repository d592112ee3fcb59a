"""The same plan for TensorRT-LLM's quickstart_advanced.py, which takes flags only.

The flags are those of NVIDIA/TensorRT-LLM: examples/pytorch/quickstart_advanced.py@9aee0c4e (about 0.21),
examples/llm-api/quickstart_advanced.py@01303b38 (about 1.0) and a copy of about 1.2; --tokens_per_block and
--spec_decode_max_draft_len also in examples/models/core/deepseek_v3/README.md@a98a9061.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deepseek_triton_build.arithmetic.gpu_memory import cuda_graph_batch_sizes
from deepseek_triton_build.data.planned_settings import Setting
from deepseek_triton_build.data.releases import Release, load_release
from deepseek_triton_build.data.spelling import canonical
from deepseek_triton_build.render import shell
from deepseek_triton_build.render.model_yaml import llm_arguments
from deepseek_triton_build.rules.rule import CANONICAL_RELEASE

if TYPE_CHECKING:
    from deepseek_triton_build.planning.plan import Plan

_VALUES = {
    "tensor_parallel_size": "--tp_size",
    "pipeline_parallel_size": "--pp_size",
    "moe_expert_parallel_size": "--moe_ep_size",
    "max_batch_size": "--max_batch_size",
    "max_num_tokens": "--max_num_tokens",
    "max_seq_len": "--max_seq_len",
    "attn_backend": "--attention_backend",
    "moe_config.backend": "--moe_backend",
    "kv_cache_config.dtype": "--kv_cache_dtype",
    "kv_cache_config.free_gpu_memory_fraction": "--kv_cache_fraction",
    "kv_cache_config.tokens_per_block": "--tokens_per_block",
    "attention_dp_config.timeout_iters": "--attention_dp_time_out_iters",
    "attention_dp_config.batching_wait_iters": "--attention_dp_batching_wait_iters",
    "sampler_type": "--sampler_type",
    "speculative_config.decoding_type": "--spec_decode_algo",
    "speculative_config.num_nextn_predict_layers": "--spec_decode_max_draft_len",
    "speculative_config.relaxed_topk": "--relaxed_topk",
    "speculative_config.relaxed_delta": "--relaxed_delta",
}
_SWITCHES = {
    "enable_attention_dp": (True, "--enable_attention_dp"),
    "attention_dp_config.enable_balance": (True, "--attention_dp_enable_balance"),
    "enable_chunked_prefill": (True, "--enable_chunked_prefill"),
    "disable_overlap_scheduler": (True, "--disable_overlap_scheduler"),
    "print_iter_log": (True, "--print_iter_log"),
    "trust_remote_code": (True, "--trust_remote_code"),
    "cuda_graph_config.enable_padding": (True, "--cuda_graph_padding_enabled"),
    "kv_cache_config.enable_block_reuse": (False, "--disable_kv_cache_reuse"),
    "speculative_config.use_relaxed_acceptance_for_thinking": (True, "--use_relaxed_acceptance_for_thinking"),
}
"""Key -> the value that the flag stands for, and the flag. The other value is the script's own default."""

_SINCE = {
    "--attention_dp_enable_balance": "1.1.0",
    "--attention_dp_time_out_iters": "1.1.0",
    "--attention_dp_batching_wait_iters": "1.1.0",
    "--sampler_type": "1.1.0",
    "--tokens_per_block": "1.2.0",
}
"""Flag -> the release since which it is known to exist; all other flags are older."""

_SET_BY_THE_SCRIPT = ("model", "backend", "cuda_graph_config")


def flag_meanings() -> dict[str, tuple[str, Any]]:
    """Return flag -> the canonical key that it sets, and the value that it stands for; None where that follows it."""
    switches = {flag: (key, given) for key, (given, flag) in _SWITCHES.items()}
    others = {
        "--cuda_graph_batch_sizes": ("cuda_graph_config.batch_sizes", None),
        "--spec_decode_nextn": ("speculative_config.num_nextn_predict_layers", None),
        "--enable_trtllm_sampler": ("sampler_type", "TRTLLMSampler"),
    }
    return {flag: (key, None) for key, flag in _VALUES.items()} | switches | others


def quickstart_sh(plan: Plan, *, stamp: str) -> str:
    """Return quickstart.sh, which answers a few prompts once."""
    release = shell.release_of(plan)
    settings = {
        key: replace(setting, key=key, value=value)
        for setting in llm_arguments(plan)
        for key, value in canonical({setting.key: setting.value}, release.version).items()
    }
    flags, left = _flags(settings, release)
    folders = ["examples/llm-api", "examples/pytorch"]
    if release.is_before("1.0.0"):
        folders.reverse()
    values = {
        **shell.script_values(plan, stamp, "quickstart.sh"),
        **shell.rank_values(plan),
        **shell.flag_values(flags),
        "title": shell.model_title(plan),
        "image": plan.image_for("quickstart"),
        "places": [f"{root}/{folder}/quickstart_advanced.py" for folder in folders for root in shell.EXAMPLES],
        "left": ", ".join(left),
        "launcher": shell.launcher(plan),
        "model": shell.quoted(settings["model"].value),
    }
    return shell.filled("quickstart.sh", values)


def _flags(settings: Mapping[str, Setting], release: Release) -> tuple[list[shell.Flag], list[str]]:
    """Return the flags, and the keys that no flag can set."""
    flags: list[shell.Flag] = []
    left = []
    for key, setting in settings.items():
        words = _words(key, setting.value, release)
        if words:
            flags.append(shell.Flag(words, setting.comment))
        elif not _is_default(key, setting.value):
            left.append(setting.key)
    if any(key.startswith("cuda_graph_config.") for key in settings):
        flags.append(shell.Flag(("--use_cuda_graph",), "without this flag the script leaves CUDA graphs off"))
    if "speculative_config.decoding_type" in settings:
        reason = "MTP in one model, as the LLM arguments have it; copies of about 1.2 take two models without this flag"
        flags.append(shell.Flag(("--use_one_model",), reason))
    return flags, left


def _is_default(key: str, value: Any) -> bool:
    """Whether the script or the engine does this anyway, without a flag."""
    known = load_release(CANONICAL_RELEASE).find_key(key)
    is_default = known is not None and known.default == value
    return is_default or key in _SET_BY_THE_SCRIPT or (key in _SWITCHES and value is not _SWITCHES[key][0])


def _words(key: str, value: Any, release: Release) -> tuple[str, ...]:
    """Return the flag that sets `key` to `value`, and its values, as shell text; nothing when there is no such flag."""
    if key in _SWITCHES:
        given, flag = _SWITCHES[key]
        return (flag,) if value is given and _has(release, flag) else ()
    if key in ("cuda_graph_config.batch_sizes", "cuda_graph_config.max_batch_size"):
        sizes = value if isinstance(value, list | tuple) else cuda_graph_batch_sizes(value)
        return ("--cuda_graph_batch_sizes", *map(str, sizes))
    if key == "speculative_config.num_nextn_predict_layers":
        # The older name was read in copies of about 0.21 and 1.0, the newer one in a copy of about 1.2.
        flag = "--spec_decode_nextn" if release.is_before("1.1.0") else "--spec_decode_max_draft_len"
        return flag, shell.quoted(value)
    if key == "sampler_type" and not _has(release, "--sampler_type"):
        return ("--enable_trtllm_sampler",) if value == "TRTLLMSampler" else ()
    if key in _VALUES and _has(release, _VALUES[key]):
        return _VALUES[key], shell.quoted(value)
    return ()


def _has(release: Release, flag: str) -> bool:
    return flag not in _SINCE or not release.is_before(_SINCE[flag])
