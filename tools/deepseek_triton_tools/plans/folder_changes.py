"""The changes that `build` or `upgrade` would make to a folder that build wrote: shown, checked and written."""

import difflib
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from deepseek_triton_build import (
    DEFAULT_FORMAT,
    BuildError,
    File,
    FolderUpgrade,
    Keep,
    MergeConflict,
    Plan,
    UpgradedFile,
    format_files,
    format_request,
    make_plan,
    manifests_of,
    plan_upgrade,
    read_manifest,
    replace_repository,
    write_repository,
)
from deepseek_triton_build.check import MANIFEST, Finding, check_repository, is_inside
from deepseek_triton_build.text import first_names, is_comment, parse_yaml, yaml_flow
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.plans.check_view import show_finding
from deepseek_triton_tools.plans.plan_view import engine_version, how_to_get
from deepseek_triton_tools.terminal.output_streams import print_json, printable, to_reader
from deepseek_triton_tools.terminal.tables import paragraph, styled
from deepseek_triton_tools.tool_errors import ToolError

_SHOWN = (".yaml", ".yml", ".json", ".pbtxt", ".sh")
"""Ends of the names of files whose lines are compared. Others, and release.yaml, are only named."""
_NO_SETTINGS = ("files.", "generated.", "plan")
"""Beginnings of the stamp's keys that say nothing to people: checksums and packed texts."""


def show_diff(plan: Plan, folder: Path) -> None:
    """Print what `build`, in the folder's own format, would change in `folder`. Comments and reasons don't count.

    Raises ToolError when the folder holds nothing that `build` wrote, or can't be read.
    """
    try:
        lines = list(_diff(plan, folder))
    except OSError as error:
        raise ToolError(f"{error.filename}: can't be read: {error.strerror}", exit_code=2) from error
    with to_reader():
        for line in lines:
            print(styled(printable(line), {"-": "31", "+": "33"}.get(line.lstrip()[:1], "1")))
        if not lines:
            print(f"{printable(str(folder))}: nothing would change")


def _diff(plan: Plan, folder: Path) -> Iterator[str]:
    found = manifests_of(folder)
    if not (stamp := read_manifest(found[0][1]) if found else {}):
        expected = f"{folder}: expected a folder that build wrote, found no {MANIFEST} that can be read"
        raise ToolError(expected, exit_code=2)
    format = str(stamp.get("format") or DEFAULT_FORMAT)
    if (request := format_request(format, plan.request)) != plan.request:
        plan = make_plan(request)
    files = format_files(format, plan, version=__version__)
    new = {file.path.as_posix(): file.content for file in files}
    recorded = stamp.get("files")
    names = {*new, *(name for name in (recorded if isinstance(recorded, dict) else ()) if is_inside(name))}
    old = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    others: dict[str, list[str]] = {"added": [], "removed": [], "changed": []}
    for name in sorted(names, key=lambda name: (not name.endswith(MANIFEST), name)):
        if old.get(name) == new.get(name):
            continue
        if name in old and name in new and name.endswith(_SHOWN) and not name.endswith("release.yaml"):
            if lines := changed_lines(name, old[name], new[name]):
                yield name
                yield from (f"  {line[0]} {line[1:]}" for line in lines)
        else:
            others["added" if name not in old else "removed" if name not in new else "changed"].append(name)
    for what, rest in others.items():
        if rest:
            yield f"{what}: {first_names(rest)}"


def changed_lines(name: str, old: bytes, new: bytes) -> list[str]:
    """Return the lines of a file, whose name is `name`, that differ, with the sign of a diff in front: of YAML and JSON
    each setting with its whole key. Comments don't count."""
    texts = [content.decode("utf-8", errors="replace") for content in (old, new)]
    try:
        before, after = map(_settings, texts) if name.endswith(_SETTINGS) else map(_lines, texts)
        moved = {*before} & {*after} if name.endswith(_SETTINGS) else ()  # of settings, the order says nothing
    except (yaml.YAMLError, ValueError, RecursionError):  # several documents, or the owner broke it
        before, after, moved = *map(_lines, texts), ()
    _, _, *diff = difflib.unified_diff(before, after, n=0, lineterm="") if before != after else ("", "")
    return [line for line in diff if not line.startswith("@@") and line[1:] not in moved]


def _settings(text: str) -> list[str]:
    rows = _flat(parse_yaml(text), "")
    return [f"{key}: {value}" for key, value in rows if not key.startswith(_NO_SETTINGS)]


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if not is_comment(line)]


def _flat(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from _flat(below, f"{key}.{name}" if key else str(name))
    else:
        yield key, yaml_flow(value)


SCHEMA = "deepseek-triton/upgrade/1"
_SETTINGS = (".yaml", ".yml", ".json")
_EDITED = (".yaml", ".yml", ".pbtxt", ".sh", ".slurm")
"""Ends of the names of files that people edit, whose changes and edits are shown."""
_MOST_LINES = 40
"""Lines of a file's difference that are shown where nothing of it can be merged."""
_FATES = {
    "added": "added",
    "replaced": "changed",
    "merged": "changed",
    "restored": "gone, and written again",
    "removed": "removed, as it is no longer generated",
    "kept": "yours, kept as it is",
    "absent": "removed by you, and written again only by --keep generated",
}


@dataclass(frozen=True, kw_only=True)
class UpgradeTarget:
    """A generated folder, and what the generator writes today from its recorded options."""

    folder: Path
    record: Mapping[str, Any]
    """Its manifest."""
    plans: Mapping[str, Plan]
    """Plans by the folder of their files; "" for all of them."""
    files: list[File]

    def reason(self, file: str, line: str) -> str:
        """Return the plan's reason for a line that a file gets; "" where it has none."""
        plan = self.plans.get(file.partition("/")[0], self.plans.get(""))
        if plan is None or not line.startswith("+"):
            return ""
        key = line[1:].partition(":")[0]
        name = re.match(r"\+\s*export (\w+)=", line)
        reasons = [setting.comment for setting in plan.settings if setting.key == key]
        reasons += [variable.comment for variable in plan.environment if name and variable.name == name[1]]
        return next(iter(reasons), "")

    @property
    def versions(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Versions of this program, TensorRT-LLM and vLLM, and the image, of the folder as it is and as it will be."""
        plan = next(iter(self.plans.values()))
        now = {
            "version": __version__,
            "release": plan.release.version if plan.release else None,
            "vllm": plan.vllm.version if plan.vllm else None,
            "image": plan.image_for(self.record.get("format") or DEFAULT_FORMAT),
        }
        return {key: self.record.get(key) for key in now}, now


def upgrade(target: UpgradeTarget, *, keep: Keep | None, apply: bool, as_json: bool) -> int:
    """Show what the upgrade changes, keeps and can't decide; with `apply`, write it. Return the exit code.

    :param keep: the side that wins conflicts; None: with conflicts, nothing is written.
    :raises ToolError: when there are conflicts, or the merged folder has errors that the present one has not.
    :raises BuildError: when the folder can't be written, or a server runs from it.
    """
    merged = plan_upgrade(target.folder, target.files, keep=keep or "yours")
    conflicts = merged.conflicts if keep is None else []
    findings, new_errors = _checked(target.folder, merged)
    status = "waiting" if merged.changes else "nothing"
    status = "conflicts" if conflicts else "errors" if new_errors else status
    backup = None
    if apply and status == "waiting":
        backup = replace_repository(
            merged.written, target.folder, kept=merged.kept, before=lambda: merged.refuse_change(target.folder)
        )
        status = "applied"
    with to_reader():
        if as_json:
            print_json(_document(target, merged, status, findings, new_errors, backup))
        else:
            ordered = [*new_errors, *(row for row in findings if row not in new_errors)]
            _show(target, merged, status, ordered, keep=keep, backup=backup)
    if status == "conflicts":
        raise ToolError(
            f"{target.folder}: nothing was written, because of conflicts: {len(conflicts)}; change the files "
            "so that they agree with one side, or add --keep yours or --keep generated for all that are left"
        )
    if status == "errors":
        raise ToolError(
            f"{target.folder}: nothing was written, because the result would have errors that the folder has not now: "
            f"{len(new_errors)}; correct that first, and upgrade again"
        )
    return 0


def _checked(folder: Path, merged: FolderUpgrade) -> tuple[list[Finding], list[Finding]]:
    """Return the errors and warnings that `check` has about the merged folder, and the errors among them that it has
    not about the folder as it is. A format that `check` doesn't know has none."""
    # In a folder of the same name, which `check` quotes; what was added may be large, so that links stand for it.
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch, folder.resolve().name)
        write_repository(merged.written, result)
        for name in merged.kept:
            path = result / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(folder.resolve() / name)
        moved = str(result.resolve()), str(folder.resolve())
        serious = [replace(row, fix=row.fix.replace(*moved)) for row in _findings(result) if row.severity != "note"]
    known = {(row.code, row.file, row.key) for row in _findings(folder)}
    return serious, [row for row in serious if row.severity == "error" and (row.code, row.file, row.key) not in known]


def _findings(folder: Path) -> Iterable[Finding]:
    try:
        return check_repository(folder).findings
    except BuildError:
        return ()


def _show(
    target: UpgradeTarget,
    merged: FolderUpgrade,
    status: str,
    findings: Sequence[Finding],
    *,
    keep: Keep | None,
    backup: Path | None,
) -> None:
    then, now = map(_version, target.versions)
    title = f"{target.folder}, built by {then}" + ("" if then == now else f"; now: {now}")
    print(styled(paragraph(printable(title), ""), "1"))
    for file in merged.files:
        _show_file(target, file, keep)
    plans, format = target.plans.values() if merged.changes else (), target.record.get("format") or DEFAULT_FORMAT
    missing = [f"{engine_version(one)}: {how_to_get(one)}" for one in plans if one.gpu and not one.image_for(format)]
    for line in (*_other_lines(merged), *dict.fromkeys(missing)):
        print(paragraph(printable(line), ""))
    for finding in findings:
        show_finding(finding)
    if merged.changes and not findings:
        print("check: no error and no warning about the result")
    last = {
        "nothing": "nothing would change",
        "waiting": f"{len(merged.changes)} files would change; nothing was written: --apply writes it",
        "applied": f"upgraded, {len(merged.changes)} files changed; the folder as it was: {backup}",
    }
    if status in last:
        print(paragraph(printable(f"{target.folder}: {last[status]}"), ""))


def _version(record: Mapping[str, Any]) -> str:
    engine = "TensorRT-LLM" if record["release"] else "vLLM"
    number = record["release"] or record["vllm"]
    program = f"deepseek-triton {record['version'] or 'of an unknown version'}"
    image = f" in {str(record['image']).rpartition('/')[2]}" if record["image"] else ""
    return f"{program} for {engine} {number}{image}" if number else program


def _show_file(target: UpgradeTarget, file: UpgradedFile, keep: Keep | None) -> None:
    """Print the changes, the edits and the conflicts of a settings file, or the conflict of any other."""
    is_open = keep is None and bool(file.conflicts)
    changes, edits = _changes(file), [] if is_open else _edits(file)
    if not (changes or edits or file.conflicts):
        return
    print(styled(printable(file.path), "1"))
    above = ""
    for line in changes:
        print(styled(printable(f"  {line[0]} {line[1:]}"), {"-": "31", "+": "33"}[line[0]]))
        reason = target.reason(file.path, line)
        if reason and reason != above:
            print(styled(paragraph(printable(reason), "      ", ""), "2"))
        above = reason
    for line in edits:
        print(printable(f"  yours, kept: {line[0]} {line[1:]}"))
    settled = "" if is_open else f", settled: {keep}"
    for conflict in file.conflicts:
        for line in _conflict_lines(file, conflict, settled):
            print(printable(line))


def _changes(file: UpgradedFile) -> list[str]:
    """Return the lines that the upgrade changes."""
    if file.fate not in ("replaced", "merged") or file.present is None or file.result is None or _is_program(file):
        return []
    return changed_lines(file.path, file.present, file.result)


def _edits(file: UpgradedFile) -> list[str]:
    """Return the lines that differ from what is generated because the owner has changed them."""
    if file.fate not in ("kept", "merged") or file.now is None or file.result is None or _is_program(file):
        return []
    if any(conflict.why for conflict in file.conflicts):
        return []
    return changed_lines(file.path, file.now, file.result)


def _is_program(file: UpgradedFile) -> bool:
    return not file.path.endswith(_EDITED) or file.path.endswith("release.yaml")


def _conflict_lines(file: UpgradedFile, conflict: MergeConflict, settled: str) -> Iterator[str]:
    if conflict.why:
        yield f"  conflict about the whole file: {conflict.why}{settled}"
        if file.present is not None and file.now is not None and not _is_program(file):
            lines = changed_lines(file.path, file.present, file.now)
            yield from (f"    {line[0]} {line[1:]}" for line in lines[:_MOST_LINES])
            if len(lines) > _MOST_LINES:
                yield f"    and {len(lines) - _MOST_LINES} more lines"
        return
    yield f"  conflict at {conflict.where}{settled}"
    sides = {"yours": conflict.yours, "generated then": conflict.before, "generated now": conflict.now}
    for side, text in sides.items():
        first, *rest = (text or "nothing").splitlines()
        yield f"    {side}: {first}"
        yield from (f"      {line}" for line in rest)


def _other_lines(merged: FolderUpgrade) -> Iterator[str]:
    """Say what becomes of files whose lines are not shown."""
    names: dict[str, list[str]] = {words: [] for words in _FATES.values()}
    has_others = any(not file.path.endswith(MANIFEST) for file in merged.changes)
    for file in merged.files:
        is_shown = _changes(file) or _edits(file) or file.conflicts or (has_others and file.path.endswith(MANIFEST))
        if not is_shown and file.fate in _FATES:
            is_absent = file.fate == "kept" and file.result is None and file.path not in merged.kept
            names[_FATES["absent" if is_absent else file.fate]].append(file.path)
    names[_FATES["kept"]] += merged.added
    for words, paths in names.items():
        if paths:
            yield f"{words}: {first_names(paths)}"


def _document(
    target: UpgradeTarget,
    merged: FolderUpgrade,
    status: str,
    findings: list[Finding],
    new_errors: list[Finding],
    backup: Path | None,
) -> dict[str, Any]:
    then, now = target.versions
    return {
        "schema": SCHEMA,
        "folder": str(target.folder),
        "status": status,
        "options": target.record["options"],
        "from": then,
        "to": now,
        "files": [
            {
                "path": file.path,
                "fate": file.fate,
                "changes": [{"line": line, "reason": target.reason(file.path, line)} for line in _changes(file)],
                "edits": _edits(file),
                "conflicts": [asdict(conflict) for conflict in file.conflicts],
            }
            for file in merged.files
            if file.fate != "same"
        ],
        "added_by_you": list(merged.added),
        "findings": [asdict(finding) | {"is_new": finding in new_errors} for finding in findings],
        "backup": None if backup is None else str(backup),
    }
