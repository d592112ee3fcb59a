"""A context and a generation server that share requests, asked by all four kinds of client."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepseek_triton_client import Completion, DeadlineExceeded, InvalidRequest, Timeouts
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.server.server_process import ServerProcess
from support.client_kinds import SCHEMES, STYLES, ClientKind, Loop
from support.scraping import scrape, settled, value
from support.servers import build, change_yaml
from support.waiting import wait_for

PRESET = "h200x8-r1-fp8-max-throughput"

REQUESTS: dict[str, dict[str, Any]] = {
    "seeded": {"temperature": 0.7, "seed": 11},
    "ids and counts": {"return_output_ids": True, "return_num_output_tokens": True, "return_num_input_tokens": True},
    "one token": {"max_tokens": 1},
    "stopped": {"stop": ["e "]},
    "echo": {"exclude_input_from_output": False},
    "reasoning": {"separate_reasoning": True, "max_tokens": 60},
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair") / "repository"
    return build(folder, "tiny", "--engine", "simulated", "--preset", PRESET)


@pytest.fixture(scope="module")
def context_server(repository: Path) -> Iterator[ServerProcess]:
    with ServerProcess.serving(repository) as server:
        yield server


@pytest.fixture(scope="module")
def generation_server(repository: Path) -> Iterator[ServerProcess]:
    with ServerProcess.serving(repository) as server:
        yield server


@pytest.fixture(scope="module")
def brief_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A generation server whose answers are shorter than the context server knows."""
    brief = build(tmp_path_factory.mktemp("brief") / "repository", "tiny", "--engine", "simulated", "--preset", PRESET)
    change_yaml(brief / "tensorrt_llm/1/model.yaml", default_max_tokens=8)
    with ServerProcess.serving(brief) as server:
        yield server


@pytest.fixture
def client(client_kind: ClientKind, context_server: ServerProcess, generation_server: ServerProcess) -> Iterator[Any]:
    with client_kind.client(generation_server, context_urls=client_kind.url(context_server)) as client:
        yield client


def all_kinds(loop: Loop) -> list[ClientKind]:
    return [ClientKind(scheme, style, loop) for scheme in SCHEMES for style in STYLES]


def untimed(completion: Completion) -> Completion:
    return replace(completion, time_to_first_token_s=None, total_s=0)


def assert_nothing_is_kept(server: ServerProcess) -> None:
    wait_for(lambda: value(scrape(server), "kv_cache_used_blocks") == 0, lambda: str(scrape(server)))


@pytest.mark.parametrize("fields", REQUESTS.values(), ids=REQUESTS)
def test_the_answer_is_that_of_one_server(
    client,
    client_kind,
    context_server,
    generation_server,
    fields: dict[str, Any],
):
    fields = {"max_tokens": 20, "request_id": "same", "temperature": 0.0, **fields}
    with client_kind.client(generation_server) as alone:
        whole = untimed(alone.generate("Why is the sky blue?", **fields))
        chat = untimed(alone.chat("Why is the sky blue?", **fields))

    assert untimed(client.generate("Why is the sky blue?", **fields)) == whole
    assert untimed(client.chat("Why is the sky blue?", **fields)) == chat
    with client.stream("Why is the sky blue?", **fields) as stream:
        chunks = list(stream)
        assert untimed(stream.completion()) == whole
    assert "".join(map(str, chunks)) == whole.text
    assert sum(chunk.num_output_tokens or 0 for chunk in chunks) == whole.num_output_tokens
    assert_nothing_is_kept(context_server)


def test_nothing_is_kept_for_a_caller_who_left(client_kind, context_server, generation_server):
    with client_kind.client(generation_server, context_urls=client_kind.url(context_server)) as client:
        for timeout_s in (0.005, 0.02, 0.05, 0.1):
            with pytest.raises(DeadlineExceeded):
                client.generate("Tell a story. " * 500, max_tokens=4000, timeouts=Timeouts(total=timeout_s))
        for taken in range(3):
            with client.stream("Tell a story. " * 500, max_tokens=4000) as stream:
                for _ in range(taken):
                    next(stream)

    for server in (context_server, generation_server):
        assert_nothing_is_kept(server)


def test_nothing_is_kept_for_a_request_that_the_generation_server_refuses(client_loop, context_server, brief_server):
    for kind in all_kinds(client_loop):
        with (
            kind.client(brief_server, context_urls=kind.url(context_server)) as client,
            pytest.raises(InvalidRequest, match="min_tokens: expected at most max_tokens, which is 8") as caught,
        ):
            client.generate("Why is the sky blue?", min_tokens=9)
        assert caught.value.url == kind.url(brief_server)

    for server in (context_server, brief_server):
        assert value(settled(server), "kv_cache_used_blocks") == 0


def test_bench_counts_the_tokens_of_a_pair_once(context_server, generation_server, capsys: pytest.CaptureFixture[str]):
    servers = (generation_server.http_url, "--context-url", context_server.http_url, "--metrics-url", "none")
    assert main(["bench", *servers, "--json", "--concurrency", "2", "--rounds", "2", "--isl", "40", "--osl", "9"]) == 0

    result = json.loads(capsys.readouterr().out)
    (run,) = result["points"][0]["runs"]
    figures = run["figures"]
    assert result["urls"] == [generation_server.http_url, context_server.http_url]
    assert (figures["completed"], figures["total_input_tokens"], figures["total_output_tokens"]) == (4, 160, 36)


def test_a_pair_answers_though_its_context_server_is_killed(client_loop, repository, generation_server):
    def ask(client: Any) -> tuple[str, str]:
        answer = client.generate("Why?", max_tokens=5, temperature=0)
        return answer.text, answer.url

    with ServerProcess.serving(repository) as killed, ExitStack() as stack:
        clients = [
            stack.enter_context(kind.client(generation_server, context_urls=kind.url(killed)))
            for kind in all_kinds(client_loop)
        ]
        before = [ask(client) for client in clients]
        killed.request_stop(signal.SIGKILL)
        killed.wait()
        assert [ask(client) for client in clients] == before
