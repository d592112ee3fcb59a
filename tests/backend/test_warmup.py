"""The warm-up between load and READY: what it sends, when it goes on, what it survives and what it leaves behind."""

import contextlib
import dataclasses
import itertools
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepseek_backend import engine_warmup
from deepseek_backend.backend_metrics import ACCEPTED_DRAFT_TOKENS, DRAFT_TOKENS, LOAD_SECONDS, BackendMetrics, Kind
from deepseek_backend.config import WarmupConfig, parse_config
from deepseek_backend.engines import create_engine
from deepseek_backend.engines.base import Capabilities, EngineHealth, EngineStats, Step
from deepseek_backend.errors import ConfigError, EngineError, RequestError, UnavailableError
from deepseek_backend.service import Service
from deepseek_backend.watcher import ServerAbove
from support.fakes import ScriptedEngine

CHECKOUT = Path(__file__).parents[2] / "model_repository/tensorrt_llm/1"


@pytest.fixture
def clock(monkeypatch):
    """The clock that the warm-up reads."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(engine_warmup, "time", clock)
    monkeypatch.setattr(engine_warmup, "CHECK_S", 0.001)
    monkeypatch.setattr(engine_warmup, "ABORT_S", 0.001)
    return clock


class SteppingEngine(ScriptedEngine):
    """An engine that runs an iteration when its health is asked: the requests submitted by then end together,
    `seconds` of the clock later."""

    def __init__(self, clock, *seconds, vocabulary=200_000, max_seq_len=100_000):
        super().__init__()
        self.seconds = [*seconds] or [0.0]
        """Of each iteration; the last one holds for the rest."""
        self.batches = []
        """What ended together."""
        self.died = ""
        self._clock = clock
        self._vocabulary = vocabulary
        self._max_seq_len = max_seq_len
        self._waiting = []

    @property
    def capabilities(self):
        return Capabilities(sampling_fields=super().capabilities.sampling_fields, max_seq_len=self._max_seq_len)

    def submit(self, request, sink):
        self._waiting.append((request, sink))

    def health(self):
        if self.died:
            self._clock.now += 100
        elif self._waiting:
            self._iterate()
        return EngineHealth(alive=not self.died, reason=self.died)

    def fault(self, request):
        """The error that `request` ends with, or None."""

    def _iterate(self):
        waiting, self._waiting = self._waiting, []
        self.batches.append([request for request, _ in waiting])
        self._clock.now += self.seconds[min(len(self.batches), len(self.seconds)) - 1]
        for request, sink in waiting:
            if max(request.prompt_token_ids) >= self._vocabulary:
                step = Step(error=RequestError("input_ids: expected token ids from 0 to 299, got 5000"))
            else:
                error = self.fault(request)
                step = Step(error=error) if error else Step(token_ids=[1], finish_reason="length")
            sink.on_steps([(request, Step(token_ids=[1])), (request, step)])


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "deepseek_backend.engine_warmup")
    return caplog


def faulty(clock, error_of):
    """An engine whose requests end with what `error_of` says of their number of tokens."""
    engine = SteppingEngine(clock)
    engine.fault = lambda request: error_of(len(request.prompt_token_ids))
    return engine


def warm(engine, *shapes, is_exiting=lambda: False, default_sampling=None, hang_s=60, **settings):
    config, sampling = WarmupConfig(shapes=shapes, **settings), default_sampling or {}
    try:
        return engine_warmup.warm_up(engine, config, default_sampling=sampling, is_exiting=is_exiting, hang_s=hang_s)
    finally:
        engine.stop()


def sizes(engine):
    return [[len(request.prompt_token_ids) for request in batch] for batch in engine.batches]


def sent(engine):
    return [request for batch in engine.batches for request in batch]


ROUNDS = [  # seconds of each round, how many are sent of at most five, and whether the last two are alike
    ((3.0, 0.5, 0.46), 3, True),
    ((1.0, 0.91), 2, True),
    ((1.0, 0.89, 0.5, 1.0, 2.0), 5, False),
    ((0.89, 1.0, 2.0, 1.0, 2.0), 5, False),
    ((5.0, 1.0, 1.0), 3, True),
    ((0.001, 0.004), 2, True),  # a few milliseconds are chance
]


def test_a_shapes_requests_are_sent_at_once_and_again_until_two_rounds_are_alike(clock, log):
    for seconds, num_rounds, steady in ROUNDS:
        log.clear()
        engine = SteppingEngine(clock, *seconds)
        assert warm(engine, (3, 20)) == pytest.approx(sum(seconds[:num_rounds]))
        assert sizes(engine) == [[20, 20, 20]] * num_rounds
        assert ("not steady" not in log.text) == steady, seconds
    log.clear()
    warm(SteppingEngine(clock, 3.0, 0.5, 0.46), (3, 20))
    assert "first 3.000 s, steady 0.460 s after 3 rounds; the first user is spared 2.540 s" in log.text
    assert "warm-up: 1 of 1 shapes in 4.0 s, of which first users are spared 2.5 s" in log.messages


def test_a_shape_that_never_becomes_steady_is_left_after_max_rounds(clock, log):
    engine = SteppingEngine(clock, 1.0, 2.0, 4.0, 8.0)
    assert warm(engine, (1, 5), max_rounds=4) == 15.0
    assert "not steady, 8.000 s after 4 rounds; the first user is spared 0.000 s" in log.text


def test_no_two_prompts_are_alike_and_all_are_ordinary_tokens(clock):
    engine = SteppingEngine(clock)
    warm(engine, (4, 100), (4, 100))
    prompts = [request.prompt_token_ids for request in sent(engine)]
    assert len(set(prompts)) == len(prompts) == 16
    assert {token for prompt in prompts for token in prompt} <= set(range(3, 128_000))
    assert len({request.request_id for request in sent(engine)}) == len(prompts)


def test_prompts_fit_the_engine(clock, log):
    engine = SteppingEngine(clock, vocabulary=300)
    warm(engine, (2, 50), (1, 50))
    assert sizes(engine) == [[50, 50]] * 3 + [[50]] * 2
    assert "warm-up: 2 of 2 shapes" in log.text
    assert "failed" not in log.text
    engine = SteppingEngine(clock, max_seq_len=64)
    warm(engine, (1, 64), (1, 63))
    assert sizes(engine) == [[63], [63]]
    assert "warm-up: left out 1 request of 64 tokens: max_seq_len is 64" in log.messages


def test_answers_have_their_whole_length_and_the_users_sampling(clock):
    engine = SteppingEngine(clock)
    sampling = {"temperature": 0.6, "top_p": 0.95, "min_p": 0.1, "stop": ("x",)}  # a script does not have min_p
    warm(engine, (1, 5), max_tokens=7, default_sampling=sampling)
    request = sent(engine)[0]
    assert request.max_tokens == 7
    assert request.sampling.ignore_eos is True
    assert (request.sampling.temperature, request.sampling.top_p) == (0.6, 0.95)
    assert (request.sampling.min_p, request.sampling.stop, request.sampling.min_tokens) == (None, (), None)

    class Plain(SteppingEngine):
        @property
        def capabilities(self):
            return Capabilities(sampling_fields=frozenset({"min_tokens"}), max_seq_len=100)

    engine = Plain(clock)
    warm(engine, (1, 5), default_sampling={"temperature": 0.6})
    sampling = sent(engine)[0].sampling
    assert (sampling.ignore_eos, sampling.min_tokens, sampling.temperature) == (None, 8, None)


FAULTS = [  # shapes, the error of so many tokens, sizes of what ends together, and how many shapes are warmed
    ([(2, 9), (1, 5)], {9: EngineError("no")}, [[9, 9], [5], [5], [5]], "1 of 2"),  # the shortest once, to see it live
    ([(1, 9), (2, 8), (1, 7), (1, 5)], dict.fromkeys((7, 8, 9), EngineError("no")),
     [[9], [5], [8, 8], [5], [7], [5], [5], [5]], "1 of 4"),
    ([(1, 9), (1, 5)], {9: RequestError("too long")}, [[9], [5], [5]], "1 of 2"),  # which says nothing of the engine
    ([(1, 9), (1, 5)], {9: EngineError("no"), 5: RequestError("no")}, [[9], [5], [5]], "0 of 2"),
]  # fmt: skip


@pytest.mark.parametrize(("shapes", "errors", "ended", "warmed"), FAULTS)
def test_after_a_shape_that_fails_a_short_request_is_answered_and_the_next_goes_on(
    clock, log, shapes, errors, ended, warmed
):
    engine = faulty(clock, errors.get)
    warm(engine, *shapes)
    assert sizes(engine) == ended
    assert f"warm-up: {warmed} shapes" in log.text


def test_an_engine_that_fails_at_the_shortest_request_too_is_an_error(clock):
    engine = faulty(clock, lambda tokens: EngineError(f"no kernel for {tokens}"))
    with pytest.raises(EngineError, match="at 1 request of 5 tokens after it: no kernel for 5"):
        warm(engine, (2, 9), (1, 5))
    assert sizes(engine) == [[9, 9], [5]]


def test_after_an_error_no_more_of_the_shape_is_sent(clock):
    class Prompt(ScriptedEngine):
        """Answers in submit()."""

        def submit(self, request, sink):
            self.requests.append(request)
            error = EngineError("out of memory") if len(request.prompt_token_ids) == 9 else None
            sink.on_steps([(request, Step(error=error) if error else Step(finish_reason="length"))])

    engine = Prompt()
    warm(engine, (50, 9), (1, 5), max_rounds=1)
    assert [len(request.prompt_token_ids) for request in engine.requests] == [9, 5, 5]


def test_an_engine_that_raises_fails_the_shape_alone(clock, log):
    class Raising(SteppingEngine):
        def submit(self, request, sink):
            if request.request_id == "warmup-2":
                raise ZeroDivisionError("no such luck")
            super().submit(request, sink)

    engine = Raising(clock)
    warm(engine, (2, 9), (1, 5))
    assert "2 requests of 9 tokens failed, and users' requests may: ZeroDivisionError: no such luck" in log.text
    assert sorted(engine.aborted) == ["warmup-1", "warmup-2"]
    assert sizes(engine)[-1] == [5]


def test_an_engine_that_dies_is_an_error_with_the_cause(clock):
    engine = SteppingEngine(clock)

    def die(request):
        engine.died = "a worker has ended"
        return UnavailableError(engine.died)

    engine.fault = die
    with pytest.raises(EngineError, match="died while it was warmed up: a worker has ended"):
        warm(engine, (1, 5), (1, 6))
    assert sizes(engine) == [[5]]


class DeafEngine(ScriptedEngine):
    """An engine that never answers and never ends an aborted request, while its clock goes on."""

    def __init__(self, clock):
        super().__init__()
        self._clock = clock

    def health(self):
        self._clock.now += 1
        return super().health()


def test_an_engine_that_dies_without_a_word_or_hangs_is_an_error(clock, log):
    class Silent(DeafEngine):
        def health(self):
            super().health()
            return EngineHealth(alive=not self.requests, reason="gone")

    with pytest.raises(EngineError, match="gone"):
        warm(Silent(clock), (1, 5))
    engine = DeafEngine(clock)
    with pytest.raises(EngineError, match="the engine hangs: 1 request of 5 tokens had no answer in 60 s"):
        warm(engine, (2, 5), (1, 6), max_s=10)
    assert [len(request.prompt_token_ids) for request in engine.requests] == [5, 5, 5]
    assert sorted(engine.aborted) == ["warmup-1", "warmup-2", "warmup-3"]
    assert "warm-up: the engine has not ended 2 aborted requests" in log.messages


def test_an_engine_that_lets_go_without_having_answered_hangs_too(clock):
    class Letting(DeafEngine):
        """As TensorRT-LLM's adapter ends what the engine says nothing of."""

        def abort(self, request_id):
            super().abort(request_id)
            [request] = [each for each in self.requests if each.request_id == request_id]
            self.step([(request, Step(finish_reason="cancelled"))])

    with pytest.raises(EngineError, match="the engine hangs"):
        warm(Letting(clock), (2, 5), max_s=10)


def test_a_slow_engine_is_given_hang_s_after_max_s(clock, log):
    class Compiling(SteppingEngine):
        """Nothing comes until its clock says so."""

        def health(self):
            self._clock.now += 1
            return super().health() if self._clock.now > 1030 else EngineHealth(alive=True)

    engine = Compiling(clock)
    warm(engine, (1, 9), (1, 5), max_s=10)
    assert "warm-up: 0 of 2 shapes" in log.text
    assert "ended after max_s, 10 s" in log.text


def test_max_s_ends_it_between_rounds_and_while_thousands_are_submitted(clock, log):
    class Slow(SteppingEngine):
        def submit(self, request, sink):
            self.requests.append(request)
            self._clock.now += 0.01
            super().submit(request, sink)

    engine = Slow(clock)
    warm(engine, (10_000, 1), (1, 1), max_s=5)
    assert 500 <= len(engine.requests) < 500 + 2 * engine_warmup.CHECK_EVERY
    assert "ended after max_s, 5 s" in log.text
    engine = SteppingEngine(clock, 3.0)
    warm(engine, (1, 5), (1, 6), (1, 7), max_s=10)
    assert sizes(engine) == [[5], [5], [6], [6], [5]]
    assert "warm-up: 1 of 3 shapes" in log.text
    assert "ended after max_s" in log.text


def test_a_server_that_exits_ends_it(clock, log):
    looks = itertools.count()
    engine = DeafEngine(clock)
    warm(engine, (1, 5), (1, 6), is_exiting=lambda: next(looks) > 2)
    assert engine.aborted == ["warmup-1"]
    assert len(engine.requests) == 1
    assert "the server is exiting" in log.text


def configured(engine="simulated", options=None, model="m", **warming):
    ours = {"engine": engine, "engine_options": options or {}, "warmup": {"shapes": [[1, 8], [3, 8]], **warming}}
    return parse_config({"model": model, "triton_config": ours}, version_dir=CHECKOUT)


@contextlib.contextmanager
def loaded(config, engine=None, **kwargs):
    service = Service(config, engine or create_engine(config), **kwargs)
    service.load()
    service.delivery.start()
    try:
        yield service
    finally:
        service.stop()


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "options"), [("simulated", {}), ("reference", {"num_threads": 1})])
def test_every_engine_can_be_warmed_with_nothing_left_of_it(engine, options, random_checkpoint, log):
    metrics = BackendMetrics()
    with loaded(configured(engine, options, str(random_checkpoint)), metrics=metrics) as service:
        stats = service._engine.stats()
        assert {sample.value for sample in metrics.samples() if sample.kind is Kind.COUNTER} == {0}
        assert (service.num_open, service.inflight, stats.num_running, stats.num_waiting) == (0, (0, 0), 0, 0)
        assert service.readiness().alive
    assert "warm-up: 2 of 2 shapes" in log.text


def test_the_stand_in_for_tensorrt_llm_is_warmed_too(make_engine, log):
    warm(make_engine().engine, (1, 8), (5, 300), default_sampling={"temperature": 0.6})
    assert "warm-up: 2 of 2 shapes" in log.text


def phases(metrics):
    return {s.labels["phase"]: s.value for s in metrics.samples() if s.name == LOAD_SECONDS.name}


def test_the_load_has_a_phase_for_it_and_the_servers_exit_ends_it(log):
    metrics = BackendMetrics()
    with loaded(configured(), server=ServerAbove(is_exiting=lambda: True)) as service:
        assert service.num_open == 0
    assert "the server is exiting" in log.text
    with loaded(configured(), metrics=metrics):
        assert list(phases(metrics)) == ["load", "warmup"]
        assert phases(metrics)["warmup"] > 0
    metrics, engine = BackendMetrics(), ScriptedEngine()
    config = parse_config({"model": "m", "triton_config": {"warmup": None}}, version_dir=Path())
    with loaded(config, engine, metrics=metrics):
        assert (phases(metrics).keys(), engine.requests) == ({"script"}, [])


@pytest.mark.slow
@pytest.mark.parametrize("option", ["fail_after", "crash_after", "hang_after"])
def test_an_engine_that_does_not_survive_it_fails_the_load_and_is_stopped(option, monkeypatch):
    monkeypatch.setattr(engine_warmup, "ABORT_S", 0.05)
    config = dataclasses.replace(configured(options={option: 3}, max_s=1), hang_s=1)
    engine = create_engine(config)
    said = "the engine hangs" if option == "hang_after" else f"died while .*engine_options.{option}"
    with pytest.raises(EngineError, match=said):
        Service(config, engine).load()
    assert not engine.health().alive


def test_the_draft_tokens_of_the_warm_up_are_nobodys():
    class Drafting(ScriptedEngine):
        drafts = 0

        def submit(self, request, sink):
            self.drafts += 100
            sink.on_steps([(request, Step(token_ids=[1], finish_reason="length"))])

        def stats(self):
            drafts = {"num_draft_tokens": self.drafts, "num_accepted_draft_tokens": self.drafts // 2}
            return EngineStats(num_running=0, num_waiting=0, **drafts)

    metrics, engine = BackendMetrics(), Drafting()

    def published(service):
        service.publish_state()
        values = {sample.name: sample.value for sample in metrics.samples()}
        return values[DRAFT_TOKENS.name], values[ACCEPTED_DRAFT_TOKENS.name]

    with loaded(configured(), engine, metrics=metrics) as service:
        assert engine.drafts > 0
        assert published(service) == (0, 0)
        engine.drafts += 10
        assert published(service) == (10, 5)


def problems_of(given):
    with pytest.raises(ConfigError) as raised:
        parse_config({"model": "m", "triton_config": {"warmup": given, "hang_s": 0}}, version_dir=Path())
    return [problem for problem in raised.value.problems if "warmup" in problem], len(raised.value.problems)


BAD = [
    ({}, "warmup.shapes: expected a list of pairs, got nothing"),
    *(({"shapes": shapes}, "expected a list of pairs") for shapes in ([], [[1]], [[True, 5]])),
    ({"shapes": [[65_537, 1]]}, "at most 65,536 requests"),
    *(({"shapes": [shape]}, "4,194,304 tokens in all") for shape in ([1, 2**22 + 1], [64, 65_537])),
    ([[1, 5]], "warmup: expected a mapping, or null, got [[1, 5]]"),
]


def test_what_is_no_warmup_is_refused(subtests):
    for given, expected in BAD:
        with subtests.test(str(given)):
            (problem,), _ = problems_of(given)
            assert expected in problem
    given = {"shapes": [[1, 0]], "max_tokens": 0, "max_rounds": "x", "max_s": 0, "max_ms": 5}
    found, count = problems_of(given)
    assert [problem.partition(": ")[0].removeprefix("triton_config.warmup.") for problem in found] == list(given)
    assert "did you mean max_s?" in found[-1]
    assert count == len(found) + 1
    config = parse_config({"model": "m", "triton_config": {"warmup": {"shapes": [[2, 9]]}}}, version_dir=Path())
    assert config.warmup == WarmupConfig(shapes=((2, 9),), max_tokens=8, max_rounds=5, max_s=300)
