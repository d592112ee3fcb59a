"""A sink that holds an engine to the rules of the engine protocol, and an engine with its requests."""

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

from deepseek_backend.engines import create_engine
from deepseek_backend.engines.base import Step
from deepseek_backend.engines.generate_request import GenerateRequest, SamplingParams
from support.waiting import PATIENCE_S

OWN_FIELDS = {"prompt_token_ids", "priority", "wants_steps", "request_type", "handover"}
"""Fields of a GenerateRequest that are no sampling fields."""


def is_last(step):
    return step.finish_reason is not None or step.error is not None


class Answer(list):
    """The steps of one request."""

    @property
    def text(self):
        return "".join(step.text for step in self)

    @property
    def token_ids(self):
        return [token_id for step in self for token_id in step.token_ids]

    @property
    def logprobs(self):
        return [entry for step in self for entry in step.logprobs]

    @property
    def last(self):
        return self[-1]


@dataclass
class StepLog:
    """A sink that keeps every step, and notes what is against the rules. Requests are told by their ids.

    `then` runs in the engine's thread after each call, and may submit and abort.
    """

    calls: list[list[tuple[str, Step]]] = field(default_factory=list)
    broken_rules: list[str] = field(default_factory=list)
    steps: dict[str, Answer] = field(default_factory=lambda: defaultdict(Answer))
    on_first_step: Callable[[str], object] | None = None
    then: Callable[[], object] = lambda: None
    one_step_a_call: bool = False
    """A call has no two steps of one request, as vLLM's core promises and other engines do not."""
    fails: bool = False
    """Every call raises, when the steps have been kept."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _busy: threading.Lock = field(default_factory=threading.Lock)

    def on_steps(self, steps):
        alone = self._busy.acquire(blocking=False)
        if not alone:
            self.broken_rules.append("two calls at a time")
        try:
            self._add(steps)
        finally:
            if alone:
                self._busy.release()
        self.then()
        if self.fails:
            raise RuntimeError("the receiver broke")

    def _add(self, steps):
        names = [request.request_id for request, _ in steps]
        if not steps or (self.one_step_a_call and len(set(names)) < len(names)):
            self.broken_rules.append(f"a call with {names}")
        begun = []
        with self._changed:
            self.calls.append([(request.request_id, step) for request, step in steps])
            for request, step in steps:
                before = self.steps[request.request_id]
                if before and is_last(before[-1]):
                    self.broken_rules.append(f"{request.request_id}: a step after the last")
                if step.text.endswith("\ufffd") and not is_last(step):
                    self.broken_rules.append(f"{request.request_id}: a part of a character")
                if request.sampling.logprobs is not None and len(step.logprobs) != len(step.token_ids):
                    self.broken_rules.append(f"{request.request_id}: {len(step.logprobs)} logprobs")
                if step.finish_reason is not None and step.error is not None:
                    self.broken_rules.append(f"{request.request_id}: an end and an error")
                begun += [] if before else [request.request_id]
                before.append(step)
            self._changed.notify_all()
        for name in begun if self.on_first_step else ():
            self.on_first_step(name)

    def wait_for(self, condition, timeout_s=PATIENCE_S):
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s), f"nothing came; {dict(self.steps)}"

    def wait(self, *names, timeout_s=PATIENCE_S):
        """Return the last steps of the requests."""
        self.wait_for(lambda: all(self.is_done(name) for name in names), timeout_s)
        assert not self.broken_rules, self.broken_rules
        return [self.steps[name][-1] for name in names]

    def last(self, name):
        return self.wait(name)[0]

    def is_done(self, name):
        return bool(self.steps[name]) and is_last(self.steps[name][-1])

    def text(self, name):
        return self.steps[name].text

    def token_ids(self, name):
        return self.steps[name].token_ids


def submitted(engine, *requests, **rules):
    """Submit the requests, and return their sink, which has these rules of its own."""
    sink = StepLog(**rules)
    for request in requests:
        engine.submit(request, sink)
    return sink


def answered(engine, *requests, **rules):
    """Do the same, and return the sink when all have had their last step."""
    sink = submitted(engine, *requests, **rules)
    sink.wait(*(request.request_id for request in requests))
    return sink


def make_request(name, prompt="", *, max_tokens, **fields):
    """Return a request with fields of its own and sampling fields. Token ids take the place of the prompt."""
    own = {key: fields.pop(key) for key in OWN_FIELDS & fields.keys()}
    return GenerateRequest(
        request_id=name,
        prompt="" if own.get("prompt_token_ids") is not None else prompt,
        sampling=SamplingParams(**fields),
        max_tokens=max_tokens,
        **own,
    )


class EngineDriver:
    """An engine, a sink, and requests to the engine."""

    max_tokens = 20

    def __init__(self, engine):
        self.engine = engine
        self.sink = StepLog()
        self._count = 0

    def submit(self, prompt="Why?", *, max_tokens=None, **fields):
        self._count += 1
        max_tokens = self.max_tokens if max_tokens is None else max_tokens
        request = make_request(f"r{self._count}", prompt, max_tokens=max_tokens, **fields)
        self.engine.submit(request, self.sink)
        return request

    def run(self, prompt="Why?", **fields):
        return self.result(self.submit(prompt, **fields))

    def begun(self, prompt="Why?", **fields):
        """Submit a request, and wait for its first step."""
        request = self.submit(prompt, **fields)
        self.sink.wait_for(lambda: self.steps_of(request))
        return request

    def steps_of(self, request):
        return self.sink.steps[request.request_id]

    def result(self, request):
        """Wait for the request's last step, and return all its steps."""
        self.sink.wait(request.request_id)
        return self.steps_of(request)

    def ended(self, request):
        """Return the reasons or errors of its last steps, of which there may be one only."""
        self.sink.wait(request.request_id)
        return [step.finish_reason or step.error for step in self.steps_of(request) if is_last(step)]

    def refused(self, prompt="Why?", **fields):
        """Run a request that gets one step with an error; return that."""
        (step,) = self.run(prompt, **fields)
        assert step.error is not None
        return step.error

    def text(self, prompt="Why?", **fields):
        return self.run(prompt, **fields).text


@contextmanager
def driven(config, kind=EngineDriver):
    """Start the engine of a BackendConfig, and stop it in the end."""
    engine = create_engine(config)
    engine.start()
    try:
        yield kind(engine)
    finally:
        engine.stop()
