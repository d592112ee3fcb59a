"""Rules that are data: those of data/plain_rules.yaml, which only compare values, and the engines' published faults,
entries of data/known_issues.yaml, all with the code B001."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from deepseek_triton_build.data.finding import Code, Severity
from deepseek_triton_build.data.own_files import entry_of, load_yaml
from deepseek_triton_build.rules.rule import Deployment, Rule, UnknownFactError, Violation, VllmDeployment

_LIBRARIES = {"tensorrt_llm": "TensorRT-LLM", "vllm": "vLLM"}


@dataclass(frozen=True, kw_only=True)
class KnownIssue:
    """An entry of the table."""

    seen: Sequence[str]
    """The releases that the source names."""
    when: Mapping[str, Any]
    """Setting, or path of an attribute -> its value; a list of values; `>=N`; `<N`; `set`, for any but null."""
    fault: str
    do: str
    source: str
    since: str = "0"
    """The first release that can have it."""
    until: str = "999"
    """The first release for which it is not told."""


@dataclass(frozen=True, kw_only=True)
class PlainRule:
    """An entry of data/plain_rules.yaml."""

    severity: Severity
    when: Mapping[str, Any]
    message: str
    fix: str
    key: str | None = None
    target_only: bool = False


def plain_rules(engine: str) -> Iterator[Rule]:
    for code, row in load_yaml("plain_rules.yaml")[engine].items():
        plain = entry_of(f"plain_rules.yaml: {code}", PlainRule, row)
        find = partial(_plain_violations, plain)
        yield Rule(code=code, severity=plain.severity, find_violations=find, target_only=plain.target_only)


def _plain_violations(rule: PlainRule, d: Deployment | VllmDeployment) -> Iterator[Violation]:
    if hold(d, rule.when):
        yield Violation(rule.key, rule.message.format(d=d), rule.fix)


@cache
def known_issues() -> dict[str, dict[str, KnownIssue]]:
    """Return engine -> id -> fault."""
    return {
        engine: {name: entry_of(f"known_issues.yaml: {name}", KnownIssue, row) for name, row in rows.items()}
        for engine, rows in load_yaml("known_issues.yaml").items()
    }


def issues_of(d: Deployment | VllmDeployment) -> Iterator[tuple[Code, Violation]]:
    """Yield what is published about such a deployment: a warning where the source names the release; a note where it
    names others, so that nothing is known for this one."""
    engine, record = ("vllm", d.vllm) if isinstance(d, VllmDeployment) else ("tensorrt_llm", d.release)
    for name, issue in known_issues()[engine].items():
        if record is None or record.is_before(issue.since) or not record.is_before(issue.until):
            continue
        with suppress(UnknownFactError):
            if hold(d, issue.when):
                is_published = record.version in issue.seen
                seen = f"seen in {', '.join(issue.seen)}"
                known = f"published for {record.version}" if is_published else f"{seen}; not known for {record.version}"
                severity: Severity = "warning" if is_published else "note"
                key = next((key for path in issue.when for key in d.settings if _lies_in(key, path)), None)
                message = f"{name}: {issue.fault} ({known}; {issue.source})"
                yield Code("B001", severity, name, issue.source), Violation(key, message, issue.do)


def issues_table() -> str:
    """Return all of them as a table in Markdown."""
    rows = ["| fault | seen in | where | what happens | what to do | source |", "| --- | --- | --- | --- | --- | --- |"]
    for engine, issues in known_issues().items():
        for name, issue in issues.items():
            seen = f"{_LIBRARIES[engine]} {', '.join(issue.seen)}"
            until = "" if issue.until == "999" else f"; told before {issue.until}"
            conditions = (f"{path}: {json.dumps(wanted)}".replace('"', "") for path, wanted in issue.when.items())
            where = "<br>".join(f"`{condition}`" for condition in conditions)
            rows.append(f"| {name} | {seen}{until} | {where} | {issue.fault} | {issue.do} | {issue.source} |")
    return "\n".join(rows)


def hold(d: Deployment | VllmDeployment, conditions: Mapping[str, Any]) -> bool:
    """Tell whether all conditions, as KnownIssue.when has them, hold.

    :raises UnknownFactError: when a setting may be given elsewhere.
    """
    return all(_fits(d, name, wanted) for name, wanted in conditions.items())


def _lies_in(key: str, path: str) -> bool:
    return key == path or key.startswith(f"{path}.")


def _fits(d: Deployment | VllmDeployment, path: str, wanted: Any) -> bool:
    if wanted == "set":
        return any(_lies_in(key, path) and value is not None for key, value in d.settings.items())
    value: Any = d
    first, _, variable = path.partition(".")
    if first == "environment":
        value = d.environment.get(variable)
    elif hasattr(d, first):
        for name in path.split("."):
            value = getattr(value, name, None)  # of an unknown GPU nothing is known
    else:
        value = d.get(path)
    if isinstance(wanted, str) and wanted.startswith(">="):
        return isinstance(value, int | float) and value >= float(wanted[2:])
    if isinstance(wanted, str) and wanted.startswith("<"):
        return isinstance(value, int | float) and value < float(wanted[1:])
    return value in wanted if isinstance(wanted, list) else bool(value == wanted)
