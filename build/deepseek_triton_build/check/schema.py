"""Arguments in YAML against what is recorded: TensorRT-LLM's, and the settings of the model.py that reads them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deepseek_triton_build.check import codes
from deepseek_triton_build.check.documents import Document, key_name
from deepseek_triton_build.data import setting_types, spelling, type_strings
from deepseek_triton_build.data.finding import Code, Finding
from deepseek_triton_build.data.own_files import contract
from deepseek_triton_build.data.releases import READABLE_RELEASES, RELEASES, Field, LlmClass, Release, load_release
from deepseek_triton_build.text import edit_instruction, first_names, nearest_name, short_repr

MODEL_YAML = "model.yaml"
UPSTREAM_KEYS = ("logits_post_processors",)
"""Top-level keys that upstream's model.py takes for itself (NVIDIA/TensorRT-LLM llmapi model.yaml)."""
TRITON_SECTION = "triton_config"
_MOST_CHOICES = 8
# Releases whose sections are pydantic models that ignore keys they don't know (releases/0.21.0.yaml).
_IGNORE_IN_SECTIONS = ("0.21.0",)


@dataclass(kw_only=True)
class CheckedArguments:
    """The LLM arguments of a file, by dotted paths."""

    settings: dict[str, Any] = field(default_factory=dict)
    """The arguments that the release knows, with values of the right types."""
    meant: dict[str, Any] = field(default_factory=dict)
    """The arguments that are spelled as in another release, under 1.2.1's keys."""
    places: dict[str, str] = field(default_factory=dict)
    """Key of `meant` -> the key in the file."""
    unknown: set[str] = field(default_factory=set)
    """Arguments whose values are wrong: of TensorRT-LLM under 1.2.1's keys."""
    findings: list[Finding] = field(default_factory=list)
    """Findings about everything that is not in `settings`."""


def check_schema(document: Document, release: Release, *, other_sections: tuple[str, ...] = ()) -> CheckedArguments:
    """Check the keys and values of `document`.

    :param other_sections: top-level keys that are not the engine's.
    """
    walk = _SchemaWalk(document, release, other_sections)
    walk.check_section(document.values, [release.classes["TorchLlmArgs"]], "")
    return walk.checked


def ignored_arguments(document: Document, engine: str) -> CheckedArguments:
    """Check the keys of `document` for an embedded engine, which takes the model's name and nothing else of them."""
    findings = []
    for name in map(key_name, document.values):
        if name in ("model", TRITON_SECTION):
            continue
        message = f"{name} has no effect: of the LLM arguments, the {engine} engine takes only model"
        is_ours = name in setting_types.BACKEND_SETTINGS
        fix = f"indent it, so that it stands under {TRITON_SECTION}" if is_ours else "remove it"
        findings.append(document.finding(codes.IGNORED_KEY, name, message, fix))
    return CheckedArguments(findings=findings)


@dataclass
class _SchemaWalk:
    """One walk over the keys of a document, which collects arguments and findings."""

    document: Document
    release: Release
    other_sections: tuple[str, ...]
    checked: CheckedArguments = field(default_factory=CheckedArguments)

    def check_section(self, values: Mapping[Any, Any], classes: list[LlmClass], prefix: str) -> None:
        too_deep: tuple[str, list[LlmClass]] | None = None
        for key, value in values.items():
            name = key_name(key)
            if not prefix and name in self.other_sections:
                continue
            row = next((cls.fields[name] for cls in classes if name in cls.fields), None)
            top = self.release.classes["TorchLlmArgs"].fields.get(name) if prefix and value is None else None
            if row is None and top is not None and top.sections:
                message = f"{name} stands under {prefix[:-1]}, and its own keys beside it"
                self.add(codes.WRONG_KEY, prefix + name, message, "write it without an indent")
                too_deep = f"{name}.", [self.release.classes[kind] for kind in top.sections]
            elif row is None and too_deep is not None and any(name in cls.fields for cls in too_deep[1]):
                self.check_section({key: value}, too_deep[1], too_deep[0])
            elif row is None:
                self.report_absent(prefix + name, name, value, classes)
            else:
                self.check_value(prefix + name, value, row)

    def check_value(self, key: str, value: Any, row: Field) -> None:
        if row.sections and isinstance(value, dict):
            self.check_subsection(key, value, row)
            return
        keys = [name for kind in row.sections for name in self.release.classes[kind].fields]
        if problem := value_problem(value, setting_types.bounded_type(key, row.type), keys):
            self.add(problem.code, key, problem.message, problem.fix)
            self.checked.unknown |= spelling.canonical({key: value}, self.release.version).keys()
        else:
            self.checked.settings[key] = value

    def check_subsection(self, key: str, value: Mapping[Any, Any], row: Field) -> None:
        classes = {name: self.release.classes[name] for name in row.sections}
        if row.discriminator is None:
            if not value:
                self.checked.settings[key] = {}
            self.check_section(value, list(classes.values()), f"{key}.")
            return
        rows = (entry["fields"].get(row.name, {}) for entry in self.release.record["classes"].values())
        kinds: Mapping[str, str] = next((entry["class_by"]["classes"] for entry in rows if "class_by" in entry), {})
        chooser = f"{key}.{row.discriminator}"
        near = (
            None
            if row.discriminator in value
            else nearest_name(row.discriminator, [name for name in value if isinstance(name, str)])
        )
        if near is not None:
            fix = f"did you mean {row.discriminator}, under {key}?"
            self.add(codes.WRONG_KEY, f"{key}.{near}", f"{near} is not a key of {key}; it would stop the load", fix)
        chosen = value.get(row.discriminator if near is None else near)
        if not isinstance(chosen, str):
            self.checked.unknown.add(chooser)
            expected = f"expected {row.discriminator}, which names the kind of section, found {short_repr(chosen)}"
            self.add(codes.WRONG_CHOICE, chooser, expected, edit_instruction({chooser: next(iter(kinds))}))
            return
        likely = nearest_name(chosen, kinds)
        if chosen not in kinds and likely is not None:
            message = f"expected {', '.join(kinds)} or another kind, found {short_repr(chosen)}"
            self.add(codes.WRONG_CHOICE, chooser, message, f"did you mean {likely}?")
            chosen = likely
        if chosen not in kinds:
            self.checked.unknown.add(chooser)
            fix = f"nothing, if it is meant; recorded kinds: {', '.join(kinds)}"
            message = f"{short_repr(chosen)} is not recorded here, so its keys are not checked"
            self.add(codes.NOT_LOOKED_INTO, chooser, message, fix)
            return
        self.checked.settings[chooser] = chosen
        below = {name: entry for name, entry in value.items() if name not in (row.discriminator, near)}
        self.check_section(below, [classes[kinds[chosen]]], f"{key}.")

    def report_absent(self, key: str, name: str, value: Any, classes: list[LlmClass]) -> None:
        """Report a key that the release is not known to have."""
        moves = list(self.moves(key, value))
        if not any(new_key for _, _, new_key in moves):
            self.report_unknown(key, name, value, classes)
            return
        for path, below, new_key in moves:
            if new_key:
                message = f"{path} is not a key of TensorRT-LLM {self.release.version}, which has {new_key} instead"
                self.add(codes.MOVED_KEY, path, message, self.translation(path, self.lines_below(path, below, classes)))
            else:
                self.report_unknown(path, path, below, classes)

    def report_unknown(self, key: str, name: str, value: Any, classes: list[LlmClass]) -> None:
        """Report a key that the release has nowhere.

        :param name: the last part of `key`, or the whole `key` when the release lacks its section too.
        """
        prefix = key.removesuffix(name).rstrip(".")
        where = f"{prefix} of TensorRT-LLM" if prefix else "TensorRT-LLM"
        if "." in name and self.release.find_key(key) is not None:
            message = f"YAML reads {name} as one name with dots in it, not as a path"
            self.add(codes.WRONG_KEY, key, message, edit_instruction({key: value}))
            return
        is_settled = all(cls.complete for cls in classes)
        if not prefix and TRITON_SECTION in self.other_sections and name in setting_types.BACKEND_SETTINGS:
            fix: str | None = f"indent it, so that it stands under {TRITON_SECTION}"
        else:
            known = () if "." in name else [known for cls in classes for known in cls.fields]
            near = nearest_name(name, known)
            meant = near and f"did you mean {near}{f', under {prefix}' if prefix else ''}?"
            fix = self.right_section(name) or _found_elsewhere(key, is_settled) or meant
            if fix == meant and near is not None:
                self.keep_meant(key, f"{prefix}.{near}".lstrip("."), value)
        if not is_settled:
            message = f"{name} is not known to be a key of {where} {self.release.version}"
            self.add(codes.UNKNOWN_KEY, key, message, fix or "look it up in the release's documentation")
        elif prefix and self.release.version in _IGNORE_IN_SECTIONS:
            message = f"{name} is not a key of {where} {self.release.version}; it is ignored"
            self.add(codes.IGNORED_KEY, key, message, fix or "remove it")
        else:
            message = f"{name} is not a key of {where} {self.release.version}; it would stop the load"
            self.add(codes.WRONG_KEY, key, message, fix or "remove it")

    def keep_meant(self, key: str, meant: str, value: Any) -> None:
        """Let `key` count as the argument `meant`, so that nothing is told of that one's default."""
        flat = spelling.flattened({meant: value})
        ours = spelling.canonical(flat, self.release.version)
        self.checked.meant |= ours
        self.checked.places |= dict.fromkeys(ours, key)

    def right_section(self, name: str) -> str | None:
        """Return a fix that names the sections of the release that have the key; None where none or many do."""
        sections = dict.fromkeys(_sections_with(name, self.release, "TorchLlmArgs", ()))
        places = [f"under {'.'.join(section)}" if section else "at the top level" for section in sections]
        # A name that many sections have, such as `type`, tells nothing about the one that was meant.
        return f"move it: it stands {' or '.join(places)}" if 0 < len(places) <= 2 else None

    def lines_below(self, key: str, value: Any, classes: list[LlmClass]) -> dict[str, Any]:
        """Return a key that moved; for a section whose keys moved one by one, those of them that did."""
        if not isinstance(value, dict):
            return {key: {}} if key in self.in_release({key: value}) else {key: value}
        below = {f"{key}.{key_name(name)}": entry for name, entry in value.items()}
        moved = {path: entry for path, entry in below.items() if spelling.moved(path, self.release.version)}
        if not moved and key not in self.in_release({key: value}):
            return {key: value}
        for path, entry in below.items():
            if path not in moved:
                self.report_unknown(path, path, entry, classes)
        flat: dict[str, Any] = {}
        for path, entry in moved.items():
            flat |= self.lines_below(path, entry, classes)
        return flat or {key: {}}

    def translation(self, key: str, moved: Mapping[str, Any]) -> str:
        """Return what to write instead of `key`, and keep in `checked` what it means.

        :param moved: the keys that moved, with their values.
        """
        ours = spelling.canonical(moved, spelling.MIXED)
        self.checked.meant |= ours
        self.checked.places |= {name: name if name in self.document.lines else key for name in ours}
        return edit_instruction(self.in_release(moved))

    def in_release(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings of any release under the keys of this one."""
        return spelling.spell(spelling.canonical(settings, spelling.MIXED), self.release.version)

    def moves(self, key: str, value: Any) -> Iterator[tuple[str, Any, str | None]]:
        """Yield `key`, its value and its new key; for a section that is gone, the same for each key below it."""
        new_key = spelling.moved(key, self.release.version)
        if new_key is None and isinstance(value, dict):
            for name, below in value.items():
                yield from self.moves(f"{key}.{key_name(name)}", below)
        else:
            yield key, value, new_key

    def add(self, check: Code, key: str, message: str, fix: str) -> None:
        self.checked.findings.append(self.document.finding(check, key, message, fix))


def _sections_with(name: str, release: Release, kind: str, section: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the sections, from `section` of the class `kind` down, that have the key."""
    for key, row in release.classes[kind].fields.items():
        if key == name:
            yield section
        for below in row.sections:
            if key not in section:  # a class may hold itself
                yield from _sections_with(name, release, below, (*section, key))


def _found_elsewhere(key: str, is_settled: bool) -> str | None:
    """Return a fix that names a release with `key`: the oldest that `build` writes for, else one that is only read."""
    versions = (*reversed(RELEASES), *(version for version in READABLE_RELEASES if version not in RELEASES))
    version = next((version for version in versions if load_release(version).find_key(key) is not None), None)
    if version is None:
        return None
    here = "remove it here" if is_settled else "look it up in this release's documentation"
    return f"TensorRT-LLM {version} has it; {here}" + (", or use that release" if version in RELEASES else "")


class Problem(NamedTuple):
    """One fault of an argument, wherever it is given."""

    code: Code
    message: str
    fix: str


def value_problem(value: Any, spelled: str, keys: Iterable[str] = ()) -> Problem | None:
    """Return what is wrong with a value; None when it fits.

    :param spelled: its type, with bounds where it has any.
    :param keys: the keys below it, when it is a section.
    """
    if type_strings.fits(value, spelled):
        return None
    words = type_strings.in_words(spelled)
    message, fix = f"expected {words}, found {short_repr(value)}", f"write {words}"
    if value is None:
        return Problem(codes.WRONG_NULL, message, "write a value, or leave the key out for its default")
    if keys:
        null = ", or null" if type_strings.has_none(spelled) else ""
        message = f"expected a section with its keys below it{null}, found {short_repr(value)}"
        return Problem(codes.NOT_A_SECTION, message, f"write its keys below it: {first_names(keys, most=4)}")
    if isinstance(value, str) and (choices := type_strings.choices(spelled)):
        message = f"expected one of {first_names(choices, most=_MOST_CHOICES)}, found {short_repr(value)}"
        near = nearest_name(value, choices)
        return Problem(codes.WRONG_CHOICE, message, f"did you mean {near}?" if near else fix)
    if type_strings.fits(value, type_strings.without_bounds(spelled)):
        return Problem(codes.OUT_OF_RANGE, message, fix)
    if isinstance(value, str) and type_strings.fits(_unquoted(value), spelled):
        fix = f"write {value} as a number, without quotes and with a point before any exponent"
    return Problem(codes.WRONG_TYPE, message, fix)


def _unquoted(text: str) -> Any:
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


# Settings of upstream's model.py -> their types. It takes other keys too (NVIDIA/TensorRT-LLM llmapi model.yaml).
_UPSTREAM_SETTINGS: Mapping[str, str] = {
    "max_batch_size": "int 0..",
    "decoupled": "bool",
    "cancellation_check_period_ms": "int 1..",
}


def check_triton_config(
    document: Document, find_argument: Callable[[str], object | None], *, is_ours: bool
) -> Iterator[Finding]:
    """Find unknown keys and wrong values in triton_config.

    :param find_argument: returns the engine's argument of a name; None when it has none.
    :param is_ours: whether model.py is this project's; upstream's takes other keys.
    """
    section = document.values.get(TRITON_SECTION)
    if section is not None and not isinstance(section, dict):
        message = f"expected a section, found {short_repr(section)}"
        yield document.finding(codes.WRONG_SETTING_VALUE, TRITON_SECTION, message, "write its keys below it")
        return
    settings = setting_types.BACKEND_SETTINGS if is_ours else _UPSTREAM_SETTINGS
    for key, value in (section or {}).items():
        if key in settings:
            if not type_strings.fits(value, settings[key]):
                expected = type_strings.in_words(settings[key])
                message = f"expected {expected}, found {short_repr(value)}"
                yield document.finding(
                    codes.WRONG_SETTING_VALUE, f"{TRITON_SECTION}.{key}", message, f"write {expected}"
                )
        elif is_ours and find_argument(key_name(key)) is not None:
            dotted = f"{TRITON_SECTION}.{key_name(key)}"
            message = f"{dotted} is not a key of the backend, but an LLM argument"
            yield document.finding(codes.WRONG_SETTING, dotted, message, "move it to the top level, without an indent")
        elif is_ours:
            yield _unknown(document, f"{TRITON_SECTION}.{key_name(key)}", "the backend", nearest_name(key, settings))
    if is_ours:
        sampling, warmup = ((section or {}).get(name) for name in ("default_sampling", "warmup"))
        fields = contract().SAMPLING_BY_NAME
        yield from _check_entries(document, "default_sampling", sampling, fields, setting_types.sampling_problem)
        yield from _check_entries(
            document, "warmup", warmup, setting_types.WARMUP_SETTINGS, setting_types.warmup_problem
        )
        if isinstance(warmup, dict) and "shapes" not in warmup:
            fix = "write shapes: [[1, 64]], or warmup: null"
            key = f"{TRITON_SECTION}.warmup"
            yield document.finding(codes.WRONG_SETTING_VALUE, key, "expected shapes, found none", fix)


def triton_settings(document: Document) -> Mapping[str, Any]:
    """Return the content of triton_config; nothing when it is no section."""
    section = document.values.get(TRITON_SECTION)
    return section if isinstance(section, dict) else {}


def _check_entries(
    document: Document,
    section: str,
    entries: Any,
    known: Mapping[str, Any],
    problem_of: Callable[[str, Any], str | None],
) -> Iterator[Finding]:
    """Find unknown keys and wrong values in a section below triton_config.

    :param problem_of: returns what is wrong with the value of a known key, if anything.
    """
    for name, value in entries.items() if isinstance(entries, dict) else ():
        dotted = f"{TRITON_SECTION}.{section}.{key_name(name)}"
        if name not in known:
            yield _unknown(document, dotted, section, nearest_name(name, known))
        elif problem := problem_of(name, value):
            fix = "write such a value, or leave the key out"
            yield document.finding(codes.WRONG_SETTING_VALUE, dotted, problem, fix)


def _unknown(document: Document, dotted: str, owner: str, near: str | None) -> Finding:
    fix = f"did you mean {near}?" if near else "remove it, or write one of the keys in docs/configuration.md"
    return document.finding(codes.WRONG_SETTING, dotted, f"{dotted} is not a key of {owner}", fix)
