"""One word has one meaning: class names and file names."""

import re
from collections import defaultdict
from pathlib import Path

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


def sources():
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def repeated(places):
    return {name: list(map(str, paths)) for name, paths in places.items() if len(paths) > 1}


def test_a_class_name_occurs_once():
    places = defaultdict(list)
    for path in sources():
        for name in re.findall(r"^ *class (\w+)[(:]", path.read_text("utf-8"), re.MULTILINE):
            if name not in ON_BOTH_SIDES_OF_THE_WIRE | NAMED_BY_TRITON:
                places[name].append(path)
    assert repeated(places) == {}


def test_a_file_name_occurs_once():
    places = defaultdict(list)
    for path in sources():
        if path.name not in SAME_FILE_NAMES and path.parent.name != "cli":
            places[path.name.lstrip("_")].append(path)
    assert repeated(places) == {}
