"""The types of a rule, of the deployments of both engines that it looks at, and of its violation."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partialmethod
from typing import Any, ClassVar, TypeVar

from deepseek_triton_build.arithmetic.gpu_memory import Budget, KvDtype, Layout, cuda_graph_batch_sizes, make_budget
from deepseek_triton_build.arithmetic.vllm_memory import vllm_budget
from deepseek_triton_build.arithmetic.warmup_shapes import (
    DEFAULT_GRAPH_MAX_BATCH_SIZE,
    DEFAULT_MAX_BATCH_SIZE,
    DEFAULT_MAX_NUM_TOKENS,
)
from deepseek_triton_build.data.catalog import Architecture, Gpu, KnownCheckpoint, Variant
from deepseek_triton_build.data.finding import Code, Severity
from deepseek_triton_build.data.releases import Field, Release, load_release
from deepseek_triton_build.data.type_strings import fits
from deepseek_triton_build.data.vllm import Argument, VllmVersion

CANONICAL_RELEASE = "1.2.1"
"""Rules read settings under this release's keys, for whichever release the settings are."""
MTP_KV_LAYERS = "mtp_kv_layer_per_draft"
"""The feature that MTP has a layer of the KV cache for each draft token; where it is not known, it counts as so."""
FLASH_MLA_TOKENS_PER_BLOCK = 64
"""FlashMLA, Hopper's kernel for MLA, sets this block size over any configured one (py_executor_creator.py)."""
COMPRESSED_TOKENS_PER_BLOCK = (128, 256)
"""The block sizes that V4's cache manager takes, its default first."""
# The engine's free_gpu_memory_fraction when the key is missing or null (llm_args.py).
_DEFAULT_FRACTION = 0.9
_LITERAL = re.compile(r"Literal\[[^]]*\](, in any case)?")


_Deployed = TypeVar("_Deployed", bound="AnyDeployment")


class UnknownFactError(Exception):
    """A rule asked for a setting that may have been given in a place that nobody has read."""


@dataclass(frozen=True, kw_only=True)
class AnyDeployment(ABC):
    """A set of an engine's arguments and where it will run. A rule that needs an unknown fact finds nothing."""

    settings: Mapping[str, Any]
    """The arguments that are given, as dotted paths."""
    unknown: frozenset[str] = frozenset()
    """Arguments that may be given elsewhere, as by a program's flags, so that their defaults don't count."""
    variant: Variant | None = None
    architecture: Architecture | None = None
    checkpoint: KnownCheckpoint | None = None
    gpu: Gpu | None = None
    triton: Mapping[str, Any] = field(default_factory=dict)
    """The settings under triton_config, as dotted paths."""
    environment: Mapping[str, str] = field(default_factory=dict)
    isl: int | None = None
    """Input length in tokens that the deployment is made for."""
    concurrency: int | None = None
    """Concurrent requests that the deployment is made for."""
    held_requests: int | None = None
    """Requests of the planned lengths that the instance's KV caches hold."""
    longest_key: ClassVar[str]

    @property
    def longest(self) -> int | None:
        """Tokens of prompt and answer; None where the engine chooses."""
        tokens = self.get(self.longest_key)
        return None if tokens == -1 else tokens  # vLLM's -1: by the memory

    @abstractmethod
    def find(self, key: str) -> Field | Argument | None:
        """Return the engine's argument of that dotted path."""

    def get(self, key: str) -> Any:
        """Return the value of `key`, or the engine's default when it is not given.

        :raises UnknownFactError: when it may be given elsewhere.
        """
        if key in self.settings:
            return self.settings[key]
        if key in self.unknown:
            raise UnknownFactError(key)
        row = self.find(key)
        return None if row is None else row.default

    def judged_type(self, spelled: str) -> str:
        """Return the type that a setting must have for the rules to look at it."""
        return spelled

    def well_typed(self: _Deployed) -> _Deployed:
        """Return the deployment without the settings whose values are not of their arguments' types.

        The check reports such a value by itself, and a rule could fail on it.
        """
        types = {key: self.judged_type(row.type) for key in self.settings if (row := self.find(key)) is not None}
        kept = {key: value for key, value in self.settings.items() if key not in types or fits(value, types[key])}
        return self if len(kept) == len(self.settings) else replace(self, settings=kept)

    @property
    def gpu_architecture(self) -> str | None:
        return None if self.gpu is None else self.gpu.architecture

    @property
    def precision(self) -> str | None:
        return None if self.checkpoint is None else self.checkpoint.precision

    @property
    def attention(self) -> str:
        """The kind of attention, as Architecture has it; empty for a model that is not known."""
        return "" if self.architecture is None else self.architecture.attention

    @property
    def defaults_to_fp8_kv(self) -> bool:
        """Whether the KV cache is FP8 where the settings leave it to the checkpoint."""
        return self.checkpoint is not None and self.checkpoint.kv_cache_quant_algo == "FP8"


@dataclass(frozen=True, kw_only=True)
class Deployment(AnyDeployment):
    """LLM arguments of TensorRT-LLM, under CANONICAL_RELEASE's keys."""

    longest_key: ClassVar[str] = "max_seq_len"
    release: Release | None = None
    takes_over: bool = False
    """Whether it is known to be a generation server, to which other servers hand over the prompts' KV cache."""
    assumed_isl: int | None = None
    """Input length in tokens that it is planned for because none was given."""

    def find(self, key: str) -> Field | None:
        own = None if self.release is None else self.release.find_key(key)
        return own or _canonical_field(key)

    def judged_type(self, spelled: str) -> str:
        """A Literal counts as text, because the rules judge its values."""
        return _LITERAL.sub("str", spelled)

    def budget(self) -> Budget | None:
        """Return the memory of one GPU, from well-typed settings alone; None when the GPU, the architecture or the
        weights are not known."""
        if self.gpu is None or self.architecture is None or self.checkpoint is None:
            return None
        value = self.get
        graph_sizes = value("cuda_graph_config.batch_sizes") or cuda_graph_batch_sizes(
            value("cuda_graph_config.max_batch_size") or DEFAULT_GRAPH_MAX_BATCH_SIZE
        )
        return make_budget(
            self.gpu,
            self.architecture,
            self.checkpoint,
            self.layout,
            num_cuda_graphs=len(graph_sizes) if self.has_cuda_graphs else 0,
            max_num_tokens=value("max_num_tokens") or DEFAULT_MAX_NUM_TOKENS,
            moe_max_num_tokens=value("moe_config.max_num_tokens"),
            kv_dtype="fp8" if self.has_fp8_kv else "bf16",
            kv_fraction=value("kv_cache_config.free_gpu_memory_fraction") or _DEFAULT_FRACTION,
            mtp_layers=self.mtp_kv_layers,
            expert_slots=value("moe_config.load_balancer.num_slots") or 0,
            sampler_batch=(value("max_batch_size") or DEFAULT_MAX_BATCH_SIZE) if self.has_cpp_sampler else 0,
        )

    @cached_property
    def layout(self) -> Layout:
        """How the model is divided. Pipeline parallelism counts as 1 where it is not known: see `num_gpus`."""
        # Ranks of context parallelism divide what those of tensor parallelism do, but for two projections of attention,
        # up to 6 GB (Helix: TensorRT-LLM mapping.py, repurpose_helix_cp_to_tp; NVIDIA/TensorRT-LLM#9342).
        return Layout(
            tensor_parallel_size=(self.get("tensor_parallel_size") or 1) * self.context_parallel_size,
            expert_parallel_size=self.get("moe_expert_parallel_size") or 1,
            pipeline_parallel_size=self.settings.get("pipeline_parallel_size") or 1,
            attention_dp=bool(self.get("enable_attention_dp")),
        )

    @property
    def context_parallel_size(self) -> int:
        """1 where it is not known."""
        return self.settings.get("context_parallel_size") or 1

    @property
    def pipeline_parallel_size(self) -> int:
        return self.get("pipeline_parallel_size") or 1

    @property
    def num_gpus(self) -> int:
        return self.layout.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that MTP drafts a step; 0 without MTP."""
        if self.get("speculative_config.decoding_type") != "MTP":
            return 0
        number = self.get("speculative_config.num_nextn_predict_layers")
        return 1 if number is None else int(number)  # 1.3 takes it from the checkpoint, which has one layer

    @property
    def is_disaggregated(self) -> bool:
        """Whether it is a context or a generation server, which hand over the KV cache."""
        return any(key.startswith("cache_transceiver_config") and value for key, value in self.settings.items())

    @property
    def mtp_kv_layers(self) -> int:
        """The layers that MTP adds to the KV cache."""
        return self.num_draft_tokens if self.supports(MTP_KV_LAYERS) is not False else min(1, self.num_draft_tokens)

    @property
    def has_cpp_sampler(self) -> bool:
        """Whether sampling runs in TensorRT-LLM's C++ sampler, which MTP does without."""
        return bool(self.get("sampler_type") == "TRTLLMSampler") and not self.num_draft_tokens

    def supports(self, feature: str) -> bool | None:
        """Tell whether the release has `feature`; None when that or the release is not known."""
        return None if self.release is None else self.release.supports(feature)

    def is_before(self, version: str) -> bool:
        """Tell whether the release is known and older than `version`."""
        return self.release is not None and self.release.is_before(version)

    @property
    def has_fp8_kv(self) -> bool:
        """Whether the KV cache is FP8, by the settings or, where they leave it open, by the checkpoint."""
        dtype = self.get("kv_cache_config.dtype")
        return self.defaults_to_fp8_kv if dtype == "auto" else dtype in ("fp8", "fp8_ds_mla")

    @property
    def tokens_per_block(self) -> int:
        """The block size that the engine really uses."""
        if self.attention == "csa":
            return int(self.settings.get("kv_cache_config.tokens_per_block") or COMPRESSED_TOKENS_PER_BLOCK[0])
        # FlashMLA replaces a configured size.
        if self.gpu_architecture == "hopper":
            return FLASH_MLA_TOKENS_PER_BLOCK
        return int(self.get("kv_cache_config.tokens_per_block"))

    @property
    def has_cuda_graphs(self) -> bool:
        if self.is_before("1.0.0"):  # off by default
            return any(
                key.startswith("cuda_graph_config") and value is not None for key, value in self.settings.items()
            )
        return self.settings.get("cuda_graph_config", True) is not None


@dataclass(frozen=True)
class Violation:
    """One way in which a deployment breaks a rule."""

    key: str | None
    """The setting to look at, under CANONICAL_RELEASE's keys, or the environment variable; None when no single one is
    at fault."""
    message: str
    fix: str


# It takes a Deployment, or for rules of vLLM a VllmDeployment.
_FindViolations = Callable[[Any], Iterable[Violation]]


@dataclass(frozen=True, kw_only=True)
class Rule(Code):
    find_violations: _FindViolations
    target_only: bool = False
    """Whether the rule looks only at model, GPU and release, so that it needs no settings."""


class RuleTable(list[Rule]):
    """The rules of a module. `error`, `warning` and `note` decorate the functions that find a rule's violations."""

    def _adder(
        self, severity: Severity, code: str, *, target_only: bool = False
    ) -> Callable[[_FindViolations], _FindViolations]:
        def add(find_violations: _FindViolations) -> _FindViolations:
            self.append(Rule(code=code, severity=severity, find_violations=find_violations, target_only=target_only))
            return find_violations  # unchanged, so that a plan, which holds rules, can be pickled

        return add

    error = partialmethod(_adder, "error")
    warning = partialmethod(_adder, "warning")
    note = partialmethod(_adder, "note")


@cache
def _canonical_field(key: str) -> Field | None:
    return load_release(CANONICAL_RELEASE).find_key(key)


MLA_OFF = "VLLM_MLA_DISABLE"
"""vLLM's variable, 0 or 1 (vllm/envs.py)."""
MTP_METHODS = ("mtp", "deepseek_mtp")
"""Values of speculative_config.method for the checkpoint's own MTP layer; the second is the older name."""


@dataclass(frozen=True, kw_only=True)
class VllmDeployment(AnyDeployment):
    """vLLM's engine arguments."""

    longest_key: ClassVar[str] = "max_model_len"
    vllm: VllmVersion

    def find(self, key: str) -> Argument | None:
        return self.vllm.find(key)

    @cached_property
    def layout(self) -> Layout:
        """How the model is divided; `attention_dp` is vLLM's data parallelism with expert parallelism."""
        tensor, data = self.get("tensor_parallel_size") or 1, self.get("data_parallel_size") or 1
        return Layout(
            tensor_parallel_size=tensor * data,
            expert_parallel_size=tensor * data if self.get("enable_expert_parallel") else 1,
            pipeline_parallel_size=self.get("pipeline_parallel_size") or 1,
            attention_dp=data > 1,
        )

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that are drafted a step by any method; 0 without. MTP drafts one when no number is given."""
        return int(self.get("speculative_config.num_speculative_tokens") or self.has_mtp)

    @property
    def has_mtp(self) -> bool:
        """Whether the checkpoint's own MTP layer drafts."""
        return self.get("speculative_config.method") in MTP_METHODS

    @property
    def num_mtp_tokens(self) -> int:
        """Tokens that the checkpoint's own MTP layer drafts a step; 0 without it."""
        return self.num_draft_tokens if self.has_mtp else 0

    @property
    def has_mla_off(self) -> bool:
        """Whether the environment turns MLA off; sparse attention has nothing else."""
        return self.attention in ("mla", "") and self.environment.get(MLA_OFF, "0").strip() not in ("", "0")

    @property
    def attention_backend(self) -> str:
        """The attention backend in capitals, as vLLM takes any case; empty where vLLM chooses."""
        return str(self.get("attention_backend") or self.get("attention_config.backend") or "").upper()

    @property
    def used_backend(self) -> str:
        """The attention backend, where vLLM looks at it: with V4 it passes over all but the sparse ones."""
        backend = self.attention_backend
        return "" if self.attention == "csa" and "MLA_SPARSE" not in backend and "DSV4" not in backend else backend

    @property
    def has_fp8_kv(self) -> bool:
        """Whether the KV cache is FP8, by the settings or, where they leave it open, by the checkpoint."""
        dtype = self.get("kv_cache_dtype")
        return self.defaults_to_fp8_kv if dtype == "auto" else str(dtype).startswith("fp8")

    @property
    def kv_dtype(self) -> KvDtype:
        return "fp8" if self.has_fp8_kv else "bf16"

    @property
    def kv_form(self) -> str:
        """How V4's KV cache is stored, as block_pool calls it; empty where the arguments leave it open."""
        dtype = self.get("kv_cache_dtype")
        if dtype == "nvfp4_ds_mla":
            return f"{dtype}, fp4" if self.get("attention_config.indexer_kv_dtype") == "mxfp4" else dtype
        return self.kv_dtype if self.attention_backend == "FLASHINFER_MLA_SPARSE_DSV4" else ""

    def budget(self) -> Budget | None:
        """Return the memory of one GPU; None when the GPU, the architecture or the weights are not known, or limits are
        left to vLLM, whose defaults depend on who starts it."""
        tokens, batch = self.get("max_num_batched_tokens"), self.get("max_num_seqs")
        if self.gpu is None or self.architecture is None or self.checkpoint is None or not tokens or not batch:
            return None
        return vllm_budget(
            self.gpu,
            self.architecture,
            self.checkpoint,
            self.layout,
            gpu_memory_utilization=self.get("gpu_memory_utilization"),
            max_num_batched_tokens=tokens,
            max_num_seqs=batch,
            kv_dtype=self.kv_dtype,
            vllm=self.vllm,
            max_model_len=self.longest,
            num_draft_tokens=self.num_draft_tokens,
            mtp=self.has_mtp or self.get("speculative_config.method") == "dspark",
            cuda_graphs=not self.get("enforce_eager"),
            mla=not self.has_mla_off,
            kv_form=self.kv_form,
        )
