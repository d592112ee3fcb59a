"""Every field of the contract through the four kinds of client: each gives what the wire says, streamed and not.

The wire's side of it is `wire.ask`, which knows nothing of the client. Greedy decoding, and sampling with a seed, give
the same answer however a request goes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from deepseek_backend.contract import INPUTS
from deepseek_triton_client import Completion
from deepseek_triton_tools.server.server_process import ServerProcess
from support.client_kinds import SCHEMES, STYLES, ClientKind
from support.wire import PROMPT, WHOLE, Answer, ask

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
    "sampled": Case({"temperature": 0.8, "seed": -3, "top_p": 0.9, "top_k": 50, "min_p": 0.01}),
    "penalties": Case({"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.5}),
    "n": Case({**SAMPLED, "n": 3}),
    "best_of": Case({**SAMPLED, "n": 2, "best_of": 5, "return_cumulative_logprob": True}, streams=False),
    "logprobs 0": Case({"logprobs": 0}),
    "logprobs 3": Case({"logprobs": 3, "temperature": 3.0, "seed": 7}),
    "prompt_logprobs": Case({"prompt_logprobs": 2}),
    "everything": Case(EVERYTHING),
    "stop, one string": Case(lambda whole: {"stop": whole[5:10]}),
    "stop": Case(lambda whole: {"stop": ["never said", whole[5:10]], "include_stop_str_in_output": True}),
    "min_tokens": Case({"stop_token_ids": list(range(40)), "min_tokens": 10, "temperature": 2.0, "seed": 1}),
    "logit_bias": Case({"logit_bias": {70: 100.0, 71: 99.5}, **SAMPLED}),
    "bad": Case(lambda whole: {"bad": [word for word in whole.split() if word.isascii()][:3]}),
    "echo": Case({"exclude_input_from_output": False}),
    "truncate_prompt_tokens": Case({"truncate_prompt_tokens": 2}),
    "token ids": Case({}, prompt=(3, 14, 15, 92, 65)),
    "stream_interval and special tokens": Case(
        {"stream_interval": 8, "add_special_tokens": False, "skip_special_tokens": False}
    ),
    "what changes nothing": Case(
        {"timeout_ms": 600_000, "priority": 5, "ignore_eos": True, "stream_interval_ms": 60_000}
    ),
    "chat": Case({"exclude_input_from_output": False, "separate_reasoning": False}, chat=True),
    "chat, thinking": Case({"chat_template_kwargs": {"thinking": True}}, chat=True),
    "chat, n": Case({**SAMPLED, "n": 2, "return_output_ids": True}, chat=True),
    "production: to the end": Case({}, server="trtllm", max_tokens=80),
    "production: n": Case({**SAMPLED, "n": 3}, server="trtllm"),
    "production: stop": Case(lambda whole: {"stop": whole[5:10]}, server="trtllm", max_tokens=40, counts=False),
    "production: cached": Case({}, server="trtllm", prompt="x" * 70, max_tokens=4),
    "production: thinking": Case(
        {"chat_template_kwargs": {"thinking": True}}, server="trtllm", chat=True, max_tokens=50
    ),
    **{
        f"production: {name}": Case({name: guide}, server="trtllm", max_tokens=100)
        for name, guide in {
            "guided_json": {"type": "object"},
            "guided_json_object": True,
            "guided_regex": "a+",
            "guided_grammar": 'root ::= "a"',
            "guided_structural_tag": {"structures": [], "triggers": []},
        }.items()
    },
    "twin: tools": Case({"tools": TOOLS, "tool_choice": "required"}, server="simulated", chat=True),
    "twin: thinking": Case({"chat_template_kwargs": {"thinking": True}}, server="simulated", chat=True, max_tokens=36),
}

EACH = [0, *(pytest.param(shift, marks=pytest.mark.nightly) for shift in (1, 2, 3))]
"""Each case is asked by one of the four kinds of client in turn; by night the turn begins with each of them."""


@pytest.mark.parametrize("shift", EACH)
@pytest.mark.parametrize("server", ["tiny", "trtllm", "simulated"])
def test_an_answer_is_what_the_wire_says(request, client_loop, server, shift, subtests):
    started: ServerProcess = request.getfixturevalue(f"{server}_server")
    kinds = [ClientKind(scheme, style, client_loop) for scheme in SCHEMES for style in STYLES]
    for number, (name, case) in enumerate(CASES.items()):
        if case.server == server:
            with subtests.test(name), kinds[(number + shift) % 4].client(started) as client:
                expected = ask(started, WHOLE[0], _body(started, case)).answers()
                fields = _fields(started, case)
                _check_whole(client, case, fields, expected)
                if case.streams:
                    _check_stream(client, case, fields, expected)


def _check_whole(client: Any, case: Case, fields: dict[str, Any], expected: Sequence[Answer]) -> None:
    verb = client.chat if case.chat else client.generate
    completion = verb(_content(case), request_id="job-1", **fields)

    _check(completion, expected, case)
    assert completion.request_id == "job-1"


def _check_stream(client: Any, case: Case, fields: dict[str, Any], expected: Sequence[Answer]) -> None:
    verb = client.stream_chat if case.chat else client.stream
    with verb(_content(case), request_id="job-1", **fields) as stream:
        chunks = list(stream)
        completion = stream.completion()
        seen = stream.text, stream.reasoning, stream.request_id, stream.url

    _check(completion, expected, case)
    assert seen == (completion.text, completion.reasoning, "job-1", completion.url)
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


def _check(completion: Completion, expected: Sequence[Answer], case: Case) -> None:
    for answer, wanted in zip(completion.answers, expected, strict=True):
        for name in ("text", "reasoning", "finish_reason", "stop_reason"):
            assert getattr(answer, name) == getattr(wanted, name)
        assert list(answer.output_ids) == wanted.token_ids
        for name in ("logprobs", "prompt_logprobs"):
            places = [place and _place(place) for place in getattr(answer, name)]
            assert places == [place and _wire_place(place) for place in getattr(wanted, name)]
        assert answer.cumulative_logprob == (
            None if wanted.cumulative_logprob is None else pytest.approx(wanted.cumulative_logprob, rel=1e-4)
        )
        assert not case.counts or answer.num_output_tokens == wanted.num_output_tokens
    assert completion.num_output_tokens == sum(answer.num_output_tokens or 0 for answer in completion.answers)
    assert completion.num_input_tokens == expected[0].num_input_tokens
    assert completion.num_cached_tokens == expected[0].num_cached_tokens
    assert completion.text == completion.answers[0].text == str(completion)
    assert completion.finish_reason == expected[0].finish_reason
    assert completion.perf_metrics is None


def _place(place: Any) -> list[tuple[Any, ...]]:
    return [(each.token_id, pytest.approx(each.logprob, abs=1e-3), each.rank, each.text) for each in place]


def _wire_place(place: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [(int(key), entry["logprob"], entry["rank"], entry["decoded_token"]) for key, entry in place.items()]
