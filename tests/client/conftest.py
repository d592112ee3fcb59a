"""Fixtures: the scripted servers."""

import pytest

from support.grpc_server import GrpcServer
from support.http_server import HttpServer


@pytest.fixture
def http_server():
    server = HttpServer()
    yield server
    server.stop()


@pytest.fixture
def grpc_server():
    server = GrpcServer()
    yield server
    server.stop()
