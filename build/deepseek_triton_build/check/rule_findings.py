"""The steps that every check of a model takes, and the rules applied to the deployment that its arguments describe."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from deepseek_triton_build.check.checkpoint_files import CheckpointFacts, check_checkpoint, mtp_problems
from deepseek_triton_build.check.documents import Document, read_yaml
from deepseek_triton_build.check.finding import CheckedModel
from deepseek_triton_build.check.generated_origin import Stamp, read_stamp
from deepseek_triton_build.check.gpus import vllm_memory_problems
from deepseek_triton_build.check.model_identity import CheckOptions, Identity, identify, unchecked_facts
from deepseek_triton_build.check.schema import CheckedArguments
from deepseek_triton_build.check.vllm_arguments import num_draft_tokens
from deepseek_triton_build.data import spelling
from deepseek_triton_build.data.releases import Release
from deepseek_triton_build.data.vllm import VllmVersion
from deepseek_triton_build.rules import violations, vllm_violations
from deepseek_triton_build.rules.finding import Code, Finding
from deepseek_triton_build.rules.moe import BALANCER
from deepseek_triton_build.rules.rule import Deployment, Violation
from deepseek_triton_build.rules.vllm_deployment import VllmDeployment

Place = tuple[str, int | None, str]
"""File, line and name of a setting."""
_Read = TypeVar("_Read")


@dataclass(frozen=True, kw_only=True)
class PlacedDeployment:
    """The deployment that files describe, with the places of its settings."""

    deployment: Deployment
    place: Callable[[str | None], Place]
    """A function that returns where a canonical key stands, or would stand."""


class Checked(NamedTuple):
    """The result of checking one model."""

    model: CheckedModel
    findings: list[Finding]
    placed: PlacedDeployment | None = None
    """None where the model does not run on TensorRT-LLM."""


class CheckedFolder(NamedTuple):
    """Everything that was checked in one folder."""

    models: list[Checked]
    unreadable: list[Finding]
    """Findings about folders that can't be looked into."""

    @property
    def findings(self) -> list[Finding]:
        return [*self.unreadable, *(finding for one in self.models for finding in one.findings)]


@dataclass(kw_only=True)
class ModelCheck:
    """The check of one model, or of one program's arguments, which collects the findings."""

    folder: Path
    """The folder with the stamp: a model's, or that of a program's files."""
    root: Path
    """The folder that is checked. Findings name files relative to it."""
    label: str = ""
    """The beginning of file names in findings: the model's folder, or nothing when the model itself is `root`."""
    options: CheckOptions
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    placed: PlacedDeployment | None = None

    def keep(self, read: tuple[_Read, list[Finding]]) -> _Read:
        """Return what was read, and add its findings to the others."""
        value, found = read
        self.findings += found
        return value

    @cached_property
    def stamp(self) -> Stamp:
        return self.keep(read_stamp(self.folder, self.label))

    def read_checkpoint(
        self, folder: Path | None, tokenizer: Path | None, *, for_vllm: bool = False
    ) -> CheckpointFacts | None:
        """Return what the files of a checkpoint say; None when it is not on this machine.

        :param tokenizer: the folder of the tokenizer; None when it is not to be looked at.
        """
        if folder is None:
            return None
        label = folder.resolve().as_posix().removeprefix(f"{self.root.resolve().as_posix()}/")
        return self.keep(check_checkpoint(folder, label, tokenizer, for_vllm=for_vllm))

    def identify(self, model: str, facts: CheckpointFacts | None, file: str, line: int | None) -> Identity:
        """Return what the model is, which `file` names in its `line`."""
        return self.keep(identify(self.options, self.stamp, model, facts, file, line))

    def check_deployment(
        self,
        deployment: Deployment,
        misfits: Sequence[tuple[Code, Violation]],
        place: Callable[[str | None], Place],
        facts: CheckpointFacts | None,
    ) -> None:
        """Report the rules that `deployment` breaks, and its `misfits`, where the settings they are about stand."""
        self.placed = PlacedDeployment(deployment=deployment, place=place)
        self.findings += _report([*violations(deployment), *misfits], place)
        if facts is not None:
            self.findings += mtp_problems(facts, deployment.num_draft_tokens)

    def check_on_vllm(
        self, deployment: VllmDeployment, place: Callable[[str | None], Place], facts: CheckpointFacts | None
    ) -> None:
        """Report the rules of vLLM that engine arguments break, and what does not fit the GPUs' memory."""
        self.findings += _report([*vllm_violations(deployment), *vllm_memory_problems(deployment)], place)
        if facts is not None:
            self.findings += mtp_problems(facts, num_draft_tokens(deployment.settings))

    def note_unchecked(self, known: Identity, facts: CheckpointFacts | None) -> None:
        """Note what can't be checked because a fact about the model is not known."""
        self.unchecked += unchecked_facts(known, has_checkpoint=facts is not None)

    def checked(
        self, file: str, model: str | None, backend: str, engine: str, version: str, version_from: str, known: Identity
    ) -> Checked:
        """Return the whole result.

        :param file: the one that names the model.
        :param version: of the engine, which is known from `version_from`.
        """
        result = CheckedModel(
            file=file,
            model=model or None,
            backend=backend,
            engine=engine,
            release=version,
            release_from=version_from,
            variant=known.variant.name if known.variant else None,
            precision=known.precision,
            gpu=known.gpu.name if known.gpu else None,
            num_gpus=known.num_gpus,
            unchecked=tuple(self.unchecked),
        )
        return Checked(result, self.findings, self.placed)


def canonical_settings(arguments: CheckedArguments, release: Release) -> dict[str, Any]:
    """Return the arguments under canonical keys. A key in a wrong place counts as if it were in the right one."""
    return arguments.meant | spelling.canonical(arguments.settings, release.version)


def with_balancer_file(settings: dict[str, Any], folder: Path, label: str) -> tuple[dict[str, Any], list[Finding]]:
    """Return the settings with those in the load balancer's file, if it is named by its path and is on this machine.

    :param settings: the LLM arguments under canonical keys.
    :param folder: the folder from which a relative path counts.
    :param label: the beginning of file names in findings.
    """
    name = settings.get(BALANCER)
    if not isinstance(name, str) or not os.path.isfile(folder / name):
        return settings, []
    document, findings = read_yaml(folder / name, f"{label}{name}")
    given = {} if document is None else document.values
    return settings | {f"{BALANCER}.{key}": value for key, value in given.items() if isinstance(key, str)}, findings


def make_deployment(
    settings: Mapping[str, Any],
    release: Release,
    known: Identity,
    triton: Mapping[str, Any],
    environment: Mapping[str, str],
    unknown: frozenset[str] = frozenset(),
) -> Deployment:
    """Return the deployment that the rules look at.

    :param settings: the LLM arguments under canonical keys.
    :param unknown: canonical keys that may be given elsewhere.
    """
    return Deployment(
        settings=settings,
        unknown=unknown,
        release=release,
        variant=known.variant,
        architecture=known.architecture,
        checkpoint=known.checkpoint,
        gpu=known.gpu,
        triton=spelling.flattened(triton),
        environment=environment,
    )


def make_vllm_deployment(
    settings: Mapping[str, Any],
    version: VllmVersion,
    known: Identity,
    triton: Mapping[str, Any],
    unknown: Iterable[str],
) -> VllmDeployment:
    """Return the deployment that the rules of vLLM look at.

    :param settings: the arguments as dotted paths.
    :param triton: the content of triton_config.
    :param unknown: arguments that may be given elsewhere.
    """
    return VllmDeployment(
        settings=settings,
        unknown=frozenset(unknown),
        vllm=version,
        variant=known.variant,
        architecture=known.architecture,
        checkpoint=known.checkpoint,
        gpu=known.gpu,
        triton=spelling.flattened(triton),
    )


def _report(broken: Sequence[tuple[Code, Violation]], place: Callable[[str | None], Place]) -> Iterator[Finding]:
    for rule, violation in broken:
        file, line, name = place(violation.key)
        key = name or None if violation.key else None
        yield rule.finding(violation.message, violation.fix, file=file, line=line, key=key)


def place_in(document: Document, arguments: CheckedArguments, release: Release) -> Callable[[str | None], Place]:
    """Return the function that finds the place of a canonical key in `document`."""
    settings, version = arguments.settings, release.version
    spelled = {ours: key for key in settings for ours in spelling.canonical({key: settings[key]}, version)}
    spelled = arguments.places | spelled

    def place(key: str | None) -> Place:
        name = spelled.get(key or "", key or "")
        return document.file, document.line(name) if name else None, name

    return place
