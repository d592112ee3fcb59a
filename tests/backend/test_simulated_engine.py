import itertools
import math
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_backend.config import BackendConfig
from deepseek_backend.engines import create_engine
from deepseek_backend.engines.simulated.filler_text import (
    BOS,
    CLOSING_ID,
    EOS_ID,
    VOCABULARY,
    id_of,
    split_prompt,
    write_script,
)
from deepseek_backend.engines.simulated.presets import PRESETS
from deepseek_backend.engines.simulated.simulated_engine import NEUTRAL_STEP_S, SimulatedEngine
from deepseek_backend.engines.simulated.simulated_generation import SimulatedGeneration
from deepseek_backend.errors import ConfigError, EngineError, UnavailableError
from support.engine_driver import StepLog, answered, driven, make_request, submitted
from support.waiting import PATIENCE_S, wait_for


def request(request_id="a", prompt="Why is the sky blue?", max_tokens=20, **fields):
    return make_request(request_id, prompt, max_tokens=max_tokens, **fields)


def text_of(engine, **fields):
    return answered(engine, request(**fields)).text("a")


def endless(engine, *names, num_tokens=1, **fields):
    """Start requests that outlast any test; wait until the first has so many tokens."""
    sink = submitted(engine, *(request(name, max_tokens=ENDLESS, **fields) for name in names))
    sink.wait_for(lambda: len(sink.token_ids(names[0])) >= num_tokens)
    return sink


ENDLESS = 100_000
"""Number of tokens, far more than a test waits for."""


def test_text_depends_on_the_prompt_and_when_sampling_on_the_seed(start):
    engine = start()
    assert text_of(engine, prompt="one") == text_of(engine, prompt="one") != text_of(engine, prompt="two")
    one, again, other = (text_of(engine, prompt_token_ids=ids) for ids in ((5, 128000), (5, 128000), (6, 128000)))
    assert one == again != other
    seven, again, eight = (text_of(engine, temperature=0.6, seed=seed) for seed in (7, 7, 8))
    assert seven == again != eight
    assert text_of(engine, temperature=0.6) != text_of(engine, temperature=0.6)
    assert text_of(engine, temperature=0.0, seed=7) == text_of(engine, temperature=0.0, seed=8) == text_of(engine)


def test_token_ids_are_the_vocabulary_of_the_text_also_under_drafts_which_come_in_bursts(start):
    sink = answered(start(), request(max_tokens=300))
    assert "".join(VOCABULARY[token_id] for token_id in sink.token_ids("a")) == sink.text("a")
    assert any(ord(character) > 0xFFFF for character in sink.text("a"))
    assert any("\u4e00" <= character <= "\u9fff" for character in sink.text("a"))
    drafted = answered(start(preset="b200x8-r1-fp4-min-latency", pace="none"), request(max_tokens=300))
    assert drafted.text("a") == sink.text("a")
    assert {len(step.token_ids) for step in drafted.steps["a"][1:-1]} == {2, 3}


NUM_TOKENS = {
    "": 1,  # the begin-of-sentence token
    "Why is the sky blue?": 7,
    "天空": 3,
    "2025": 3,  # digits by three
    "<｜User｜>Hi<｜Assistant｜>": 4,
    "<think></think>": 3,
    "internationalization": 4,
}


def test_prompts_are_counted():
    assert {prompt: len(split_prompt(prompt, add_special_tokens=True)) for prompt in NUM_TOKENS} == NUM_TOKENS
    plain = {prompt: len(split_prompt(prompt, add_special_tokens=False)) for prompt in NUM_TOKENS}
    assert plain == {prompt: max(1, number - 1) for prompt, number in NUM_TOKENS.items()}


def test_truncation_keeps_the_text(start):
    engine = start()
    for prompt in ({"prompt": "Why is the sky blue?"}, {"prompt_token_ids": tuple(range(7))}):
        assert text_of(engine, **prompt, truncate_prompt_tokens=3) == text_of(engine, **prompt)


def stamps_of(text):
    assert len(text) % 16 == 0
    parts = [text[at : at + 16] for at in range(0, len(text), 16)]
    assert all(part[0] == " " and part[1:].isdecimal() for part in parts)
    return [int(part) for part in parts]


def test_stamps_are_the_times_of_the_tokens_and_change_nothing_but_the_text(start):
    begun = time.monotonic_ns() // 1000
    sink = answered(start(text="stamps"), request(max_tokens=300))
    stamps = stamps_of(sink.text("a"))
    moments = [begun, *stamps, time.monotonic_ns() // 1000]
    assert moments == sorted(moments)
    assert len(set(stamps)) == len(stamps) == 300
    assert answered(start(), request(max_tokens=300)).token_ids("a") == sink.token_ids("a")
    engine = start(text="stamps", eos_after=5)
    for sampling, ending in ({}, ""), ({"skip_special_tokens": False}, VOCABULARY[EOS_ID]):
        text = text_of(engine, **sampling)
        assert text.endswith(ending)
        assert len(stamps_of(text.removesuffix(ending))) == 4


def test_tokens_of_one_iteration_have_the_same_stamp(start):
    engine = start(preset="b200x8-r1-fp4-min-latency", pace="none", text="stamps")
    sink = answered(engine, request(max_tokens=100))
    stamps = [stamps_of(step.text) for step in sink.steps["a"]]
    assert [len(of_step) for of_step in stamps] == [len(step.token_ids) for step in sink.steps["a"]]
    assert all(len(set(of_step)) == 1 for of_step in stamps)


DICTATED = 'Hm.</think>a\n<｜tool▁calls▁begin｜>f<｜tool▁sep｜>{"x": "Łódź 👩‍💻"}<x>'


def dictating(answer, **sampling):
    return request(prompt=f"<answer>no</answer> Say <answer>{answer}</answer>.<think>", **sampling)


def test_a_prompt_may_dictate_its_answer(start):
    engine = start(text="dictated")
    sink = answered(engine, dictating(DICTATED, max_tokens=200))
    assert sink.text("a") == DICTATED
    assert sink.last("a").finish_reason == "stop"
    assert sink.token_ids("a")[-1] == EOS_ID
    assert all(len(step.token_ids) == 1 for step in sink.steps["a"])


ENDINGS = [  # of dictated answers
    ("one two three", {"max_tokens": 2}, "one two", "length"),
    ("one two three", {"max_tokens": 3}, "one two three", "length"),
    ("one two three", {"max_tokens": 4}, "one two three", "stop"),
    ("one two", {"max_tokens": 4, "ignore_eos": True}, "one two", "length"),
    ("", {}, "", "stop"),
    ("one", {"skip_special_tokens": False}, "one<｜end▁of▁sentence｜>", "stop"),
    ("one two three", {"stop_token_ids": (id_of(" two"),)}, "one", "stop"),
]


def test_a_dictated_answer_ends_as_others_do(start):
    engine = start(text="dictated")
    for answer, sampling, text, reason in ENDINGS:
        sink = answered(engine, dictating(answer, **sampling))
        assert (sink.text("a"), sink.last("a").finish_reason) == (text, reason)


def test_without_a_dictation_there_is_filler_text(start):
    for prompt in ("Hi", "<answer>Hi", "Hi</answer>"):
        filled, other = (text_of(start(text=text), prompt=prompt) for text in ("filler", "dictated"))
        assert filled == other
    assert text_of(start(), prompt="<answer>Hi</answer>") != "Hi"


@pytest.mark.parametrize("preset", [None, "b200x8-r1-fp4-min-latency"])
def test_a_prompt_that_ends_in_a_tag_gets_a_third_of_reasoning(start, preset):
    engine = start(preset=preset, pace="none")
    sink = answered(engine, request(prompt="Why?<think>\n", max_tokens=60))
    assert [place for place, token_id in enumerate(sink.token_ids("a")) if token_id == CLOSING_ID] == [20]
    assert sink.text("a").count("</think>") == 1
    assert sink.text("a") == "".join(VOCABULARY[token_id] for token_id in sink.token_ids("a"))


@pytest.mark.slow
def test_only_prompts_that_end_in_a_tag_get_one_and_before_an_early_end(start):
    engine = start()
    for prompt in ("Why?", "<think>Why?", "Why?</think>"):
        assert "think>" not in text_of(engine, prompt=prompt, max_tokens=3000)
    assert "</think>" in text_of(start(eos_after=9), prompt="Why?<think>", max_tokens=1000)


def test_the_vocabulary_only_grows_at_its_end_and_chats_count_their_own_bos():
    assert VOCABULARY[192:] == ("<think>", "</think>")
    assert all(write_script(str(number)).stride % 2 for number in range(20)), "an odd stride covers the whole tape"
    assert write_script("Why is the sky blue?").read(0, 3)[0] == (86, 62, 172)
    engine = SimulatedEngine(BackendConfig())
    prompt = engine.render_chat([{"role": "user", "content": "Hi"}], {})
    assert prompt.startswith(engine.capabilities.bos_token)
    assert len(split_prompt(prompt, add_special_tokens=False)) == 5
    assert engine.capabilities.bos_token == BOS


def all_logprobs(sink):
    return sink.steps["a"].logprobs


def assert_consistent(token, count):
    """Check the rules of base.TokenLogprobs, and that ranks and numbers agree."""
    chosen, *others = token
    assert all(entry.logprob <= 0 for entry in token)
    assert [entry.rank for entry in others] == [rank for rank in range(1, count + 1) if rank != chosen.rank]
    assert len({entry.token_id for entry in token}) == len(token)
    by_rank = sorted(token, key=lambda entry: entry.rank)
    assert [entry.logprob for entry in by_rank] == sorted((entry.logprob for entry in token), reverse=True)
    assert sum(math.exp(entry.logprob) for entry in token) <= 1 + 1e-9
    assert all(entry.text == VOCABULARY[entry.token_id] for entry in others)


@pytest.mark.parametrize("preset", [None, "b200x8-r1-fp4-min-latency"])
def test_logprobs_are_consistent(start, preset):
    engine = start(preset=preset, pace="none", eos_after=150)
    for count, sampling in itertools.product((0, 1, 20), ({}, {"temperature": 0.6, "seed": 1})):
        sink = answered(engine, request(max_tokens=200, logprobs=count, **sampling))
        assert all(len(step.logprobs) == len(step.token_ids) for step in sink.steps["a"])
        assert [token[0].token_id for token in all_logprobs(sink)] == sink.token_ids("a")
        for token in all_logprobs(sink):
            assert_consistent(token, count)
        ranks = {token[0].rank for token in all_logprobs(sink)}
        assert len(ranks) > 1 if sampling else ranks == {1}


def test_logprobs_are_the_same_each_time_and_in_bursts(start):
    plain, again = start(), start(preset="b200x8-r1-fp4-min-latency", pace="none")
    sinks = [answered(engine, request(temperature=0.6, seed=3, logprobs=5)) for engine in (plain, again)]
    assert all_logprobs(sinks[0]) == all_logprobs(sinks[1])
    sink = answered(plain, request(max_tokens=200, temperature=1.0, top_k=2, logprobs=0))
    assert {token[0].rank for token in all_logprobs(sink)} == {1, 2}, "no rank is beyond top_k"
    for step in answered(plain, request()).steps["a"]:
        assert (step.logprobs, step.prompt_logprobs, step.perf_metrics, step.num_cached_tokens) == ((), (), None, 0)


def test_prompt_logprobs_come_with_the_first_step_and_name_the_prompt(start):
    engine = start()
    for prompt in ({"prompt": "Why is the sky blue?"}, {"prompt_token_ids": (0, 5, 6, 7, 8, 9, 10)}):
        sink = answered(engine, request(**prompt, prompt_logprobs=2))
        nothing, *tokens = sink.steps["a"][0].prompt_logprobs
        assert nothing is None
        assert len(tokens) == sink.steps["a"][0].num_input_tokens - 1
        for token in tokens:
            assert_consistent(token, 2)
        assert not any(step.prompt_logprobs for step in sink.steps["a"][1:])
        assert not all_logprobs(sink)
    (step, *_) = answered(engine, request(prompt="Why me 天?", prompt_logprobs=0)).steps["a"]
    assert [token[0].text for token in step.prompt_logprobs[1:]] == ["Why", " me", " ", "天", "?"]
    (step, *_) = answered(engine, request(prompt_token_ids=(0, 5, 128_000), prompt_logprobs=0)).steps["a"]
    assert [token[0].text for token in step.prompt_logprobs[1:]] == [VOCABULARY[5], "\N{REPLACEMENT CHARACTER}"]
    (step, *_) = answered(engine, request(prompt="a b c", truncate_prompt_tokens=2, prompt_logprobs=0)).steps["a"]
    assert [token and token[0].text for token in step.prompt_logprobs] == [None, " c"]


EOS_AFTER_5 = [  # the request's fields, number of tokens, finish reason
    ({}, 5, "stop"),
    ({"ignore_eos": True}, 20, "length"),
    ({"min_tokens": 9}, 10, "stop"),
    ({"min_tokens": 30}, 20, "length"),
]


def test_an_answer_ends_with_eos_or_at_max_tokens(start):
    sink = answered(start(), request(max_tokens=20))
    assert (len(sink.token_ids("a")), sink.last("a").finish_reason) == (20, "length")
    engine = start(eos_after=5)
    for sampling, num_tokens, finish_reason in EOS_AFTER_5:
        sink = answered(engine, request(**sampling))
        assert len(sink.token_ids("a")) == num_tokens
        assert (sink.last("a").finish_reason, sink.last("a").stop_reason) == (finish_reason, None)


def test_the_end_token_is_shown_on_request(start):
    engine = start(eos_after=5)
    assert text_of(engine, skip_special_tokens=False) == text_of(engine) + VOCABULARY[EOS_ID]


def test_the_end_token_takes_the_place_of_a_stop_token_and_min_tokens_delay_both(start):
    engine = start()
    ids = answered(engine, request()).token_ids("a")
    where = ids.index(ids[6])
    sink = answered(start(eos_after=where + 1), request(stop_token_ids=(ids[6],)))
    assert sink.token_ids("a") == [*ids[:where], EOS_ID]
    assert sink.last("a").stop_reason is None
    assert len(answered(engine, request(stop_token_ids=(ids[0],), min_tokens=1)).token_ids("a")) > 1


def test_prompt_and_answer_share_the_room_of_the_kv_cache(start):
    engine = start(kv_cache_tokens=70, tokens_per_block=32)
    assert engine.capabilities.max_seq_len == 64
    assert len(answered(engine, request(max_tokens=1000)).token_ids("a")) == 64 - 7
    error = answered(engine, request(prompt="天" * 64)).last("a").error
    assert "65 tokens and at most 63 fit" in str(error)


def test_one_call_of_the_sink_for_each_iteration(start):
    engine = start()
    names = [str(number) for number in range(8)]

    def submit_all():
        while names:
            engine.submit(request(names.pop(), prompt=f"prompt {len(names)}", max_tokens=50), sink)

    sink = StepLog(then=submit_all)  # from the engine's thread, so that all eight arrive between two iterations
    engine.submit(request("first", max_tokens=1), sink)
    sink.wait_for(lambda: all(sink.is_done(str(number)) for number in range(8)))
    assert [sorted(name for name, _ in call) for call in sink.calls[1:]] == [sorted(map(str, range(8)))] * 50


def test_waiting_requests_start_by_priority_then_by_arrival(start):
    arrivals = [("a", 0), ("b", 5), ("c", 0), ("d", -1), ("e", 5), ("f", 7)]

    def submit_all():
        while arrivals:
            name, priority = arrivals.pop(0)
            engine.submit(request(name, max_tokens=2, priority=priority), sink)

    engine = start(max_batch_size=1)
    sink = StepLog(then=submit_all)
    engine.submit(request("first", max_tokens=4), sink)
    sink.last("d")
    order = list(dict.fromkeys(name for call in sink.calls for name, _ in call))
    assert order == ["first", "f", "b", "e", "a", "c", "d"]


def test_perf_metrics_count_blocks(start):
    metrics = answered(start(), request(max_tokens=60, return_perf_metrics=True)).last("a").perf_metrics
    assert metrics.arrival_time_ns <= metrics.first_scheduled_time_ns <= metrics.first_token_time_ns
    assert metrics.first_token_time_ns < metrics.last_token_time_ns
    assert (metrics.kv_cache_alloc_total_blocks, metrics.kv_cache_alloc_new_blocks) == (3, 3)  # 7 and 60 tokens, by 32
    assert (metrics.kv_cache_missed_block, metrics.kv_cache_reused_block, metrics.kv_cache_hit_rate) == (1, 0, 0.0)
    assert (metrics.total_draft_tokens, metrics.total_accepted_draft_tokens, metrics.acceptance_rate) == (0, 0, 0.0)


def test_the_drafts_of_the_requests_are_those_of_the_engine(start):
    engine = start(preset="b200x8-r1-fp4-min-latency", pace="none", max_batch_size=2)
    names = [str(number) for number in range(5)]
    sink = answered(engine, *(request(name, max_tokens=283, return_perf_metrics=True) for name in names))
    metrics = [sink.last(name).perf_metrics for name in names]
    assert [one.total_draft_tokens for one in metrics] == [300] * 5
    assert all(one.acceptance_rate == pytest.approx(1.82 / 3, abs=0.01) for one in metrics)
    stats = engine.stats()
    assert stats.num_draft_tokens == sum(one.total_draft_tokens for one in metrics)
    assert stats.num_accepted_draft_tokens == sum(one.total_accepted_draft_tokens for one in metrics)


@pytest.mark.slow
@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 40),  # words of the prompt
            st.integers(1, 40),  # max_tokens
            st.one_of(st.none(), st.integers(0, 3)),  # seed
            st.one_of(st.none(), st.integers(0, 50)),  # number of actions until the abort
        ),
        min_size=1,
        max_size=25,
    ),
    st.lists(st.integers(0, 3), min_size=1),
    st.sampled_from([None, "b200x8-r1-fp4-min-latency", "h200x8-r1-fp8-max-throughput"]),
)
def test_every_request_ends_once_with_the_text_it_has_alone(requests, pauses, preset):
    """The sink submits and aborts between iterations, as many at a time as `pauses` says."""
    options = {"preset": preset, "pace": "none", "max_batch_size": 4, "max_num_tokens": 24, "max_seq_len": 96}
    engine = SimulatedEngine(BackendConfig(engine_options={**options, "kv_cache_tokens": 256, "tokens_per_block": 8}))
    todo = [
        request(str(number), "word " * words, max_tokens, temperature=None if seed is None else 0.6, seed=seed)
        for number, (words, max_tokens, seed, _) in enumerate(requests)
    ]
    actions = [("submit", one) for one in todo]
    for one, (*_, abort) in zip(todo, requests, strict=True):
        if abort is not None:
            actions.insert(actions.index(("submit", one)) + abort, ("abort", one))
    known = set()

    def act():
        count = pauses[len(sink.calls) % len(pauses)]
        while actions and (count > 0 or all(map(sink.is_done, known))):
            action, one = actions.pop(0)
            count -= 1
            if action == "submit":
                known.add(one.request_id)
                engine.submit(one, sink)
            else:
                engine.abort(one.request_id)

    sink = StepLog(then=act)
    engine.start()
    engine.submit(request("kick-off", max_tokens=1), sink)
    sink.wait(*(one.request_id for one in todo))
    stats = engine.stats()
    engine.stop()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    for one, (*_, abort) in zip(todo, requests, strict=True):
        text, whole, reason = sink.text(one.request_id), text_alone(one), sink.last(one.request_id).finish_reason
        assert text == whole or (abort is not None and reason == "cancelled" and whole.startswith(text))


def test_a_stop_between_two_looks_at_the_inbox_is_seen():
    engine = SimulatedEngine(BackendConfig(engine_options={"max_seq_len": 4}))
    stopper = threading.Thread(target=engine.stop)

    class Stops:
        def on_steps(self, _):
            stopper.start()
            wait_for(lambda: not engine._inbox.empty())  # the engine looks again before it goes on

    class SubmitsAnother:
        def on_steps(self, _):
            engine.submit(request("stops"), Stops())

    engine.start()
    engine.submit(request("too long"), SubmitsAnother())
    wait_for(lambda: stopper.ident)
    stopper.join(PATIENCE_S)
    assert not stopper.is_alive()


def text_alone(one):
    with driven(BackendConfig(engine="simulated", engine_options={"max_seq_len": 96})) as driver:
        return answered(driver.engine, one).text(one.request_id)


def test_stats_and_what_is_kept(start):
    engine = start(pace="real", max_batch_size=1)
    engine.abort("nobody")
    sink = endless(engine, "running", "waiting", num_tokens=2, return_perf_metrics=True)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (1, 1, -(-(7 + ENDLESS) // 32))
    engine.abort("running")
    metrics = sink.last("running").perf_metrics
    assert metrics.first_token_time_ns < metrics.last_token_time_ns
    engine.stop()
    kept = engine._inbox.qsize()
    engine.abort("waiting")
    assert engine._inbox.qsize() == kept


def test_a_sink_may_submit_when_it_is_refused(start):
    engine = start()
    engine.stop()
    names = ["b", "c"]
    sink = StepLog(then=lambda: engine.submit(request(names.pop()), sink) if names else None)
    threading.Thread(target=engine.submit, args=(request(), sink), daemon=True).start()
    assert {type(step.error) for step in sink.wait(*"abc")} == {UnavailableError}


def test_an_engine_starts_once():
    for started in (False, True):
        engine = SimulatedEngine(BackendConfig())
        assert engine.health().reason == "not started"
        if started:
            engine.start()
        engine.stop()
        with pytest.raises(EngineError, match="has been stopped"):
            engine.start()
    with pytest.raises(EngineError, match="fail_load"):
        SimulatedEngine(BackendConfig(engine_options={"fail_load": True})).start()


def test_fail_after_ends_every_open_request(start):
    assert answered(start(fail_after=20), request(max_tokens=20)).last("a").finish_reason == "length"  # before that
    engine = start(fail_after=30, max_batch_size=2)
    sink = answered(engine, *(request(name, max_tokens=ENDLESS) for name in "abc"))
    assert {type(step.error) for step in sink.wait(*"abc")} == {UnavailableError}
    assert 30 <= sum(len(sink.token_ids(name)) for name in "abc") <= 31
    assert "fail_after" in engine.health().reason
    assert engine.stats().kv_blocks_used == 0


def test_a_fault_in_a_sink_fails_the_engine_and_answers_the_others(start):
    engine = start(pace="real")
    healthy = endless(engine, "healthy")

    class BrokenSink:
        def on_steps(self, steps):
            if steps[0][1].error is None:
                raise ValueError("broken pipe")

    engine.submit(request("broken"), BrokenSink())
    assert "broken pipe" in str(healthy.last("healthy").error)
    assert not engine.health().alive


def test_a_hung_engine_says_it_is_alive_and_answers_no_request(start):
    engine = start(hang_after=30)
    sink = endless(engine, "a", num_tokens=30)
    engine.abort("a")
    engine.submit(request("late"), sink)
    time.sleep(0.05)
    assert len(sink.token_ids("a")) == 30
    assert not sink.is_done("a")
    assert not sink.steps["late"]
    assert engine.health().alive
    engine.stop()
    assert [step.finish_reason for step in sink.wait("a", "late")] == ["cancelled", "cancelled"]


def test_a_crashed_engine_is_dead_and_answers_no_request_until_stop(start):
    engine = start(crash_after=30)
    sink = endless(engine, "a", num_tokens=30)
    engine._thread.join(PATIENCE_S)
    assert not engine.health().alive
    assert "crash_after" in engine.health().reason
    engine.submit(request("late"), sink)
    assert len(sink.token_ids("a")) == 30
    assert not sink.is_done("a")
    assert not sink.steps["late"]
    engine.stop()
    engine.submit(request("too late"), sink)
    engine.stop()
    assert [type(step.error) for step in sink.wait("a", "late", "too late")] == [UnavailableError] * 3


def test_a_fault_of_the_engine_itself_answers_every_request_once(start, monkeypatch):
    """Requests that ended in the same iteration are answered once, and later ones too."""
    names = ["ends", "ends too", "fails", "runs"]

    def submit_all():
        for name in names:
            engine.submit(request(name, max_tokens=1 if name != "runs" else ENDLESS), sink)
        names.clear()

    def fail(row, scheduler, stamp):
        if row.request.request_id == "fails":
            raise ZeroDivisionError
        return next_step(row, scheduler, stamp)

    next_step = SimulatedGeneration.next_step
    monkeypatch.setattr(SimulatedGeneration, "next_step", fail)
    engine = start(max_batch_size=4)
    every = [*names, "late"]
    sink = StepLog(then=submit_all)
    engine.submit(request("first", max_tokens=1), sink)
    assert {type(step.error) for step in sink.wait(*every[:-1])} == {UnavailableError}
    assert "ZeroDivisionError" in engine.health().reason
    engine.submit(request("late"), sink)
    assert isinstance(sink.last("late").error, UnavailableError)
    assert (engine.stats().num_running, engine.stats().kv_blocks_used, engine.stats().extra["iterations"]) == (0, 0, 2)
    engine.stop()
    sink.wait(*every)


def test_faults_end_an_engine_once(start):
    engine = start(hang_after=50, fail_after=30, crash_after=40)
    assert "fail_after" in str(answered(engine, request(max_tokens=ENDLESS)).last("a").error)
    assert engine._thread.is_alive()
    engine = start(crash_after=30)
    sink = endless(engine, "a", num_tokens=30)
    engine._thread.join(PATIENCE_S)
    engine.abort("a")
    engine.stop()
    assert sink.last("a").finish_reason == "cancelled"


def test_the_clock_of_the_model_runs_without_sleeping(start):
    engine = start()
    answered(engine, request(max_tokens=1000))
    assert engine.stats().extra["iterations"] == 1000
    assert engine.stats().extra["simulated_s"] == pytest.approx(1000 * NEUTRAL_STEP_S)
    assert start(load_seconds=0.02).load_seconds["load"] >= 0.02


@pytest.fixture
def clock(monkeypatch):
    """A clock that sleeping advances; `stalls` holds the extra seconds of each sleep."""

    class Clock:
        now = 1000.0
        stalls: tuple[float, ...] = ()

        def attach(self, engine):
            self.slept = []
            monkeypatch.setattr("deepseek_backend.engines.simulated.simulated_engine.time.monotonic", lambda: self.now)
            monkeypatch.setattr(engine._stopping, "wait", self.sleep)

        def sleep(self, seconds):
            stall, *self.stalls = self.stalls or (0.0,)
            self.slept.append(seconds)
            self.now += seconds + stall

    return Clock()


def test_a_late_wake_up_shortens_the_next_sleep(start, clock):
    engine = start(pace="real")
    clock.attach(engine)
    clock.stalls = (0.003, 0.025)
    answered(engine, request(max_tokens=6))
    assert clock.slept == pytest.approx([0.010, 0.007, 0.0, 0.0, 0.005, 0.010])
    assert clock.now == pytest.approx(1000.06)
    assert engine.stats().extra["late_s"] == 0


def test_speed_divides_every_duration_and_of_a_long_stall_one_second_is_caught_up(start, clock):
    engine = start(pace="real", speed=4.0)
    clock.attach(engine)
    for _ in range(2):
        answered(engine, request(max_tokens=2))
        clock.now += 50  # idle time is not caught up
    assert clock.slept == pytest.approx([0.0025] * 4)
    engine, clock.now = start(pace="real"), 1000.0
    clock.attach(engine)
    clock.stalls = (30.0,)
    answered(engine, request(max_tokens=200))
    assert clock.now == pytest.approx(1000 + 30 + 200 * NEUTRAL_STEP_S - 1, abs=2 * NEUTRAL_STEP_S)
    assert engine.stats().extra["late_s"] == pytest.approx(29, abs=2 * NEUTRAL_STEP_S)


def test_a_client_can_see_what_is_simulated():
    for options, simulation in [
        ({}, {"preset": None, "speed": 1.0}),
        ({"preset": sorted(PRESETS)[0], "speed": 8},) * 2,
    ]:
        engine = create_engine(BackendConfig(engine="simulated", engine_options=options))
        assert engine.capabilities.simulation == simulation


def test_every_preset_serves_and_options_override_it(start):
    for name in sorted(PRESETS):
        engine = start(preset=name, pace="none")
        deployment = PRESETS[name].deployment
        assert engine.stats().kv_blocks_total == deployment.num_ranks * (deployment.kv_cache_tokens // 32)
        sink = answered(engine, *(request(str(number), max_tokens=50) for number in range(20)))
        assert all(len(sink.token_ids(str(number))) == 50 for number in range(20))
    engine = start(preset="h200x8-r1-fp8-max-throughput", pace="none", kv_cache_tokens=640, tokens_per_block=64)
    assert engine.stats().kv_blocks_total == 8 * 10
    assert engine.capabilities.max_seq_len == 640


POSITIVE = ("max_batch_size", "eos_after", "fail_after", "hang_after", "crash_after")
BAD_OPTIONS = [
    ({"presett": 1}, "presett: unknown option; known: crash_after"),
    ({"preset": "h100"}, "preset: expected null or one of b200x8"),
    ({"preset": ["h100"]}, "preset: expected null or one of b200x8"),
    ({"pace": "fast"}, "pace: expected real or none, got 'fast'"),
    *(({"speed": speed}, "speed: expected a number above 0") for speed in (0, float("nan"), True)),
    ({"text": "lorem"}, "text: expected filler, stamps or dictated, got 'lorem'"),
    *(({name: bad}, f"{name}: expected a whole number above 0") for name in POSITIVE for bad in (0, "x", True)),
    ({"max_num_tokens": 1.5}, "max_num_tokens: expected a whole number above 0"),
    ({"max_seq_len": 1}, "max_seq_len: expected a whole number above 1, got 1"),
    ({"load_seconds": -1}, "load_seconds: expected a number of seconds, 0 or more"),
    ({"fail_load": 1}, "fail_load: expected true or false, got 1"),
    ({"max_batch_size": 9000}, "max_num_tokens: expected at least 9000"),
    ({"preset": "b200x8-r1-fp4-min-latency", "max_num_tokens": 3}, "expected at least 4"),
    ({"kv_cache_tokens": 31}, "kv_cache_tokens: expected at least one block"),
]


def problems_of(options):
    with pytest.raises(ConfigError, match="engine_options") as caught:
        SimulatedEngine(BackendConfig(engine_options=options))
    return caught.value.problems


def test_bad_options(subtests):
    for options, problem in BAD_OPTIONS:
        with subtests.test(problem):
            assert problem in problems_of(options)[0]
    assert len(problems_of({"pace": 1, "speed": -1, "colour": "red"})) == 3
