"""One word has one meaning: class names, file names and how docstrings begin."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "build/deepseek_triton_build",
    "client/deepseek_triton_client",
    "tools/deepseek_triton_tools",
    "model_repository/tensorrt_llm/1",
)
ON_BOTH_SIDES_OF_THE_WIRE = {"Logprob", "PerfMetrics", "SamplingParams"}
"""The client and the backend mean the same by these, and neither may import the other."""
NAMED_BY_TRITON = {"TritonPythonModel"}
"""Triton looks for a class of this name in every model.py."""
SAME_FILE_NAMES = {"__init__.py", "main.py", "parsing.py"}
"""A command's file is called like the command, so the files of cli/ may repeat a name."""


@cache
def sources() -> dict[Path, ast.Module]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT): ast.parse(path.read_text("utf-8")) for path in paths}


def repeated(places: dict[str, list[Path]]) -> dict[str, list[str]]:
    return {name: list(map(str, paths)) for name, paths in places.items() if len(paths) > 1}


@pytest.mark.slow
def test_a_class_name_occurs_once() -> None:
    places: dict[str, list[Path]] = defaultdict(list)
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name not in ON_BOTH_SIDES_OF_THE_WIRE | NAMED_BY_TRITON:
                places[node.name].append(path)
    assert repeated(places) == {}


def test_a_file_name_occurs_once() -> None:
    places: dict[str, list[Path]] = defaultdict(list)
    for path in sources():
        if path.name not in SAME_FILE_NAMES and path.parent.name != "cli":
            places[path.name.lstrip("_")].append(path)
    assert repeated(places) == {}


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Each docstring, also those of attributes, with its line."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.IfExp | ast.Lambda) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value


@pytest.mark.slow
def test_a_docstring_begins_with_its_subject() -> None:
    without_subject = {"Of", "So", "And", "As", "Or", "What"}
    found = [
        f"{path}:{line}: {text.strip().splitlines()[0]}"
        for path, tree in sources().items()
        for line, text in docstrings(tree)
        if text.split() and text.split()[0].rstrip(",:") in without_subject
    ]
    assert found == []
