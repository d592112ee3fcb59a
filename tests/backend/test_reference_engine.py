from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from deepseek_backend.config import BackendConfig
from deepseek_backend.contract import SAMPLING_FIELDS, ErrorCode
from deepseek_backend.engines import create_engine
from deepseek_backend.engines.base import PerfMetrics, Step
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from deepseek_backend.engines.prompting import bos_token
from deepseek_backend.engines.reference import ReferenceEngine, token_logprobs
from deepseek_backend.engines.reference.model_runner import ModelRunner
from deepseek_backend.engines.reference.token_logprobs import log_softmax
from deepseek_backend.errors import ConfigError, EngineError, RequestError, UnavailableError
from support.demo_decoding import DEMO_MAX_TOKENS, DEMO_PROMPTS
from support.random_checkpoint import BOS, EOS

TIMEOUT_S = 120
PROMPT = DEMO_PROMPTS[0]


@dataclass
class Answer:
    """The steps of one request."""

    steps: list[Step] = field(default_factory=list)
    started: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def text(self):
        return "".join(step.text for step in self.steps)

    @property
    def token_ids(self):
        return [token_id for step in self.steps for token_id in step.token_ids]

    @property
    def last(self):
        assert self.done.wait(TIMEOUT_S), "no last step"
        return self.steps[-1]


class Collector:
    """A sink that holds the engine to the protocol: one call at a time, one last step, nothing after it."""

    def __init__(self):
        self.answers = {}
        self.call_sizes = []
        self._busy = threading.Lock()

    def on_steps(self, steps):
        assert self._busy.acquire(blocking=False), "two calls at once"
        self.call_sizes.append(len(steps))
        for request, step in steps:
            answer = self.answers[request.request_id]
            assert not answer.done.is_set(), "a step after the last one"
            assert (step.finish_reason is None) or (step.error is None)
            answer.steps.append(step)
            answer.started.set()
            if step.finish_reason is not None or step.error is not None:
                answer.done.set()
        self._busy.release()


_ids = itertools.count()


def submit(engine, collector, prompt=PROMPT, max_tokens=8, priority=0, **sampling):
    request_id = str(next(_ids))
    request = GenerateRequest(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else "",
        prompt_token_ids=None if isinstance(prompt, str) else tuple(prompt),
        sampling=SamplingParams(**sampling),
        max_tokens=max_tokens,
        priority=priority,
    )
    answer = collector.answers[request_id] = Answer()
    engine.submit(request, collector)
    return request_id, answer


def generate(engine, prompt=PROMPT, max_tokens=8, **sampling):
    _, answer = submit(engine, Collector(), prompt, max_tokens, **sampling)
    assert answer.last
    return answer


def config(model, version_dir=Path(), **options):
    return BackendConfig(
        engine="reference", llm_args={"model": str(model)}, engine_options=options, version_dir=version_dir
    )


@pytest.fixture(scope="module")
def folder(random_checkpoint):
    return random_checkpoint


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@contextlib.contextmanager
def running(configuration):
    engine = create_engine(configuration)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def engine(folder):
    """Make an engine with fewer slots than the largest test has requests, so that rows wait, join and leave."""
    with running(config(folder, max_num_seqs=5)) as engine:
        yield engine


@pytest.fixture
def own_engine(folder):
    """Make an engine for a single test, which may stop or break it."""
    with running(config(folder, max_num_seqs=2)) as engine:
        yield engine


def plain_logits(engine, token_ids):
    """Return the logits [len(token_ids), vocab_size] of one forward pass over a whole sequence, without a batch."""
    assert engine._checkpoint
    runner = ModelRunner(engine._checkpoint.model, 1)
    return runner.logits(runner.prefill(token_ids))


@pytest.mark.slow
def test_concurrent_requests_give_the_same_text_as_alone_and_as_plain_passes(engine, tokenizer):
    collector = Collector()
    jobs = [(prompt, max_tokens) for max_tokens in (3, 17, 33, DEMO_MAX_TOKENS) for prompt in DEMO_PROMPTS]
    answers = {job: submit(engine, collector, *job)[1] for job in jobs}
    assert all(answer.last for answer in answers.values())
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
    assert max(collector.call_sizes) >= 5, "never ran as one batch"


@pytest.mark.slow
def test_prompts_are_counted_with_bos_and_used_unchanged_in_token_ids(engine, tokenizer):
    num_tokens = len(tokenizer.encode(PROMPT).ids)
    assert {step.num_input_tokens for step in generate(engine).steps} == {num_tokens}
    assert generate(engine, add_special_tokens=False).last.num_input_tokens == num_tokens - 1
    token_ids = tokenizer.encode(PROMPT).ids
    answer = generate(engine, token_ids)
    assert answer.token_ids == generate(engine).token_ids
    assert answer.last.num_input_tokens == len(token_ids)
    assert generate(engine, token_ids[1:]).last.num_input_tokens == len(token_ids) - 1
    token_ids = tokenizer.encode(PROMPT).ids
    expected = generate(engine, token_ids[-3:])
    for prompt in (PROMPT, token_ids):
        answer = generate(engine, prompt, truncate_prompt_tokens=3)
        assert (answer.token_ids, answer.last.num_input_tokens) == (expected.token_ids, 3)
    assert engine.capabilities.bos_token == BOS
    document = json.loads(tokenizer.to_str())
    document["post_processor"] = None
    without = Tokenizer.from_str(json.dumps(document))
    encode = lambda text, special: without.encode(text, add_special_tokens=special).ids  # noqa: E731
    assert bos_token(encode, without.decode) == ""


@pytest.mark.slow
def test_a_seed_repeats_whatever_runs_beside_it(engine):
    alone = generate(engine, max_tokens=30, temperature=0.8, seed=11)
    collector = Collector()
    others = [submit(engine, collector, prompt, 20)[1] for prompt in DEMO_PROMPTS[1:]]
    _, again = submit(engine, collector, max_tokens=30, temperature=0.8, seed=11)
    _, different = submit(engine, collector, max_tokens=30, temperature=0.8, seed=12)
    assert all(answer.last for answer in (again, different, *others))
    assert again.text == alone.text != different.text


@pytest.mark.slow
def test_stop_tokens_end_the_text_and_are_counted_not_shown(engine, tokenizer):
    free = generate(engine, max_tokens=10)
    stop_id = free.token_ids[6]
    end = free.token_ids.index(stop_id) + 1
    stopped = generate(engine, max_tokens=10, stop_token_ids=(stop_id, 10**6))
    assert (stopped.last.finish_reason, stopped.last.stop_reason) == ("stop", stop_id)
    assert stopped.token_ids == free.token_ids[:end]
    assert stopped.text == tokenizer.decode(free.token_ids[: end - 1])
    said = generate(engine, max_tokens=10, stop_token_ids=(stop_id,), include_stop_str_in_output=True)
    assert said.text == tokenizer.decode(free.token_ids[:end])
    first = generate(engine, max_tokens=1).token_ids[0]
    answer = generate(engine, max_tokens=6, min_tokens=4, stop_token_ids=(first,))
    assert first not in answer.token_ids[:4]
    assert len(answer.token_ids) >= 5


def test_end_tokens_of_the_generation_config_end_the_text(engine, folder, tmp_path):
    free = generate(engine, max_tokens=12)
    eos = free.token_ids[8]
    end = free.token_ids.index(eos) + 1
    copy = shutil.copytree(folder, tmp_path / "checkpoint")
    generation_config = json.loads((copy / "generation_config.json").read_text()) | {"eos_token_id": [1, eos]}
    (copy / "generation_config.json").write_text(json.dumps(generation_config))
    with running(config(copy)) as other:
        answer = generate(other, max_tokens=12)
        assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", None)
        assert answer.token_ids == free.token_ids[:end]
        assert free.text.startswith(answer.text)
        ignored = generate(other, max_tokens=12, ignore_eos=True)
        assert (ignored.text, ignored.last.finish_reason) == (free.text, "length")


def test_token_ids_outside_the_vocabulary_are_refused(engine, folder):
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    for name, token_id, fields in [
        ("input_ids", -1, {"prompt": [5, -1], "repetition_penalty": 1.2}),
        ("input_ids", vocab_size, {"prompt": [5, vocab_size], "repetition_penalty": 1.2}),
        ("logit_bias", vocab_size, {"logit_bias": {5: 1.0, vocab_size: 1.0}}),
    ]:
        error = generate(engine, **fields).last.error
        assert isinstance(error, RequestError)
        assert str(error) == f"{name}: expected token ids from 0 to {vocab_size - 1}, got {token_id}"
    assert generate(engine, [vocab_size - 1]).last.finish_reason == "length"


CHAT = [{"role": "user", "content": "Hello"}]


def test_chat_is_rendered_by_the_checkpoints_template(engine, tokenizer):
    assert engine.render_chat(CHAT, {}) == f"{BOS}<｜User｜>Hello<｜Assistant｜></think>"
    prompt = engine.render_chat([*CHAT, {"role": "assistant", "content": "Hi"}, *CHAT], {"thinking": True})
    assert prompt == f"{BOS}<｜User｜>Hello<｜Assistant｜></think>Hi{EOS}<｜User｜>Hello<｜Assistant｜><think>"
    num_tokens = len(tokenizer.encode(prompt, add_special_tokens=False).ids)
    assert generate(engine, prompt, add_special_tokens=False).last.num_input_tokens == num_tokens
    with pytest.raises(RequestError, match=r"messages: the chat template refuses them: .* got wizard$") as caught:
        engine.render_chat([{"role": "wizard", "content": "a"}], {})
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
    collector = Collector()
    _, quiet = submit(engine, collector, max_tokens=20)
    _, answer = submit(engine, collector, max_tokens=20, logprobs=number, prompt_logprobs=number, **sampling)
    _, other = submit(engine, collector, max_tokens=10, logprobs=20)
    assert all(one.last.finish_reason == "length" for one in (quiet, answer, other))
    prompt_ids = tokenizer.encode(PROMPT).ids
    logits = plain_logits(engine, prompt_ids + answer.token_ids)
    entries = [entry for step in answer.steps for entry in step.logprobs]
    check_logprobs(entries, answer.token_ids, logits[len(prompt_ids) - 1 : -1], number, tokenizer)
    first, *of_prompt = answer.steps[0].prompt_logprobs
    assert first is None
    known = [entry for entry in of_prompt if entry is not None]
    check_logprobs(known, prompt_ids[1:], logits[: len(prompt_ids) - 1], number, tokenizer)
    assert [len(step.prompt_logprobs) for step in answer.steps[1:]] == [0] * 19
    assert [len(step.logprobs[0]) for step in other.steps] == [20] * 10
    assert {len(step.logprobs) + len(step.prompt_logprobs) for step in quiet.steps} == {0}


def test_a_long_prompts_logits_never_exist_all_at_once(own_engine, monkeypatch):
    sizes = []
    make_logits = ModelRunner.logits

    def counted(runner, hidden):
        sizes.append(len(hidden))
        return make_logits(runner, hidden)

    monkeypatch.setattr(ModelRunner, "logits", counted)
    prompt = " the river is wide" * 3
    (at_once, *_) = generate(own_engine, prompt, max_tokens=1, prompt_logprobs=2).steps
    assert sizes == [at_once.num_input_tokens - 1, 1]
    sizes.clear()
    monkeypatch.setattr(token_logprobs, "_ROWS_AT_ONCE", 5)
    (in_pieces, *_) = generate(own_engine, prompt, max_tokens=1, prompt_logprobs=2).steps
    assert max(sizes) == 5
    assert in_pieces.token_ids == at_once.token_ids
    assert len(in_pieces.prompt_logprobs) == len(at_once.prompt_logprobs)
    for piece, whole in zip(in_pieces.prompt_logprobs[1:], at_once.prompt_logprobs[1:], strict=True):
        assert piece
        assert whole
        assert [entry._replace(logprob=0) for entry in piece] == [entry._replace(logprob=0) for entry in whole]
        assert [entry.logprob for entry in piece] == pytest.approx([entry.logprob for entry in whole], abs=1e-4)


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


def test_performance_metrics_come_with_the_last_step(engine):
    before = time.monotonic_ns()
    answer = generate(engine, max_tokens=5, return_perf_metrics=True)
    metrics = answer.last.perf_metrics
    assert metrics is not None
    times = (
        metrics.arrival_time_ns,
        metrics.first_scheduled_time_ns,
        metrics.first_token_time_ns,
        metrics.last_token_time_ns,
    )
    assert before < times[0] < times[1] < times[2] < times[3] < time.monotonic_ns()
    num_input_tokens = answer.last.num_input_tokens
    assert metrics.kv_cache_missed_block == num_input_tokens
    assert metrics.kv_cache_alloc_new_blocks == metrics.kv_cache_alloc_total_blocks == num_input_tokens + 4
    assert (metrics.kv_cache_reused_block, metrics.kv_cache_hit_rate, metrics.total_draft_tokens) == (0, 0.0, 0)
    assert [step.perf_metrics for step in answer.steps[:-1]] == [None] * 4
    assert generate(engine).last.perf_metrics is None


class SlowCollector(Collector):
    """A sink that holds the engine's thread in its first delivery until it is released."""

    def __init__(self):
        super().__init__()
        self.delivering, self.go_on = threading.Event(), threading.Event()

    def on_steps(self, steps):
        self.delivering.set()
        assert self.go_on.wait(TIMEOUT_S)
        super().on_steps(steps)


def test_higher_priority_goes_first_and_equals_in_order(own_engine):
    collector = SlowCollector()
    submit(own_engine, collector, max_tokens=1)
    assert collector.delivering.wait(TIMEOUT_S)
    scheduled = []
    for priority in (0, -1, 7, 0, 7, 2):
        _, answer = submit(own_engine, collector, max_tokens=3, priority=priority, return_perf_metrics=True)
        scheduled.append((priority, answer))
    collector.go_on.set()

    def scheduled_ns(answer):
        assert answer.last.perf_metrics is not None
        return answer.last.perf_metrics.first_scheduled_time_ns

    by_time = sorted(range(6), key=lambda i: scheduled_ns(scheduled[i][1]))
    assert by_time == [2, 4, 5, 0, 3, 1]
    assert own_engine.capabilities.priority


def test_a_request_cancelled_before_it_ran_has_cached_nothing(own_engine):
    collector = SlowCollector()
    submit(own_engine, collector)
    assert collector.delivering.wait(TIMEOUT_S)
    request_id, answer = submit(own_engine, collector, return_perf_metrics=True)
    own_engine.abort(request_id)
    collector.go_on.set()
    metrics = answer.last.perf_metrics
    assert metrics is not None
    assert metrics == PerfMetrics(arrival_time_ns=metrics.arrival_time_ns)


def test_every_field_of_the_contract_is_served_or_refused_with_a_reason(engine):
    """The service applies best_of, where the engine has logprobs to choose by."""
    capabilities = engine.capabilities
    guided = {field.name for field in SAMPLING_FIELDS if field.guided}
    assert capabilities.unsupported.keys() == guided
    assert all("guided_decoding_backend" in reason for reason in capabilities.unsupported.values())
    assert capabilities.sampling_fields == {field.name for field in SAMPLING_FIELDS} - guided - {"best_of"}


def test_prompt_and_answer_share_the_room(folder):
    with running(config(folder, max_seq_len=10)) as short:
        answer = generate(short, max_tokens=1000)
        assert answer.last.finish_reason == "length"
        assert len(answer.token_ids) == 10 - answer.last.num_input_tokens
        assert short.capabilities.max_seq_len == 10
        answer = generate(short, " the" * 8, max_tokens=5)
        assert (answer.last.num_input_tokens, len(answer.token_ids)) == (9, 1)
        error = generate(short, " the" * 9).last.error
        assert error.code is ErrorCode.PROMPT_TOO_LONG
        assert "10 tokens and at most 9 fit" in str(error)
        answer = generate(short, " the" * 100, truncate_prompt_tokens=9)
        assert (answer.last.finish_reason, answer.last.num_input_tokens) == ("length", 9)
        assert generate(short, " the" * 100, truncate_prompt_tokens=10).last.error is not None
        assert isinstance(generate(short, "", add_special_tokens=False).last.error, RequestError)


@pytest.mark.slow
def test_context_may_outgrow_the_first_cache(engine):
    """Beyond 256 tokens the cache doubles, and a short request beside it goes on unchanged."""
    expected = generate(engine, max_tokens=DEMO_MAX_TOKENS).text
    collector = Collector()
    _, long = submit(engine, collector, " time" * 240, max_tokens=40)
    _, short = submit(engine, collector, max_tokens=DEMO_MAX_TOKENS)
    assert long.last.finish_reason == "length"
    assert short.last
    assert short.text == expected


def test_abort_ends_running_and_waiting_requests(own_engine):
    collector = Collector()
    running = [submit(own_engine, collector, max_tokens=4000) for _ in range(2)]
    for _, answer in running:
        assert answer.started.wait(TIMEOUT_S)
    waiting_id, waiting = submit(own_engine, collector, max_tokens=4000)
    own_engine.abort(waiting_id)
    assert waiting.last.finish_reason == "cancelled"
    assert waiting.token_ids == []
    running_id, answer = running[0]
    own_engine.abort(running_id)
    assert answer.last.finish_reason == "cancelled"
    assert len(answer.token_ids) < 4000
    assert not running[1][1].done.is_set()
    own_engine.abort(running_id)
    own_engine.abort("nobody")
    assert generate(own_engine).last.finish_reason == "length"


def test_stats_count_running_and_waiting(own_engine):
    collector = Collector()
    answers = [submit(own_engine, collector, max_tokens=4000)[1] for _ in range(3)]
    for answer in answers[:2]:
        assert answer.started.wait(TIMEOUT_S)
    stats = own_engine.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert 0 < stats.kv_blocks_used < stats.kv_blocks_total == 2 * 4096


def test_stop_cancels_open_requests_and_refuses_further_ones(own_engine):
    collector = Collector()
    answers = [submit(own_engine, collector, max_tokens=4000)[1] for _ in range(4)]
    assert answers[0].started.wait(TIMEOUT_S)
    own_engine.stop()
    own_engine.stop()
    assert {answer.last.finish_reason for answer in answers} == {"cancelled"}
    assert not own_engine.health().alive
    _, late = submit(own_engine, collector)
    assert isinstance(late.last.error, UnavailableError)
    assert own_engine.stats().num_running == 0


def test_stop_cancels_requests_that_the_thread_has_not_seen(own_engine):
    """They are submitted while the engine delivers, and it is stopped before it looks for new ones."""
    collector = SlowCollector()
    submit(own_engine, collector, max_tokens=4000)
    assert collector.delivering.wait(TIMEOUT_S)
    _, unseen = submit(own_engine, collector)
    stopper = threading.Thread(target=own_engine.stop)
    stopper.start()
    while own_engine.health().alive:
        time.sleep(0.001)
    collector.go_on.set()
    stopper.join()
    assert unseen.last.finish_reason == "cancelled"


def test_a_request_that_makes_the_tokenizer_fail_is_answered(own_engine):
    error = generate(own_engine, "\ud800").last.error
    assert isinstance(error, EngineError)
    assert "can't be read: TypeError" in str(error)
    assert own_engine.health().alive
    assert list(own_engine.load_seconds) == ["checkpoint", "tokenizer", "weights"]
    assert all(0 <= seconds < TIMEOUT_S for seconds in own_engine.load_seconds.values())
    own_engine.stop()
    own_engine.abort("a")
    assert not own_engine._aborts


def test_a_request_without_room_in_memory_is_answered_and_the_others_go_on(own_engine, monkeypatch):
    assert own_engine._checkpoint
    vocab_size, make_zeros = own_engine._checkpoint.vocab_size, np.zeros

    def no_room_for_a_vocabulary(shape, *arguments, **options):
        if shape == vocab_size:
            raise MemoryError("Unable to allocate 4 GiB: out of memory")
        return make_zeros(shape, *arguments, **options)

    collector = Collector()
    _, other = submit(own_engine, collector, max_tokens=4000)
    assert other.started.wait(TIMEOUT_S)
    monkeypatch.setattr(np, "zeros", no_room_for_a_vocabulary)
    _, answer = submit(own_engine, collector, repetition_penalty=1.2)
    assert isinstance(answer.last.error, EngineError)
    assert "out of memory" in str(answer.last.error)
    _, plain = submit(own_engine, collector)
    assert plain.last.finish_reason == "length"
    assert not other.done.is_set()
    assert own_engine.health().alive


def test_before_start_no_request_is_served(folder):
    engine = ReferenceEngine(config(folder))
    assert engine.load_seconds == {}
    assert not engine.health().alive
    assert isinstance(generate(engine).last.error, UnavailableError)
    with pytest.raises(UnavailableError, match="not been started"):
        engine.render_chat(CHAT, {})
    engine.stop()
    with pytest.raises(RuntimeError, match="start"):
        _ = engine.capabilities


@pytest.mark.parametrize("forward", ["prefill", "decode"])
def test_a_failing_forward_pass_fails_every_request_and_the_engine(own_engine, monkeypatch, forward):
    def fail(*_, **__):
        raise RuntimeError("out of\nmemory")

    collector = Collector()
    answers = [submit(own_engine, collector, max_tokens=4000)[1] for _ in range(2)]
    assert all(answer.started.wait(TIMEOUT_S) for answer in answers)
    answers += [submit(own_engine, collector, max_tokens=4000)[1] for _ in range(2)]
    monkeypatch.setattr(ModelRunner, forward, fail)
    own_engine.abort(next(iter(collector.answers)))  # makes room for a prefill
    errors = [answer.last.error for answer in answers[1:]]
    assert all(isinstance(error, EngineError) for error in errors)
    assert answers[0].last.finish_reason == "cancelled" or isinstance(answers[0].last.error, EngineError)
    health = own_engine.health()
    assert not health.alive
    assert health.reason == "the engine has failed: RuntimeError: out of memory"
    assert isinstance(generate(own_engine).last.error, UnavailableError)


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


def test_what_can_not_be_loaded_is_refused(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    for name, problem in [
        ("nowhere", "/nowhere, where .* downloads nothing$"),
        ("empty", "config.json: can't be read"),
    ]:
        engine = ReferenceEngine(config(name, tmp_path))
        with pytest.raises(EngineError, match=problem):
            engine.start()
        assert not engine.health().alive
    engine = ReferenceEngine(config(folder, max_seq_len=5000))
    with pytest.raises(EngineError, match=r"max_seq_len is 5000, .* 4096"):
        engine.start()


def test_model_may_be_relative_to_the_version_folder(folder):
    with running(config(folder.name, folder.parent)) as engine:
        assert engine.capabilities.max_seq_len == 4096
        assert engine.health().alive


@pytest.mark.slow
def test_logits_of_a_changing_batch_are_those_of_plain_passes(engine):
    """Rows of mixed lengths join and leave, and the logits of every row are compared at every step."""
    assert engine._checkpoint
    runner = ModelRunner(engine._checkpoint.model, max_num_seqs=3)
    rows = []

    def check(logits, rows):
        assert len(logits) == len(rows)
        for got, row in zip(logits, rows, strict=True):
            np.testing.assert_allclose(got, plain_logits(engine, row)[-1], rtol=0, atol=1e-4)

    def join(prompt):
        logits = runner.logits(runner.prefill(prompt)[-1:])
        check(logits, [prompt])
        rows.append([*prompt, int(logits.argmax())])

    def decode(num_steps):
        for _ in range(num_steps):
            logits = runner.logits(runner.decode([row[-1] for row in rows]))
            check(logits, rows)
            for row, token_id in zip(rows, logits.argmax(-1).tolist(), strict=True):
                row.append(token_id)
            assert list(runner.lengths) == [len(row) - 1 for row in rows]

    join(list(range(5, 25)))
    decode(2)
    join([7])
    join(list(range(100, 350)))
    decode(8)  # across the first growth of the cache
    runner.remove(0)
    rows[0] = rows.pop()
    decode(2)
    join(list(range(40, 43)))
    decode(2)
    runner.remove(2)
    rows.pop()
    decode(2)
