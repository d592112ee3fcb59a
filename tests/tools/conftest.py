"""Shared by the tests of the command line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.model_server import ModelServer


@pytest.fixture
def model_server() -> Iterator[ModelServer]:
    with ModelServer() as server:
        yield server
