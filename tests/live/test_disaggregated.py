"""A request that a context and a generation server share, under real tritonservers with the simulated engine."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deepseek_triton_tools.server.server_process import ServerProcess
from support.joined import PATH, context_leg, generation_body, joined, stream, text
from support.scraping import MODEL, published, value
from support.servers import build, change_yaml
from support.waiting import PATIENCE_S, wait_for

SLOW_GBPS = 1e-6
"""A transfer then outlasts any test."""


def repository(folder: Path, **options: Any) -> Path:
    made = build(folder, "tiny", "--engine", "simulated")
    settings = {"tokens_per_block": 4, "text": "dictated", **options}
    change_yaml(made / "tensorrt_llm/1/model.yaml", engine_options=settings, metrics_period_s=0.1)
    return made


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    folder = tmp_path_factory.mktemp("pair")
    with (
        ServerProcess.serving(repository(folder / "context")) as context,
        ServerProcess.serving(repository(folder / "generation")) as generation,
    ):
        yield context, generation


HELD = "engine_stat", frozenset({**MODEL, "name": "held_contexts"}.items())


def held(server: ServerProcess) -> tuple[float, float]:
    """Return the contexts that the server holds and the KV blocks in use, both as last published."""
    found = published(server, lambda series: HELD in series)
    return found[HELD], value(found, "kv_cache_used_blocks")


def assert_nothing_is_held(*servers: ServerProcess) -> None:
    wait_for(lambda: all(held(server) == (0, 0) for server in servers))


PROMPT = "Why is the sky blue?"
CHAT = {"messages": json.dumps([{"role": "user", "content": PROMPT}])}
BODIES = [
    pytest.param({"text_input": PROMPT, "max_tokens": 40}, id="greedy"),
    pytest.param({"text_input": PROMPT, "max_tokens": 40, "temperature": 0.7, "seed": 11}, id="seeded"),
    pytest.param({"text_input": PROMPT, "max_tokens": 1}, id="one token"),
    pytest.param(
        {**CHAT, "max_tokens": 40, "chat_template_kwargs": '{"thinking": true}', "separate_reasoning": True}, id="chat"
    ),
    pytest.param({"text_input": "<answer>one two three</answer>"}, id="its own end"),
    pytest.param({"text_input": "<answer></answer>"}, id="ended by the first token"),
    pytest.param({"text_input": "<answer>abc def</answer>", "sampling_param_stop": ["c d"]}, id="stop in the first"),
    pytest.param({"text_input": "<answer>abc def</answer>", "sampling_param_stop": ["b"]}, id="stop within the first"),
    pytest.param({"text_input": "<answer>abc def</answer>", "sampling_param_stop": ["c x"]}, id="no stop after all"),
]


@pytest.mark.parametrize("body", BODIES)
def test_two_servers_give_the_answer_of_one(pair: tuple[ServerProcess, ServerProcess], body: dict[str, Any]) -> None:
    context, generation = pair
    asked = {"return_num_input_tokens": True, **body}
    alone = list(stream(generation, asked))
    both = joined(context, generation, asked)

    for output in ("text_output", "reasoning_output"):
        assert text(both.generation, output) == text(alone, output)
        shown = text(both.context, output)
        assert text(both.generation, output).startswith(shown), "the context server shows what is certain"
    for output in ("finish_reason", "num_input_tokens"):
        assert both.last[output] == alone[-1][output]
    assert sum_of(both.generation) == sum_of(alone)
    assert_nothing_is_held(context, generation)


def sum_of(chunks: list[dict[str, Any]]) -> int:
    return sum(chunk.get("num_output_tokens", 0) for chunk in chunks)


def test_a_random_seed_is_handed_over(pair: tuple[ServerProcess, ServerProcess]) -> None:
    body = {"text_input": PROMPT, "max_tokens": 20, "temperature": 1.0}
    both = joined(*pair, body)
    again = list(stream(pair[0], generation_body(body, both.context, request_type="context_and_generation")))
    assert both.text == text(again) != text(list(stream(pair[1], body)))


def test_a_client_that_gives_up_between_the_legs_frees_the_context(pair: tuple[ServerProcess, ServerProcess]) -> None:
    context, generation = pair
    body = {"text_input": PROMPT, "max_tokens": 40}
    params = context_leg(context, body)
    wait_for(lambda: held(context) == (1, 2))  # seven tokens and one, by four

    (only,) = stream(generation, generation_body(body, params, max_tokens=1))
    assert only["finish_reason"] == "length"
    assert_nothing_is_held(context, generation)


def test_a_kv_cache_that_is_gone_is_told_and_computed_again(pair: tuple[ServerProcess, ServerProcess]) -> None:
    context, generation = pair
    body = {"text_input": PROMPT, "max_tokens": 40}
    both = joined(context, generation, body)

    *_, last = stream(generation, generation_body(body, both.context))
    assert last["error"].startswith("[E_CONTEXT_LOST] ")
    again = stream(generation, generation_body(body, both.context, request_type="context_and_generation"))
    assert text(list(again)) == both.text
    assert_nothing_is_held(context, generation)


def test_a_stop_request_during_the_transfer_ends_the_answer(
    pair: tuple[ServerProcess, ServerProcess], tmp_path: Path
) -> None:
    context, _ = pair
    body = {"text_input": PROMPT, "max_tokens": 40}
    slow = repository(tmp_path / "slow", pace="real", kv_transfer_gbps=SLOW_GBPS)
    with ServerProcess.serving(slow) as generation:
        chunks = stream(generation, {**generation_body(body, context_leg(context, body)), "id": "job"})
        assert next(chunks)["text_output"]
        address = f"{generation.http_url}{PATH.removesuffix('_stream')}"
        httpx.post(address, json={"id": "job", "stop": True}, timeout=PATIENCE_S)
        *_, last = chunks
        assert last["finish_reason"] == "cancelled"
        assert_nothing_is_held(generation)
    assert_nothing_is_held(context)


def test_a_context_server_that_is_killed_loses_what_it_holds(tmp_path: Path) -> None:
    """Once between the legs, and once during the transfer."""
    body = {"text_input": PROMPT, "max_tokens": 40}
    slow = repository(tmp_path / "slow", pace="real", kv_transfer_gbps=SLOW_GBPS)
    with ServerProcess.serving(slow) as generation:
        with ServerProcess.serving(repository(tmp_path / "context")) as context:
            first, second = context_leg(context, body), context_leg(context, body)
            chunks = stream(generation, generation_body(body, first))
            begun = next(chunks)["text_output"]
            published(generation, lambda series: value(series, "engine_running_requests") == 1)
            assert context.pid is not None
            os.kill(context.pid, signal.SIGKILL)
            context.wait()

        *_, last = chunks
        assert last["error"].startswith("[E_CONTEXT_LOST] ")
        *early, late = stream(generation, generation_body(body, second))
        assert late["error"].startswith("[E_CONTEXT_LOST] ")
        assert [chunk["text_output"] for chunk in early] in ([], [begun])  # it may end before its text is sent
        recomputed = generation_body(body, second, request_type="context_and_generation")
        assert text(list(stream(generation, recomputed))) == text(list(stream(generation, body)))
        assert_nothing_is_held(generation)
