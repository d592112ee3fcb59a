"""A gateway before three tritonservers that join, are killed, freeze, come back and leave, while requests run."""

import asyncio
import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from conformance.running import gateway
from deepseek_triton_client import Metrics
from deepseek_triton_tools.server.server_process import ServerProcess
from support.gateway_load import Outcomes, load
from support.restarted_server import RestartedServer, fleet, fleet_of, up
from support.scraping import published, value
from support.server_processes import children_of
from support.servers import build, twin, url
from support.waiting import wait_for
from support.web import web

pytestmark = pytest.mark.slow

NUM_REQUESTS = int(os.environ.get("GATEWAY_REQUESTS", "10000"))
FEW_REQUESTS = 500
over_both = pytest.mark.parametrize("protocol", ["http", "grpc"])


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RestartedServer]]:
    folder = tmp_path_factory.mktemp("fleet")
    paced = {"engine_options": {"pace": "real", "speed": 10}}
    repositories = [twin(folder / str(number), **paced) for number in range(3)]
    with fleet(repositories) as servers:
        yield servers


@over_both
@pytest.mark.parametrize("num_requests", [FEW_REQUESTS, pytest.param(NUM_REQUESTS, marks=pytest.mark.nightly)])
def test_two_of_three_servers_are_killed_under_load(
    num_requests: int, protocol: str, servers: list[RestartedServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [url(server.process, protocol) for server in servers]
    listed = tmp_path / "servers"
    listed.write_text("".join(server.line_over(protocol) for server in servers[:2]))
    with gateway(f"file:{listed}", log=tmp_path / "log") as address, ThreadPoolExecutor(1) as pool:
        wait_for(lambda: up(address) == {*urls[:2]})
        listed.write_text("".join(server.line_over(protocol) for server in servers))
        wait_for(lambda: up(address) == {*urls})
        [model] = web.get(f"{address}/v1/models").json()["data"]

        outcomes = Outcomes()

        def under_way(share: float) -> bool:
            return outcomes.ended > share * num_requests or loading.done()

        loading = pool.submit(lambda: asyncio.run(load(address, model["id"], num_requests, outcomes)))
        try:
            for share, victims in ((0.15, servers[1:]), (0.5, servers[:2])):
                wait_for(partial(under_way, share))
                for victim in victims:
                    victim.kill()
                for victim in victims:
                    victim.start_again()
                for victim in victims:
                    assert victim.process.wait_until_ready()
                # Only when the gateway knows of it, else the next two would be all that it has.
                wait_for(lambda: up(address) == {*urls}, lambda: fleet_of(address))
        finally:
            loading.result()

        gateways_own = Metrics.parse(web.get(f"{address}/metrics").text)
        retries = gateways_own.value("deepseek_triton_gateway_retries_total")
        with capsys.disabled():
            print(f"\n{outcomes.table()}\nrequests sent to another server: {retries:.0f}")
        assert outcomes.ended == sum(outcomes.counts.values()) == num_requests
        assert outcomes.strange == []
        assert outcomes.of("answered") > 0.7 * num_requests
        assert retries

        nothing = [0, 0]
        wait_for(
            lambda: all(server["own"] == nothing for server in fleet_of(address).values()), lambda: fleet_of(address)
        )
        for server in servers:
            published(server.process, lambda series: value(series, "inflight_sequences") == 0)
        wait_for(lambda: all(server["others"] == nothing for server in fleet_of(address).values()))
        gateways_own = Metrics.parse(web.get(f"{address}/metrics").text)
        assert gateways_own.value("deepseek_triton_gateway_inflight_requests") <= 1  # that one may count itself


def test_a_server_that_is_taken_off_the_list_finishes_its_requests(
    servers: list[RestartedServer], tmp_path: Path
) -> None:
    urls = [server.process.http_url for server in servers]
    listed = tmp_path / "servers"
    listed.write_text(servers[0].line)
    body = {"prompt": "x", "max_tokens": 8_000, "ignore_eos": True, "stream": True}
    with gateway(f"file:{listed}", log=tmp_path / "log") as address, httpx.Client(base_url=address) as client:
        wait_for(lambda: up(address) == {urls[0]})
        [model] = client.get("/v1/models").json()["data"]
        with client.stream("POST", "/v1/completions", json={"model": model["id"], **body}, timeout=None) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            listed.write_text(servers[1].line)
            left = wait_for(lambda: (one := fleet_of(address).get(urls[0], {})).get("leaving") and one)
            assert left["own"][0] == 1
            wait_for(lambda: up(address) == {urls[1]})
            answer = client.post("/v1/completions", json={"model": model["id"], "prompt": "y", "max_tokens": 4})
            assert answer.status_code == 200
            assert [line for line in lines if line][-1] == "data: [DONE]"
        wait_for(lambda: fleet_of(address).keys() == {urls[1]})


def ask_all(address: str, prompts: Iterable[str]) -> list[int]:
    """The statuses of requests that run together. Each prompt has an order of servers of its own."""

    def ask(prompt: str) -> int:
        body = {"prompt": prompt, "max_tokens": 4}
        return web.post(f"{address}/v1/completions", json=body).status_code

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(ask, prompts))


@over_both
def test_requests_on_a_frozen_server_are_answered_by_another(
    protocol: str, servers: list[RestartedServer], tmp_path: Path
) -> None:
    urls = {url(server.process, protocol) for server in servers[:2]}
    lines = [server.line_over(protocol).strip() for server in servers[:2]]
    frozen = servers[0].process.pid
    assert frozen is not None
    with gateway(*lines, log=tmp_path / "log") as address:
        wait_for(lambda: up(address) == urls)
        os.kill(frozen, signal.SIGSTOP)
        try:
            statuses = ask_all(address, (f"question {number}" for number in range(16)))
        finally:
            os.kill(frozen, signal.SIGCONT)
        assert statuses == [200] * 16
        assert Metrics.parse(web.get(f"{address}/metrics").text).value("deepseek_triton_gateway_retries_total")
        wait_for(lambda: up(address) == urls)


@pytest.mark.nightly
@over_both
def test_a_server_whose_model_process_is_dead_gets_no_requests(
    protocol: str, servers: list[RestartedServer], tmp_path: Path
) -> None:
    """With `on_fatal: unready`, Triton says that the server is ready all the same."""
    repository = twin(tmp_path / "unready", on_fatal="unready")
    dead = RestartedServer(repository)
    try:
        lines = [server.line_over(protocol).strip() for server in (servers[0], dead)]
        with gateway(*lines, log=tmp_path / "log") as address:
            wait_for(lambda: len(up(address)) == 2)
            os.kill(children_of(dead.process.pid)[0], signal.SIGKILL)
            assert ask_all(address, (f"question {number}" for number in range(16))) == [200] * 16
            assert web.get(f"{dead.process.http_url}/v2/models/tensorrt_llm/ready").status_code == 200
            wait_for(lambda: up(address) == {url(servers[0].process, protocol)})
            wait_for(lambda: "Stub process" in fleet_of(address)[url(dead.process, protocol)]["reason"])
    finally:
        dead.stop()


@over_both
def test_a_server_that_is_told_to_exit_is_not_held_by_the_gateway(protocol: str, tmp_path: Path) -> None:
    """It waits until the last connection is closed, and ends with 1 if that takes too long."""
    repository = build(tmp_path / "tiny", "tiny", "--engine", "simulated")
    with (
        ServerProcess.serving(repository) as server,
        gateway(f"{url(server, protocol)}#metrics={server.metrics_port}", log=tmp_path / "log") as address,
    ):
        wait_for(lambda: up(address))
        assert ask_all(address, (f"question {number}" for number in range(16))) == [200] * 16
        server.request_stop()
        assert server.wait() == 0


@pytest.mark.nightly
@over_both
def test_a_server_with_a_restricted_api_wants_its_key(protocol: str, tmp_path: Path) -> None:
    repository = build(tmp_path / "restricted", "tiny", "--engine", "simulated")
    option = {"http": "--http-restricted-api", "grpc": "--grpc-restricted-protocol"}[protocol]
    # gRPC has a prefix of its own before the header's name.
    restricted = (f"{option}=inference,model-config:triton-key=secret",)
    (tmp_path / "key").write_text("secret\n")
    with ServerProcess.serving(repository, server_args=restricted) as server:
        line = f"{url(server, protocol)}#metrics={server.metrics_port}"
        name = "triton-grpc-protocol-triton-key" if protocol == "grpc" else "triton-key"
        options = ("--upstream-header", f"{name}=@{tmp_path / 'key'}")
        with gateway(line, log=tmp_path / "with", options=options) as address:
            wait_for(lambda: up(address))
            assert ask_all(address, ["question"]) == [200]
        with gateway(line, log=tmp_path / "without") as address:
            assert ask_all(address, ["question"]) == [503]
            assert "triton-key'" in fleet_of(address)[url(server, protocol)]["reason"]
