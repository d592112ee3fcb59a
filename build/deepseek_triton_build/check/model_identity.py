"""Everything known about a model from the user, the repository and the checkpoint: release, variant, weights, GPU."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepseek_triton_build.build_errors import UnusableCheckpointError
from deepseek_triton_build.check import codes
from deepseek_triton_build.check.checkpoint_files import CheckpointFacts
from deepseek_triton_build.check.documents import Document
from deepseek_triton_build.check.generated_origin import Stamp
from deepseek_triton_build.check.weights import instead_of_checkpoint
from deepseek_triton_build.data.catalog import (
    PRECISIONS,
    Architecture,
    Gpu,
    KnownCheckpoint,
    Variant,
    cut_summary,
    find_gpu,
    find_precision,
    find_served,
    gpus,
    variant_of_folder,
    variant_of_model,
    variants,
)
from deepseek_triton_build.data.finding import Finding
from deepseek_triton_build.data.releases import DEFAULT_RELEASE, READABLE_RELEASES, Release, containers, load_release
from deepseek_triton_build.data.vllm import (
    DEFAULT_VLLM,
    VLLM_VERSIONS,
    VllmVersion,
    load_vllm,
    nearest_vllm,
    vllm_containers,
)
from deepseek_triton_build.text import is_path, safe_name, short_repr

_WITH_FILES = "deepseek-triton check DIR --model FOLDER"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The user's own statements, which count more than what the files say."""

    release: str | None = None
    vllm: str | None = None
    """Version of vLLM, for what runs on it."""
    gpu: str | None = None
    num_gpus: int | None = None
    """GPUs of one instance."""
    model_root: Path | None = None
    """The checkpoint's folder on this machine, or a folder above it. The folder has to exist."""
    strict: bool = False
    """Whether it is an error that the checkpoint's folder is not on this machine."""
    variant: str | None = None
    precision: str | None = None


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A model and where it runs, as far as it is known."""

    variant: Variant | None
    architecture: Architecture | None
    checkpoint: KnownCheckpoint | None
    gpu: Gpu | None
    num_gpus: int | None
    has_16_bits: bool = False
    """Whether the weights are not quantized. The catalogue has no such checkpoints."""

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts that a deployment is made of, by their names there."""
        return {name: getattr(self, name) for name in ("variant", "architecture", "checkpoint", "gpu")}

    @property
    def precision(self) -> str | None:
        return self.checkpoint.precision if self.checkpoint else "bf16" if self.has_16_bits else None


UNKNOWN = Identity(variant=None, architecture=None, checkpoint=None, gpu=None, num_gpus=None)


def find_release(
    options: CheckOptions, recorded: str | None, stamp: Stamp, *, record_file: str, file: str
) -> tuple[Release, str, list[Finding]]:
    """Return the release to check against, where it is known from, and findings about wrong or missing records.

    :param recorded: the release of the record beside model.py, `record_file`.
    :param file: the file that the findings about a missing release name.
    :raises BuildError: when the user names a release that is not recorded here.
    """
    if options.release is not None:
        return load_release(options.release), "as asked", []
    findings: list[Finding] = []
    for version, known_from in ((recorded, record_file), (stamp.text("release"), stamp.file)):
        if version in READABLE_RELEASES:
            return load_release(version), known_from, findings
        if version is not None:
            message = f"{known_from} names TensorRT-LLM {short_repr(version)}, which is not recorded here"
            fix = f"deepseek-triton check DIR --trtllm RELEASE, of {', '.join(READABLE_RELEASES)}"
            findings.append(codes.BAD_RECORD.finding(message, fix, file=known_from))
    message = f"no file names the TensorRT-LLM release, so {DEFAULT_RELEASE} is assumed"
    findings.append(codes.RELEASE_ASSUMED.finding(message, "deepseek-triton check DIR --trtllm NAME", file=file))
    return load_release(DEFAULT_RELEASE), "default", findings


def find_vllm(
    options: CheckOptions, recorded: str | None, stamp: Stamp, *, record_file: str, file: str
) -> tuple[VllmVersion, str, list[Finding]]:
    """Return the vLLM to check against, as find_release does; for a version without a record, the nearest with one."""
    if options.vllm is not None:
        return load_vllm(options.vllm), "as asked", []
    version, known_from = (recorded, record_file) if recorded is not None else (stamp.text("vllm"), stamp.file)
    if version is None:
        message = f"no file names the version of vLLM, so {DEFAULT_VLLM} is assumed"
        finding = codes.RELEASE_ASSUMED.finding(message, "deepseek-triton check DIR --vllm NAME", file=file)
        return load_vllm(DEFAULT_VLLM), "default", [finding]
    if version in VLLM_VERSIONS:
        return load_vllm(version), known_from, []
    nearest = nearest_vllm(version)
    tags = [tag for tag, known in vllm_containers().items() if known == version]
    origin = f", which Triton's container {tags[0]} has and" if tags else ", which"
    message = f"{known_from} names vLLM {short_repr(version)}{origin} is not recorded here"
    fix = f"deepseek-triton check DIR --vllm VERSION, of {', '.join(VLLM_VERSIONS)}; {nearest} is the nearest"
    finding = codes.BAD_RECORD.finding(message, fix, file=known_from)
    return load_vllm(nearest), f"the nearest to {safe_name(version)}", [finding]


def release_of_image(image: tuple[str, str] | None) -> str | None:
    """Return the TensorRT-LLM in a container; None where that is not known.

    :param image: the container and the tag of its image.
    """
    name, tag = image or ("", "")
    if name == "tritonserver" and "trtllm" in tag and tag[:5] in containers():
        return containers()[tag[:5]].trtllm
    return tag if name == "tensorrt-llm/release" and tag[:1].isdecimal() else None


def vllm_of_image(image: tuple[str, str] | None) -> str | None:
    """Return the vLLM in a container, as release_of_image does."""
    name, tag = image or ("", "")
    if name == "tritonserver" and "vllm" in tag:
        return vllm_containers().get(tag[:5])
    return tag if name == "vllm-openai" and tag[:1].isdecimal() else None


def find_checkpoint_folder(model: str, version_dir: Path, model_root: Path | None) -> Path | None:
    """Return the checkpoint's folder on this machine; None when there is none.

    :param version_dir: the folder of model.yaml, from which a relative path counts.
    :param model_root: the folder that the user names. It is used in any case: the folder of that name below it, or else
        `model_root` itself.
    """
    if model_root is None:
        candidates = [version_dir / model]
    elif os.path.isfile(model_root / "config.json"):
        candidates = [model_root]
    else:
        candidates = [model_root / model.lstrip("/"), model_root / Path(model).name, model_root]
    return next((folder for folder in candidates if os.path.isdir(folder)), None)


def require_options(options: CheckOptions) -> None:
    """Require the user's names to be known, even if no rule needs them, and the checkpoint's folder to exist.

    :raises BuildError: when one is not.
    """
    finders: list[tuple[str | None, Callable[[str], object]]] = [
        (options.gpu, find_gpu),
        (options.variant, find_served),
        (options.precision, find_precision),
        (options.release, load_release),
        (options.vllm, load_vllm),
    ]
    for name, find in finders:
        if name:
            find(name)
    if options.model_root is not None and not os.path.isdir(options.model_root):
        found = instead_of_checkpoint(options.model_root)
        where = safe_name(str(options.model_root))
        raise UnusableCheckpointError(
            f"{where}: expected the checkpoint's folder, found {found}; name the folder that holds it"
        )


def unchecked_facts(known: Identity, *, has_checkpoint: bool) -> Iterator[str]:
    """Say what can't be checked because a fact about the model is not known, and which option gives it."""
    if known.architecture is None:
        yield "the rules about the model and its memory, because no file names a known one (--variant, --precision)"
    elif known.checkpoint is None and known.has_16_bits:
        yield "the rules about the weights and their memory, because they are not quantized"
    elif known.checkpoint is None:
        yield "the rules about the weights and their memory, because no file says their precision (--precision)"
    if known.gpu is None:
        yield "the rules about the GPU and its memory, because no file names it (--gpu, --gpus)"
    if not has_checkpoint:
        yield "the checkpoint's files, because they are not on this machine (--model)"


def absent_checkpoint(document: Document, key: str, version_dir: Path, options: CheckOptions, engine: str) -> Finding:
    """Return the finding about a checkpoint or tokenizer, given under `key`, that is no folder on this machine.

    :param version_dir: the folder from which a relative path counts.
    """
    name = str(document.values[key])
    if os.path.isfile(path := version_dir / name):
        message = f"expected a checkpoint's folder, found the file {short_repr(name)}"
        return document.finding(codes.MODEL_GONE, key, message, f"name its folder: {safe_name(str(path.parent))}")
    # A relative path counts from here, and the reference engine downloads nothing.
    is_inside = not os.path.isabs(name) and (engine == "reference" or is_path(name))
    if not is_inside and _HUB_NAME.fullmatch(name):
        message = f"{name} is a Hugging Face name and not a folder on this machine, so its files are not checked"
        fix = f"nothing; to have the files of its download checked: {_WITH_FILES}"
        return document.finding(codes.MODEL_ON_HUB, key, message, fix)
    if options.strict or (is_inside and engine == "reference"):
        message = f"expected a checkpoint at {short_repr(name)}, found no folder"
        return document.finding(codes.MODEL_GONE, key, message, f"correct the path, or name it: {_WITH_FILES}")
    message = f"{short_repr(name)} is not on this machine; the container may have it"
    fix = f"to have its files on this machine checked: {_WITH_FILES}"
    if is_inside:
        message, fix = f"{short_repr(name)} leads to no folder from model.yaml's", "give an absolute path"
    return document.finding(codes.MODEL_NOT_HERE, key, message, fix)


def identify(
    options: CheckOptions, stamp: Stamp, model: str, facts: CheckpointFacts | None, file: str, line: int | None
) -> tuple[Identity, list[Finding]]:
    """Return what the model is, and findings about names that are unknown or that contradict the checkpoint.

    :param model: the checkpoint's folder or name, as model.yaml gives it.
    :param facts: what the checkpoint's files say, when they are on this machine.
    :param file: the file that names the model, in its `line`.
    :raises UnknownNameError: when the user names an unknown variant, precision or GPU.
    """
    findings = []
    for kind, names in (("variant", list(variants())), ("gpu", list(gpus()))):
        name: Any = stamp.values.get(kind)
        if name is not None and name not in names:
            message = f"{stamp.file} names the {kind} {short_repr(name)}, which is not known here"
            findings.append(
                codes.BAD_RECORD.finding(message, f"build it again for one of {', '.join(names)}", file=stamp.file)
            )
    findings += [] if facts is not None else _other_model(options, stamp, model, file, line)
    variant, checkpoint = _by_name(options, stamp, model)
    architecture = variant.architecture if variant else None
    if facts is not None:
        alike = facts.architecture
        if architecture is not None and alike is not None and alike.class_name == architecture.class_name:
            facts = replace(facts, architecture=architecture)  # compared with the one that it is meant to have
        is_planned = options.variant is not None or stamp.text("variant") is not None
        findings += _contradictions(facts, variant, checkpoint, is_planned=is_planned)
        # Of another model only the class may be one of ours, as that of Kimi-K2 is.
        is_other = variant is None and facts.difference
        architecture = (None if is_other else facts.architecture) or architecture
        if variant is not None and variant.architecture != architecture:
            variant = None
        checkpoint = _checkpoint_found(facts, architecture, variant, checkpoint)
        architecture = facts.cut or architecture
        longest = facts.config.get("max_position_embeddings")
        if architecture is not None and isinstance(longest, int):
            architecture = replace(architecture, max_position_embeddings=longest)
    gpu = find_gpu(options.gpu) if options.gpu else gpus().get(stamp.text("gpu") or "")
    num_gpus = options.num_gpus or stamp.num_gpus
    known = Identity(
        variant=variant,
        architecture=architecture,
        checkpoint=checkpoint,
        gpu=gpu,
        num_gpus=num_gpus,
        has_16_bits=facts is not None and facts.has_16_bits,
    )
    return known, findings


def _by_name(options: CheckOptions, stamp: Stamp, model: str) -> tuple[Variant | None, KnownCheckpoint | None]:
    """Find the variant by the user's word, else by the stamp, else by the model's name: a Hugging Face name, or that of
    a folder."""
    named, checkpoint = variant_of_model(model) or variant_of_folder(model) or (None, None)
    name = options.variant or stamp.text("variant")
    precision = find_precision(options.precision) if options.precision else stamp.text("precision")
    variant = find_served(name or "") if options.variant or name in variants() else named
    if variant is None:
        return None, None
    if variant != named:
        return variant, variant.checkpoints.get(precision or "")
    if checkpoint is not None and checkpoint.precision == precision:
        return variant, checkpoint
    return variant, variant.checkpoints.get(precision or "", checkpoint)


def _other_model(options: CheckOptions, stamp: Stamp, model: str, file: str, line: int | None) -> Iterator[Finding]:
    """Find a model whose name says that it is not the one that the repository is meant for."""
    by_folder = variant_of_folder(model) if is_path(model) else None
    named = variant_of_model(model) or by_folder
    name = find_served(options.variant).name if options.variant else stamp.text("variant")
    precision = find_precision(options.precision) if options.precision else stamp.text("precision")
    if named is None or name not in variants():
        return
    variant, checkpoint = named
    if variant.name != name:
        code = codes.WRONG_ARCHITECTURE
        message = f"model: expected a checkpoint of {name}, found {safe_name(model)}, which is {variant.name}"
        fix = f"name a checkpoint of {name}, or build again for {variant.name}"
    elif precision in PRECISIONS and checkpoint.precision != precision:
        code = codes.WRONG_PRECISION
        message = f"model: expected {precision} weights, found {safe_name(model)}, which has {checkpoint.precision}"
        fix = f"name a checkpoint with {precision} weights, or build again with --precision {checkpoint.precision}"
    else:
        return
    yield (codes.OTHER_FOLDER if by_folder else code).finding(message, fix, file=file, line=line)


def _contradictions(
    facts: CheckpointFacts, variant: Variant | None, planned: KnownCheckpoint | None, *, is_planned: bool
) -> Iterator[Finding]:
    expected = variant.architecture if variant else None
    if variant and expected and facts.class_name and facts.class_name != expected.class_name:
        why = "meant for" if is_planned else "named like"
        message = f"expected {expected.class_name}, because it is {why} {variant.name}; "
        message += f"found {safe_name(facts.class_name)}"
        fix = f"point model at a checkpoint of {variant.name}, or build again for this one"
        yield codes.WRONG_ARCHITECTURE.finding(message, fix, file=f"{facts.label}/config.json")
    elif facts.cut is not None and facts.architecture is not None:
        message = "the checkpoint is cut: it has "
        message += f"{cut_summary(facts.cut, facts.architecture)}, so its answers are noise"
        fix = "nothing, if hardware is tested; to serve answers, point model at the whole checkpoint"
        yield codes.CUT_CHECKPOINT.finding(message, fix, file=f"{facts.label}/config.json")
    elif facts.difference:
        name = variant.name if variant else facts.architecture.name if facts.architecture else ""
        message = f"expected the figures of {name}, found {facts.difference}"
        fix = f"point model at a checkpoint of {name}; if this is one, download config.json again"
        code = codes.WRONG_SHAPE if variant else codes.UNKNOWN_ARCHITECTURE
        yield code.finding(message, fix, file=f"{facts.label}/config.json")
    known = facts.is_quantization_known and not facts.is_contradictory  # else W022
    if planned and known and facts.precision != planned.precision:
        is_16_bits = facts.quantization is None
        found = "no quantization: 16-bit weights" if is_16_bits else safe_name(facts.quantization or "")
        message = f"expected {planned.precision} weights ({planned.quant_algo}), found {found}"
        fix = f"point model at {planned.model or f'{planned.precision} weights'}"
        is_servable = facts.precision and (facts.precision != "w4a16" or facts.for_vllm)
        fix += f", or build again with --precision {facts.precision}" if is_servable else ""
        fix += ", or quantize it: deepseek-triton checkpoint quantize" if is_16_bits else ""
        yield codes.WRONG_PRECISION.finding(message, fix, file=facts.quantization_file)


def _checkpoint_found(
    facts: CheckpointFacts, architecture: Architecture | None, variant: Variant | None, planned: KnownCheckpoint | None
) -> KnownCheckpoint | None:
    """Return the catalogue's entry for the checkpoint that is there, with the KV cache that its files name."""
    precision = facts.precision or (planned.precision if planned else None)
    shapes = [variant] if variant else [v for v in variants().values() if v.architecture == architecture]
    known = (v.checkpoints.get(precision or "") for v in shapes if v.architecture is not None)
    found = planned if planned and planned.precision == precision else next(filter(None, known), None)
    return replace(found, kv_cache_quant_algo=facts.kv_cache_quant_algo) if found else None
