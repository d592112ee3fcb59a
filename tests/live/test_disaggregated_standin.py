"""A request that a context and a generation server share, on the stand-in of each release of TensorRT-LLM.

The servers are real tritonservers.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deepseek_triton_tools.server.server_process import ServerProcess
from support.joined import PATH, context_leg, generation_body, joined, stream, text
from support.scraping import published, value
from support.servers import shared_repository, standin_repository
from support.waiting import PATIENCE_S, wait_for

BODIES = [
    {"text_input": "Why is the sky blue?", "max_tokens": 40, "sampling_param_temperature": 0},
    {"text_input": "Why is the sky blue?", "max_tokens": 40, "sampling_param_seed": 11},
    {"text_input": "Why is the sky blue?", "max_tokens": 1, "sampling_param_temperature": 0},
    {"text_input": "Why is the sky blue?", "sampling_param_temperature": 0},
]
"""The last one ends by itself."""


class Servers:
    """A context and a generation server."""

    def __init__(self, context: ServerProcess, generation: ServerProcess) -> None:
        self.context = context
        self.generation = generation

    def assert_nothing_is_held(self) -> None:
        for server in (self.context, self.generation):
            wait_for(lambda server=server: blocks(server) == 0, lambda server=server: blocks(server))


def blocks(server: ServerProcess) -> float:
    """Return the KV blocks in use, as last published."""
    return value(published(server, lambda series: True), "kv_cache_used_blocks")


@pytest.fixture(scope="module")
def paced() -> Iterator[None]:
    """Tokens come slowly enough for a stop request to come before the last."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STANDIN_TOKENS_PER_S", "500")
        yield


@pytest.fixture(
    scope="module",
    params=["1.2.1", *(pytest.param(release, marks=pytest.mark.nightly) for release in ("1.2.0", "1.1.0", "1.0.0"))],
)
def pair(request: pytest.FixtureRequest, paced: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("pair")
    with (
        ServerProcess.serving(shared_repository(folder / "context", request.param, is_context=True)) as context,
        ServerProcess.serving(shared_repository(folder / "generation", request.param, is_context=False)) as generation,
    ):
        yield Servers(context, generation)


@pytest.mark.parametrize("body", BODIES, ids=["greedy", "seeded", "one token", "its own end"])
def test_two_servers_give_the_answer_of_one(pair: Servers, body: dict[str, Any]) -> None:
    alone = list(stream(pair.generation, body))
    both = joined(pair.context, pair.generation, body)

    assert both.text == text(alone)
    assert text(both.generation).startswith(text(both.context)), "the context server shows what is certain"
    assert both.last["finish_reason"] == alone[-1]["finish_reason"]
    assert num_tokens(both.generation) == num_tokens(alone)
    pair.assert_nothing_is_held()


def num_tokens(chunks: list[dict[str, Any]]) -> int:
    return sum(chunk.get("num_output_tokens", 0) for chunk in chunks)


def test_a_kv_cache_waits_for_its_generation_server_and_is_fetched_once(pair: Servers) -> None:
    context = context_leg(pair.context, BODIES[0])
    wait_for(lambda: blocks(pair.context) > 0)
    once = list(stream(pair.generation, generation_body(BODIES[0], context)))
    pair.assert_nothing_is_held()

    *_, last = stream(pair.generation, generation_body(BODIES[0], context))
    assert last["error"].startswith("[E_CONTEXT_LOST] ")
    again = list(stream(pair.generation, generation_body(BODIES[0], context, request_type="context_and_generation")))
    assert again[-1]["finish_reason"] == once[-1]["finish_reason"]
    assert num_tokens(again) == num_tokens(once)


def test_a_client_that_gives_up_between_the_legs_frees_the_context(pair: Servers) -> None:
    context = context_leg(pair.context, BODIES[0])
    (only,) = stream(pair.generation, generation_body(BODIES[0], context, max_tokens=1))
    assert only["finish_reason"] == "length"
    pair.assert_nothing_is_held()


def test_a_stop_request_ends_the_answer(pair: Servers) -> None:
    long = {**BODIES[0], "max_tokens": 20_000, "sampling_param_ignore_eos": True}
    body = {**generation_body(long, context_leg(pair.context, long)), "id": "job"}
    chunks = stream(pair.generation, body)
    next(chunks)
    address = f"{pair.generation.http_url}{PATH.removesuffix('_stream')}"
    httpx.post(address, json={"id": "job", "stop": True}, timeout=PATIENCE_S)
    *_, last = chunks
    assert last["finish_reason"] == "cancelled"
    pair.assert_nothing_is_held()


def test_a_context_server_that_is_killed_loses_what_it_holds(tmp_path: Path) -> None:
    with ServerProcess.serving(shared_repository(tmp_path / "generation", "1.2.1", is_context=False)) as generation:
        with ServerProcess.serving(shared_repository(tmp_path / "context", "1.2.1", is_context=True)) as context:
            handed_over = context_leg(context, BODIES[0])
            assert context.pid is not None
            os.kill(context.pid, signal.SIGKILL)
            context.wait()
        *_, last = stream(generation, generation_body(BODIES[0], handed_over))
        assert last["error"].startswith("[E_CONTEXT_LOST] ")
        assert text(list(stream(generation, BODIES[0])))


def test_a_server_without_a_transceiver_says_how_to_get_one(tmp_path: Path) -> None:
    with ServerProcess.serving(standin_repository(tmp_path / "alone")) as server:
        *_, last = context_leg(server, BODIES[0])
    assert last["error"].startswith("[E_UNSUPPORTED] request_type: model.yaml has no cache_transceiver_config")
