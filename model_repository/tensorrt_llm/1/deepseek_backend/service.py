"""The backend without Triton: requests in, engine behind, responses out.

`model.py` wraps it in Triton's life cycle; tests drive it with a list for a reply and any engine.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from deepseek_backend.answer.active_request import ActiveRequest, Reply, StepEffect
from deepseek_backend.config import BackendConfig
from deepseek_backend.contract import REQUEST_FIELDS, SAMPLING_BY_NAME, SAMPLING_FIELDS
from deepseek_backend.delivery.sender import Sender
from deepseek_backend.delivery.step_queue import StepQueue
from deepseek_backend.engine_warmup import warm_up
from deepseek_backend.engines.base import Engine, EngineHealth, EngineStats, Step
from deepseek_backend.engines.generate_request import GenerateRequest
from deepseek_backend.errors import (
    BackendError,
    CancelledError,
    ConfigError,
    EngineError,
    RequestError,
    UnavailableError,
    one_line,
)
from deepseek_backend.field_values import shown
from deepseek_backend.metrics.backend_metrics import BackendMetrics
from deepseek_backend.process.readiness import readiness
from deepseek_backend.process.watcher import ServerAbove, Watcher
from deepseek_backend.request.admission import Admission
from deepseek_backend.request.expansion import expand
from deepseek_backend.request.parsed_request import ParsedRequest
from deepseek_backend.request.parsing import contradictions, parse_call

logger = logging.getLogger(__name__)


class Service:
    """Owns the open exchanges. `accept` belongs to Triton's thread, `on_steps` to the engine's."""

    def __init__(
        self,
        config: BackendConfig,
        engine: Engine,
        *,
        metrics: BackendMetrics | None = None,
        server: ServerAbove | None = None,
    ) -> None:
        self.config = config
        self._engine = engine
        self._metrics = metrics or BackendMetrics()
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[ActiveRequest, None] = {}
        """From acceptance to the final response, in order of arrival. Guarded by _lock."""
        self._draining = ""
        """Why nothing is accepted any more."""
        self._last_token_s = time.monotonic()
        """Or when the first request came that waits for one."""
        self._starved = False
        """Since _last_token_s requests have waited for a token, and none has come."""
        self._was_ready = True
        self._warmup_drafts = (0, 0)
        """Proposed and accepted for the warm-up's requests: no user's."""
        self._supported: dict[str, str] = {}
        self._admission = Admission(max_inflight=config.max_inflight, max_inflight_tokens=config.max_inflight_tokens)
        self._intake = StepQueue(self._take_step, self._refuse)
        self.sender = Sender(self._intake, on_closed=self._forget, on_broken=self._give_up)
        self._server = server or ServerAbove()
        self.watcher = Watcher(self, self._server)

    def start(self) -> None:
        """Load the engine and begin to serve; raises what `load` raises."""
        self.load()
        self.sender.start()
        self.watcher.start()

    def load(self) -> None:
        """Load the engine and warm it up. Requests are taken from now on and answered once the threads run.

        :raises EngineError: when the engine can't be loaded, or does not survive its first requests or hangs.
        :raises ConfigError: when the engine can't do what the configuration asks for.
        """
        try:
            self._engine.start()
            self._supported = _supported_fields(self._engine)
            self._check_defaults()
            warming_s = self._warm_up()
        except BaseException:
            self._engine.stop()
            raise
        unsupported = {name: why for name, why in self._supported.items() if why}
        for name, why in unsupported.items():
            logger.warning("requests that ask for %s are refused: %s", name, why)
        self._metrics.loaded({**self._engine.load_seconds, **warming_s}, unsupported)

    @property
    def num_open(self) -> int:
        """Requests whose final response has not been sent."""
        return len(self._open)

    @property
    def inflight(self) -> tuple[int, int]:
        """Sequences that admission counts as in flight, and their tokens."""
        return self._admission.inflight, self._admission.inflight_tokens

    @property
    def draining(self) -> bool:
        return bool(self._draining)

    def engine_health(self) -> EngineHealth:
        return self._engine.health()

    def readiness(self) -> EngineHealth:
        """Whether requests should be sent here, and why not."""
        return readiness(
            self._engine.health(),
            draining=self.draining,
            num_open=self.num_open,
            idle_s=time.monotonic() - self._last_token_s,
            hang_s=self.config.hang_s,
        )

    def is_ready(self) -> bool:
        return self.readiness().alive

    def accept(
        self,
        inputs: Mapping[str, npt.NDArray[Any]],
        parameters: str,
        reply: Reply,
        *,
        client_id: str = "",
        timeout_us: int = 0,
    ) -> None:
        """Take one request. Everything about it, errors too, is answered through `reply`.

        `timeout_us` is the request timeout of Triton's own protocol; 0 is none.
        """
        exchange = self._take_in(reply, client_id)
        try:
            call = parse_call(inputs, parameters, self.config, self._supported)
            if call.stop:
                exchange.begin(call, ())
                self._stop_by_client_id(exchange)
                return
            if self._draining:
                raise UnavailableError(self._draining)
            self._submit(exchange, call, timeout_us)
        except BackendError as error:
            self._refuse(exchange, error)
        except Exception as error:
            logger.exception("request %r", client_id)
            self._refuse(exchange, EngineError(one_line(error)))

    def refuse(self, reply: Reply, error: RequestError) -> None:
        """Answer a request that could not even be read."""
        self._refuse(self._take_in(reply, ""), error)

    def on_steps(self, steps: Sequence[tuple[GenerateRequest, Step]]) -> None:
        """Take the steps of one engine iteration (the engine's sink)."""
        if any(step.token_ids for _, step in steps):
            self._last_token_s, self._starved = time.monotonic(), False
        self._intake.put(steps)
        if self._intake.is_full:
            self.sender.notify(self._intake.collect())
        else:
            self.sender.wake()
            if self._intake.is_behind:
                time.sleep(_YIELD_S)

    def _take_step(self, exchange: ActiveRequest, index: int, step: Step, now: float) -> bool:
        """True when there may be something to send."""
        effect = exchange.add(index, step, now)
        if step.token_ids:
            self._count_tokens(exchange, index, len(step.token_ids), now)
        if effect is StepEffect.NOTHING:
            return False
        if effect is not StepEffect.SEND:
            self._metrics.aborted("stop_string")
            self._engine.abort(exchange.requests[index].request_id)
        elif step.error is not None and len(exchange.requests) > 1:
            self._abort(exchange, "error")
        return effect is not StepEffect.ABORT

    def end_all(self, *, cause: str, error: BackendError | None = None) -> None:
        """End every open request: with the error, or with the text so far."""
        for exchange in self.snapshot():
            self.end_early(exchange, cause=cause, error=error)

    def end_early(
        self, exchange: ActiveRequest, *, cause: str, error: BackendError | None = None, timed_out: bool = False
    ) -> None:
        """End a request before the engine does: with the error, or with the text so far."""
        self.sender.notify(self._intake.collect(wait=True))
        self._intake.settle(exchange)
        ended = exchange.end(finish_reason="timeout" if timed_out else "cancelled", error=error)
        if ended:
            self._abort(exchange, cause)
        self.sender.notify(
            [exchange]
        )  # also of what the engine had ended: this thread may have been the one to take it

    def drain(self, reason: str) -> None:
        """Refuse what comes from now on."""
        self._draining = self._draining or reason

    def publish_state(self) -> None:
        """Hand the gauges to the metrics, and say so when the readiness has changed."""
        inflight, inflight_tokens = self.inflight
        readiness = self.readiness()
        if readiness.alive != self._was_ready:
            self._was_ready = readiness.alive
            logger.warning("ready again" if readiness.alive else f"not ready: {readiness.reason}")
        self._metrics.observe_state(
            inflight=inflight,
            inflight_tokens=inflight_tokens,
            idle_s=time.monotonic() - self._last_token_s,
            ready=readiness.alive,
            stats=self._user_stats(),
        )

    def _user_stats(self) -> EngineStats:
        stats, (proposed, accepted) = self._engine.stats(), self._warmup_drafts
        return replace(
            stats,
            num_draft_tokens=max(0, stats.num_draft_tokens - proposed),
            num_accepted_draft_tokens=max(0, stats.num_accepted_draft_tokens - accepted),
        )

    def stop(self) -> None:
        """Refuse what comes, let go of what is open, stop the engine.

        Triton asks for it when nothing is in flight any more. What is open here all the same is a request whose client
        has gone unnoticed so far: a response to it now makes the server hang.
        """
        self.drain(STOPPING)
        for exchange in self.snapshot():
            exchange.abandon()
            self._give_up(exchange)
        self.watcher.stop()
        self.stop_engine()
        self.sender.stop()

    def stop_engine(self) -> None:
        """Release the engine; the second time there is nothing to do."""
        self._engine.stop()

    def snapshot(self) -> list[ActiveRequest]:
        """The open exchanges, oldest first."""
        with self._lock:
            return list(self._open)

    def client_has_gone(self, exchange: ActiveRequest) -> None:
        """The watcher's word."""
        self.end_early(exchange, cause="client_gone", error=CancelledError("the client has gone"))

    def _take_in(self, reply: Reply, client_id: str) -> ActiveRequest:
        now = time.monotonic()
        exchange = ActiveRequest(reply, client_id=client_id, arrived_s=now)
        with self._lock:
            if not self._open and not self._starved:
                self._last_token_s, self._starved = now, True
            self._open[exchange] = None
        return exchange

    def _submit(self, exchange: ActiveRequest, call: ParsedRequest, timeout_us: int) -> None:
        requests = expand(call, self._engine, self._ids)
        exchange.admitted = self._admission.admit(requests)
        if not exchange.begin(call, requests):  # the server is exiting and has ended everything
            exchange.admitted.release()
            return
        self._metrics.accepted(len(requests))
        exchange.deadline_s = _deadline_s(exchange.arrived_s, call.timeout_ms, timeout_us or call.timeout_us)
        with self._lock:
            if exchange in self._open:
                self._intake.expect(exchange)
        for request in requests:
            if exchange.ended:
                break
            self._engine.submit(request, self)
        if exchange.ended:  # while it was being submitted; an abort may have come before the engine knew it
            self._tell_engine(exchange)

    def _stop_by_client_id(self, stopper: ActiveRequest) -> None:
        """End every running request that has the stopper's id, then answer the stopper, with no text."""
        if not stopper.client_id:
            raise RequestError('stop: expected the id of the request to end as this request\'s "id", got none')
        running = [e for e in self.snapshot() if e.client_id == stopper.client_id and e.requests and not e.ended]
        if not running:
            raise RequestError(f"stop: no running request has the id {shown(stopper.client_id)}")
        for exchange in running:
            self.end_early(exchange, cause="stop")
        stopper.end(finish_reason="stop")
        self.sender.notify([stopper])

    def _count_tokens(self, exchange: ActiveRequest, index: int, num_tokens: int, now: float) -> None:
        sequence = exchange.sequences[index]
        before, sequence.last_token_s = sequence.last_token_s, now
        self._metrics.tokens(num_tokens, None if before is None else now - before)
        if not exchange.has_tokens:
            with self._lock:  # of several sequences one has the first
                is_first, exchange.has_tokens = not exchange.has_tokens, True
            if is_first:
                self._metrics.first_token(now - exchange.arrived_s)

    def _warm_up(self) -> dict[str, float]:
        """As phases of the load."""
        config = self.config
        if config.warmup is None:
            return {}
        seconds = warm_up(
            self._engine,
            config.warmup,
            default_sampling=config.default_sampling,
            is_exiting=self._server.is_exiting,
            hang_s=config.hang_s,
        )
        stats = self._engine.stats()
        self._warmup_drafts = stats.num_draft_tokens, stats.num_accepted_draft_tokens
        return {"warmup": seconds}

    def _check_defaults(self) -> None:
        """:raises ConfigError: for a default that the engine would not honour."""
        defaults = self.config.default_sampling
        problems = [
            f"triton_config.default_sampling.{name}: {self._supported[name]}"
            for name, value in defaults.items()
            if self._supported[name] and value != SAMPLING_BY_NAME[name].neutral
        ]
        together = contradictions(defaults, self.config.default_max_tokens)
        problems += [f"triton_config.default_sampling: {problem}" for problem in together]
        if problems:
            raise ConfigError(problems)

    def _refuse(self, exchange: ActiveRequest, error: BackendError) -> None:
        """Answer with the error what has not reached the engine, or not all of it."""
        if exchange.end(error=error):
            self._abort(exchange, "error")
        else:  # something else ended it meanwhile, and the engine may have got the rest of it since
            self._tell_engine(exchange)
        self.sender.notify([exchange])

    def _abort(self, exchange: ActiveRequest, cause: str) -> None:
        if exchange.requests:
            self._metrics.aborted(cause)
            self._tell_engine(exchange)

    def _tell_engine(self, exchange: ActiveRequest) -> None:
        for request in exchange.requests:
            self._engine.abort(request.request_id)

    def _give_up(self, exchange: ActiveRequest) -> None:
        self._tell_engine(exchange)
        if exchange.closed:
            self._forget(exchange)

    def _forget(self, exchange: ActiveRequest) -> None:
        with self._lock:
            if exchange not in self._open:
                return
            del self._open[exchange]
            self._intake.forget(exchange)
            # A run of requests that all time out without a token is one long wait; any other end is no sign of a hang.
            if not self._open and not (exchange.outcome == "timeout" and not exchange.has_tokens):
                self._starved = False
        if exchange.admitted is not None:
            exchange.admitted.release()
        self._count_ended(exchange)

    def _count_ended(self, exchange: ActiveRequest) -> None:
        if not exchange.requests:
            if exchange.error is not None:
                self._metrics.refused(exchange.error.code)
            return
        self._metrics.ended(
            exchange.outcome,
            time.monotonic() - exchange.arrived_s,
            num_input_tokens=sum(sequence.num_input_tokens for sequence in exchange.sequences),
            num_output_tokens=sum(sequence.num_output_tokens for sequence in exchange.sequences),
            num_cached_tokens=sum(sequence.num_cached_tokens for sequence in exchange.sequences),
        )


_YIELD_S = 1e-6
"""About 60 microseconds in truth, the kernel's least. A sleep of 0 would be over before another thread is awake."""
STOPPING = "the model is being stopped; send the request to another server"


def _deadline_s(arrived_s: float, timeout_ms: int | None, timeout_us: int) -> float | None:
    """The sooner of the two timeouts, by time.monotonic()."""
    given = [timeout_ms / 1e3] if timeout_ms is not None else []
    given += [timeout_us / 1e6] if timeout_us > 0 else []
    return arrived_s + min(given) if given else None


def _supported_fields(engine: Engine) -> dict[str, str]:
    """Sampling field, and priority -> "" where the engine honours it, else why not."""
    capabilities = engine.capabilities
    honoured = set(capabilities.sampling_fields)
    if "logprobs" in honoured:
        honoured.add("best_of")
    if capabilities.priority:
        honoured.add("priority")
    names = [field.name for field in SAMPLING_FIELDS] + [f.name for f in REQUEST_FIELDS if f.name == "priority"]
    reasons = dict.fromkeys(names, "not supported by this engine")
    reasons["best_of"] = "needs logprobs to choose by, which this engine does not have here"
    reasons |= capabilities.unsupported
    return {name: "" if name in honoured else reasons[name] for name in names}
