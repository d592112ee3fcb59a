"""The simulated engine: it batches, queues and paces tokens as a given deployment would, without a model or a GPU.

It is for load tests, dashboards, autoscaling, probes and faults. Its text is filler text, the same for the same prompt
and seed, with made-up log-probabilities. Real are the contract, the scheduling (`scheduler`) and, with a preset, the
time that an iteration takes (`presets`).
"""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from deepseek_backend.config import BackendConfig
from deepseek_backend.contract import SAMPLING_FIELDS
from deepseek_backend.engines.base import (
    EMBEDDED_FIELDS,
    Capabilities,
    EngineHealth,
    EngineStats,
    Step,
    StepSink,
    group_by_sink,
    require,
)
from deepseek_backend.engines.generate_request import ContextHandover, GenerateRequest, Messages
from deepseek_backend.engines.simulated.filler_text import BOS, FillerTokenizer, Script, dictation, render_chat_form
from deepseek_backend.engines.simulated.kv_transfer import KvTicket, KvTransfers
from deepseek_backend.engines.simulated.scheduler import RankLoad, Scheduler
from deepseek_backend.engines.simulated.simulated_generation import SimulatedGeneration, begin, stamp
from deepseek_backend.engines.simulated.simulated_options import parse_options
from deepseek_backend.errors import ASK_ANOTHER, ContextLostError, EngineError, RequestError, UnavailableError, describe

logger = logging.getLogger(__name__)

NEUTRAL_STEP_S = 0.010
"""Duration of a paced iteration without a preset: 100 tokens a second for each request, whatever the batch."""

_MAX_LAG_S = 1.0
"""Longest stall of this process that a burst of tokens makes up for."""

_NO_LOGITS = "the simulated engine has no logits to apply it to"
_UNSUPPORTED = {
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty", "bad", "logit_bias"), _NO_LOGITS),
    **dict.fromkeys(
        (field.name for field in SAMPLING_FIELDS if field.guided),
        "the simulated engine writes filler text, which follows no form",
    ),
}


class SimulatedEngine:
    """An `Engine` whose own thread owns the scheduler and the open requests, and makes every call to a sink.

    Other threads put functions into the inbox, and the engine's thread runs them between two iterations.
    """

    def __init__(self, config: BackendConfig) -> None:
        self._options = parse_options(config.engine_options)
        self._model = config.model
        self._handover_form = f"simulated {self._model}"
        deployment = self._options.deployment
        self._scheduler = Scheduler(self._options.limits, num_ranks=deployment.num_ranks if deployment else 1)
        timeout_ms = self._options.kv_transfer_timeout_ms
        self._transfers = KvTransfers(self._options.transfer_host, timeout_ms / 1000 if timeout_ms else None)
        self._load_seconds: dict[str, float] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Guards start and stop, and the calls to sinks after the thread has ended. Reentrant: a sink may submit, which
        # is refused at once then.
        self._lock = threading.RLock()
        self._answering = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        # Only the engine's thread writes the following ones; health and stats read them.
        self._open: dict[str, SimulatedGeneration] = {}
        self._held: dict[str, SimulatedGeneration] = {}
        """Ended rows of context_only requests, whose KV blocks wait for a generation engine."""
        self._handover_numbers = itertools.count(1)
        self._failure = ""
        self._crashed = False
        self._generated_tokens = 0
        self._simulated_s = 0.0
        self._late_s = 0.0
        self._due_s: float | None = None
        """End of the current iteration, by time.monotonic(); None while idle."""

    def start(self) -> None:
        """Wait for load_seconds, then start the thread.

        :raises EngineError: with engine_options.fail_load, and after `stop`.
        """
        begun = time.monotonic()
        self._stopping.wait(self._options.load_seconds)
        if self._options.fail_load:
            raise EngineError("the simulated load failed, as engine_options.fail_load asks")
        logger.info("simulating %s: %s", self._model or "a model", self._options)
        with self._lock:
            if self._stopping.is_set():
                raise EngineError("the engine has been stopped, and does not start again: make a new one")
            self._answering = True
            self._thread = threading.Thread(target=self._run, name="simulated-engine", daemon=True)
            self._thread.start()
        self._load_seconds = {"load": time.monotonic() - begun}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            sampling_fields=EMBEDDED_FIELDS,
            max_seq_len=self._options.max_seq_len,
            bos_token=BOS,
            priority=True,
            call_form="raw_json",
            handover_form=self._handover_form,
            simulation={"preset": self._options.preset, "speed": self._options.speed},
            unsupported=_UNSUPPORTED,
        )

    @property
    def tokenizer(self) -> FillerTokenizer:
        return FillerTokenizer()

    @property
    def load_seconds(self) -> Mapping[str, float]:
        return self._load_seconds

    def render_chat(self, messages: Messages, template_kwargs: Mapping[str, Any]) -> str:
        return render_chat_form(messages, template_kwargs)

    def submit(self, request: GenerateRequest, sink: StepSink) -> None:
        """Submit a request. After `stop` the caller's thread delivers the refusal, for the engine has no thread."""
        require(self._thread, "submit before start")
        options = self._options
        command: Callable[[], None]
        try:
            row = begin(
                request,
                sink,
                max_seq_len=options.max_seq_len,
                eos_after=options.eos_after,
                dictated=dictation(request.prompt) if options.text == "dictated" else None,
            )
            command = partial(self._accept, row)
        except RequestError as refusal:
            command = partial(sink.on_steps, [(request, Step(error=refusal))])
        with self._lock:
            if self._answering:
                self._inbox.put(command)
            else:
                error = UnavailableError(f"the engine has stopped{ASK_ANOTHER}")
                sink.on_steps([(request, Step(error=error))])

    def abort(self, request_id: str) -> None:
        if self._answering:  # else it would stay in the inbox for ever
            self._inbox.put(partial(self._cancel, request_id))

    def drop(self, request_id: str) -> None:
        if self._answering:
            self._inbox.put(partial(self._drop, request_id))

    def health(self) -> EngineHealth:
        if self._failure:
            return EngineHealth(alive=False, reason=self._failure)
        if self._thread is None or not self._thread.is_alive():
            return EngineHealth(alive=False, reason="not started" if self._thread is None else "stopped")
        return EngineHealth(alive=True)

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=len(scheduler.waiting),
            kv_blocks_used=scheduler.num_blocks_used,
            kv_blocks_total=scheduler.num_blocks,
            tokens_per_block=scheduler.limits.tokens_per_block,
            num_draft_tokens=scheduler.num_drafted,
            num_accepted_draft_tokens=scheduler.num_accepted,
            extra={
                "iterations": float(scheduler.num_iterations),
                "generated_tokens": float(self._generated_tokens),
                "simulated_s": self._simulated_s,
                "late_s": self._late_s,
                "held_contexts": float(len(self._held)),
            },
        )

    def stop(self) -> None:
        with self._lock:
            self._stopping.set()
        if self._thread is not None:
            self._inbox.put(lambda: None)  # wakes the thread
            self._thread.join()
            # Every open and every incoming request gets its last step, for whatever reason the thread has ended.
            with self._lock:
                self._answering = False
                self._run_inbox()
                if self._failure:
                    self._fail(self._failure)
                else:
                    rows = self._take_all()
                    for ticket in [row.ticket for row in rows if row.ticket is not None and row.rank is None]:
                        self._give_up(ticket)
                    _send([(row, row.cancelled_step(self._scheduler)) for row in rows])
                    self._transfers.close()

    # Everything below runs in the engine's thread.

    def _run(self) -> None:
        while not (self._stopping.is_set() or self._crashed):
            try:
                self._run_inbox()
                if not self._iterate():
                    self._due_s = None
                    # `stop` may have been called since, and what it put into the inbox have been taken.
                    if not self._stopping.is_set():
                        self._inbox.get()()
            except Exception as error:
                logger.exception("the simulated engine failed")
                self._fail(f"the engine failed: {error!r}")

    def _run_inbox(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()

    def _iterate(self) -> bool:
        """Run an iteration; return False where there is nothing to do before something comes into the inbox."""
        if self._scheduler.idle:
            return False
        loads, moved, admitted = self._scheduler.step()
        if admitted:
            now_ns = time.monotonic_ns()
            for row in cast("list[SimulatedGeneration]", admitted):  # the engine adds rows of this class only
                row.scheduled_ns = now_ns
                if row.ticket is not None:
                    seconds = self._options.transfer_seconds(row.num_input_tokens)
                    self._transfers.fetch(row.ticket, seconds, partial(self._post, self._join, row))
        if not loads:
            return False
        self._pass_time(loads)
        rows = cast("list[SimulatedGeneration]", moved)
        self._generated_tokens += sum([row.generated - row.delivered for row in rows])
        text = stamp() if self._options.text == "stamps" else ""
        steps = [(row, row.next_step(self._scheduler, text)) for row in rows]
        ended = [(row, step) for row, step in steps if row.generated == row.length]  # after every step has been made
        for row, step in ended:
            del self._open[row.request.request_id]
            if row.keeps_blocks:
                self._hold(row, step)
        _send(steps)
        if self._generated_tokens >= self._options.fault_after:
            fault = self._options.fault
            what = {"fail": "died", "hang": "hangs", "crash": "crashed"}[fault]
            reason = f"the engine {what} after {self._generated_tokens} tokens, as engine_options.{fault}_after asks"
            logger.error("%s", reason)
            if fault == "fail":
                self._fail(reason)
            elif fault == "hang":
                self._stopping.wait()
            else:
                self._failure, self._crashed = reason, True
                self._transfers.close()
        return True

    def _pass_time(self, loads: Sequence[RankLoad]) -> None:
        """Sleep until the end of the iteration, on a clock of its own, so that late wake-ups never add up."""
        deployment = self._options.deployment
        seconds = deployment.step_seconds(loads) if deployment else NEUTRAL_STEP_S
        self._simulated_s += seconds
        if self._options.paced:
            now = time.monotonic()
            begun = now
            if self._due_s is not None:
                begun = max(self._due_s, now - _MAX_LAG_S)
                self._late_s += begun - self._due_s
            self._due_s = begun + seconds / self._options.speed
            self._stopping.wait(max(0.0, self._due_s - now))

    def _accept(self, row: SimulatedGeneration) -> None:
        if self._failure:
            _send([(row, Step(error=UnavailableError(self._failure), num_input_tokens=row.num_input_tokens))])
        elif row.request.handover is None or self._goes_on(row, row.request.handover):
            self._open[row.request.request_id] = row
            self._scheduler.add(row)

    def _goes_on(self, row: SimulatedGeneration, handover: ContextHandover) -> bool:
        """Send the token that the context server generated, and return whether the row has to generate more."""
        row.generated = 1
        step = row.next_step(self._scheduler, stamp() if self._options.text == "stamps" else "")
        if (tuple(step.token_ids), step.finish_reason == "stop") != (handover.first_gen_tokens, handover.ended):
            row.sink.on_steps([(row.request, Step(error=_OTHER_BEGINNING))])
            return False
        _send([(row, step)])
        if row.length == 1 and row.ticket is not None:
            self._give_up(row.ticket)
        return row.length > 1

    def _hold(self, row: SimulatedGeneration, step: Step) -> None:
        """Put the handover into the last step of a context_only request; an error where nobody could fetch it."""
        script = row.script if isinstance(row.script, Script) else None
        self._held[row.request.request_id] = row
        try:
            ticket = self._transfers.hold(script, partial(self._post, self._free, row))
        except OSError as error:
            self._free(row)
            host = self._options.transfer_host
            step.finish_reason = None
            step.error = EngineError(f"engine_options.transfer_host: can't listen on {host} ({describe(error)})")
        else:
            row.ticket = ticket
            step.handover = row.handover(
                step, form=self._handover_form, ticket=ticket, number=next(self._handover_numbers)
            )

    def _free(self, row: SimulatedGeneration) -> None:
        if self._held.pop(row.request.request_id, None) is not None:
            self._scheduler.free(row)

    def _drop(self, request_id: str) -> None:
        row = self._held.get(request_id)
        if row is not None and row.ticket is not None:
            self._transfers.drop(row.ticket.key)
        self._cancel(request_id)

    def _join(self, row: SimulatedGeneration, error: ContextLostError | None) -> None:
        """Let a row decode whose KV cache has been fetched, unless that failed or it was aborted meanwhile."""
        if self._open.get(row.request.request_id) is not row:
            return
        if error is None:
            self._scheduler.join(row)
            row.first_decode = self._scheduler.num_iterations
        else:
            del self._open[row.request.request_id]
            self._scheduler.remove(row)
            _send([(row, Step(error=error, num_input_tokens=row.num_input_tokens))])

    def _give_up(self, ticket: KvTicket) -> None:
        """Fetch a KV cache that nobody needs, so that the context engine frees it."""

        def log_lost(error: ContextLostError | None) -> None:
            if error is not None:
                logger.info("a KV cache that nobody needs was not freed: %s", error)

        self._transfers.fetch(ticket, 0.0, log_lost)

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        """Have the engine's thread call a function; for the threads of others."""
        self._inbox.put(partial(function, *args))

    def _cancel(self, request_id: str) -> None:
        row = self._open.pop(request_id, None)
        if row is not None:
            if row.ticket is not None and row.rank is None:  # it waits, so that its fetch has not begun
                self._give_up(row.ticket)
            self._scheduler.remove(row)
            _send([(row, row.cancelled_step(self._scheduler))])

    def _fail(self, reason: str) -> None:
        self._failure = reason
        rows = self._take_all()
        _send([(row, Step(error=UnavailableError(reason), num_input_tokens=row.num_input_tokens)) for row in rows])
        self._transfers.close()

    def _take_all(self) -> list[SimulatedGeneration]:
        """Remove all requests from the engine and its scheduler, and return them."""
        rows = list(self._open.values())
        self._open.clear()
        self._held.clear()
        self._scheduler.clear()  # not row by row, because some rows may have ended before an exception
        return rows


def _send(steps: Sequence[tuple[SimulatedGeneration, Step]]) -> None:
    for sink, batch in group_by_sink(steps):
        sink.on_steps(batch)


_OTHER_BEGINNING = RequestError(
    "context_phase_params: expected those of the same request, from a context server with the same eos_after and text; "
    "here the answer begins otherwise"
)
