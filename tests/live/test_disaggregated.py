"""A request that a context and a generation server share, under real tritonservers: on the simulated engine, and on the
stand-in of each release of TensorRT-LLM."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from deepseek_triton_tools.server.server_process import ServerProcess
from support.joined import PATH, context_leg, generation_body, joined, stream, text
from support.restarted_server import fleet
from support.scraping import MODEL, published, value
from support.servers import shared_repository, twin
from support.waiting import wait_for
from support.web import web

SLOW_GBPS = 1e-6
"""A transfer then outlasts any test."""
SIMULATED = "simulated"
RELEASES = ("1.2.1", *(pytest.param(release, marks=pytest.mark.nightly) for release in ("1.2.0", "1.1.0", "1.0.0")))


def repository(folder: Path, **options: Any) -> Path:
    settings = {"tokens_per_block": 4, "text": "dictated", **options}
    return twin(folder, engine_options=settings, metrics_period_s=0.1)


class Pair(NamedTuple):
    context: ServerProcess
    generation: ServerProcess

    def assert_nothing_is_held(self) -> None:
        assert_nothing_is_held(self.context, self.generation)


@pytest.fixture(scope="module", params=[SIMULATED, *RELEASES])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    if engine == SIMULATED:
        sides = [repository(folder / side) for side in Pair._fields]
    else:
        sides = [shared_repository(folder / side, engine, is_context=side == "context") for side in Pair._fields]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STANDIN_TOKENS_PER_S", "500")  # a stop request comes before the last token
        with fleet(sides) as servers:
            yield Pair(*(server.process for server in servers))


HELD = "engine_stat", frozenset({**MODEL, "name": "held_contexts"}.items())


def held(server: ServerProcess) -> tuple[float, float]:
    """Return the contexts that the server holds, of which the stand-in does not tell, and the KV blocks in use, both as
    last published."""
    found = published(server, lambda series: "kv_cache_used_blocks" in {name for name, _ in series})
    return found.get(HELD, 0), value(found, "kv_cache_used_blocks")


def assert_nothing_is_held(*servers: ServerProcess) -> None:
    wait_for(lambda: all(held(server) == (0, 0) for server in servers), lambda: [held(server) for server in servers])


PROMPT = "Why is the sky blue?"
GREEDY = {"text_input": PROMPT, "max_tokens": 40, "sampling_param_temperature": 0}
CHAT = {"messages": json.dumps([{"role": "user", "content": PROMPT}])}
BODIES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "seeded": {"text_input": PROMPT, "max_tokens": 40, "temperature": 0.7, "seed": 11},
    "one token": {**GREEDY, "max_tokens": 1},
    "its own end": {"text_input": "<answer>one two three</answer>", "sampling_param_temperature": 0},
}
DICTATED: dict[str, dict[str, Any]] = {
    "chat": {**CHAT, "max_tokens": 40, "chat_template_kwargs": '{"thinking": true}', "separate_reasoning": True},
    "ended by the first token": {"text_input": "<answer></answer>"},
    "stop in the first": {"text_input": "<answer>abc def</answer>", "sampling_param_stop": ["c d"]},
    "stop within the first": {"text_input": "<answer>abc def</answer>", "sampling_param_stop": ["b"]},
    "no stop after all": {"text_input": "<answer>abc def</answer>", "sampling_param_stop": ["c x"]},
}
"""Answers that the simulated engine is told to give."""


def test_two_servers_give_the_answer_of_one(pair: Pair, engine: str, subtests: pytest.Subtests) -> None:
    for name, body in (BODIES | (DICTATED if engine == SIMULATED else {})).items():
        with subtests.test(name):
            asked = {"return_num_input_tokens": True, **body}
            alone = list(stream(pair.generation, asked))
            both = joined(pair.context, pair.generation, asked)

            for output in ("text_output", "reasoning_output"):
                assert text(both.generation, output) == text(alone, output)
                shown = text(both.context, output)
                assert text(both.generation, output).startswith(shown), "the context server shows what is certain"
            for output in ("finish_reason", "num_input_tokens"):
                assert both.last[output] == alone[-1][output]
            assert num_tokens(both.generation) == num_tokens(alone)
    pair.assert_nothing_is_held()


def num_tokens(chunks: list[dict[str, Any]]) -> int:
    return sum(chunk.get("num_output_tokens", 0) for chunk in chunks)


@pytest.mark.parametrize("engine", [SIMULATED], scope="module", indirect=True)
def test_a_random_seed_is_handed_over(pair: Pair) -> None:
    body = {"text_input": PROMPT, "max_tokens": 20, "temperature": 1.0}
    both = joined(*pair, body)
    again = list(stream(pair.context, generation_body(body, both.context, request_type="context_and_generation")))
    assert both.text == text(again) != text(list(stream(pair.generation, body)))


def test_a_client_that_gives_up_between_the_legs_frees_the_context(pair: Pair, engine: str) -> None:
    params = context_leg(pair.context, GREEDY)
    if engine == SIMULATED:
        wait_for(lambda: held(pair.context) == (1, 2))  # seven tokens and one, by four
    else:
        wait_for(lambda: held(pair.context)[1] > 0)

    (only,) = stream(pair.generation, generation_body(GREEDY, params, max_tokens=1))
    assert only["finish_reason"] == "length"
    pair.assert_nothing_is_held()


def test_a_kv_cache_that_is_gone_is_told_and_computed_again(pair: Pair, engine: str) -> None:
    both = joined(*pair, GREEDY)

    *_, last = stream(pair.generation, generation_body(GREEDY, both.context))
    assert last["error"].startswith("[E_CONTEXT_LOST] ")
    again = list(stream(pair.generation, generation_body(GREEDY, both.context, request_type="context_and_generation")))
    assert (again[-1]["finish_reason"], num_tokens(again)) == (both.last["finish_reason"], num_tokens(both.generation))
    if engine == SIMULATED:  # the stand-in's text depends on how it was asked
        assert text(again) == both.text
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("engine", RELEASES, scope="module", indirect=True)
def test_a_stop_request_ends_the_answer(pair: Pair) -> None:
    long = {**GREEDY, "max_tokens": 20_000, "sampling_param_ignore_eos": True}
    stop_after_the_first(pair.generation, generation_body(long, context_leg(pair.context, long)))
    pair.assert_nothing_is_held()


def stop_after_the_first(server: ServerProcess, body: dict[str, Any]) -> None:
    chunks = stream(server, {**body, "id": "job"})
    assert next(chunks)["text_output"]
    web.post(f"{server.http_url}{PATH.removesuffix('_stream')}", json={"id": "job", "stop": True})
    *_, last = chunks
    assert last["finish_reason"] == "cancelled"


@pytest.mark.parametrize("engine", [SIMULATED], scope="module", indirect=True)
def test_a_transfer_is_stopped_on_request_and_lost_with_the_context_server(pair: Pair, tmp_path: Path) -> None:
    """The server is killed once between the legs and once during the transfer."""
    slow = repository(tmp_path / "slow", pace="real", kv_transfer_gbps=SLOW_GBPS)
    with fleet([slow, repository(tmp_path / "context")]) as servers:
        generation, context = (server.process for server in servers)
        stop_after_the_first(generation, generation_body(GREEDY, context_leg(pair.context, GREEDY)))
        assert_nothing_is_held(generation)

        first, second = context_leg(context, GREEDY), context_leg(context, GREEDY)
        chunks = stream(generation, generation_body(GREEDY, first))
        begun = next(chunks)["text_output"]
        published(generation, lambda series: value(series, "engine_running_requests") == 1)
        assert context.pid is not None
        os.kill(context.pid, signal.SIGKILL)
        context.wait()

        *_, last = chunks
        assert last["error"].startswith("[E_CONTEXT_LOST] ")
        *early, late = stream(generation, generation_body(GREEDY, second))
        assert late["error"].startswith("[E_CONTEXT_LOST] ")
        assert [chunk["text_output"] for chunk in early] in ([], [begun])  # it may end before its text is sent
        recomputed = generation_body(GREEDY, second, request_type="context_and_generation")
        assert text(list(stream(generation, recomputed))) == text(list(stream(generation, GREEDY)))
        assert_nothing_is_held(generation)
    pair.assert_nothing_is_held()  # the transfer ended with the server that fetched
