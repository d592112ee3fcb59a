"""A context and a generation engine on the strict stand-in, which share requests."""

import json
from typing import NamedTuple

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines.generate_request import ContextHandover, SamplingParams, read_handover
from deepseek_backend.engines.prompting import PromptTokenizer
from deepseek_backend.engines.tensorrt_llm.outputs import GrowingText, part_arguments
from deepseek_triton_build.catalog import load_release
from standin import harness as harness_module
from standin.harness import Harness, guided_llm_args
from support.engine_driver import make_request
from support.waiting import wait_for

RELEASES = ("1.0.0", "1.1.0", "1.2.0", "1.2.1")
TRANSCEIVER = {"cache_transceiver_config": {"backend": "UCX", "max_tokens_in_buffer": 8192}}
CONTEXT = {**TRANSCEIVER, "disable_overlap_scheduler": True}
EOS = 1
"""The stand-in's end token."""


class Pair(NamedTuple):
    context: Harness
    generation: Harness

    def hand_over(self, prompt="Why?", **fields):
        """Run the context phase; return its handover as the generation server reads it."""
        last = self.context.run(prompt, request_type="context_only", **fields)[-1]
        assert last.error is None
        assert last.handover is not None
        return read_handover(last.handover.to_json().decode())

    def go_on(self, handover, *, again=False, **fields):
        """Submit the second request of a client; with `again` the one that does without the KV cache."""
        kind = "context_and_generation" if again else "generation_only"
        ids = handover.prompt_token_ids
        return self.generation.submit(request_type=kind, handover=handover, prompt_token_ids=ids, **fields)

    def assert_nothing_is_held(self):
        wait_for(lambda: self.context.kv_sender.num_blocks == 0)


@pytest.fixture
def make_pair(make_engine):
    def make(release="1.2.1", **llm_args):
        return Pair(make_engine(release, **CONTEXT, **llm_args), make_engine(release, **TRANSCEIVER, **llm_args))

    return make


@pytest.fixture
def pair(make_pair):
    return make_pair()


def answer(steps):
    assert [step.error for step in steps] == [None] * len(steps)
    last = steps.last
    return steps.text, steps.token_ids, last.finish_reason, last.stop_reason, last.num_input_tokens


REQUESTS = [
    {},
    {"max_tokens": 30},
    {"max_tokens": 2},  # cut inside a character
    {"prompt": "Why?<think>"},
    {"return_perf_metrics": True, "wants_steps": False},
]


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_two_engines_give_the_answer_of_one(make_pair, subtests, release):
    pair = make_pair(release)
    for fields in REQUESTS if release == RELEASES[-1] else REQUESTS[:2]:
        with subtests.test(str(fields)):
            whole = answer(pair.generation.run(**fields))
            handover = pair.hand_over(**fields)
            rest = {name: value for name, value in fields.items() if name not in ("prompt", "prompt_token_ids")}
            assert answer(pair.generation.result(pair.go_on(handover, **rest))) == whole
            pair.assert_nothing_is_held()


def test_several_tokens_an_iteration(make_pair):
    pair = make_pair(speculative_config={"decoding_type": "MTP", "num_nextn_predict_layers": 2})
    whole = answer(pair.generation.run(max_tokens=20))
    assert answer(pair.generation.result(pair.go_on(pair.hand_over(), max_tokens=20))) == whole


@pytest.mark.slow
def test_the_context_side_tells_what_is_certain_and_keeps_the_cache(pair):
    steps = pair.context.run("Why?", request_type="context_only", max_tokens=50)
    whole = answer(pair.generation.run("Why?", max_tokens=50))
    (step,) = steps
    assert step.handover is not None
    assert (step.finish_reason, list(step.token_ids)) == ("length", whole[1][:1])
    assert whole[0].startswith(step.text)
    assert "\N{REPLACEMENT CHARACTER}" not in step.text
    assert step.handover.form == "tensorrt_llm 1.2.1 R1" == pair.generation.engine.capabilities.handover_form
    assert (step.handover.ended, len(step.handover.prompt_token_ids)) == (False, whole[4])
    assert pair.context.kv_sender.num_blocks == 1


@pytest.mark.slow
def test_the_prompt_tokens_from_the_cache_are_those_of_the_context_side(pair):
    prompt = "word " * 20  # four blocks, of which the stand-in finds all but the last
    handover = pair.hand_over(prompt)
    steps = pair.generation.result(pair.go_on(handover))
    assert {step.num_cached_tokens for step in steps} == {handover.num_cached_tokens} == {96}


@pytest.mark.slow
def test_the_first_token_does_not_wait_for_the_kv_cache(pair):
    whole = answer(pair.generation.run("abc"))
    handover = pair.hand_over("abc")
    pair.context.kv_sender.may_send.clear()
    request = pair.go_on(handover)
    pair.generation.sink.wait_for(lambda: pair.generation.steps_of(request))
    assert pair.generation.steps_of(request).token_ids == whole[1][:1]
    pair.context.kv_sender.may_send.set()
    assert answer(pair.generation.result(request)) == whole


@pytest.mark.slow
def test_a_stop_token_that_comes_first_ends_the_answer_and_the_cache_is_fetched(pair):
    """TensorRT-LLM does not look at it, neither on the context side nor on the generation side."""
    first = answer(pair.generation.run(max_tokens=1))[1][0]
    for shown in (False, True):
        fields = {"stop_token_ids": (first,), "include_stop_str_in_output": shown}
        whole = answer(pair.generation.run(**fields))
        handover = pair.hand_over(**fields)
        assert handover.ended
        assert handover.opaque_state
        assert answer(pair.generation.result(pair.go_on(handover, **fields))) == whole
        pair.assert_nothing_is_held()


@pytest.mark.slow
def test_an_end_token_that_comes_first_leaves_nothing_to_fetch(pair, monkeypatch):
    for side in pair:
        module = type(side.engine._llm._executor).submit.__globals__  # each engine has a stand-in of its own
        monkeypatch.setitem(module, "answer", lambda *_: iter([EOS]))
    whole = answer(pair.generation.run())
    handover = pair.hand_over()
    assert (handover.ended, handover.first_gen_tokens, handover.opaque_state) == (True, (EOS,), b"")
    assert pair.context.kv_sender.num_blocks == 0
    assert answer(pair.generation.result(pair.go_on(handover))) == whole == ("", [EOS], "stop", None, 5)


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [True, False])
def test_the_first_token_comes_once_however_the_release_does_it(make_engine, monkeypatch, repeats):
    document = yaml.safe_load(load_release("1.2.1").text)
    document["disaggregated_params"]["repeats_first_token"]["value"] = repeats

    class Changed(NamedTuple):
        text: str

    monkeypatch.setattr(harness_module, "load_release", lambda _: Changed(yaml.safe_dump(document)))
    pair = Pair(make_engine(**CONTEXT), make_engine(**TRANSCEIVER))
    whole = answer(pair.generation.run(max_tokens=20))
    assert answer(pair.generation.result(pair.go_on(pair.hand_over(), max_tokens=20))) == whole
    pair.assert_nothing_is_held()


def test_without_the_kv_cache_the_prompt_and_the_first_token_are_computed_again(pair):
    handover = pair.hand_over(max_tokens=20)
    text, ids, reason, _, num_input_tokens = answer(
        pair.generation.result(pair.go_on(handover, again=True, max_tokens=20))
    )
    assert (ids[0], len(ids), reason) == (handover.first_gen_tokens[0], 20, "length")
    assert num_input_tokens == len(handover.prompt_token_ids)
    assert text
    assert pair.context.kv_sender.num_blocks == 1


@pytest.mark.slow
def test_an_abort_fetches_the_kv_cache(pair):
    handover = pair.hand_over()
    pair.context.kv_sender.may_send.clear()
    request = pair.go_on(handover)
    pair.generation.sink.wait_for(lambda: pair.generation.steps_of(request))
    pair.generation.engine.abort(request.request_id)
    assert pair.generation.ended(request) == ["cancelled"]
    assert pair.context.kv_sender.num_blocks == 1
    pair.context.kv_sender.may_send.set()
    pair.assert_nothing_is_held()
    wait_for(lambda: not pair.generation.engine._tasks)
    handover = pair.hand_over()
    with pair.generation.held_loop():
        request = pair.go_on(handover)
        pair.generation.engine.abort(request.request_id)
    assert pair.generation.ended(request) == ["cancelled"]
    pair.assert_nothing_is_held()


@pytest.mark.slow
def test_stop_waits_for_the_kv_cache(pair):
    requests = [pair.go_on(pair.hand_over(f"prompt {number}")) for number in range(8)]
    pair.generation.engine.stop()
    for request in requests:
        assert pair.generation.result(request)[-1].finish_reason in ("cancelled", "stop")
    pair.assert_nothing_is_held()


@pytest.mark.slow
def test_a_fetch_that_never_ends_is_left(pair, monkeypatch):
    monkeypatch.setattr("deepseek_backend.engines.tensorrt_llm.tensorrt_llm_engine.FETCH_TIMEOUT_S", 0.01)
    handover = pair.hand_over()
    pair.context.kv_sender.may_send.clear()
    request = pair.go_on(handover, max_tokens=1)
    assert pair.generation.result(request)[-1].finish_reason == "length"
    wait_for(lambda: not pair.generation.engine._tasks)
    pair.context.kv_sender.may_send.set()


@pytest.mark.slow
def test_a_request_that_is_refused_leaves_the_kv_cache_to_another(pair, monkeypatch):
    handover = pair.hand_over()
    conflict = pair.go_on(handover, stop_token_ids=(100,), ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(pair.generation.engine._llm, "_refuse", _refuse)
        refused = pair.go_on(handover)
        for request in (conflict, refused):
            (step,) = pair.generation.result(request)
            assert step.error is not None
            assert step.error.code in (ErrorCode.INVALID_ARGUMENT, ErrorCode.UNSUPPORTED)
    assert answer(pair.generation.result(pair.go_on(handover)))
    pair.assert_nothing_is_held()


def _refuse(params):
    raise ValueError("not these")


@pytest.mark.slow
def test_a_kv_cache_that_is_gone_is_told_and_no_engine_dies_of_it(pair):
    handover = pair.hand_over()
    pair.generation.result(pair.go_on(handover))
    for _ in range(5):
        error = pair.generation.result(pair.go_on(handover))[-1].error
        assert error.code is ErrorCode.CONTEXT_LOST
    assert pair.generation.engine.health().alive


@pytest.mark.slow
def test_an_engine_that_shares_nothing_says_why(make_engine):
    for release, llm_args, reason in [
        ("0.21.0", {}, "not established for TensorRT-LLM 0.21.0"),
        ("1.2.1", {}, "model.yaml has no cache_transceiver_config with a backend"),
        ("1.2.1", {"cache_transceiver_config": {"max_tokens_in_buffer": 1}}, "build with --profile ctx or gen"),
    ]:
        capabilities = make_engine(release, **llm_args).engine.capabilities
        assert capabilities.handover_form == ""
        assert reason in capabilities.unsupported["request_type"]


def test_what_a_generation_server_can_not_do_is_refused(pair):
    error = pair.generation.run(request_type="context_only")[-1].error
    assert error.code is ErrorCode.UNSUPPORTED
    assert "disable_overlap_scheduler" in str(error)
    document = json.loads(pair.hand_over().to_json())
    for change, expected in ({"first_gen_tokens": [3, 4]}, "one token"), ({"opaque_state": ""}, "opaque_state"):
        handover = read_handover(json.dumps(document | change))
        assert expected in str(pair.generation.result(pair.go_on(handover))[-1].error)


@pytest.mark.slow
def test_a_guide_is_refused_by_name(make_pair):
    pair = make_pair(**guided_llm_args("1.2.1"))
    error = pair.context.run(request_type="context_only", guided_regex="a")[-1].error
    assert error.code is ErrorCode.UNSUPPORTED
    assert "guided_regex: not established for a request that two servers share" in str(error)


def test_drafts_are_handed_on():
    class Llmapi:
        DisaggregatedParams = SamplingParams = dict

    ids = {"prompt_token_ids": (5,), "first_gen_tokens": (6,), "draft_tokens": (7, 8)}
    handover = ContextHandover(form="", opaque_state=b"s", ctx_request_id=9, **ids)
    request = make_request("r", max_tokens=3, request_type="generation_only", handover=handover)
    sent = {"request_type": "generation_only", "first_gen_tokens": [6], "ctx_request_id": 9, "opaque_state": b"s"}
    assert part_arguments(request, {"max_tokens": 3}, [5], Llmapi) == {
        "inputs": [5],
        "streaming": True,
        "sampling_params": {"max_tokens": 3, "detokenize": False},
        "disaggregated_params": sent | {"draft_tokens": [7, 8]},
    }


class ByteTokenizer:
    def decode(self, token_ids, **_):
        return bytes(token_ids).decode(errors="replace")


@settings(max_examples=40)
@given(text=st.text(), pieces=st.lists(st.integers(1, 5)))
def test_growing_text_joins_to_the_whole_and_never_splits_a_character(text, pieces):
    ids = list(text.encode())
    growing = GrowingText(PromptTokenizer(ByteTokenizer()), SamplingParams())
    parts, at = [], 0
    for size in pieces:
        parts.append(growing.add(ids[at : at + size], final=False))
        at += size
        assert text.startswith("".join(parts))
    parts.append(growing.add(ids[at:], final=True))
    assert "".join(parts) == text
