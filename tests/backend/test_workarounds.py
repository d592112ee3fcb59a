"""Work-arounds for the containers' faults, against fake packages in a folder."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from deepseek_backend import release
from deepseek_triton_build.catalog import load_release

MODULE = "openai.types.responses.response_content_part_added_event"
NAME = "PartReasoningText"
RECORD = load_release("1.2.1").record

OLD = "class ResponseContentPartAddedEvent: ...\n"
NEW = OLD + "class PartReasoningText: ...\n"
TENSORRT_LLM = f"from {MODULE} import {NAME}\n__version__ = '1.2.1'\n"


def write_package(root, name, source):
    path = root / name.replace(".", "/")
    path.mkdir(parents=True, exist_ok=True)
    (path / "__init__.py").write_text(source)


def write_openai(root, event_module):
    write_package(root, "openai", "class BaseModel:\n    pass\n")
    write_package(root, "openai.types", "")
    write_package(root, "openai.types.responses", "")
    (root / (MODULE.replace(".", "/") + ".py")).write_text(event_module)


@pytest.fixture
def fake_openai(tmp_path):
    """Make an openai importable whose event module has the given source."""
    with mock.patch.object(sys, "path", [str(tmp_path), *sys.path]), mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "openai"]:
            del sys.modules[name]

        def make(event_module):
            write_openai(tmp_path, event_module)
            importlib.invalidate_caches()

        yield make


def name_of_openai():
    return getattr(importlib.import_module(MODULE), NAME)


def test_a_missing_name_is_supplied_once_and_reported(fake_openai, caplog):
    fake_openai(OLD)
    assert release.apply_quirks(RECORD) == [f"{MODULE}.{NAME}"]
    supplied = name_of_openai()
    assert issubclass(supplied, importlib.import_module("openai").BaseModel)
    assert (supplied.__annotations__, supplied.__module__) == ({"text": str, "type": str}, MODULE)
    assert NAME in caplog.text
    assert "1.107.3" in caplog.text
    assert release.apply_quirks(RECORD) == []
    assert name_of_openai() is supplied


def test_a_newer_package_is_left_alone(fake_openai):
    assert release.apply_quirks(RECORD) == [], "no package"
    fake_openai(NEW)
    before = name_of_openai()
    assert release.apply_quirks(RECORD) == []
    assert name_of_openai() is before
    assert release.apply_quirks(load_release("1.1.0").record) == [], "a release without quirks"


@pytest.fixture
def container(tmp_path):
    """Make a container's state: a generated version folder, an old openai, a tensorrt_llm that needs a newer one."""
    ignored = shutil.ignore_patterns("__pycache__", "engines")
    shutil.copytree(Path(release.__file__).parent, tmp_path / "1" / "deepseek_backend", ignore=ignored)
    (tmp_path / "1" / "release.yaml").write_text(load_release("1.2.1").text)
    site = tmp_path / "site"
    write_openai(site, OLD)
    write_package(site, "tensorrt_llm", TENSORRT_LLM)
    (site / "sitecustomize.py").write_text("import sys; sys.the_containers_own = True\n")
    return tmp_path


def run_worker(container, code, *, overlay):
    path = [str(container / "1" / "deepseek_backend" / "process" / "overlay")] * overlay + [str(container / "site")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=container, check=False
    )


@pytest.mark.slow
def test_a_worker_fails_without_the_overlay_and_starts_with_it(container):
    code = "import tensorrt_llm; print(tensorrt_llm.__version__)"
    without = run_worker(container, code, overlay=False)
    assert NAME in without.stderr
    assert without.returncode != 0
    with_overlay = run_worker(container, code, overlay=True)
    assert with_overlay.returncode == 0, with_overlay.stderr
    assert with_overlay.stdout == "1.2.1\n"
    assert f"supplied {MODULE}.{NAME}" in with_overlay.stderr


def test_the_overlay_costs_other_processes_nothing_and_hides_nothing(container):
    code = "import sys; print(sys.the_containers_own, 'yaml' in sys.modules, 'openai' in sys.modules)"
    result = run_worker(container, code, overlay=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "True False False\n"
    assert result.stderr == ""
