"""The wire contract under a real tritonserver: over HTTP and gRPC, streamed and not, on every engine that has a part.

`tiny` for what a real model makes of a field, `trtllm` for the production path, `simulated` for what takes its time.
Greedy decoding gives the same text however a request goes, so most of these compare one answer with another.
"""

import json
import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from deepseek_backend.contract import OUTPUTS, PERF_OUTPUTS, Dtype
from deepseek_triton_tools.server.server_process import ServerProcess
from support.wire import (
    LONG_ANSWER,
    PROMPT,
    STREAMS,
    WAYS,
    WHOLE,
    Answer,
    Fields,
    Reply,
    Way,
    ask,
    exchange,
    generated,
    reply,
    sent,
)

PROMPTS = ["Hello, my name is", PROMPT, "The future of AI is"]
SAMPLED: Fields = {"text_input": PROMPT, "temperature": 0.8, "seed": 7}
CONVERSATION = json.dumps([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is it so?"}])

every_way = pytest.mark.parametrize("way", WAYS, ids=str)
every_stream = pytest.mark.parametrize("way", STREAMS, ids=str)
not_streamed = pytest.mark.parametrize("way", WHOLE, ids=str)


def servers(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("server", [f"{name}_server" for name in names], indirect=True, ids=names)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> ServerProcess:
    started: ServerProcess = request.getfixturevalue(request.param)
    return started


def greedy(prompt: str = PROMPT, /, **fields: object) -> dict[str, object]:
    return {"text_input": prompt, "temperature": 0, "max_tokens": 12, **fields}


@cache
def text_of(server: ServerProcess, max_tokens: int = 12) -> str:
    """The greedy answer, by the plainest request there is."""
    return generated(server, max_tokens=max_tokens)


# --- One value, wherever it stands ---

VALUES: Fields = {
    "max_tokens": 11,
    "temperature": 1.5,
    "top_k": 50,
    "top_p": 0.95,
    "min_p": 0.01,
    "seed": 8,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "min_tokens": 3,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "add_special_tokens": False,
    "exclude_input_from_output": False,
    "truncate_prompt_tokens": 2,
    "stop_token_ids": 7,
    "bad": " the",
    "logit_bias": '{"5": 3}',
}


@not_streamed
def test_values_are_the_same_from_tensors_from_json_and_by_their_plain_names(tiny_server, way):
    sources = (
        {f"sampling_param_{name}": value for name, value in VALUES.items()},
        {"sampling_parameters": json.dumps(VALUES)},
        VALUES,
    )

    answers = [ask(tiny_server, way, {"text_input": PROMPT, **source}).answer() for source in sources]

    assert answers == answers[:1] * 3
    assert (answers[0].num_input_tokens, answers[0].num_output_tokens) == (2, 11)
    assert answers[0].text != ask(tiny_server, way, {"text_input": PROMPT, **VALUES, "seed": 9}).answer().text


# --- Several sequences ---


@every_way
@servers("tiny", "trtllm")
def test_several_prompts_and_conversations_get_their_own_answers_in_order(server, way):
    other = json.dumps([{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}])
    for name, values in (("text_input", PROMPTS), ("messages", [CONVERSATION, other])):
        body: Fields = {"temperature": 0, "max_tokens": 12, "return_output_ids": True}

        answers = ask(server, way, {**body, name: values}).answers()

        assert answers == [ask(server, way, {**body, name: value}).answer() for value in values]
        assert len({answer.text for answer in answers}) == len(values)


@every_way
@servers("tiny", "trtllm")
def test_answer_k_of_n_is_the_one_of_seed_plus_k(server, way):
    body: Fields = {**SAMPLED, "max_tokens": 24}

    answers = ask(server, way, {**body, "n": 3}).answers()

    assert answers == [ask(server, way, {**body, "seed": 7 + k}).answer() for k in range(3)]
    assert len({answer.text for answer in answers}) == 3


@every_way
def test_n_answers_to_each_of_several_prompts_come_prompt_by_prompt(tiny_server, way):
    body: Fields = {**SAMPLED, "max_tokens": 8, "return_output_ids": True, "logprobs": 1}

    answers = ask(tiny_server, way, {**body, "text_input": PROMPTS[:2], "n": 2}).answers()

    one_by_one = [{**body, "text_input": prompt, "seed": seed} for prompt in PROMPTS[:2] for seed in (7, 8)]
    alone = [ask(tiny_server, way, each).answer() for each in one_by_one]
    assert [(answer.text, answer.token_ids) for answer in answers] == [(one.text, one.token_ids) for one in alone]
    assert [_own_ids(answer.logprobs) for answer in answers] == [answer.token_ids for answer in answers]


# --- Token ids ---


@every_way
def test_generation_goes_on_from_the_ids_so_far(tiny_server, way):
    """The ids of the prompt come from its logprobs, those of the answer from output_ids."""
    asked = greedy(return_output_ids=True, prompt_logprobs=0)
    whole = ask(tiny_server, way, asked).answer()
    half = ask(tiny_server, way, {**asked, "max_tokens": 5}).answer()
    ids = [BOS_ID, *_own_ids(half.prompt_logprobs[1:]), *half.token_ids]

    rest = ask(tiny_server, way, {"input_ids": ids, "max_tokens": 7, "return_output_ids": True}).answer()

    assert half.token_ids + rest.token_ids == whole.token_ids
    assert half.text + rest.text == whole.text
    assert rest.num_input_tokens == len(ids)


@every_way
def test_input_ids_are_the_prompt_on_the_production_path_too(trtllm_server, way):
    """The stand-in's tokens are the bytes after three special ones, of which the first begins a prompt. It has all of a
    prompt's blocks of 32 tokens but the last in its cache."""
    ids = [0, *(byte + 3 for byte in PROMPT.encode())]

    answer = ask(trtllm_server, way, {"input_ids": ids, "max_tokens": 12, "temperature": 0}).answer()

    assert answer.text == text_of(trtllm_server)
    assert answer.num_input_tokens == len(ids)
    assert ask(trtllm_server, way, greedy("x" * 70)).answer().num_cached_tokens == 64


BOS_ID = 0
"""Of the demo's checkpoint; what a prompt begins with."""


def _own_ids(positions: Sequence[dict[str, Any] | None]) -> list[int]:
    """The token that stands at each place: the first entry."""
    return [int(next(iter(position))) for position in positions if position is not None]


# --- Log-probabilities ---


@every_way
def test_every_token_has_its_logprobs_in_the_chunk_that_it_came_with(tiny_server, way):
    for many in (0, 4):
        flags = {"return_output_ids": True, "return_cumulative_logprob": True}

        response = ask(tiny_server, way, greedy(logprobs=many, **flags))

        for chunk in response.chunks:
            assert _own_ids(json.loads(chunk["logprobs"][0])) == chunk["output_ids"]
        answer = response.answer()
        entries = [list(position.values()) for position in answer.logprobs]
        assert answer.cumulative_logprob == pytest.approx(sum(own["logprob"] for own, *_ in entries), rel=1e-4)
        for position in entries:
            assert [entry["rank"] for entry in position] == list(range(1, max(many, 1) + 1))  # greedy: its own is first
            assert all(one["logprob"] >= next_one["logprob"] for one, next_one in pairwise(position))


@every_way
def test_prompt_logprobs_come_once_with_the_first_chunk(tiny_server, way):
    response = ask(tiny_server, way, greedy(prompt_logprobs=2))

    assert ["prompt_logprobs" in chunk for chunk in response.chunks] == [True] + [False] * (len(response.chunks) - 1)
    answer = response.answer()
    begin, *others = answer.prompt_logprobs
    assert begin is None
    assert len(others) == answer.num_input_tokens - 1
    assert "".join(next(iter(position.values()))["decoded_token"] for position in others if position) == PROMPT
    assert all(math.isfinite(entry["logprob"]) for position in others if position for entry in position.values())


# --- Where the text ends ---


@every_way
@servers("tiny", "trtllm")
def test_stop_strings_end_the_text_where_it_has_all_of_one(server, way):
    """One is a character of several tokens or bytes, one goes across tokens and chunks, and one is never finished."""
    whole = text_of(server, 60)
    unfinished = whole[-3:] + "and on it goes"
    character, across = next(each for each in whole if ord(each) > 127), whole[15:27]

    for stop in (character, across):
        for include in (False, True):
            fields = {"sampling_param_stop": [unfinished, stop], "include_stop_str_in_output": include}
            answer = ask(server, way, greedy(max_tokens=60, **fields)).answer()
            end = whole.index(stop) + (len(stop) if include else 0)
            assert (answer.text, answer.finish_reason, answer.stop_reason) == (whole[:end], "stop", stop)
    assert answer.num_output_tokens < 60
    answer = ask(server, way, greedy(max_tokens=60, sampling_param_stop=[unfinished])).answer()
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (whole, "length", None)


# --- What an engine can't do is refused by its name ---

GUIDES: Fields = {
    "guided_json": '{"type": "object"}',
    "guided_json_object": True,
    "guided_regex": "a+",
    "guided_grammar": 'root ::= "a"',
    "guided_structural_tag": '{"structures": [], "triggers": []}',
}
PENALTIES: Fields = {"presence_penalty": 1.5, "frequency_penalty": 1.5, "repetition_penalty": 1.5}
LACKS: dict[str, Fields] = {
    "tiny": {"guided_structural_tag": GUIDES["guided_structural_tag"]},
    "simulated": {**GUIDES, **PENALTIES, "sampling_param_bad": ["x"]},
    "trtllm": {"logprobs": 1, "prompt_logprobs": 1, "priority": 1},
}


@every_way
@servers(*LACKS)
def test_what_an_engine_lacks_is_refused_by_name(server, way, request):
    refused = {}
    for name, value in LACKS[request.node.callspec.params["server"].removesuffix("_server")].items():
        asked = {**SAMPLED, name: value}
        refused[name] = ask(server, way, asked).refusal().partition(": ")[0]

    assert refused == {name: f"[E_UNSUPPORTED] {name.removeprefix('sampling_param_')}" for name in refused}


@every_way
def test_a_guide_reaches_the_engine_that_has_it(trtllm_server, way):
    """The stand-in answers with the name of what it got."""
    answers = {
        name: ask(trtllm_server, way, greedy(max_tokens=100, **{name: GUIDES[name]})).answer() for name in GUIDES
    }

    assert {name: json.loads(answer.text) for name, answer in answers.items()} == {
        name: {"guided": name.removeprefix("guided_")} for name in GUIDES
    }
    assert {answer.finish_reason for answer in answers.values()} == {"stop"}


# --- Streams ---


@every_way
@servers("tiny", "trtllm")
def test_cumulative_chunks_each_begin_with_the_one_before(server, way):
    chunks = ask(server, way, greedy(stream_mode="cumulative", max_tokens=30)).chunks

    texts = [chunk["text_output"][0] for chunk in chunks]
    assert way.streaming or len(texts) == 1
    assert all(longer.startswith(text) for text, longer in pairwise(texts))
    assert texts[-1] == text_of(server, 30)
    assert chunks[-1]["num_output_tokens"] == [30]


@every_way
@servers("tiny", "trtllm")
def test_streamed_and_not_the_answer_is_the_same(server, way):
    flags = ("return_output_ids", "return_num_input_tokens", "return_num_output_tokens", "return_finish_reason")
    body = greedy(**dict.fromkeys(flags, True))

    response = ask(server, way, body)

    assert response.answer() == ask(server, WHOLE[0], body).answer()
    for chunk in response.chunks:
        assert [len(chunk["output_ids"])] == chunk["num_output_tokens"]
    assert len(response.answer().token_ids) == 12


@every_stream
@servers("tiny", "trtllm", "simulated")
def test_a_stream_has_as_few_chunks_as_it_asks_for(server, way):
    body = greedy(max_tokens=40)
    whole = ask(server, way, body).answer()

    fewer = ask(server, way, {**body, "stream_interval": 16})
    patient = ask(server, way, {**body, "stream_interval_ms": 60_000})

    # The first token, one at 17 and one at 33, the end. What waits together on a slow machine is sent together.
    assert len(fewer.chunks) <= 4
    assert len(patient.chunks) <= 2
    assert fewer.answer() == patient.answer() == whole


# --- Conversations and thinking ---


@every_way
@servers("trtllm", "simulated")
def test_thinking_is_told_from_the_answer(server, way):
    body = _conversation(chat_template_kwargs=json.dumps({"thinking": True}), max_tokens=50)

    raw = ask(server, way, body).answer()
    split = ask(server, way, {**body, "separate_reasoning": True}).answer()

    thought, closing, text = raw.text.partition("</think>")
    assert closing
    assert (split.reasoning, split.text) == (thought, text.lstrip())
    assert split.reasoning
    assert split.text
    assert raw.reasoning == ""


@every_way
@servers("tiny", "trtllm")
def test_a_rendered_conversation_gets_no_second_begin_token(server, way):
    answer = ask(server, way, _conversation(separate_reasoning=True)).answer()
    echoed = ask(server, way, _conversation(exclude_input_from_output=False)).answer().text
    rendered = echoed.removesuffix(answer.text)

    exact = ask(server, way, greedy(rendered, add_special_tokens=False)).answer()
    by_itself = ask(server, way, greedy(rendered)).answer()
    doubled = ask(server, way, greedy(rendered, add_special_tokens=True)).answer()

    assert rendered.startswith("<｜begin▁of▁sentence｜>")
    assert rendered.endswith("Why is it so?<｜Assistant｜></think>")
    assert exact == by_itself == answer
    assert doubled.num_input_tokens == answer.num_input_tokens + 1


def _conversation(**fields: object) -> dict[str, object]:
    return {"messages": CONVERSATION, "temperature": 0, "max_tokens": 12, **fields}


# --- Outputs and what is measured ---

WIRE_DTYPES = {tensor.name: tensor.dtype.removeprefix("TYPE_").replace("STRING", "BYTES") for tensor in OUTPUTS}


@pytest.mark.parametrize("streaming", [False, True])
def test_every_output_has_its_declared_type(tiny_server, streaming):
    """All that can be asked for at once: two answers with everything about them. Context servers are elsewhere."""
    wanted = ("logprobs", "output_ids", "cumulative_logprob", "stop_reason")
    fields = {f"return_{name}": True for name in wanted} | {"return_perf_metrics": True, "separate_reasoning": True}
    body: Fields = {**SAMPLED, **fields, "max_tokens": 8, "n": 2, "prompt_logprobs": 1, "streaming": streaming}

    seen: dict[str, str] = {}
    described: Fields = {"text_input": "", "task": "describe", "streaming": streaming}
    for result in exchange(tiny_server, sent(body), sent(described)).all():
        for output in result.get_response().outputs:
            assert seen.setdefault(output.name, output.datatype) == output.datatype
            assert result.as_numpy(output.name).ndim == 1

    assert seen == {name: dtype for name, dtype in WIRE_DTYPES.items() if name != "context_phase_params"}


@every_way
@servers("tiny", "trtllm")
def test_performance_is_measured_on_the_final_response(server, way):
    names = [tensor.name for tensor in PERF_OUTPUTS]

    chunks = ask(server, way, greedy(return_perf_metrics=True)).chunks

    for chunk in chunks[:-1]:
        assert not {*names, "num_cached_tokens"} & chunk.keys()
    last = {name: chunks[-1][name] for name in names}
    assert all(len(values) == 1 for values in last.values())
    events = ("arrival", "first_scheduled", "first_token", "last_token")
    times = [last[f"{event}_time_ns"][0] for event in events]
    assert times == sorted(times)
    assert times[0] > 0
    assert last["kv_cache_alloc_total_blocks"][0] > 0
    for tensor in PERF_OUTPUTS:
        assert isinstance(last[tensor.name][0], float if tensor.dtype is Dtype.FP32 else int)


# --- What ends a request early ---


@every_way
@servers("trtllm", "simulated")
def test_a_timeout_ends_with_the_text_so_far(server, way):
    answer = ask(server, way, _long(timeout_ms=400)).answer()

    _check_cut_short(server, answer, "timeout")


@pytest.mark.parametrize("streaming", [False, True])
@servers("trtllm", "simulated")
def test_the_timeout_of_tritons_protocol_does_the_same(server, streaming):
    later = {"timeout_ms": 600_000} if streaming else {}
    answer = reply(exchange(server, sent(_long(streaming=streaming, **later), timeout_us=400_000))).answer()

    _check_cut_short(server, answer, "timeout")


@every_way
@servers("trtllm", "simulated")
def test_a_stop_ends_the_request_with_its_id_and_both_are_answered(server, way):
    """It comes by the other protocol."""
    stopper = WHOLE[way.scheme == "http"]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, server, way, _long(id="job-1"))
        stopped = _stop(server, stopper, "job-1", running).answer()

    assert (stopped.text, stopped.finish_reason) == ("", "stop")
    answer = running.result().answer()
    assert answer.finish_reason == "cancelled"
    assert answer.num_output_tokens < LONG_ANSWER


@every_way
def test_a_stop_for_nothing_is_answered_as_any_other(tiny_server, way):
    stop: Fields = {"id": "job-2", "stop": True}

    assert ask(tiny_server, way, stop).refusal().startswith("[E_CANCELLED] request cancelled by client")
    told = ask(tiny_server, way, {**stop, "return_finish_reason": True}).refusal()
    assert "no running request has the id 'job-2'" in told
    assert "got none" in ask(tiny_server, way, {"stop": True}).refusal()


def _long(**fields: object) -> dict[str, object]:
    return greedy(max_tokens=LONG_ANSWER, ignore_eos=True, **fields)


def _check_cut_short(server: ServerProcess, answer: Answer, finish_reason: str) -> None:
    assert answer.finish_reason == finish_reason
    assert 0 < answer.num_output_tokens < LONG_ANSWER
    same = ask(server, WHOLE[0], _long() | {"max_tokens": answer.num_output_tokens}).answer()
    assert same.text.startswith(answer.text)
    assert len(answer.text) > len(same.text) - 4  # but for a character that was not complete


def _stop(server: ServerProcess, way: Way, request_id: str, running: Future[Reply]) -> Reply:
    """Sent again while there is nothing to stop: the request may be on its way yet."""
    while True:
        stopped = ask(server, way, {"text_input": "", "id": request_id, "stop": True, "return_finish_reason": True})
        if not any("no running request" in error for error in stopped.errors) or running.done():
            return stopped
