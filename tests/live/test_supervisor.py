"""A real tritonserver under supervise.py: whoever is killed, nothing stays, and what had been ready comes back."""

import contextlib
import json
import os
import secrets
import signal
from pathlib import Path

import pytest

from deepseek_triton_client import Client, Retries, ServerUnavailable
from deepseek_triton_tools.host.tritonserver import find_tritonserver
from support.servers import build, twin
from support.supervising import Supervised, free_ports, port_options, rank_of
from support.waiting import clients_leave, wait_for

STUB = "triton_python_backend_stub"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """In a folder whose path a shell would split and expand."""
    folder = tmp_path_factory.mktemp("supervised") / "it's (a) repository; $HOME"
    return build(folder, "tiny", "--engine", "simulated")


@pytest.fixture
def serve(tmp_path):
    """A supervisor of a real server, ready; its ports beside it."""
    with contextlib.ExitStack() as running:

        def start(repository, *options):
            ports, launch = free_ports(3), secrets.token_hex(4)
            found = find_tritonserver()
            named = zip(("http", "grpc", "metrics"), ports, strict=True)
            command = rank_of(
                str(found.binary),
                *found.extra_args,
                f"--model-repository={repository}",
                "--http-address=127.0.0.1",
                *(f"--{name}-port={port}" for name, port in named),
                "--exit-timeout-secs=10",
                f"--backend-config=python,shm-region-prefix-name=deepseek_triton_{launch}_",
            )
            own = ["--repository", str(repository), "--http-address", "127.0.0.1", "--exit-timeout", "10"]
            options = [*port_options(ports), *own, *options]
            supervised = Supervised(tmp_path, options, command, environment=found.environment, launch=launch)
            running.enter_context(supervised)
            wait_for(lambda: state(supervised) == ("ready", 0))
            assert shared_memory(supervised)
            return supervised, ports[0]

        yield start


def shared_memory(supervised):
    return list(Path("/dev/shm").glob(f"deepseek_triton_{supervised.launch}_*"))


def state(supervised):
    launches = json.loads(supervised.ask("list", "--json").stdout)
    return next(((one["state"], one["restarts"]) for one in launches if one["id"] == supervised.launch), None)


@pytest.mark.parametrize("victims", [("run",), ("rank",), ("run", "rank")], ids=" and ".join)
def test_a_killed_supervisor_takes_the_server_along(serve, repository, victims):
    supervised, _ = serve(repository, "--max-restarts", "0")
    pids = {"run": supervised.process.pid, "rank": supervised.ranks()[0]}
    for victim in victims:
        os.kill(pids[victim], signal.SIGKILL)

    wait_for(lambda: not supervised.others())
    supervised.wait()
    wait_for(lambda: not shared_memory(supervised))


def test_a_server_or_a_stub_that_is_killed_is_started_again(serve, repository):
    supervised, port = serve(repository)
    for restarts, victim in enumerate(("tritonserver", STUB), start=1):
        before = set(supervised.others())
        os.kill(supervised.named(victim), signal.SIGKILL)
        wait_for(lambda: state(supervised) == ("ready", restarts))  # noqa: B023
        assert {supervised.named("tritonserver"), supervised.named(STUB)}.isdisjoint(before)
    with Client(f"http://127.0.0.1:{port}") as client:
        assert client.generate("hello", max_tokens=3).num_output_tokens == 3
    clients_leave()
    supervised.process.terminate()

    assert supervised.wait() == 0
    assert not supervised.others()
    assert not shared_memory(supervised)


def test_open_requests_end_before_the_supervisor_does(serve, repository):
    supervised, port = serve(repository)
    with Client(f"http://127.0.0.1:{port}") as client, client.stream("tell me more", max_tokens=100) as stream:
        chunks = [next(iter(stream))]
        supervised.process.terminate()
        chunks += stream

    assert chunks[-1].finish_reason == "length"
    assert supervised.wait() == 0
    assert not supervised.others()


def test_the_cause_of_a_restart_is_the_engines_own(serve, tmp_path):
    repository = twin(tmp_path / "dying", engine_options={"fail_after": 20}, fatal_grace_s=0)
    supervised, port = serve(repository, "--max-restarts", "0")
    with Client(f"http://127.0.0.1:{port}", retries=Retries(attempts=1)) as client, pytest.raises(ServerUnavailable):
        client.generate("the one that sees it happen", max_tokens=100)

    assert supervised.wait() == 128 + signal.SIGKILL
    assert "the engine is dead" in supervised.said
