import math
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_backend.config import BackendConfig
from deepseek_backend.contract import SAMPLING_BY_NAME, ErrorCode
from deepseek_backend.engines import create_engine
from deepseek_backend.engines.base import Engine
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
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
from deepseek_backend.errors import ConfigError, EngineError, RequestError, UnavailableError
from support.recording_sink import RecordingSink
from support.waiting import PATIENCE_S


def request(
    request_id="a", prompt="Why is the sky blue?", max_tokens=20, prompt_token_ids=None, priority=0, **sampling
):
    return GenerateRequest(
        request_id=request_id,
        prompt=prompt if prompt_token_ids is None else "",
        prompt_token_ids=prompt_token_ids,
        sampling=SamplingParams(**sampling),
        max_tokens=max_tokens,
        priority=priority,
    )


def generate(engine, *requests):
    sink = RecordingSink()
    for one in requests:
        engine.submit(one, sink)
    for one in requests:
        sink.last(one.request_id)
    return sink


def text_of(engine, **fields):
    return generate(engine, request(**fields)).text("a")


ENDLESS = 100_000
"""Number of tokens, far more than a test waits for."""


# Text


def test_text_depends_on_the_prompt(start):
    engine = start()
    assert text_of(engine, prompt="one") == text_of(engine, prompt="one") != text_of(engine, prompt="two")


def test_text_depends_on_the_seed_when_sampling(start):
    engine = start()
    seven, again, eight = (text_of(engine, temperature=0.6, seed=seed) for seed in (7, 7, 8))
    assert seven == again != eight


def test_sampling_without_a_seed_differs_each_time(start):
    engine = start()
    assert text_of(engine, temperature=0.6) != text_of(engine, temperature=0.6)


def test_greedy_decoding_has_no_seed(start):
    engine = start()
    assert text_of(engine, temperature=0.0, seed=7) == text_of(engine, temperature=0.0, seed=8) == text_of(engine)


def test_token_ids_are_the_vocabulary_of_the_text(start):
    sink = generate(start(), request(max_tokens=300))
    assert "".join(VOCABULARY[token_id] for token_id in sink.ids("a")) == sink.text("a")
    assert any(ord(character) > 0xFFFF for character in sink.text("a"))
    assert any("\u4e00" <= character <= "\u9fff" for character in sink.text("a"))


def test_the_same_text_under_drafts_which_come_in_bursts(start):
    plain = generate(start(), request(max_tokens=100))
    drafted = generate(start(preset="b200x8-r1-fp4-min-latency", pace="none"), request(max_tokens=100))
    assert drafted.text("a") == plain.text("a")
    assert {len(step.token_ids) for step in drafted.steps["a"][1:-1]} == {2, 3}


@pytest.mark.parametrize(
    ("prompt", "num_tokens"),
    [
        pytest.param("", 1, id="empty: the begin-of-sentence token"),
        pytest.param("Why is the sky blue?", 7, id="words"),
        pytest.param("天空", 3, id="Chinese"),
        pytest.param("2025", 3, id="digits by three"),
        pytest.param("<｜User｜>Hi<｜Assistant｜>", 4, id="special tokens"),
        pytest.param("<think></think>", 3, id="tags"),
        pytest.param("internationalization", 4, id="a long word"),
    ],
)
def test_prompts_are_counted(prompt, num_tokens):
    assert len(split_prompt(prompt, add_special_tokens=True)) == num_tokens
    assert len(split_prompt(prompt, add_special_tokens=False)) == max(1, num_tokens - 1)


def test_a_long_text_does_not_run_in_circles():
    """A walk with an odd stride covers the whole tape before it repeats."""
    assert all(write_script(str(number)).stride % 2 for number in range(20))


def test_every_step_has_the_prompt_length(start):
    sink = generate(start(), request(add_special_tokens=False))
    assert {step.num_input_tokens for step in sink.steps["a"]} == {6}


def test_a_prompt_in_token_ids_also_decides_the_text(start):
    engine = start()
    one, again, other = (text_of(engine, prompt_token_ids=ids) for ids in ((5, 128000), (5, 128000), (6, 128000)))
    assert one == again != other


def test_token_ids_are_used_unchanged(start):
    sink = generate(start(), request(prompt_token_ids=(0, 9, 128_000)))
    assert {step.num_input_tokens for step in sink.steps["a"]} == {3}


@pytest.mark.parametrize("prompt", [{"prompt": "Why is the sky blue?"}, {"prompt_token_ids": tuple(range(7))}])
@pytest.mark.parametrize(("most", "num_tokens"), [(3, 3), (7, 7), (100, 7)])
def test_truncation_shortens_the_prompt_and_keeps_the_text(start, prompt, most, num_tokens):
    engine = start()
    sink = generate(engine, request(**prompt, truncate_prompt_tokens=most))
    assert sink.last("a").num_input_tokens == num_tokens
    assert sink.text("a") == text_of(engine, **prompt)


def test_truncation_makes_a_long_prompt_fit(start):
    sink = generate(start(max_seq_len=10), request(prompt="天" * 20, truncate_prompt_tokens=6))
    assert len(sink.ids("a")) == 4


def stamps_of(text):
    assert len(text) % 16 == 0
    parts = [text[at : at + 16] for at in range(0, len(text), 16)]
    assert all(part[0] == " " and part[1:].isdecimal() for part in parts)
    return [int(part) for part in parts]


def test_stamps_are_the_times_of_the_tokens(start):
    begun = time.monotonic_ns() // 1000
    sink = generate(start(text="stamps"), request(max_tokens=300))
    stamps = stamps_of(sink.text("a"))
    moments = [begun, *stamps, time.monotonic_ns() // 1000]
    assert moments == sorted(moments)
    assert len(set(stamps)) == len(stamps) == 300


def test_stamps_change_nothing_but_the_text(start):
    filled, stamped = (generate(start(text=text), request()) for text in ("filler", "stamps"))
    assert stamped.ids("a") == filled.ids("a")
    assert stamped.text("a") != filled.text("a")


def test_tokens_of_one_iteration_have_the_same_stamp(start):
    engine = start(preset="b200x8-r1-fp4-min-latency", pace="none", text="stamps")
    sink = generate(engine, request(max_tokens=100))
    stamps = [stamps_of(step.text) for step in sink.steps["a"]]
    assert [len(of_step) for of_step in stamps] == [len(step.token_ids) for step in sink.steps["a"]]
    assert all(len(set(of_step)) == 1 for of_step in stamps)


@pytest.mark.parametrize(
    ("sampling", "ending"),
    [
        pytest.param({}, "", id="hidden"),
        pytest.param({"skip_special_tokens": False}, VOCABULARY[EOS_ID], id="shown"),
    ],
)
def test_the_end_token_is_no_stamp(start, sampling, ending):
    text = text_of(start(text="stamps", eos_after=5), **sampling)
    assert text.endswith(ending)
    assert len(stamps_of(text.removesuffix(ending))) == 4


# Reasoning and chat


DICTATED = 'Hm.</think>a\n<｜tool▁calls▁begin｜>f<｜tool▁sep｜>{"x": "Łódź 👩‍💻"}<x>'


def dictating(answer, **sampling):
    return request(prompt=f"<answer>no</answer> Say <answer>{answer}</answer>.<think>", **sampling)


def test_a_prompt_may_dictate_its_answer(start):
    engine = start(text="dictated")

    sink = generate(engine, dictating(DICTATED, max_tokens=200))

    assert sink.text("a") == DICTATED
    assert sink.last("a").finish_reason == "stop"
    assert sink.ids("a")[-1] == EOS_ID
    assert all(len(step.token_ids) == 1 for step in sink.steps["a"])


@pytest.mark.parametrize(
    ("answer", "sampling", "text", "reason"),
    [
        ("one two three", {"max_tokens": 2}, "one two", "length"),
        ("one two three", {"max_tokens": 3}, "one two three", "length"),
        ("one two three", {"max_tokens": 4}, "one two three", "stop"),
        ("one two", {"max_tokens": 4, "ignore_eos": True}, "one two", "length"),
        ("", {}, "", "stop"),
        ("one", {"skip_special_tokens": False}, "one<｜end▁of▁sentence｜>", "stop"),
        ("one two three", {"stop_token_ids": (id_of(" two"),)}, "one", "stop"),
    ],
)
def test_a_dictated_answer_ends_as_others_do(start, answer, sampling, text, reason):
    sink = generate(start(text="dictated"), dictating(answer, **sampling))

    assert sink.text("a") == text
    assert sink.last("a").finish_reason == reason


def test_without_a_dictation_there_is_filler_text(start):
    for prompt in ("Hi", "<answer>Hi", "Hi</answer>"):
        filled, other = (text_of(start(text=text), prompt=prompt) for text in ("filler", "dictated"))
        assert filled == other
    assert text_of(start(), prompt="<answer>Hi</answer>") != "Hi"


@pytest.mark.parametrize("preset", [None, "b200x8-r1-fp4-min-latency"])
def test_a_prompt_that_ends_in_a_tag_gets_a_third_of_reasoning(start, preset):
    engine = start(preset=preset, pace="none")
    sink = generate(engine, request(prompt="Why?<think>\n", max_tokens=60))
    assert [place for place, token_id in enumerate(sink.ids("a")) if token_id == CLOSING_ID] == [20]
    assert sink.text("a").count("</think>") == 1
    assert sink.text("a") == "".join(VOCABULARY[token_id] for token_id in sink.ids("a"))


def test_reasoning_ends_before_an_early_end(start):
    assert "</think>" in text_of(start(eos_after=9), prompt="Why?<think>", max_tokens=1000)


@pytest.mark.parametrize("prompt", ["Why?", "<think>Why?", "Why?</think>"])
def test_other_prompts_get_no_tag(start, prompt):
    assert "think>" not in text_of(start(), prompt=prompt, max_tokens=3000)


def test_the_vocabulary_only_grows_at_its_end():
    assert VOCABULARY[192:] == ("<think>", "</think>")
    assert write_script("Why is the sky blue?").read(0, 3)[0] == (86, 62, 172)


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": ""},
]


@pytest.mark.parametrize(
    ("template_kwargs", "tag"), [({}, "</think>"), ({"thinking": False}, "</think>"), ({"thinking": True}, "<think>")]
)
def test_render_chat(template_kwargs, tag):
    assert SimulatedEngine(BackendConfig()).render_chat(CONVERSATION, template_kwargs) == (
        "<｜begin▁of▁sentence｜>Be brief.\n\nBe kind.<｜User｜>Hi<｜Assistant｜></think>Hello.<｜end▁of▁sentence｜>"
        f"<｜User｜><｜Assistant｜>{tag}"
    )


@pytest.mark.parametrize(
    ("role", "template_kwargs", "problem"),
    [
        (
            "user",
            {"thinking": True, "tools": []},
            "chat_template_kwargs: the simulated engine's chat form has no 'tools'",
        ),
        ("user", {"thinking": "yes"}, "chat_template_kwargs.thinking: expected true or false, got 'yes'"),
        ("tool", {}, r"messages\[0\].role: expected one of system, user, assistant, got 'tool'"),
    ],
)
def test_render_chat_refuses_by_name(role, template_kwargs, problem):
    with pytest.raises(RequestError, match=problem):
        SimulatedEngine(BackendConfig()).render_chat([{"role": role, "content": "Hi"}], template_kwargs)


def test_a_rendered_chat_counts_its_own_bos():
    engine = SimulatedEngine(BackendConfig())
    prompt = engine.render_chat([{"role": "user", "content": "Hi"}], {})
    assert prompt.startswith(engine.capabilities.bos_token)
    assert len(split_prompt(prompt, add_special_tokens=False)) == 5
    assert engine.capabilities.bos_token == BOS


# Logprobs


def all_logprobs(sink):
    return [token for step in sink.steps["a"] for token in step.logprobs]


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
@pytest.mark.parametrize("count", [0, 1, 20])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "seed": 1}], ids=["greedy", "sampled"])
def test_logprobs_are_consistent(start, preset, count, sampling):
    engine = start(preset=preset, pace="none", eos_after=150)
    sink = generate(engine, request(max_tokens=200, logprobs=count, **sampling))
    assert all(len(step.logprobs) == len(step.token_ids) for step in sink.steps["a"])
    assert [token[0].token_id for token in all_logprobs(sink)] == sink.ids("a")
    for token in all_logprobs(sink):
        assert_consistent(token, count)
    ranks = {token[0].rank for token in all_logprobs(sink)}
    assert len(ranks) > 1 if sampling else ranks == {1}


def test_logprobs_are_the_same_each_time_and_in_bursts(start):
    plain, again = start(), start(preset="b200x8-r1-fp4-min-latency", pace="none")
    sinks = [generate(engine, request(temperature=0.6, seed=3, logprobs=5)) for engine in (plain, again)]
    assert all_logprobs(sinks[0]) == all_logprobs(sinks[1])


def test_no_rank_is_beyond_top_k(start):
    sink = generate(start(), request(max_tokens=200, temperature=1.0, top_k=2, logprobs=0))
    assert {token[0].rank for token in all_logprobs(sink)} == {1, 2}


@pytest.mark.parametrize("prompt", [{"prompt": "Why is the sky blue?"}, {"prompt_token_ids": (0, 5, 6, 7, 8, 9, 10)}])
def test_prompt_logprobs_come_with_the_first_step(start, prompt):
    sink = generate(start(), request(**prompt, prompt_logprobs=2))
    nothing, *tokens = sink.steps["a"][0].prompt_logprobs
    assert nothing is None
    assert len(tokens) == sink.steps["a"][0].num_input_tokens - 1
    for token in tokens:
        assert_consistent(token, 2)
    assert not any(step.prompt_logprobs for step in sink.steps["a"][1:])
    assert not all_logprobs(sink)


def test_prompt_logprobs_name_the_prompt(start):
    engine = start()
    (step, *_) = generate(engine, request(prompt="Why me 天?", prompt_logprobs=0)).steps["a"]
    assert [token[0].text for token in step.prompt_logprobs[1:]] == ["Why", " me", " ", "天", "?"]
    (step, *_) = generate(engine, request(prompt_token_ids=(0, 5, 128_000), prompt_logprobs=0)).steps["a"]
    assert [token[0].text for token in step.prompt_logprobs[1:]] == [VOCABULARY[5], "\N{REPLACEMENT CHARACTER}"]
    (step, *_) = generate(engine, request(prompt="a b c", truncate_prompt_tokens=2, prompt_logprobs=0)).steps["a"]
    assert [token and token[0].text for token in step.prompt_logprobs] == [None, " c"]


def test_without_a_request_there_are_no_logprobs(start):
    for step in generate(start(), request()).steps["a"]:
        assert (step.logprobs, step.prompt_logprobs, step.perf_metrics, step.num_cached_tokens) == ((), (), None, 0)


# The end of a request


def test_without_eos_it_goes_on_to_max_tokens(start):
    sink = generate(start(), request(max_tokens=20))
    assert sink.last("a").finish_reason == "length"
    assert len(sink.ids("a")) == 20


@pytest.mark.parametrize(
    ("sampling", "num_tokens", "finish_reason"),
    [
        pytest.param({}, 5, "stop", id="eos"),
        pytest.param({"ignore_eos": True}, 20, "length", id="ignore_eos"),
        pytest.param({"min_tokens": 9}, 10, "stop", id="min_tokens"),
        pytest.param({"min_tokens": 30}, 20, "length", id="min_tokens above max_tokens"),
    ],
)
def test_eos_after(start, sampling, num_tokens, finish_reason):
    sink = generate(start(eos_after=5), request(**sampling))
    assert len(sink.ids("a")) == num_tokens
    assert sink.last("a").finish_reason == finish_reason
    assert sink.last("a").stop_reason is None


def test_the_end_token_is_shown_on_request(start):
    engine = start(eos_after=5)
    hidden, shown = text_of(engine), text_of(engine, skip_special_tokens=False)
    assert shown == hidden + VOCABULARY[EOS_ID]


def test_stop_token_ids(start):
    engine = start()
    free = generate(engine, request())
    stop_id = free.ids("a")[6]
    where = free.ids("a").index(stop_id)
    without = "".join(VOCABULARY[token_id] for token_id in free.ids("a")[:where])
    hidden = generate(engine, request(stop_token_ids=(stop_id,)))
    shown = generate(engine, request(stop_token_ids=(stop_id,), include_stop_str_in_output=True))
    assert hidden.text("a") == without
    assert shown.text("a") == without + VOCABULARY[stop_id]
    assert len(hidden.ids("a")) == where + 1
    assert (hidden.last("a").finish_reason, hidden.last("a").stop_reason) == ("stop", stop_id)


def test_the_end_token_takes_the_place_of_a_stop_token(start):
    ids = generate(start(), request()).ids("a")
    where = ids.index(ids[6])
    sink = generate(start(eos_after=where + 1), request(stop_token_ids=(ids[6],)))
    assert sink.ids("a") == [*ids[:where], EOS_ID]
    assert sink.last("a").stop_reason is None


def test_min_tokens_delays_stop_token_ids(start):
    engine = start()
    first = generate(engine, request()).ids("a")[0]
    sink = generate(engine, request(stop_token_ids=(first,), min_tokens=1))
    assert len(sink.ids("a")) > 1


def test_max_tokens_is_cut_to_the_room_left(start):
    sink = generate(start(max_seq_len=32), request(prompt="word " * 9, max_tokens=1000))
    assert sink.last("a").num_input_tokens + len(sink.ids("a")) == 32
    assert sink.last("a").finish_reason == "length"


def test_a_prompt_without_room_to_answer_is_refused_with_both_numbers(start):
    sink = generate(start(max_seq_len=10), request(prompt="天" * 20))
    error = sink.last("a").error
    assert error.code is ErrorCode.PROMPT_TOO_LONG
    assert "21 tokens" in str(error)
    assert "at most 9" in str(error)


def test_a_prompt_of_no_token_ids_is_refused(start):
    error = generate(start(), request(prompt_token_ids=())).last("a").error
    assert isinstance(error, RequestError)
    assert "no tokens" in str(error)


def test_the_kv_cache_bounds_the_sequence(start):
    engine = start(kv_cache_tokens=70, tokens_per_block=32)
    assert engine.capabilities.max_seq_len == 64
    assert len(generate(engine, request(max_tokens=1000)).ids("a")) == 64 - 7


# Batching


def test_one_call_of_the_sink_for_each_iteration(start):
    engine = start()
    names = [str(number) for number in range(8)]

    def submit_all():
        while names:
            engine.submit(request(names.pop(), prompt=f"prompt {len(names)}", max_tokens=50), sink)

    sink = RecordingSink(submit_all)  # from the engine's thread, so that all eight arrive between two iterations
    engine.submit(request("first", max_tokens=1), sink)
    sink.wait(lambda: sum(len(sink.last_steps(str(number))) for number in range(8)) == 8)
    assert [sorted(call) for call in sink.calls[1:]] == [sorted(map(str, range(8)))] * 50


def test_each_sink_gets_its_own_steps(start):
    engine = start()
    left, right = RecordingSink(), RecordingSink()
    for number in range(6):
        engine.submit(request(str(number)), left if number % 2 else right)
    for number in range(6):
        (left if number % 2 else right).last(str(number))
    assert set(left.steps) == {"1", "3", "5"}
    assert set(right.steps) == {"0", "2", "4"}


def test_waiting_requests_start_by_priority_then_by_arrival(start):
    arrivals = [("a", 0), ("b", 5), ("c", 0), ("d", -1), ("e", 5), ("f", 7)]

    def submit_all():
        while arrivals:
            name, priority = arrivals.pop(0)
            engine.submit(request(name, max_tokens=2, priority=priority), sink)

    engine = start(max_batch_size=1)
    sink = RecordingSink(submit_all)
    engine.submit(request("first", max_tokens=4), sink)
    sink.last("d")
    order = list(dict.fromkeys(name for call in sink.calls for name in call))
    assert order == ["first", "f", "b", "e", "a", "c", "d"]


def test_perf_metrics(start):
    before = time.monotonic_ns()
    sink = generate(start(), request(max_tokens=60, return_perf_metrics=True))
    after = time.monotonic_ns()
    metrics = sink.last("a").perf_metrics
    assert not any(step.perf_metrics for step in sink.steps["a"][:-1])
    times = [metrics.arrival_time_ns, metrics.first_scheduled_time_ns, metrics.first_token_time_ns]
    times = [before, *times, metrics.last_token_time_ns, after]
    assert times == sorted(times)
    assert metrics.first_token_time_ns < metrics.last_token_time_ns
    assert (metrics.kv_cache_alloc_total_blocks, metrics.kv_cache_alloc_new_blocks) == (3, 3)  # 7 and 60 tokens, by 32
    assert (metrics.kv_cache_missed_block, metrics.kv_cache_reused_block, metrics.kv_cache_hit_rate) == (1, 0, 0.0)
    assert (metrics.total_draft_tokens, metrics.total_accepted_draft_tokens, metrics.acceptance_rate) == (0, 0, 0.0)


def test_the_drafts_of_the_requests_are_those_of_the_engine(start):
    engine = start(preset="b200x8-r1-fp4-min-latency", pace="none", max_batch_size=2)
    names = [str(number) for number in range(5)]
    sink = generate(engine, *(request(name, max_tokens=283, return_perf_metrics=True) for name in names))
    metrics = [sink.last(name).perf_metrics for name in names]
    assert [one.total_draft_tokens for one in metrics] == [300] * 5
    assert all(one.acceptance_rate == pytest.approx(1.82 / 3, abs=0.01) for one in metrics)
    stats = engine.stats()
    assert stats.num_draft_tokens == sum(one.total_draft_tokens for one in metrics)
    assert stats.num_accepted_draft_tokens == sum(one.total_accepted_draft_tokens for one in metrics)


def test_without_drafts_the_engine_counts_none(start):
    engine = start()
    generate(engine, request())
    assert (engine.stats().num_draft_tokens, engine.stats().num_accepted_draft_tokens) == (0, 0)


def test_perf_metrics_of_a_cancelled_request_are_those_so_far(start):
    engine = start(pace="real", max_batch_size=1)
    sink = RecordingSink()
    for name in ("running", "waiting"):
        engine.submit(request(name, max_tokens=ENDLESS, return_perf_metrics=True), sink)
    sink.wait(lambda: len(sink.steps["running"]) > 1)
    engine.abort("waiting")
    engine.abort("running")
    waiting, running = (sink.last(name).perf_metrics for name in ("waiting", "running"))
    assert waiting.arrival_time_ns > 0
    assert (waiting.first_scheduled_time_ns, waiting.kv_cache_alloc_total_blocks, waiting.total_draft_tokens) == (
        0,
        0,
        0,
    )
    assert running.first_token_time_ns < running.last_token_time_ns


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
    submitted = set()

    def act():
        count = pauses[len(sink.calls) % len(pauses)]
        while actions and (count > 0 or all(sink.last_steps(name) for name in submitted)):
            action, one = actions.pop(0)
            count -= 1
            if action == "submit":
                submitted.add(one.request_id)
                engine.submit(one, sink)
            else:
                engine.abort(one.request_id)

    sink = RecordingSink(act)
    engine.start()
    engine.submit(request("kick-off", max_tokens=1), sink)
    for one in todo:
        sink.last(one.request_id)
    stats = engine.stats()
    engine.stop()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    for one, (*_, abort) in zip(todo, requests, strict=True):
        ends = sink.last_steps(one.request_id)
        assert len(ends) == 1
        assert ends[0] is sink.steps[one.request_id][-1]
        text, whole = sink.text(one.request_id), text_alone(one)
        assert text == whole or (abort is not None and ends[0].finish_reason == "cancelled" and whole.startswith(text))


def text_alone(one):
    engine = SimulatedEngine(BackendConfig(engine_options={"max_seq_len": 96}))
    engine.start()
    text = generate(engine, one).text(one.request_id)
    engine.stop()
    return text


# Abort, stop, failure


def test_abort_of_a_running_request_frees_its_blocks(start):
    engine = start(pace="real")
    sink = RecordingSink()
    engine.submit(request(max_tokens=ENDLESS), sink)
    sink.wait(lambda: sink.steps["a"])
    assert engine.stats().num_running == 1
    assert engine.stats().kv_blocks_used == -(-(7 + ENDLESS) // 32)
    engine.abort("a")
    assert sink.last("a").finish_reason == "cancelled"
    assert engine.stats().kv_blocks_used == 0


def test_abort_of_a_waiting_request(start):
    engine = start(pace="real", max_batch_size=1)
    sink = RecordingSink()
    engine.submit(request("running", max_tokens=ENDLESS), sink)
    engine.submit(request("waiting", max_tokens=ENDLESS), sink)
    sink.wait(lambda: len(sink.steps["running"]) > 1)
    assert engine.stats().num_waiting == 1
    engine.abort("waiting")
    assert sink.last("waiting").finish_reason == "cancelled"
    assert len(sink.steps["waiting"]) == 1
    assert engine.stats().num_waiting == 0
    assert not sink.last_steps("running")


def test_abort_of_an_unknown_request_is_ignored(start):
    engine = start()
    engine.abort("nobody")
    assert generate(engine, request()).last("a").finish_reason == "length"


def test_stop_cancels_running_and_waiting_requests(start):
    engine = start(pace="real", max_batch_size=1)
    sink = RecordingSink()
    for name in ("running", "waiting"):
        engine.submit(request(name, max_tokens=ENDLESS), sink)
    sink.wait(lambda: sink.steps["running"])
    engine.stop()
    engine.stop()
    assert [sink.last(name).finish_reason for name in ("running", "waiting")] == ["cancelled", "cancelled"]
    assert not engine.health().alive
    assert "simulated-engine" not in [thread.name for thread in threading.enumerate()]


def test_a_request_after_stop_is_answered(start):
    engine = start()
    engine.stop()
    sink = RecordingSink()
    engine.submit(request(), sink)
    assert isinstance(sink.last("a").error, UnavailableError)


def test_a_sink_may_submit_when_it_is_refused(start):
    engine = start()
    engine.stop()
    names = ["b", "c"]
    sink = RecordingSink(lambda: engine.submit(request(names.pop()), sink) if names else None)
    caller = threading.Thread(target=engine.submit, args=(request(), sink), daemon=True)
    caller.start()
    assert {type(sink.last(name).error) for name in "abc"} == {UnavailableError}


def test_aborts_after_stop_are_not_kept(start):
    engine = start()
    engine.stop()
    kept = engine._inbox.qsize()
    for _ in range(10):
        engine.abort("a")
    assert engine._inbox.qsize() == kept


@pytest.mark.parametrize("started", [False, True])
def test_start_after_stop_is_refused(started):
    engine = SimulatedEngine(BackendConfig())
    if started:
        engine.start()
    engine.stop()
    with pytest.raises(EngineError, match="has been stopped"):
        engine.start()
    assert not engine.health().alive


def test_stop_before_start():
    engine = SimulatedEngine(BackendConfig())
    engine.stop()
    assert engine.health().reason == "not started"


def test_submit_before_start_is_a_fault_of_the_caller():
    with pytest.raises(RuntimeError, match="before start"):
        SimulatedEngine(BackendConfig()).submit(request(), RecordingSink())


def test_fail_after_ends_every_open_request(start):
    engine = start(fail_after=30, max_batch_size=2)
    sink = RecordingSink()
    names = ["a", "b", "c"]
    for name in names:
        engine.submit(request(name, max_tokens=ENDLESS), sink)
    assert {type(sink.last(name).error) for name in names} == {UnavailableError}
    assert [len(sink.last_steps(name)) for name in names] == [1, 1, 1]
    assert 30 <= sum(len(sink.ids(name)) for name in names) <= 31
    assert not engine.health().alive
    assert "fail_after" in engine.health().reason
    assert engine.stats().kv_blocks_used == 0
    engine.submit(request("late"), sink)
    assert isinstance(sink.last("late").error, UnavailableError)


def test_a_request_that_ends_before_the_failure_is_whole(start):
    sink = generate(start(fail_after=20), request(max_tokens=20))
    assert sink.last("a").finish_reason == "length"


def test_a_fault_in_a_sink_fails_the_engine_and_answers_the_others(start):
    engine = start(pace="real")
    healthy = RecordingSink()
    engine.submit(request("healthy", max_tokens=ENDLESS), healthy)
    healthy.wait(lambda: healthy.steps["healthy"])

    class BrokenSink:
        def on_steps(self, steps):
            if steps[0][1].error is None:
                raise ValueError("broken pipe")

    engine.submit(request("broken"), BrokenSink())
    assert "broken pipe" in str(healthy.last("healthy").error)
    assert not engine.health().alive


def test_a_hung_engine_says_it_is_alive_and_answers_no_request(start):
    engine = start(hang_after=30)
    sink = RecordingSink()
    engine.submit(request(max_tokens=ENDLESS), sink)
    sink.wait(lambda: len(sink.ids("a")) == 30)
    engine.abort("a")
    engine.submit(request("late"), sink)
    time.sleep(0.05)
    assert len(sink.ids("a")) == 30
    assert not sink.last_steps("a")
    assert not sink.steps["late"]
    assert engine.health().alive
    engine.stop()
    assert [sink.last(name).finish_reason for name in ("a", "late")] == ["cancelled", "cancelled"]


def test_a_crashed_engine_is_dead_and_answers_no_request_until_stop(start):
    engine = start(crash_after=30)
    sink = RecordingSink()
    engine.submit(request(max_tokens=ENDLESS), sink)
    engine._thread.join(PATIENCE_S)
    assert not engine.health().alive
    assert "crash_after" in engine.health().reason
    engine.submit(request("late"), sink)
    assert len(sink.ids("a")) == 30
    assert not sink.last_steps("a")
    assert not sink.steps["late"]
    engine.stop()
    engine.submit(request("too late"), sink)
    engine.stop()
    assert [type(sink.last(name).error) for name in ("a", "late", "too late")] == [UnavailableError] * 3
    assert [len(sink.last_steps(name)) for name in ("a", "late", "too late")] == [1, 1, 1]


def test_an_abort_of_a_crashed_engine_is_answered_by_stop(start):
    engine = start(crash_after=30)
    sink = RecordingSink()
    engine.submit(request(max_tokens=ENDLESS), sink)
    engine._thread.join(PATIENCE_S)
    engine.abort("a")
    engine.stop()
    assert [step.finish_reason for step in sink.last_steps("a")] == ["cancelled"]


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
    sink = RecordingSink(submit_all)
    engine.submit(request("first", max_tokens=1), sink)
    assert {type(sink.last(name).error) for name in every[:-1]} == {UnavailableError}
    assert "ZeroDivisionError" in engine.health().reason
    engine.submit(request("late"), sink)
    assert isinstance(sink.last("late").error, UnavailableError)
    assert (engine.stats().num_running, engine.stats().kv_blocks_used, engine.stats().extra["iterations"]) == (0, 0, 2)
    engine.stop()
    assert [len(sink.last_steps(name)) for name in every] == [1] * 5


def test_only_the_first_fault_happens(start):
    engine = start(hang_after=50, fail_after=30, crash_after=40)
    assert "fail_after" in str(generate(engine, request(max_tokens=ENDLESS)).last("a").error)
    assert engine._thread.is_alive()


def test_load_seconds(start):
    assert 0.02 <= start(load_seconds=0.02).load_seconds["load"] < PATIENCE_S
    assert SimulatedEngine(BackendConfig()).load_seconds == {}


def test_fail_load():
    with pytest.raises(EngineError, match="fail_load"):
        SimulatedEngine(BackendConfig(engine_options={"fail_load": True})).start()


# Time


def test_the_clock_of_the_model_runs_without_sleeping(start):
    engine = start()
    generate(engine, request(max_tokens=1000))
    assert engine.stats().extra["iterations"] == 1000
    assert engine.stats().extra["simulated_s"] == pytest.approx(1000 * NEUTRAL_STEP_S)


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
    generate(engine, request(max_tokens=6))
    assert clock.slept == pytest.approx([0.010, 0.007, 0.0, 0.0, 0.005, 0.010])
    assert clock.now == pytest.approx(1000.06)
    assert engine.stats().extra["late_s"] == 0


def test_speed_divides_every_duration(start, clock):
    engine = start(pace="real", speed=4.0)
    clock.attach(engine)
    generate(engine, request(max_tokens=3))
    assert clock.slept == pytest.approx([0.0025] * 3)


def test_idle_time_is_not_caught_up(start, clock):
    engine = start(pace="real")
    clock.attach(engine)
    for _ in range(2):
        generate(engine, request(max_tokens=1))
        clock.now += 50
    assert clock.slept == pytest.approx([0.010] * 2)


def test_one_second_of_a_long_stall_is_caught_up(start, clock):
    engine = start(pace="real")
    clock.attach(engine)
    clock.stalls = (30.0,)
    generate(engine, request(max_tokens=200))
    assert clock.now == pytest.approx(1000 + 30 + 200 * NEUTRAL_STEP_S - 1, abs=2 * NEUTRAL_STEP_S)
    assert engine.stats().extra["late_s"] == pytest.approx(29, abs=2 * NEUTRAL_STEP_S)


# Options and the protocol


def test_create_engine_makes_a_simulated_engine():
    engine: Engine = create_engine(BackendConfig(engine="simulated"))
    assert isinstance(engine, SimulatedEngine)


@pytest.mark.parametrize(
    ("options", "simulation"),
    [({}, {"preset": None, "speed": 1.0}), ({"preset": "h200x8-r1-fp8-min-latency", "speed": 8},) * 2],
    ids=["neutral", "preset"],
)
def test_a_client_can_see_what_is_simulated_and_how_fast(options, simulation):
    assert SimulatedEngine(BackendConfig(engine_options=options)).capabilities.simulation == simulation


def test_every_sampling_field_is_applied_or_refused_with_a_reason():
    capabilities = SimulatedEngine(BackendConfig()).capabilities
    by_the_service = {"best_of"}  # with every engine that has logprobs
    assert capabilities.sampling_fields | set(capabilities.unsupported) | by_the_service == set(SAMPLING_BY_NAME)
    assert not capabilities.sampling_fields & set(capabilities.unsupported)
    assert "logits" in capabilities.unsupported["bad"]
    assert "filler text" in capabilities.unsupported["guided_json"]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_serves(start, name):
    engine = start(preset=name, pace="none")
    deployment = PRESETS[name].deployment
    assert engine.stats().kv_blocks_total == deployment.num_ranks * (deployment.kv_cache_tokens // 32)
    sink = generate(engine, *(request(str(number), max_tokens=50) for number in range(20)))
    assert all(len(sink.ids(str(number))) == 50 for number in range(20))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        pytest.param({"presett": 1}, "presett: unknown option; known: crash_after", id="unknown"),
        pytest.param({"preset": "h100"}, "preset: expected null or one of b200x8", id="preset"),
        pytest.param({"preset": ["h100"]}, "preset: expected null or one of b200x8", id="preset list"),
        pytest.param({"pace": "fast"}, "pace: expected real or none, got 'fast'", id="pace"),
        pytest.param({"speed": 0}, "speed: expected a number above 0, got 0", id="speed zero"),
        pytest.param({"speed": float("nan")}, "speed: expected a number above 0, got nan", id="speed nan"),
        pytest.param({"speed": True}, "speed: expected a number above 0, got True", id="speed bool"),
        pytest.param({"text": "lorem"}, "text: expected filler, stamps or dictated, got 'lorem'", id="text"),
        pytest.param({"max_batch_size": 0}, "max_batch_size: expected a whole number above 0, got 0", id="zero"),
        pytest.param({"max_num_tokens": 1.5}, "max_num_tokens: expected a whole number above 0", id="fraction"),
        pytest.param({"max_seq_len": 1}, "max_seq_len: expected a whole number above 1, got 1", id="max_seq_len"),
        pytest.param({"eos_after": 0}, "eos_after: expected a whole number above 0, or null", id="eos_after"),
        pytest.param({"load_seconds": -1}, "load_seconds: expected a number of seconds, 0 or more", id="load_seconds"),
        pytest.param({"fail_load": 1}, "fail_load: expected true or false, got 1", id="fail_load"),
        pytest.param({"fail_after": "x"}, "fail_after: expected a whole number above 0, or null", id="fail_after"),
        pytest.param({"hang_after": 0}, "hang_after: expected a whole number above 0, or null, got 0", id="hang_after"),
        pytest.param({"crash_after": True}, "crash_after: expected a whole number above 0, or null", id="crash_after"),
        pytest.param({"max_batch_size": 9000}, "max_num_tokens: expected at least 9000", id="budget below the batch"),
        pytest.param(
            {"preset": "b200x8-r1-fp4-min-latency", "max_num_tokens": 3}, "expected at least 4", id="budget with drafts"
        ),
        pytest.param({"kv_cache_tokens": 31}, "kv_cache_tokens: expected at least one block", id="less than a block"),
    ],
)
def test_bad_options(options, problem):
    with pytest.raises(ConfigError, match="engine_options") as caught:
        SimulatedEngine(BackendConfig(engine_options=options))
    assert problem in str(caught.value)


def test_every_bad_option_is_reported():
    with pytest.raises(ConfigError) as caught:
        SimulatedEngine(BackendConfig(engine_options={"pace": 1, "speed": -1, "colour": "red"}))
    assert len(caught.value.problems) == 3


def test_options_override_the_preset(start):
    engine = start(preset="h200x8-r1-fp8-max-throughput", pace="none", kv_cache_tokens=640, tokens_per_block=64)
    assert engine.stats().kv_blocks_total == 8 * 10
    assert engine.capabilities.max_seq_len == 640
