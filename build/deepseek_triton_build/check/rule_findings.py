"""Apply the rules to the deployment that a file's LLM arguments describe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deepseek_triton_build.check.documents import Document
from deepseek_triton_build.check.finding import CheckCode, Finding, make_finding
from deepseek_triton_build.check.model_identity import Identity
from deepseek_triton_build.check.schema import CheckedArguments
from deepseek_triton_build.data.releases import Release, spelling
from deepseek_triton_build.rules import violations
from deepseek_triton_build.rules.rule import Deployment, Rule, Violation


def make_deployment(
    arguments: CheckedArguments,
    release: Release,
    known: Identity,
    triton: Mapping[str, Any],
    environment: Mapping[str, str],
) -> Deployment:
    """Return the deployment that the rules look at. A key in a wrong place counts as if it were in the right one."""
    return Deployment(
        settings=arguments.meant | spelling.canonical(arguments.settings, release.version),
        release=release,
        variant=known.variant,
        architecture=known.architecture,
        checkpoint=known.checkpoint,
        gpu=known.gpu,
        triton=spelling.flattened(triton),
        environment=environment,
    )


def check_deployment(
    document: Document,
    deployment: Deployment,
    arguments: CheckedArguments,
    others: Sequence[tuple[CheckCode, Violation]],
) -> Iterator[Finding]:
    """Report the rules that `deployment` breaks, and `others`, on the lines of `document` that they are about."""
    assert deployment.release is not None  # make_deployment always sets it
    version, settings = deployment.release.version, arguments.settings
    spelled = {ours: key for key in settings for ours in spelling.canonical({key: settings[key]}, version)}
    spelled = arguments.places | spelled
    broken: list[tuple[Rule | CheckCode, Violation]] = [*violations(deployment), *others]
    for rule, violation in broken:
        key = spelled.get(violation.key or "", violation.key)
        line = document.line(key) if key else None
        message, fix = violation.message, violation.fix
        yield make_finding(rule.code, rule.severity, message, fix, file=document.file, line=line, key=key)
