"""The gateway's processes: a worker that dies loses its own requests only, and a stop lets requests finish."""

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import trustme

from deepseek_triton_tools.gateway.guard import new_key
from gateway.asking import COMPLETION
from support.raw_triton import RawTriton, answer, event
from support.waiting import wait_for

PROGRAM = '''
import asyncio, os, signal, sys, types
from deepseek_triton_tools.gateway.serving import serve
from deepseek_triton_tools.gateway.settings import GatewaySettings, ModelSettings

def create_app(settings):
    """Answers with the process and its shared folder: at once, or when the file is there that the query names. `stuck`
    is for a request that goes on after it was cancelled."""
    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": message["type"] + ".complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": f"{os.getpid()} ".encode(), "more_body": True})
        try:
            awaited = scope["query_string"].decode()
            while awaited and not os.path.exists(awaited):
                await asyncio.sleep(0.01)
            last = str(settings.shared_folder)
        except asyncio.CancelledError:
            last = "stopped"
            if awaited == "stuck":
                await send({"type": "http.response.body", "body": b"stuck", "more_body": True})
                await asyncio.Event().wait()
        await send({"type": "http.response.body", "body": last.encode()})
    return app

# Workers run this file too.
module = types.ModuleType("deepseek_triton_tools.gateway.application")
module.create_app = create_app
sys.modules[module.__name__] = module
if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    port, workers, drain_s = map(int, sys.argv[1:])
    options = {"port": port, "workers": workers, "drain_s": drain_s, "upstream_headers": (("key", "secret"),)}
    wrong = os.path.join(os.path.dirname(__file__), "wrong")
    files = [wrong, f"{wrong} to renew"]
    serve(GatewaySettings((ModelSettings(("u",)),), **options), lambda new: filter(os.path.exists, files[: 1 + new]))
'''
NOTICE = "stopping: running requests may go on for 30 s"


class Gateway:
    def __init__(self, folder, workers, drain_s):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}/"
        (folder / "program.py").write_text(PROGRAM)
        self.released = folder / "released"
        self.folder = folder / "tmp"
        self.folder.mkdir()
        command = [sys.executable, str(folder / "program.py"), self.url.rpartition(":")[2].strip("/")]
        environment = os.environ | {"TMPDIR": str(self.folder)}
        command += [str(workers), str(drain_s)]
        settings = {"env": environment, "stderr": subprocess.PIPE, "start_new_session": True}
        self.process = subprocess.Popen(command, **settings)

    def ask(self):
        """The process that answers, and its shared folder. Waits for the start, and for one after a death."""
        for _ in range(600):
            try:
                pid, shared = httpx.get(self.url).text.split()
                return int(pid), shared
            except httpx.TransportError:
                assert self.process.poll() is None
                time.sleep(0.05)
        raise AssertionError("no answer")

    def listens(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(self.url.rpartition(":")[2].strip("/")))) == 0

    def workers(self, count):
        found = set()
        while len(found) < count:
            found.add(self.ask()[0])
        return found


@pytest.fixture
def start(tmp_path):
    gateways = []

    def begin(workers, drain_s=30):
        gateways.append(Gateway(tmp_path, workers, drain_s))
        return gateways[-1]

    yield begin
    for gateway in gateways:
        gateway.process.terminate()
        gateway.process.communicate()


@pytest.mark.slow
def test_a_dead_worker_loses_its_own_requests_only_and_is_replaced_once_another_can_start(start, tmp_path):
    gateway = start(2)
    folder = Path(gateway.ask()[1])
    before = gateway.workers(2)
    assert (folder.stat().st_mode & 0o777, b"secret" in (folder / "settings").read_bytes()) == (0o700, True)

    (wrong := tmp_path / "wrong").touch()
    Path(f"{wrong} to renew").touch()
    os.killpg(gateway.process.pid, signal.SIGHUP)  # as from a terminal
    assert f"{wrong}; {wrong} to renew" in gateway.process.stderr.readline().decode()

    with httpx.stream("GET", f"{gateway.url}?{gateway.released}") as response:
        chunks = response.iter_text()
        survivor = int(next(chunks))
        [victim] = before - {survivor}
        os.kill(victim, signal.SIGKILL)
        gateway.released.touch()
        rest = "".join(chunks)

    assert rest == str(folder)
    assert str(wrong) in gateway.process.stderr.readline().decode()
    wrong.unlink()
    assert re.search(rf" {victim} .*-9", gateway.process.stderr.readline().decode())
    after = gateway.workers(2)
    assert survivor in after
    assert victim not in after
    gateway.process.terminate()
    assert gateway.process.stderr.read().decode().count(NOTICE) == 1  # though nothing runs


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "number"), [(1, signal.SIGTERM), (1, signal.SIGHUP), (2, signal.SIGTERM)])
def test_a_stop_lets_requests_finish_takes_no_new_ones_and_leaves_no_file(start, workers, number):
    gateway = start(workers)
    gateway.workers(workers)

    with httpx.stream("GET", f"{gateway.url}?{gateway.released}") as response:
        chunks = response.iter_text()
        next(chunks)
        gateway.process.send_signal(number)
        if number == signal.SIGHUP:
            assert "--workers 2" in gateway.process.stderr.readline().decode()
        notice = gateway.process.stderr.readline().decode()
        wait_for(lambda: not gateway.listens())
        gateway.released.touch()
        assert "".join(chunks)

    expected = NOTICE + ("; Ctrl-C again ends them at once" if workers == 1 else "")
    assert notice.partition(" INFO ")[2].strip() == expected
    assert (gateway.process.stderr.read(), gateway.process.wait()) == (b"", 0)
    assert list(gateway.folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("awaited", ["never", "stuck"])
def test_a_second_ctrl_c_stops_at_once_and_a_third_drops_what_does_not_end(start, awaited):
    gateway = start(1, drain_s=600)
    assert gateway.ask()[1] == "None"
    assert list(gateway.folder.iterdir()) == []

    with httpx.stream("GET", f"{gateway.url}?{awaited}") as response:
        chunks = response.iter_text()
        next(chunks)
        gateway.process.send_signal(signal.SIGINT)
        assert "Ctrl-C again ends them at once" in gateway.process.stderr.readline().decode()
        gateway.process.send_signal(signal.SIGINT)
        if awaited == "never":
            assert "".join(chunks) == "stopped"
        else:
            assert next(chunks) == "stuck"
            gateway.process.send_signal(signal.SIGINT)
            with pytest.raises(httpx.RemoteProtocolError):
                next(chunks)

    if awaited == "never":
        assert gateway.process.stderr.read() == b""
    assert gateway.process.wait() == 0


def until_stopped(wire):
    wire.head()
    wire.chunk(event(text_output="Hello", num_input_tokens=3, num_output_tokens=2))
    wire.wait_for_stop()
    wire.chunk(event(finish_reason="cancelled"))
    wire.chunk(b"")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_the_verb_serves_https_and_stops(tmp_path, workers):
    """A stream that outlasts the drain is stopped: what it used is counted before the table of limits is closed, its
    server is told, and its client too."""
    authority, context = trustme.CA(), ssl.create_default_context()
    authority.configure_trust(context)
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(tmp_path / "pem")
    (ann, of_ann), (bob, of_bob) = new_key("ann"), new_key("bob")
    (tmp_path / "keys").write_text(f"{of_ann} requests_per_minute=3 admin=yes\n{of_bob} tokens_per_minute=1000\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "gateway", "--config", str(tmp_path / "yaml")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Without idle connections, because uvicorn waits at a stop until their owners have said goodbye in TLS. And a new
    # connection for each request lets all workers get some.
    limits = httpx.Limits(max_keepalive_connections=0)
    with RawTriton().serving() as triton:
        triton.script = answer(event(text_output="Paris", finish_reason="stop"))
        (tmp_path / "yaml").write_text(
            f"server: {triton.url}\nport: {port}\nworkers: {workers}\nkeys: {tmp_path / 'keys'}\naccess-log: '-'\n"
            f"tls-certificate: {tmp_path / 'pem'}\nmetrics-port: none\ndrain-seconds: 1\n"
        )
        with (
            subprocess.Popen(command, text=True, **pipes) as process,
            httpx.Client(base_url=f"https://localhost:{port}", verify=context, limits=limits, timeout=60) as client,
        ):

            def is_ready():
                assert process.poll() is None
                with suppress(httpx.TransportError):
                    return client.get("/ready").is_success
                return False

            wait_for(is_ready)
            headers = [{"Authorization": f"Bearer {key}"} for key in (ann, bob)]
            asked = {"prompt": "Hi", "max_tokens": 500}
            statuses = [client.post(COMPLETION, json=asked, headers=headers[0]).status_code for _ in range(8)]
            counted = client.get("/metrics").text
            num_workers = client.get("/fleet", headers=headers[0]).json()["workers"]
            triton.clear()
            triton.script = until_stopped
            asked = {"input": "Hi", "stream": True}
            with client.stream("POST", "/v1/responses", json=asked, headers=headers[1]) as response:
                lines = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: "))
                events = [next(lines)]
                process.terminate()
                events += lines
            printed, complaints = process.communicate()

    assert (process.returncode, "Traceback" in complaints, num_workers) == (0, False, workers), complaints
    assert sorted(statuses) == [200] * 3 + [429] * 5
    # Each of the workers has counted its own, and any of them tells the sum.
    assert re.search(r'gateway_requests_total\{.*status="200"\} 3.0', counted)
    assert re.search(r'gateway_requests_total\{.*status="429"\} 5.0', counted)
    assert printed.count('"error":"rate_limit_exceeded"') == 5
    assert (events[-1]["code"], events[-1]["sequence_number"]) == ("unavailable", len(events) - 1)
    [upstream_id] = [request["id"] for request in triton.asked]
    assert triton.stopped == [upstream_id]
    [logged] = [line for line in printed.splitlines() if '"key":"bob"' in line]
    assert '"prompt_tokens":3' in logged
    assert '"error":"unavailable"' in logged
