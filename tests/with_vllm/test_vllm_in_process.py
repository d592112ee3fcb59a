"""The rules of the engine protocol and every sampling field, on vLLM itself, by both ways to its core."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_backend.answer_format import with_answer_format
from deepseek_backend.contract import SAMPLING_BY_NAME
from deepseek_backend.engines.generate_request import SamplingParams
from deepseek_backend.engines.tags import ends_inside
from deepseek_backend.engines.vllm.request_paths import CoreConnection, GenerateCalls
from deepseek_backend.errors import RequestError
from deepseek_backend.messages import NO_TOOLS
from support.vllm_in_process import StepLog, a_request, answered

STORY = "Once upon a time"
PROMPTS = ("The capital of France is", "7 + 5 =", "Hello, my name is", "The future of AI is", STORY)
QUESTION = "What is 6 + 7? Answer in JSON with the key sum."


@pytest.fixture(params=["vllm_engine", "public_engine"])
def engine(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def test_each_engine_takes_the_way_that_its_record_allows(vllm_engine: Any, public_engine: Any) -> None:
    assert isinstance(vllm_engine._connection, CoreConnection)
    assert isinstance(public_engine._connection, GenerateCalls)


# --- tokens: the reference engine's own -------------------------------------------------------------------------------

FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.2, "seed": 7},
    "another seed": {"temperature": 1.2, "seed": 8},
    "hot": {"temperature": 1.8, "seed": 1},
    "top_k": {"temperature": 2.0, "seed": 1, "top_k": 2},
    "top_p": {"temperature": 2.0, "seed": 1, "top_p": 0.5},
    "min_p": {"temperature": 2.0, "seed": 1, "min_p": 0.3},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "presence_penalty": {"temperature": 2.0, "seed": 1, "presence_penalty": 2.0},
    "frequency_penalty": {"temperature": 2.0, "seed": 1, "frequency_penalty": 2.0},
    "min_tokens": {"min_tokens": 30},
    "ignore_eos": {"ignore_eos": True},
    "stop_token_ids": {"stop_token_ids": (268, 471)},
    "bad": {"bad": ("Paris", "12")},
    "logit_bias": {"temperature": 2.0, "seed": 1, "logit_bias": {268: 4.0, 471: -100.0}, "repetition_penalty": 1.5},
    "skip_special_tokens": {"skip_special_tokens": False, "ignore_eos": True},
    "add_special_tokens": {"add_special_tokens": False},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 3},
}
"""Sampling fields, each set such that it changes an answer."""


@pytest.mark.parametrize("name", FIELDS)
def test_tokens_are_those_of_the_reference_engine(engine: Any, reference_engine: Any, name: str) -> None:
    requests = [a_request(prompt, prompt, max_tokens=40, **FIELDS[name]) for prompt in PROMPTS]

    ours, expected = answered(engine, *requests), answered(reference_engine, *requests)

    for prompt in PROMPTS:
        assert ours.token_ids(prompt) == expected.token_ids(prompt), prompt
        assert ours.text(prompt) == expected.text(prompt)
        last, its_last = ours.steps[prompt][-1], expected.steps[prompt][-1]
        assert (last.finish_reason, last.stop_reason) == (its_last.finish_reason, its_last.stop_reason)
        assert last.num_input_tokens == its_last.num_input_tokens


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_changes_an_answer(vllm_engine: Any, name: str) -> None:
    """Otherwise the test above would not see that it is ignored."""
    if name == "greedy":
        pytest.skip("what the others are compared with")
    without = {"temperature": 2.0, "seed": 1} if FIELDS[name].get("temperature") == 2.0 else {}
    plain = answered(vllm_engine, *(a_request(prompt, prompt, **without) for prompt in PROMPTS))
    fields = answered(vllm_engine, *(a_request(prompt, prompt, **FIELDS[name]) for prompt in PROMPTS))

    assert any(plain.token_ids(p) != fields.token_ids(p) or plain.text(p) != fields.text(p) for p in PROMPTS)


def test_every_field_that_the_engine_takes_is_tested(vllm_engine: Any) -> None:
    elsewhere = {
        *("max_tokens", "n", "stop", "include_stop_str_in_output", "exclude_input_from_output"),  # the text layer's
        *("logprobs", "prompt_logprobs", "return_perf_metrics", "seed"),
        *(name for name in SAMPLING_BY_NAME if name.startswith("guided_")),
    }
    assert vllm_engine.capabilities.sampling_fields <= FIELDS.keys() | elsewhere


def test_token_ids_are_a_prompt(engine: Any) -> None:
    log = answered(engine, a_request("a", prompt_token_ids=(0, 58, 335, 35, 56, 362), max_tokens=8))

    assert log.text("a") == answered(engine, a_request("b", "7 + 5 =", max_tokens=8)).text("b")


# --- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("many", [0, 1, 3])
@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 1.2, "seed": 5}, {"logit_bias": {268: 100.0}}], ids=["greedy", "sampled", "biased"]
)
def test_logprobs_are_those_of_the_reference_engine(
    engine: Any, reference_engine: Any, many: int, fields: dict[str, Any]
) -> None:
    requests = [
        a_request(prompt, prompt, max_tokens=12, logprobs=many, prompt_logprobs=many, **fields) for prompt in PROMPTS
    ]

    ours, expected = answered(engine, *requests), answered(reference_engine, *requests)

    for prompt in PROMPTS:
        first, its_first = ours.steps[prompt][0], expected.steps[prompt][0]
        _compare(first.prompt_logprobs, its_first.prompt_logprobs)
        assert not any(step.prompt_logprobs for step in ours.steps[prompt][1:])
        _compare(ours.steps[prompt].logprobs, expected.steps[prompt].logprobs)


def _compare(ours: Any, expected: Any) -> None:
    assert len(ours) == len(expected)
    for row, its_row in zip(ours, expected, strict=True):
        if its_row is None:
            assert row is None
            continue
        assert [(one.token_id, one.rank, one.text) for one in row] == [(o.token_id, o.rank, o.text) for o in its_row]
        assert [one.logprob for one in row] == pytest.approx([one.logprob for one in its_row], abs=1e-3)


def test_requests_with_and_without_logprobs_run_together(engine: Any) -> None:
    numbers = [None, 0, 3, 1, None]
    requests = [a_request(str(i), STORY, max_tokens=10, logprobs=number) for i, number in enumerate(numbers)]

    log = answered(engine, *requests)

    for i, number in enumerate(numbers):
        widths = {len(row) for step in log.steps[str(i)] for row in step.logprobs}
        assert widths == (set() if number is None else {max(number, 1)})


# --- grammars ---------------------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "number": {"type": "integer", "maximum": 99}},
    "required": ["city", "number"],
    "additionalProperties": False,
}


GUIDED_ANSWERS = pytest.mark.parametrize(
    ("fields", "holds"),
    [
        ({"guided_json": json.dumps(SCHEMA)}, lambda text: set(json.loads(text)) == {"city", "number"}),
        ({"guided_json_object": True}, lambda text: isinstance(json.loads(text), dict)),
        ({"guided_regex": "(red|green|blue), [0-9]{3}"}, re.compile("(red|green|blue), [0-9]{3}").fullmatch),
        ({"guided_grammar": 'root ::= ("yes" | "no") "!"'}, lambda text: text in ("yes!", "no!")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)


@GUIDED_ANSWERS
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_an_answer_follows_its_grammar(
    engine: Any, fields: dict[str, Any], holds: Any, sampling: dict[str, Any]
) -> None:
    prompt = engine.render_chat([{"role": "user", "content": QUESTION}], {})
    request = a_request("guided", prompt, max_tokens=120, **fields, **sampling)
    beside = a_request("beside", PROMPTS[0])

    log = answered(engine, request, beside)

    assert log.steps["guided"][-1].finish_reason == "stop"
    assert holds(log.text("guided"))
    assert log.text("beside").startswith(" Paris")


@GUIDED_ANSWERS
def test_a_grammar_binds_what_follows_the_reasoning(engine: Any, fields: dict[str, Any], holds: Any) -> None:
    prompt = engine.render_chat([{"role": "user", "content": QUESTION}], {"thinking": True})
    assert ends_inside(prompt)

    refused = engine.capabilities.formats_refused
    sampling = with_answer_format(SamplingParams(**fields), NO_TOOLS, None, prompt=prompt, begun="", refused=refused)
    guided = {"guided_structural_tag": sampling.guided_structural_tag}
    log = answered(engine, a_request("guided", prompt, max_tokens=300, **guided))

    assert log.steps["guided"][-1].finish_reason == "stop"
    reasoning, closing, answer = log.text("guided").partition("</think>")
    assert len(reasoning) > 10
    assert closing
    assert holds(answer)


@pytest.mark.parametrize(
    "fields", [{"guided_json": '{"type": "no such"}'}, {"guided_regex": "("}, {"guided_grammar": "root ::="}], ids=str
)
def test_a_grammar_that_is_none_is_the_clients_fault(engine: Any, fields: dict[str, Any]) -> None:
    (last,) = answered(engine, a_request("a", **fields)).steps["a"]

    assert isinstance(last.error, RequestError)
    assert "\n" not in str(last.error)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_the_longest_prompt_has_room_for_one_token(vllm_engine: Any) -> None:
    limit = vllm_engine.capabilities.max_seq_len
    log = answered(vllm_engine, a_request("a", prompt_token_ids=(0, *[5] * (limit - 2)), max_tokens=9))

    assert (len(log.token_ids("a")), log.steps["a"][-1].finish_reason) == (1, "length")


# --- order, ends and aborts -------------------------------------------------------------------------------------------


def test_one_call_brings_the_steps_of_an_iteration(vllm_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests an iteration is of: that depends on when the core gets them."""
    log, connection = StepLog(), vllm_engine._connection
    take, calls_each = connection.take, []

    def counted(outputs: Any) -> None:
        before = len(log.calls)
        take(outputs)
        calls_each.append(len(log.calls) - before)

    monkeypatch.setattr(connection, "take", counted)
    for number in range(20):
        vllm_engine.submit(a_request(str(number), STORY, max_tokens=50, ignore_eos=True), log)
    log.wait(*map(str, range(20)))
    assert set(calls_each) <= {0, 1}
    assert sum(calls_each) == len(log.calls)
    assert max(map(len, log.calls)) > 1


def test_an_answer_in_one_step_is_the_same(engine: Any) -> None:
    whole = a_request("whole", PROMPTS[0], wants_steps=False, logprobs=1)
    log = answered(engine, whole, a_request("steps", PROMPTS[0], logprobs=1))

    assert len(log.steps["whole"]) == 1
    assert log.text("whole") == log.text("steps")
    assert log.token_ids("whole") == log.token_ids("steps")
    assert log.steps["whole"][0].logprobs == log.steps["steps"].logprobs


def test_an_abort_ends_with_the_text_so_far(engine: Any) -> None:
    log = StepLog(on_first_step=engine.abort)
    engine.submit(a_request("a", STORY, max_tokens=4000, ignore_eos=True), log)

    (last,) = log.wait("a")

    assert last.finish_reason == "cancelled"
    assert len(log.token_ids("a")) < 4000
    assert answered(engine, a_request("next")).text("next").startswith(" Paris")


@settings(max_examples=12, derandomize=True)
@given(plan=st.lists(st.tuples(st.integers(1, 40), st.floats(0, 0.1), st.booleans()), min_size=1, max_size=12))
def test_every_request_ends_once_whenever_it_is_aborted(vllm_engine: Any, plan: list[tuple[int, float, bool]]) -> None:
    _abort_at_random(vllm_engine, plan)


@settings(max_examples=6, derandomize=True)
@given(plan=st.lists(st.tuples(st.integers(1, 40), st.floats(0, 0.1), st.booleans()), min_size=1, max_size=12))
def test_by_the_public_way_too(public_engine: Any, plan: list[tuple[int, float, bool]]) -> None:
    _abort_at_random(public_engine, plan)


def _abort_at_random(engine: Any, plan: list[tuple[int, float, bool]]) -> None:
    """Each of `plan`: the most tokens, seconds until the next request comes, whether the one before is aborted then."""
    log = StepLog()
    names = []
    for index, (max_tokens, pause_s, aborts) in enumerate(plan):
        names.append(f"{index}-{random.random()}")
        request = a_request(names[-1], STORY, max_tokens=max_tokens, ignore_eos=True, wants_steps=index % 3 > 0)
        engine.submit(request, log)
        time.sleep(pause_s)
        if aborts:
            engine.abort(names[max(0, index - 1)])
            engine.abort(names[-1])

    lasts = log.wait(*names)

    for name, last, (max_tokens, *_) in zip(names, lasts, plan, strict=True):
        assert last.error is None
        assert last.finish_reason in ("length", "cancelled")
        assert (len(log.token_ids(name)) == max_tokens) or last.finish_reason == "cancelled"


def test_numbers_are_zero_again_when_all_is_done(engine: Any) -> None:
    answered(engine, a_request("a"))

    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert stats.kv_blocks_total > 0


def test_perf_metrics_are_in_order(engine: Any) -> None:
    log = answered(engine, a_request("a", return_perf_metrics=True))

    metrics = log.steps["a"][-1].perf_metrics
    assert metrics is not None
    times = [metrics.arrival_time_ns, metrics.first_scheduled_time_ns, metrics.first_token_time_ns]
    assert 0 < times[0] <= times[1] <= times[2] <= metrics.last_token_time_ns


def test_a_conversation_is_rendered_by_the_checkpoints_template(vllm_engine: Any, reference_engine: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]

    for kwargs in ({}, {"thinking": True}):
        assert vllm_engine.render_chat(messages, kwargs) == reference_engine.render_chat(messages, kwargs)
