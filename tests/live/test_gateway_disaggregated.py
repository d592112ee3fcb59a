"""A gateway before context and generation servers, each a tritonserver, of which one of each is killed under load."""

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance.running import gateway
from support.gateway_load import Outcomes, load
from support.restarted_server import RestartedServer, fleet, fleet_of, up
from support.scraping import MODEL, settled, value
from support.servers import build, change_yaml, shared_repository
from support.waiting import wait_for
from support.web import web

pytestmark = pytest.mark.slow

HELD = frozenset({**MODEL, "name": "held_contexts"}.items())
NUM_REQUESTS = int(os.environ.get("GATEWAY_REQUESTS", "2000"))
FEW_REQUESTS = 200


@dataclass
class Pairs:
    """Two servers of each role, with the same engine."""

    engine: str
    num_requests: int
    context: list[RestartedServer]
    generation: list[RestartedServer]

    @property
    def all(self) -> list[RestartedServer]:
        return [*self.context, *self.generation]

    @property
    def urls(self) -> set[str]:
        return {server.process.http_url for server in self.all}

    @property
    def options(self) -> tuple[str, ...]:
        """The gateway's options beside --server."""
        return tuple(word for server in self.context for word in ("--context-server", server.line.strip()))


@pytest.fixture(
    scope="module",
    params=[
        ("simulated", FEW_REQUESTS),
        *(
            pytest.param((engine, NUM_REQUESTS), marks=pytest.mark.nightly)
            for engine in ("simulated", "1.2.1", "1.2.0", "1.1.0", "1.0.0")
        ),
    ],
    ids=lambda param: "-".join(map(str, param)),
)
def pairs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    """Servers with the simulated engine, or with the stand-in of a release of TensorRT-LLM."""
    engine, num_requests = request.param
    folder = tmp_path_factory.mktemp("pairs")
    repositories = [_repository(folder / str(number), engine, is_context=number < 2) for number in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STANDIN_TOKENS_PER_S", "500")
        with fleet(repositories) as servers:
            yield Pairs(engine, num_requests, servers[:2], servers[2:])


def _repository(folder: Path, engine: str, *, is_context: bool) -> Path:
    if engine != "simulated":
        return shared_repository(folder, engine, is_context=is_context)
    return _simulated(folder, pace="real", speed=10)


def _simulated(folder: Path, **options: object) -> Path:
    repository = build(folder, "tiny", "--engine", "simulated")
    change_yaml(repository / "tensorrt_llm/1/model.yaml", engine_options=options)
    return repository


def held(server: RestartedServer) -> dict[str, float]:
    """What a server holds of requests."""
    series = settled(server.process)
    found = {name: value(series, name) for name in ("inflight_sequences", "kv_cache_used_blocks")}
    return {**found, "held_contexts": series.get(("engine_stat", HELD), 0)}


def test_one_of_each_is_killed_under_load(pairs: Pairs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generation = [server.line.strip() for server in pairs.generation]
    log = tmp_path / "log"
    access_log = tmp_path / "access.jsonl"
    options = (*pairs.options, "--access-log", str(access_log))
    with gateway(*generation, options=options, log=log) as address, ThreadPoolExecutor(1) as pool:
        wait_for(lambda: up(address) == pairs.urls, lambda: fleet_of(address))
        [model] = web.get(f"{address}/v1/models").json()["data"]
        outcomes = Outcomes()

        def has_ended(share: float) -> bool:
            return outcomes.ended > share * pairs.num_requests or loading.done()

        has_tools = pairs.engine == "simulated"
        loading = pool.submit(
            lambda: asyncio.run(load(address, model["id"], pairs.num_requests, outcomes, has_tools=has_tools))
        )
        try:
            for share, victim in ((0.15, pairs.context[0]), (0.4, pairs.generation[0])):
                wait_for(lambda share=share: has_ended(share))
                victim.kill()
                victim.start_again()
                assert victim.process.wait_until_ready()
                wait_for(lambda: up(address) == pairs.urls, lambda: fleet_of(address))
        finally:
            loading.result()
        with capsys.disabled():
            print(f"\n{outcomes.table()}")
        assert outcomes.ended == sum(outcomes.counts.values()) == pairs.num_requests
        assert outcomes.strange == []
        assert outcomes.of("answered") > 0.65 * pairs.num_requests
        for server in pairs.all:
            wait_for(lambda server=server: not any(held(server).values()), lambda server=server: held(server))
        assert '"context_server":"http' in access_log.read_text()


@pytest.mark.nightly
def test_a_context_server_whose_kv_caches_nobody_fetches_is_found(tmp_path: Path) -> None:
    """It says that it is ready, and computes nothing until one of them is fetched."""
    sides = (
        _simulated(tmp_path / "context", kv_cache_tokens=64, tokens_per_block=4),
        _simulated(tmp_path / "generation"),
    )
    with ExitStack() as stack:
        context, generation = stack.enter_context(fleet(sides))
        handovers = [_generated(context, request_type="context_only") for _ in range(16)]  # a block for each
        options = ("--context-server", context.line.strip())
        address = stack.enter_context(gateway(generation.line.strip(), options=options, log=tmp_path / "log"))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        [model] = web.get(f"{address}/v1/models").json()["data"]

        def ask() -> int:
            body = {"model": model["id"], "prompt": "Why is the sky blue?", "max_tokens": 2}
            return web.post(f"{address}/v1/completions", json=body).status_code

        def seen(key: str) -> object:
            return fleet_of(address)[context.process.http_url][key]

        assert seen("state") == "up"
        waiting = pool.submit(ask)
        wait_for(lambda: seen("avoided"), lambda: fleet_of(address))
        wait_for(lambda: seen("state") == "down", lambda: fleet_of(address))
        assert "no token within 30 s" in str(seen("reason"))
        assert ask() == 200
        assert not waiting.done()
        for handover in handovers:
            _generated(generation, request_type="generation_only", context_phase_params=handover)
        assert waiting.result() == 200
        wait_for(lambda: seen("state") == "up", lambda: fleet_of(address))
        for server in (context, generation):
            wait_for(lambda server=server: not any(held(server).values()), lambda server=server: held(server))


def _generated(server: RestartedServer, **inputs: object) -> object:
    """What a server hands on, if it does, after it has had a prompt and a token that fit into one block."""
    body = {"text_input": ".", "max_tokens": 1, **inputs}
    response = web.post(f"{server.process.http_url}/v2/models/tensorrt_llm/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json().get("context_phase_params")
