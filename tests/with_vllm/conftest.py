"""vLLM itself in this process: its AsyncLLM and scheduler, with an executor that needs no GPU.

`make test-vllm` runs this folder in an environment of its own; where vLLM is not installed, it is left out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepseek_backend.config import parse_config
from deepseek_triton_build.data.vllm import load_vllm
from support.engine_driver import driven
from support.vllm_arguments import installed_version
from support.vllm_in_process import TINY, running_engine

HAS_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAS_VLLM else ["*"]


def pytest_configure(config: pytest.Config) -> None:
    """Let vLLM and its dependencies warn: most of it is not ours to mend."""
    config.addinivalue_line("filterwarnings", "default")


@pytest.fixture(scope="session")
def vllm_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """vLLM with the reference engine's model."""
    with running_engine(tmp_path_factory.mktemp("vllm")) as engine:
        yield engine


@pytest.fixture(scope="session")
def public_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The same, whose record knows another interface, so that vLLM's public way is taken."""
    record = yaml.safe_load(load_vllm(installed_version()).text)
    record["interfaces"]["vllm.v1.engine:EngineCoreOutput"] = ["something else"]
    with running_engine(tmp_path_factory.mktemp("public"), release=yaml.safe_dump(record)) as engine:
        yield engine


@pytest.fixture(scope="session")
def reference_engine() -> Iterator[Any]:
    document = {"model": str(TINY), "triton_config": {"engine": "reference"}}
    with driven(parse_config(document, version_dir=Path())) as driver:
        yield driver.engine
