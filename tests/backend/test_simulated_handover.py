"""Two simulated engines in one process, one for context phases and one for generation, joined by real sockets."""

import asyncio
import dataclasses
import gc
import itertools
import json
import socket
import threading
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_backend.config import BackendConfig
from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines.generate_request import read_handover
from deepseek_backend.engines.simulated.kv_transfer import GONE, GREETING, read_ticket
from deepseek_backend.engines.simulated.presets import H200, DeploymentModel
from deepseek_backend.engines.simulated.simulated_engine import SimulatedEngine
from support.engine_driver import StepLog, make_request, submitted
from support.waiting import wait_for

ENDLESS = 100_000
SLOW = 1e-6
"""Gigabits a second at which a transfer outlasts any test."""

numbers = itertools.count()


def request(prompt="Why is the sky blue?", *, max_tokens=20, **fields):
    """The second request of a client has the prompt in tokens too."""
    return dataclasses.replace(make_request(str(next(numbers)), max_tokens=max_tokens, **fields), prompt=prompt)


def ended(sink):
    """Wait for the end of the only request; return text, token ids, reasons and prompt length, and its last step."""
    wait_for(lambda: sink.calls)
    (name,) = sink.steps
    last = sink.last(name)
    return (sink.text(name), sink.token_ids(name), last.finish_reason, last.stop_reason, last.num_input_tokens), last


def answer(engine, one):
    return ended(submitted(engine, one))[0]


def handed_over(engine, one):
    """Run a context phase; return its handover as the generation server reads it."""
    step = ended(submitted(engine, one))[1]
    assert step.error is None
    return read_handover(step.handover.to_json().decode())


def context(engine, *prompt, **fields):
    return handed_over(engine, request(*prompt, request_type="context_only", **fields))


def fetching(one, two):
    """Go on from a context of `one` on `two`; return sink and request when the first token is there."""
    sink = submitted(two, leg := generation(context(one)))
    sink.wait_for(lambda: sink.steps[leg.request_id])
    return sink, leg


def generation(handover, *prompt, **fields):
    ids = handover.prompt_token_ids
    return request(*prompt, request_type="generation_only", handover=handover, **{**fields, "prompt_token_ids": ids})


def is_free(engine):
    stats = engine.stats()
    return (stats.num_running, stats.num_waiting, stats.kv_blocks_used, stats.extra["held_contexts"]) == (0, 0, 0, 0)


def assert_free(*engines):
    for engine in engines:
        wait_for(lambda engine=engine: is_free(engine), engine.stats)


PACELESS = {"pace": "none"}
REQUESTS = [  # engine options, and fields of the request; test_shared_features has each field of the contract
    ({}, {}),
    ({}, {"prompt": "Why?<think>\n", "max_tokens": 30}),
    ({}, {"prompt": "", "prompt_token_ids": (7, 8, 9), "truncate_prompt_tokens": 2}),
    ({"eos_after": 1}, {}),
    ({"eos_after": 1}, {"skip_special_tokens": False}),
    ({"eos_after": 2}, {}),
    ({"text": "dictated"}, {"prompt": "<answer>Łódź 天</answer>"}),
    ({"text": "dictated"}, {"prompt": "<answer></answer>"}),
    ({"preset": "b200x8-r1-fp4-min-latency", **PACELESS}, {"max_tokens": 50}),  # drafts
    ({"preset": "h200x8-r1-fp8-max-throughput", **PACELESS}, {"max_tokens": 50}),  # ranks
    ({"max_seq_len": 16}, {"max_tokens": 99}),
    ({"max_num_tokens": 3, "max_batch_size": 2}, {}),  # a prompt in chunks
]


@pytest.mark.parametrize(("options", "fields"), REQUESTS, ids=str)
def test_two_engines_give_the_answer_of_one(start, options, fields):
    one, two = start(**options), start(**options)
    whole = answer(one, request(**fields))
    leg = generation(context(one, **fields), **fields)
    assert answer(two, leg) == whole
    assert_free(two, one)
    again = dataclasses.replace(leg, request_id="again", request_type="context_and_generation")
    assert answer(two, again) == whole
    assert_free(two)


def test_the_seed_and_a_stop_token_are_handed_over(start):
    one, two = start(), start()
    handover = context(one, temperature=0.6)
    leg = generation(handover, temperature=0.6)
    again = dataclasses.replace(leg, request_id="again", request_type="context_and_generation")
    assert answer(two, leg) == answer(two, again) != answer(two, request(temperature=0.6))
    first = answer(one, request())[1][0]
    handover = context(one, stop_token_ids=(first,))
    assert (handover.ended, handover.first_gen_tokens) == (True, (first,))
    assert answer(two, generation(handover, stop_token_ids=(first,))) == ("", [first], "stop", first, 7)
    assert_free(one, two)


def test_the_context_holds_its_blocks_until_they_are_fetched(start):
    one, two = start(tokens_per_block=4), start()
    handover = context(one, max_tokens=1000)
    assert (one.stats().kv_blocks_used, one.stats().extra["held_contexts"], one.stats().num_running) == (2, 1, 0)
    answer(two, generation(handover, max_tokens=1000))
    assert_free(one, two)


def test_a_prompt_waits_for_blocks_that_are_held(start):
    one, two = start(max_seq_len=16, kv_cache_tokens=16, tokens_per_block=4, pace="real"), start()
    held = [context(one), context(one)]  # two blocks each
    third = submitted(one, request(request_type="context_only"))
    wait_for(lambda: one.stats().num_waiting)
    iterations = one.stats().extra["iterations"]
    answer(two, generation(held[0]))
    assert ended(third)[1].handover is not None
    assert one.stats().extra["iterations"] == iterations + 1, "nothing ran while nothing could"
    answer(two, generation(held[1]))
    wait_for(lambda: one.stats().extra["held_contexts"] == 1)


def test_transfers_hold_nobody_up_and_no_first_token(start):
    one, two = start(), start(pace="real", kv_transfer_gbps=SLOW)
    one_text = answer(one, request())[0]
    sink, leg = fetching(one, two)
    assert one_text.startswith(sink.text(leg.request_id))
    assert len(sink.token_ids(leg.request_id)) == 1
    wait_for(lambda: two.stats().num_running == 1)
    assert two.stats().kv_blocks_used == 1
    assert two.stats().extra["iterations"] == 0
    assert one.stats().extra["held_contexts"] == 1
    # A request that waits for its KV cache has a place in the batch; the others go on.
    one, two = start(), start(pace="real", speed=100, kv_transfer_gbps=SLOW)
    submitted(two, generation(context(one)))
    assert answer(two, request()) == answer(one, request())
    assert two.stats().num_running == 1


def test_a_request_that_waits_for_a_place_has_its_first_token(start):
    one, two = start(), start(max_batch_size=1, pace="real")
    running = request(max_tokens=ENDLESS)
    submitted(two, running)
    wait_for(lambda: two.stats().num_running)
    sink, _ = fetching(one, two)
    assert (two.stats().num_waiting, one.stats().extra["held_contexts"]) == (1, 1)
    two.abort(running.request_id)
    assert ended(sink)[0] == answer(one, request())
    assert_free(one, two)


def test_the_time_of_a_transfer():
    """By hand: 61 layers of 576 values of two bytes, at 400 Gb/s; a draft's layer is cached too."""

    def seconds(**options):
        return SimulatedEngine(BackendConfig(engine_options=options))._options.transfer_seconds(4000)

    whole = 4000 * 61 * 576 * 2 / 50e9
    assert seconds(pace="real") == pytest.approx(whole)
    assert seconds(pace="none") == 0
    assert seconds(pace="real", speed=8, kv_transfer_gbps=200) == pytest.approx(whole / 4)
    assert seconds(preset="h200x8-r1-fp8-max-throughput") == pytest.approx(whole)
    assert seconds(preset="h200x8-r1-fp8-min-latency") == pytest.approx(whole * 62 / 61)
    fp8 = DeploymentModel(gpu=H200, expert_precision="fp8", attention_precision="fp8", kv_precision="fp8")
    assert fp8.kv_token_bytes == 61 * 576


def test_an_abort_frees_both_sides(start):
    one, two = start(), start(pace="real", kv_transfer_gbps=0.05)
    sink, leg = fetching(one, two)
    two.abort(leg.request_id)
    assert ended(sink)[1].finish_reason == "cancelled"
    assert_free(one, two)


def num_timers():
    """Return how many of all event loops' timers are still to run."""
    timers = [one for one in gc.get_objects() if isinstance(one, asyncio.TimerHandle)]
    return sum(not timer.cancelled() for timer in timers)


@pytest.mark.slow
@pytest.mark.parametrize("is_fetched", [True, False])
def test_a_kv_cache_that_has_gone_leaves_no_timer(start, is_fetched):
    one, two = start(), start()
    before = num_timers()
    for _ in range(5):
        first = request(request_type="context_only")
        handover = handed_over(one, first)
        if is_fetched:
            answer(two, generation(handover))
        else:
            one.drop(first.request_id)
    assert_free(one, two)
    wait_for(lambda: num_timers() <= before, num_timers)


@pytest.mark.parametrize("end", [SimulatedEngine.abort, SimulatedEngine.drop])
def test_an_aborted_or_dropped_context_phase_holds_nothing(start, end):
    engine = start(pace="real", max_batch_size=1)
    submitted(engine, running := request(max_tokens=ENDLESS))
    sink = submitted(engine, one := request(request_type="context_only"))
    end(engine, one.request_id)
    step = ended(sink)[1]
    assert (step.finish_reason, step.handover) == ("cancelled", None)
    end(engine, running.request_id)
    assert_free(engine)


def test_a_handover_that_nobody_gets_is_dropped(start):
    engine, other = start(), start()
    whole = answer(other, request())
    first, second = request(request_type="context_only"), request(request_type="context_only")
    handover = handed_over(engine, first)
    engine.drop(first.request_id)
    assert_free(engine)
    lost(submitted(other, generation(handover)))
    handover = handed_over(engine, second)
    engine.drop(first.request_id)
    assert answer(other, generation(handover)) == whole
    engine.drop(second.request_id)
    assert_free(engine, other)


@pytest.mark.slow
def test_a_drop_leaves_a_transfer_alone(start):
    one, two = start(), start(pace="real", kv_transfer_gbps=0.05)
    whole = answer(one, request())
    first = request(request_type="context_only")
    sink = submitted(two, generation(handed_over(one, first)))
    wait_for(lambda: any(cache.writer for cache in one._transfers._held.values()))
    one.drop(first.request_id)
    assert ended(sink)[0] == whole
    assert_free(one, two)


@pytest.mark.parametrize("max_batch_size", [1, 2], ids=["waiting", "during the transfer"])
def test_a_generation_engine_that_stops_frees_the_context(start, max_batch_size):
    one, two = start(), start(max_batch_size=max_batch_size, pace="real", kv_transfer_gbps=SLOW)
    submitted(two, request(max_tokens=ENDLESS))
    wait_for(lambda: two.stats().num_running)
    sink, _ = fetching(one, two)
    two.stop()
    assert ended(sink)[1].finish_reason == "cancelled"
    assert_free(one)


def lost(sink):
    error = ended(sink)[1].error
    assert error.code is ErrorCode.CONTEXT_LOST
    return str(error)


def test_a_kv_cache_is_fetched_once_and_left_by_who_is_refused(start):
    one, two = start(), start()
    handover = context(one)
    whole = answer(two, generation(handover))
    assert "it was fetched already" in lost(submitted(two, generation(handover)))
    assert answer(two, dataclasses.replace(generation(handover), request_type="context_and_generation")) == whole
    assert_free(one, two)
    one, two, other = start(), start(max_seq_len=4), start()
    handover = context(one)
    assert ended(submitted(two, generation(handover)))[1].error.code is ErrorCode.PROMPT_TOO_LONG
    assert is_free(two)
    answer(other, generation(handover))
    assert_free(one, other)


def test_contexts_and_transfers_that_take_too_long_are_ended(start):
    one, two = start(kv_transfer_timeout_ms=1), start()
    handover = context(one)
    assert_free(one)
    assert "kv_transfer_timeout_ms" in lost(submitted(two, generation(handover)))
    assert_free(two)
    one, two = start(kv_transfer_timeout_ms=200), start(pace="real", kv_transfer_gbps=SLOW)
    sink = submitted(two, generation(context(one)))
    lost(sink)
    assert_free(one, two)


@pytest.mark.parametrize("ending", ["stop", "fail_after", "crash_after"])
def test_a_context_engine_that_ends_breaks_its_transfers(start, ending):
    one = start(**({} if ending == "stop" else {ending: 3}))
    two = start(pace="real", kv_transfer_gbps=SLOW)
    handovers = [context(one), context(one)]
    sink = submitted(two, generation(handovers[0]))
    wait_for(lambda: two.stats().num_running)
    wait_for(lambda: any(cache.writer for cache in one._transfers._held.values()))
    one.stop() if ending == "stop" else submitted(one, request())
    assert "closed during the transfer" in lost(sink)
    assert "can't be reached" in lost(submitted(two, generation(handovers[1])))
    one.stop()
    assert_free(one, two)


def test_engines_leave_no_thread_and_no_port(start):
    one, two = start(), start()
    answer(one, request())
    assert "simulated-kv-transfers" not in [thread.name for thread in threading.enumerate()], "nothing is shared yet"
    handover = context(one)
    answer(two, generation(handover))
    for engine in (one, two):
        engine.stop()
        engine.stop()
    assert "simulated-kv-transfers" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(ConnectionRefusedError):
        connect(handover)


def test_an_address_of_no_host_here_is_told(start):
    engine = start(transfer_host="192.0.2.1")
    step = ended(submitted(engine, request(request_type="context_only")))[1]
    assert "transfer_host: can't listen on 192.0.2.1" in str(step.error)
    assert_free(engine)


def connect(handover):
    ticket = read_ticket(handover)
    return socket.create_connection((ticket.host, ticket.port), timeout=60)


NO_TICKETS = [b"", b"GET / HTTP/1.1\r\n\r\n", GREETING + b"0" * 32, b"\0" * 1_000_000, GREETING + b"\xff" * 32]


def test_strangers_get_nothing_and_keep_nobody_out(start):
    one, two = start(), start()
    handover = context(one)
    for sent in NO_TICKETS:
        with connect(handover) as stranger:
            with suppress(OSError):  # a reset, where much of it was not read
                stranger.sendall(sent)
                stranger.shutdown(socket.SHUT_WR)
            with suppress(ConnectionError):
                assert stranger.recv(10) in (GONE, b"")
        assert one.stats().extra["held_contexts"] == 1
    silent = [connect(handover) for _ in range(50)]
    assert answer(two, generation(handover)) == answer(one, request())
    for stranger in silent:
        stranger.close()


def _state(handover, **changes):
    document = {**json.loads(handover.opaque_state), **changes}
    return dataclasses.replace(handover, opaque_state=json.dumps(document).encode())


def test_damaged_tickets_and_hosts_are_refused(start):
    one, two = start(), start()
    handover = context(one)
    damaged = [dataclasses.replace(handover, opaque_state=state) for state in (b"", b"\xff{", b"[" * 100_000)]
    changes = ({"port": 0}, {"key": "x\r\n" * 8}, {"host": None}, {"script": {"start": "1"}})
    for ticket in [*damaged, *(_state(handover, **change) for change in changes)]:
        error = ended(submitted(two, generation(ticket)))[1].error
        assert error.code is ErrorCode.INVALID_ARGUMENT
        assert "opaque_state" in str(error)
    for host in ("x" * 300, "nobody.invalid", "a\0b"):
        assert "can't be reached" in lost(submitted(two, generation(_state(handover, host=host))))


@pytest.mark.parametrize("change", [{"first_gen_tokens": (5, 6)}, {"ended": True}])
def test_another_beginning_is_refused(start, change):
    one, two = start(), start()
    handover = context(one)
    error = ended(submitted(two, generation(dataclasses.replace(handover, **change))))[1].error
    assert "here the answer begins otherwise" in str(error)
    answer(two, generation(handover))
    assert_free(one, two)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 30),  # words of the prompt
            st.integers(1, 20),  # max_tokens
            st.sampled_from([None, "context", "generation"]),  # the leg that is aborted at once
        ),
        min_size=1,
        max_size=20,
    ),
    st.sampled_from([{}, {"pace": "real", "speed": 1000.0, "kv_transfer_gbps": 0.5}]),
)
def test_whatever_is_aborted_nothing_is_held(requests, pace):
    limits = {"max_batch_size": 3, "max_num_tokens": 24, "max_seq_len": 96, "kv_cache_tokens": 192}
    config = BackendConfig(engine_options={**limits, "tokens_per_block": 8, "eos_after": 12, **pace})
    one, two = SimulatedEngine(config), SimulatedEngine(config)
    legs = [request("word " * words, max_tokens=most, request_type="context_only") for words, most, _ in requests]
    second = {leg.request_id: aborted == "generation" for leg, (*_, aborted) in zip(legs, requests, strict=True)}
    generations = []

    def go_on():
        """Send the generations of all contexts that have ended, from the engine's thread."""
        for leg in [leg for leg in legs if leg.request_id in second and contexts.is_done(leg.request_id)]:
            aborted = second.pop(leg.request_id)
            if (handover := contexts.last(leg.request_id).handover) is not None:
                follower = generation(handover, leg.prompt, max_tokens=leg.max_tokens)
                generations.append((submitted(two, follower), follower.request_id))
                if aborted:
                    two.abort(follower.request_id)

    contexts = StepLog(then=go_on)
    for engine in (one, two):
        engine.start()
    try:
        for leg, (*_, aborted) in zip(legs, requests, strict=True):
            one.submit(leg, contexts)
            if aborted == "context":
                one.abort(leg.request_id)
        wait_for(lambda: not second)
        assert_free(one, two)
        contexts.wait(*(leg.request_id for leg in legs))
        for sink, name in generations:
            assert sink.last(name).error is None
    finally:
        for engine in (one, two):
            engine.stop()
