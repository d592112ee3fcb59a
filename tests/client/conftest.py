"""Fixtures: the scripted servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.grpc_server import GrpcServer
from support.http_server import HttpServer


@pytest.fixture
def http_server() -> Iterator[HttpServer]:
    server = HttpServer()
    yield server
    server.stop()


@pytest.fixture
def grpc_server() -> Iterator[GrpcServer]:
    server = GrpcServer()
    yield server
    server.stop()
