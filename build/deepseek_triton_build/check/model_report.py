"""All checks of one model of a model repository: of its folder, its script and its checkpoint."""

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from deepseek_triton_build.check import codes
from deepseek_triton_build.check.checkpoint_files import CheckpointFacts, tokenizer_problems
from deepseek_triton_build.check.documents import MAX_TEXT_BYTES, Document, read_bytes, read_json_document, read_yaml
from deepseek_triton_build.check.engine_arguments import engine_problems
from deepseek_triton_build.check.generated_origin import STAMP_FIX, Recorded, changed_files, read_recorded
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
    CheckOptions,
    absent_checkpoint,
    find_checkpoint_folder,
    find_release,
    find_vllm,
)
from deepseek_triton_build.check.pbtxt import NAME as CONFIG
from deepseek_triton_build.check.pbtxt import (
    ModelConfig,
    backend_folder,
    check_config,
    check_name,
    check_versions,
    read_config,
)
from deepseek_triton_build.check.rule_findings import ModelCheck, canonical_settings, place_in
from deepseek_triton_build.check.schema import (
    MODEL_YAML,
    TRITON_SECTION,
    UPSTREAM_KEYS,
    check_schema,
    check_triton_config,
    ignored_arguments,
    triton_settings,
)
from deepseek_triton_build.check.scripts import (
    START_SCRIPT,
    VISIBLE_GPUS,
    ShellScript,
    as_setting,
    read_script,
    variable_problems,
    vllm_variable_problems,
)
from deepseek_triton_build.check.start_script import lost_exports, start_problems
from deepseek_triton_build.check.vllm_arguments import check_vllm_arguments
from deepseek_triton_build.data.finding import Finding
from deepseek_triton_build.data.spelling import flattened
from deepseek_triton_build.planning.plan_request import EMBEDDED_ENGINES, ENGINES
from deepseek_triton_build.render.stamp import MANIFEST, RELEASE_RECORD
from deepseek_triton_build.rules.rule import Deployment, VllmDeployment
from deepseek_triton_build.text import is_path, safe_name, short_repr

OUR_PACKAGE = "deepseek_backend"
MODEL_PY = "model.py"
MODEL_JSON = "model.json"
_TENSORRT_LLM = "tensorrt_llm"
_VLLM = "vllm"
# The kind of instances that Triton's vLLM backend asks for, and one that it takes for a single GPU.
_KIND, _OF_ONE_GPU = "KIND_MODEL", "KIND_GPU"
_NAMES_MODEL = re.compile(rb'"model"\s*:')
_NAMES_VLLM = re.compile(rb"vllm")


def check_model(folder: Path, version: str, root: Path, options: CheckOptions) -> ModelCheck:
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
        with suppress(OSError):
            if pattern.search(read_bytes(path, MAX_TEXT_BYTES) or b""):
                return True
    return False


@dataclass(kw_only=True)
class _Model(ModelCheck):
    """The check of a model with a model.yaml."""

    version_dir: Path
    num_ranks: int | None = None
    """None where the arguments give no valid numbers."""

    @property
    def in_version(self) -> str:
        return f"{self.label}{self.version_dir.name}/"

    @property
    def file(self) -> str:
        return f"{self.in_version}{MODEL_YAML}"

    @cached_property
    def is_ours(self) -> bool:
        in_stamp = f"{self.version_dir.name}/{OUR_PACKAGE}"
        return os.path.isdir(self.version_dir / OUR_PACKAGE) or self.stamp.has_below(in_stamp)

    @cached_property
    def document(self) -> Document | None:
        return self.keep(read_yaml(self.version_dir / MODEL_YAML, self.file))

    @cached_property
    def recorded(self) -> Recorded:
        return self.keep(read_recorded(self.version_dir, self.in_version))

    @property
    def triton(self) -> Mapping[str, Any]:
        return {} if self.document is None else triton_settings(self.document)

    @property
    def named_model(self) -> str:
        """The checkpoint's folder or name; an empty string when the arguments name none."""
        model = self.document.values.get("model") if self.document is not None else None
        return model if isinstance(model, str) else ""

    @cached_property
    def engine(self) -> str:
        """The engine that the model runs on. Where model.yaml can't be read or names none or an unknown one, the stamp
        tells it, else the record beside it, which is vLLM's or TensorRT-LLM's."""
        named = None if self.document is None else self.triton.get("engine", self.stamp.usual_engine(self.version_dir))
        recorded = _TENSORRT_LLM if self.recorded.vllm is None or not self.is_ours else _VLLM
        known = (name for name in (named, self.stamp.text("engine")) if self.is_ours and name in ENGINES)
        return next(known, recorded)

    @cached_property
    def script(self) -> ShellScript | None:
        """start.sh; None without one. What is wrong with it is said when the whole repository is checked."""
        path = self.folder.parent / START_SCRIPT
        if not os.path.lexists(path):
            return None
        script, findings = read_script(path, START_SCRIPT)
        if self.root == self.folder.parent:
            self.findings += findings
            self.findings += [] if script is None else variable_problems(script.variables, script.file)
        elif script is None:
            self.unchecked.append(f"{START_SCRIPT}, because it can't be read")
        return script

    def check(self) -> ModelCheck:
        self.findings += changed_files(self.stamp, self.folder, self.root, self.label)
        self.findings += self.stamp.lost_engine(self.document, self.version_dir)
        if self.engine == _VLLM:
            self.check_vllm()
        else:
            self.check_tensorrt_llm()
        self.find_start()
        config = self.keep(read_config(self.folder / CONFIG, f"{self.label}{CONFIG}"))
        self.find_program(config)
        if config is not None:
            triton = None if self.document is None else self.triton
            self.findings += check_config(
                config, folder=self.folder, triton=triton, model_yaml=self.file, is_ours=self.is_ours
            )
            self.findings += check_versions(config, self.folder)
            self.check_instances(config)
        backend = "deepseek-triton" if self.is_ours else "upstream"
        return self.done(self.file, self.named_model, backend, self.engine)

    def find_start(self) -> None:
        """Report what start.sh gets wrong, and that its stamp is gone. Of ranks that do not fit the GPUs, and of other
        files that are gone, only that is said."""
        told = {(finding.file, finding.code) for finding in self.findings}
        if self.script is None or self.root != self.folder.parent or (START_SCRIPT, codes.BROKEN_SCRIPT.code) in told:
            return
        is_told = (self.stamp.file, codes.BROKEN.code) in told
        if "# Generated by deepseek-triton" in self.script.text and self.stamp.text("engine") is None and not is_told:
            message = f"{MANIFEST} is gone or says only how the folder was built, and launch refuses the folder"
            self.findings.append(
                codes.MISSING_FILE.finding(message, f"copy it here; {STAMP_FIX}", file=self.stamp.file)
            )
        is_counted = self.engine == _TENSORRT_LLM and self.known.num_gpus in (None, self.num_ranks)
        num_ranks = self.num_ranks if is_counted else None
        self.findings += start_problems(self.script, self.root, self.stamp.files, num_ranks=num_ranks)
        self.findings += lost_exports(self.script, self.stamp, START_SCRIPT)

    def find_program(self, config: ModelConfig | None) -> None:
        """Report a model.py that is not there. That of a generated model is among changed_files."""
        name = (config.message.default_model_filename if config is not None else "") or MODEL_PY
        # changed_files says so of a generated one, and Python-based backends bring their own.
        is_generated = f"{self.folder.name}/{self.version_dir.name}/{name}" in self.stamp.files
        is_elsewhere = config is not None and backend_folder(config, self.folder) is not None
        if not is_generated and not is_elsewhere and not os.path.lexists(self.version_dir / name):
            message, file = f"{name} is missing, which Triton runs", f"{self.in_version}{name}"
            fix = "put it there; this project's is in every repository that deepseek-triton build writes"
            self.findings.append(codes.MISSING_FILE.finding(message, fix, file=file))

    def check_instances(self, config: ModelConfig) -> None:
        """Find instances whose GPUs are missing, shared, hidden, too few or too many."""
        ranks, gpus = self.num_ranks, self.known.num_gpus
        if self.engine == _VLLM:
            self.findings += check_kinds(config, KIND_CPU)
            self.findings += check_vllm_gpus(config, num_ranks=ranks, num_gpus=gpus)
        elif self.engine == _TENSORRT_LLM:
            self.findings += check_gpus(config, num_ranks=ranks, num_gpus=gpus)
        if self.engine in (_TENSORRT_LLM, _VLLM) and self.script is not None and ranks is not None:
            way = VLLM_RANKS if self.engine == _VLLM else TRTLLM_RANKS
            visible = self.script.variables.get(VISIBLE_GPUS)
            self.findings += hidden_gpus(visible, ranks, self.known.gpu, way, file=self.script.file)

    def check_tensorrt_llm(self) -> None:
        """Check what TensorRT-LLM gets, and what an embedded engine gets that takes its place."""
        record_file = f"{self.in_version}{RELEASE_RECORD}"
        release, self.version_from, unsure = find_release(
            self.options, self.recorded.release, self.stamp, record_file=record_file, file=self.file
        )
        self.version = release.version
        document = self.document
        if document is None:
            return
        sections = (TRITON_SECTION,) if self.is_ours else (TRITON_SECTION, *UPSTREAM_KEYS)
        is_embedded = self.engine in EMBEDDED_ENGINES
        if is_embedded:
            arguments = ignored_arguments(document, self.engine)
        else:
            arguments = check_schema(document, release, other_sections=sections)
        self.findings += arguments.findings
        self.findings += check_triton_config(document, release.find_key, is_ours=self.is_ours)
        self.find_model(document)
        self.num_ranks = _num_ranks(document, {**arguments.meant, **arguments.settings}, "context_parallel_size")
        is_generated = self.stamp.has_below(f"{self.version_dir.name}/{self.named_model}")  # and its checksums compared
        if self.engine == "reference" and self.named_model and not is_generated:
            folder = self.find_folder(document, "model", self.options.model_root)
            self.read_checkpoint(folder, folder, for_vllm=True)  # it goes by the index and config.json as vLLM does
        if is_embedded:
            return
        self.findings += unsure
        self.find_other_record("TensorRT-LLM", self.recorded.release, "vLLM", self.recorded.vllm)
        facts = self.checkpoint(document)
        settings = self.keep(canonical_settings(arguments, release, self.version_dir, self.in_version))
        self.deployment = Deployment(
            settings=settings,
            unknown=frozenset(arguments.unknown),
            release=release,
            triton=flattened(self.triton),
            environment=self.environment(self.script, document, release),
            **self.known.facts,
        )
        misfits = memory_problems(self.deployment) if _num_ranks(document, settings) is not None else ()
        self.check_deployment(misfits, place_in(document, arguments, release), facts)
        self.unchecked += self.keep(engine_problems(document, release))

    def check_vllm(self) -> None:
        record_file = f"{self.in_version}{RELEASE_RECORD}"
        version, self.version_from, unsure = find_vllm(
            self.options, self.recorded.vllm, self.stamp, record_file=record_file, file=self.file
        )
        self.version = version.version
        if self.find_other_record("vLLM", self.recorded.vllm, "TensorRT-LLM", self.recorded.release):
            return  # the arguments are another library's
        self.findings += unsure
        document = self.document
        if document is None:
            return
        if self.is_ours:
            self.findings += check_triton_config(document, version.find, is_ours=True)
        arguments = check_vllm_arguments(document, version, other_sections=(TRITON_SECTION,) if self.is_ours else ())
        self.findings += arguments.findings
        self.find_model(document)
        if self.script is not None and self.root == self.folder.parent:
            self.findings += vllm_variable_problems(self.script, version, partial(as_setting, document))
        facts = self.checkpoint(document, for_vllm=True)
        deployment = VllmDeployment(
            settings=arguments.settings,
            unknown=frozenset(arguments.unknown),
            vllm=version,
            triton=flattened(self.triton),
            environment={} if self.script is None else self.script.known_values,
            **self.known.facts,
        )
        self.check_on_vllm(deployment, document.place, facts)
        self.num_ranks = _num_ranks(document, arguments.settings, "data_parallel_size")

    def find_other_record(self, wanted: str, of_wanted: str | None, other: str, of_other: str | None) -> bool:
        """Report a record of the other library, where there is none of the wanted one, and tell whether it is so."""
        if of_wanted is not None or of_other is None:
            return False
        message = f"expected the record of a version of {wanted}, which the engine is, found that of {other} {of_other}"
        fix = f"build the repository again for {wanted}, or correct triton_config.engine"
        self.findings.append(codes.OTHER_RECORD.finding(message, fix, file=f"{self.in_version}{RELEASE_RECORD}"))
        return True

    def find_model(self, document: Document) -> None:
        """Report arguments that name no model."""
        if not document.values.get("model"):
            fix, line = "write model: with the checkpoint's folder or name", document.line("model") or 1
            self.findings.append(
                codes.MODEL_MISSING.finding("no model is named", fix, file=self.file, line=line, key="model")
            )

    def find_folder(self, document: Document, key: str, model_root: Path | None) -> Path | None:
        """Return the folder that is given under `key`, and report one that is not on this machine."""
        folder = find_checkpoint_folder(str(document.values[key]), self.version_dir, model_root)
        if folder is None:
            self.findings.append(absent_checkpoint(document, key, self.version_dir, self.options, self.engine))
        return folder

    def checkpoint(self, document: Document, *, for_vllm: bool = False) -> CheckpointFacts | None:
        """Find out what the model is, and return what the checkpoint's files say; None when it is not on this
        machine."""
        model, facts, tokenizer, named = self.named_model, None, None, document.values.get("tokenizer")
        if model:
            folder = tokenizer = self.find_folder(document, "model", self.options.model_root)
            if isinstance(named, str):  # a Hugging Face name is judged by rule E008
                tokenizer = self.find_folder(document, "tokenizer", None) if is_path(named) else None
            facts = self.read_checkpoint(folder, tokenizer, for_vllm=for_vllm)
        self.identify(model, facts, self.file, document.line("model"))
        if facts is None and tokenizer is not None and self.known.architecture is not None:
            known = {"vocab_size": self.known.architecture.vocab_size}
            self.findings += tokenizer_problems(tokenizer, safe_name(str(named)), known)
        return facts


def _num_ranks(document: Document, settings: Mapping[str, Any], *others: str) -> int | None:
    """Return tensor x pipeline parallelism, times `others`; None when one of them has a wrong value."""
    keys = ("tensor_parallel_size", "pipeline_parallel_size", *others)
    if any(key in document.values and key not in settings for key in keys):
        return None
    return math.prod(int(settings.get(key, 1)) for key in keys)


class _VllmBackendModel(_Model):
    """The check of a model of Triton's own vLLM backend: its model.json, its config.pbtxt and its checkpoint."""

    engine, is_ours, recorded = _VLLM, False, Recorded()
    triton: Mapping[str, Any] = {}

    @property
    def file(self) -> str:
        return f"{self.in_version}{MODEL_JSON}"

    @cached_property
    def document(self) -> Document | None:
        return self.keep(read_json_document(self.version_dir / MODEL_JSON, self.file))

    def check(self) -> ModelCheck:
        self.check_vllm()
        config = self.keep(read_config(self.folder / CONFIG, f"{self.label}{CONFIG}"))
        if config is not None:
            self.findings += check_name(config, self.folder)
            self.findings += check_versions(config, self.folder)
            self.findings += _vllm_backend_problems(config, is_alone=self.num_ranks == 1)
            self.findings += check_vllm_gpus(config, num_ranks=self.num_ranks, num_gpus=self.known.num_gpus)
        model = None if self.document is None else str(self.document.values.get("model") or "")
        return self.done(self.file, model, "vllm_backend", _VLLM)


def _vllm_backend_problems(config: ModelConfig, *, is_alone: bool) -> Iterator[Finding]:
    """Find what Triton's vLLM backend refuses.

    :param is_alone: whether an instance has one rank, which may be of KIND_GPU.
    """
    message = config.message
    if message.backend != _VLLM:
        text = f"expected backend {_VLLM}, which reads {MODEL_JSON}, found {short_repr(message.backend or None)}"
        yield config.finding(codes.WRONG_VLLM_BACKEND, text, f'write backend: "{_VLLM}"', at="backend")
    if message.HasField("model_transaction_policy") and not message.model_transaction_policy.decoupled:
        text = "expected decoupled: true, found false"
        fix = "write model_transaction_policy { decoupled: true }, or leave it out"
        yield config.finding(codes.WRONG_VLLM_BACKEND, text, fix, at="decoupled")
    if message.max_batch_size:
        text = f"expected max_batch_size 0, because vLLM makes the batches, found {message.max_batch_size}"
        yield config.finding(codes.WRONG_VLLM_BACKEND, text, "write max_batch_size: 0", at="max_batch_size")
    for finding in check_kinds(config, _KIND):
        if _OF_ONE_GPU not in finding.message:
            yield finding
        elif not is_alone:
            text = f"the backend refuses {_OF_ONE_GPU} for more than one rank (tensor x pipeline parallelism)"
            yield config.finding(codes.WRONG_VLLM_BACKEND, text, f"write kind: {_KIND}", at="kind")
