import json
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_backend.config import BackendConfig
from deepseek_backend.contract import REQUEST_TYPES
from deepseek_backend.engines.base import Step
from deepseek_backend.engines.generate_request import ContextHandover, RequestType, read_handover
from deepseek_backend.engines.simulated.simulated_engine import SimulatedEngine
from support import fakes
from support.fakes import ListReply, ScriptedEngine, array, serving, wait
from support.waiting import wait_for

ids = st.integers(0, 2**31 - 1)
handovers = st.builds(
    ContextHandover,
    form=st.text(max_size=20),
    prompt_token_ids=st.lists(ids, min_size=1, max_size=9).map(tuple),
    first_gen_tokens=st.lists(ids, min_size=1, max_size=3).map(tuple),
    ended=st.booleans(),
    ctx_request_id=st.none() | st.integers(-(2**63) + 1, 2**63 - 1),
    opaque_state=st.binary(max_size=40),
    draft_tokens=st.none() | st.lists(ids, max_size=3).map(tuple),
    num_cached_tokens=ids,
)
HANDOVER = ContextHandover(form="scripted 1 m", prompt_token_ids=(5, 6, 7), first_gen_tokens=(9,), opaque_state=b"\0x")


class SharingEngine(ScriptedEngine):
    HANDOVER_FORM = HANDOVER.form


@pytest.fixture
def engine():
    return SharingEngine()


def send(service, *, handover=None, **fields):
    inputs = {"text_input": array("hi")} | ({} if handover is None else {"context_phase_params": array(handover)})
    return fakes.send(service, inputs=inputs, **fields)


def error_of(reply):
    return str(wait(reply).errors[0])


def test_the_request_types_are_the_contract_s():
    assert get_args(RequestType) == REQUEST_TYPES


@pytest.mark.slow
@given(handovers)
def test_a_handover_survives_the_wire(handover):
    assert read_handover(handover.to_json().decode()) == handover


@pytest.mark.slow
@given(handovers, st.data())
def test_a_damaged_handover_is_refused_by_the_name_of_its_part(handover, data):
    document = json.loads(handover.to_json())
    name = data.draw(st.sampled_from(sorted(document)))
    damaged = {**document, name: data.draw(st.sampled_from([{}, [1.5], ["a"], 3.7, "é!"]))}
    if damaged[name] == "é!" and name == "form":
        damaged.pop(name)
    with pytest.raises(ValueError, match=f"context_phase_params: expected .*{name}"):
        read_handover(json.dumps(damaged))


def test_other_text_is_no_handover():
    for text in ("", "[]", "null", "{", '{"form": "a"}', '{"more": 1}', "[" * 100_000):
        with pytest.raises(ValueError, match=r"^context_phase_params: expected"):
            read_handover(text)


def test_a_context_server_answers_with_the_handover_and_with_text_that_is_certain(engine, service):
    reply = send(service, request_type="context_only", sampling_param_stop="XYZ")
    (request,) = engine.requests
    engine.step([(request, Step("aXY", (9,), "length", None, 3, handover=HANDOVER))])
    last = wait(reply).last
    assert (request.request_type, request.handover, request.wants_steps) == ("context_only", None, True)
    assert (last["text_output"], last["finish_reason"], last["num_output_tokens"]) == ("a", "length", 1)
    assert read_handover(last["context_phase_params"]) == HANDOVER


def test_a_generation_server_goes_on_from_the_handover(engine, service):
    reply = send(service, handover=HANDOVER.to_json(), request_type="generation_only")
    (request,) = engine.requests
    engine.step([(request, Step("aXY", (9,), None, None, 3)), (request, Step("b", (1,), "stop", None, 3))])
    assert wait(reply).text == "aXYb"
    assert (request.handover, request.prompt_token_ids, request.prompt) == (HANDOVER, (5, 6, 7), "hi")


def stop(service, client_id):
    service.accept({"text_input": array(""), "stop": np.array([True])}, "{}", ListReply(), client_id=client_id)


@pytest.mark.parametrize("was_done", [False, True])
def test_a_stopped_context_server_hands_over_what_it_had_done(engine, service, was_done):
    """The stop may cross the end. A client that is told "cancelled" would leave the KV cache there."""
    reply = ListReply()
    service.accept({"text_input": array("hi")}, '{"request_type": "context_only"}', reply, client_id="id")
    (request,) = engine.requests
    stop(service, "id")
    assert engine.aborted == [request.request_id]
    assert not reply.finals
    last = Step("a", (9,), "length", None, 3, handover=HANDOVER) if was_done else Step(finish_reason="cancelled")
    engine.step([(request, last)])
    assert ("context_phase_params" in wait(reply).last) == was_done
    assert reply.last["finish_reason"] == ("length" if was_done else "cancelled")


def hand_over(engine):
    (request,) = engine.requests
    engine.step([(request, Step("a", (9,), "length", None, 3, handover=HANDOVER))])
    return request.request_id


def test_a_handover_that_was_sent_is_the_client_s(engine, service):
    reply = send(service, request_type="context_only")
    hand_over(engine)
    assert wait(reply).last["finish_reason"] == "length"
    wait_for(lambda: not service.num_open)
    assert engine.dropped == []


@pytest.mark.parametrize("trouble", [{"broken": True}, {"failures": 1}], ids=["client and error", "client"])
def test_a_handover_that_cant_be_sent_is_dropped(engine, service, trouble):
    send(service, request_type="context_only", reply=ListReply(**trouble))
    request_id = hand_over(engine)
    wait_for(lambda: engine.dropped == [request_id])


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_handover_for_a_client_who_has_gone_is_dropped(engine, is_noticed):
    with serving(engine, {"cancellation_check_period_ms": 5 if is_noticed else 60_000}) as service:
        reply = send(service, request_type="context_only")
        reply.cancelled = True
        if is_noticed:
            wait(reply)
        request_id = hand_over(engine)
        assert "the client has gone" in error_of(reply)
        assert reply.sent == []
        wait_for(lambda: engine.dropped == [request_id])


def test_a_client_who_goes_during_the_submission_leaves_nothing(engine, service):
    """The engine hears of the end before it hears of the request."""
    reply = ListReply()
    submit = engine.submit

    def submit_late(request, sink):
        reply.cancelled = True  # no earlier: a request of one who has gone already is not submitted
        wait_for(lambda: reply.finals and not service.num_open)
        submit(request, sink)

    engine.submit = submit_late
    send(service, request_type="context_only", reply=reply)
    assert engine.dropped[-1] == engine.requests[0].request_id


def test_a_kv_cache_is_fetched_though_the_client_went_before_the_submission(engine, service, monkeypatch):
    reply = ListReply()
    put = service.delivery.put_request

    def put_late(active):
        put(active)
        if not active.ended:
            reply.cancelled = True
            wait_for(lambda: active.ended)

    monkeypatch.setattr(service.delivery, "put_request", put_late)
    send(service, handover=HANDOVER.to_json(), request_type="generation_only", reply=reply)
    assert engine.aborted[-1] == engine.requests[0].request_id


def test_the_simulated_engine_holds_nothing_for_nobody():
    engine = SimulatedEngine(BackendConfig())
    with serving(engine) as service:
        for reply in [ListReply(), ListReply(broken=True), ListReply(cancelled=True)]:
            send(service, request_type="context_only", reply=reply)
        wait_for(lambda: not service.num_open)
        wait_for(lambda: engine.stats().extra["held_contexts"] == 1, engine.stats)


def test_what_two_servers_cant_share_is_refused_by_name(service):
    """The features that they can't are in test_shared_features."""
    other = ContextHandover(form="scripted 2 m", prompt_token_ids=(5,), first_gen_tokens=(9,))
    for request_type, handover, said in [
        ("generation_only", None, "context_phase_params: expected with request_type generation_only, got none"),
        ("context_only", HANDOVER.to_json(), "not expected with request_type context_only"),
        ("generation_only", b"{}", "context_phase_params: expected form to be a string"),
        ("decode_only", None, "request_type: expected"),
        ("generation_only", other.to_json(), "'scripted 2 m'"),
        ("generation_only", other.to_json(), HANDOVER.form),
    ]:
        assert said in error_of(send(service, handover=handover, request_type=request_type))


def test_an_engine_that_does_whole_requests_only_refuses_parts_of_them():
    engine = ScriptedEngine()
    with serving(engine) as service:
        for parts in (
            {"request_type": "context_only"},
            {"request_type": "generation_only", "handover": HANDOVER.to_json()},
            {"handover": HANDOVER.to_json()},
        ):
            assert "this engine does whole requests only" in error_of(send(service, **parts))
        send(service, request_type="context_and_generation")
        wait_for(lambda: engine.requests)
