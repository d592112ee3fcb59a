"""The TensorRT-LLM engine with the strict stand-in, in this process."""

import importlib
import json
import math
import os
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_backend.config import parse_config
from deepseek_backend.contract import SAMPLING_BY_NAME, ErrorCode
from deepseek_backend.engines.loop_engine import MAX_SHORT_PROMPT
from deepseek_backend.engines.tensorrt_llm import TensorRTLLMEngine, translation
from deepseek_backend.engines.tensorrt_llm import tensorrt_llm_engine as engine_module
from deepseek_backend.errors import ConfigError, EngineError, RequestError, UnavailableError
from deepseek_backend.release import is_release, read_release
from deepseek_triton_build.catalog import RELEASES
from deepseek_triton_build.data.spelling import spell
from standin.harness import WAIT_S, guided_llm_args
from support.engine_driver import StepLog, make_request
from support.waiting import wait_for

MTP = {"decoding_type": "MTP", "num_nextn_predict_layers": 2}
MTP_SAMPLING = {**MTP, "allow_advanced_sampling": True}


def run_with_one_iteration_first(harness, monkeypatch, **sampling):
    """The first step is the first iteration's: there is no other before it is delivered."""
    sequence_class = importlib.import_module("tensorrt_llm._engine").Sequence
    iterate = sequence_class.step

    def step(sequence, *args):
        if sequence._num_tokens:
            harness.sink.wait_for(lambda: bool(harness.sink.calls))
        return iterate(sequence, *args)

    with monkeypatch.context() as patch:
        patch.setattr(sequence_class, "step", step)
        return harness.run(**sampling)


@pytest.mark.slow
def test_a_stream_adds_up_to_the_whole_answer(make_engine, monkeypatch):
    streamed = run_with_one_iteration_first(make_engine(), monkeypatch)
    whole = make_engine(stream_interval=10_000).run()
    assert len(whole) == 1
    assert len(streamed) > 1
    assert (streamed.text, streamed.token_ids) == (whole.text, whole.token_ids)
    assert [step.finish_reason for step in streamed if step.finish_reason] == ["stop"]


@pytest.mark.slow
@settings(max_examples=40)
@given(text=st.text(), cuts=st.lists(st.integers(0, 400), max_size=20))
def test_increments_of_a_growing_text_join_to_it(text, cuts):
    data = text.encode()
    sent = ""
    for cut in sorted(cuts):
        so_far = data[:cut].decode(errors="replace")
        sent += translation.complete_text(so_far, len(sent), final=False)
        assert not sent.endswith(translation.INCOMPLETE)
    assert sent + translation.complete_text(text, len(sent), final=True) == text


def test_a_prompt_that_can_not_be_chunked_has_less_room(make_engine):
    harness = make_engine(enable_chunked_prefill=False, max_num_tokens=12)
    error = harness.refused("x" * 1234)
    assert error.code is ErrorCode.PROMPT_TOO_LONG
    assert "1,235 tokens and at most 12 fit" in str(error)


def test_special_and_stop_tokens(harness):
    answer = harness.run()
    assert harness.text(skip_special_tokens=False) == answer.text + "<｜end▁of▁sentence｜>"
    stop = answer.token_ids[5]
    assert stop not in harness.run(stop_token_ids=(stop,)).token_ids
    assert "stop" in harness.engine.capabilities.sampling_fields
    assert harness.text(stop=("a",)) == answer.text


SAMPLES = [  # releases, and what makes a temperature alone sample
    ("1.2.1", {}),
    ("1.2.0", {"speculative_config": MTP_SAMPLING}),
    ("1.1.0", {}),
    *((release, {"enable_trtllm_sampler": True}) for release in ("1.0.0", "0.21.0")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("release", "llm_args"), SAMPLES)
def test_a_temperature_alone_samples(make_engine, release, llm_args):
    """Up to 1.1 TensorRT-LLM decodes greedily unless top_k or top_p is given as well."""
    harness = make_engine(release, **llm_args)
    greedy = harness.text()
    assert harness.text(temperature=0.0) == harness.text(temperature=0.0, top_p=0.9) == greedy
    assert harness.text(temperature=0.6) != greedy


def params_of(**sampling):
    request = make_request("r", "p", max_tokens=5, **sampling)
    return [translation.sampling_params(request, seeded=seeded) for seeded in (True, True, False)]


def test_greedy_requests_carry_no_sampling_fields_and_seeded_samplers_get_seeds():
    for sampling in ({}, {"temperature": 0.0, "top_p": 0.5}, {"top_k": 1}):
        params, *_ = params_of(**sampling)
        assert not params.keys() & {"temperature", "top_k", "top_p", "min_p", "seed"}
        assert params["exclude_input_from_output"] is True
    one, two, without = params_of(temperature=1.0)
    assert one["seed"] != two["seed"]
    assert "seed" not in without


CONFIGURATIONS = [
    pytest.param(release, llm_args, id=f"{release} {name}")
    for release, name, llm_args in [
        *((release, "default", {}) for release in RELEASES),
        *((release, "MTP", {"speculative_config": MTP}) for release in RELEASES),
        *((release, "MTP sampling", {"speculative_config": MTP_SAMPLING}) for release in ("1.2.1", "1.2.0")),
        *((release, "C++ sampler", spell({"sampler_type": "TRTLLMSampler"}, release)) for release in RELEASES),
        *((release, "mixed", spell({"sampler_type": "TorchSampler"}, release)) for release in ("1.0.0", "0.21.0")),
    ]
]

VALUES = {  # of the fields that depend on the sampler
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.1,
    "seed": 7,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "min_tokens": 3,
    "bad": ("naïve",),
    "guided_regex": "[a-z]+",
}


@pytest.mark.slow
@pytest.mark.parametrize(("release", "llm_args"), CONFIGURATIONS)
def test_every_claimed_field_is_applied_by_the_sampler(make_engine, release, llm_args):
    """The stand-in raises for a field its sampler ignores."""
    harness = make_engine(release, **guided_llm_args(release), **llm_args)
    capabilities = harness.engine.capabilities
    named = capabilities.sampling_fields | capabilities.unsupported.keys() | {"best_of"}
    assert named == SAMPLING_BY_NAME.keys() | {"priority", "request_type"}
    claimed = {name: value for name, value in VALUES.items() if name in capabilities.sampling_fields}
    assert harness.run(max_tokens=5, **claimed)[-1].finish_reason == "length"
    for name, value in VALUES.items() - claimed.items() - {("seed", 7)}:  # a seed is not even sent without sampling
        (step,) = harness.run(**{name: value})
        assert isinstance(step.error, RequestError), name


@pytest.mark.slow
def test_a_refusal_says_why(make_engine):
    unsupported = make_engine().engine.capabilities.unsupported
    reasons = {"repetition_penalty": "ignores it", "logit_bias": "a bias only as", "min_tokens": "counts the prompt"}
    for field, reason in reasons.items():
        assert reason in unsupported[field]
    assert "allow_advanced" in make_engine(speculative_config=MTP).engine.capabilities.unsupported["temperature"]


@pytest.mark.slow
def test_mtp_gives_several_tokens_an_iteration(make_engine, monkeypatch):
    for llm_args, num_tokens in ({}, 1), ({"speculative_config": MTP}, 3):
        steps = run_with_one_iteration_first(make_engine(**llm_args), monkeypatch, max_tokens=29, ignore_eos=True)
        assert (len(steps[0].token_ids), len(steps.token_ids)) == (num_tokens, 29)


def test_the_time_between_tokens_is_known_or_said_to_be_unknown():
    for first_s, last_s, expected in (5, 7.5, 2.5), (5, 5, 0), (5, 0, 0), (0, 7.5, math.nan):
        timing = SimpleNamespace(first_token_time=timedelta(seconds=first_s), last_token_time=timedelta(seconds=last_s))
        assert translation.generation_seconds(SimpleNamespace(timing_metrics=timing)) == pytest.approx(
            expected, nan_ok=True
        )
    assert math.isnan(translation.generation_seconds(None))


@pytest.mark.slow
def test_an_answer_that_wants_no_steps_comes_whole_and_is_the_same(make_engine):
    harness = make_engine(enable_iter_perf_stats=True)
    assert harness.engine.capabilities.whole_answers
    for sampling in ({}, {"logprobs": 1}, {"max_tokens": 7, "ignore_eos": True}):
        streamed = harness.run(**sampling)
        (step,) = harness.run(**sampling, wants_steps=False)
        assert (step.text, step.token_ids, list(step.logprobs)) == (
            streamed.text,
            streamed.token_ids,
            streamed.logprobs,
        )
        assert (step.finish_reason, step.stop_reason) == (streamed[-1].finish_reason, streamed[-1].stop_reason)
        assert step.num_input_tokens == streamed[-1].num_input_tokens
        assert step.generation_s >= 0
        assert step.perf_metrics is None
        assert all(each.generation_s is None for each in streamed)
    # Without a sign of life, or the tokens' times, no answer comes whole.
    for release, llm_args in ("1.2.1", {}), ("0.21.0", {"enable_iter_perf_stats": True}):
        assert not make_engine(release, **llm_args).engine.capabilities.whole_answers


def test_a_whole_answer_that_is_aborted_brings_what_it_had(make_engine, monkeypatch):
    monkeypatch.setattr(engine_module, "STATS_PERIOD_S", 0.02)
    monkeypatch.setenv("STANDIN_TOKENS_PER_S", "200")
    harness = make_engine(enable_iter_perf_stats=True)
    request = harness.submit(max_tokens=3000, ignore_eos=True, wants_steps=False)
    wait_for(lambda: harness.engine.health().worked_at_s > 0)
    harness.engine.abort(request.request_id)
    (step,) = harness.result(request)
    assert step.finish_reason == "cancelled"
    assert 0 < len(step.token_ids) < 3000
    assert step.text


def test_a_whole_answer_aborted_in_tensorrt_llms_queue_is_not_waited_for(make_engine, monkeypatch):
    monkeypatch.setattr(engine_module, "WHOLE_ABORT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(engine_module, "ABORT_TIMEOUT_S", 10 * WAIT_S)
    monkeypatch.setenv("STANDIN_TOKENS_PER_S", "50")
    harness = make_engine(enable_iter_perf_stats=True, max_batch_size=1)
    running = harness.begun(max_tokens=3000, ignore_eos=True)
    waiting = harness.submit(wants_steps=False)
    wait_for(lambda: getattr(harness.engine._open.get(waiting.request_id), "output", None) is not None)
    harness.engine.abort(waiting.request_id)
    (step,) = harness.result(waiting)
    assert (step.finish_reason, step.text) == ("cancelled", "")
    harness.engine.abort(running.request_id)
    harness.result(running)


@pytest.mark.slow
def test_a_request_aborted_before_its_prompt_is_tokenised_never_reaches_the_engine(harness, monkeypatch):
    tokenised = threading.Event()
    encode = harness.engine._llm.tokenizer.encode
    monkeypatch.setattr(
        harness.engine._llm.tokenizer, "encode", lambda *a, **k: tokenised.wait(WAIT_S) and encode(*a, **k)
    )
    monkeypatch.setattr(harness.engine._llm, "generate_async", lambda **_: pytest.fail("it was submitted"))
    request = harness.submit("x" * (MAX_SHORT_PROMPT + 1))
    harness.engine.abort(request.request_id)
    harness.engine._loop.call(tokenised.set)  # after the abort, on the same thread
    (step,) = harness.result(request)
    assert step.finish_reason == "cancelled"


@pytest.mark.slow
def test_the_reason_of_a_death_and_the_end_of_a_stop(make_engine, monkeypatch):
    monkeypatch.setenv("STANDIN_FAIL_AFTER", "100")
    harness = make_engine()
    harness.result(harness.submit(max_tokens=3000, ignore_eos=True))
    assert "shut down" in harness.engine.health().reason
    llm = harness.engine._llm
    harness.engine.stop()
    assert llm._executor is None


def test_a_silent_death_is_found_by_the_health_check(harness, monkeypatch):
    monkeypatch.setattr(harness.engine._llm._executor, "submit", lambda sequence: None)
    request = harness.submit()
    wait_for(lambda: harness.engine.stats().num_running)
    entry = harness.engine._open[request.request_id]
    monkeypatch.setattr(harness.engine._llm._executor, "is_shutdown", lambda: True)
    assert not harness.engine.health().alive
    assert isinstance(harness.result(request)[-1].error, UnavailableError)
    wait_for(entry.task.cancelled)


def test_a_receiver_that_fails_does_not_end_the_others(harness):
    broken = StepLog(fails=True)
    harness.engine.submit(make_request("lost", "p", max_tokens=5), broken)
    assert harness.run().last.finish_reason == "stop"
    assert broken.last("lost")


STOPS_THE_LOAD = [
    ({"use_cuda_graph": True}, "use_cuda_graph"),  # of another release
    ({"kv_cache_config": {"typo": 1}}, "kv_cache_config.typo"),
    ({"speculative_config": {**MTP, "typo": 1}}, "speculative_config.typo"),
    ({"speculative_config": {"decoding_type": "Nonsense"}}, "Nonsense"),
    ({"sampler_type": "Mixed"}, "sampler_type"),
    ({"skip_tokenizer_init": True}, "skip_tokenizer_init"),
]


@pytest.mark.slow
def test_arguments_that_stop_the_load_are_named_in_one_line(make_engine, subtests):
    for llm_args, named in STOPS_THE_LOAD:
        with subtests.test(named):
            with pytest.raises(EngineError) as caught:
                make_engine(**llm_args)
            assert named in str(caught.value)
            assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_configuration_that_can_not_be_served_is_refused(make_engine, tmp_path):
    engine = TensorRTLLMEngine(parse_config({"model": "m", "max_seq_len": 10}, version_dir=tmp_path))
    with pytest.raises(ConfigError, match=r"release\.yaml.*deepseek-triton build"):
        engine.start()
    with pytest.raises(ConfigError, match="max_seq_len"):
        make_engine(max_seq_len=None)
    assert make_engine("0.21.0").engine._llm._llm_args["backend"] == "pytorch"
    assert make_engine("1.0.0").engine._llm._llm_args["backend"] is None
    with pytest.raises(EngineError, match="TensorRT engine"):
        make_engine("0.21.0", backend="tensorrt")
    with pytest.raises(EngineError, match=r"generated for TensorRT-LLM 1\.2\.1, but 1\.1\.0.*allow_version_mismatch"):
        make_engine("1.2.1", installed="1.1.0")
    harness = make_engine("1.2.1", installed="1.2.0", options={"allow_version_mismatch": True})
    assert harness.run()[-1].finish_reason == "stop"
    release = read_release(tmp_path / "1.2.1")
    matches = {"1.2.1": True, "1.2.1+local": True, "1.2.1.post1": True, "1.2.1rc1": False, "1.2.10": False}
    assert {installed: is_release(installed, release.version) for installed in matches} == matches


def test_the_checkpoint_says_how_long_a_context_may_be(make_engine, tmp_path):
    checkpoint = tmp_path / "1.2.1" / "checkpoint"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text(json.dumps({"max_position_embeddings": 777}))
    harness = make_engine(model="checkpoint", max_seq_len=None)
    assert harness.engine.capabilities.max_seq_len == 777
    assert harness.engine._llm._llm_args["model"] == str(checkpoint)


def test_start_removes_the_variables_of_its_launcher(make_engine, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("TLLM_SPAWN_PROXY_PROCESS", "1")
    make_engine()
    assert "OMPI_COMM_WORLD_RANK" not in os.environ
    assert os.environ["TLLM_SPAWN_PROXY_PROCESS"] == "1"
