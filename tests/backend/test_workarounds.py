"""Work-arounds for the containers' faults, against fake packages in a folder."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deepseek_backend import workarounds
from deepseek_triton_build.catalog import load_release

MODULE = "openai.types.responses.response_content_part_added_event"
NAME = "PartReasoningText"
RECORD = load_release("1.2.1").record

OLD = "class ResponseContentPartAddedEvent: ...\n"
NEW = OLD + "class PartReasoningText: ...\n"
TENSORRT_LLM = f"from {MODULE} import {NAME}\n__version__ = '1.2.1'\n"


def write_package(root: Path, name: str, source: str) -> None:
    path = root / name.replace(".", "/")
    path.mkdir(parents=True, exist_ok=True)
    (path / "__init__.py").write_text(source)


def write_openai(root: Path, event_module: str) -> None:
    write_package(root, "openai", "class BaseModel:\n    pass\n")
    write_package(root, "openai.types", "")
    write_package(root, "openai.types.responses", "")
    (root / (MODULE.replace(".", "/") + ".py")).write_text(event_module)


@pytest.fixture
def fake_openai(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Make an openai importable whose event module has the given source."""
    with mock.patch.object(sys, "path", [str(tmp_path), *sys.path]), mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "openai"]:
            del sys.modules[name]

        def make(event_module: str) -> None:
            write_openai(tmp_path, event_module)
            importlib.invalidate_caches()

        yield make


def test_a_missing_name_is_supplied_and_reported(
    fake_openai: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    fake_openai(OLD)
    with caplog.at_level(logging.WARNING):
        assert workarounds.apply_quirks(RECORD) == [f"{MODULE}.{NAME}"]
    supplied = getattr(importlib.import_module(MODULE), NAME)
    assert issubclass(supplied, importlib.import_module("openai").BaseModel)
    assert supplied.__annotations__ == {"text": str, "type": str}
    assert supplied.__module__ == MODULE
    assert NAME in caplog.text
    assert "1.107.3" in caplog.text


def test_applying_twice_supplies_once(fake_openai: Callable[[str], None]) -> None:
    fake_openai(OLD)
    workarounds.apply_quirks(RECORD)
    first = getattr(importlib.import_module(MODULE), NAME)
    assert workarounds.apply_quirks(RECORD) == []
    assert getattr(importlib.import_module(MODULE), NAME) is first


def test_a_newer_package_is_left_alone(fake_openai: Callable[[str], None]) -> None:
    fake_openai(NEW)
    before = getattr(importlib.import_module(MODULE), NAME)
    assert workarounds.apply_quirks(RECORD) == []
    assert getattr(importlib.import_module(MODULE), NAME) is before


@pytest.mark.usefixtures("fake_openai")
def test_without_the_package_nothing_happens() -> None:
    """The fixture hides an installed openai only by not writing one; none is installed for these tests."""
    assert workarounds.apply_quirks(RECORD) == []


def test_a_release_without_quirks_needs_nothing() -> None:
    assert workarounds.apply_quirks(load_release("1.1.0").record) == []


def test_a_pydantic_base_makes_a_real_model(fake_openai: Callable[[str], None]) -> None:
    """openai's BaseModel is pydantic's."""
    pytest.importorskip("pydantic")
    fake_openai(OLD)
    vars(importlib.import_module("openai"))["BaseModel"] = importlib.import_module("pydantic").BaseModel
    workarounds.apply_quirks(RECORD)
    part = getattr(importlib.import_module(MODULE), NAME)(text="hm", type="reasoning_text")
    assert part.model_dump() == {"text": "hm", "type": "reasoning_text"}


@pytest.fixture
def container(tmp_path: Path) -> Path:
    """Make a container's state: a generated version folder, an old openai, a tensorrt_llm that needs a newer one."""
    backend = Path(workarounds.__file__).parent
    shutil.copytree(
        backend, tmp_path / "1" / "deepseek_backend", ignore=shutil.ignore_patterns("__pycache__", "engines")
    )
    (tmp_path / "1" / "release.yaml").write_text(load_release("1.2.1").text)
    site = tmp_path / "site"
    write_openai(site, OLD)
    write_package(site, "tensorrt_llm", TENSORRT_LLM)
    (site / "sitecustomize.py").write_text("import sys; sys.the_containers_own = True\n")
    return tmp_path


def run_worker(container: Path, code: str, *, overlay: bool) -> subprocess.CompletedProcess[str]:
    path = [str(container / "1" / "deepseek_backend" / "process" / "overlay")] * overlay + [str(container / "site")]
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=container, check=False
    )


def test_a_worker_fails_without_the_overlay_and_starts_with_it(container: Path) -> None:
    code = "import tensorrt_llm; print(tensorrt_llm.__version__)"
    without = run_worker(container, code, overlay=False)
    assert NAME in without.stderr
    assert without.returncode != 0
    with_overlay = run_worker(container, code, overlay=True)
    assert with_overlay.returncode == 0, with_overlay.stderr
    assert with_overlay.stdout == "1.2.1\n"
    assert f"supplied {MODULE}.{NAME}" in with_overlay.stderr


def test_the_overlay_costs_other_processes_nothing_and_hides_nothing(container: Path) -> None:
    code = "import sys; print(sys.the_containers_own, 'yaml' in sys.modules, 'openai' in sys.modules)"
    result = run_worker(container, code, overlay=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "True False False\n"
    assert result.stderr == ""
