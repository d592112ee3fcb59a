"""The changes that `build` would make to a folder that it wrote before: settings, scripts, and names of other files."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from deepseek_triton_build import DEFAULT_FORMAT, Plan, format_files, manifests_of, read_manifest
from deepseek_triton_build.check import MANIFEST, is_inside
from deepseek_triton_build.text import first_names, is_comment, parse_yaml, yaml_flow
from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.terminal.output_streams import printable, to_reader
from deepseek_triton_tools.terminal.tables import styled
from deepseek_triton_tools.tool_errors import ToolError

_SHOWN = (".yaml", ".yml", ".json", ".pbtxt", ".sh")
"""Ends of the names of files whose lines are compared. Others, such as the backend's modules, are only named."""
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
    stamp = read_manifest(found[0][1]) if found else {}
    if not stamp:
        expected = f"{folder}: expected a folder that build wrote, found no {MANIFEST} that can be read"
        raise ToolError(expected, exit_code=2)
    format = stamp.get("format")
    files = format_files(format if isinstance(format, str) else DEFAULT_FORMAT, plan, version=__version__)
    new = {file.path.as_posix(): file.content for file in files}
    recorded = stamp.get("files")
    names = {*new, *(name for name in (recorded if isinstance(recorded, dict) else ()) if is_inside(name))}
    old = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    others: dict[str, list[str]] = {"added": [], "removed": [], "changed": []}
    for name in sorted(names, key=lambda name: (not name.endswith(MANIFEST), name)):
        if old.get(name) == new.get(name):
            continue
        if name in old and name in new and name.endswith(_SHOWN):
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
    before, after = (_lines(name, content.decode("utf-8", errors="replace")) for content in (old, new))
    _, _, *diff = difflib.unified_diff(before, after, n=0, lineterm="") if before != after else ("", "")
    return [line for line in diff if not line.startswith("@@")]


def _lines(name: str, text: str) -> list[str]:
    """Return the lines that matter: of YAML and JSON each setting with its whole key, of scripts all but comments."""
    if name.endswith((".yaml", ".yml", ".json")):
        try:
            rows = _flat(parse_yaml(text), "")
            return [f"{key}: {value}" for key, value in rows if not key.startswith(_NO_SETTINGS)]
        except (yaml.YAMLError, ValueError, RecursionError):
            pass  # the owner broke it: it is compared as it stands
    return [line for line in text.splitlines() if not is_comment(line)]


def _flat(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from _flat(below, f"{key}.{name}" if key else str(name))
    else:
        yield key, yaml_flow(value)
