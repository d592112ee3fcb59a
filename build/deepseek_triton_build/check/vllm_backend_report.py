"""All checks of a model of Triton's own vLLM backend: its model.json, its config.pbtxt and its checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from deepseek_triton_build.check.codes import WRONG_VLLM_BACKEND
from deepseek_triton_build.check.documents import MAX_TEXT_BYTES, read_json_document
from deepseek_triton_build.check.finding import CheckedModel, Finding
from deepseek_triton_build.check.instance_gpus import check_kinds, check_vllm_gpus
from deepseek_triton_build.check.model_identity import UNKNOWN, CheckOptions, find_vllm
from deepseek_triton_build.check.model_report import ModelCheck
from deepseek_triton_build.check.pbtxt import NAME as CONFIG
from deepseek_triton_build.check.pbtxt import ModelConfig, check_name, read_config
from deepseek_triton_build.check.regular_files import read_bytes
from deepseek_triton_build.check.rule_findings import Checked
from deepseek_triton_build.check.schema import MODEL_YAML
from deepseek_triton_build.render.stamp import RELEASE_RECORD
from deepseek_triton_build.text import short_repr

MODEL_JSON = "model.json"
_BACKEND = "vllm"
_KIND, _OF_ONE_GPU = "KIND_MODEL", "KIND_GPU"
_NAMES_MODEL = re.compile(rb'"model"\s*:')
_NAMES_VLLM = re.compile(rb"vllm")


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


def check_vllm_backend_model(folder: Path, version: str, root: Path, options: CheckOptions) -> Checked:
    """Check everything about the model in `folder`, whose model.json lies in its folder `version`."""
    label = "" if folder == root else f"{folder.name}/"
    model = _VllmBackendModel(folder=folder, version_dir=folder / version, root=root, label=label, options=options)
    return Checked(model.check(), model.findings)


class _VllmBackendModel(ModelCheck):
    @property
    def file(self) -> str:
        return f"{self.in_version}{MODEL_JSON}"

    @property
    def is_ours(self) -> bool:
        return False

    def check(self) -> CheckedModel:
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
            self.findings += _check_backend(config)
            self.findings += _check_kinds(config, is_alone=num_ranks == 1)
            self.findings += check_vllm_gpus(config, num_ranks=num_ranks, num_gpus=known.num_gpus)
        return CheckedModel(
            file=self.file,
            model=None if document is None else str(document.values.get("model") or "") or None,
            backend="vllm_backend",
            engine=_BACKEND,
            release=version.version,
            release_from=version_from,
            variant=known.variant.name if known.variant else None,
            precision=known.precision,
            gpu=known.gpu.name if known.gpu else None,
            num_gpus=known.num_gpus,
            unchecked=tuple(self.unchecked),
        )


def _check_backend(config: ModelConfig) -> Iterator[Finding]:
    message = config.message
    if message.backend != _BACKEND:
        text = f"expected backend {_BACKEND}, which reads {MODEL_JSON}, found {short_repr(message.backend or None)}"
        yield config.finding(WRONG_VLLM_BACKEND, text, f'write backend: "{_BACKEND}"', at="backend")
    if message.HasField("model_transaction_policy") and not message.model_transaction_policy.decoupled:
        text = "expected decoupled: true, found false"
        fix = "write model_transaction_policy { decoupled: true }, or leave it out"
        yield config.finding(WRONG_VLLM_BACKEND, text, fix, at="decoupled")
    if message.max_batch_size:
        text = f"expected max_batch_size 0, because vLLM makes the batches, found {message.max_batch_size}"
        yield config.finding(WRONG_VLLM_BACKEND, text, "write max_batch_size: 0", at="max_batch_size")


def _check_kinds(config: ModelConfig, *, is_alone: bool) -> Iterator[Finding]:
    """Find instances of a wrong kind.

    :param is_alone: whether an instance has one rank, which may be of KIND_GPU.
    """
    for finding in check_kinds(config, _KIND):
        if _OF_ONE_GPU not in finding.message:
            yield finding
        elif not is_alone:
            text = f"the backend refuses {_OF_ONE_GPU} for more than one rank (tensor x pipeline parallelism)"
            yield config.finding(WRONG_VLLM_BACKEND, text, f"write kind: {_KIND}", at="kind")
