"""The wire contract under a real tritonserver: over HTTP and gRPC, streamed and not, on every engine that has a part.

`tiny` for what a real model makes of a field, `trtllm` for the production path, `simulated` for what takes its time.
Greedy decoding gives the same text however a request goes, so most of these compare one answer with another.
"""

from __future__ import annotations

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
    chunk_of,
    exchange,
    generated,
    reply,
    sent,
)

PROMPTS = ["Hello, my name is", PROMPT, "The future of AI is"]
SAMPLED: Fields = {"text_input": PROMPT, "temperature": 0.8, "seed": 7}
CONVERSATION = json.dumps([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is it so?"}])
THINKING = json.dumps({"thinking": True})

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

_ONE_BY_ONE: dict[str, tuple[object, bool]] = {
    "max_tokens": (5, True),
    "temperature": (2.0, True),
    "top_k": (2, False),
    "top_p": (0.3, True),
    "min_p": (0.9, True),
    "seed": (8, True),
    "repetition_penalty": (0.4, True),
    "presence_penalty": (1.5, False),
    "frequency_penalty": (-1.5, False),
    "min_tokens": (3, False),
    "ignore_eos": (True, False),
    "skip_special_tokens": (False, False),
    "add_special_tokens": (False, True),
    "exclude_input_from_output": (False, True),
    "truncate_prompt_tokens": (2, True),
    "stop_token_ids": (7, False),
    "bad": (" the", False),
    "logit_bias": ('{"5": 100}', True),
}
"""Field -> (a value, whether it changes the text of the request below)."""


@not_streamed
@pytest.mark.parametrize("name", _ONE_BY_ONE)
def test_a_value_is_the_same_from_a_tensor_from_json_and_by_its_plain_name(
    tiny_server: ServerProcess, way: Way, name: str
) -> None:
    value, matters = _ONE_BY_ONE[name]
    base: Fields = {**SAMPLED, "max_tokens": 10}
    others = {key: other for key, other in base.items() if key != name}

    sources = ({f"sampling_param_{name}": value}, {"sampling_parameters": json.dumps({name: value})}, {name: value})
    texts = [ask(tiny_server, way, {**others, **source}).answer().text for source in sources]

    assert texts == texts[:1] * 3
    if matters:
        assert texts[0] != ask(tiny_server, way, base).answer().text


@every_way
@servers("tiny", "trtllm")
def test_a_tensor_goes_before_a_plain_name_and_that_before_json(server: ServerProcess, way: Way) -> None:
    sources: tuple[Fields, ...] = (
        {"sampling_parameters": '{"max_tokens": 3}'},
        {"max_tokens": 4},
        {"sampling_param_max_tokens": 5},
    )
    body: Fields = {"text_input": PROMPT, "temperature": 0}

    for count, source in enumerate(sources, start=3):
        body = {**body, **source}
        assert ask(server, way, body).answer().num_output_tokens == count


@every_way
@pytest.mark.parametrize("as_json", [True, False])
@servers("tiny", "trtllm")
def test_a_list_is_the_same_from_a_tensor_and_from_json(server: ServerProcess, way: Way, as_json: bool) -> None:
    whole = text_of(server, 40)
    stops = [whole[12:16], whole[8:11]]
    source = {"sampling_parameters": json.dumps({"stop": stops})} if as_json else {"sampling_param_stop": stops}

    answer = ask(server, way, greedy(max_tokens=40, **source)).answer()

    assert answer.text == whole[: whole.index(stops[1])]


# --- Several sequences ---


@every_way
@servers("tiny", "trtllm")
def test_several_prompts_get_their_own_answers_in_order(server: ServerProcess, way: Way) -> None:
    answers = ask(server, way, {**greedy(), "text_input": PROMPTS, "return_output_ids": True}).answers()

    alone = [ask(server, way, greedy(prompt, return_output_ids=True)).answer() for prompt in PROMPTS]
    assert answers == alone
    assert len({answer.text for answer in answers}) == len(PROMPTS)


@every_stream
def test_a_stream_says_which_sequences_a_chunk_speaks_of(tiny_server: ServerProcess, way: Way) -> None:
    chunks = ask(tiny_server, way, {**greedy(), "text_input": PROMPTS}).chunks

    assert len(chunks) > 1
    assert all(len(chunk["sequence_index"]) == len(chunk["text_output"]) for chunk in chunks)
    assert {index for chunk in chunks for index in chunk["sequence_index"]} == {0, 1, 2}


@every_way
@servers("tiny", "trtllm")
def test_answer_k_of_n_is_the_one_of_seed_plus_k(server: ServerProcess, way: Way) -> None:
    body: Fields = {**SAMPLED, "max_tokens": 24}

    answers = ask(server, way, {**body, "n": 3}).answers()

    assert answers == [ask(server, way, {**body, "seed": 7 + k}).answer() for k in range(3)]
    assert len({answer.text for answer in answers}) == 3


@every_way
def test_n_answers_to_each_of_several_prompts_come_prompt_by_prompt(tiny_server: ServerProcess, way: Way) -> None:
    body: Fields = {**SAMPLED, "max_tokens": 8, "return_output_ids": True, "logprobs": 1}

    answers = ask(tiny_server, way, {**body, "text_input": PROMPTS[:2], "n": 2}).answers()

    one_by_one = [{**body, "text_input": prompt, "seed": seed} for prompt in PROMPTS[:2] for seed in (7, 8)]
    alone = [ask(tiny_server, way, each).answer() for each in one_by_one]
    assert [answer.text for answer in answers] == [answer.text for answer in alone]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone]
    assert [_own_ids(answer.logprobs) for answer in answers] == [answer.token_ids for answer in answers]


@not_streamed
def test_best_of_returns_the_likeliest_answers_of_the_same_seeds(tiny_server: ServerProcess, way: Way) -> None:
    body: Fields = {**SAMPLED, "max_tokens": 8, "return_cumulative_logprob": True}

    best = ask(tiny_server, way, {**body, "n": 2, "best_of": 5}).answers()

    candidates = [ask(tiny_server, way, {**body, "seed": seed}).answer() for seed in range(7, 12)]
    candidates.sort(key=_cumulative_logprob, reverse=True)
    assert [answer.text for answer in best] == [answer.text for answer in candidates[:2]]
    assert [answer.cumulative_logprob for answer in best] == pytest.approx(
        [answer.cumulative_logprob for answer in candidates[:2]], rel=1e-3
    )


def test_best_of_alone_returns_one_answer_and_nothing_that_was_not_asked_for(tiny_server: ServerProcess) -> None:
    (chunk,) = ask(tiny_server, WHOLE[0], {**SAMPLED, "max_tokens": 8, "best_of": 3}).chunks

    assert len(chunk["text_output"]) == 1
    assert not {"logprobs", "cumulative_logprob", "sequence_index"} & chunk.keys()


@every_way
@pytest.mark.parametrize("name", ["n", "best_of"])
@servers("tiny", "trtllm")
def test_several_greedy_answers_are_refused(server: ServerProcess, way: Way, name: str) -> None:
    refusal = ask(server, way, greedy(**{name: 2})).refusal()

    assert refusal.startswith("[E_INVALID_ARGUMENT] ")
    assert "greedy decoding gives the same answer each time" in refusal


@every_stream
def test_a_stream_of_the_best_is_refused(tiny_server: ServerProcess, way: Way) -> None:
    refusal = ask(tiny_server, way, {**SAMPLED, "best_of": 2}).refusal()

    assert "best_of: more than n can't be streamed" in refusal


@not_streamed
def test_best_of_is_refused_where_there_are_no_logprobs(trtllm_server: ServerProcess, way: Way) -> None:
    refusal = ask(trtllm_server, way, {**SAMPLED, "best_of": 2}).refusal()

    assert refusal.startswith("[E_UNSUPPORTED] best_of: needs logprobs to choose by")


# --- Token ids ---


@every_way
@servers("tiny", "trtllm")
def test_output_ids_are_as_many_as_the_tokens(server: ServerProcess, way: Way) -> None:
    response = ask(server, way, greedy(return_output_ids=True, return_num_output_tokens=True))

    for chunk in response.chunks:
        assert [len(chunk["output_ids"])] == chunk["num_output_tokens"]
    assert len(response.answer().token_ids) == 12


@every_way
def test_generation_goes_on_from_the_ids_so_far(tiny_server: ServerProcess, way: Way) -> None:
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
def test_input_ids_are_the_prompt_on_the_production_path_too(trtllm_server: ServerProcess, way: Way) -> None:
    """The stand-in's tokens are the bytes after three special ones, of which the first begins a prompt."""
    ids = [0, *(byte + 3 for byte in PROMPT.encode())]

    answer = ask(trtllm_server, way, {"input_ids": ids, "max_tokens": 12, "temperature": 0}).answer()

    assert answer.text == text_of(trtllm_server)
    assert answer.num_input_tokens == len(ids)


@every_way
@servers("tiny", "trtllm")
def test_a_prompt_is_cut_to_its_last_tokens(server: ServerProcess, way: Way) -> None:
    whole = ask(server, way, greedy()).answer()
    cut = ask(server, way, greedy(truncate_prompt_tokens=3)).answer()
    uncut = ask(server, way, greedy(truncate_prompt_tokens=1000)).answer()

    assert cut.num_input_tokens == 3
    assert uncut == whole


@not_streamed
def test_what_is_cut_off_is_not_seen(tiny_server: ServerProcess, way: Way) -> None:
    texts = [ask(tiny_server, way, greedy(prompt + PROMPT, truncate_prompt_tokens=4)).answer().text for prompt in "ab"]

    assert texts[0] == texts[1] != text_of(tiny_server)


BOS_ID = 0
"""Of the demo's checkpoint; what a prompt begins with."""


def _own_ids(positions: Sequence[dict[str, Any] | None]) -> list[int]:
    """The token that stands at each place: the first entry."""
    return [int(next(iter(position))) for position in positions if position is not None]


# --- Log-probabilities ---


@every_way
@pytest.mark.parametrize("many", [0, 1, 4])
def test_every_token_has_its_logprobs_in_the_chunk_that_it_came_with(
    tiny_server: ServerProcess, way: Way, many: int
) -> None:
    flags = {"return_output_ids": True, "return_cumulative_logprob": True}

    response = ask(tiny_server, way, greedy(logprobs=many, **flags))

    for chunk in response.chunks:
        assert _own_ids(json.loads(chunk["logprobs"][0])) == chunk["output_ids"]
    answer = response.answer()
    assert _cumulative_logprob(answer) == pytest.approx(sum(_own_logprobs(answer)), rel=1e-4)
    for position in answer.logprobs:
        entries = list(position.values())
        assert [entry["rank"] for entry in entries] == list(range(1, max(many, 1) + 1))  # greedy: its own is the first
        assert all(one["logprob"] >= next_one["logprob"] for one, next_one in pairwise(entries))


@every_way
def test_a_sampled_token_stands_before_the_likeliest(tiny_server: ServerProcess, way: Way) -> None:
    fields = {"temperature": 2.0, "max_tokens": 32, "logprobs": 2, "return_output_ids": True}

    answer = ask(tiny_server, way, {**SAMPLED, **fields}).answer()

    assert _own_ids(answer.logprobs) == answer.token_ids
    for position in answer.logprobs:
        own, *others = (entry["rank"] for entry in position.values())
        assert others == [rank for rank in (1, 2) if rank != own]
    assert any(len(position) == 3 for position in answer.logprobs)


@every_way
def test_prompt_logprobs_come_once_with_the_first_chunk(tiny_server: ServerProcess, way: Way) -> None:
    response = ask(tiny_server, way, greedy(prompt_logprobs=2))

    assert ["prompt_logprobs" in chunk for chunk in response.chunks] == [True] + [False] * (len(response.chunks) - 1)
    answer = response.answer()
    begin, *others = answer.prompt_logprobs
    assert begin is None
    assert len(others) == answer.num_input_tokens - 1
    assert "".join(next(iter(position.values()))["decoded_token"] for position in others if position) == PROMPT
    assert all(math.isfinite(entry["logprob"]) for position in others if position for entry in position.values())


@not_streamed
@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_logprobs_are_refused_where_the_sampler_has_none(trtllm_server: ServerProcess, way: Way, name: str) -> None:
    refusal = ask(trtllm_server, way, greedy(**{name: 1})).refusal()

    assert refusal.startswith(f"[E_UNSUPPORTED] {name}: TensorRT-LLM 1.")


def _own_logprobs(answer: Answer) -> list[float]:
    return [next(iter(position.values()))["logprob"] for position in answer.logprobs]


def _cumulative_logprob(answer: Answer) -> float:
    assert answer.cumulative_logprob is not None
    return answer.cumulative_logprob


# --- Where the text ends ---


@every_way
@pytest.mark.parametrize("include", [False, True])
@servers("tiny", "trtllm")
def test_a_stop_string_is_found_across_tokens_and_chunks(server: ServerProcess, way: Way, include: bool) -> None:
    whole = text_of(server, 60)
    stop = whole[15:27]

    fields = {"sampling_param_stop": ["never said", stop], "include_stop_str_in_output": include, "max_tokens": 60}
    answer = ask(server, way, greedy(**fields)).answer()

    end = whole.index(stop)
    assert answer.text == whole[: end + len(stop) if include else end]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.num_output_tokens < 60


@every_way
@servers("tiny", "trtllm")
def test_a_stop_string_may_be_one_character_of_several_tokens_or_bytes(server: ServerProcess, way: Way) -> None:
    whole = text_of(server, 60)
    stop = next(character for character in whole if ord(character) > 127)

    answer = ask(server, way, greedy(sampling_param_stop=[stop], max_tokens=60)).answer()

    assert (answer.text, answer.stop_reason) == (whole[: whole.index(stop)], stop)


@every_way
@servers("tiny", "trtllm")
def test_what_may_have_become_a_stop_string_is_sent_in_the_end(server: ServerProcess, way: Way) -> None:
    whole = text_of(server)

    answer = ask(server, way, greedy(sampling_param_stop=[whole[-3:] + "and on it goes"])).answer()

    assert (answer.text, answer.finish_reason, answer.stop_reason) == (whole, "length", None)


@every_way
@servers("tiny", "trtllm")
def test_a_stop_token_ends_the_text_before_itself(server: ServerProcess, way: Way) -> None:
    ids = ask(server, way, greedy(return_output_ids=True)).answer().token_ids
    stop = next(token_id for place, token_id in enumerate(ids) if place > 3 and token_id not in ids[:place])

    answer = ask(server, way, greedy(sampling_param_stop_token_ids=[stop, 1], return_output_ids=True)).answer()

    assert text_of(server).startswith(answer.text.rstrip("\N{REPLACEMENT CHARACTER}"))
    assert (answer.finish_reason, answer.stop_reason) == ("stop", str(stop))
    assert [token_id for token_id in answer.token_ids if token_id != stop] == ids[: ids.index(stop)]


@every_way
def test_min_tokens_keeps_a_stop_token_off(tiny_server: ServerProcess, way: Way) -> None:
    """The model says something else instead."""
    ids = ask(tiny_server, way, greedy(return_output_ids=True)).answer().token_ids

    answer = ask(tiny_server, way, greedy(sampling_param_stop_token_ids=[ids[2]], min_tokens=10)).answer()

    assert answer.num_output_tokens >= 10


@every_way
@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 120}], ids=str)
def test_the_end_token_is_not_the_end_on_demand(trtllm_server: ServerProcess, way: Way, fields: Fields) -> None:
    """The stand-in says it once, after 40 to 79 tokens."""
    plain = ask(trtllm_server, way, greedy(max_tokens=120)).answer()
    longer = ask(trtllm_server, way, greedy(max_tokens=120, **fields)).answer()

    assert (plain.finish_reason, plain.stop_reason) == ("stop", None)
    assert plain.num_output_tokens < 120
    assert (longer.finish_reason, longer.num_output_tokens) == ("length", 120)
    assert longer.text.startswith(plain.text.rstrip("\N{REPLACEMENT CHARACTER}"))


@every_way
@servers("tiny", "trtllm")
def test_bad_words_never_appear(server: ServerProcess, way: Way) -> None:
    bad = _words(text_of(server, 40))[1:4]

    texts = [ask(server, way, greedy(max_tokens=30, sampling_param_bad=bad)).answer().text]
    texts.append(ask(server, way, {**SAMPLED, "max_tokens": 30, "sampling_param_bad": bad}).answer().text)

    for text in texts:
        assert text
        assert not set(_words(text)) & set(bad)


@every_way
@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_a_penalty_changes_the_text(tiny_server: ServerProcess, way: Way, name: str) -> None:
    text = ask(tiny_server, way, greedy(max_tokens=100, **{name: 2})).answer().text

    assert text != text_of(tiny_server, 100)


def _words(text: str) -> list[str]:
    return [word for word in text.split() if word.isascii()]


# --- What an engine can't do is refused with the reason ---

GUIDES: Fields = {
    "guided_json": '{"type": "object"}',
    "guided_json_object": True,
    "guided_regex": "a+",
    "guided_grammar": 'root ::= "a"',
    "guided_structural_tag": '{"structures": [], "triggers": []}',
}


@every_way
@pytest.mark.parametrize("name", GUIDES)
@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ("tiny_server", "the reference engine has no guided decoding"),
        ("simulated_server", "the simulated engine writes filler text, which follows no form"),
    ],
    indirect=["server"],
    ids=["tiny", "simulated"],
)
def test_guided_decoding_is_refused_with_the_reason(server: ServerProcess, way: Way, name: str, reason: str) -> None:
    refusal = ask(server, way, greedy(**{name: GUIDES[name]})).refusal()

    assert refusal.startswith(f"[E_UNSUPPORTED] {name}: ")
    assert reason in refusal


@every_way
@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_reaches_the_engine_that_has_it(trtllm_server: ServerProcess, way: Way, name: str) -> None:
    """The stand-in answers with the name of what it got."""
    answer = ask(trtllm_server, way, greedy(max_tokens=100, **{name: GUIDES[name]})).answer()

    assert json.loads(answer.text) == {"guided": name.removeprefix("guided_")}
    assert answer.finish_reason == "stop"


@not_streamed
def test_a_guide_as_vllm_spells_it_is_the_same_guide(tiny_server: ServerProcess, way: Way) -> None:
    for alias in ("structured_outputs", "guided_decoding"):
        document = json.dumps({alias: {"json": {"type": "object"}}})

        refusal = ask(tiny_server, way, greedy(sampling_parameters=document)).refusal()

        assert refusal.startswith("[E_UNSUPPORTED] guided_json: ")


@not_streamed
@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty", "bad"])
def test_the_twin_has_no_logits_to_change(simulated_server: ServerProcess, way: Way, name: str) -> None:
    value: object = ["x"] if name == "bad" else 1.5

    refusal = ask(simulated_server, way, greedy(**{f"sampling_param_{name}": value})).refusal()

    assert refusal == f"[E_UNSUPPORTED] {name}: the simulated engine has no logits to apply it to"


@every_way
def test_a_priority_is_refused_by_an_engine_without(trtllm_server: ServerProcess, way: Way) -> None:
    refusal = ask(trtllm_server, way, greedy(priority=1)).refusal()

    assert refusal.startswith("[E_UNSUPPORTED] priority: ")
    assert ask(trtllm_server, way, greedy(priority=0)).answer().text == text_of(trtllm_server)


@every_way
@servers("tiny", "simulated")
def test_a_priority_is_taken_by_the_others(server: ServerProcess, way: Way) -> None:
    for priority in (-5, 5):
        assert ask(server, way, greedy(priority=priority)).answer().text == text_of(server)


def test_the_higher_priority_goes_first(simulated_server: ServerProcess) -> None:
    """The twin has one place, and something longer in it when the other two come."""
    bodies = [greedy(id="first", max_tokens=40), greedy(id="low", priority=-1), greedy(id="high", priority=1)]

    results = exchange(simulated_server, *map(sent, bodies)).all()

    order = [result.get_response().id for result in results]
    assert order.index("high") < order.index("low")


# --- Streams ---


@every_stream
@servers("tiny", "trtllm")
def test_cumulative_chunks_each_begin_with_the_one_before(server: ServerProcess, way: Way) -> None:
    chunks = ask(server, way, greedy(stream_mode="cumulative", max_tokens=30)).chunks

    texts = [chunk["text_output"][0] for chunk in chunks]
    assert len(texts) > 1
    assert all(longer.startswith(text) for text, longer in pairwise(texts))
    assert texts[-1] == text_of(server, 30)
    assert chunks[-1]["num_output_tokens"] == [30]


@every_way
@pytest.mark.parametrize("mode", ["delta", "cumulative"])
def test_the_stream_mode_makes_no_difference_to_the_whole(tiny_server: ServerProcess, way: Way, mode: str) -> None:
    last = ask(tiny_server, way, greedy(stream_mode=mode)).chunks[-1]["text_output"][0]

    whole = text_of(tiny_server)
    assert whole.endswith(last)
    assert (last == whole) == (mode == "cumulative" or not way.streaming)


@every_way
@servers("tiny", "trtllm")
def test_streamed_and_not_the_answer_is_the_same(server: ServerProcess, way: Way) -> None:
    flags = ("return_output_ids", "return_num_input_tokens", "return_num_output_tokens", "return_finish_reason")
    body = greedy(**dict.fromkeys(flags, True))

    assert ask(server, way, body).answer() == ask(server, WHOLE[0], body).answer()


# --- Conversations and thinking ---


@every_way
@servers("trtllm", "simulated")
def test_thinking_is_told_from_the_answer(server: ServerProcess, way: Way) -> None:
    body = _conversation(chat_template_kwargs=THINKING, max_tokens=50)

    raw = ask(server, way, body).answer()
    split = ask(server, way, {**body, "separate_reasoning": True}).answer()

    thought, closing, text = raw.text.partition("</think>")
    assert closing
    assert (split.reasoning, split.text) == (thought, text.lstrip())
    assert split.reasoning
    assert split.text
    assert raw.reasoning == ""


@every_way
def test_thinking_without_an_end_is_thinking(tiny_server: ServerProcess, way: Way) -> None:
    body = _conversation(chat_template_kwargs=THINKING)

    raw = ask(tiny_server, way, body).answer()
    split = ask(tiny_server, way, {**body, "separate_reasoning": True}).answer()

    assert (split.reasoning, split.text) == (raw.text, "")


@every_way
@servers("tiny", "trtllm")
def test_a_model_that_does_not_think_only_answers(server: ServerProcess, way: Way) -> None:
    raw = ask(server, way, _conversation()).answer()
    split = ask(server, way, _conversation(separate_reasoning=True)).answer()

    assert (split.reasoning, split.text) == ("", raw.text)


@every_stream
def test_thinking_too_is_sent_whole_in_cumulative_chunks(simulated_server: ServerProcess, way: Way) -> None:
    body = _conversation(chat_template_kwargs=THINKING, separate_reasoning=True)

    chunks = ask(simulated_server, way, {**body, "stream_mode": "cumulative"}).chunks

    whole = ask(simulated_server, way, body).answer()
    for name, expected in (("reasoning_output", whole.reasoning), ("text_output", whole.text)):
        values = [chunk[name][0] for chunk in chunks]
        assert all(longer.startswith(value) for value, longer in pairwise(values))
        assert values[-1] == expected


@every_way
@servers("tiny", "trtllm")
def test_a_rendered_conversation_gets_no_second_begin_token(server: ServerProcess, way: Way) -> None:
    answer = ask(server, way, _conversation()).answer()
    echoed = ask(server, way, _conversation(exclude_input_from_output=False)).answer().text
    rendered = echoed.removesuffix(answer.text)

    exact = ask(server, way, greedy(rendered, add_special_tokens=False)).answer()
    by_itself = ask(server, way, greedy(rendered)).answer()
    doubled = ask(server, way, greedy(rendered, add_special_tokens=True)).answer()

    assert rendered.startswith("<｜begin▁of▁sentence｜>")
    assert rendered.endswith("Why is it so?<｜Assistant｜></think>")
    assert exact == by_itself == answer
    assert doubled.num_input_tokens == answer.num_input_tokens + 1


@every_way
@servers("tiny", "trtllm")
def test_several_conversations_are_answered_one_by_one(server: ServerProcess, way: Way) -> None:
    other = json.dumps([{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}])

    answers = ask(server, way, _conversation(messages=[CONVERSATION, other])).answers()

    assert answers == [ask(server, way, _conversation(messages=one)).answer() for one in (CONVERSATION, other)]


def _conversation(**fields: object) -> dict[str, object]:
    return {"messages": CONVERSATION, "temperature": 0, "max_tokens": 12, **fields}


# --- Outputs and what is measured ---

WIRE_DTYPES = {tensor.name: tensor.dtype.removeprefix("TYPE_").replace("STRING", "BYTES") for tensor in OUTPUTS}


@pytest.mark.parametrize("streaming", [False, True])
def test_every_output_has_its_declared_type(tiny_server: ServerProcess, streaming: bool) -> None:
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
def test_performance_is_measured_on_the_final_response(server: ServerProcess, way: Way) -> None:
    names = [tensor.name for tensor in PERF_OUTPUTS]

    chunks = ask(server, way, greedy(return_perf_metrics=True)).chunks

    for chunk in chunks[:-1]:
        assert not set(names) & chunk.keys()
    last = {name: chunks[-1][name] for name in names}
    assert all(len(values) == 1 for values in last.values())
    events = ("arrival", "first_scheduled", "first_token", "last_token")
    times = [last[f"{event}_time_ns"][0] for event in events]
    assert times == sorted(times)
    assert times[0] > 0
    assert last["kv_cache_alloc_total_blocks"][0] > 0
    for tensor in PERF_OUTPUTS:
        assert isinstance(last[tensor.name][0], float if tensor.dtype is Dtype.FP32 else int)


def test_nothing_is_measured_unasked(tiny_server: ServerProcess) -> None:
    (chunk,) = ask(tiny_server, WHOLE[0], greedy(return_perf_metrics=False)).chunks

    assert not {tensor.name for tensor in PERF_OUTPUTS} & chunk.keys()


@every_way
@servers("tiny", "trtllm")
def test_cached_tokens_are_on_the_final_response(server: ServerProcess, way: Way) -> None:
    chunks = ask(server, way, greedy("word " * 20)).chunks

    assert ["num_cached_tokens" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    (cached,) = chunks[-1]["num_cached_tokens"]
    assert 0 <= cached < chunks[-1]["num_input_tokens"][0]


@every_way
def test_cached_tokens_are_the_engines_own_count(trtllm_server: ServerProcess, way: Way) -> None:
    """The stand-in has all of a prompt's blocks of 32 tokens but the last in its cache."""
    assert ask(trtllm_server, way, greedy("x" * 70)).answer().num_cached_tokens == 64


# --- How many chunks a stream has ---


@every_stream
@servers("tiny", "trtllm", "simulated")
def test_a_stream_has_as_few_chunks_as_it_asks_for(server: ServerProcess, way: Way) -> None:
    body = greedy(max_tokens=40)

    fewer = ask(server, way, {**body, "stream_interval": 16})

    assert 2 <= len(fewer.chunks) <= 4  # the first token, one at 17 and one at 33, the end
    assert fewer.answer() == ask(server, way, body).answer()


@every_stream
@servers("tiny", "trtllm", "simulated")
def test_the_longest_wait_makes_fewer_chunks_of_it_too(server: ServerProcess, way: Way) -> None:
    body = greedy(max_tokens=40)

    patient = ask(server, way, {**body, "stream_interval_ms": 60_000})

    assert len(patient.chunks) == 2
    assert patient.answer() == ask(server, way, body).answer()


# --- What ends a request early ---


@every_way
@servers("trtllm", "simulated")
def test_a_timeout_ends_with_the_text_so_far(server: ServerProcess, way: Way) -> None:
    answer = ask(server, way, _long(timeout_ms=400)).answer()

    _check_cut_short(server, answer, "timeout")


@pytest.mark.parametrize("streaming", [False, True])
@servers("trtllm", "simulated")
def test_the_timeout_of_tritons_protocol_does_the_same(server: ServerProcess, streaming: bool) -> None:
    answer = reply(exchange(server, sent(_long(streaming=streaming), timeout_us=400_000))).answer()

    _check_cut_short(server, answer, "timeout")


@pytest.mark.parametrize("streaming", [False, True])
def test_the_sooner_of_two_timeouts_counts(simulated_server: ServerProcess, streaming: bool) -> None:
    body = _long(streaming=streaming, timeout_ms=600_000)

    answer = reply(exchange(simulated_server, sent(body, timeout_us=500_000))).answer()

    assert answer.finish_reason == "timeout"


@every_way
@servers("tiny", "trtllm")
def test_a_timeout_that_is_not_reached_changes_nothing(server: ServerProcess, way: Way) -> None:
    assert ask(server, way, greedy(timeout_ms=600_000)).answer() == ask(server, way, greedy()).answer()


@every_way
@pytest.mark.parametrize("stopper", WHOLE, ids=lambda way: f"stopped by {way}")
def test_a_stop_ends_the_request_with_its_id_and_both_are_answered(
    simulated_server: ServerProcess, way: Way, stopper: Way
) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, simulated_server, way, _long(id="job-1"))
        stopped = _stop(simulated_server, stopper, "job-1", running)

    assert (stopped.answer().text, stopped.answer().finish_reason) == ("", "stop")
    assert running.result().answer().finish_reason == "cancelled"
    assert running.result().answer().num_output_tokens < LONG_ANSWER


def test_a_stop_on_the_production_path(trtllm_server: ServerProcess) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, trtllm_server, STREAMS[0], _long(id="job-1"))
        stopped = _stop(trtllm_server, STREAMS[1], "job-1", running)

    assert stopped.answer().finish_reason == "stop"
    assert running.result().answer().finish_reason == "cancelled"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_stop_ends_all_that_have_its_id(simulated_server: ServerProcess, streaming: bool) -> None:
    """One of the two runs, the other waits for its place; all three go in order on one stream."""
    long = sent(_long(id="twins", streaming=streaming))
    other = sent(greedy(id="other", streaming=streaming))

    stop = sent({"id": "twins", "stop": True, "return_finish_reason": True})
    results = exchange(simulated_server, long, long, other, stop).all()

    reasons = [
        (result.get_response().id, chunk["finish_reason"][0])
        for result in results
        if "finish_reason" in (chunk := chunk_of(result))
    ]
    assert sorted(reasons) == [("other", "length"), *[("twins", "cancelled")] * 2, ("twins", "stop")]


@every_way
def test_a_stop_for_nothing_is_answered_as_any_other(tiny_server: ServerProcess, way: Way) -> None:
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
        stopped = ask(server, way, {"id": request_id, "stop": True, "return_finish_reason": True})
        if not any("no running request" in error for error in stopped.errors) or running.done():
            return stopped


# --- Names that nobody knows ---


@every_way
@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ({"max_tokenz": 1}, "unknown parameter 'max_tokenz'; did you mean 'max_tokens'?"),
        ({"sampling_param_temprature": 1}, "did you mean 'sampling_param_temperature'?"),
        ({"max_new_tokens": 1}, "unknown parameter 'max_new_tokens'; here it is 'max_tokens'"),
        ({"stop_words": "x"}, "here it is 'sampling_param_stop'"),
        ({"sampling_parameters": '{"top_q": 1}'}, "sampling_parameters: no field 'top_q'; did you mean 'top_p'?"),
        ({"xyzzy": "nothing like it"}, "unknown parameter 'xyzzy'"),
    ],
    ids=str,
)
@servers("tiny", "trtllm")
def test_an_unknown_name_is_refused_with_the_nearest_one(
    server: ServerProcess, way: Way, field: Fields, expected: str
) -> None:
    refusal = ask(server, way, greedy(**field)).refusal()

    assert refusal.startswith("[E_INVALID_ARGUMENT] ")
    assert refusal.endswith(expected)


@every_way
def test_all_that_is_wrong_is_said_at_once(tiny_server: ServerProcess, way: Way) -> None:
    refusal = ask(tiny_server, way, greedy(top_p=2, n=0, max_tokenz=1, stream_mode="both")).refusal()

    for name in ("top_p", "n", "max_tokenz", "stream_mode"):
        assert name in refusal
    assert refusal.count("; ") >= 3
