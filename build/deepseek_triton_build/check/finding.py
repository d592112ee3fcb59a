"""The codes of findings that no rule makes, the report of a check, and the meaning of each code.

Everywhere in this package `file` and `label` are the names by which findings call a file and a folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from deepseek_triton_build.build_errors import UnknownNameError
from deepseek_triton_build.check.codes import CHECKS
from deepseek_triton_build.rules import PAIR_RULES, RULES, VLLM_RULES
from deepseek_triton_build.rules.finding import Code, Finding


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


_INTRODUCTION = """\
# Rules

This page lists what `deepseek-triton build` refuses or warns about, and what `deepseek-triton check` finds. `check
--explain CODE` prints one of them.

An **error** is something that can't work, or that is known to crash, to hang or to be refused by the engine. If there
is an error, nothing is built, and `check` ends with exit code 1. A **warning** is something that is known to go wrong
in some circumstances, or that has no effect. A **note** is worth knowing. A rule is skipped when it needs a fact that
is not known (the GPU, the release, the checkpoint). A key that the release is known not to have is an error, or a
warning where the release ignores it. A key that this project has no record of is a warning.

Each title says what must be true. Issues and pull requests are those of
[NVIDIA/TensorRT-LLM](https://github.com/NVIDIA/TensorRT-LLM). "Releases" names the TensorRT-LLM releases (vLLM
versions, of the rules X) that the rule applies to, as far as the sources say: "before 1.1" says that 1.1 has the fix
or the feature, not that every older release was tried.
"""

# First letter of a code -> the title of its section, in the page's order.
_TOPICS = {
    "H": "Hardware, weights and releases",
    "P": "Parallelism",
    "A": "Attention and prefill",
    "M": "Mixture of experts",
    "K": "KV cache",
    "D": "Speculative decoding and sampling",
    "L": "Limits and sizes",
    "G": "Context and generation servers",
    "V": "V3.2",
    "X": "vLLM",
    "E": "Environment and engine",
    "S": "Files, keys and values",
    "T": "triton_config, instances and GPUs",
    "C": "config.pbtxt",
    "W": "The checkpoint",
}


def find_code(code: str) -> Code:
    """Return the rule or finding of that code in any case, or raise UnknownNameError."""
    entries = {entry.code: entry for entry in _entries()}
    if code.upper() not in entries:
        raise UnknownNameError("code", code, entries)
    return entries[code.upper()]


def rules_page() -> str:
    """Return the rules and the other findings of `check` as a page for people, in Markdown."""
    parts = [_INTRODUCTION]
    for letter, title in _TOPICS.items():
        parts += [f"## {title}", ""]
        for entry in _entries():
            if entry.code[0] == letter:
                facts = f"*{entry.severity.capitalize()}; releases: {entry.releases}.*"
                heading = f'### <a id="{entry.code.lower()}"></a>{entry.code} {entry.title}'
                parts.append(f"{heading}\n\n{facts} {entry.why}\n\nSource: {entry.source}\n")
    return "\n".join(parts)


def _entries() -> list[Code]:
    return [*RULES, *PAIR_RULES, *VLLM_RULES, *CHECKS]
