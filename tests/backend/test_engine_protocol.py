"""What every engine does, whatever is behind it. The sink of the tests holds each to the rules of base.py."""

import threading
import time
from contextlib import ExitStack

import pytest

from deepseek_backend.config import BackendConfig, parse_config
from deepseek_backend.contract import SAMPLING_BY_NAME, ErrorCode
from deepseek_backend.engines import ENGINES, create_engine
from deepseek_backend.engines.base import EngineStats, PerfMetrics
from deepseek_backend.engines.reference.deepseek_model import ModelRunner
from deepseek_backend.engines.tensorrt_llm import tensorrt_llm_engine
from deepseek_backend.errors import ConfigError, RequestError, UnavailableError
from standin.harness import engines
from support.engine_driver import EngineDriver, driven
from support.fake_vllm import faked_engine
from support.waiting import wait_for

PROMPT = "Why is the sky blue?"
ENDLESS = {"max_tokens": 4000, "ignore_eos": True}
KINDS = ("simulated", "reference", "tensorrt_llm", "vllm", "vllm, generate()")
ONE_AT_A_TIME = {"simulated", "reference", "tensorrt_llm"}
"""Engines that are started here with room for one running request."""


class Kind:
    """One engine: how it is started, and how it dies."""

    def __init__(self, name, folder, monkeypatch, checkpoint):
        self.name = name
        self._folder, self._monkeypatch, self._checkpoint = folder, monkeypatch, checkpoint
        self._stack = ExitStack()

    def start(self, max_seq_len=4096):
        if self.name == "simulated":
            options = {"max_seq_len": max_seq_len, "max_batch_size": 1, "pace": "real", "speed": 4.0}
            return self._enter(driven(BackendConfig(engine="simulated", engine_options=options)))
        if self.name == "reference":
            options = {"max_seq_len": max_seq_len, "max_num_seqs": 1}
            model = {"model": str(self._checkpoint)}
            return self._enter(driven(BackendConfig(engine="reference", llm_args=model, engine_options=options)))
        if self.name == "tensorrt_llm":
            self._monkeypatch.setenv("STANDIN_TOKENS_PER_S", "400")
            self._monkeypatch.setattr(tensorrt_llm_engine, "ABORT_TIMEOUT_S", 0.2)
            return self._enter(engines(self._folder))(max_seq_len=max_seq_len, max_batch_size=1)
        public = self.name == "vllm, generate()"
        driver = self._enter(faked_engine(self._folder, self._monkeypatch, public=public, max_model_len=max_seq_len))
        driver.core.token_s = 0.002
        return driver

    def kill(self, driver):
        if self.name == "simulated":
            driver.engine._inbox.put(lambda: 1 / 0)
        elif self.name == "reference":
            self._monkeypatch.setattr(ModelRunner, "decode", lambda *_: 1 / 0)
        elif self.name == "tensorrt_llm":
            driver.engine._llm._executor._tokens_left = 0
        else:
            driver.core.die()

    def _enter(self, context):
        return self._stack.enter_context(context)

    def close(self):
        self._stack.close()


@pytest.fixture(params=KINDS)
def kind(request, tmp_path, monkeypatch, random_checkpoint):
    made = Kind(request.param, tmp_path, monkeypatch, random_checkpoint)
    yield made
    made.close()


@pytest.mark.slow
def test_prompts_are_counted_and_cut_to_their_end(kind):
    driver = kind.start()
    ids = tuple(driver.engine.tokenizer.encode(PROMPT, True))
    given = [
        ({"prompt": PROMPT}, len(ids)),
        ({"prompt": PROMPT, "add_special_tokens": False}, len(ids) - 1),
        ({"prompt_token_ids": ids}, len(ids)),
        ({"prompt_token_ids": ids[1:]}, len(ids) - 1),
        ({"prompt": PROMPT, "truncate_prompt_tokens": 3}, 3),
        ({"prompt_token_ids": ids, "truncate_prompt_tokens": 3}, 3),
        ({"prompt": PROMPT, "truncate_prompt_tokens": 50}, len(ids)),
    ]
    counted = [{step.num_input_tokens for step in driver.run(**form, max_tokens=3)} for form, _ in given]
    assert counted == [{expected} for _, expected in given]


@pytest.mark.slow
def test_an_answer_ends_at_max_tokens_or_at_a_stop_token_which_is_shown_on_request(kind):
    driver = kind.start()
    decode = driver.engine.tokenizer.decode
    free = driver.run(max_tokens=10)
    assert (len(free.token_ids), free.last.finish_reason, free.last.stop_reason) == (10, "length", None)
    assert free.text == decode(free.token_ids, skip_special_tokens=True)
    stop = free.token_ids[6]
    end = free.token_ids.index(stop)
    hidden = driver.run(max_tokens=10, stop_token_ids=(stop, 10**6))
    shown = driver.run(max_tokens=10, stop_token_ids=(stop,), include_stop_str_in_output=True)
    for answer, num_shown in ((hidden, end), (shown, end + 1)):
        assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", stop)
        assert answer.text == decode(free.token_ids[:num_shown], skip_special_tokens=True)
    assert hidden.token_ids[:end] == free.token_ids[:end]


@pytest.mark.slow
def test_prompt_and_answer_share_the_room_and_what_does_not_fit_is_refused(kind):
    driver = kind.start(max_seq_len=20)
    assert driver.engine.capabilities.max_seq_len == 20
    for length, expected in (5, 15), (19, 1):
        answer = driver.run(prompt_token_ids=(5,) * length, max_tokens=1000, ignore_eos=True)
        assert (len(answer.token_ids), answer.last.finish_reason) == (expected, "length")
    error = driver.refused(prompt_token_ids=(5,) * 20)
    assert error.code is ErrorCode.PROMPT_TOO_LONG
    assert "20 tokens and at most 19 fit" in str(error)
    assert isinstance(driver.refused(prompt_token_ids=()), RequestError)
    if kind.name != "simulated":  # which has a text for any token
        size = driver.engine.tokenizer.vocab_size
        for token_id in (-1, size):
            expected = f"input_ids: expected token ids from 0 to {size - 1}, got {token_id}"
            assert str(driver.refused(prompt_token_ids=(5, token_id))) == expected
        assert driver.run(prompt_token_ids=(size - 1,), max_tokens=1).last.error is None
    assert driver.engine.health().alive


@pytest.mark.slow
def test_performance_metrics_come_with_the_last_step_on_request(kind):
    driver = kind.start()
    before = time.monotonic_ns()
    answer = driver.run(max_tokens=5, return_perf_metrics=True)
    metrics = answer.last.perf_metrics
    assert not any(step.perf_metrics for step in answer[:-1])
    times = [metrics.arrival_time_ns, metrics.first_token_time_ns, metrics.last_token_time_ns, time.monotonic_ns()]
    assert [before, *times] == sorted([before, *times])
    assert driver.run(max_tokens=5).last.perf_metrics is None


@pytest.mark.slow
def test_an_abort_ends_its_own_request_wherever_that_is(kind):
    driver = kind.start()
    engine = driver.engine
    running = driver.begun(**ENDLESS, return_perf_metrics=True)
    waiting = driver.submit(**ENDLESS, return_perf_metrics=True)
    wait_for(lambda: engine.stats().num_running + engine.stats().num_waiting == 2)
    engine.abort(waiting.request_id)
    assert driver.ended(waiting) == ["cancelled"]
    if kind.name in ONE_AT_A_TIME:
        (step,) = driver.steps_of(waiting)
        assert not step.token_ids
    if kind.name in ("simulated", "reference"):  # the others measure elsewhere
        assert step.perf_metrics == PerfMetrics(arrival_time_ns=step.perf_metrics.arrival_time_ns)
    assert not driver.sink.is_done(running.request_id)
    engine.abort(running.request_id)
    assert driver.ended(running) == ["cancelled"]
    assert 0 < len(driver.steps_of(running).token_ids) < 4000
    for name in (running.request_id, "nobody"):
        engine.abort(name)
    assert driver.run(max_tokens=3).last.finish_reason == "length"
    wait_for(lambda: (engine.stats().num_running, engine.stats().num_waiting) == (0, 0))
    assert driver.ended(running) == ["cancelled"]


@pytest.mark.slow
def test_a_stop_cancels_what_is_open_refuses_the_rest_and_leaves_no_thread(kind):
    before = set(threading.enumerate())
    driver = kind.start()
    engine = driver.engine
    assert engine.health().alive
    requests = [driver.begun(**ENDLESS), *(driver.submit(**ENDLESS) for _ in range(3))]
    engine.stop()
    engine.stop()
    assert [driver.ended(request) for request in requests] == [["cancelled"]] * 4
    assert not engine.health().alive
    assert isinstance(driver.refused(), UnavailableError)
    engine.abort(requests[0].request_id)
    assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 0)
    wait_for(lambda: set(threading.enumerate()) <= before, threading.enumerate)


@pytest.mark.slow
def test_an_engine_that_dies_answers_every_request_and_refuses_the_rest(kind):
    driver = kind.start()
    requests = [driver.begun(**ENDLESS), *(driver.submit(**ENDLESS) for _ in range(3))]
    kind.kill(driver)
    for request in requests:
        (error,) = driver.ended(request)
        assert error.code in (ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL)
    wait_for(lambda: not driver.engine.health().alive)
    assert driver.engine.health().reason
    assert driver.refused().code is ErrorCode.UNAVAILABLE


def test_every_field_of_the_contract_is_served_or_refused_with_a_reason(kind):
    """The service applies best_of, where the engine has logprobs to choose by."""
    known = kind.start().engine.capabilities
    assert not known.sampling_fields & known.unsupported.keys()
    assert all(known.unsupported.values())
    named = known.sampling_fields | known.unsupported.keys() | {"best_of"}
    assert named - {"priority", "request_type"} == set(SAMPLING_BY_NAME)


@pytest.mark.parametrize("name", ENGINES)
def test_before_the_start_there_is_nothing_and_options_are_checked(name, tmp_path):
    assert name in KINDS, "the tests above don't run it"
    document = {"model": "m", "max_seq_len": 10, "triton_config": {"engine": name}}
    engine = create_engine(parse_config(document, version_dir=tmp_path))
    engine.stop()
    engine.abort("nobody")
    assert not engine.health().alive
    assert engine.load_seconds == {}
    if name != "simulated":  # which has its blocks from the beginning
        assert engine.stats() == EngineStats(num_running=0, num_waiting=0, extra=engine.stats().extra)
    driver = EngineDriver(engine)
    if name == "reference":
        assert isinstance(driver.refused(), UnavailableError)
    else:
        with pytest.raises(RuntimeError, match="before start"):
            driver.submit()
    document["triton_config"]["engine_options"] = {"allow_mismatch": True}
    with pytest.raises(ConfigError, match=r"engine_options.allow_mismatch: unknown .*; known"):
        create_engine(parse_config(document, version_dir=tmp_path))
