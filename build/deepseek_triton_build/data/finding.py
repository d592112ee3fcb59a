"""A finding, and the code it carries."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, TypeVar

from deepseek_triton_build.data.own_files import load_yaml
from deepseek_triton_build.text import printable_line

Severity = Literal["error", "warning", "note"]


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
    issue: str | None = None
    """Which fault of data/known_issues.yaml it is; None for a rule."""


@dataclass(frozen=True)
class Code:
    """A code that findings carry. Its words are in data/rules.yaml, which most runs need not read."""

    code: str
    severity: Severity
    issue: str | None = None
    """The name of the entry in data/known_issues.yaml; None for a rule."""
    published_in: str = ""
    """The entry's source."""

    @property
    def title(self) -> str:
        """A sentence that is true when nothing is wrong."""
        return _words(self.code)["title"]

    @property
    def why(self) -> str:
        """The consequence when it is not true."""
        return _words(self.code)["why"]

    @property
    def source(self) -> str:
        return self.published_in or _words(self.code)["source"]

    @property
    def releases(self) -> str:
        """The releases that it holds for, in words."""
        return _words(self.code).get("releases", "all")

    def finding(self, message: str, fix: str, *, file: str, line: int | None = None, key: str | None = None) -> Finding:
        """Return a finding whose texts are one line and safe to print, whatever they quote from the files."""
        return Finding(
            code=self.code,
            severity=self.severity,
            message=printable_line(message),
            fix=printable_line(fix),
            file=file,
            line=line or None,
            key=key,
            issue=self.issue,
        )


def _words(code: str) -> Mapping[str, str]:
    words: Mapping[str, Mapping[str, str]] = _all_words()
    if not {"title", "why", "source"} <= words.get(code, {}).keys():
        raise LookupError(f"{code} lacks words: give it title, why and source in data/rules.yaml")
    return words[code]


_all_words = cache(partial(load_yaml, "rules.yaml"))


_FOLLOWS: Mapping[str, frozenset[str]] = {
    "K008": frozenset({"H002"}),
    "K010": frozenset({"K006", "K007"}),
    "L003": frozenset({"W004", "W016"}),
    "L007": frozenset({"T017"}),
    "M002": frozenset({"H002", "W006"}),
    "P003": frozenset({"P001", "P002", "T016"}),
    "T014": frozenset({"P001", "T016"}),
    "T016": frozenset({"P001"}),
    "T017": frozenset({"X014"}),
    "W005": frozenset({"W004"}),
    "W014": frozenset({"W004", "W016"}),
}
"""Code -> those whose findings about the same model have the same cause, and tell it: the fix of one mends both."""
_Found = TypeVar("_Found")


def causes(found: Iterable[_Found], code: Callable[[_Found], str]) -> list[_Found]:
    """Return what was found about a model without what follows from the rest.

    :param code: returns the code of one.
    """
    found = list(found)
    told = {code(one) for one in found}
    return [one for one in found if not told & _FOLLOWS.get(code(one), frozenset())]
