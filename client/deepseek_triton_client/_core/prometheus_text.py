"""Prometheus's text format, as Triton's metrics port writes it.

https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from deepseek_triton_client._core.exceptions import ProtocolError


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the metrics: a number with its name and labels."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Metrics:
    """A server's metrics at one moment."""

    samples: tuple[Sample, ...]
    text: str = field(repr=False)
    """The text that the server sent."""

    @classmethod
    def parse(cls, text: str) -> Metrics:
        """Parse the text. Raises ProtocolError, quoting the first line that is not in this format."""
        lines = ((number, line.strip()) for number, line in enumerate(text.split("\n"), start=1))
        return cls(tuple(_sample(number, line) for number, line in lines if line and not line.startswith("#")), text)

    def value(self, name: str, /, **labels: str) -> float:
        """Return the sum of all samples with this name, and these labels among theirs. Raises KeyError for none."""
        found = [
            sample.value for sample in self.samples if sample.name == name and labels.items() <= sample.labels.items()
        ]
        if not found:
            raise KeyError(self._missing(name, labels))
        return sum(found)

    def _missing(self, name: str, labels: Mapping[str, str]) -> str:
        known = {sample.name for sample in self.samples}
        if name in known:
            return f"no sample of {name} has {labels}"
        near = difflib.get_close_matches(name, known)
        return f"no metric {name}" + (f"; near: {', '.join(near)}" if near else "")


_LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"'
_LABELS = re.compile(_LABEL)
_SAMPLE = re.compile(
    rf"""([a-zA-Z_:][a-zA-Z0-9_:]*)                        # name
         (?:\s*\{{\s*((?:{_LABEL}\s*(?:,\s*|(?=\}})))*)\}})?    # labels; a comma may follow the last one
         \s*(?<=[\s}}])(\S+)                               # value
         (?:\s+-?\d+)?                                     # time of the sample, in milliseconds
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(.)")


def _sample(number: int, line: str) -> Sample:
    match = _SAMPLE.fullmatch(line)
    if match is None:
        raise ProtocolError(f"expected metrics in Prometheus's text format, got in line {number}: {line[:200]!r}")
    name, labels, value = match[1], match[2] or "", match[5]
    try:
        return Sample(name, {label: _unescaped(text) for label, text in _LABELS.findall(labels)}, float(value))
    except ValueError as exc:
        raise ProtocolError(f"expected a number in line {number} of the metrics, got {value[:200]!r}") from exc


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], text)
