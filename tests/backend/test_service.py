import json
import threading
from pathlib import Path

import numpy as np
import pytest
from fakes import ListReply, ScriptedEngine

from deepseek_backend.config import parse_config
from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines.base import Step
from deepseek_backend.errors import ConfigError
from deepseek_backend.service import Service


@pytest.fixture
def engine():
    return ScriptedEngine()


@pytest.fixture
def service(engine):
    ours = {"cancellation_check_period_ms": 5}
    served = Service(parse_config({"model": "m", "triton_config": ours}, version_dir=Path()), engine)
    served.start()
    yield served
    served.stop()


def send(service, prompt="hello", client_id="", **parameters):
    reply = ListReply()
    inputs = {"text_input": np.array([prompt.encode()], dtype=np.object_)}
    service.accept(inputs, json.dumps(parameters), reply, client_id=client_id)
    return reply


def wait(reply):
    assert reply.done.wait(10), "no final response"
    return reply


def settled(service):
    """Wait until the sender has let go of every exchange."""
    for _ in range(2000):
        if not service.num_open:
            return True
        threading.Event().wait(0.005)
    return False


def test_a_request_reaches_the_engine_and_its_steps_the_client(service, engine):
    reply = send(service, stream=True, max_tokens=5)
    (request,) = engine.requests
    engine.step([(request, Step(text="Hi", token_ids=[1]))])
    engine.step([(request, Step(text="!", token_ids=[2], finish_reason="length", num_input_tokens=1))])

    assert wait(reply).text == "Hi!"
    assert (request.prompt, request.max_tokens) == ("hello", 5)
    assert settled(service)


def test_bad_input_is_answered_and_never_reaches_the_engine(service, engine):
    reply = wait(send(service, max_tokens=-1))

    assert reply.errors[0].code is ErrorCode.INVALID_ARGUMENT
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


def test_stop_ends_the_request_of_the_same_id_and_answers_both(service, engine):
    running = send(service, client_id="job-7")
    engine.step([(engine.requests[0], Step(text="so far", token_ids=[1]))])
    stopper = send(service, client_id="job-7", stop=True)

    assert wait(running).last["finish_reason"] == "cancelled"
    assert running.text == "so far"
    assert wait(stopper).text == ""
    assert engine.aborted == [engine.requests[0].request_id]


def test_stop_without_an_id_is_refused(service):
    assert "id" in str(wait(send(service, stop=True)).errors[0])


def test_stop_for_an_id_that_nobody_has_is_refused(service):
    assert "no running request has the id 'ghost'" in str(wait(send(service, stop=True, client_id="ghost")).errors[0])


def test_one_response_that_cannot_be_sent_is_answered_with_an_error(service, engine):
    reply = send(service, stream=True)
    reply.failures = 1
    engine.step([(engine.requests[0], Step(text="x", token_ids=[1]))])

    assert wait(reply).errors[0].code is ErrorCode.INTERNAL
    assert settled(service)
    assert engine.aborted == [engine.requests[0].request_id]


def test_a_request_that_cannot_be_asked_does_not_hide_the_others(service, engine):
    stuck, gone = send(service, stream=True), send(service, stream=True)
    stuck.unaskable, gone.cancelled = True, True

    assert wait(gone).errors[0].code is ErrorCode.CANCELLED
    engine.step([(engine.requests[0], Step(text="fine", token_ids=[1], finish_reason="stop"))])
    assert wait(stuck).text == "fine"


def test_a_prompt_that_cannot_fit_is_refused_before_the_engine_sees_it(service, engine):
    reply = wait(send(service, prompt="é" * (ScriptedEngine.MAX_PROMPT_BYTES // 2 + 1)))

    assert reply.errors[0].code is ErrorCode.PROMPT_TOO_LONG
    assert engine.requests == []


def test_a_default_that_the_engine_lacks_stops_the_load(engine):
    config = parse_config({"model": "m", "triton_config": {"default_sampling": {"min_p": 0.1}}}, version_dir=Path())

    with pytest.raises(ConfigError, match=r"default_sampling\.min_p: not supported by this engine"):
        Service(config, engine).start()
    assert engine.stopped


def test_a_response_that_cannot_be_sent_frees_the_request(service, engine):
    reply = send(service, stream=True)
    reply.broken = True
    engine.step([(engine.requests[0], Step(text="x", token_ids=[1]))])

    assert settled(service)
    assert engine.aborted == [engine.requests[0].request_id]


def test_a_stop_string_aborts_the_engine(service, engine):
    reply = send(service, stream=True, sampling_param_stop="END")
    engine.step([(engine.requests[0], Step(text="abENDc", token_ids=[1, 2]))])

    assert wait(reply).text == "ab"
    assert engine.aborted == [engine.requests[0].request_id]


def test_stopping_lets_go_of_what_is_open(engine):
    service = Service(parse_config({"model": "m"}, version_dir=Path()), engine)
    service.start()
    reply = send(service)
    engine.step([(engine.requests[0], Step(text="partial", token_ids=[1]))])
    service.stop()

    assert (reply.sent, reply.errors) == ([], [])
    assert engine.aborted == [engine.requests[0].request_id]
    assert service.num_open == 0
    assert engine.stopped
    assert not service.is_ready()


def test_readiness_is_the_engines(service, engine):
    assert service.is_ready()
    engine.alive = False
    assert not service.is_ready()
