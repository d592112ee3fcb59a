"""docs/rules.md: the rules, and the other findings of `check`, as a page for people."""

from __future__ import annotations

from deepseek_triton_build.check.codes import CHECKS
from deepseek_triton_build.check.finding import CheckCode
from deepseek_triton_build.rules import PAIR_RULES, RULES, VLLM_RULES
from deepseek_triton_build.rules.rule import Rule

_INTRODUCTION = """\
# Rules

This page lists what `deepseek-triton build` refuses or warns about, and what `deepseek-triton check` finds. `make
generated` writes it from `build/deepseek_triton_build/rules/` and `build/deepseek_triton_build/check/`. To change it,
edit those files.

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
"""First letter of a code -> the title of its section, in the page's order."""


def rules_page() -> str:
    """Return the page, in Markdown."""
    entries: list[Rule | CheckCode] = [*RULES, *PAIR_RULES, *VLLM_RULES, *CHECKS]
    parts = [_INTRODUCTION]
    for letter, title in _TOPICS.items():
        parts += [f"## {title}", ""]
        for entry in entries:
            if entry.code[0] == letter:
                facts = f"*{entry.severity.capitalize()}; releases: {entry.releases}.*"
                source = f"\nSource: {entry.source}\n" if entry.source else ""
                # The anchor, such as rules.md#h001, is what messages and other pages name.
                heading = f'### <a id="{entry.code.lower()}"></a>{entry.code} {entry.title}'
                parts.append(f"{heading}\n\n{facts} {entry.why}\n{source}")
    return "\n".join(parts)
