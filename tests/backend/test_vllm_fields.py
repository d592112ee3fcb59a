"""Fields of requests to the vLLM engine: their translation, what is refused, and what an answer carries."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_backend.answer_format import supported_fields
from deepseek_backend.contract import SAMPLING_BY_NAME, SAMPLING_FIELDS, ErrorCode
from deepseek_backend.engines.base import PerfMetrics
from deepseek_backend.engines.generate_request import SamplingParams
from deepseek_backend.engines.vllm.loading import VllmRelease
from deepseek_backend.engines.vllm.open_answer import (
    APPLIED_HERE,
    BANNED,
    GrowingAnswer,
    guide,
    refusal,
    sampling_arguments,
    unsupported_fields,
)
from deepseek_backend.errors import RequestError
from deepseek_triton_build.data.vllm import VLLM_VERSIONS, load_vllm
from support.engine_driver import Answer, make_request
from support.fake_vllm import MAX_MODEL_LEN, TOKENIZER, VLLMValidationError, recorded_vllm
from tiny_checkpoint.architecture import EOS

WAYS = pytest.mark.parametrize("public", [False, True], ids=["core", "generate"])
VERSIONS = pytest.mark.parametrize("version", VLLM_VERSIONS)
HELLO = TOKENIZER.encode("Hello world", add_special_tokens=False).ids
EOS_ID = TOKENIZER.token_to_id(EOS)
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}


def release(version="0.24.0"):
    return VllmRelease(recorded_vllm(version))


def request(**fields):
    return make_request("r", "p", max_tokens=20, **fields)


def arguments(*, max_tokens=20, max_temperature=2.0, **sampling):
    return sampling_arguments(
        request(**sampling),
        max_tokens=max_tokens,
        max_temperature=max_temperature,
        word_token_ids=lambda word: [len(word)],
    )


ALWAYS = {"detokenize": False, "skip_clone": True, "max_tokens": 20}
GREEDY = {**ALWAYS, "temperature": 0.0}
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": -1.0, "frequency_penalty": 0.5}
TRANSLATED = [
    ({}, GREEDY),
    ({"temperature": 0.0, "top_k": 50, "seed": 3}, GREEDY),
    ({"temperature": 1e-6}, GREEDY),
    ({"top_k": 1, "temperature": 0.7}, GREEDY),
    ({"top_p": 0.0}, GREEDY),
    ({"top_k": 0, "min_p": 0.0}, GREEDY),
    ({"temperature": 0.7}, {**ALWAYS, "temperature": 0.7}),
    ({"temperature": 0.005}, {**ALWAYS, "temperature": 0.005}),
    ({"temperature": 2.0, "top_k": 0, "min_p": 0.0}, {**ALWAYS, "temperature": 2.0}),
    ({"top_k": 50}, {**ALWAYS, "top_k": 50}),
    ({"top_p": 0.9}, {**ALWAYS, "top_p": 0.9}),
    ({"min_p": 0.1, "seed": 2**64 - 1}, {**ALWAYS, "min_p": 0.1, "seed": 2**64 - 1}),
    ({"min_tokens": 5, "ignore_eos": True}, {**GREEDY, "min_tokens": 5, "ignore_eos": True}),
    ({"min_tokens": 50}, {**GREEDY, "min_tokens": 20}),
    ({"stop_token_ids": (7, 8)}, {**GREEDY, "stop_token_ids": [7, 8]}),
    ({"bad": ("a", " b")}, {**GREEDY, "_bad_words_token_ids": [[1], [2], [1], [2]]}),
    ({"logit_bias": {5: -100.0, 6: 0.5}}, {**GREEDY, "logit_bias": {5: -100.0, 6: 0.5}}),
    ({"logit_bias": {}}, GREEDY),
    ({"logprobs": 0, "prompt_logprobs": 5}, {**GREEDY, "logprobs": 0, "prompt_logprobs": 5}),
    (PENALTIES, {**GREEDY, **PENALTIES}),
]
GUIDES = [
    ("guided_json", '{"type": "object"}', {"json": '{"type": "object"}'}),
    ("guided_json_object", True, {"json_object": True}),
    ("guided_json_object", False, {}),
    ("guided_regex", "[a-z]+", {"regex": "[a-z]+"}),
    ("guided_grammar", 'root ::= "a"', {"grammar": 'root ::= "a"'}),
    ("guided_structural_tag", "{}", {"structural_tag": "{}"}),
]


def test_a_request_in_vllms_fields():
    assert [arguments(**sampling) for sampling, _ in TRANSLATED] == [expected for _, expected in TRANSLATED]
    guides = [guide(SamplingParams(**{field: value})) for field, value, _ in GUIDES]
    assert guides == [expected for *_, expected in GUIDES]


def test_what_can_not_be_translated_is_refused_by_name():
    with pytest.raises(RequestError) as caught:
        arguments(temperature=3.5)
    assert str(caught.value).startswith("temperature: expected at most 2, ")
    assert arguments(temperature=3.5, max_temperature=None)["temperature"] == 3.5
    assert arguments(temperature=3.5, top_k=1) == GREEDY
    known = release()
    record = {
        **known.record,
        "sampling_params": [name for name in known.record["sampling_params"] if name != "bad_words"],
        "structured_outputs": [name for name in known.record["structured_outputs"] if name != "grammar"],
    }
    reasons = unsupported_fields(VllmRelease(record), {"scheduling_policy": "priority"})
    assert reasons == dict.fromkeys(("bad", "guided_grammar"), "vLLM 0.24.0 does not have it")
    refused = [refusal(error, SamplingParams(**sampling)) for error, sampling, _ in REFUSALS]
    assert [str(one) for one in refused] == [said for *_, said in REFUSALS]
    assert {one.code for one in refused} == {ErrorCode.INVALID_ARGUMENT}


EXAMPLES = {
    "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.5, "repetition_penalty": 2.0, "presence_penalty": 1.0,
    "frequency_penalty": 1.0, "min_tokens": 3, "ignore_eos": True, "stop_token_ids": (3,), "bad": ("x",), "logprobs": 3,
    "prompt_logprobs": 3, "logit_bias": {5: 1.0},
    **{field.name: True if field.name == "guided_json_object" else "x" for field in SAMPLING_FIELDS if field.guided},
}  # fmt: skip


@VERSIONS
def test_every_field_of_the_contract_is_translated_or_refused(version):
    """A field that is accepted and has no effect is a defect. The seed needs sampling to have one."""
    unsupported = unsupported_fields(release(version), {})
    assert unsupported == {"priority": "needs the engine argument scheduling_policy: priority"}
    assert unsupported_fields(release(version), {"scheduling_policy": "priority"}) == {}
    for name in SAMPLING_BY_NAME.keys() - unsupported.keys() - APPLIED_HERE - {"best_of", "include_stop_str_in_output"}:
        sampling = {"temperature": 0.5, "seed": 7} if name == "seed" else {name: EXAMPLES[name]}
        without = {"temperature": 0.5} if name == "seed" else {}
        has_effect = arguments(**sampling) != arguments(**without) or guide(SamplingParams(**sampling))
        assert has_effect, name
    # No version gets a field that it does not have. The private one is looked for at the start.
    assert arguments(**EXAMPLES, seed=7).keys() <= {*release(version).record["sampling_params"], BANNED}
    reasons = unsupported_fields(release(version), {**MTP, "scheduling_policy": "priority"})
    assert reasons.keys() == {"min_p", "logit_bias"}
    assert {name for name in SAMPLING_BY_NAME if load_vllm(version).why_refused(name, drafts=True)} == reasons.keys()


REFUSALS = [
    (VLLMValidationError("too many", parameter="logprobs"), {}, "logprobs: vLLM refused it: too many"),
    (VLLMValidationError("no", parameter="bad_words"), {}, "bad: vLLM refused it: no"),
    (VLLMValidationError("no", parameter="extra_args"), {}, "vLLM refused the request: no"),
    (ValueError("bad_words cannot\nbe empty"), {}, "bad: vLLM refused it: bad_words cannot be empty"),
    (ValueError("Grammar error"), {"guided_regex": "("}, "guided_regex: vLLM refused it: Grammar error"),
    (ValueError("something"), {}, "vLLM refused the request: something"),
]


def banned(faked, *words):
    token_ids = faked.core.params[faked.accepted(bad=words).request_id]._bad_words_token_ids
    return [TOKENIZER.decode(ids) for ids in token_ids]


def test_a_bad_word_is_banned_with_and_without_a_blank_before_it(faked):
    assert banned(faked, " fox", "The") == ["fox", " fox", "The", " The"]
    assert banned(faked, "\n") == ["\n"]


def test_bad_words_that_would_end_vllms_worker_are_refused(make_vllm):
    faked = make_vllm()
    assert "at most 64 words" in str(faked.refused(bad=tuple(f"word{number}" for number in range(65))))
    assert "at most 1,024 tokens in all" in str(faked.refused(bad=("zyxwvutsrqponm" * 60,)))
    assert "one without a token" in str(faked.refused(bad=("",)))


def test_a_request_that_vllm_refuses_gets_an_error_and_the_next_one_an_answer(faked):
    faked.core.refuse = VLLMValidationError("too long", parameter="prompt_logprobs")
    assert str(faked.refused()) == "prompt_logprobs: vLLM refused it: too long"
    faked.core.refuse = RuntimeError()
    faked.core.refuse.__cause__ = ValueError("no grammar")
    assert faked.refused().code == ErrorCode.INVALID_ARGUMENT
    faked.core.refuse = RuntimeError("broken")
    error = faked.refused()
    assert (str(error), error.code) == ("vLLM failed: RuntimeError: broken", ErrorCode.INTERNAL)
    faked.core.refuse = None
    assert faked.accepted().request_id in faked.core.prompts


@WAYS
def test_the_largest_priority_is_vllms_smallest(make_vllm, public):
    faked = make_vllm(public=public, scheduling_policy="priority")
    assert faked.engine.capabilities.priority
    requests = [faked.accepted(priority=priority) for priority in (-3, 0, 5)]
    assert [faked.core.priorities[request.request_id] for request in requests] == [3, 0, -5]


def test_a_prompt_reaches_vllm_in_token_ids_and_max_tokens_gets_the_rest(faked):
    whole = TOKENIZER.encode("Why? " * 9).ids
    for form, expected in [
        ({"prompt": "Why? " * 9}, whole),
        ({"prompt": "Why? " * 9, "truncate_prompt_tokens": 3}, whole[-3:]),
        ({"prompt_token_ids": (5, 6, 7), "truncate_prompt_tokens": 2}, [6, 7]),
        ({"prompt": "Why? " * 9, "guided_json": '{"type": "object"}'}, whole),
    ]:
        request = faked.accepted(**form)
        assert list(faked.core.prompts[request.request_id]) == expected
    assert faked.core.params[request.request_id].structured_outputs.json == '{"type": "object"}'
    request = faked.accepted(prompt_token_ids=(5,) * (MAX_MODEL_LEN - 1), max_tokens=50)
    assert faked.core.params[request.request_id].max_tokens == 1
    assert supported_fields(faked.engine.capabilities)["best_of"] == ""


def grown(answer, parts, reason="length", stop=None):
    steps = [answer.advance(part, 1.0 + number) for number, part in enumerate(parts[:-1])]
    return Answer([*(step for step in steps if step is not None), answer.end(reason, stop, parts[-1], 9.0)])


def answer_to(**given):
    return GrowingAnswer(request(**given), TOKENIZER, 4, 0.5)


TOKENS = st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), min_size=1, max_size=30)


@pytest.mark.slow
@given(TOKENS, st.lists(st.integers(0, 3), max_size=30), st.booleans())
def test_text_is_the_same_however_the_tokens_come(token_ids, cuts, skip):
    parts, left = [], list(token_ids)
    for size in cuts:
        if size and len(left) > size:
            parts.append(left[:size])
            left = left[size:]
    parts.append(left)
    expected = TOKENIZER.decode(token_ids, skip_special_tokens=skip)
    streamed = grown(answer_to(skip_special_tokens=skip), parts)
    (whole,) = grown(answer_to(skip_special_tokens=skip, wants_steps=False), parts)
    assert streamed.text == whole.text == expected
    assert streamed.token_ids == list(whole.token_ids) == token_ids


KEEPS = {"include_stop_str_in_output": True}
SHOWS = {"skip_special_tokens": False}
LAST_TOKENS = [  # the request, its last token, vLLM's reason and stop reason, then the text and our stop reason
    ({}, EOS_ID, "stop", None, "Hello world", None),
    (SHOWS, EOS_ID, "stop", None, "Hello world", None),
    ({"stop_token_ids": (HELLO[0],)}, HELLO[0], "stop", HELLO[0], "Hello world", HELLO[0]),
    ({"stop_token_ids": (HELLO[0],), **KEEPS}, HELLO[0], "stop", HELLO[0], "Hello worldHello", HELLO[0]),
    (KEEPS, EOS_ID, "stop", None, "Hello world", None),
    # One of generation_config's further end tokens, for which vLLM gives a stop reason.
    ({}, HELLO[0], "stop", HELLO[0], "Hello world", None),
    ({"ignore_eos": True, **SHOWS}, EOS_ID, "length", None, f"Hello world{EOS}", None),
]


@pytest.mark.parametrize("wants_steps", [True, False])
def test_the_token_that_ends_an_answer_is_counted_and_shown_on_request_only(wants_steps):
    for sampling, last, reason, stop, expected_text, expected_stop in LAST_TOKENS:
        steps = grown(answer_to(wants_steps=wants_steps, **sampling), [HELLO, [last]], reason, stop)
        assert (steps.text, steps.token_ids) == (expected_text, [*HELLO, last])
        assert (steps[-1].finish_reason, steps[-1].stop_reason) == (reason, expected_stop)


def arrays(*rows, ranks):
    """Return a LogprobsLists: for each row the token itself, then the likeliest ones."""
    token_ids = np.array([[token_id for token_id, _ in row] for row in rows])
    logprobs = np.array([[value for _, value in row] for row in rows])
    return (token_ids, logprobs, np.array(ranks), None)


@pytest.mark.parametrize("wants_steps", [True, False])
def test_logprobs_come_with_the_token_first_and_then_the_likeliest(faked, wants_steps):
    a, b, c = HELLO[0], HELLO[1], HELLO[0] + 1
    request = faked.accepted(logprobs=2, prompt_logprobs=1, wants_steps=wants_steps)
    faked.emit(
        request,
        [a],
        new_logprobs=arrays([(a, -3.0), (b, -0.5), (c, -1.0)], ranks=[7]),
        new_prompt_logprobs_tensors=arrays([(c, -2.0), (a, -0.25)], [(a, -0.5), (a, -0.5)], ranks=[4, 1]),
        prefill_stats=SimpleNamespace(num_cached_tokens=3),
    )
    last = arrays([(b, -0.5), (b, -0.5), (c, -1.0)], ranks=[1])
    faked.emit(request, [b], "length", new_logprobs=last)
    steps = faked.result(request)
    assert len(steps) == (2 if wants_steps else 1)
    found = [[entry[:3] for entry in position] for position in steps.logprobs]
    assert found == [[(a, -3.0, 7), (b, -0.5, 1), (c, -1.0, 2)], [(b, -0.5, 1), (c, -1.0, 2)]]
    assert {entry.text for position in steps.logprobs for entry in position} == {
        TOKENIZER.decode([token_id], skip_special_tokens=False) for token_id in (a, b, c)
    }
    prompt = [position and [entry[:3] for entry in position] for step in steps for position in step.prompt_logprobs]
    assert prompt == [None, [(c, -2.0, 4), (a, -0.25, 1)], [(a, -0.5, 1)]]
    assert steps[-1].num_cached_tokens == 3


@pytest.mark.slow
def test_a_row_that_is_wide_for_another_request_is_cut(make_vllm):
    """The rows of an iteration are as wide as its most demanding request needs."""
    faked = make_vllm()
    a, b, c = HELLO[0], HELLO[1], HELLO[0] + 1
    request = faked.accepted(logprobs=1)
    wide = arrays([(a, -3.0), (b, -0.5), (c, -1.0)], ranks=[7])
    faked.emit(request, [a], "length", new_logprobs=wide)
    (step,) = faked.result(request)
    assert [[entry[:3] for entry in position] for position in step.logprobs] == [[(a, -3.0, 7), (b, -0.5, 1)]]


def test_metrics_have_the_times_on_the_engines_clock():
    answer = answer_to(return_perf_metrics=True)
    answer.scheduled_s, answer.num_cached_tokens = 0.75, 1
    *_, last = grown(answer, [HELLO[:1], HELLO[1:2], HELLO[2:]])
    assert last.perf_metrics == PerfMetrics(
        kv_cache_hit_rate=0.25,
        arrival_time_ns=500_000_000,
        first_scheduled_time_ns=750_000_000,
        first_token_time_ns=1_000_000_000,
        last_token_time_ns=9_000_000_000,
    )
    assert grown(answer_to(), [HELLO])[-1].perf_metrics is None
    (step,) = grown(answer_to(wants_steps=False), [HELLO[:1], HELLO[1:]])
    assert step.generation_s is not None
    assert math.isclose(step.generation_s, 8.0)
    step = answer_to(wants_steps=False).cancel()
    assert (step.text, list(step.token_ids), step.finish_reason, step.generation_s) == ("", [], "cancelled", None)


@pytest.mark.slow
def test_the_time_of_scheduling_comes_with_the_first_output(make_vllm):
    faked = make_vllm()
    request = faked.accepted(return_perf_metrics=True)
    kinds = (("QUEUED", 1.0), ("SCHEDULED", 2.0), ("PREEMPTED", 3.0), ("SCHEDULED", 4.0))
    events = [SimpleNamespace(type=SimpleNamespace(name=name), timestamp=at_s) for name, at_s in kinds]
    faked.emit(request, HELLO[:1], events=events)
    faked.emit(request, HELLO[1:], "length")
    metrics = faked.result(request)[-1].perf_metrics
    assert metrics is not None
    assert metrics.first_scheduled_time_ns == 2_000_000_000
    assert metrics.arrival_time_ns < metrics.first_token_time_ns <= metrics.last_token_time_ns
