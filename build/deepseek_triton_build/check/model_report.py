"""All checks of one model of a model repository: of its folder, its script and its checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deepseek_triton_build.check.checkpoint_files import CheckpointFacts
from deepseek_triton_build.check.documents import MAX_TEXT_BYTES, Document, read_bytes, read_json_document, read_yaml
from deepseek_triton_build.check.engine_arguments import engine_problems
from deepseek_triton_build.check.finding import MISSING_FILE, MODEL_MISSING, OTHER_RECORD, WRONG_VLLM_BACKEND
from deepseek_triton_build.check.generated_origin import Recorded, changed_files, read_recorded
from deepseek_triton_build.check.gpus import (
    KIND_CPU,
    TRTLLM_RANKS,
    VLLM_RANKS,
    check_gpus,
    check_kinds,
    check_vllm_gpus,
    hidden_gpus,
    memory_problems,
)
from deepseek_triton_build.check.model_identity import (
    UNKNOWN,
    CheckOptions,
    Identity,
    absent_checkpoint,
    find_checkpoint_folder,
    find_release,
    find_vllm,
)
from deepseek_triton_build.check.pbtxt import NAME as CONFIG
from deepseek_triton_build.check.pbtxt import ModelConfig, backend_folder, check_config, check_name, read_config
from deepseek_triton_build.check.rule_findings import (
    Checked,
    ModelCheck,
    Place,
    canonical_settings,
    make_deployment,
    make_vllm_deployment,
    place_in,
    with_balancer_file,
)
from deepseek_triton_build.check.schema import (
    MODEL_YAML,
    TRITON_SECTION,
    UPSTREAM_KEYS,
    CheckedArguments,
    check_schema,
    check_triton_config,
    ignored_arguments,
    triton_settings,
)
from deepseek_triton_build.check.scripts import (
    START_SCRIPT,
    ShellScript,
    as_setting,
    read_script,
    variable_problems,
    vllm_variable_problems,
)
from deepseek_triton_build.check.vllm_arguments import check_vllm_arguments
from deepseek_triton_build.data.releases import Release
from deepseek_triton_build.data.vllm import VllmVersion
from deepseek_triton_build.planning.plan_request import EMBEDDED_ENGINES, ENGINES
from deepseek_triton_build.render.stamp import RELEASE_RECORD
from deepseek_triton_build.rules.finding import Finding
from deepseek_triton_build.text import is_path, short_repr

OUR_PACKAGE = "deepseek_backend"
MODEL_PY = "model.py"
MODEL_JSON = "model.json"
_TENSORRT_LLM = "tensorrt_llm"
_VLLM = "vllm"
_KIND, _OF_ONE_GPU = "KIND_MODEL", "KIND_GPU"
"""The kind of instances that Triton's vLLM backend asks for, and one that it takes for a single GPU."""
_NAMES_MODEL = re.compile(rb'"model"\s*:')
_NAMES_VLLM = re.compile(rb"vllm")


def check_model(folder: Path, version: str, root: Path, options: CheckOptions) -> Checked:
    """Check everything about the model in `folder`, whose model.yaml or model.json lies in its folder `version`.

    :param root: the folder that is checked. Findings name files relative to it.
    """
    kind = _VllmBackendModel if is_of_vllm_backend(folder, folder / version) else _Model
    label = "" if folder == root else f"{folder.name}/"
    return kind(folder=folder, version_dir=folder / version, root=root, label=label, options=options).check()


def is_of_vllm_backend(folder: Path, version_dir: Path) -> bool:
    """Tell whether a model has a model.json that is meant for the backend: other backends use the name too."""
    places = ((version_dir / MODEL_JSON, _NAMES_MODEL), (folder / CONFIG, _NAMES_VLLM))
    if os.path.lexists(version_dir / MODEL_YAML) or not os.path.lexists(version_dir / MODEL_JSON):
        return False
    for path, pattern in places:
        try:
            if pattern.search(read_bytes(path, MAX_TEXT_BYTES) or b""):
                return True
        except OSError:
            continue
    return False


@dataclass(frozen=True, kw_only=True)
class _Library:
    """The library that runs the model, and what is known of the model from its arguments."""

    version: str
    version_from: str
    known: Identity
    num_ranks: int | None


@dataclass(kw_only=True)
class _Model(ModelCheck):
    version_dir: Path

    @property
    def in_version(self) -> str:
        return f"{self.label}{self.version_dir.name}/"

    @property
    def file(self) -> str:
        return f"{self.in_version}{MODEL_YAML}"

    @property
    def is_ours(self) -> bool:
        return os.path.isdir(self.version_dir / OUR_PACKAGE) or self.stamp.has_below(
            f"{self.version_dir.name}/{OUR_PACKAGE}"
        )

    def check(self) -> Checked:
        self.findings += changed_files(self.stamp, self.folder, self.root, self.label)
        document = self.keep(read_yaml(self.version_dir / MODEL_YAML, self.file))
        recorded = self.keep(read_recorded(self.version_dir, self.in_version))
        triton = {} if document is None else triton_settings(document)
        engine = self.engine(triton, recorded, has_document=document is not None)
        script = self.start_script()
        if engine == _VLLM:
            library = self.check_vllm(document, recorded, triton, script)
        else:
            library = self.check_tensorrt_llm(document, recorded, triton, engine, script)
        config = self.keep(read_config(self.folder / CONFIG, f"{self.label}{CONFIG}"))
        self.findings += self.missing_program(config)
        if config is not None:
            self.findings += check_config(
                config,
                folder=self.folder,
                triton=None if document is None else triton,
                model_yaml=self.file,
                is_ours=self.is_ours,
            )
            self.findings += _gpu_problems(config, engine, library, script)
        model = None if document is None else _model_of(document)
        backend = "deepseek-triton" if self.is_ours else "upstream"
        return self.checked(self.file, model, backend, engine, library.version, library.version_from, library.known)

    def engine(self, triton: Mapping[str, Any], recorded: Recorded, *, has_document: bool) -> str:
        """Return the engine that the model runs on.

        Where model.yaml can't be read or names an unknown engine, the record beside it tells vLLM from TensorRT-LLM.
        """
        named = triton.get("engine", _TENSORRT_LLM) if has_document else None
        if not self.is_ours:
            return _TENSORRT_LLM
        if named in ENGINES:
            return str(named)
        return _VLLM if recorded.vllm is not None else _TENSORRT_LLM

    def start_script(self) -> ShellScript | None:
        """Return start.sh; None without one. What is wrong with it is said when the whole repository is checked."""
        path = self.folder.parent / START_SCRIPT
        if not os.path.lexists(path):
            return None
        script, found = read_script(path, START_SCRIPT)
        if self.root == self.folder.parent:
            self.findings += found
            self.findings += [] if script is None else variable_problems(script)
        elif script is None:
            self.unchecked.append(f"{START_SCRIPT}, because it can't be read")
        return script

    def missing_program(self, config: ModelConfig | None) -> list[Finding]:
        """Return the finding about a model.py that is not there. That of a generated model is among changed_files."""
        name = (config.message.default_model_filename if config is not None else "") or MODEL_PY
        if f"{self.folder.name}/{self.version_dir.name}/{name}" in self.stamp.files:
            return []
        if config is not None and backend_folder(config, self.folder) is not None:
            return []
        if os.path.lexists(self.version_dir / name):
            return []
        fix = "put it there; deepseek-triton build --force writes this project's"
        return [MISSING_FILE.finding(f"{name} is missing, which Triton runs", fix, file=f"{self.in_version}{name}")]

    def check_tensorrt_llm(
        self,
        document: Document | None,
        recorded: Recorded,
        triton: Mapping[str, Any],
        engine: str,
        script: ShellScript | None,
    ) -> _Library:
        """Check what TensorRT-LLM gets, and what an embedded engine gets that takes its place."""
        record_file = f"{self.in_version}{RELEASE_RECORD}"
        release, release_from, unsure = find_release(
            self.options, recorded.release, self.stamp, record_file=record_file, file=self.file
        )
        arguments = CheckedArguments() if document is None else self.check_arguments(document, release, engine)
        known = UNKNOWN
        if engine == _TENSORRT_LLM and document is not None:
            self.findings += unsure
            self.findings += self.other_record("TensorRT-LLM", recorded.release, "vLLM", recorded.vllm)
            known = self.check_rules(document, arguments, release, triton, script)
        num_ranks = _num_ranks(document, arguments.settings)
        return _Library(version=release.version, version_from=release_from, known=known, num_ranks=num_ranks)

    def check_vllm(
        self, document: Document | None, recorded: Recorded, triton: Mapping[str, Any], script: ShellScript | None
    ) -> _Library:
        """Check what vLLM gets."""
        version, version_from, unsure = find_vllm(
            self.options, recorded.vllm, self.stamp, record_file=f"{self.in_version}{RELEASE_RECORD}", file=self.file
        )
        self.findings += self.other_record("vLLM", recorded.vllm, "TensorRT-LLM", recorded.release) or unsure
        known, num_ranks = UNKNOWN, None
        if document is not None:
            self.findings += check_triton_config(document, version.find, is_ours=self.is_ours)
            known, num_ranks = self.check_vllm_arguments(document, version, triton, script)
        return _Library(version=version.version, version_from=version_from, known=known, num_ranks=num_ranks)

    def check_vllm_arguments(
        self, document: Document, version: VllmVersion, triton: Mapping[str, Any], script: ShellScript | None
    ) -> tuple[Identity, int | None]:
        """Check the engine arguments in `document`, and return what the model is, and the ranks it needs."""
        sections = (TRITON_SECTION,) if self.is_ours else ()
        arguments = check_vllm_arguments(document, version, other_sections=sections)
        self.findings += arguments.findings
        self.findings += self.missing_model(document)
        if script is not None and self.root == self.folder.parent:
            self.findings += vllm_variable_problems(script, version, partial(as_setting, document))
        facts = self.checkpoint(document, for_vllm=True) if _model_of(document) else None
        known = self.identify(_model_of(document), facts, self.file, document.line("model"))
        deployment = make_vllm_deployment(arguments.settings, version, known, triton, arguments.unknown)
        self.check_on_vllm(deployment, partial(_place, document), facts)
        self.note_unchecked(known, facts)
        return known, _num_ranks(document, arguments.settings, "data_parallel_size")

    def other_record(self, wanted: str, of_wanted: str | None, other: str, of_other: str | None) -> list[Finding]:
        """Return the finding about a record of the other library, where there is none of the wanted one."""
        if of_wanted is not None or of_other is None:
            return []
        file = f"{self.in_version}{RELEASE_RECORD}"
        message = f"expected the record of a version of {wanted}, which the engine is, found that of {other} {of_other}"
        fix = f"build the repository again for {wanted}, or correct triton_config.engine"
        return [OTHER_RECORD.finding(message, fix, file=file)]

    def missing_model(self, document: Document) -> list[Finding]:
        if document.values.get("model"):
            return []
        fix, line = "write model: with the checkpoint's folder or name", document.line("model") or 1
        return [MODEL_MISSING.finding("no model is named", fix, file=self.file, line=line, key="model")]

    def check_arguments(self, document: Document, release: Release, engine: str) -> CheckedArguments:
        """Return the LLM arguments, and add findings about the wrong ones."""
        sections = (TRITON_SECTION,) if self.is_ours else (TRITON_SECTION, *UPSTREAM_KEYS)
        if engine in EMBEDDED_ENGINES:
            arguments = ignored_arguments(document, engine)
        else:
            arguments = check_schema(document, release, other_sections=sections)
        self.findings += arguments.findings
        self.findings += check_triton_config(document, release.find_key, is_ours=self.is_ours)
        self.findings += self.missing_model(document)
        return arguments

    def check_rules(
        self,
        document: Document,
        arguments: CheckedArguments,
        release: Release,
        triton: Mapping[str, Any],
        script: ShellScript | None,
    ) -> Identity:
        """Check the checkpoint, the rules and the memory, and return what the model is."""
        facts = self.checkpoint(document) if _model_of(document) else None
        known = self.identify(_model_of(document), facts, self.file, document.line("model"))
        settings = self.keep(
            with_balancer_file(canonical_settings(arguments, release), self.version_dir, self.in_version)
        )
        variables = {} if script is None else script.known_values
        deployment = make_deployment(settings, release, known, triton, variables)
        misfits = list(memory_problems(deployment)) if _num_ranks(document, settings) is not None else []
        self.check_deployment(deployment, misfits, place_in(document, arguments, release), facts)
        self.unchecked += self.keep(engine_problems(document, release))
        self.note_unchecked(known, facts)
        return known

    def checkpoint(self, document: Document, *, for_vllm: bool = False) -> CheckpointFacts | None:
        """Return what the checkpoint's files say; None when it is not on this machine."""
        model = _model_of(document)
        found = find_checkpoint_folder(model, self.version_dir, self.options.model_root)
        tokenizer, named = found, document.values.get("tokenizer")
        if isinstance(named, str) and not is_path(named):
            tokenizer = None  # a Hugging Face name, which rule E008 judges
        elif isinstance(named, str):
            tokenizer = find_checkpoint_folder(named, self.version_dir, None)
            if tokenizer is None:
                self.findings.append(absent_checkpoint(document, named, "tokenizer", strict=self.options.strict))
        if found is None:
            self.findings.append(absent_checkpoint(document, model, "model", strict=self.options.strict))
            return None
        return self.read_checkpoint(found, tokenizer, for_vllm=for_vllm)


def _gpu_problems(config: ModelConfig, engine: str, library: _Library, script: ShellScript | None) -> Iterator[Finding]:
    """Find instances whose GPUs are missing, shared, hidden, too few or too many."""
    ranks, gpus = library.num_ranks, library.known.num_gpus
    if engine == _VLLM:
        yield from check_kinds(config, KIND_CPU)
        yield from check_vllm_gpus(config, num_ranks=ranks, num_gpus=gpus)
    elif engine == _TENSORRT_LLM:
        yield from check_gpus(config, num_ranks=ranks, num_gpus=gpus)
    if engine in (_TENSORRT_LLM, _VLLM) and script is not None and ranks is not None:
        yield from hidden_gpus(script, ranks, library.known.gpu, VLLM_RANKS if engine == _VLLM else TRTLLM_RANKS)


def _model_of(document: Document) -> str:
    """Return the checkpoint's folder or name; an empty string when model.yaml names none."""
    model = document.values.get("model")
    return model if isinstance(model, str) else ""


def _place(document: Document, key: str | None) -> Place:
    return document.file, document.line(key) if key else None, key or ""


def _num_ranks(document: Document | None, settings: Mapping[str, Any], *others: str) -> int | None:
    """Return tensor x pipeline parallelism, times `others`; None when one of them has a wrong value."""
    sizes = 1
    for key in ("tensor_parallel_size", "pipeline_parallel_size", *others):
        if document is None or (key in document.values and key not in settings):
            return None
        sizes *= int(settings.get(key, 1))
    return sizes


class _VllmBackendModel(_Model):
    """The check of a model of Triton's own vLLM backend: its model.json, its config.pbtxt and its checkpoint."""

    @property
    def file(self) -> str:
        return f"{self.in_version}{MODEL_JSON}"

    @property
    def is_ours(self) -> bool:
        return False

    def check(self) -> Checked:
        document = self.keep(read_json_document(self.version_dir / MODEL_JSON, self.file))
        version, version_from, unsure = find_vllm(
            self.options, None, self.stamp, record_file=f"{self.in_version}{RELEASE_RECORD}", file=self.file
        )
        self.findings += unsure
        known, num_ranks = UNKNOWN, None
        if document is not None:
            known, num_ranks = self.check_vllm_arguments(document, version, {}, self.start_script())
        config = self.keep(read_config(self.folder / CONFIG, f"{self.label}{CONFIG}"))
        if config is not None:
            self.findings += check_name(config, self.folder)
            self.findings += _vllm_backend_problems(config, is_alone=num_ranks == 1)
            self.findings += check_vllm_gpus(config, num_ranks=num_ranks, num_gpus=known.num_gpus)
        model = None if document is None else str(document.values.get("model") or "")
        return self.checked(self.file, model, "vllm_backend", _VLLM, version.version, version_from, known)


def _vllm_backend_problems(config: ModelConfig, *, is_alone: bool) -> Iterator[Finding]:
    """Find what Triton's vLLM backend refuses.

    :param is_alone: whether an instance has one rank, which may be of KIND_GPU.
    """
    message = config.message
    if message.backend != _VLLM:
        text = f"expected backend {_VLLM}, which reads {MODEL_JSON}, found {short_repr(message.backend or None)}"
        yield config.finding(WRONG_VLLM_BACKEND, text, f'write backend: "{_VLLM}"', at="backend")
    if message.HasField("model_transaction_policy") and not message.model_transaction_policy.decoupled:
        text = "expected decoupled: true, found false"
        fix = "write model_transaction_policy { decoupled: true }, or leave it out"
        yield config.finding(WRONG_VLLM_BACKEND, text, fix, at="decoupled")
    if message.max_batch_size:
        text = f"expected max_batch_size 0, because vLLM makes the batches, found {message.max_batch_size}"
        yield config.finding(WRONG_VLLM_BACKEND, text, "write max_batch_size: 0", at="max_batch_size")
    for finding in check_kinds(config, _KIND):
        if _OF_ONE_GPU not in finding.message:
            yield finding
        elif not is_alone:
            text = f"the backend refuses {_OF_ONE_GPU} for more than one rank (tensor x pipeline parallelism)"
            yield config.finding(WRONG_VLLM_BACKEND, text, f"write kind: {_KIND}", at="kind")
