"""The rules and the findings of `check` as a page for people: docs/rules.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from deepseek_triton_build.check.codes import CHECKS
from deepseek_triton_build.rules import RULES

_INTRODUCTION = """\
# Rules

What `deepseek-triton build` refuses or warns of, and what `deepseek-triton check` finds. Written from
`build/deepseek_triton_build/rules/` and `build/deepseek_triton_build/check/` by `make generated`; edit those.

An **error** can't work, or is known to crash, hang or be refused by the engine: nothing is built, and `check` ends with
exit code 1. A **warning** is known to go wrong in some circumstances, or has no effect. A **note** is worth knowing.
A rule that needs a fact nobody stated (the GPU, the release, the checkpoint) is passed over. A key that the
release is known not to have is an error, or a warning where the release ignores it; one that is only not recorded here
is a warning.

Issues and pull requests are of [NVIDIA/TensorRT-LLM](https://github.com/NVIDIA/TensorRT-LLM). A release range is what
the sources support: "before 1.1" says that 1.1 has the fix or the feature, not that every older release was tried.
"""

_TOPICS = {
    "H": "Hardware, weights and releases",
    "P": "Parallelism",
    "A": "Attention and prefill",
    "M": "Mixture of experts",
    "K": "KV cache",
    "D": "Speculative decoding and sampling",
    "L": "Limits and sizes",
    "V": "V3.2",
    "E": "Environment and engine",
    "S": "Files, keys and values",
    "T": "triton_config, instances and GPUs",
    "C": "config.pbtxt",
    "W": "The checkpoint",
}
"""First letter of a code -> its section, in the page's order."""


class _Entry(Protocol):
    """What a rule and a check of `check` have in common."""

    @property
    def code(self) -> str: ...
    @property
    def severity(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def why(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def releases(self) -> str: ...


def rules_page() -> str:
    """The page, in Markdown."""
    entries: list[_Entry] = [*RULES, *CHECKS]
    sections = [
        _section(title, (entry for entry in entries if entry.code[0] == letter)) for letter, title in _TOPICS.items()
    ]
    return "\n".join([_INTRODUCTION, *sections])


def _section(title: str, entries: Iterable[_Entry]) -> str:
    return "\n".join([f"## {title}", "", *map(_entry, entries)])


def _entry(entry: _Entry) -> str:
    """One rule, under an anchor of its own: rules.md#h001."""
    facts = f"*{entry.severity.capitalize()}; releases: {entry.releases}.*"
    source = f"\nSource: {entry.source}\n" if entry.source else ""
    return f'### <a id="{entry.code.lower()}"></a>{entry.code} {entry.title}\n\n{facts} {entry.why}\n{source}'
