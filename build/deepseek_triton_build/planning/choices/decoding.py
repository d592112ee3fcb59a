"""The settings of speculative decoding, sampling, streaming and statistics."""

from __future__ import annotations

from collections.abc import Iterable

from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.data.planned_settings import GUIDE, Setting
from deepseek_triton_build.planning.batch_sizes import Sizes
from deepseek_triton_build.planning.target import Target


def speculation_settings(target: Target, sizes: Sizes, recipe: dict[str, Setting]) -> Iterable[Setting]:
    if not sizes.num_draft_tokens:
        if target.request.relaxed_acceptance:
            cause = "relaxed acceptance needs MTP's draft tokens, and MTP is off"
            raise RefusedPlanError(cause, fix="add --mtp 3")
        return
    yield Setting("speculative_config.decoding_type", "MTP", "the checkpoint's own draft layer", source=GUIDE)
    yield Setting(
        "speculative_config.num_nextn_predict_layers",
        sizes.num_draft_tokens,
        "draft tokens a step, all made by the checkpoint's one MTP layer",
        source=GUIDE,
    )
    if target.request.relaxed_acceptance:
        yield from _relaxed_acceptance()
    elif "speculative_config.use_relaxed_acceptance_for_thinking" not in recipe:
        yield from _advanced_sampling(target)


def _relaxed_acceptance() -> Iterable[Setting]:
    source = "TensorRT-LLM examples/configs/curated/deepseek-r1-latency.yaml"
    prefix = "speculative_config."
    yield Setting(
        f"{prefix}use_relaxed_acceptance_for_thinking",
        True,
        "while the model reasons, a draft token among the likeliest tokens is accepted",
        source=GUIDE,
    )
    yield Setting(
        f"{prefix}relaxed_topk", 10, "the number of likeliest tokens that a draft token may be among", source=source
    )
    yield Setting(
        f"{prefix}relaxed_delta",
        0.6,
        "how far a draft token's probability may lie below that of the likeliest token",
        source=source,
    )


def _advanced_sampling(target: Target) -> Iterable[Setting]:
    key = "speculative_config.allow_advanced_sampling"
    if target.release.find_key(key):
        yield Setting(
            key,
            True,
            "without it MTP decodes greedily, whatever temperature a request asks for",
            source="NVIDIA/TensorRT-LLM#10019",
        )


def output_settings(target: Target, sizes: Sizes, recipe: dict[str, Setting]) -> Iterable[Setting]:
    defaults = [
        Setting("disable_overlap_scheduler", False, "the next iteration is scheduled while this one runs"),
        Setting(
            "stream_interval",
            1,
            "every token leaves the engine at once; the backend sends tokens that wait in one response",
        ),
        Setting("print_iter_log", False, "a log line per iteration is for debugging only"),
        Setting(
            "enable_iter_perf_stats",
            True,
            "without it the engine reports nothing about KV cache and draft tokens; its cost was not measured",
        ),
        Setting(
            "guided_decoding_backend", "xgrammar", "without it guided_* fields are refused; its cost was not measured"
        ),
    ]
    if not sizes.num_draft_tokens:
        reason = (
            "the C++ sampler honours seed, min_p, min_tokens and the penalties, which the default Torch sampler "
            "accepts and ignores"
        )
        source = "NVIDIA/TensorRT-LLM#16485, #16590, #17172"
        defaults.append(Setting("sampler_type", "TRTLLMSampler", reason, source=source))
    return (setting for setting in defaults if setting.key not in recipe)
