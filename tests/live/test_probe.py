"""`deepseek-triton probe` against real servers, over HTTP and gRPC."""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from deepseek_triton_client import Client, ModelNotReady, Retries
from deepseek_triton_tools.server.server_process import ServerProcess
from support.commands import run_command
from support.servers import url
from support.waiting import wait_for
from support.web import web


def probe(*argv):
    done = run_command("probe", *argv)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(params=["http", "grpc"])
def scheme(request):
    return request.param


def test_a_server_that_serves(tiny_server, scheme):
    address = url(tiny_server, scheme)

    assert probe("live", address) == (0, f"{address}: live\n")
    assert probe("ready", address) == (0, f"{address}: ready\n")
    code, line = probe("generate", address)
    assert (code, line.startswith(f"{address}: generates: a token in ")) == (0, True), line
    assert probe("generate", address, "--quiet") == (0, "")


def test_json_has_the_answer_whatever_it_is(tiny_server, scheme):
    address = url(tiny_server, scheme)
    asked = {"yes": [address], "no": [address, "--model", "x"], "unreachable": [f"{scheme}://127.0.0.1:1"]}
    for answer, argv in asked.items():
        done = run_command("probe", "ready", *argv, "--json")
        (line,) = done.stdout.splitlines()
        document = json.loads(line)

        assert done.stderr == ""
        told = [document[name] for name in ("schema", "url", "question")]
        assert told == ["deepseek-triton/probe/1", argv[0], "ready"]
        assert (document["answer"], document["exit_code"]) == (answer, done.returncode)
        assert (document["detail"] == "ready") == (answer == "yes")
        assert document["seconds"] >= 0


def test_as_a_process_a_line_that_nobody_can_take_changes_no_answer(tiny_server):
    command = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "probe", "live", url(tiny_server, "http")]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0
    assert done.stderr == "the output can't be written: No space left on device\n"


def test_a_server_without_the_model(tiny_server, scheme):
    address = url(tiny_server, scheme)

    assert probe("live", address, "--model", "other")[0] == 0
    for question in ("ready", "generate"):
        code, line = probe(question, address, "--model", "other")
        assert code == 1, line
        assert line.count("\n") == 1


def test_a_model_that_is_not_loaded(loaded_server):
    server = loaded_server
    wait_for(lambda: probe("ready", url(server, "http"))[0] == 0)
    web.post(f"{server.http_url}/v2/repository/models/tensorrt_llm/unload").raise_for_status()
    wait_for(lambda: probe("ready", url(server, "http"))[0] == 1)
    for address in (url(server, "http"), url(server, "grpc")):
        for question in ("ready", "generate"):
            code, line = probe(question, address)
            assert (code, line.startswith(f"{address}: not ready: ")) == (1, True), line
        with Client(address, retries=Retries(attempts=1)) as client, pytest.raises(ModelNotReady) as caught:
            client.generate("hello")
        assert caught.value.unprocessed
        assert caught.value.message.endswith("has no available versions")


def test_nobody_there(scheme):
    address = f"{scheme}://127.0.0.1:1"
    for question in ("live", "ready", "generate"):
        code, line = probe(question, address)
        assert code == 3, line
        assert line.count("\n") == 1
        assert line.startswith(f"{address}: nobody answers: ")
        assert line.count(address) == 1


@pytest.mark.parametrize(
    ("scheme", "port", "code", "cause"),
    [
        ("http", "grpc_port", 1, "it is HTTP/2, so this is a gRPC port: grpc:// instead of http://"),
        ("http", "metrics_port", 1, "an empty answer, as Triton's metrics port gives (8002 by default)"),
        ("grpc", "http_port", 3, "does this port speak HTTP (http://)?"),
        ("grpc", "metrics_port", 3, "does this port speak HTTP (http://)?"),
        ("https", "http_port", 3, "a port without TLS has http:// or grpc://"),
        ("grpcs", "grpc_port", 3, "a port without TLS has http:// or grpc://"),
        ("grpcs", "http_port", 3, "a port without TLS has http:// or grpc://"),
    ],
)
def test_another_port_of_the_server(tiny_server, scheme, port, code, cause):
    address = f"{scheme}://127.0.0.1:{getattr(tiny_server, port)}"
    for question in ("live", "ready", "generate"):
        found, line = probe(question, address)
        assert (found, cause in line) == (code, True), line
        assert line.count("\n") == 1
        assert line.startswith(f"{address}: ")


def test_another_web_server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        answers = [
            probe(question, f"http://127.0.0.1:{pages.server_port}") for question in ("live", "ready", "generate")
        ]
        pages.shutdown()
    assert all(code == 1 and "this is not Triton's HTTP port (8000 by default)" in line for code, line in answers), (
        answers
    )


def test_a_server_that_is_full_is_healthy_while_others_get_tokens(small_server, scheme):
    address = url(small_server, scheme)
    full = ["generate", address, "--model-version", "1", "--metrics-url"]
    with Client(address, model_version="1") as client, client.stream("a", max_tokens=2000, ignore_eos=True) as stream:
        next(stream)
        code, line = probe(*full, small_server.metrics_url)
        assert (code, "generates for others, and is full: " in line) == (0, True), line

        for unknown in ([*full, f"{small_server.metrics_url}-elsewhere"], full[:-1]):
            code, line = probe(*unknown)
            assert code == 0, line
        assert "--metrics-url: " in line


@pytest.mark.nightly
def test_a_server_that_hangs(small_repository):
    """Stopped by SIGSTOP: its sockets still take connections."""
    asked = [(question, scheme) for question in ("live", "ready", "generate") for scheme in ("http", "grpc")]
    with ServerProcess.serving(small_repository) as server:
        os.kill(server.pid, signal.SIGSTOP)
        try:
            for question, scheme in asked:
                address = url(server, scheme)
                assert probe(question, address, "--deadline", "0.5") == (4, f"{address}: no answer within 0.5 s\n")
        finally:
            os.kill(server.pid, signal.SIGCONT)


def test_a_command_line_that_makes_no_sense(subtests):
    for argv, told in [
        (["alive", "http://localhost"], "there is no alive; did you mean live?"),
        (["live", "localhost", "--url", "node1"], "expected one URL, got 2"),
        (["live", "ftp://localhost"], "ftp://"),
        (["live", "http://localhost", "--deadline", "0"], "expected a number of seconds above 0"),
        (["live", "http://localhost", "--token-file", "/no/such"], "the token can't be read from /no/such"),
    ]:
        with subtests.test(" ".join(argv)):
            code, text = probe(*argv)
            assert code == 2
            assert told in text
