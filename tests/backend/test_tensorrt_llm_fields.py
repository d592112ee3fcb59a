"""Fields of requests to the TensorRT-LLM engine: all forms of prompts, logprobs, guides, metrics."""

import json
import sys
from dataclasses import fields
from datetime import timedelta
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_backend.contract import PERF_OUTPUTS, ErrorCode
from deepseek_backend.engines.base import PerfMetrics
from deepseek_backend.engines.generate_request import SamplingParams
from deepseek_backend.engines.tensorrt_llm import translation
from deepseek_backend.errors import EngineError, RequestError, UnavailableError
from deepseek_triton_build.catalog import RELEASES
from deepseek_triton_build.data.spelling import spell
from standin.harness import guided_llm_args
from support.waiting import wait_for

MTP = {"decoding_type": "MTP", "num_nextn_predict_layers": 2}
CPP_SAMPLER = {release: spell({"sampler_type": "TRTLLMSampler"}, release) for release in ("1.1.0", "1.0.0", "0.21.0")}
"""Releases whose C++ sampler has logprobs -> the LLM arguments that choose it."""
CHAT = [{"role": "user", "content": "Why?"}]


def refusal(harness, **request):
    (step,) = harness.run(**request)
    assert isinstance(step.error, RequestError), step
    return step.error


@pytest.mark.slow
def test_the_tokenizer_serves_the_tasks(make_engine, monkeypatch):
    engine = make_engine().engine
    tokenizer = engine.tokenizer
    ids = tokenizer.encode("Łódź", True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<｜begin▁of▁sentence｜>Łódź"
    assert tokenizer.special_tokens == {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
    assert tokenizer.vocab_size == 259
    assert tokenizer.chat_template == engine._llm.tokenizer.tokenizer.chat_template
    assert engine.capabilities.version == str(sys.modules["tensorrt_llm"].__version__)
    for template, text in ({"rag": "a", "default": "b"}, "b"), ({"rag": "a"}, None), (None, None), ("c", "c"):
        engine._llm.tokenizer.tokenizer.chat_template = template
        assert engine.tokenizer.chat_template == text
    harness = make_engine()
    assert harness.engine.capabilities.bos_token == "<｜begin▁of▁sentence｜>"
    known = harness.engine.tokenizer
    monkeypatch.setattr(known._tokenizer, "encode", lambda text, add_special_tokens: [7])
    assert known.bos_token == ""


def test_a_conversation_becomes_a_prompt(harness):
    plain, thinking = (harness.engine.render_chat(CHAT, kwargs) for kwargs in ({}, {"thinking": True}))
    assert plain == "<｜begin▁of▁sentence｜><｜User｜>Why?<｜Assistant｜></think>"
    assert thinking == plain.replace("</think>", "<think>")
    assert "</think>" in harness.text(thinking, add_special_tokens=False)
    assert "</think>" not in harness.text("Why?")


def test_what_can_not_be_rendered_is_the_callers_fault(harness):
    engine = harness.engine
    for messages, kwargs, said in [
        ([{"role": "judge", "content": "x"}], {}, "the chat template refuses them"),
        (CHAT, {"unknown": 1}, "the chat template refuses them"),
        (CHAT, {"conversation": "x"}, "chat_template_kwargs: conversation"),
    ]:
        with pytest.raises(RequestError, match=said) as caught:
            engine.render_chat(messages, kwargs)
        assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    engine._llm.tokenizer.tokenizer.chat_template = None
    with pytest.raises(RequestError, match="no chat template") as caught:
        engine.render_chat(CHAT, {})
    assert caught.value.code is ErrorCode.UNSUPPORTED


@pytest.mark.parametrize("release", RELEASES)
def test_what_the_torch_sampler_of_each_release_has(make_engine, monkeypatch, release):
    monkeypatch.setenv("STANDIN_TOKENS_PER_S", "200")
    harness = make_engine(release)
    assert "prompt_logprobs" in harness.engine.capabilities.unsupported
    steps = harness.run(max_tokens=12, logprobs=0)
    assert len(steps.logprobs) == 12
    for step in steps:
        assert [[entry.token_id for entry in token] for token in step.logprobs] == [[t] for t in step.token_ids]
        assert all(token[0].rank == 1 and token[0].logprob <= 0 for token in step.logprobs)
    cached = harness.run("x" * 99, max_tokens=5)[-1].num_cached_tokens
    assert cached == (96 if release.startswith("1.2.") else None)
    # From 1.2 on, an assertion of TensorRT-LLM fails when the last response of an aborted request is read.
    request = harness.submit(max_tokens=3000, ignore_eos=True, logprobs=0)
    harness.sink.wait_for(lambda: len(harness.steps_of(request)) >= 3)
    harness.engine.abort(request.request_id)
    assert harness.ended(request) == ["cancelled"]


@pytest.mark.parametrize("release", RELEASES)
def test_what_each_release_has_with_mtp(make_engine, monkeypatch, release):
    """A request for logprobs would end every other one."""
    monkeypatch.setattr("deepseek_backend.engines.tensorrt_llm.tensorrt_llm_engine.STATS_PERIOD_S", 0.02)
    monkeypatch.setenv("STANDIN_TOKENS_PER_S", "200")
    harness = make_engine(release, speculative_config=MTP, enable_iter_perf_stats=True)
    assert "every running request" in harness.engine.capabilities.unsupported["logprobs"]
    assert refusal(harness, logprobs=0).code is ErrorCode.UNSUPPORTED
    request = harness.submit("x" * 40, max_tokens=10**6, ignore_eos=True)
    wait_for(lambda: harness.engine.stats().num_accepted_draft_tokens > 10)
    stats = harness.engine.stats()
    assert (stats.kv_blocks_used, stats.kv_blocks_total, stats.tokens_per_block) == (2, 1000, 32)
    assert stats.num_draft_tokens >= stats.num_accepted_draft_tokens
    assert (stats.num_running, stats.num_waiting) == (1, 0)
    assert stats.extra["kv_blocks_missed"] == 2
    harness.engine.abort(request.request_id)
    harness.result(request)


def test_the_likeliest_tokens_follow_the_sampled_one_and_do_not_repeat_it(make_engine):
    harness = make_engine("1.2.1")
    steps = harness.run(max_tokens=20, logprobs=2, top_k=3, temperature=1.0)
    rows = steps.logprobs
    assert [row[0].token_id for row in rows] == steps.token_ids
    ranks = {tuple(entry.rank for entry in row) for row in rows}
    assert ranks == {(1, 2), (2, 1), (3, 1, 2)}, "the sampled token first, then the likeliest two without it"
    for row in rows:
        assert all(entry.text == harness.engine._llm.tokenizer.decode([entry.token_id]) for entry in row)


def test_a_logprob_that_might_be_missing_is_not_promised(make_engine):
    harness = make_engine("1.2.1")
    for sampling in ({"temperature": 1.0}, {"top_p": 0.9}, {"top_k": translation.MAX_LIKELIEST + 1}):
        error = refusal(harness, logprobs=0, **sampling)
        assert error.code is ErrorCode.UNSUPPORTED
        assert f"top_k of at most {translation.MAX_LIKELIEST}" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("release", CPP_SAMPLER)
def test_up_to_1_1_there_is_one_logprob_and_the_cpp_samplers_is_of_the_sampled_token_only(make_engine, release):
    harness = make_engine(release)
    assert harness.run(max_tokens=3, logprobs=1)[-1].finish_reason == "length"
    assert "expected at most 1, got 5" in str(refusal(harness, logprobs=5))
    harness = make_engine(release, **CPP_SAMPLER[release])
    rows = harness.run(max_tokens=9, logprobs=0, temperature=1.0, top_p=0.9).logprobs
    assert {(len(row), row[0].rank) for row in rows} == {(1, 1)}, "1 is the lowest rank it can have"
    assert "expected at most 0, got 1" in str(refusal(harness, logprobs=1))


@pytest.mark.slow
def test_what_an_engine_lacks_is_named(make_engine):
    capabilities = make_engine("1.2.1", sampler_type="TRTLLMSampler").engine.capabilities
    assert "not established" in capabilities.unsupported["logprobs"]
    assert "needs logprobs" in capabilities.unsupported["best_of"]
    assert "best_of" not in make_engine("1.2.1").engine.capabilities.unsupported
    reason = make_engine().engine.capabilities.unsupported["guided_json"]
    assert reason == "TensorRT-LLM 1.2.1: needs guided_decoding_backend: xgrammar in model.yaml"
    for backend, why in (
        ("llguidance", "only guided_decoding_backend: xgrammar"),
        (None, "needs guided_decoding_backend"),
    ):
        assert why in make_engine(guided_decoding_backend=backend).engine.capabilities.formats_refused
    reason = make_engine("0.21.0").engine.capabilities.unsupported["guided_json"]
    assert "guided_decoding_backend: xgrammar and disable_overlap_scheduler: true" in reason
    with pytest.raises(EngineError, match="disable_overlap_scheduler: true"):
        make_engine("0.21.0", guided_decoding_backend="xgrammar")
    assert not make_engine().engine.capabilities.priority
    error = refusal(make_engine(), stop_token_ids=(5,), ignore_eos=True)
    assert str(error) == "stop_token_ids, ignore_eos: TensorRT-LLM 1.2.1: ignore_eos drops the stop tokens too"
    assert error.code is ErrorCode.UNSUPPORTED


def test_a_stop_tokens_logprob_is_left_out_with_the_token(harness):
    answer = harness.run(stop_token_ids=(harness.run().token_ids[5],), logprobs=0)
    assert answer.last.finish_reason == "stop"
    assert len(answer.logprobs) == len(answer.token_ids)


@pytest.mark.slow
def test_logprobs_of_other_tokens_end_the_request_and_its_work(make_engine, monkeypatch):
    monkeypatch.setenv("STANDIN_TOKENS_PER_S", "200")
    harness = make_engine()
    monkeypatch.setattr("tensorrt_llm._engine.logprobs", lambda token, *_: {token + 1: SimpleNamespace(logprob=0)})
    outputs = []
    generate_async = harness.engine._llm.generate_async
    monkeypatch.setattr(
        harness.engine._llm, "generate_async", lambda **kwargs: outputs.append(generate_async(**kwargs)) or outputs[0]
    )
    (step,) = harness.result(harness.submit(max_tokens=3000, ignore_eos=True, logprobs=0))
    assert isinstance(step.error, EngineError)
    assert not step.token_ids
    wait_for(lambda: outputs[0].aborted())
    assert harness.engine.health().alive


@settings(max_examples=40)
@given(token=st.integers(0, 30), ranked=st.permutations(range(31)), most=st.integers(0, 20), asked=st.integers(1, 31))
def test_every_entry_begins_with_its_token_and_goes_on_in_order(token, ranked, most, asked):
    likeliest = {t: SimpleNamespace(logprob=-rank, rank=rank) for rank, t in enumerate(ranked[:asked], start=1)}
    sampling = SamplingParams(logprobs=most)
    if token not in likeliest:
        with pytest.raises(EngineError):
            translation.token_logprobs([token], [likeliest], sampling, str)
        return
    ((own, *others),) = translation.token_logprobs([token], [likeliest], sampling, str)
    assert own.token_id == token
    assert [entry.token_id for entry in others] == [t for t in ranked[: min(most, asked)] if t != token]


def test_bad_strings_are_not_generated(make_engine):
    harness = make_engine(sampler_type="TRTLLMSampler")
    assert "naïve" in harness.text()
    assert "naïve" not in harness.text(bad=("naïve", "unheard of"))


GUIDES = {
    "json": '{"type": "object"}',
    "json_object": True,
    "regex": "[a-z]+",
    "grammar": 'root ::= "x"',
    "structural_tag": '{"type": "structural_tag"}',
}


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_a_guide_reaches_the_engine_under_its_name(make_engine, release):
    harness = make_engine(release, **guided_llm_args(release))
    for guide, value in GUIDES.items():
        assert json.loads(harness.text(**{f"guided_{guide}": value})) == {"guided": guide}
    since_1_2 = release.startswith("1.2.")
    assert (harness.engine.capabilities.formats_refused == "") is since_1_2
    capabilities = make_engine(release, **guided_llm_args(release), speculative_config=MTP).engine.capabilities
    assert ("guided_json" in capabilities.sampling_fields) is since_1_2


@pytest.mark.slow
def test_performance_metrics_and_statistics_where_there_are_some(make_engine):
    metrics = make_engine().run("x" * 99, max_tokens=5, return_perf_metrics=True).last.perf_metrics
    assert (metrics.kv_cache_reused_block, metrics.kv_cache_missed_block) == (3, 1)
    assert metrics.kv_cache_hit_rate == 0.75
    harness = make_engine("0.21.0")
    assert "no performance metrics" in harness.engine.capabilities.unsupported["return_perf_metrics"]
    assert harness.run(max_tokens=5)[-1].perf_metrics is None
    harness = make_engine()
    harness.run(max_tokens=5)
    assert harness.engine.stats().kv_blocks_total == 0
    for row in ({}, "{}", {"kvCacheStats": None, "specDecodingStats": None}):
        stats = translation.IterationStats()
        stats.add(row)
        assert (stats.kv_blocks_total, stats.num_draft_tokens, stats.num_queued) == (0, 0, 0)
    assert list(harness.engine.load_seconds) == ["import", "load"]


def test_every_metric_is_read_from_its_own_field():
    names = [tensor.name for tensor in PERF_OUTPUTS]
    assert names == [field.name for field in fields(PerfMetrics)]
    timing = ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time")
    cache = ("num_reused_blocks", "num_missed_blocks", "num_new_allocated_blocks", "num_total_allocated_blocks")
    drafts = ("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")

    def values(names, first):
        return SimpleNamespace(**dict(zip(names, range(first, 100), strict=False)))

    times = {name: timedelta(microseconds=number) for number, name in enumerate(timing, start=1)}
    metrics = translation.perf_metrics(
        SimpleNamespace(
            timing_metrics=SimpleNamespace(**times),
            kv_cache_metrics=values((*cache, "kv_cache_hit_rate"), 5),
            speculative_decoding=values(drafts, 10),
        )
    )
    times = [1000, 2000, 3000, 4000]
    assert [getattr(metrics, name) for name in names] == [5, 6, 7, 8, 9, *times, 10, 11, 12]
    assert isinstance(metrics.arrival_time_ns, int)


def test_requests_go_on_when_the_statistics_fail(make_engine, monkeypatch):
    monkeypatch.setenv("STANDIN_TOKENS_PER_S", "50")
    harness = make_engine(enable_iter_perf_stats=True)
    monkeypatch.setattr(translation.IterationStats, "add", lambda self, row: 1 / 0)
    assert harness.run(max_tokens=2)[-1].finish_reason == "length"
    wait_for(lambda: not harness.engine._tasks)
    assert harness.run(max_tokens=2)[-1].finish_reason == "length"
    # With nothing else to tell that the engine lives, its steps have to.
    request = harness.submit(max_tokens=3000, ignore_eos=True, wants_steps=False)
    harness.sink.wait_for(lambda: bool(harness.steps_of(request)))


def test_requests_in_the_engines_queue_are_waiting(make_engine, monkeypatch):
    monkeypatch.setenv("STANDIN_TOKENS_PER_S", "50")
    harness = make_engine()
    requests = [harness.submit(max_tokens=3000, ignore_eos=True) for _ in range(3)]
    harness.sink.wait_for(lambda: all(harness.steps_of(request) for request in requests))
    harness.engine._iterations.add({"numQueuedRequests": 2})
    stats = harness.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 2)


def test_a_worker_that_has_ended_means_a_dead_engine(make_engine, monkeypatch):
    monkeypatch.setenv("STANDIN_TOKENS_PER_S", "50")
    harness = make_engine()
    request = harness.begun(max_tokens=3000, ignore_eos=True)
    harness.engine._llm._executor.mpi_futures[0].set_result(None)
    health = harness.engine.health()
    assert not health.alive
    assert health.reason == "a worker of TensorRT-LLM has ended"
    assert isinstance(harness.result(request)[-1].error, UnavailableError)


@pytest.mark.slow
def test_the_reason_of_a_death_is_the_workers_and_without_their_futures_there_is_none(make_engine):
    harness = make_engine()
    harness.engine._llm._executor.mpi_futures[0].set_exception(RuntimeError("CUDA error:\nout of memory"))
    assert harness.engine.health().reason.endswith(": RuntimeError: CUDA error: out of memory")
    harness = make_engine()
    del harness.engine._llm._executor.mpi_futures
    assert harness.engine.health().alive
    last = harness.run(max_tokens=3)[-1]
    assert last.finish_reason == "length"
