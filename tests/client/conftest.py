"""Fixtures: the scripted servers, the two ways to run a transport, and certificates."""

import socket
import ssl

import grpc
import pytest
import trustme

from support.drivers import DRIVERS
from support.grpc_server import GrpcServer
from support.http_server import HttpServer

SERVERS = {"http": HttpServer, "grpc": GrpcServer}


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


@pytest.fixture(params=DRIVERS)
def driver(request):
    driver = DRIVERS[request.param]()
    yield driver
    driver.close()


@pytest.fixture(params=SERVERS)
def server(request):
    """Of either wire. Both have the same scripts: `replies`, `says` and `hangs`."""
    server = SERVERS[request.param]()
    yield server
    server.stop()


@pytest.fixture
def transport(driver, server):
    return driver.transport(server.url)


@pytest.fixture
def full_queue():
    """The port of a server whose queue has no room: connecting to it takes for ever."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        waiting = []
        for _ in range(4):  # Linux takes one more than it was told, and drops the rest silently
            each = socket.socket()
            each.setblocking(False)
            each.connect_ex(listening.getsockname())
            waiting.append(each)
        yield listening.getsockname()[1]
        for each in waiting:
            each.close()


@pytest.fixture(scope="session")
def authority():
    return trustme.CA()


@pytest.fixture(scope="session")
def pem(authority, tmp_path_factory):
    """PEM files: "ca", "other_ca", "client" (certificate and key in one), "certificate", "key", "garbage"."""
    folder = tmp_path_factory.mktemp("pem")
    client = authority.issue_cert("client@example.org")
    files = {
        "ca": authority.cert_pem.bytes(),
        "other_ca": trustme.CA().cert_pem.bytes(),
        "client": client.private_key_and_cert_chain_pem.bytes(),
        "certificate": b"".join(each.bytes() for each in client.cert_chain_pems),
        "key": client.private_key_pem.bytes(),
        "garbage": b"not PEM",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return {name: folder / name for name in files}


@pytest.fixture
def secure(authority):
    """Starts a server with a certificate for the host of its URL."""
    servers = []

    def start(scheme, *, mutual=False):
        certificate = authority.issue_cert("127.0.0.1" if scheme == "http" else "localhost")
        if scheme == "http":
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            certificate.configure_cert(tls)
            if mutual:
                authority.configure_trust(tls)
                tls.verify_mode = ssl.CERT_REQUIRED
        else:
            chain = b"".join(each.bytes() for each in certificate.cert_chain_pems)
            root = authority.cert_pem.bytes() if mutual else None
            tls = grpc.ssl_server_credentials([(certificate.private_key_pem.bytes(), chain)], root, mutual)
        servers.append(SERVERS[scheme](tls))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
