"""The backend without Triton: requests in, engine behind, responses out.

    accept ─> parse, expand, admit ─> engine.submit        Triton's thread
    on_steps ─> Delivery: take, queue, send ─> reply       the engine's thread, then delivery's

`model.py` wraps it in Triton's life cycle; tests drive it with a list for a reply and any engine.
"""

import itertools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from deepseek_backend.active_request import ActiveRequest, Reply
from deepseek_backend.admission import Admission, expand, prompt_tokens, text_of_ids
from deepseek_backend.answer_format import check_defaults, model_info, model_type, served_name, supported_fields
from deepseek_backend.backend_metrics import BackendMetrics
from deepseek_backend.chat_rendering import FORMS, ChatRenderer, find_chat_facts
from deepseek_backend.config import BackendConfig
from deepseek_backend.delivery import Delivery
from deepseek_backend.engine_warmup import warm_up
from deepseek_backend.engines.base import Engine, EngineHealth, FinishReason, Step
from deepseek_backend.engines.generate_request import GenerateRequest
from deepseek_backend.engines.tags import BEGINNINGS, CLOSING
from deepseek_backend.errors import (
    ASK_ANOTHER,
    BackendError,
    CancelledError,
    EngineError,
    RequestError,
    UnavailableError,
    describe,
)
from deepseek_backend.field_values import quoted
from deepseek_backend.parsing import ParsedRequest, parse_request
from deepseek_backend.sequence_buffer import task_outputs
from deepseek_backend.v4_prompt import v4_form
from deepseek_backend.watcher import ServerAbove, TokenClock, Watcher, readiness

logger = logging.getLogger(__name__)

STOPPED = "request cancelled by client: no request with this id is running any more"
STOPPING = f"the model is being stopped{ASK_ANOTHER}"


class Service:
    """Owns the open requests: accepts them, gives them to the engine and sees that each one ends.

    Threads: `accept` and `refuse` belong to Triton's thread, `on_steps` to the engine's, `end_early`, `end_all` and
    `drain` to the watcher's; `abort`, `fail` and `closed` are what delivery reports, from any thread. `_lock` guards
    `_open` and is never held while anything else is called but the token clock.
    """

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
        """Requests from acceptance to the final response, in order of arrival."""
        self.draining = ""
        """The reason why no request is accepted any more; empty while requests are."""
        self._token_clock = TokenClock()
        self._was_ready = True
        self._warmup_drafts = (0, 0)
        """Draft tokens proposed and accepted for the warm-up's requests, which are not a user's."""
        self._supported: dict[str, str] = {}
        """Field -> the reason why it is refused, or "". Set by `load`."""
        self._chat: ChatRenderer
        """Set by `load`, like the next one."""
        self._reasoning_ends: Mapping[int, int] = {}
        """Token id -> 1 for the tag that closes the reasoning, 0 for those that begin calls of tools."""
        self._task_thread = ThreadPoolExecutor(1, thread_name_prefix="task")
        """Answers the requests that generate nothing."""
        self._admission = Admission(max_inflight=config.max_inflight, max_inflight_tokens=config.max_inflight_tokens)
        self.delivery = Delivery(self, self._metrics)
        self._server = server or ServerAbove()
        self.watcher = Watcher(self, engine, self._server)

    def start(self) -> None:
        """Load the engine and begin to serve; raises what `load` raises."""
        self.load()
        self.delivery.start()
        self.watcher.start()

    def load(self) -> None:
        """Load the engine and warm it up. Requests are taken from now on and answered once the threads run.

        :raises EngineError: when the engine can't be loaded, or does not survive its first requests or hangs.
        :raises ConfigError: when the engine can't do what the configuration asks for.
        """
        try:
            self._engine.start()
            self._supported = supported_fields(self._engine.capabilities)
            self._learn_chat()
            check_defaults(self.config, self._supported)
            load_seconds = dict(self._engine.load_seconds)
            if self.config.warmup is not None:
                load_seconds["warmup"] = warm_up(
                    self._engine,
                    self.config.warmup,
                    default_sampling=self.config.default_sampling,
                    is_exiting=self._server.is_exiting,
                    hang_s=self.config.hang_s,
                )
                stats = self._engine.stats()
                self._warmup_drafts = stats.num_draft_tokens, stats.num_accepted_draft_tokens
        except BaseException:
            self._engine.stop()
            raise
        unsupported = {name: why for name, why in self._supported.items() if why}
        for name, why in unsupported.items():
            logger.warning("requests that ask for %s are refused: %s", name, why)
        self._metrics.loaded(load_seconds, unsupported)

    def _learn_chat(self) -> None:
        """Find out how the loaded checkpoint writes conversations."""
        engine, tokenizer = self._engine, self._engine.tokenizer
        form = FORMS.get(engine.capabilities.call_form)
        kind = model_type(self.config)
        v4 = v4_form(kind, served_name(self.config.model), self.config.chat_encoding)
        facts = find_chat_facts(engine, is_v32=kind == "deepseek_v32", form=form, v4=v4)
        eos_token, template = tokenizer.special_tokens.get("eos_token", ""), tokenizer.chat_template
        self._chat = ChatRenderer(engine, facts, eos_token=eos_token, template=template)
        ends = {tag: tokenizer.encode(tag, False) for tag in (CLOSING, *BEGINNINGS)}
        self._reasoning_ends = {ids[0]: int(tag == CLOSING) for tag, ids in ends.items() if len(ids) == 1}

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
        active = self._open_request(reply, client_id)
        names: Mapping[str, str] = {}
        try:
            parsed = parse_request(inputs, parameters, self.config, self._supported)
            names = parsed.names
            if parsed.stop:
                active.begin(parsed)
                self._stop_by_client_id(active)
                return
            if self.draining:
                raise UnavailableError(self.draining)
            if parsed.task != "generate":
                active.begin(parsed)
                self._task_thread.submit(self._answer_task, active)
                return
            self._submit(active, parsed, timeout_us)
        except RequestError as error:
            self.fail(active, error.named(names))
        except BackendError as error:
            self.fail(active, error)
        except Exception as error:
            logger.exception("request %r", client_id)
            self.fail(active, EngineError(describe(error)))

    def refuse(self, reply: Reply, error: RequestError) -> None:
        """Answer a request that could not even be read."""
        self.fail(self._open_request(reply, ""), error)

    def _open_request(self, reply: Reply, client_id: str) -> ActiveRequest:
        active = ActiveRequest(reply, client_id=client_id, arrived_s=time.monotonic())
        with self._lock:
            if not self._open:
                self._token_clock.request_came()
            self._open[active] = None
        return active

    def _submit(self, active: ActiveRequest, parsed: ParsedRequest, timeout_us: int) -> None:
        timeout_us = timeout_us or parsed.timeout_us
        timeouts_s = [parsed.timeout_ms / 1e3] if parsed.timeout_ms is not None else []
        timeouts_s += [timeout_us / 1e6] if timeout_us > 0 else []
        deadline_s = active.arrived_s + min(timeouts_s) if timeouts_s else None
        # Steps are dear, and an answer sent at once needs them only where a stop string may end it.
        wants_steps = parsed.streaming or bool(parsed.sampling.stop) or not self._engine.capabilities.whole_answers
        wants_steps |= parsed.is_shared
        requests = expand(parsed, self._engine, self._chat, self._ids, wants_steps=wants_steps)
        admitted = self._admission.admit(requests)
        if active.begin(
            parsed, requests, admitted=admitted, deadline_s=deadline_s, reasoning_ends=self._reasoning_ends
        ):
            self._metrics.accepted(len(requests))
            self.delivery.put_request(active)
        else:
            admitted.release()  # the server is exiting and has ended everything
        for request in requests:
            if active.ended and request.handover is None:  # one with a handover has a KV cache to fetch all the same
                break
            self._engine.submit(request, self)
        # While it was being submitted: an abort may have come before the engine knew the request.
        if active.ended or active.abort_reason is not None:
            self._abort_in_engine(requests)
        if active.closed:
            self._drop_context(active)

    def _answer_task(self, active: ActiveRequest) -> None:
        """Answer a request that generates nothing. It runs in a thread of its own: a long text takes a second."""
        parsed = active.parsed
        try:
            if parsed.task == "describe":
                info = model_info(
                    self.config, self._engine.capabilities, self._engine.tokenizer, self._chat.facts, self._supported
                )
                response = task_outputs(model_info=[info.encode()])
            elif parsed.task == "tokenize":
                prompts = prompt_tokens(parsed, self._engine, self._chat)
                response = task_outputs(
                    output_ids=[token_id for prompt in prompts for token_id in prompt],
                    num_input_tokens=[len(prompt) for prompt in prompts],
                )
            else:
                response = task_outputs(text_output=[text_of_ids(parsed, self._engine).encode()])
        except BackendError as error:
            self.fail(active, error)
        except Exception as error:
            # A tokenizer may raise anything.
            logger.exception("request %r", active.client_id)
            self.fail(active, EngineError(describe(error)))
        else:
            active.end_with(response)
            self.delivery.put_request(active)

    def _stop_by_client_id(self, stopper: ActiveRequest) -> None:
        """End every running request that has the stopper's id, then answer the stopper.

        TensorRT-LLM's llmapi model answers CANCELLED whether or not there was such a request, and its client expects
        that. Who asks for the finish reason is told what happened.
        """
        if not stopper.client_id:
            raise RequestError('stop: expected the id of the request to end as this request\'s "id", got none')
        running = [
            active
            for active in self.snapshot()
            if active.client_id == stopper.client_id and active.requests and not active.ended
        ]
        for active in running:
            self.end_early(active, cause="stop")
        if "finish_reason" not in stopper.parsed.returned:
            raise CancelledError(STOPPED)
        if not running:
            raise RequestError(f"stop: no running request has the id {quoted(stopper.client_id)}")
        stopper.end(finish_reason="stop")
        self.delivery.put_request(stopper)

    def on_steps(self, steps: Sequence[tuple[GenerateRequest, Step]]) -> None:
        """Take the steps of one engine iteration (the engine's sink)."""
        if any(step.token_ids for _, step in steps):
            self._token_clock.token_came()
        self.delivery.put_steps(steps)

    def abort(self, requests: Sequence[GenerateRequest], *, cause: str) -> None:
        """Have the engine end `requests`, all or some of one active request's, and count that by its cause."""
        if requests:
            self._metrics.aborted(cause)
            self._abort_in_engine(requests)

    def fail(self, active: ActiveRequest, error: BackendError) -> None:
        """Answer with the error, and have the engine end what it has of the request."""
        if active.end(error=error):
            self.abort(active.requests, cause="error")
        else:  # something else ended it meanwhile, and the engine may have got the rest of it since
            self._abort_in_engine(active.requests)
        self.delivery.put_request(active)

    def closed(self, active: ActiveRequest) -> None:
        """Let go of a request that is over; the second time there is nothing to do."""
        with self._lock:
            if active not in self._open:
                return
            del self._open[active]
            # A run of requests that all time out without a token is one long wait; any other end is no sign of a hang.
            if not self._open and (active.outcome != "timeout" or active.has_tokens):
                self._token_clock.wait_is_over()
        self._drop_context(active)
        if active.requests:
            self._metrics.ended(
                active.outcome,
                time.monotonic() - active.arrived_s,
                num_input_tokens=sum(sequence.num_input_tokens for sequence in active.sequences),
                num_output_tokens=sum(sequence.num_output_tokens for sequence in active.sequences),
                num_cached_tokens=sum(sequence.num_cached_tokens or 0 for sequence in active.sequences),
            )
        elif active.error is not None and not active.parsed.stop:  # a stop request is answered by an error
            self._metrics.refused(active.error.code)

    def end_all(self, *, cause: str, error: BackendError | None = None) -> None:
        """End every open request: with the error, or with the text so far."""
        for active in self.snapshot():
            self.end_early(active, cause=cause, error=error)

    def end_early(
        self, active: ActiveRequest, *, cause: str, error: BackendError | None = None, timed_out: bool = False
    ) -> None:
        """End a request before the engine does: with the error, or with the text so far.

        Where the engine keeps the text so far, its last step ends the request.
        """
        self.delivery.flush(active)
        reason: FinishReason = "timeout" if timed_out else "cancelled"
        if error is None and active.has_text_in_engine:
            if active.mark_aborted(reason):
                self.abort(active.requests, cause=cause)
        elif active.end(finish_reason=reason, error=error):
            self.abort(active.requests, cause=cause)
        self.delivery.put_request(active)  # also where flush took the engine's own end: nobody else may have queued it

    def drain(self, reason: str) -> None:
        """Refuse every request that comes from now on."""
        self.draining = self.draining or reason

    def stop(self) -> None:
        """Refuse what comes, let go of what is open, stop the engine.

        Triton asks for it when no request is in flight any more. A request that is still open here is one whose client
        has gone unnoticed so far: a response to it now makes the server hang.
        """
        self.drain(STOPPING)
        for active in self.snapshot():
            active.abandon()
            self._abort_in_engine(active.requests)
            self.delivery.put_request(active)
        self._task_thread.shutdown(cancel_futures=True)
        self.watcher.stop()
        self._engine.stop()
        self.delivery.stop()

    def _abort_in_engine(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            self._engine.abort(request.request_id)

    def _drop_context(self, active: ActiveRequest) -> None:
        """Free the KV cache of a context_only request that is over, unless the client got what leads to it."""
        for request in active.requests:
            if request.request_type == "context_only" and not active.has_handed_over:
                self._engine.drop(request.request_id)

    @property
    def num_open(self) -> int:
        """Requests whose final response has not been sent."""
        return len(self._open)

    @property
    def inflight(self) -> tuple[int, int]:
        """Sequences that admission counts as in flight, and their tokens."""
        return self._admission.inflight, self._admission.inflight_tokens

    def snapshot(self) -> list[ActiveRequest]:
        """The open requests, oldest first."""
        with self._lock:
            return list(self._open)

    def readiness(self) -> EngineHealth:
        """Whether requests should be sent here, and why not."""
        health = self._engine.health()
        return readiness(
            health,
            draining=bool(self.draining),
            num_open=self.num_open,
            idle_s=self._idle_s(health),
            hang_s=self.config.hang_s,
        )

    def _idle_s(self, health: EngineHealth) -> float:
        """Seconds since the engine made a token, as far as its steps and its health tell."""
        return min(self._token_clock.idle_s, time.monotonic() - health.worked_at_s)

    def publish_state(self) -> None:
        """Hand the gauges to the metrics, and log a change of the readiness."""
        inflight, inflight_tokens = self.inflight
        stats, (proposed, accepted) = self._engine.stats(), self._warmup_drafts
        readiness = self.readiness()
        if readiness.alive != self._was_ready:
            self._was_ready = readiness.alive
            level = logging.INFO if self.draining else logging.WARNING  # an ordinary stop is no reason to look
            logger.log(level, "ready again" if readiness.alive else f"not ready: {readiness.reason}")
        self._metrics.observe_state(
            inflight=inflight,
            inflight_tokens=inflight_tokens,
            idle_s=self._idle_s(self._engine.health()),
            ready=readiness.alive,
            stats=replace(
                stats,
                num_draft_tokens=max(0, stats.num_draft_tokens - proposed),
                num_accepted_draft_tokens=max(0, stats.num_accepted_draft_tokens - accepted),
            ),
        )
