"""What `check` says: findings, and the report that holds them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from deepseek_triton_build.text import one_line

if TYPE_CHECKING:
    from deepseek_triton_build.rules.rule import Severity


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, or worth knowing."""

    code: str
    severity: Severity
    message: str
    fix: str
    file: str
    """Relative to what was checked; a checkpoint's file elsewhere is absolute."""
    line: int | None = None
    """From 1."""
    key: str | None = None
    """Dotted path of the setting, as the file spells it."""


def make_finding(
    code: str, severity: Severity, message: str, fix: str, *, file: str, line: int | None = None, key: str | None = None
) -> Finding:
    """A finding whose words, which may quote names and values of files, fit a line and a terminal."""
    message, fix = one_line(message), one_line(fix)
    return Finding(code=code, severity=severity, message=message, fix=fix, file=file, line=line, key=key)


@dataclass(frozen=True, kw_only=True)
class CheckCode:
    """One kind of finding that is not a rule's."""

    code: str
    severity: Severity
    title: str
    """What holds when nothing is wrong, as a sentence."""
    why: str
    """What happens otherwise."""
    source: str
    releases: str = "all"

    def finding(self, message: str, fix: str, *, file: str, line: int | None = None, key: str | None = None) -> Finding:
        return make_finding(self.code, self.severity, message, fix, file=file, line=line, key=key)


@dataclass(frozen=True, kw_only=True)
class CheckedModel:
    """What was checked, as far as it is known."""

    file: str
    """Its model.yaml, relative to what was checked."""
    model: str | None
    """The checkpoint's folder or name, as model.yaml gives it."""
    backend: str
    """deepseek-triton, or upstream (any other model.py); for a file by itself, none."""
    engine: str
    release: str
    release_from: str
    """How the release was known, for people."""
    variant: str | None
    precision: str | None
    gpu: str | None
    num_gpus: int | None
    """Of one instance."""


@dataclass(frozen=True, kw_only=True)
class Report:
    findings: tuple[Finding, ...]
    """By file, line and code."""
    models: tuple[CheckedModel, ...]

    @property
    def has_errors(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)

    def findings_json(self) -> list[dict[str, Any]]:
        """The findings as json.dumps takes them."""
        return [asdict(finding) for finding in self.findings]


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """By file, line and code; what was found twice, once."""
    return tuple(sorted(set(findings), key=lambda f: (f.file, f.line or 0, f.code, f.key or "", f.message)))
