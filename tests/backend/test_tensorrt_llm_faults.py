"""Failures in and around TensorRT-LLM: every request still ends once, and the right side gets the blame."""

import threading
import time

import pytest

from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines.prompting import PromptTokenizer
from deepseek_backend.engines.tensorrt_llm import tensorrt_llm_engine as engine_module
from deepseek_backend.engines.tensorrt_llm.translation import INCOMPLETE, MAX_FAULTS_IN_A_ROW, Faults, whole_text
from deepseek_backend.errors import EngineError, RequestError, UnavailableError
from standin.harness import WAIT_S, engines
from support.engine_driver import EngineDriver
from support.waiting import wait_for

ENDLESS = {"max_tokens": 3000, "ignore_eos": True}


@pytest.fixture
def slow_engine(make_engine, monkeypatch):
    """Make engines whose requests run for a minute, and which end an aborted request soon."""
    monkeypatch.setenv("STANDIN_TOKENS_PER_S", "50")
    monkeypatch.setattr(engine_module, "ABORT_TIMEOUT_S", 0.2)
    return make_engine


@pytest.fixture
def slow(slow_engine):
    return slow_engine()


def running(harness, count=1, **sampling):
    requests = [harness.submit(**ENDLESS, **sampling) for _ in range(count)]
    harness.sink.wait_for(lambda: all(harness.steps_of(request) for request in requests))
    return requests


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("tensorrt_llm", "standin"))]


@pytest.mark.slow
def test_a_request_aborted_in_the_engines_queue_has_its_end(slow_engine):
    """TensorRT-LLM removes the request from its queue and sends no response."""
    harness = slow_engine(max_batch_size=1)
    (first,) = running(harness)
    waiting = harness.submit(**ENDLESS)
    wait_for(lambda: harness.engine._llm._executor._waiting)
    harness.engine.abort(waiting.request_id)
    assert harness.ended(waiting) == ["cancelled"]
    assert list(harness.engine._open) == [first.request_id]
    wait_for(lambda: len(harness.engine._tasks) == 1)


@pytest.mark.slow
def test_a_failing_abort_holds_neither_a_request_nor_the_gpus(slow, monkeypatch):
    requests = running(slow, 3)

    def abort(self):
        raise TypeError("'NoneType' object is not callable")

    monkeypatch.setattr("tensorrt_llm.llmapi.result.GenerationResult.abort", abort)
    slow.engine.abort(requests[0].request_id)
    assert slow.ended(requests[0]) == ["cancelled"]
    slow.engine.stop()
    assert [slow.ended(request) for request in requests] == [["cancelled"]] * 3
    assert not threads()


def test_an_engines_fault_is_not_the_clients(slow):
    requests = running(slow, 5)
    slow.engine._llm._executor.fault = "an assertion failed"
    for request in requests:
        error = slow.result(request)[-1].error
        assert isinstance(error, EngineError)
        assert error.code is ErrorCode.INTERNAL
    assert slow.engine.health().alive, "five requests, one fault"
    slow.engine._llm._executor.fault = ""
    assert slow.run(max_tokens=2)[-1].finish_reason == "length"


def test_an_engine_that_only_fails_is_dead(slow):
    slow.engine._llm._executor.fault = "an assertion\nfailed"
    for _ in range(MAX_FAULTS_IN_A_ROW):
        assert slow.engine.health().alive
        assert isinstance(slow.run()[-1].error, EngineError)
    health = slow.engine.health()
    assert not health.alive
    assert "3 times in a row" in health.reason
    assert health.reason.endswith("an assertion failed")
    assert isinstance(slow.run()[-1].error, UnavailableError)


def test_a_gpu_that_has_failed_is_not_tried_again(slow):
    requests = running(slow, 3)
    slow.engine._llm._executor.fault = "CUDA error: an illegal memory access was encountered"
    for request in requests:
        assert isinstance(slow.result(request)[-1].error, EngineError | UnavailableError)
    health = slow.engine.health()
    assert not health.alive
    assert "illegal memory access" in health.reason


@pytest.mark.slow
def test_faults_with_tokens_between_do_not_end_the_engine(slow):
    for _ in range(2 * MAX_FAULTS_IN_A_ROW):
        (request,) = running(slow)
        slow.engine._llm._executor.fault = "an assertion failed"
        assert isinstance(slow.result(request)[-1].error, EngineError)
        slow.engine._llm._executor.fault = ""
        assert slow.engine.health().alive


def test_a_request_that_goes_on_after_a_fault_can_count_the_next(slow):
    survivor, victim = running(slow, 2)
    slow.engine._open[victim.request_id].output._sequence.fail("an assertion failed")
    slow.result(victim)
    num_steps = len(slow.steps_of(survivor))
    slow.sink.wait_for(lambda: len(slow.steps_of(survivor)) > num_steps)
    slow.engine._llm._executor.fault = "an assertion failed"
    slow.result(survivor)
    for _ in range(MAX_FAULTS_IN_A_ROW - 1):
        assert slow.engine.health().alive
        slow.run()
    assert not slow.engine.health().alive


@pytest.mark.slow
@pytest.mark.parametrize("found_by", ["flush", "reader"])
def test_a_failure_that_can_not_be_judged_ends_its_request_only(slow, monkeypatch, found_by):
    request, *others = running(slow, 3)
    entry = slow.engine._open[request.request_id]
    monkeypatch.setattr(engine_module.translation, "cause_of_death", lambda llm: 1 / 0)
    if found_by == "flush":
        monkeypatch.setattr(entry.increments, "take", lambda **_: 1 / 0)
    else:
        monkeypatch.setattr(entry.output._detokenizer, "add", lambda *_, **__: 1 / 0)
    error = slow.result(request)[-1].error
    assert isinstance(error, EngineError)
    assert "ZeroDivisionError" in str(error)
    num_steps = {other.request_id: len(slow.steps_of(other)) for other in others}
    slow.sink.wait_for(lambda: all(len(slow.steps_of(other)) > num_steps[other.request_id] for other in others))
    assert entry.output.aborted()


# f: a fault, t: a token, s: the same fault of another request
EVENTS = {"ffff": True, "fftff": False, "fftfff": True, "f" + "s" * 9: False}


def test_faults_count_in_a_row():
    for events, dead in EVENTS.items():
        faults, reason = Faults(), ""
        for event in events:
            if event == "t":
                faults.token_came()
            else:
                reason = faults.add("it broke", faults.count if event == "f" else 0)
        assert bool(reason) is dead, events


@pytest.mark.slow
def test_refusals_are_the_clients_fault_and_no_guide_ends_the_server(make_engine):
    """The workers may have less room than model.yaml says: the prompt fits its limit, but not theirs."""
    harness = make_engine()
    harness.engine._llm._llm_args["max_seq_len"] = 10
    for _ in range(2 * MAX_FAULTS_IN_A_ROW):
        error = harness.run("x" * 50)[-1].error
        assert isinstance(error, RequestError)
        assert error.code is ErrorCode.PROMPT_TOO_LONG
    assert harness.engine.health().alive
    harness = make_engine(guided_decoding_backend="xgrammar")
    for message, kind in ("Guided decoding error: not a regex", RequestError), ("it broke", EngineError):
        harness.engine._llm._executor.fault = message
        for _ in range(2 * MAX_FAULTS_IN_A_ROW):
            assert isinstance(harness.run(guided_regex="(")[-1].error, kind)
    assert harness.engine.health().alive


@pytest.mark.slow
def test_a_guide_is_no_excuse_after_the_first_token(slow_engine):
    harness = slow_engine(guided_decoding_backend="xgrammar")
    (request,) = running(harness, guided_regex="a+")
    harness.engine._llm._executor.fault = "CUDA error: an illegal memory access was encountered"
    harness.result(request)
    assert not harness.engine.health().alive


@pytest.mark.parametrize("broken", ["SamplingParams", "generate_async"])
def test_an_immediate_refusal_is_the_clients_fault(harness, monkeypatch, broken):

    def refuse(**kwargs):
        raise ValueError("not that")

    owner = harness.engine._llm if broken == "generate_async" else harness.engine._llmapi
    monkeypatch.setattr(owner, broken, refuse)
    assert isinstance(harness.run()[-1].error, RequestError)


def test_a_detokenizer_that_fails_ends_its_request_only(slow, monkeypatch):
    (healthy,) = running(slow)
    sequence = slow.engine._open[healthy.request_id].output._sequence

    def add(self, token_ids, *, final):
        raise ValueError("Invalid prefix encountered")

    for _ in range(2 * MAX_FAULTS_IN_A_ROW):
        request = slow.submit(**ENDLESS)
        with monkeypatch.context() as patch:
            output = wait_for(
                lambda request=request: getattr(slow.engine._open.get(request.request_id), "output", None)
            )
            patch.setattr(output._detokenizer, "add", add.__get__(output), raising=True)
            assert isinstance(slow.result(request).last.error, EngineError)
            wait_for(output.aborted)
    assert slow.engine.health().alive
    assert not sequence.aborted.is_set()
    assert not slow.sink.is_done(healthy.request_id)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["HF", "TRTLLM"])
def test_no_detokenizer_loses_the_end(make_engine, monkeypatch, backend):
    monkeypatch.setenv("TLLM_INCREMENTAL_DETOKENIZATION_BACKEND", backend)
    harness = make_engine()
    answers = [harness.run(max_tokens=length, ignore_eos=True) for length in range(1, 30)]
    for answer in answers:
        assert answer.text == harness.engine._llm.tokenizer.decode(answer.token_ids)
    assert any(answer.text.endswith(INCOMPLETE) for answer in answers)


def test_text_that_is_not_the_ids_own_is_left_alone():
    assert whole_text("naive", [1], lambda ids: f"naïve {INCOMPLETE}") == "naive"


def test_a_start_that_fails_after_the_load_leaves_no_engine(tmp_path, monkeypatch):
    def tokenizer(inner):
        raise KeyError("an odd tokenizer")

    monkeypatch.setattr(engine_module, "PromptTokenizer", tokenizer)
    with engines(tmp_path) as make, pytest.raises(EngineError, match="KeyError: 'an odd tokenizer'"):
        make()
    assert not threads()


@pytest.mark.slow
def test_every_request_has_one_end_when_submits_race_the_stop(make_engine):
    for _ in range(5):
        harness = make_engine()
        drivers = [EngineDriver(harness.engine) for _ in range(3)]
        done = threading.Event()

        def hammer(driver, done=done):
            while not done.is_set():
                driver.submit("a", max_tokens=3)
                time.sleep(0.0002)

        workers = [threading.Thread(target=hammer, args=(driver,)) for driver in drivers]
        for number, driver in enumerate(drivers):
            driver._count = 1_000_000 * number  # the ids of one engine's requests differ
        for worker in workers:
            worker.start()
        wait_for(lambda drivers=drivers: all(driver.sink.calls for driver in drivers))
        harness.engine.stop()
        submitted = [driver._count for driver in drivers]
        wait_for(lambda drivers=drivers, submitted=submitted: [driver._count for driver in drivers] > submitted)
        done.set()
        for number, (worker, driver) in enumerate(zip(workers, drivers, strict=True)):
            worker.join(WAIT_S)
            driver.sink.wait(*(f"r{count}" for count in range(1_000_000 * number + 1, driver._count + 1)))


@pytest.mark.slow
def test_two_can_stop_at_once(slow_engine):
    for delay_s in (0.0, 0.002, 0.01, 0.05):
        harness = slow_engine()
        running(harness, 2)
        stoppers = [threading.Thread(target=harness.engine.stop, daemon=True) for _ in range(2)]
        for stopper in stoppers:
            stopper.start()
            time.sleep(delay_s)
        for stopper in stoppers:
            stopper.join(WAIT_S)
            assert not stopper.is_alive()
            assert not threads(), "who returns first has waited for the end as well"


def test_stop_goes_on_when_the_open_requests_can_not_be_ended(slow, monkeypatch):
    running(slow)
    llm = slow.engine._llm
    monkeypatch.setattr(slow.engine, "_abort", lambda request_id: 1 / 0)
    slow.engine.stop()
    assert llm._executor is None
    assert not threads()


def test_refusals_after_the_stop_come_one_at_a_time(harness):
    harness.engine.stop()
    add = harness.sink._add
    harness.sink._add = lambda steps: time.sleep(0.01) or add(steps)
    submitters = [threading.Thread(target=harness.submit) for _ in range(8)]
    for submitter in submitters:
        submitter.start()
    for submitter in submitters:
        submitter.join(WAIT_S)
    assert harness.sink.broken_rules == []
    assert len(harness.sink.calls) == 8


def test_a_prompt_that_can_not_fit_is_known_by_its_bytes(make_engine, monkeypatch):
    engine = make_engine(max_seq_len=100).engine
    assert engine.capabilities.max_prompt_bytes == 100 * len("<｜begin▁of▁sentence｜>".encode())
    monkeypatch.delattr("tensorrt_llm.tokenizer.StandinHfTokenizer.get_vocab")
    assert PromptTokenizer(engine._llm.tokenizer).max_prompt_bytes(100) is None
