"""Fixtures of the engine tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from standin.harness import MakeEngine, engines


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[MakeEngine]:
    """Starts TensorRT-LLM engines on the stand-in; stops them at the end."""
    with engines(tmp_path) as make:
        yield make
