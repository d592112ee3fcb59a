"""The lines of model.yaml and the environment variables that a plan writes, each with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Names of the documents and files of TensorRT-LLM that most reasons and rules rest on.
GUIDE = "TensorRT-LLM examples/models/core/deepseek_v3/README.md"
DEPLOYMENT = "TensorRT-LLM deployment guide for DeepSeek-R1"
LLM_ARGS = "TensorRT-LLM tensorrt_llm/llmapi/llm_args.py"
PY_EXECUTOR_CREATOR = "TensorRT-LLM tensorrt_llm/_torch/pyexecutor/py_executor_creator.py"


class _Explained:
    """A choice of a plan, which has a reason and its source."""

    reason: str
    source: str

    @property
    def comment(self) -> str:
        """The reason with its source, as generated files have it."""
        return self.comment_with({})

    def comment_with(self, footnotes: Mapping[str, int]) -> str:
        """The reason with its source, or with the number of the footnote that has it."""
        if not self.source:
            return self.reason
        note = footnotes.get(self.source)
        return f"{self.reason} ({self.source})" if note is None else f"{self.reason} [{note}]"


def footnotes(lines: Iterable[_Explained]) -> dict[str, int]:
    """Number the sources that several reasons rest on, in the order of first use."""
    uses = Counter(source for _, source in dict.fromkeys((line.reason, line.source) for line in lines) if source)
    return {source: number for number, source in enumerate((source for source in uses if uses[source] > 1), 1)}


@dataclass(frozen=True)
class Setting(_Explained):
    """One line of model.yaml."""

    key: str
    """Dotted path, such as `kv_cache_config.dtype`."""
    value: Any
    reason: str
    source: str = ""
    """The document that the reason rests on; empty for arithmetic and for the user's own choice."""


@dataclass(frozen=True)
class EnvironmentVariable(_Explained):
    """One environment variable that the server is started with."""

    name: str
    value: str
    reason: str
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class SettingsFile:
    """A YAML file that a setting names by its path, for a section that the release reads from a file."""

    name: str
    section: str
    """The section, under its canonical key."""
    settings: tuple[Setting, ...]
    """The section's settings, under canonical keys."""


@dataclass(frozen=True, kw_only=True)
class Omission:
    """A recipe's setting, or a default, that the plan leaves out, and why."""

    key: str
    value: Any
    reason: str
