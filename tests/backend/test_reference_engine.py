import contextlib
import json
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from deepseek_backend.config import BackendConfig
from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines.prompting import bos_token
from deepseek_backend.engines.reference import ReferenceEngine
from deepseek_backend.engines.reference.deepseek_model import ModelRunner
from deepseek_backend.engines.reference.token_sampling import log_softmax
from deepseek_backend.errors import ConfigError, EngineError, RequestError, UnavailableError
from support.demo_decoding import DEMO_MAX_TOKENS, DEMO_PROMPTS
from support.engine_driver import driven
from support.waiting import PATIENCE_S, wait_for
from tiny_checkpoint.architecture import BOS, EOS

PROMPT = DEMO_PROMPTS[0]


def submit(engine, prompt=PROMPT, max_tokens=8, **fields):
    """Submit a request; a prompt may be token ids."""
    given = {} if isinstance(prompt, str) else {"prompt_token_ids": tuple(prompt)}
    return engine.submit(prompt if isinstance(prompt, str) else "", max_tokens=max_tokens, **given, **fields)


def generate(engine, *prompt, **fields):
    return engine.result(submit(engine, *prompt, **fields))


def config(model, version_dir=Path(), **options):
    return BackendConfig(
        engine="reference", llm_args={"model": str(model)}, engine_options=options, version_dir=version_dir
    )


@pytest.fixture(scope="module")
def tokenizer(random_checkpoint):
    return Tokenizer.from_file(str(random_checkpoint / "tokenizer.json"))


@pytest.fixture(scope="module")
def engine(random_checkpoint):
    """Make an engine with fewer slots than the largest test has requests, so that rows wait, join and leave."""
    with driven(config(random_checkpoint, max_num_seqs=5)) as engine:
        yield engine


@pytest.fixture
def own_engine(random_checkpoint):
    """Make an engine for a single test, which may stop or break it."""
    with driven(config(random_checkpoint, max_num_seqs=2)) as engine:
        yield engine


def plain_logits(engine, token_ids):
    """Return the logits [len(token_ids), vocab_size] of one forward pass over a whole sequence, without a batch."""
    runner = ModelRunner(engine.engine._checkpoint.model, 1)
    return runner.logits(runner.prefill(token_ids))


@pytest.mark.slow
def test_concurrent_requests_give_the_same_text_as_alone_and_as_plain_passes(engine, tokenizer):
    num_calls = len(engine.sink.calls)
    jobs = [(prompt, max_tokens) for max_tokens in (3, 17, 33, DEMO_MAX_TOKENS) for prompt in DEMO_PROMPTS]
    requests = {job: submit(engine, *job) for job in jobs}
    answers = {job: engine.result(request) for job, request in requests.items()}
    for prompt in DEMO_PROMPTS:
        prompt_ids, expected = tokenizer.encode(prompt).ids, answers[prompt, DEMO_MAX_TOKENS].token_ids
        logits = plain_logits(engine, prompt_ids + expected[:-1])
        assert logits[len(prompt_ids) - 1 :].argmax(-1).tolist() == expected
        for max_tokens in (3, 17, 33, DEMO_MAX_TOKENS):
            answer = answers[prompt, max_tokens]
            assert answer.last.finish_reason == "length"
            assert answer.token_ids == expected[:max_tokens]
            assert answer.text == tokenizer.decode(expected[:max_tokens])
            alone = generate(engine, prompt, max_tokens)
            assert (alone.text, alone.token_ids) == (answer.text, answer.token_ids)
    assert max(map(len, engine.sink.calls[num_calls:])) >= 5, "never ran as one batch"


@pytest.mark.slow
def test_token_ids_are_used_unchanged_and_a_long_prompt_by_its_end(engine, tokenizer):
    token_ids = tokenizer.encode(PROMPT).ids
    assert generate(engine, token_ids).token_ids == generate(engine).token_ids
    expected = generate(engine, token_ids[-3:]).token_ids
    for prompt in (PROMPT, token_ids):
        assert generate(engine, prompt, truncate_prompt_tokens=3).token_ids == expected
    assert engine.engine.capabilities.bos_token == BOS
    document = json.loads(tokenizer.to_str()) | {"post_processor": None}
    without = Tokenizer.from_str(json.dumps(document))
    encode = lambda text, special: without.encode(text, add_special_tokens=special).ids  # noqa: E731
    assert bos_token(encode, without.decode) == ""


@pytest.mark.slow
def test_min_tokens_delay_a_stop_token_which_is_counted(engine):
    free = generate(engine, max_tokens=10).token_ids
    assert generate(engine, max_tokens=10, stop_token_ids=(free[6],)).token_ids == free[: free.index(free[6]) + 1]
    answer = generate(engine, max_tokens=6, min_tokens=4, stop_token_ids=(free[0],))
    assert free[0] not in answer.token_ids[:4]
    assert len(answer.token_ids) >= 5


@pytest.mark.slow
def test_end_tokens_of_the_generation_config_end_the_text(engine, random_checkpoint, tmp_path):
    free = generate(engine, max_tokens=12)
    eos = free.token_ids[8]
    end = free.token_ids.index(eos) + 1
    copy = shutil.copytree(random_checkpoint, tmp_path / "checkpoint")
    generation_config = json.loads((copy / "generation_config.json").read_text()) | {"eos_token_id": [1, eos]}
    (copy / "generation_config.json").write_text(json.dumps(generation_config))
    with driven(config(copy)) as other:
        answer = generate(other, max_tokens=12)
        assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", None)
        assert answer.token_ids == free.token_ids[:end]
        assert free.text.startswith(answer.text)
        ignored = generate(other, max_tokens=12, ignore_eos=True)
        assert (ignored.text, ignored.last.finish_reason) == (free.text, "length")


@pytest.mark.slow
def test_token_ids_outside_the_vocabulary_are_refused_wherever_they_stand(engine, random_checkpoint):
    size = json.loads((random_checkpoint / "config.json").read_text())["vocab_size"]
    for name, fields in ("input_ids", {"prompt": [5, size]}), ("logit_bias", {"logit_bias": {5: 1.0, size: 1.0}}):
        error = generate(engine, **fields, repetition_penalty=1.2).last.error
        assert str(error) == f"{name}: expected token ids from 0 to {size - 1}, got {size}"


CHAT = [{"role": "user", "content": "Hello"}]


@pytest.mark.slow
def test_chat_is_rendered_by_the_checkpoints_template(engine, tokenizer):
    assert engine.engine.render_chat(CHAT, {}) == f"{BOS}<｜User｜>Hello<｜Assistant｜></think>"
    prompt = engine.engine.render_chat([*CHAT, {"role": "assistant", "content": "Hi"}, *CHAT], {"thinking": True})
    assert prompt == f"{BOS}<｜User｜>Hello<｜Assistant｜></think>Hi{EOS}<｜User｜>Hello<｜Assistant｜><think>"
    num_tokens = len(tokenizer.encode(prompt, add_special_tokens=False).ids)
    assert generate(engine, prompt, add_special_tokens=False).last.num_input_tokens == num_tokens
    with pytest.raises(RequestError, match=r"messages: the chat template refuses them: .* got wizard$") as caught:
        engine.engine.render_chat([{"role": "wizard", "content": "a"}], {})
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


def check_logprobs(entries, token_ids, logits, number, tokenizer):
    """Check `entries` against the plain model's `logits` [len(token_ids), vocab_size]."""
    assert len(entries) == len(token_ids)
    for got, token_id, row in zip(entries, token_ids, log_softmax(logits), strict=True):
        likeliest = np.argsort(-row)
        expected_ids = [token_id, *(i for i in likeliest[:number].tolist() if i != token_id)]
        assert [entry.token_id for entry in got] == expected_ids
        for entry in got:
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
            assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
            assert entry.text == tokenizer.decode([entry.token_id], skip_special_tokens=False)


SAMPLINGS = [
    (1, {}),
    (5, {"temperature": 2.0, "top_p": 0.9, "presence_penalty": 1.5, "seed": 1}),
    (0, {"bad": (" the",), "repetition_penalty": 3.0}),
    (5, {"logit_bias": {9: 50.0, 10: 49.5}, "temperature": 1.0}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "sampling"), SAMPLINGS, ids=["greedy", "sampled", "steered", "biased"])
def test_logprobs_are_those_of_the_plain_model_before_sampling(engine, tokenizer, number, sampling):
    """Other requests of the batch want no logprobs, or another number of them."""
    asked = {"logprobs": number, "prompt_logprobs": number, **sampling}
    requests = [
        submit(engine, max_tokens=20),
        submit(engine, max_tokens=20, **asked),
        submit(engine, max_tokens=10, logprobs=20),
    ]
    quiet, answer, other = map(engine.result, requests)
    prompt_ids = tokenizer.encode(PROMPT).ids
    logits = plain_logits(engine, prompt_ids + answer.token_ids)
    check_logprobs(answer.logprobs, answer.token_ids, logits[len(prompt_ids) - 1 : -1], number, tokenizer)
    first, *of_prompt = answer[0].prompt_logprobs
    assert first is None
    check_logprobs(of_prompt, prompt_ids[1:], logits[: len(prompt_ids) - 1], number, tokenizer)
    assert not any(step.prompt_logprobs for step in answer[1:])
    assert [len(step.logprobs[0]) for step in other] == [20] * 10
    assert not any(step.logprobs or step.prompt_logprobs for step in quiet)


@pytest.mark.slow
def test_asking_for_logprobs_changes_no_text(engine):
    for sampling in ({}, {"temperature": 1.5, "seed": 4, "frequency_penalty": 1.0}):
        plain = generate(engine, max_tokens=20, **sampling)
        asked = generate(engine, max_tokens=20, logprobs=3, prompt_logprobs=0, **sampling)
        assert asked.token_ids == plain.token_ids


@pytest.mark.slow
def test_a_bias_forces_a_token_and_bad_strings_are_not_generated(engine):
    free = generate(engine, max_tokens=30)
    assert generate(engine, max_tokens=5, logit_bias={9: 100.0}).token_ids == [9] * 5
    banned = dict.fromkeys(free.token_ids, -100.0)
    assert not banned.keys() & set(generate(engine, max_tokens=30, logit_bias=banned, temperature=5.0).token_ids)
    assert generate(engine, max_tokens=30, logit_bias={}).token_ids == free.token_ids
    # The string is one token, several tokens, or in the middle of the text, whose beginning stays the same.
    free = generate(engine, max_tokens=30)
    words = free.text.split()
    first, pair = words[0], " ".join(words[3:5])
    assert first not in generate(engine, max_tokens=30, bad=(first,)).text.split()
    answer = generate(engine, max_tokens=30, bad=(pair,))
    assert pair not in answer.text
    assert answer.text.split()[:4] == words[:4]
    assert generate(engine, max_tokens=30, bad=("not to be met",)).text == free.text


def test_performance_metrics_count_tokens(engine):
    last = generate(engine, max_tokens=5, return_perf_metrics=True).last
    metrics = last.perf_metrics
    assert metrics.arrival_time_ns < metrics.first_scheduled_time_ns < metrics.first_token_time_ns
    assert metrics.first_token_time_ns < metrics.last_token_time_ns
    assert metrics.kv_cache_missed_block == last.num_input_tokens
    assert metrics.kv_cache_alloc_new_blocks == metrics.kv_cache_alloc_total_blocks == last.num_input_tokens + 4
    assert (metrics.kv_cache_reused_block, metrics.kv_cache_hit_rate, metrics.total_draft_tokens) == (0, 0.0, 0)


@contextlib.contextmanager
def held(engine):
    """Hold the engine's thread in its first delivery within the block."""
    delivering, go_on = threading.Event(), threading.Event()
    engine.sink.then = lambda: delivering.set() or go_on.wait(PATIENCE_S)
    submit(engine, max_tokens=4000)
    assert delivering.wait(PATIENCE_S)
    try:
        yield
    finally:
        go_on.set()


@pytest.mark.slow
def test_higher_priority_goes_first_and_equals_in_order(own_engine):
    with held(own_engine):
        requests = [
            submit(own_engine, max_tokens=3, priority=priority, return_perf_metrics=True)
            for priority in (0, -1, 7, 0, 7, 2)
        ]
        own_engine.engine.abort("r1")
    starts = [own_engine.result(request).last.perf_metrics.first_scheduled_time_ns for request in requests]
    assert sorted(range(6), key=lambda number: starts[number]) == [2, 4, 5, 0, 3, 1]
    assert own_engine.engine.capabilities.priority


SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
GUIDED = [  # the guide, and how the text is matched
    ({"guided_regex": "(yes|no), [0-9]{3}"}, "(yes|no), [0-9]{3}"),
    ({"guided_grammar": 'root ::= "left" | "right"'}, "left|right"),
    ({"guided_json": json.dumps(SCHEMA | {"additionalProperties": False})}, r'\{"city": "(Oslo|Rome)"\}'),
    ({"guided_regex": "x‹｜end▁of▁sentence｜>y".replace("‹", "<")}, "x<｜end▁of▁sentence｜>y"),
    # min_tokens forbids the end, which the guide alone allows then.
    ({"guided_regex": "a", "min_tokens": 9}, "a"),
]


def test_a_guide_binds_the_text(engine):
    found = [(generate(engine, **{"max_tokens": 60, **guide}), pattern) for guide, pattern in GUIDED]
    assert [answer.text for answer, pattern in found if not re.fullmatch(pattern, answer.text, re.S)] == []
    assert engine.engine.capabilities.unsupported.keys() == {"guided_structural_tag"}


WRONG = [  # llguidance refuses these at once, or in the middle: what grows too large, or has no text
    ("guided_regex", "(a"),
    ("guided_grammar", "x"),
    ("guided_grammar", "root ::= foo"),
    ("guided_json", '{"type": "objct"}'),
    ("guided_regex", "(a{1000}){1000}"),
    ("guided_grammar", "root ::= root"),
]


def test_a_guide_that_is_wrong_ends_its_request_alone_by_name(engine):
    other = submit(engine, max_tokens=3)
    errors = [generate(engine, **{name: value}).last.error for name, value in WRONG]
    told = [(error.code, str(error).partition(":")[0], "\n" in str(error)) for error in errors]
    assert told == [("E_INVALID_ARGUMENT", name, False) for name, _ in WRONG]
    assert engine.result(other).last.finish_reason == "length"


@pytest.mark.slow
def test_context_may_outgrow_the_first_cache(engine):
    """Beyond 256 tokens the cache doubles, and a short request beside it goes on unchanged."""
    expected = generate(engine, max_tokens=DEMO_MAX_TOKENS).text
    long, short = submit(engine, " time" * 240, max_tokens=40), submit(engine, max_tokens=DEMO_MAX_TOKENS)
    assert engine.result(long).last.finish_reason == "length"
    assert engine.result(short).text == expected


def test_stats_count_running_and_waiting(own_engine):
    requests = [submit(own_engine, max_tokens=4000) for _ in range(3)]
    own_engine.sink.wait_for(lambda: all(own_engine.steps_of(request) for request in requests[:2]))
    stats = own_engine.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert 0 < stats.kv_blocks_used < stats.kv_blocks_total == 2 * 4096


def test_stop_cancels_requests_that_the_thread_has_not_seen(own_engine):
    """They are submitted while the engine delivers, and it is stopped before it looks for new ones."""
    with held(own_engine):
        unseen = submit(own_engine)
        stopper = threading.Thread(target=own_engine.engine.stop)
        stopper.start()
        wait_for(lambda: not own_engine.engine.health().alive)
    stopper.join()
    assert own_engine.ended(unseen) == ["cancelled"]


def test_a_request_that_makes_the_tokenizer_fail_is_answered(own_engine):
    error = generate(own_engine, "\ud800").last.error
    assert isinstance(error, EngineError)
    assert "can't be read: TypeError" in str(error)
    engine = own_engine.engine
    assert engine.health().alive
    assert list(engine.load_seconds) == ["checkpoint", "tokenizer", "weights"]
    engine.stop()
    engine.abort("a")
    assert not engine._aborts


@pytest.mark.slow
def test_a_request_without_room_in_memory_is_answered_and_the_others_go_on(own_engine, monkeypatch):
    vocab_size, make_zeros = own_engine.engine._checkpoint.vocab_size, np.zeros

    def no_room_for_a_vocabulary(shape, *arguments, **options):
        if shape == vocab_size:
            raise MemoryError("Unable to allocate 4 GiB: out of memory")
        return make_zeros(shape, *arguments, **options)

    other = own_engine.begun(max_tokens=4000)
    monkeypatch.setattr(np, "zeros", no_room_for_a_vocabulary)
    error = generate(own_engine, repetition_penalty=1.2).last.error
    assert isinstance(error, EngineError)
    assert "out of memory" in str(error)
    assert generate(own_engine).last.finish_reason == "length"
    assert not own_engine.sink.is_done(other.request_id)
    assert own_engine.engine.health().alive


def test_before_start_no_request_is_served(random_checkpoint):
    engine = ReferenceEngine(config(random_checkpoint))
    with pytest.raises(UnavailableError, match="not been started"):
        engine.render_chat(CHAT, {})
    with pytest.raises(RuntimeError, match="start"):
        _ = engine.capabilities


@pytest.mark.parametrize("forward", ["prefill", "decode"])
def test_a_failing_forward_pass_fails_every_request_and_the_engine(own_engine, monkeypatch, forward):
    def fail(*_, **__):
        raise RuntimeError("out of\nmemory")

    running = [submit(own_engine, max_tokens=4000) for _ in range(2)]
    own_engine.sink.wait_for(lambda: all(own_engine.steps_of(request) for request in running))
    waiting = [submit(own_engine, max_tokens=4000) for _ in range(2)]
    monkeypatch.setattr(ModelRunner, forward, fail)
    own_engine.engine.abort(running[0].request_id)  # makes room for a prefill
    ends = [own_engine.ended(request)[0] for request in (*running, *waiting)]
    assert all(isinstance(end, EngineError) for end in ends[1:])
    assert ends[0] == "cancelled" or isinstance(ends[0], EngineError)
    assert own_engine.engine.health().reason == "the engine has failed: RuntimeError: out of memory"


BAD_OPTIONS = [
    ({"max_num_seq": 4}, "max_num_seq: unknown option; known: max_num_seqs, max_seq_len"),
    ({"max_num_seqs": 0}, "max_num_seqs: expected a whole number from 1, got 0"),
    ({"max_num_seqs": True}, "max_num_seqs: expected a whole number"),
    ({"max_seq_len": 1}, "max_seq_len: expected a whole number from 2, got 1"),
    ({"num_threads": "2"}, "num_threads: expected a whole number from 1, got '2'"),
    ({"a": 1, "num_threads": 0}, "a: unknown .*; triton_config.engine_options.num_threads: expected"),
]


def test_bad_options_are_refused_by_name(subtests):
    for options, problem in BAD_OPTIONS:
        with subtests.test(problem), pytest.raises(ConfigError, match=problem):
            ReferenceEngine(config("tiny", **options))


def test_what_can_not_be_loaded_is_refused(tmp_path, random_checkpoint):
    (tmp_path / "empty").mkdir()
    for configured, problem in [
        (config("nowhere", tmp_path), "/nowhere, where .* downloads nothing$"),
        (config("empty", tmp_path), "config.json: can't be read"),
        (config(random_checkpoint, max_seq_len=5000), r"max_seq_len is 5000, .* 4096"),
    ]:
        engine = ReferenceEngine(configured)
        with pytest.raises(EngineError, match=problem):
            engine.start()
        assert not engine.health().alive
    with driven(config(random_checkpoint.name, random_checkpoint.parent)) as relative:
        assert relative.engine.capabilities.max_seq_len == 4096
