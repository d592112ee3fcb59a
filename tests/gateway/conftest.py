"""A gateway over real sockets for the tests of a file, and tests that are coroutines."""

import asyncio
import inspect
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.asking import HELLO, LAST, MAX_BODY
from support.raw_triton import RawTriton, answer, gateway_before


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a coroutine in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(scope="module")
def served():
    options = {"max_body_bytes": MAX_BODY, "cors_origins": ("https://chat.example.com",)}
    with RawTriton().serving() as triton, gateway_before(triton, **options) as address:
        yield triton, address


@pytest.fixture
def triton(served):
    """The server behind `client`'s gateway. It says Hello."""
    served[0].clear()
    served[0].script = answer(HELLO, LAST)
    return served[0]


@pytest.fixture
def client(served, triton):
    with httpx.Client(base_url=served[1], timeout=60) as client:
        yield client


class Collector:
    """Takes spans as an OpenTelemetry collector does."""

    def __init__(self):
        spans = self.spans = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.path == "/v1/traces"
                spans.extend(s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()
