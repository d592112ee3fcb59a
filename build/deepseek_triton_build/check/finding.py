"""The codes of findings that no rule makes, the report of a check, and the meaning of each code.

Everywhere in this package `file` and `label` are the names by which findings call a file and a folder.
"""

import string
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from deepseek_triton_build.build_errors import UnknownNameError
from deepseek_triton_build.check.codes import CHECKS
from deepseek_triton_build.data.finding import Code, Finding
from deepseek_triton_build.data.own_files import read_data
from deepseek_triton_build.rules import PAIR_RULES, RULES, VLLM_RULES
from deepseek_triton_build.rules.known_issues import issues_table


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
    """Clauses about what could not be checked, and how it can be."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that `check` found."""

    findings: tuple[Finding, ...]
    """All findings, sorted by file, line and code."""
    models: tuple[CheckedModel, ...]

    @property
    def unchecked(self) -> tuple[str, ...]:
        """The clauses of all models, each once."""
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


def find_code(code: str) -> Code:
    """Return the rule or finding of that code in any case, or raise UnknownNameError."""
    entries = {entry.code: entry for entry in _entries()}
    if code.upper() not in entries:
        raise UnknownNameError("code", code, entries)
    return entries[code.upper()]


def rules_page() -> str:
    """Return the rules and the other findings of `check` as a page for people, in Markdown."""
    by_letter: dict[str, str] = {}
    for entry in _entries():
        facts = f"*{entry.severity.capitalize()}; releases: {entry.releases}.*"
        heading = f'### <a id="{entry.code.lower()}"></a>{entry.code} {entry.title}'
        text = f"{heading}\n\n{facts} {entry.why}\n\nSource: {entry.source}\n"
        by_letter[entry.code[0]] = by_letter.get(entry.code[0], "") + text + "\n"
    return string.Template(read_data("rules_page.md")).substitute(by_letter, issues=issues_table())


def _entries() -> list[Code]:
    return [*RULES, *PAIR_RULES, *VLLM_RULES, *CHECKS]
