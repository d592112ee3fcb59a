import contextlib
import gc
import json
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_backend import service as service_module
from deepseek_backend import watcher as watcher_module
from deepseek_backend.active_request import LARGE_BYTES
from deepseek_backend.answer_format import model_type, served_name
from deepseek_backend.config import parse_config
from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines.base import EngineHealth, Step
from deepseek_backend.errors import ConfigError, EngineError
from deepseek_backend.service import Service
from deepseek_backend.watcher import ServerAbove, drain_seconds, readiness
from support.fakes import ListReply, ScriptedEngine, array, configured, send, serving, wait
from support.waiting import wait_for


@contextlib.contextmanager
def exiting(engine, drain_s):
    """A service, and what makes the server above it exit."""
    exits = threading.Event()
    with serving(engine, {"drain_s": drain_s}, server=ServerAbove(is_exiting=exits.is_set)) as served:
        yield served, exits.set


def finish(engine, request, text="", reason="stop"):
    engine.step([(request, Step(text=text, token_ids=[1], finish_reason=reason, num_input_tokens=2))])


def settled(service):
    """Wait until every request is closed."""
    return any(not service.num_open or time.sleep(0.005) for _ in range(2000))


def deliver(service):
    while service.delivery.serve_next():
        pass


def test_a_request_reaches_the_engine_and_its_steps_the_client(service, engine):
    reply = send(service, stream=True, max_tokens=5)
    (request,) = engine.requests
    engine.step([(request, Step(text="Hi", token_ids=[1]))])
    engine.step([(request, Step(text="!", token_ids=[2], finish_reason="length", num_input_tokens=1))])
    assert wait(reply).text == "Hi!"
    assert (request.prompt, request.max_tokens) == ("hello", 5)
    assert settled(service)


def test_bad_input_is_answered_and_never_reaches_the_engine(service, engine):
    too_long = "é" * (ScriptedEngine.MAX_PROMPT_BYTES // 2 + 1)
    for reply, code in [
        (send(service, max_tokens=-1), ErrorCode.INVALID_ARGUMENT),
        (send(service, too_long), ErrorCode.PROMPT_TOO_LONG),
        (send(service, inputs={"input_ids": np.ones(4096, np.int32)}), ErrorCode.PROMPT_TOO_LONG),
    ]:
        assert wait(reply).errors[0].code is code
    assert engine.requests == []
    assert settled(service)


def test_an_engine_that_raises_is_answered_as_internal(service, engine):
    def submit(request, sink):
        raise ZeroDivisionError("no such luck")

    engine.submit = submit
    assert wait(send(service)).errors[0].wire_message() == "[E_INTERNAL] ZeroDivisionError: no such luck"


def test_a_client_that_has_gone_ends_its_request_in_the_engine(service, engine):
    reply = send(service, stream=True)
    reply.cancelled = True
    assert wait(reply).errors[0].code is ErrorCode.CANCELLED
    assert settled(service)
    assert engine.aborted == [engine.requests[0].request_id]


def test_stop_ends_the_requests_of_its_id_and_says_so_to_who_asks_for_the_finish_reason(service, engine):
    first, running = (send(service, client_id="job-7") for _ in range(2))
    finish(engine, engine.requests[0], "first")
    assert wait(first).text == "first"
    engine.step([(engine.requests[1], Step(text="so far", token_ids=[1]))])
    third = send(service, client_id="job-7")
    stopper = send(service, client_id="job-7", stop=True)
    assert [wait(reply).last["finish_reason"] for reply in (running, third)] == ["cancelled"] * 2
    assert running.text == "so far"
    assert wait(stopper).errors[0].code is ErrorCode.CANCELLED
    assert stopper.sent == []
    assert engine.aborted == [request.request_id for request in engine.requests[1:]]
    send(service, client_id="job-7")
    stoppers = [send(service, client_id="job-7", stop=True, return_finish_reason=True) for _ in range(2)]
    assert (wait(stoppers[0]).last["finish_reason"], stoppers[0].text) == ("stop", "")
    assert wait(stoppers[1]).errors[0].code is ErrorCode.INVALID_ARGUMENT


def test_an_end_that_another_thread_took_from_the_step_queue_is_answered(engine):
    """The watcher ends a request while a thread of delivery has its last step in its hands."""
    service = Service(configured(), engine)
    service.load()
    reply = send(service)
    finish(engine, engine.requests[0], "x")
    assert service.delivery._steps._sort_in()
    service.end_early(service.snapshot()[0], cause="deadline", timed_out=True)
    deliver(service)
    assert reply.last["finish_reason"] == "stop"
    assert not service.num_open


@pytest.mark.parametrize(
    ("prompt", "parameters"),
    [("hello", {"stream": True}), ("hello", {"max_tokens": -1}), ("hello", {"sampling_parameters": "{"}), ("", {})],
    ids=["served", "a value", "an error behind the error", "no prompt"],
)
def test_requests_that_are_over_do_not_wait_for_the_garbage_collector(engine, prompt, parameters):
    """A soak found them: the error kept its frames, the frames the request, and the request the error."""
    service = Service(configured(), engine)
    service.load()
    gc.disable()
    try:
        send(service, prompt, **parameters)
        active = weakref.ref(service.snapshot()[0])
        for _ in engine.requests:
            finish(engine, engine.requests.pop(), "x")
        deliver(service)
        assert active() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_deadlines_near_the_end_leave_no_request_unanswered(engine):
    """Threads of delivery and the watcher take the last steps of the same requests."""
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with serving(engine, {"cancellation_check_period_ms": 1}) as service:
            for _ in range(40):
                replies = [send(service, stream=number % 2 == 0, timeout_ms=3) for number in range(20)]
                requests, engine.requests[:] = list(engine.requests), []
                threading.Event().wait(0.002)
                for request in requests:
                    finish(engine, request, "x")
                for reply in replies:
                    assert wait(reply).finals == 1
            assert settled(service)
    finally:
        sys.setswitchinterval(switch_interval)


def test_stop_needs_an_id_and_is_answered_the_same_for_one_that_nobody_has(service):
    """As TensorRT-LLM's own test of a stop request expects."""
    assert "id" in str(wait(send(service, stop=True)).errors[0])
    error = wait(send(service, stop=True, client_id="ghost")).errors[0]
    assert error.code is ErrorCode.CANCELLED
    assert "cancelled by client" in str(error)


@pytest.mark.parametrize("trouble", [{"failures": 1}, {"broken": True}], ids=["one response", "every response"])
def test_a_response_that_cannot_be_sent_ends_the_request(service, engine, trouble):
    reply = send(service, stream=True)
    vars(reply).update(trouble)
    engine.step([(engine.requests[0], Step(text="x", token_ids=[1]))])
    if not reply.broken:
        assert wait(reply).errors[0].code is ErrorCode.INTERNAL
    assert settled(service)
    assert engine.aborted == [engine.requests[0].request_id]


def test_a_request_that_cannot_be_asked_does_not_hide_the_others(service, engine):
    stuck, gone = send(service, stream=True), send(service, stream=True)
    stuck.unaskable, gone.cancelled = True, True
    assert wait(gone).errors[0].code is ErrorCode.CANCELLED
    engine.step([(engine.requests[0], Step(text="fine", token_ids=[1], finish_reason="stop"))])
    assert wait(stuck).text == "fine"


@pytest.mark.parametrize(("defaults", "problem"), [({"min_p": 0.1}, r"min_p: not supp"), ({"n": 4}, "n, best_of: ")])
def test_defaults_that_cant_be_served_stop_the_load(engine, defaults, problem):
    with pytest.raises(ConfigError, match=rf"default_sampling[.:] ?{problem}"):
        Service(configured(default_sampling=defaults), engine).start()
    assert engine.stopped


def test_a_stop_string_aborts_the_engine(service, engine):
    reply = send(service, stream=True, sampling_param_stop="END")
    engine.step([(engine.requests[0], Step(text="abENDc", token_ids=[1, 2]))])
    assert wait(reply).text == "ab"
    assert engine.aborted == [engine.requests[0].request_id]


def test_a_large_final_response_is_one_answer_in_two_steps(service, engine):
    failing, reply = send(service), send(service)
    failing.failures = 1
    for request in list(engine.requests):
        finish(engine, request, text := "x" * (LARGE_BYTES + 1))
    assert wait(failing).errors[0].code is ErrorCode.INTERNAL
    assert wait(reply).text == text
    assert (len(reply.sent), reply.finals) == (1, 1)
    assert settled(service)


def test_a_step_that_cannot_be_taken_fails_its_own_request_only(service, engine):
    first, second = send(service, return_logprobs=True), send(service)
    broken = Step(token_ids=[1], logprobs=[[]])
    done = Step(text="fine", token_ids=[1], finish_reason="stop")
    engine.step([(engine.requests[0], broken), (engine.requests[1], done)])
    assert wait(first).errors[0].code is ErrorCode.INTERNAL
    assert wait(second).text == "fine"


def test_an_engine_that_dies_while_the_server_drains_is_seen(engine):
    with exiting(engine, 3600) as (service, exit_now):
        reply = send(service)
        exit_now()
        wait_for(lambda: service.draining)
        engine.alive = False
        assert wait(reply).errors[0].code is ErrorCode.UNAVAILABLE


def test_prompts_repeated_without_end_are_refused(engine):
    with serving(engine) as service:
        echo = {"exclude_input_from_output": False, "n": 64, "temperature": 1}
        engine.MAX_PROMPT_BYTES = 1 << 30
        big = {"text_input": array("x" * (1 << 20))}
        assert "repeats the prompts" in str(wait(send(service, inputs=big, **echo)).errors[0])


def test_stopping_lets_go_of_what_is_open(engine):
    with serving(engine) as service:
        reply = send(service)
        engine.step([(engine.requests[0], Step(text="partial", token_ids=[1]))])
    assert (reply.sent, reply.errors, service.num_open) == ([], [], 0)
    assert engine.aborted == [engine.requests[0].request_id]
    assert engine.stopped
    assert not service.readiness().alive


def test_a_failed_sequence_ends_its_siblings(service, engine):
    reply = send(service, "one", "two")
    engine.step([(engine.requests[0], Step(error=EngineError("boom")))])
    assert str(wait(reply).errors[0]) == "boom"
    assert {request.request_id for request in engine.requests} <= set(engine.aborted)
    assert settled(service)


def test_a_conversation_is_rendered_and_not_given_a_second_bos(service, engine):
    messages = array('[{"role": "user", "content": "hi"}]')
    send(service, inputs={"messages": messages, "chat_template_kwargs": array('{"thinking": true}')})
    (request,) = engine.requests
    assert request.prompt == "<s><user>hi<think>"
    assert request.sampling.add_special_tokens is False


def test_a_second_bos_is_left_out_unless_it_is_asked_for(service, engine):
    asked = {"add_special_tokens": True}
    for prompt, parameters, expected in [("<s>x", {}, False), ("x", {}, None), ("<s>x", asked, True)]:
        send(service, prompt, **parameters)
        assert engine.requests[-1].sampling.add_special_tokens is expected


def test_reasoning_is_separated_from_where_the_prompt_ends(service, engine):
    messages = array('[{"role": "user", "content": "hi"}]')
    inputs = {"messages": messages, "chat_template_kwargs": array('{"thinking": true}')}
    reply = send(service, inputs=inputs, separate_reasoning=True)
    finish(engine, engine.requests[0], "hm</think>\n\nyes")
    assert (wait(reply).last["reasoning_output"], reply.last["text_output"]) == ("hm", "yes")


def test_one_more_than_max_inflight_is_refused_with_the_numbers(engine):
    with serving(engine, {"max_inflight": 2}) as service:
        first = send(service, "a", "b")
        refused = wait(send(service))
        assert refused.errors[0].code is ErrorCode.OVERLOADED
        assert "max_inflight is 2, 2 are in flight and this request is 1 more" in str(refused.errors[0])
        assert "this request alone is 3: lower n" in str(wait(send(service, n=3, temperature=1)).errors[0])
        for request in engine.requests:
            finish(engine, request)
        wait(first)
        assert settled(service)
        send(service)
        assert len(engine.requests) == 3


def test_whoever_asks_again_when_the_answer_has_come_finds_room(engine):
    class AsksAgain(ListReply):
        def send(self, outputs, *, final):
            self.following = send(service)
            super().send(outputs, final=final)

    with serving(engine, {"max_inflight": 1}) as service:
        first = AsksAgain()
        service.accept({"text_input": array("hello")}, "{}", first)
        finish(engine, engine.requests[0])
        wait(first)
        assert wait(send(service)).errors[0].code is ErrorCode.OVERLOADED
        finish(engine, engine.requests[1])
        assert not wait(first.following).errors
        assert settled(service)
        assert service.inflight == (0, 0)


def test_tokens_in_flight_are_prompts_and_max_tokens(engine):
    with serving(engine, {"max_inflight_tokens": 100}) as service:
        send(service, "x" * 40, max_tokens=80)  # 10 + 80
        refused = wait(send(service, max_tokens=10))
        never = wait(send(service, max_tokens=100)).errors[0]
    assert never.code is ErrorCode.INVALID_ARGUMENT
    assert "max_inflight_tokens is 100 and this request alone is 101: lower max_tokens" in str(never)
    assert "max_inflight_tokens is 100, 90 are in flight and this request is 11 more" in str(refused.errors[0])


@pytest.mark.parametrize(
    "given",
    [{"timeout_ms": 600_000}, {"timeout_us": 600_000_000}, {"timeout_ms": 3_600_000, "timeout_us": 600_000_000}],
)
def test_at_the_sooner_deadline_the_text_so_far_is_the_answer(service, engine, given):
    reply = send(service, **given)
    engine.step([(engine.requests[0], Step(text="so far", token_ids=[1]))])
    service.watcher.look(time.monotonic() + 500)
    assert not engine.aborted
    service.watcher.look(time.monotonic() + 700)
    assert (wait(reply).text, reply.last["finish_reason"]) == ("so far", "timeout")
    assert engine.aborted == [engine.requests[0].request_id]


def test_a_server_that_exits_refuses_new_requests_and_gives_open_ones_their_time(engine):
    with exiting(engine, 3600) as (service, exit_now):
        reply = send(service, stream=True)
        exit_now()
        wait_for(lambda: service.draining)
        assert not service.readiness().alive
        assert wait(send(service)).errors[0].code is ErrorCode.UNAVAILABLE
        finish(engine, engine.requests[0], "done")
        assert wait(reply).text == "done"


def test_what_is_open_at_the_end_of_the_drain_is_answered_with_the_text_so_far(engine):
    with exiting(engine, 0) as (service, exit_now):
        reply = send(service)
        engine.step([(engine.requests[0], Step(text="so far", token_ids=[1]))])
        exit_now()
        assert (wait(reply).text, reply.last["finish_reason"]) == ("so far", "cancelled")
        assert settled(service)


def test_the_drain_leaves_time_to_stop_within_the_exit_timeout():
    cases = {(None, 30.0): 25.0, (None, 4.0): 2.0, (None, 0.0): 0.0, (7, 30.0): 7.0}
    assert {case: drain_seconds(*case) for case in cases} == cases


@pytest.mark.parametrize(("on_fatal", "called"), [("exit", True), ("unready", False)])
def test_a_dead_engine_fails_what_is_open_and_then_is_fatal(engine, on_fatal, called):
    fatal = threading.Event()
    ours = {"on_fatal": on_fatal, "fatal_grace_s": 0}
    with serving(engine, ours, server=ServerAbove(end=lambda reason: fatal.set())) as service:
        reply = send(service)
        engine.alive = False
        assert wait(reply).errors[0].code is ErrorCode.UNAVAILABLE
        assert not service.readiness().alive
        assert fatal.wait(10 if called else 0.05) is called


@pytest.fixture
def jump(monkeypatch):
    """Move the service's clock on by some seconds, and return its time."""
    monotonic, ahead = time.monotonic, []
    clock = SimpleNamespace(monotonic=lambda: monotonic() + sum(ahead))
    for module in (service_module, watcher_module):
        monkeypatch.setattr(module, "time", clock)
    return lambda seconds: ahead.append(seconds) or clock.monotonic()


@pytest.fixture
def hanging(engine, jump):
    with serving(engine, {"hang_s": 60}) as served:
        yield served


def test_requests_that_all_time_out_without_a_token_are_one_long_wait(hanging, engine, jump):
    for _ in range(3):
        wait(send(hanging, timeout_ms=1))
        assert settled(hanging)
        jump(25)
    send(hanging)
    assert "none had a token" in hanging.readiness().reason
    engine.step([(engine.requests[-1], Step(text="x", token_ids=[1]))])
    assert hanging.readiness().alive


def test_an_idle_server_does_not_wait_for_tokens(hanging, engine, jump):
    send(hanging)
    send(hanging, client_id="a")
    for request in engine.requests:
        engine.step([(request, Step(finish_reason="stop"))])
    assert settled(hanging)
    jump(61)
    send(hanging)
    assert hanging.readiness().alive


def test_an_engine_that_works_without_a_step_does_not_hang(hanging, engine, jump):
    send(hanging)
    jump(61)
    assert not hanging.readiness().alive
    engine.worked_at_s = jump(0)
    assert hanging.readiness().alive


WHOLE = [{}, {"n": 2, "temperature": 0.8}, {"separate_reasoning": True}, {"timeout_ms": 1000}]


def test_steps_are_asked_for_where_something_needs_them_or_the_engine_gains_nothing(service, engine):
    send(service)
    assert engine.requests[0].wants_steps
    engine.whole_answers = True
    for parameters in [*WHOLE, {"stream": True}, {"sampling_param_stop": "x"}]:
        engine.requests.clear()
        send(service, **parameters)
        assert {request.wants_steps for request in engine.requests} == {parameters not in WHOLE}


@pytest.fixture
def whole(engine):
    """A service whose engine sends whole answers."""
    engine.whole_answers = True
    with serving(engine) as served:
        yield served


def test_an_answer_that_comes_whole_and_is_cut_short_has_the_engines_text_so_far(whole, engine):
    reply = send(whole, client_id="a")
    stops = [send(whole, client_id="a", stop=True) for _ in range(2)]
    (request,) = engine.requests
    assert engine.aborted == [request.request_id]
    assert not reply.finals
    finish(engine, request, "so far", reason="cancelled")
    assert (wait(reply).text, reply.last["finish_reason"]) == ("so far", "cancelled")
    assert [wait(stop).finals for stop in stops] == [1, 1]
    assert settled(whole)


def test_at_the_deadline_an_answer_that_comes_whole_has_the_engines_text_so_far(whole, engine):
    reply = send(whole, "a", "b", timeout_ms=1)
    # What is aborted while it is still being submitted is aborted once more after that.
    wait_for(lambda: set(engine.aborted) == {request.request_id for request in engine.requests})
    for request in engine.requests:
        finish(engine, request, "so far", reason="cancelled")
    assert wait(reply).last["finish_reason"] == ["timeout", "timeout"]
    assert reply.last["text_output"] == ["so far", "so far"]
    assert settled(whole)


def test_a_gone_client_is_no_reason_to_wait_for_the_text_so_far(whole, engine):
    reply = send(whole)
    reply.cancelled = True
    wait(reply)
    assert engine.aborted == [engine.requests[0].request_id]


def test_an_abort_while_a_whole_answer_is_submitted_reaches_the_engine(whole, engine, monkeypatch):
    submit = engine.submit

    def slowly(request, sink):
        whole.end_all(cause="drain")
        engine.aborted.clear()  # the engine does not know the request yet
        submit(request, sink)

    monkeypatch.setattr(engine, "submit", slowly)
    send(whole)
    assert engine.aborted == [engine.requests[0].request_id]


def test_an_engine_that_hangs_is_not_ready_and_one_that_idles_is():
    cases = {(0, 1e6): True, (1, 299): True, (2, 301): False}
    alive = EngineHealth(alive=True)
    found = {
        (num_open, idle_s): readiness(alive, draining=False, num_open=num_open, idle_s=idle_s, hang_s=300)
        for num_open, idle_s in cases
    }
    assert {case: health.alive for case, health in found.items()} == cases
    assert "2 requests are open and none had a token for 301 s" in found[2, 301].reason


def test_a_change_of_the_readiness_is_a_warning_and_that_of_a_stop_is_not(engine, caplog):
    def said(alive):
        caplog.clear()
        engine.alive = alive
        service.publish_state()
        assert service.readiness().alive is (alive and not engine.stopped)
        return [record.levelname for record in caplog.records]

    caplog.set_level("INFO")
    with serving(engine) as service:
        assert said(alive=True) == []
        assert said(alive=False) == ["WARNING"]
        assert said(alive=True) == ["WARNING"]
    assert said(alive=True) == ["INFO"]


class Story:
    """A service driven by hand, without threads: every interleaving is a list of calls."""

    def __init__(self, streaming, whole_answers):
        self.engine = ScriptedEngine()
        self.engine.whole_answers = whole_answers
        self.exiting = False
        self.streaming = streaming
        ours = {"drain_s": 60, "on_fatal": "unready", "max_inflight": 6}
        self.service = Service(configured(**ours), self.engine, server=ServerAbove(is_exiting=lambda: self.exiting))
        self.service.load()
        self.replies = []
        self.over = set()
        """Requests that have had their last step."""

    def send(self, number):
        self.replies.append(
            send(self.service, *"abc"[: 1 + number % 3], client_id=f"id{number % 2}", stream=self.streaming)
        )

    def send_bad(self, number):
        self.replies.append(send(self.service, max_tokens=-number))

    def stop_by_id(self, number):
        self.replies.append(send(self.service, client_id=f"id{number % 2}", stop=True))

    def send_with_deadline(self, number):
        self.replies.append(send(self.service, timeout_ms=1 + number, stream=self.streaming))

    def token(self, number):
        self._step(number, Step(text="x", token_ids=[1]))

    def finish(self, number):
        self._step(number, Step(text="x", token_ids=[1], finish_reason="length"))

    def fail(self, number):
        self._step(number, Step(error=EngineError("boom")))

    def obey_aborts(self, _number):
        for request in self.engine.requests:
            if request.request_id in self.engine.aborted:
                self._end(request, Step(finish_reason="cancelled"))

    def client_goes(self, number):
        if self.replies:
            self.replies[number % len(self.replies)].cancelled = True

    def break_reply(self, number):
        if self.replies:
            self.replies[number % len(self.replies)].failures = 1

    def engine_dies(self, number):
        self.engine.alive = number % 8 != 0

    def server_exits(self, number):
        self.exiting = self.exiting or number % 8 == 0

    def watch(self, number):
        self.service.watcher.look(time.monotonic() + number * 10)

    def deliver(self, _number):
        self.service.delivery.serve_next()

    def finish_everything(self):
        for request in self.engine.requests:
            self._end(request, Step(finish_reason="length"))
        deliver(self.service)

    def _step(self, number, step):
        if self.engine.requests:
            self._end(self.engine.requests[number % len(self.engine.requests)], step)

    def _end(self, request, step):
        """As an engine would: nothing after the last step."""
        if request not in self.over:
            if step.finish_reason or step.error:
                self.over.add(request)
            self.engine.step([(request, step)])


MOVES = [name for name, move in vars(Story).items() if callable(move) and not name.startswith("_")]
MOVES.remove("finish_everything")


@pytest.mark.slow
@settings(max_examples=300)
@given(st.booleans(), st.booleans(), st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 15)), max_size=40))
def test_on_every_interleaving_each_request_gets_one_final_response_and_none_is_left(streaming, whole_answers, moves):
    story = Story(streaming, whole_answers)
    for move, number in moves:
        getattr(story, move)(number)
    story.finish_everything()
    assert [reply.finals for reply in story.replies] == [0 if reply.lost else 1 for reply in story.replies]
    assert story.service.num_open == 0
    assert story.service.inflight == (0, 0)
    aborted_or_over = story.over | {r for r in story.engine.requests if r.request_id in story.engine.aborted}
    assert aborted_or_over == set(story.engine.requests)


CHAT = {"text_input": array(""), "messages": array('[{"role": "user", "content": "Hi"}]')}
TOOLS = array('[{"type": "function", "function": {"name": "f"}}]')


def test_tasks_are_answered_while_nothing_else_is(service, engine):
    """The engine answers nothing here, and admission has no room."""
    with serving(engine, {"max_inflight": 1}) as full:
        send(full)
        tokens = wait(send(full, "Hi there", task="tokenize"))
        chat = wait(send(full, inputs=CHAT, task="tokenize", streaming=True))
        ids = {"input_ids": np.array(tokens.last["output_ids"], dtype=np.int32)}
        text = wait(send(full, inputs=ids, task="detokenize"))
        assert full.inflight[0] == 1
    assert tokens.last["num_input_tokens"] == len(tokens.last["output_ids"]) == 3
    assert chat.last["num_input_tokens"] == len(engine.tokenizer.encode("<s><user>Hi", False))
    assert text.last["text_output"].startswith("<｜begin▁of▁sentence｜>")
    assert [reply.finals for reply in (tokens, chat, text)] == [1, 1, 1]
    assert len(engine.requests) == 1


def test_tokens_of_several_prompts_come_one_after_the_other(service):
    both = wait(send(service, "Hi there", "Hi", task="tokenize", sampling_param_add_special_tokens=False)).last
    one = wait(send(service, "Hi", task="tokenize", sampling_param_add_special_tokens=False)).last
    assert both["num_input_tokens"] == [2, 1]
    assert both["output_ids"][2] == one["output_ids"]


def test_tasks_are_refused_or_answered_when_they_can_not_be_done(service, engine, monkeypatch):
    for ids, problem in [([10**9], "input_ids: expected token ids from 0 to "), ([], "text_input: expected a prompt")]:
        inputs = {"text_input": array(""), "input_ids": np.array(ids, dtype=np.int32)}
        (error,) = wait(send(service, inputs=inputs, task="detokenize")).errors
        assert error.wire_message().startswith(f"[E_INVALID_ARGUMENT] {problem}")
    assert settled(service)
    monkeypatch.setattr(type(engine.tokenizer), "encode", lambda *_: 1 / 0)
    assert wait(send(service, task="tokenize")).errors[0].wire_message().startswith("[E_INTERNAL] ZeroDivisionError")
    service.drain("going")
    assert wait(send(service, task="tokenize")).errors[0].code is ErrorCode.UNAVAILABLE


def test_describe_says_what_the_model_is(service, engine):
    info = json.loads(wait(send(service, "", task="describe")).last["model_info"])
    fields = info.pop("fields")
    assert fields["guided_regex"] == "no grammar in a script"
    assert fields["temperature"] == fields["best_of"] == ""
    tokens = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>", "pad_token": ""}
    model = {"name": "m", "checkpoint": "m", "engine": "tensorrt_llm", "engine_version": "", "simulation": None}
    limits = {"max_seq_len": 4096, "default_max_tokens": 256, "decoupled": True, "vocab_size": 129280}
    assert info == {
        **model,
        **limits,
        **tokens,
        "greedy_by_default": True,
        "tool_form": None,
        "thinking_switch": True,
        "reasoning_efforts": None,
        "chat_template": None,
    }


NAMES = {
    "tiny": "tiny",
    "/models/DeepSeek-R1": "deepseek-r1",
    "/models/DeepSeek-R1/": "deepseek-r1",
    "deepseek-ai/DeepSeek-V3.1": "deepseek-v3.1",
    "/c/models--deepseek-ai--DeepSeek-V3-0324/snapshots/0a1b": "deepseek-v3-0324",
    "": "deepseek",
}


def test_a_model_is_known_by_its_checkpoints_name_and_configuration(tmp_path):
    assert {checkpoint: served_name(checkpoint) for checkpoint in NAMES} == NAMES
    config = parse_config({"model": str(tmp_path)}, version_dir=Path())
    for text, kind in (('{"model_type": "deepseek_v32"}', "deepseek_v32"), ("{}", ""), ("[]", ""), ("", "")):
        (tmp_path / "config.json").write_text(text)
        assert model_type(config) == kind
    assert model_type(parse_config({"model": "no/such"}, version_dir=tmp_path)) == ""


def test_a_required_call_is_the_beginning_of_the_text(engine):
    engine.call_form = "raw_json"
    with serving(engine) as service:
        inputs = {**CHAT, "tools": TOOLS, "tool_choice": array("required")}
        reply = send(service, inputs=inputs, streaming=True, separate_reasoning=True)
        (request,) = engine.requests
        finish(engine, request, '{"a": 1}')
        wait(reply)
    begun = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
    assert request.prompt.endswith(begun)
    assert "## Tools" in request.prompt
    assert reply.text == f'{begun}{{"a": 1}}'
    assert (reply.last["num_output_tokens"], reply.last["num_reasoning_tokens"]) == (1, 0)


def test_tools_are_refused_where_calls_have_no_form(service):
    (error,) = wait(send(service, inputs={**CHAT, "tools": TOOLS})).errors
    assert error.wire_message().startswith("[E_UNSUPPORTED] tools: the checkpoint's chat template shows no tools")
