"""Apply the rules to the deployment that LLM arguments describe, wherever they are given."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from deepseek_triton_build.check.documents import Document, read_yaml
from deepseek_triton_build.check.finding import CheckCode, CheckedModel, Finding, make_finding
from deepseek_triton_build.check.memory_fit import vllm_memory_problems
from deepseek_triton_build.check.model_identity import Identity
from deepseek_triton_build.check.schema import CheckedArguments
from deepseek_triton_build.data import spelling
from deepseek_triton_build.data.releases import Release
from deepseek_triton_build.data.vllm import VllmVersion
from deepseek_triton_build.rules import violations, vllm_violations
from deepseek_triton_build.rules.moe import BALANCER
from deepseek_triton_build.rules.rule import Deployment, Rule, Violation
from deepseek_triton_build.rules.vllm_deployment import VllmDeployment

Place = tuple[str, int | None, str]
"""File, line and name of a setting."""


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


def check_deployment(
    deployment: Deployment,
    others: Sequence[tuple[CheckCode, Violation]],
    place: Callable[[str | None], Place],
) -> Iterator[Finding]:
    """Report the rules that `deployment` breaks, and `others`, where the settings that they are about stand.

    :param place: returns where a canonical key stands, or would stand; for None the file that findings go to.
    """
    yield from _report([*violations(deployment), *others], place)


def check_on_vllm(
    settings: Mapping[str, Any],
    version: VllmVersion,
    known: Identity,
    place: Callable[[str | None], Place],
    *,
    triton: Mapping[str, Any] | None = None,
    unknown: frozenset[str] = frozenset(),
) -> Iterator[Finding]:
    """Report the rules of vLLM that engine arguments break, and what does not fit the GPUs' memory.

    :param settings: the arguments as dotted paths.
    :param triton: the content of triton_config.
    :param unknown: arguments that may be given elsewhere.
    """
    deployment = VllmDeployment(
        settings=settings,
        unknown=unknown,
        vllm=version,
        variant=known.variant,
        architecture=known.architecture,
        checkpoint=known.checkpoint,
        gpu=known.gpu,
        triton=spelling.flattened(triton or {}),
    )
    yield from _report([*vllm_violations(deployment), *vllm_memory_problems(deployment)], place)


def _report(
    broken: Sequence[tuple[Rule | CheckCode, Violation]], place: Callable[[str | None], Place]
) -> Iterator[Finding]:
    for rule, violation in broken:
        file, line, name = place(violation.key)
        key = name if violation.key else None
        yield make_finding(rule.code, rule.severity, violation.message, violation.fix, file=file, line=line, key=key)


def place_in(document: Document, arguments: CheckedArguments, release: Release) -> Callable[[str | None], Place]:
    """Return the function that finds the place of a canonical key in `document`."""
    settings, version = arguments.settings, release.version
    spelled = {ours: key for key in settings for ours in spelling.canonical({key: settings[key]}, version)}
    spelled = arguments.places | spelled

    def place(key: str | None) -> Place:
        name = spelled.get(key or "", key or "")
        return document.file, document.line(name) if name else None, name

    return place
