"""The engine TensorRT-LLM in a plan: its arguments under the keys of a release, and what becomes of --set."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from deepseek_triton_build.arithmetic.gpu_memory import GIB, LEAST_KV_TOKENS, Budget
from deepseek_triton_build.arithmetic.warmup_shapes import MAX_REQUESTS, shapes_for_llm_args
from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.data.finding import Code
from deepseek_triton_build.data.planned_settings import LLM_ARGS, EnvironmentVariable, Omission, Setting, SettingsFile
from deepseek_triton_build.data.releases import Release, honoured_fields, sampler_of
from deepseek_triton_build.data.setting_types import bounded_type
from deepseek_triton_build.data.spelling import canonical, moved, spell
from deepseek_triton_build.data.type_strings import fits
from deepseek_triton_build.planning.backend_settings import Arguments, EngineLimits, refuse_misfit, with_own_arguments
from deepseek_triton_build.planning.target import Target
from deepseek_triton_build.planning.trtllm_settings import choose_environment, choose_settings, unset_environment
from deepseek_triton_build.planning.trtllm_sizes import Sizes
from deepseek_triton_build.rules import violations
from deepseek_triton_build.rules.moe import BALANCER, shared_expert_bytes
from deepseek_triton_build.rules.rule import Deployment, Violation

_NEEDED = (
    *("model", "backend", "tensor_parallel_size", "pipeline_parallel_size", "moe_expert_parallel_size"),
    *("enable_attention_dp", "max_batch_size", "max_num_tokens", "max_seq_len"),
    *("kv_cache_config.dtype", "kv_cache_config.free_gpu_memory_fraction", "moe_config.backend"),
)
"""Keys without which nothing can be written for a release. Any other key that the release lacks is left out."""
_SECTIONS = (
    *("model", "backend", "trust_remote_code"),
    *("tensor_parallel_size", "moe_expert_parallel_size", "pipeline_parallel_size"),
    *("enable_attention_dp", "attention_dp_config"),
    *("max_batch_size", "max_num_tokens", "max_seq_len", "enable_chunked_prefill", "disable_overlap_scheduler"),
    *("cuda_graph_config", "kv_cache_config", "moe_config", "speculative_config", "cache_transceiver_config"),
    *("sampler_type", "guided_decoding_backend"),
    *("stream_interval", "enable_iter_perf_stats", "print_iter_log"),
)
"""The order of keys in model.yaml; a key that is not listed comes last."""
_BALANCER_FILE = "moe-load-balancer.yaml"
_REPLACES = {
    "cuda_graph_config.batch_sizes": "cuda_graph_config.max_batch_size",
    "cuda_graph_config.max_batch_size": "cuda_graph_config.batch_sizes",
}
"""Canonical keys that exclude each other: setting one by hand removes the other."""
_NOT_BY_HAND = {
    "tensor_parallel_size": "other settings depend on it; use --gpus and --pp",
    "pipeline_parallel_size": "other settings depend on it; use --pp",
    "context_parallel_size": "a plan has no ranks for it; write it into the files of a generation server",
    "model": "other settings depend on it; use --model",
    "backend": "DeepSeek runs on pytorch only; leave it out",
}


@dataclass(frozen=True)
class TrtllmEngine:
    """TensorRT-LLM's part of a plan; VllmEngine is the other one."""

    target: Target
    sizes: Sizes
    """The sizes that fit."""
    budget: Budget
    """The memory that they take."""
    batch_key: ClassVar[str] = "max_batch_size"
    """The argument with the requests of one rank's batch."""

    def arguments(self, budget: Budget) -> Arguments:
        """Return the engine's arguments with the user's own; their reasons quote the memory."""
        release = self.target.release
        chosen = choose_settings(self.target, self.sizes, budget)
        spelled, omitted = _for_release(release, chosen)
        settings, own = with_own_arguments(self.target.request, spelled, lambda *item: _check(release, *item))
        keys = {setting.key for setting in settings}
        for section in {key.partition(".")[0] for key in keys if "." in key}:
            field = release.find_key(section)
            # Without the key that says the section's kind, the engine can't read the others.
            if field is not None and field.discriminator and f"{section}.{field.discriminator}" not in keys:
                by_option = ", or use --mtp N, which sets both" if section == "speculative_config" else ""
                raise RefusedPlanError(f"{section} also needs {section}.{field.discriminator}; set it{by_option}")
        files: tuple[SettingsFile, ...] = ()
        if any(setting.value == _BALANCER_FILE for setting in settings):
            rows = tuple(setting for key, setting in chosen.items() if key.startswith(f"{BALANCER}."))
            files = (SettingsFile(name=_BALANCER_FILE, section=BALANCER, settings=rows),)
        in_files = {setting.key: setting.value for file in files for setting in file.settings}
        return Arguments(
            settings=settings,
            canonical=canonical({setting.key: setting.value for setting in settings}, release.version) | in_files,
            own=own,
            files=files,
            omissions=omitted,
        )

    @cached_property
    def environment(self) -> tuple[EnvironmentVariable, ...]:
        return choose_environment(self.target, self.sizes)

    @property
    def unset_environment(self) -> tuple[EnvironmentVariable, ...]:
        return unset_environment(self.target, self.environment)

    def limits(self, arguments: Arguments) -> EngineLimits:
        release = self.target.release
        llm_args = {setting.key: setting.value for setting in arguments.settings}
        honoured, sampler = honoured_fields(release, llm_args), sampler_of(release, llm_args)
        return EngineLimits(
            batch=arguments.canonical["max_batch_size"],
            longest=arguments.canonical["max_seq_len"],
            within="max_seq_len; the scheduler reserves prompt + max_tokens for each",
            why_left_out=lambda name: "" if name in honoured else f"the {sampler} of {release.version} ignores {name}",
            warmup=(
                [list(shape) for shape in shapes_for_llm_args(llm_args)],
                "pairs of concurrent requests and prompt tokens of each, which run before the model is ready, so that "
                "hardly a user waits for kernels to be compiled and tuned: from one request to max_batch_size, at most "
                f"{MAX_REQUESTS:,} over all ranks, with the CUDA graphs' sizes between, within max_num_tokens",
            ),
        )

    def _deployment(self, arguments: Arguments, **more: Any) -> Deployment:
        target, workload = self.target, self.target.request.workload
        # A length may be planned for though none was asked for; a generation server gets no prompts.
        is_known = workload.isl is not None or target.takes_over
        return Deployment(
            settings=arguments.canonical,
            release=target.release,
            environment={variable.name: variable.value for variable in self.environment},
            isl=workload.isl,
            assumed_isl=None if is_known else self.sizes.workload.isl,
            concurrency=workload.concurrency,
            takes_over=target.takes_over,
            **target.judged,
            **more,
        )

    def left_by_own(self, arguments: Arguments) -> Budget:
        """Return the memory after the user's own arguments have replaced the planner's.

        :raises RefusedPlanError: when it is too little.
        """
        left = self._deployment(arguments).budget()
        assert left is not None  # a target knows its GPU and its weights
        if left.kv_tokens < LEAST_KV_TOKENS:
            raise RefusedPlanError(
                f"--set leaves room for {left.kv_tokens:,} KV tokens a GPU, and a request needs {LEAST_KV_TOKENS:,}: "
                f"of {left.memory / GIB:.0f} GiB, weights take {left.weights / GIB:.1f} and workspace "
                f"{left.workspace / GIB:.1f}",
                fix="set smaller values",
            )
        return left

    def judged(
        self, arguments: Arguments, **more: Any
    ) -> tuple[Deployment, list[tuple[Code, Violation]], dict[str, Any]]:
        """Return the plan as the rules look at it, the rules that it breaks, its layout and the fields of a plan that
        only this engine has.

        :param more: fields of the deployment that the engine has no part in.
        """
        deployment = self._deployment(arguments, **more)
        facts = {"release": self.target.release, "recipe": self.target.recipe, "layout": deployment.layout}
        facts |= {"has_fp8_kv": deployment.has_fp8_kv, "shared_memory": shared_expert_bytes(deployment)}
        return deployment, list(violations(deployment)), facts


def _for_release(release: Release, chosen: Mapping[str, Setting]) -> tuple[tuple[Setting, ...], tuple[Omission, ...]]:
    """Return the settings under the release's keys, in writing order, and those that it has no key for."""

    def position(item: tuple[str, Setting]) -> tuple[int, str]:
        section = item[0].partition(".")[0]
        return _SECTIONS.index(section) if section in _SECTIONS else len(_SECTIONS), section

    (balancer,) = spell({BALANCER: None}, release.version)
    field = release.find_key(balancer)
    is_named_by_path = field is not None and not field.sections
    written: dict[str, Setting] = {}
    omitted = []
    for key, setting in sorted(chosen.items(), key=position):
        if key.startswith(f"{BALANCER}.") and is_named_by_path:
            reason = f"TensorRT-LLM {release.version} reads the load balancer from a file, which lies beside this one"
            written.setdefault(balancer, Setting(balancer, _BALANCER_FILE, reason, source=LLM_ARGS))
            continue
        spelled = spell({key: setting.value}, release.version)
        missing = [name for name in spelled if release.find_key(name) is None]
        if missing and key in _NEEDED:
            release.require_key(missing[0])
        elif missing or (
            key not in _NEEDED and not all(fits(v, release.require_key(n).type) for n, v in spelled.items())
        ):
            reason = f"TensorRT-LLM {release.version} has no {missing[0] if missing else f'{key} {setting.value}'}"
            omitted.append(Omission(key=key, value=setting.value, reason=reason))
        else:
            for name, value in spelled.items():
                written.setdefault(name, Setting(name, value, setting.reason, source=setting.source))
    _drop_guided_decoding(release, written, omitted)
    return tuple(written.values()), tuple(omitted)


def _drop_guided_decoding(release: Release, written: dict[str, Setting], omitted: list[Omission]) -> None:
    """Omit guided_decoding_backend where the release can't do guided decoding beside the other settings."""
    if "guided_decoding_backend" not in written:
        return
    values = {key: setting.value for key, setting in written.items()}
    if "guided_decoding" not in honoured_fields(release, values):
        reason = f"the {sampler_of(release, values)} of {release.version} has no guided decoding"
    elif release.supports("guided_decoding_with_overlap_scheduler") is False and not values.get(
        "disable_overlap_scheduler"
    ):
        reason = f"TensorRT-LLM {release.version} has no guided decoding beside the overlap scheduler"
    else:
        return
    setting = written.pop("guided_decoding_backend")
    omitted.append(Omission(key=setting.key, value=setting.value, reason=reason))


def _check(release: Release, key: str, value: Any) -> Iterable[str]:
    """Return the release's keys that an argument set by hand excludes.

    :raises RefusedPlanError: when it can't be set by hand, the release doesn't have it, or the value doesn't fit.
    """
    if key in _NOT_BY_HAND:
        raise RefusedPlanError(f"--set {key}: {_NOT_BY_HAND[key]}")
    if release.find_key(key) is None and (instead := moved(key, release.version)):
        raise RefusedPlanError(f"{key}: TensorRT-LLM {release.version} has {instead} instead")
    found = release.require_key(key)
    if value is None and not found.sections:
        raise RefusedPlanError(f"{key}: expected a value, got null")
    canonical_key = next(iter(canonical({key: value}, release.version)), key)
    refuse_misfit(key, value, bounded_type(canonical_key, found.type))
    return spell({_REPLACES[canonical_key]: None}, release.version) if canonical_key in _REPLACES else ()
