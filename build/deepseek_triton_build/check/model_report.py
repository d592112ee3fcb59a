"""The checks of one model: its folder in a model repository, or a YAML file of LLM arguments by itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepseek_triton_build.check.checkpoint_facts import CheckpointFacts, read_facts
from deepseek_triton_build.check.codes import MODEL_MISSING, WEIGHTS_TOO_LARGE
from deepseek_triton_build.check.documents import Document, read_yaml
from deepseek_triton_build.check.finding import CheckCode, CheckedModel, Finding
from deepseek_triton_build.check.generated_origin import (
    RELEASE_RECORD,
    Stamp,
    changed_files,
    read_environment,
    read_release_version,
    read_stamp,
)
from deepseek_triton_build.check.instance_gpus import check_gpus
from deepseek_triton_build.check.memory_fit import memory_problems
from deepseek_triton_build.check.model_identity import (
    CheckOptions,
    Identity,
    absent_checkpoint,
    find_checkpoint_folder,
    find_release,
    identify,
)
from deepseek_triton_build.check.pbtxt import NAME as CONFIG
from deepseek_triton_build.check.pbtxt import check_config, read_config
from deepseek_triton_build.check.rule_findings import check_deployment, make_deployment
from deepseek_triton_build.check.schema import TRITON_SECTION, UPSTREAM_KEYS, CheckedArguments, check_schema
from deepseek_triton_build.check.triton_config import check_triton_config, triton_settings
from deepseek_triton_build.check.weights import check_weights
from deepseek_triton_build.data.releases import Release
from deepseek_triton_build.rules.rule import Deployment, Violation

MODEL_YAML = "model.yaml"
_OUR_PACKAGE = "deepseek_backend"
_TENSORRT_LLM = "tensorrt_llm"
_NOBODY = Identity(variant=None, architecture=None, checkpoint=None, gpu=None, num_gpus=None)

Checked = tuple[CheckedModel, list[Finding]]


def check_file(path: Path, options: CheckOptions) -> Checked:
    """Keys, values and rules of a YAML file: model.yaml, or what trtllm-serve takes as its extra LLM options."""
    file = path.name
    stamp, findings = read_stamp(path.parent, "")
    recorded, _ = read_release_version(path.parent, "")
    release, release_from, unsure = find_release(options, recorded, stamp, record_file=RELEASE_RECORD, file=file)
    document, unread = read_yaml(path, file)
    findings += unread
    known = _NOBODY
    if document is not None:
        is_model_yaml = file == MODEL_YAML
        sections = (TRITON_SECTION, *UPSTREAM_KEYS) if is_model_yaml else ()
        arguments = check_schema(document, release, other_sections=sections)
        if not is_model_yaml:
            arguments.settings = _from_command_line(options) | arguments.settings
        facts, unwhole = _checkpoint_elsewhere(document, path.parent, options)
        known, misnamed = identify(options, stamp, _model_of(document) or "", facts)
        triton = triton_settings(document) if is_model_yaml else {}
        deployment = make_deployment(arguments, release, known, triton, {})
        findings += [*unsure, *arguments.findings, *unwhole, *misnamed]
        findings += check_deployment(document, deployment, arguments, _fitting(document, deployment, is_model_yaml))
    summary = _summary(file, document, known, release, release_from=release_from, backend="none", engine=_TENSORRT_LLM)
    return summary, findings


def _from_command_line(options: CheckOptions) -> dict[str, Any]:
    """What trtllm-serve and its siblings are told by flags, as far as it is known; their back end is pytorch."""
    return {"backend": "pytorch"} | ({"tensor_parallel_size": options.num_gpus} if options.num_gpus else {})


def check_model(folder: Path, version: str, root: Path, options: CheckOptions) -> Checked:
    """Everything about the model in `folder`, whose model.yaml lies in its folder `version`.

    :param root: what is checked; findings name their files from there.
    """
    label = "" if folder == root else f"{folder.name}/"
    model = _Model(folder=folder, version_dir=folder / version, root=root, label=label, options=options)
    return model.check(), model.findings


@dataclass
class _Model:
    folder: Path
    version_dir: Path
    root: Path
    label: str
    options: CheckOptions
    findings: list[Finding] = field(default_factory=list)

    @property
    def in_version(self) -> str:
        return f"{self.label}{self.version_dir.name}/"

    @property
    def file(self) -> str:
        return f"{self.in_version}{MODEL_YAML}"

    @property
    def is_ours(self) -> bool:
        return os.path.isdir(self.version_dir / _OUR_PACKAGE)

    def check(self) -> CheckedModel:
        stamp = self.keep(read_stamp(self.folder, self.label))
        self.findings += changed_files(stamp, self.folder, self.root, self.label)
        document = self.keep(read_yaml(self.version_dir / MODEL_YAML, self.file))
        release, release_from, unsure = self.release(stamp)
        triton = {} if document is None else triton_settings(document)
        engine = str(triton.get("engine", _TENSORRT_LLM)) if self.is_ours else _TENSORRT_LLM
        arguments = CheckedArguments() if document is None else self.arguments(document, release)
        known = _NOBODY
        if engine == _TENSORRT_LLM and document is not None:
            self.findings += unsure
            known = self.deployment(document, arguments, release, stamp, triton)
        num_ranks = _num_ranks(document, arguments.settings)
        self.config(document, triton, num_ranks, known.num_gpus, places_gpus=engine == _TENSORRT_LLM)
        backend = "deepseek-triton" if self.is_ours else "upstream"
        return _summary(self.file, document, known, release, release_from=release_from, backend=backend, engine=engine)

    def keep(self, read: tuple[Any, list[Finding]]) -> Any:
        """What was read; its findings are added to the others."""
        value, found = read
        self.findings += found
        return value

    def release(self, stamp: Stamp) -> tuple[Release, str, list[Finding]]:
        recorded = self.keep(read_release_version(self.version_dir, self.in_version))
        record_file = f"{self.in_version}{RELEASE_RECORD}"
        return find_release(self.options, recorded, stamp, record_file=record_file, file=self.file)

    def arguments(self, document: Document, release: Release) -> CheckedArguments:
        """The LLM arguments; those that are not as they should be are findings."""
        sections = (TRITON_SECTION,) if self.is_ours else (TRITON_SECTION, *UPSTREAM_KEYS)
        arguments = check_schema(document, release, other_sections=sections)
        self.findings += arguments.findings
        self.findings += check_triton_config(document, is_ours=self.is_ours)
        if not document.values.get("model"):
            fix = "write model: and the checkpoint's folder or name"
            line = document.line("model") or 1
            self.findings.append(
                MODEL_MISSING.finding("no model is named", fix, file=self.file, line=line, key="model")
            )
        return arguments

    def deployment(
        self, document: Document, arguments: CheckedArguments, release: Release, stamp: Stamp, triton: Mapping[str, Any]
    ) -> Identity:
        """Checkpoint, rules and memory."""
        facts = self.checkpoint(document)
        known: Identity = self.keep(identify(self.options, stamp, _model_of(document) or "", facts))
        deployment = make_deployment(arguments, release, known, triton, read_environment(self.folder.parent))
        self.findings += check_deployment(document, deployment, arguments, _fitting(document, deployment, True))
        return known

    def checkpoint(self, document: Document) -> CheckpointFacts | None:
        model = _model_of(document)
        if not model:
            return None
        facts: CheckpointFacts | None = self.keep(
            _checkpoint(model, self.version_dir, self.root, self.options, document)
        )
        return facts

    def config(
        self,
        document: Document | None,
        triton: Mapping[str, Any],
        num_ranks: int | None,
        num_gpus: int | None,
        *,
        places_gpus: bool,
    ) -> None:
        config = self.keep(read_config(self.folder / CONFIG, f"{self.label}{CONFIG}"))
        if config is None:
            return
        self.findings += check_config(
            config,
            folder_name=self.folder.resolve().name,
            triton=None if document is None else triton,
            model_yaml=self.file,
            is_ours=self.is_ours,
        )
        if places_gpus:
            self.findings += check_gpus(config, num_ranks=num_ranks, num_gpus=num_gpus)


def _checkpoint_elsewhere(
    document: Document, folder: Path, options: CheckOptions
) -> tuple[CheckpointFacts | None, list[Finding]]:
    """The checkpoint that the user names; a file by itself names none on this machine."""
    if options.model_root is None:
        return None, []
    return _checkpoint(_model_of(document) or "", folder, folder, options, document)


def _checkpoint(
    model: str, version_dir: Path, root: Path, options: CheckOptions, document: Document
) -> tuple[CheckpointFacts | None, list[Finding]]:
    """What the checkpoint says of itself, and what is wrong with it."""
    found = find_checkpoint_folder(model, version_dir, options.model_root)
    if found is None:
        line = document.line("model")
        return None, [absent_checkpoint(model, strict=options.strict, file=document.file, line=line)]
    label = found.resolve().as_posix().removeprefix(f"{root.resolve().as_posix()}/")
    facts, findings = read_facts(found, label)
    return facts, [*findings, *check_weights(found, label)]


def _fitting(document: Document, deployment: Deployment, is_model_yaml: bool) -> list[tuple[CheckCode, Violation]]:
    """What does not fit the GPUs. Beside an option file there are flags, which may say anything but the GPUs given."""
    if is_model_yaml:
        return list(memory_problems(deployment)) if _num_ranks(document, deployment.settings) is not None else []
    found = memory_problems(deployment) if "tensor_parallel_size" in deployment.settings else ()
    return [(check, violation) for check, violation in found if check is WEIGHTS_TOO_LARGE]


def _model_of(document: Document) -> str | None:
    model = document.values.get("model")
    return model if isinstance(model, str) else None


def _num_ranks(document: Document | None, settings: Mapping[str, Any]) -> int | None:
    """Tensor x pipeline parallelism; None when one of them is given but not rightly."""
    sizes = 1
    for key in ("tensor_parallel_size", "pipeline_parallel_size"):
        if document is None or (key in document.values and key not in settings):
            return None
        sizes *= int(settings.get(key, 1))
    return sizes


def _summary(
    file: str,
    document: Document | None,
    known: Identity,
    release: Release,
    *,
    release_from: str,
    backend: str,
    engine: str,
) -> CheckedModel:
    return CheckedModel(
        file=file,
        model=None if document is None else _model_of(document),
        backend=backend,
        engine=engine,
        release=release.version,
        release_from=release_from,
        variant=known.variant.name if known.variant else None,
        precision=known.checkpoint.precision if known.checkpoint else None,
        gpu=known.gpu.name if known.gpu else None,
        num_gpus=known.num_gpus,
    )
