"""Findings of `check`, the codes they carry, and the report that holds them.

Everywhere in this package `file` and `label` are the names by which findings call a file and a folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from deepseek_triton_build.text import printable_line

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
    """Path relative to what was checked; absolute for a file of a checkpoint elsewhere."""
    line: int | None = None
    """Number of the line, from 1."""
    key: str | None = None
    """Dotted path of the setting, as the file spells it."""


def make_finding(
    code: str, severity: Severity, message: str, fix: str, *, file: str, line: int | None = None, key: str | None = None
) -> Finding:
    """Return a finding whose texts are one line and safe to print, whatever they quote from the files."""
    message, fix = printable_line(message), printable_line(fix)
    return Finding(code=code, severity=severity, message=message, fix=fix, file=file, line=line, key=key)


@dataclass(frozen=True)
class CheckCode:
    """One kind of finding that is not about a rule."""

    severity: Severity
    code: str
    title: str
    """A sentence that is true when nothing is wrong."""
    why: str
    """The consequence when it is not true."""
    source: str
    releases: str = "all"

    def finding(self, message: str, fix: str, *, file: str, line: int | None = None, key: str | None = None) -> Finding:
        return make_finding(self.code, self.severity, message, fix, file=file, line=line, key=key)


@dataclass(frozen=True, kw_only=True)
class CheckedModel:
    """One model that was checked, as far as it is known."""

    file: str
    """Path of its model.yaml, relative to what was checked."""
    model: str | None
    """The checkpoint's folder or name, as model.yaml gives it."""
    backend: str
    """`deepseek-triton`, `upstream` (any other model.py), or `none` for a YAML file by itself."""
    engine: str
    release: str
    release_from: str
    """Where the release is known from, for people."""
    variant: str | None
    precision: str | None
    gpu: str | None
    num_gpus: int | None
    """GPUs of one instance."""
    unchecked: tuple[str, ...] = ()
    """What could not be checked, and how it can be, a clause each."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that `check` found."""

    findings: tuple[Finding, ...]
    """All findings, sorted by file, line and code."""
    models: tuple[CheckedModel, ...]

    @property
    def unchecked(self) -> tuple[str, ...]:
        """What could not be checked of any model."""
        return tuple(dict.fromkeys(clause for model in self.models for clause in model.unchecked))

    @property
    def has_errors(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)

    def findings_json(self) -> list[dict[str, Any]]:
        """Return the findings as json.dumps takes them."""
        return [asdict(finding) for finding in self.findings]


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings sorted by file, line and code, without duplicates."""
    return tuple(sorted(set(findings), key=lambda f: (f.file, f.line or 0, f.code, f.key or "", f.message)))
