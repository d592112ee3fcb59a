"""Resolve the names of a request: weights, GPUs, release, profile. Refuse what no setting can mend."""

import dataclasses
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from deepseek_triton_build.arithmetic import gpu_memory
from deepseek_triton_build.arithmetic.weights import weights
from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.data import catalog
from deepseek_triton_build.data.finding import Code
from deepseek_triton_build.data.profiles import ANY_WORKLOAD, DEFAULT_PROFILE, Profile, Recipe, Workload, find_profile
from deepseek_triton_build.data.releases import CANDIDATES, RELEASES, Release, load_release
from deepseek_triton_build.data.vllm import VllmVersion
from deepseek_triton_build.planning.plan_request import PlanRequest, read_json_object
from deepseek_triton_build.rules import target_violations
from deepseek_triton_build.rules.rule import Deployment, Violation

TYPICAL = Workload(isl=1024, osl=2048)
"""The lengths of the published benchmarks, for when neither request nor recipe gives any."""
MAX_SEQ_LEN = 65536
"""Tokens of prompt and answer when no length is asked for: R1 reasons for tens of thousands of tokens."""
WEIGHTS: Mapping[str, str] = {
    "mxfp4": "MXFP4 experts and FP8 weights",
    "fp8": "FP8 weights",
    "fp4": "NVFP4 weights",
    "w4a8": "INT4 experts with FP8 activations",
    "w4a16": "INT4 weights with 16-bit activations",
}
"""Precision -> the weights in words."""
_QUANT_ALGOS = {
    "mxfp4": "FP8_BLOCK_SCALES",
    "fp8": "FP8_BLOCK_SCALES",
    "fp4": "NVFP4",
    "w4a8": "MIXED_PRECISION",
    "w4a16": "W4A16",
}


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """Which weights a plan is for, on which GPU, tuned for what."""

    request: PlanRequest
    variant: catalog.Variant
    architecture: catalog.Architecture
    checkpoint: catalog.KnownCheckpoint
    gpu: catalog.Gpu
    profile: Profile

    @property
    def title(self) -> str:
        return catalog.title_of(self.variant, self.checkpoint)

    @property
    def precision(self) -> str:
        return self.checkpoint.precision

    @property
    def judged(self) -> dict[str, Any]:
        """The fields of a deployment, as the rules look at it, that are known before any setting is chosen."""
        return {name: getattr(self, name) for name in ("variant", "architecture", "checkpoint", "gpu")}


@dataclass(frozen=True, kw_only=True)
class _Placed(PlannedModel):
    num_gpus: int

    @property
    def num_nodes(self) -> int:
        return -(-self.num_gpus // self.gpu.gpus_per_node)


@dataclass(frozen=True, kw_only=True)
class Target(_Placed):
    """Everything a plan for TensorRT-LLM starts from."""

    engine: ClassVar[str] = "tensorrt_llm"
    release: Release
    recipe: Recipe

    @property
    def is_as_published(self) -> bool:
        """Whether the request agrees with the GPUs and the workload that the recipe was published for."""
        recipe = self.recipe
        return recipe.num_gpus in (None, self.num_gpus) and recipe.workload.covers(self.request.workload)

    @property
    def takes_over(self) -> bool:
        """Whether it is for a generation server, to which context servers hand over the prompts' KV cache."""
        return self.profile.name == "gen"

    def supports(self, feature: str) -> bool:
        return self.release.supports(feature) is True


@dataclass(frozen=True, kw_only=True)
class VllmTarget(_Placed):
    """Everything a plan for vLLM starts from."""

    engine: ClassVar[str] = "vllm"
    vllm: VllmVersion
    data_parallel: bool

    @property
    def layout(self) -> gpu_memory.Layout:
        stages = self.request.pipeline_parallel_size
        ranks = self.num_gpus // stages
        return gpu_memory.Layout(
            tensor_parallel_size=ranks,
            expert_parallel_size=ranks,
            pipeline_parallel_size=stages,
            attention_dp=self.data_parallel,
        )

    @property
    def tensor_parallel_size(self) -> int:
        return 1 if self.data_parallel else self.layout.tensor_parallel_size

    @property
    def data_parallel_size(self) -> int:
        return self.layout.attention_dp_size

    @property
    def is_rehearsal(self) -> bool:
        return bool(self.variant.model)


def resolve_target(request: PlanRequest) -> Target:
    """Return what a plan for `request` on TensorRT-LLM starts from.

    :raises UnknownNameError: for an unknown name.
    :raises RefusedPlanError: for what can't work under any settings.
    """
    model = resolve_model(request)
    release = load_release(request.release)
    if release.version not in (*CANDIDATES, *RELEASES):
        raise RefusedPlanError(
            f"TensorRT-LLM {release.version} can be checked only, no repository is written for it",
            fix=f"use {RELEASES[-1]} or newer",
        )
    if Target.engine not in model.variant.engines:
        known = ", ".join(model.variant.engines)
        raise RefusedPlanError(f"{model.variant.name} is not planned for TensorRT-LLM; it runs on: {known}")
    if model.architecture.csa and model.precision != "mxfp4":
        cause = f"no settings of TensorRT-LLM are published for {model.variant.name} in {model.precision}"
        raise RefusedPlanError(cause, fix="use mxfp4, or --engine vllm")
    refuse(target_violations(Deployment(settings={}, release=release, **model.judged)))
    num_gpus, recipe = _size(model)
    return Target(**vars(model), release=release, recipe=recipe, num_gpus=num_gpus)


def resolve_model(request: PlanRequest) -> PlannedModel:
    """Return the weights, the GPU and the profile of `request`, without a look at any engine.

    :raises UnknownNameError: for an unknown name.
    :raises RefusedPlanError: for what does not go together under any settings.
    """
    variant = catalog.find_variant(request.variant)
    for name, value in dataclasses.asdict(request.workload).items():
        if value is not None and value < 1:
            said = f"{name} {value}: expected a whole number from 1"
            raise RefusedPlanError(said, suggestion={"workload": Workload()})
    if request.mtp is not None and request.mtp < 0:
        raise RefusedPlanError(f"mtp {request.mtp}: expected a whole number from 0", suggestion={"mtp": 0})
    if request.gpu is None:
        raise RefusedPlanError(
            f"{variant.name} needs --gpu, the GPU it will run on (for example --gpu h200 --gpus 8)",
            suggestion={"gpu": "h200"},
        )
    gpu = catalog.find_gpu(request.gpu)
    profile = _profile(request, variant)
    usual: catalog.Precision = "fp4" if gpu.sm >= 100 and "fp4" in variant.checkpoints else "fp8"
    if "mxfp4" in variant.checkpoints:
        usual = "mxfp4"
    precision = catalog.find_precision(request.precision) if request.precision else usual
    checkpoint = _checkpoint(variant, precision, request)
    assert variant.architecture is not None  # every variant with checkpoints has one
    # A checkpoint in a folder here may have fewer layers or experts than the whole model.
    config = Path(request.model or "", "config.json")
    is_here = request.model and os.path.isfile(config)
    cut = catalog.cut_architecture(read_json_object(config), variant.architecture) if is_here else None
    if cut is not None and request.mtp and not cut.num_mtp_layers:
        cause = f"mtp {request.mtp}: the checkpoint was cut without its MTP layer"
        raise RefusedPlanError(cause, suggestion={"mtp": 0})
    if cut is not None:
        checkpoint = dataclasses.replace(
            checkpoint, weight_bytes=int(weights(cut, checkpoint).total), bytes_status="computed", num_shards=None
        )
    return PlannedModel(
        request=request,
        variant=variant,
        architecture=cut or variant.architecture,
        checkpoint=checkpoint,
        gpu=gpu,
        profile=profile,
    )


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def refuse_uneven_stages(num_gpus: int, stages: int) -> None:
    if stages < 1 or num_gpus % stages:
        cause = f"{num_gpus} GPUs can't be divided into {stages} equal pipeline stages"
        raise RefusedPlanError(cause, fix=f"use a divisor of {num_gpus}")


def refuse_part_of_a_node(num_gpus: int, gpu: catalog.Gpu) -> None:
    if max(gpu.nvlink_domain, gpu.gpus_per_node) < num_gpus and num_gpus % gpu.gpus_per_node:
        raise RefusedPlanError(
            f"{num_gpus} x {gpu.name} is not a whole number of nodes ({gpu.gpus_per_node} GPUs each)"
        )


def refuse_longer_than_the_model_reads(model: PlannedModel, workload: Workload, tokens: int) -> None:
    """Refuse `tokens` of prompt and answer, rounded up from the lengths of `workload`."""
    longest = model.architecture.max_position_embeddings
    if tokens > longest:
        raise RefusedPlanError(
            f"{workload.isl:,} input and {workload.osl:,} output tokens are more than the {longest:,} that "
            f"{model.variant.name} reads (max_position_embeddings)",
            fix="use a smaller --isl or --osl",
        )


def refuse(found: Iterable[tuple[Code, Violation]], *, also: Collection[str] = ()) -> None:
    """Raise RefusedPlanError with every error among `found`; warnings and notes pass, but for the codes in `also`."""
    errors = [(rule, violation) for rule, violation in found if rule.severity == "error" or rule.code in also]
    if errors:
        causes = "; ".join(f"{violation.message} [{rule.code}: {rule.source}]" for rule, violation in errors)
        raise RefusedPlanError(causes, fix="; ".join(dict.fromkeys(violation.fix for _, violation in errors)))


def _profile(request: PlanRequest, variant: catalog.Variant) -> Profile:
    """Return the profile asked for; the default is the variant's own, where it has one."""
    is_default = request.profile == DEFAULT_PROFILE
    profile = find_profile(variant.profile if variant.profile and is_default else request.profile)
    owners = [entry.name for entry in catalog.variants().values() if entry.profile == profile.name]
    if variant.profile and variant.name not in owners:
        cause = f"{variant.name} has one profile, {variant.profile}; {profile.name} is for the models at full size"
        raise RefusedPlanError(cause, fix="leave --profile out")
    if owners and variant.name not in owners:
        raise RefusedPlanError(f"profile {profile.name} is for {', '.join(owners)} only", fix="choose another one")
    return profile


def _checkpoint(
    variant: catalog.Variant, precision: catalog.Precision, request: PlanRequest
) -> catalog.KnownCheckpoint:
    """Return the published checkpoint, or the user's own with sizes from the model's shapes.

    The request's `model` says which of several published ones it is, by its Hugging Face name or a folder called like
    it. When it is a folder on this machine, its hf_quant_config.json gives the KV cache's dtype.
    """
    model = request.model
    named = (catalog.variant_of_model(model) or catalog.variant_of_folder(model)) if model else None
    if named is not None and named[0] is variant and named[1].precision == precision:
        return dataclasses.replace(named[1], **_quantization_here(model))
    if precision in variant.checkpoints:
        return dataclasses.replace(variant.checkpoints[precision], **_quantization_here(model))
    assert variant.architecture is not None  # a variant without one has no weights
    if variant.model:
        stored = " and ".join(variant.checkpoints)
        raise RefusedPlanError(
            f"{variant.name} is stored as {stored} only, not as {precision}", fix="leave --precision out"
        )
    if model is None and precision in variant.own_checkpoints:
        foreign = "w4a8" if request.engine == "vllm" else "w4a16"
        published = {name: entry for name, entry in variant.checkpoints.items() if name != foreign}
        known = ", ".join(f"{name} ({entry.model})" for name, entry in published.items())
        raise RefusedPlanError(
            f"no {precision} checkpoint of {variant.name} is published, so --model has to name your own; published are "
            f"{known}"
        )
    if (precision == "mxfp4") != (variant.architecture.attention == "csa"):
        stored = ", ".join(variant.checkpoints)
        raise RefusedPlanError(
            f"{variant.name} has no {precision} weights; they are {stored}", fix="choose one of them"
        )
    # Of any other precision a rule says why it can't work, whoever made the weights.
    own = variant.own_checkpoints.get(precision) or catalog.KnownCheckpoint(
        precision=precision,
        model="",
        weight_bytes=0,
        bytes_status="computed",
        num_shards=None,
        quant_algo=_QUANT_ALGOS[precision],
        kv_cache_quant_algo=None,
        wo_quantized=False,
        source="the shapes of the architecture",
    )
    size = int(weights(variant.architecture, own).total)
    return dataclasses.replace(own, model=model or "", weight_bytes=size, **_quantization_here(model))


def _quantization_here(model: str | None) -> Mapping[str, Any]:
    """Return what hf_quant_config.json says about the KV cache, if `model` is a folder here that has the file.

    :raises UnusableCheckpointError: when the file can't be read.
    """
    path = Path(model or "", "hf_quant_config.json")
    if not model or not os.path.isfile(path):
        return {}
    quantization = read_json_object(path).get("quantization")
    said = quantization.get("kv_cache_quant_algo") if isinstance(quantization, dict) else None
    return {"kv_cache_quant_algo": said if isinstance(said, str) else None}


def _size(model: PlannedModel) -> tuple[int, Recipe]:
    """Return the number of GPUs of one instance, and the recipe for them."""
    request, profile, gpu = model.request, model.profile, model.gpu
    fits = gpu_memory.minimum_gpus(gpu, model.architecture, model.checkpoint)
    if fits is None:
        raise RefusedPlanError(
            f"{model.variant.name} ({model.precision}) does not fit {gpu_memory.GPU_COUNTS[-1]} x {gpu.name}"
        )
    is_whole = model.architecture == model.variant.architecture
    fewest = fits
    # What is published is about whole models at full size.
    if is_whole and not request.allow_unpublished and not model.variant.model:
        fewest = max(fits, gpu.published_min_gpus.get(model.precision, fits))
    # The number of GPUs is chosen before the workload is looked at, so that no workload doubles the bill by itself.
    usual = profile.recipe_for(gpu, model.precision, request.num_gpus, ANY_WORKLOAD)
    if usual is None:
        raise RefusedPlanError(f"profile {profile.name} has no recipe for {model.precision} on {gpu.name}")
    num_gpus = request.num_gpus or max(fewest, (usual.num_gpus or 0) if is_whole else 0)
    a, stages = model.architecture, max(1, model.request.pipeline_parallel_size)
    even = [
        count
        for count in gpu_memory.GPU_COUNTS
        if gpu_memory.divides_experts(a, model.precision, max(1, count // stages))
    ]
    if num_gpus not in even:
        cause = f"{num_gpus} GPUs can't share {a.num_heads} attention heads and {a.num_routed_experts} experts evenly"
        raise RefusedPlanError(cause, fix=f"use {', '.join(map(str, even))}")
    refuse_part_of_a_node(num_gpus, model.gpu)
    if num_gpus < fewest:
        raise RefusedPlanError(_too_few(num_gpus, fits, fewest, model), fix=f"use {fewest} GPUs")
    return num_gpus, profile.recipe_for(gpu, model.precision, num_gpus, request.workload) or usual


def _too_few(num_gpus: int, fits: int, fewest: int, model: PlannedModel) -> str:
    gpu = model.gpu
    layout = gpu_memory.Layout(tensor_parallel_size=num_gpus, expert_parallel_size=num_gpus)
    share = gpu_memory.weight_bytes_per_gpu(model.architecture, model.checkpoint, layout, mtp=False) / gpu_memory.GIB
    what, memory = f"{model.variant.name} ({model.precision}) on {num_gpus} x {gpu.name}", gpu.memory / gpu_memory.GIB
    if num_gpus >= fits:
        return (
            f"{what} fits by arithmetic (weights take {share:.1f} of {memory:.1f} GiB a GPU) but is not published: "
            f"{gpu.published_source} says {fewest} GPUs"
        )
    need = f"weights take {share:.1f} GiB a GPU and the rest about 2 GiB"
    return f"{what} does not fit: {need}, but a GPU has {memory:.1f} GiB"
