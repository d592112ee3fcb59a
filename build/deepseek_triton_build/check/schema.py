"""LLM arguments against the record of the release they are for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepseek_triton_build.check.codes import (
    IGNORED_KEY,
    MOVED_KEY,
    NOT_A_SECTION,
    NOT_LOOKED_INTO,
    OUT_OF_RANGE,
    UNKNOWN_KEY,
    WRONG_CHOICE,
    WRONG_KEY,
    WRONG_NULL,
    WRONG_TYPE,
)
from deepseek_triton_build.check.documents import Document
from deepseek_triton_build.check.finding import CheckCode, Finding
from deepseek_triton_build.data import type_strings
from deepseek_triton_build.data.releases import (
    READABLE_RELEASES,
    RELEASES,
    Field,
    LlmClass,
    Release,
    load_release,
    spelling,
)
from deepseek_triton_build.data.setting_types import bounded_type
from deepseek_triton_build.text import nearest, plain, shown, to_write

UPSTREAM_KEYS = ("logits_post_processors",)
"""Top-level keys that upstream's model.py takes for itself (NVIDIA/TensorRT-LLM llmapi model.yaml)."""
TRITON_SECTION = "triton_config"
_IGNORE_IN_SECTIONS = ("0.21.0",)
"""Releases whose sections are pydantic models that pass over what they don't know (releases/0.21.0.yaml)."""


@dataclass(kw_only=True)
class CheckedArguments:
    """The LLM arguments of a file, as dotted paths."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Those that the release knows and that have its types."""
    meant: dict[str, Any] = field(default_factory=dict)
    """Under 1.2.1's keys, what stands under the keys of other releases."""
    places: dict[str, str] = field(default_factory=dict)
    """Key of `meant` -> where it stands."""
    findings: list[Finding] = field(default_factory=list)
    """About all but `settings`."""


def check_schema(document: Document, release: Release, *, other_sections: tuple[str, ...] = ()) -> CheckedArguments:
    """
    :param other_sections: top-level keys that are not the engine's.
    """
    walk = _Walk(document, release, other_sections)
    walk.section(document.values, [release.classes["TorchLlmArgs"]], "")
    return walk.found


@dataclass
class _Walk:
    document: Document
    release: Release
    other_sections: tuple[str, ...]
    found: CheckedArguments = field(default_factory=CheckedArguments)

    def section(self, values: Mapping[Any, Any], classes: list[LlmClass], prefix: str) -> None:
        for key, value in values.items():
            name = plain(key) if isinstance(key, str) else shown(key)
            if not prefix and name in self.other_sections:
                continue
            found = next((cls.fields[name] for cls in classes if name in cls.fields), None)
            if found is None:
                self.absent(prefix + name, name, value, classes)
            else:
                self.value(prefix + name, value, found)

    def value(self, key: str, value: Any, found: Field) -> None:
        if found.sections and isinstance(value, dict):
            self.subsection(key, value, found)
        elif not type_strings.fits(value, found.type):
            self.misfit(key, value, found)
        elif not type_strings.fits(value, bounds := bounded_type(key, found.type)):
            self.add(OUT_OF_RANGE, key, _expected(bounds, value), f"write {type_strings.in_words(bounds)}")
        else:
            self.found.settings[key] = value

    def subsection(self, key: str, value: Mapping[Any, Any], found: Field) -> None:
        classes = {name: self.release.classes[name] for name in found.sections}
        if found.discriminator is None:
            if not value:
                self.found.settings[key] = {}
            self.section(value, list(classes.values()), f"{key}.")
            return
        kinds = _kinds(self.release, found.name)
        chosen, chooser = value.get(found.discriminator), f"{key}.{found.discriminator}"
        if not isinstance(chosen, str):
            expected = f"expected {found.discriminator}, which says what kind it is, found {shown(chosen)}"
            self.add(WRONG_CHOICE, chooser, expected, to_write({chooser: next(iter(kinds))}))
            return
        self.found.settings[chooser] = chosen
        if chosen not in kinds:
            self.unrecorded_kind(chooser, chosen, kinds)
            return
        below = {name: entry for name, entry in value.items() if name != found.discriminator}
        self.section(below, [classes[kinds[chosen]]], f"{key}.")

    def unrecorded_kind(self, chooser: str, chosen: str, kinds: Mapping[str, str]) -> None:
        near = nearest(chosen, kinds)
        hint = f"did you mean {near}?" if near else f"none is needed if it is meant; recorded: {', '.join(kinds)}"
        self.add(NOT_LOOKED_INTO, chooser, f"{shown(chosen)} is not recorded here; its keys go unchecked", hint)

    def absent(self, key: str, name: str, value: Any, classes: list[LlmClass]) -> None:
        """A key that the release is not known to have."""
        moves = list(self.moves(key, value))
        if not any(there for _, _, there in moves):
            self.unknown(key, name, value, classes)
            return
        for path, below, there in moves:
            if there:
                message = f"{path} is not a key of TensorRT-LLM {self.release.version}, which has {there} instead"
                self.add(MOVED_KEY, path, message, self.translation(path, self.lines_below(path, below, classes)))
            else:
                self.unknown(path, path, below, classes)

    def unknown(self, key: str, name: str, value: Any, classes: list[LlmClass]) -> None:
        """A key that the release has nowhere. `name` is the whole `key` where its section is gone too."""
        prefix = key.removesuffix(name).rstrip(".")
        where = f"{prefix} of TensorRT-LLM" if prefix else "TensorRT-LLM"
        if "." in name and self.release.find_key(key) is not None:
            message = f"YAML takes {name} for one name, with dots in it"
            self.add(WRONG_KEY, key, message, to_write({key: value}))
            return
        is_settled = all(cls.complete for cls in classes)
        fix = _found_elsewhere(key, is_settled) or _near_miss(name, prefix, classes)
        if not is_settled:
            message = f"{name} is not known to be a key of {where} {self.release.version}"
            self.add(UNKNOWN_KEY, key, message, fix or "look it up in the release's documentation")
        elif prefix and self.release.version in _IGNORE_IN_SECTIONS:
            message = f"{name} is not a key of {where} {self.release.version}; it is ignored"
            self.add(IGNORED_KEY, key, message, fix or "remove it")
        else:
            message = f"{name} is not a key of {where} {self.release.version}; it would stop the load"
            self.add(WRONG_KEY, key, message, fix or "remove it")

    def lines_below(self, key: str, value: Any, classes: list[LlmClass]) -> dict[str, Any]:
        """A key that moved or, where it is a section whose keys moved too, those of them that did."""
        if not isinstance(value, dict):
            return {key: {}} if key in self.spelled({key: value}) else {key: value}
        below = {f"{key}.{plain(str(name))}": entry for name, entry in value.items()}
        moved = {path: entry for path, entry in below.items() if spelling.moved(path, self.release.version)}
        if not moved and key not in self.spelled({key: value}):
            return {key: value}
        for path, entry in below.items():
            if path not in moved:
                self.unknown(path, path, entry, classes)
        flat: dict[str, Any] = {}
        for path, entry in moved.items():
            flat |= self.lines_below(path, entry, classes)
        return flat or {key: {}}

    def translation(self, key: str, moved: Mapping[str, Any]) -> str:
        """What to write instead of what stands under `key` and moved."""
        ours = spelling.canonical(moved, spelling.MIXED)
        self.found.meant |= ours
        self.found.places |= {name: name if name in self.document.lines else key for name in ours}
        return to_write(self.spelled(moved))

    def spelled(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return spelling.spell(spelling.canonical(settings, spelling.MIXED), self.release.version)

    def moves(self, key: str, value: Any) -> Iterator[tuple[str, Any, str | None]]:
        """`key` or, where it is a section that is gone, the keys below it; each with its value and where it went."""
        there = spelling.moved(key, self.release.version)
        if there is None and isinstance(value, dict):
            for name, below in value.items():
                yield from self.moves(f"{key}.{plain(str(name))}", below)
        else:
            yield key, value, there

    def misfit(self, key: str, value: Any, found: Field) -> None:
        spelled = found.type
        if value is None:
            fix = "write a value, or leave the key out for its default"
            self.add(WRONG_NULL, key, _expected(spelled, value), fix)
        elif found.sections:
            known = listed_keys(self.release, found)
            null = ", or null" if type_strings.has_none(spelled) else ""
            message = f"expected a section with its keys below it{null}, found {shown(value)}"
            self.add(NOT_A_SECTION, key, message, f"write its keys below it: {known}")
        elif isinstance(value, str) and (known_choices := type_strings.choices(spelled)):
            near = nearest(value, known_choices)
            fix = f"did you mean {near}?" if near else f"write {type_strings.in_words(spelled)}"
            self.add(WRONG_CHOICE, key, _expected(spelled, value), fix)
        else:
            self.add(WRONG_TYPE, key, _expected(spelled, value), _fix_of_type(spelled, value))

    def add(self, check: CheckCode, key: str, message: str, fix: str) -> None:
        message = message if message.startswith(key) else f"{key}: {message}"
        self.found.findings.append(
            check.finding(message, fix, file=self.document.file, line=self.document.line(key), key=key)
        )


def _found_elsewhere(key: str, is_settled: bool) -> str | None:
    """What to do about a key of another release, the oldest of those that repositories are made for, if one has it."""
    versions = (*reversed(RELEASES), *(version for version in READABLE_RELEASES if version not in RELEASES))
    version = next((version for version in versions if load_release(version).find_key(key) is not None), None)
    if version is None:
        return None
    here = "remove it here" if is_settled else "look it up in this release's documentation"
    return f"TensorRT-LLM {version} has it; {here}" + (", or use that release" if version in RELEASES else "")


def _near_miss(name: str, prefix: str, classes: list[LlmClass]) -> str | None:
    near = None if "." in name else nearest(name, [known for cls in classes for known in cls.fields])
    return near and f"did you mean {near}{f', under {prefix}' if prefix else ''}?"


def listed_keys(release: Release, found: Field, most: int = 4) -> str:
    names = [name for section in found.sections for name in release.classes[section].fields]
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _expected(spelled: str, value: Any) -> str:
    return f"expected {type_strings.in_words(spelled)}, found {shown(value)}"


def _fix_of_type(spelled: str, value: Any) -> str:
    if isinstance(value, str) and type_strings.fits(_unquoted(value), spelled):
        return f"write {value} as a number, without quotes and with a point before any exponent"
    return f"write {type_strings.in_words(spelled)}"


def _unquoted(text: str) -> Any:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _kinds(release: Release, name: str) -> Mapping[str, str]:
    """Value of the key that chooses a section's class -> the class."""
    rows = (entry["fields"].get(name, {}) for entry in release.record["classes"].values())
    return next((row["class_by"]["classes"] for row in rows if "class_by" in row), {})
