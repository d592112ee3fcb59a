"""Every field of the contract through all four kinds of client: each gives what the wire says, streamed and not.

The wire's side of it is `wire.ask`, which knows nothing of the client. Greedy decoding, and sampling with a seed, give
the same answer however a request goes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from deepseek_backend.contract import INPUTS, PERF_OUTPUTS
from deepseek_triton_client import Answer as ClientAnswer
from deepseek_triton_client import Completion
from deepseek_triton_tools.server.server_process import ServerProcess
from support.client_kinds import ClientKind
from support.wire import LONG_ANSWER, PROMPT, WHOLE, Answer, Reply, ask

CONVERSATION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wie heißt du? 你好 👋"}]
TOOLS = json.dumps([{"type": "function", "function": {"name": "f"}}])
SAMPLED = {"temperature": 0.8, "seed": 7}
EVERYTHING = {
    **SAMPLED,
    "n": 2,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "return_output_ids": True,
    "return_cumulative_logprob": True,
    "return_logprobs": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
}


@dataclass(frozen=True)
class Case:
    """One request, as the client takes it; greedy unless the fields say otherwise."""

    fields: Mapping[str, Any] | Callable[[str], Mapping[str, Any]]
    """A function makes them of the plain greedy answer to the same prompt."""
    server: str = "tiny"
    prompt: str | tuple[int, ...] = PROMPT
    chat: bool = False
    max_tokens: int = 12
    streams: bool = True
    counts: bool = True
    """False where a token more may be generated before the engine is told to stop."""


CASES = {
    "plain": Case({}),
    "sampled": Case({**SAMPLED, "top_p": 0.9, "top_k": 50, "min_p": 0.01}),
    "sampled negative seed": Case({"temperature": 1.0, "seed": -3}),
    "penalties": Case({"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.5}),
    "n": Case({**SAMPLED, "n": 3}),
    "best_of": Case({**SAMPLED, "n": 2, "best_of": 5, "return_cumulative_logprob": True}, streams=False),
    "best_of alone": Case({**SAMPLED, "best_of": 3}, streams=False),
    "best_of that is n": Case({**SAMPLED, "n": 2, "best_of": 2}),
    "logprobs 0": Case({"logprobs": 0}),
    "logprobs 3": Case({"logprobs": 3, "temperature": 3.0, "seed": 7}),
    "return_logprobs": Case({"return_logprobs": True}),
    "prompt_logprobs": Case({"prompt_logprobs": 2}),
    "return_output_ids": Case({"return_output_ids": True}),
    "return_cumulative_logprob": Case({"return_cumulative_logprob": True}),
    "counts on every chunk": Case({"return_num_input_tokens": True, "return_num_output_tokens": True}),
    "everything": Case(EVERYTHING),
    "stop": Case(lambda whole: {"stop": ["never said", whole[5:10]]}),
    "stop, one string": Case(lambda whole: {"stop": whole[5:10]}),
    "include_stop_str_in_output": Case(lambda whole: {"stop": whole[5:10], "include_stop_str_in_output": True}),
    "stop_token_ids": Case({"stop_token_ids": list(range(40)), "temperature": 2.0, "seed": 1}),
    "min_tokens": Case({"stop_token_ids": list(range(40)), "min_tokens": 10, "temperature": 2.0, "seed": 1}),
    "ignore_eos": Case({"ignore_eos": True}),
    "logit_bias": Case({"logit_bias": {70: 100.0, 71: 99.5}, **SAMPLED}),
    "bad": Case(lambda whole: {"bad": [word for word in whole.split() if word.isascii()][:3]}),
    "echo": Case({"exclude_input_from_output": False}),
    "truncate_prompt_tokens": Case({"truncate_prompt_tokens": 2}),
    "token ids": Case({}, prompt=(3, 14, 15, 92, 65)),
    "no special tokens": Case({"add_special_tokens": False, "skip_special_tokens": False}),
    "stream_interval": Case({"stream_interval": 8}),
    "stream_interval_ms": Case({"stream_interval_ms": 60_000}),
    "timeout_ms not reached": Case({"timeout_ms": 600_000}),
    "priority": Case({"priority": 5}),
    "no prompt in ASCII": Case({}, prompt="Wie heißt du? 你好 👋"),
    "chat": Case({}, chat=True),
    "chat, thinking": Case({"chat_template_kwargs": {"thinking": True}}, chat=True),
    "chat, thinking in the text": Case(
        {"chat_template_kwargs": {"thinking": True}, "separate_reasoning": False}, chat=True
    ),
    "chat, echo": Case({"exclude_input_from_output": False, "separate_reasoning": False}, chat=True),
    "chat, n": Case({**SAMPLED, "n": 2, "return_output_ids": True}, chat=True),
    "production: plain": Case({}, server="trtllm", max_tokens=40),
    "production: to the end": Case({}, server="trtllm", max_tokens=80),
    "production: n": Case({**SAMPLED, "n": 3}, server="trtllm"),
    "production: stop": Case(lambda whole: {"stop": whole[5:10]}, server="trtllm", max_tokens=40, counts=False),
    "production: token ids": Case({}, server="trtllm", prompt=(0, 70, 71)),
    "production: cached": Case({}, server="trtllm", prompt="x" * 70, max_tokens=4),
    "production: thinking": Case(
        {"chat_template_kwargs": {"thinking": True}}, server="trtllm", chat=True, max_tokens=50
    ),
    "production: guided_json": Case({"guided_json": {"type": "object"}}, server="trtllm", max_tokens=100),
    "production: guided_json_object": Case({"guided_json_object": True}, server="trtllm", max_tokens=100),
    "production: guided_regex": Case({"guided_regex": "a+"}, server="trtllm", max_tokens=100),
    "production: guided_grammar": Case({"guided_grammar": 'root ::= "a"'}, server="trtllm", max_tokens=100),
    "production: guided_structural_tag": Case(
        {"guided_structural_tag": {"structures": [], "triggers": []}}, server="trtllm", max_tokens=100
    ),
    "twin: plain": Case({}, server="simulated", prompt="你好", max_tokens=16),
    "twin: tools": Case({"tools": TOOLS, "tool_choice": "required"}, server="simulated", chat=True),
    "twin: thinking": Case({"chat_template_kwargs": {"thinking": True}}, server="simulated", chat=True, max_tokens=36),
}

STREAMED = [name for name, case in CASES.items() if case.streams]


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def server(request: pytest.FixtureRequest, case: Case) -> ServerProcess:
    started: ServerProcess = request.getfixturevalue(f"{case.server}_server")
    return started


@pytest.mark.parametrize("case", CASES, indirect=True)
def test_a_whole_answer_is_what_the_wire_says(client_kind: ClientKind, case: Case, server: ServerProcess) -> None:
    expected = _on_the_wire(server, case)

    with client_kind.client(server) as client:
        verb = client.chat if case.chat else client.generate
        completion = verb(_content(case), request_id="job-1", **_fields(server, case))

    _check(completion, expected, case)
    assert (completion.request_id, completion.url) == ("job-1", client_kind.url(server))


@pytest.mark.parametrize("case", STREAMED, indirect=True)
def test_a_stream_is_what_the_wire_says(client_kind: ClientKind, case: Case, server: ServerProcess) -> None:
    expected = _on_the_wire(server, case)

    with client_kind.client(server) as client:
        verb = client.stream_chat if case.chat else client.stream
        with verb(_content(case), request_id="job-1", **_fields(server, case)) as stream:
            chunks = list(stream)
            completion = stream.completion()
            text, reasoning, request_id, url = stream.text, stream.reasoning, stream.request_id, stream.url

    _check(completion, expected, case)
    assert (request_id, url) == (completion.request_id, completion.url) == ("job-1", client_kind.url(server))
    assert (text, reasoning) == (completion.text, completion.reasoning)
    for index, answer in enumerate(completion.answers):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert "".join(map(str, own)) == answer.text
        assert "".join(chunk.reasoning for chunk in own) == answer.reasoning
        assert [each for chunk in own for each in chunk.output_ids] == list(answer.output_ids)
        assert [chunk.finish_reason for chunk in own] == [None] * (len(own) - 1) + [answer.finish_reason]
        assert own[-1].num_input_tokens == completion.num_input_tokens
        assert own[-1].num_output_tokens is not None


def test_the_cases_ask_for_every_field() -> None:
    """Those that the client has no argument for are its own business."""
    asked = {name for case in CASES.values() if isinstance(case.fields, Mapping) for name in case.fields}
    asked |= {"stop", "bad", "include_stop_str_in_output", "max_tokens", "temperature"}
    its_own = {"text_input", "input_ids", "messages", "streaming", "stream", "sampling_parameters", "stream_mode"}
    its_own |= {"exclude_input_in_output", "return_finish_reason", "return_stop_reason"}
    elsewhere = {"return_perf_metrics", "task", "request_type", "context_phase_params"}

    known = {tensor.name.removeprefix("sampling_param_") for tensor in INPUTS}
    assert known - its_own - elsewhere <= asked


def _content(case: Case) -> Any:
    if case.chat:
        return CONVERSATION
    return case.prompt if isinstance(case.prompt, str) else list(case.prompt)


def _fields(server: ServerProcess, case: Case) -> dict[str, Any]:
    fields = case.fields(_plain_text(server, case.max_tokens)) if callable(case.fields) else case.fields
    return {"temperature": 0, "max_tokens": case.max_tokens, **fields}


@cache
def _plain_text(server: ServerProcess, max_tokens: int) -> str:
    return ask(server, WHOLE[0], {"text_input": PROMPT, "temperature": 0, "max_tokens": max_tokens}).answer().text


_WIRE_NAMES = {tensor.name.removeprefix("sampling_param_"): tensor.name for tensor in reversed(INPUTS)}
"""Sampling fields first: `stop` is the stop strings'."""
_WIRE_NAMES["stop"] = "sampling_param_stop"


def _body(server: ServerProcess, case: Case) -> dict[str, Any]:
    """As /generate takes it."""
    body: dict[str, Any] = {}
    for name, value in _fields(server, case).items():
        wire_value = json.dumps(value) if isinstance(value, dict) else value
        body[_WIRE_NAMES[name]] = wire_value % 2**64 if name == "seed" else wire_value
    if case.chat:
        return {"messages": json.dumps(CONVERSATION), "separate_reasoning": True, **body}
    return {"text_input" if isinstance(case.prompt, str) else "input_ids": _content(case), **body}


_told: dict[tuple[int, int], Reply] = {}


def _on_the_wire(server: ServerProcess, case: Case) -> list[Answer]:
    """Asked once."""
    key = (id(server), id(case))
    if key not in _told:
        _told[key] = ask(server, WHOLE[0], _body(server, case))
    return _told[key].answers()


def _check(completion: Completion, expected: Sequence[Answer], case: Case) -> None:
    assert [_seen(answer) for answer in completion.answers] == [_wanted(answer) for answer in expected]
    if case.counts:
        counts = [answer.num_output_tokens for answer in expected]
        assert [answer.num_output_tokens for answer in completion.answers] == counts
        assert completion.num_output_tokens == sum(counts)
    for answer, wanted in zip(completion.answers, expected, strict=True):
        assert answer.cumulative_logprob == (
            None if wanted.cumulative_logprob is None else pytest.approx(wanted.cumulative_logprob, rel=1e-4)
        )
    assert completion.num_input_tokens == expected[0].num_input_tokens
    assert completion.num_cached_tokens == expected[0].num_cached_tokens
    assert completion.text == completion.answers[0].text == str(completion)
    assert completion.finish_reason == expected[0].finish_reason
    assert completion.perf_metrics is None


def _seen(answer: ClientAnswer) -> dict[str, Any]:
    return {
        "text": answer.text,
        "reasoning": answer.reasoning,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "output_ids": list(answer.output_ids),
        "logprobs": [_place(place) for place in answer.logprobs],
        "prompt_logprobs": [place and _place(place) for place in answer.prompt_logprobs],
    }


def _place(place: Any) -> list[tuple[Any, ...]]:
    return [(each.token_id, pytest.approx(each.logprob, abs=1e-3), each.rank, each.text) for each in place]


def _wanted(answer: Answer) -> dict[str, Any]:
    return {
        "text": answer.text,
        "reasoning": answer.reasoning,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "output_ids": answer.token_ids,
        "logprobs": [_wire_place(place) for place in answer.logprobs],
        "prompt_logprobs": [place and _wire_place(place) for place in answer.prompt_logprobs],
    }


def _wire_place(place: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [(int(key), entry["logprob"], entry["rank"], entry["decoded_token"]) for key, entry in place.items()]


# --- What isn't the same each time ---


@pytest.mark.parametrize("name", ["tiny", "trtllm"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_performance_is_measured(
    request: pytest.FixtureRequest, client_kind: ClientKind, name: str, streamed: bool
) -> None:
    server = request.getfixturevalue(f"{name}_server")
    with client_kind.client(server) as client:
        if streamed:
            with client.stream(PROMPT, max_tokens=12, temperature=0, return_perf_metrics=True) as stream:
                measured = stream.completion().perf_metrics
        else:
            measured = client.generate(PROMPT, max_tokens=12, temperature=0, return_perf_metrics=True).perf_metrics

    values = {tensor.name: getattr(measured, tensor.name) for tensor in PERF_OUTPUTS}
    assert None not in values.values()
    times = [values[f"{event}_time_ns"] for event in ("arrival", "first_scheduled", "first_token", "last_token")]
    assert times == sorted(times)
    assert times[0] > 0
    assert values["kv_cache_alloc_total_blocks"] > 0


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_timeout_of_the_servers_gives_the_text_so_far(
    client_kind: ClientKind, trtllm_server: ServerProcess, streamed: bool
) -> None:
    fields = {"max_tokens": LONG_ANSWER, "ignore_eos": True, "temperature": 0, "timeout_ms": 300}
    with client_kind.client(trtllm_server) as client:
        if streamed:
            with client.stream(PROMPT, **fields) as stream:
                completion = stream.completion()
        else:
            completion = client.generate(PROMPT, **fields)

    assert completion.finish_reason == "timeout"
    assert 0 < completion.num_output_tokens < LONG_ANSWER
    body = {"text_input": PROMPT, "ignore_eos": True, "temperature": 0, "max_tokens": completion.num_output_tokens}
    assert ask(trtllm_server, WHOLE[0], body).answer().text.startswith(completion.text)


def test_a_stream_has_as_few_chunks_as_it_asks_for(client_kind: ClientKind, trtllm_server: ServerProcess) -> None:
    def chunks(**fields: Any) -> list[Any]:
        with (
            client_kind.client(trtllm_server) as client,
            client.stream(PROMPT, max_tokens=40, temperature=0, **fields) as stream,
        ):
            return list(stream)

    assert len(chunks(stream_interval_ms=60_000)) == 2
    assert 2 <= len(chunks(stream_interval=16)) <= 4
    assert len(chunks()) > 4
