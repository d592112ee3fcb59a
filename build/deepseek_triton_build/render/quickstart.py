"""The plan for TensorRT-LLM's quickstart_advanced.py, which takes flags only.

Its flags as read in NVIDIA/TensorRT-LLM: examples/pytorch/quickstart_advanced.py@9aee0c4e (about 0.21),
examples/llm-api/quickstart_advanced.py@01303b38 (about 1.0) and a copy of about 1.2; --tokens_per_block and
--spec_decode_max_draft_len also in examples/models/core/deepseek_v3/README.md@a98a9061.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deepseek_triton_build.arithmetic.gpu_memory import cuda_graph_batch_sizes
from deepseek_triton_build.data.planned_settings import Setting
from deepseek_triton_build.data.releases import load_release
from deepseek_triton_build.data.releases.spelling import canonical
from deepseek_triton_build.planning.plan import Plan
from deepseek_triton_build.render import shell
from deepseek_triton_build.render.yaml_text import comment
from deepseek_triton_build.rules.rule import CANONICAL_RELEASE

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
"""Key -> the value that the flag stands for; the other one is the script's own."""

_SINCE = {
    "--attention_dp_enable_balance": (1, 1),
    "--attention_dp_time_out_iters": (1, 1),
    "--attention_dp_batching_wait_iters": (1, 1),
    "--sampler_type": (1, 1),
    "--tokens_per_block": (1, 2),
}
"""Flags that older releases are not known to have."""

_SAID_BY_THE_SCRIPT = ("model", "backend", "cuda_graph_config")


def quickstart_sh(plan: Plan, *, stamp: str) -> str:
    """quickstart.sh: a few prompts, once."""
    assert plan.release is not None
    settings = _by_canonical_key(plan)
    rows, left = _rows(settings, _version(plan))
    words = [[flag] if value is None else [flag, value] for flag, value, _ in rows]
    here = "examples/llm-api" if _version(plan) >= (1, 0) else "examples/pytorch"
    return shell.script(
        stamp,
        [
            f"Runs {plan.variant.title.partition(',')[0]} once, on the prompts of quickstart_advanced.py, in a "
            f"container with TensorRT-LLM {plan.release.version}. QUICKSTART is where that script lies; further "
            "arguments go to it.",
        ],
        [f'quickstart="${{QUICKSTART:-/app/tensorrt_llm/{here}/quickstart_advanced.py}}"'],
        shell.exports(plan.environment),
        shell.on_every_node(plan, "quickstart.sh"),
        [
            *(
                line
                for flag, value, reason in rows
                for line in comment(f"{flag}{f' {value}' if value else ''}: {reason}")
            ),
            *(comment(f"Not said here, for the script has no flag for it: {', '.join(left)}.") if left else []),
            *shell.command(
                ["exec", *shell.launcher(plan), "python3", '"$quickstart"'],
                ["--model_dir", shell.quoted(settings["model"].value)],
                *words,
                ['"$@"'],
            ),
        ],
    )


_Row = tuple[str, str | None, str]
"""Flag, its shell word if it takes one, reason."""


def _rows(settings: Mapping[str, Setting], version: tuple[int, ...]) -> tuple[list[_Row], list[str]]:
    """The flags, and the keys that there is none for."""
    rows: list[_Row] = []
    left = []
    for key, setting in settings.items():
        found = list(_flags(key, setting.value, version))
        rows += [(flag, value, setting.comment) for flag, value in found]
        if not found and not _is_said(key, setting.value):
            left.append(setting.key)
    if any(key.startswith("cuda_graph_config.") for key in settings):
        rows.append(("--use_cuda_graph", None, "the script leaves CUDA graphs off without it"))
    if "speculative_config.decoding_type" in settings:
        rows.append(
            ("--use_one_model", None, "MTP as the LLM arguments have it; copies of about 1.2 take two models else")
        )
    return rows, left


def _is_said(key: str, value: Any) -> bool:
    """By the script itself: it is fixed there, or what the script or the engine does by default."""
    known = load_release(CANONICAL_RELEASE).find_key(key)
    is_default = known is not None and known.default == value
    return is_default or key in _SAID_BY_THE_SCRIPT or (key in _SWITCHES and value is not _SWITCHES[key][0])


def _flags(key: str, value: Any, version: tuple[int, ...]) -> Iterator[tuple[str, str | None]]:
    if key in _SWITCHES:
        given, flag = _SWITCHES[key]
        if value is given and version >= _SINCE.get(flag, ()):
            yield flag, None
    elif key in ("cuda_graph_config.batch_sizes", "cuda_graph_config.max_batch_size"):
        sizes = value if isinstance(value, list | tuple) else cuda_graph_batch_sizes(value)
        yield "--cuda_graph_batch_sizes", " ".join(map(str, sizes))
    elif key == "speculative_config.num_nextn_predict_layers":
        yield _draft_flag(version), shell.quoted(value)
    elif key == "sampler_type" and version < (1, 1):
        if value == "TRTLLMSampler":
            yield "--enable_trtllm_sampler", None
    elif key in _VALUES and version >= _SINCE.get(_VALUES[key], ()):
        yield _VALUES[key], shell.quoted(value)


def _draft_flag(version: tuple[int, ...]) -> str:
    """Its older name was read in copies of about 0.21 and 1.0, the newer one in one of about 1.2."""
    return "--spec_decode_max_draft_len" if version >= (1, 1) else "--spec_decode_nextn"


def _by_canonical_key(plan: Plan) -> dict[str, Setting]:
    assert plan.release is not None
    settings: dict[str, Setting] = {}
    for setting in plan.settings:
        if not setting.key.startswith("triton_config."):
            for key, value in canonical({setting.key: setting.value}, plan.release.version).items():
                settings[key] = Setting(key=key, value=value, reason=setting.reason, source=setting.source)
    return settings


def _version(plan: Plan) -> tuple[int, ...]:
    assert plan.release is not None
    return tuple(map(int, plan.release.version.split(".")))
