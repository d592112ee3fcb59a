"""All checks of one model: of its folder in a model repository, or of a YAML file of LLM arguments by itself."""

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
from deepseek_triton_build.check.schema import (
    TRITON_SECTION,
    UPSTREAM_KEYS,
    CheckedArguments,
    check_schema,
    ignored_arguments,
)
from deepseek_triton_build.check.triton_config import check_triton_config, triton_settings
from deepseek_triton_build.check.weights import check_weights
from deepseek_triton_build.data.releases import Release
from deepseek_triton_build.planning.plan_request import EMBEDDED_ENGINES
from deepseek_triton_build.rules.rule import Deployment, Violation

MODEL_YAML = "model.yaml"
_OUR_PACKAGE = "deepseek_backend"
_TENSORRT_LLM = "tensorrt_llm"
_UNKNOWN = Identity(variant=None, architecture=None, checkpoint=None, gpu=None, num_gpus=None)

Checked = tuple[CheckedModel, list[Finding]]


def check_file(path: Path, options: CheckOptions) -> Checked:
    """Check keys, values and rules of a YAML file: a model.yaml, or the extra LLM options of trtllm-serve."""
    file = path.name
    stamp, findings = read_stamp(path.parent, "")
    recorded, _ = read_release_version(path.parent, "")
    release, release_from, unsure = find_release(options, recorded, stamp, record_file=RELEASE_RECORD, file=file)
    document, unread = read_yaml(path, file)
    findings += unread
    known = _UNKNOWN
    if document is not None:
        is_model_yaml = file == MODEL_YAML
        sections = (TRITON_SECTION, *UPSTREAM_KEYS) if is_model_yaml else ()
        arguments = check_schema(document, release, other_sections=sections)
        if not is_model_yaml:
            arguments.settings = _from_command_line(options) | arguments.settings
        # A file by itself names no checkpoint of this machine, but the user may.
        folder = path.parent
        facts, damaged = (None, []) if options.model_root is None else _checkpoint(document, folder, folder, options)
        known, misnamed = identify(options, stamp, _model_of(document), facts)
        triton = triton_settings(document) if is_model_yaml else {}
        deployment = make_deployment(arguments, release, known, triton, {})
        findings += [*unsure, *arguments.findings, *damaged, *misnamed]
        findings += check_deployment(document, deployment, arguments, _misfits(document, deployment, is_model_yaml))
    summary = _summary(file, document, known, release, release_from=release_from, backend="none", engine=_TENSORRT_LLM)
    return summary, findings


def _from_command_line(options: CheckOptions) -> dict[str, Any]:
    """Return the arguments that trtllm-serve and its siblings get by flags, where known; their back end is pytorch."""
    return {"backend": "pytorch"} | ({"tensor_parallel_size": options.num_gpus} if options.num_gpus else {})


def check_model(folder: Path, version: str, root: Path, options: CheckOptions) -> Checked:
    """Check everything about the model in `folder`, whose model.yaml lies in its folder `version`.

    :param root: the folder that is checked. Findings name files relative to it.
    """
    label = "" if folder == root else f"{folder.name}/"
    model = _Model(folder=folder, version_dir=folder / version, root=root, label=label, options=options)
    return model.check(), model.findings


@dataclass
class _Model:
    """The check of one model's folder, which collects the findings."""

    folder: Path
    version_dir: Path
    root: Path
    label: str
    """The beginning of file names in findings: the model's folder, or nothing when the model itself is `root`."""
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
        recorded = self.keep(read_release_version(self.version_dir, self.in_version))
        record_file = f"{self.in_version}{RELEASE_RECORD}"
        release, release_from, unsure = find_release(
            self.options, recorded, stamp, record_file=record_file, file=self.file
        )
        triton = {} if document is None else triton_settings(document)
        engine = str(triton.get("engine", _TENSORRT_LLM)) if self.is_ours else _TENSORRT_LLM
        arguments = CheckedArguments() if document is None else self.check_arguments(document, release, engine)
        known = _UNKNOWN
        if engine == _TENSORRT_LLM and document is not None:
            self.findings += unsure
            known = self.check_rules(document, arguments, release, stamp, triton)
        config = self.keep(read_config(self.folder / CONFIG, f"{self.label}{CONFIG}"))
        if config is not None:
            name, given = self.folder.resolve().name, None if document is None else triton
            self.findings += check_config(
                config, folder_name=name, triton=given, model_yaml=self.file, is_ours=self.is_ours
            )
        if config is not None and engine == _TENSORRT_LLM:
            num_ranks = _num_ranks(document, arguments.settings)
            self.findings += check_gpus(config, num_ranks=num_ranks, num_gpus=known.num_gpus)
        backend = "deepseek-triton" if self.is_ours else "upstream"
        return _summary(self.file, document, known, release, release_from=release_from, backend=backend, engine=engine)

    def keep(self, read: tuple[Any, list[Finding]]) -> Any:
        """Return what was read, and add its findings to the others."""
        value, found = read
        self.findings += found
        return value

    def check_arguments(self, document: Document, release: Release, engine: str) -> CheckedArguments:
        """Return the LLM arguments, and add findings about the wrong ones."""
        sections = (TRITON_SECTION,) if self.is_ours else (TRITON_SECTION, *UPSTREAM_KEYS)
        if engine in EMBEDDED_ENGINES:
            arguments = ignored_arguments(document, engine)
        else:
            arguments = check_schema(document, release, other_sections=sections)
        self.findings += arguments.findings
        self.findings += check_triton_config(document, is_ours=self.is_ours)
        if not document.values.get("model"):
            fix, line = "write model: with the checkpoint's folder or name", document.line("model") or 1
            found = MODEL_MISSING.finding("no model is named", fix, file=self.file, line=line, key="model")
            self.findings.append(found)
        return arguments

    def check_rules(
        self, document: Document, arguments: CheckedArguments, release: Release, stamp: Stamp, triton: Mapping[str, Any]
    ) -> Identity:
        """Check the checkpoint, the rules and the memory, and return what the model is."""
        facts = None
        if _model_of(document):
            facts = self.keep(_checkpoint(document, self.version_dir, self.root, self.options))
        known: Identity = self.keep(identify(self.options, stamp, _model_of(document), facts))
        deployment = make_deployment(arguments, release, known, triton, read_environment(self.folder.parent))
        self.findings += check_deployment(document, deployment, arguments, _misfits(document, deployment, True))
        return known


def _checkpoint(
    document: Document, version_dir: Path, root: Path, options: CheckOptions
) -> tuple[CheckpointFacts | None, list[Finding]]:
    """Return what the checkpoint's files say about it, and what is wrong with it."""
    model = _model_of(document)
    found = find_checkpoint_folder(model, version_dir, options.model_root)
    if found is None:
        return None, [absent_checkpoint(document, model, strict=options.strict)]
    label = found.resolve().as_posix().removeprefix(f"{root.resolve().as_posix()}/")
    facts, findings = read_facts(found, label)
    return facts, [*findings, *check_weights(found, label)]


def _misfits(document: Document, deployment: Deployment, is_model_yaml: bool) -> list[tuple[CheckCode, Violation]]:
    """Find what does not fit the memory of the GPUs.

    An option file is used together with flags, which may set anything else, so only the weights are judged there, and
    only when the number of GPUs is known.
    """
    if is_model_yaml:
        return list(memory_problems(deployment)) if _num_ranks(document, deployment.settings) is not None else []
    found = memory_problems(deployment) if "tensor_parallel_size" in deployment.settings else ()
    return [(check, violation) for check, violation in found if check is WEIGHTS_TOO_LARGE]


def _model_of(document: Document) -> str:
    """Return the checkpoint's folder or name; an empty string when model.yaml names none."""
    model = document.values.get("model")
    return model if isinstance(model, str) else ""


def _num_ranks(document: Document | None, settings: Mapping[str, Any]) -> int | None:
    """Return tensor x pipeline parallelism; None when one of the two has a wrong value."""
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
        model=None if document is None else _model_of(document) or None,
        backend=backend,
        engine=engine,
        release=release.version,
        release_from=release_from,
        variant=known.variant.name if known.variant else None,
        precision=known.checkpoint.precision if known.checkpoint else None,
        gpu=known.gpu.name if known.gpu else None,
        num_gpus=known.num_gpus,
    )
