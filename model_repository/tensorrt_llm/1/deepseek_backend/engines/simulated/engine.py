"""A digital twin: batches, queues and paces tokens as a given deployment would, without a model or a GPU.

For load tests, dashboards, autoscaling and probes. The text is babble, the same for the same prompt and seed. What is
real is the contract, the scheduling (`scheduler`) and, with a preset, the time it takes (`deployment`, `presets`).
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from deepseek_backend.config import BackendConfig
from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines.base import (
    TEXT_LAYER_FIELDS,
    Capabilities,
    EngineHealth,
    EngineStats,
    FinishReason,
    Step,
    StepSink,
    require,
)
from deepseek_backend.engines.simulated.babble import EOS_ID, VOCABULARY, Script, count_tokens, write_script
from deepseek_backend.engines.simulated.options import SimulatedOptions, parse_options
from deepseek_backend.engines.simulated.scheduler import RankLoad, Row, Scheduler
from deepseek_backend.errors import EngineError, RequestError, UnavailableError
from deepseek_backend.request import GenerateRequest, SamplingParams

logger = logging.getLogger(__name__)

NEUTRAL_STEP_S = 0.010
"""An iteration without a preset, paced: 100 tokens a second for each request, whatever the batch."""

_MAX_LAG_S = 1.0  # a longer stall of this process is not made up for by a burst of tokens

_SAMPLING_FIELDS = frozenset(
    {
        "max_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "min_tokens",
        "ignore_eos",
        "stop_token_ids",
        "skip_special_tokens",
        "add_special_tokens",
    }
)
_NO_LOGITS = "the simulator has no logits to apply it to"


@dataclass(slots=True, eq=False, kw_only=True)
class _OpenRequest(Row):
    request: GenerateRequest
    sink: StepSink
    script: Script
    finish_reason: FinishReason
    """At its end, if nothing comes between."""
    stop_reason: int | None = None
    delivered: int = 0


class SimulatedEngine:
    """One thread, the engine's, owns the scheduler and the open requests and makes every call to a sink.

    Other threads put functions for it into the inbox, and it runs them between two iterations.
    """

    def __init__(self, config: BackendConfig) -> None:
        self._options = parse_options(config.engine_options)
        self._model = config.model
        self._scheduler = _make_scheduler(self._options)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards _answering, and the calls to sinks once the thread no longer answers
        self._answering = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        # The rest belongs to the engine's thread; health and stats only read numbers from it.
        self._open: dict[str, _OpenRequest] = {}
        self._failure = ""
        self._generated_tokens = 0
        self._simulated_s = 0.0
        self._due_s: float | None = None  # when the iteration under way ends, by time.monotonic(); None while idle

    def start(self) -> None:
        self._stopping.wait(self._options.load_seconds)
        if self._options.fail_load:
            raise EngineError("the simulated load failed, as engine_options.fail_load asks")
        logger.info("simulating %s: %s", self._model or "a model", self._options)
        self._answering = True
        self._thread = threading.Thread(target=self._run, name="simulated-engine", daemon=True)
        self._thread.start()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            sampling_fields=_SAMPLING_FIELDS | TEXT_LAYER_FIELDS,
            max_seq_len=self._options.max_seq_len,
            unsupported=dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), _NO_LOGITS),
        )

    def submit(self, request: GenerateRequest, sink: StepSink) -> None:
        """After `stop`, the refusal is delivered before this returns, for no thread of the engine is left to do it."""
        require(self._thread, "submit before start")
        command = self._prepare(request, sink)
        with self._lock:
            if self._answering:
                self._inbox.put(command)
            else:
                error = UnavailableError("the engine has stopped: try another replica")
                sink.on_steps([(request, Step(error=error))])

    def abort(self, request_id: str) -> None:
        self._inbox.put(partial(self._cancel, request_id))

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
            extra={
                "iterations": float(scheduler.num_iterations),
                "generated_tokens": float(self._generated_tokens),
                "simulated_s": self._simulated_s,
            },
        )

    def stop(self) -> None:
        self._stopping.set()
        self._inbox.put(_wake)
        if self._thread is not None:
            self._thread.join()

    # In the caller's thread: everything about a request that its prompt decides.

    def _prepare(self, request: GenerateRequest, sink: StepSink) -> Callable[[], None]:
        sampling = request.sampling
        num_input_tokens = count_tokens(request.prompt, add_special_tokens=sampling.add_special_tokens is not False)
        room = self._options.max_seq_len - num_input_tokens
        if room < 1:
            error = _too_long(num_input_tokens, self._options.max_seq_len)
            return partial(sink.on_steps, [(request, Step(error=error, num_input_tokens=num_input_tokens))])
        script = write_script(request.prompt, _seed(sampling))
        max_tokens = min(request.max_tokens, room)
        length, finish_reason, stop_reason = self._ending(request, script, max_tokens)
        row = _OpenRequest(
            num_input_tokens=num_input_tokens,
            max_tokens=max_tokens,
            length=length,
            request=request,
            sink=sink,
            script=script,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
        return partial(self._accept, row)

    def _ending(
        self, request: GenerateRequest, script: Script, max_tokens: int
    ) -> tuple[int, FinishReason, int | None]:
        """How many tokens the request generates, its finish reason and its stop reason."""
        sampling = request.sampling
        least = sampling.min_tokens or 0
        end, stop_reason = max_tokens, None
        finish_reason: FinishReason = "length"
        eos_after = None if sampling.ignore_eos else self._options.eos_after
        if eos_after is not None and max(eos_after, least + 1) <= max_tokens:
            end, finish_reason = max(eos_after, least + 1), "stop"
        if sampling.stop_token_ids:
            found = script.find(frozenset(sampling.stop_token_ids), least, end - (finish_reason == "stop"))
            if found is not None:
                end, finish_reason, stop_reason = found + 1, "stop", script.read(found, found + 1)[0][0]
        return end, finish_reason, stop_reason

    # In the engine's thread.

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._turn()
            except Exception as error:
                logger.exception("the simulated engine failed")
                self._fail(f"the engine failed: {error!r}")
        self._close()

    def _turn(self) -> None:
        if self._scheduler.idle:
            self._due_s = None
            self._inbox.get()()
        self._obey()
        if not self._scheduler.idle:
            self._iterate()

    def _obey(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()

    def _iterate(self) -> None:
        iteration = self._scheduler.step()
        self._pass_time(iteration.loads)
        moved = cast("list[_OpenRequest]", iteration.moved)  # no other rows are ever added
        _send([(row, self._next_step(row)) for row in moved])
        fail_after = self._options.fail_after
        if fail_after is not None and self._generated_tokens >= fail_after:
            self._fail(f"the engine died after {self._generated_tokens} tokens, as engine_options.fail_after asks")

    def _pass_time(self, loads: Sequence[RankLoad]) -> None:
        """Sleep to the end of the iteration on a clock of its own, so that what each sleep oversleeps never adds up."""
        deployment = self._options.deployment
        seconds = deployment.step_seconds(loads) if deployment else NEUTRAL_STEP_S
        self._simulated_s += seconds
        if self._options.paced:
            now = time.monotonic()
            begun = now if self._due_s is None else max(self._due_s, now - _MAX_LAG_S)
            self._due_s = begun + seconds / self._options.speed
            self._stopping.wait(max(0.0, self._due_s - now))

    def _next_step(self, row: _OpenRequest) -> Step:
        first, end = row.delivered, row.generated
        row.delivered = end
        self._generated_tokens += end - first
        if end == row.length:
            del self._open[row.request.request_id]
            return _last_step(row, first)
        token_ids, text = row.script.read(first, end)
        return Step(text, token_ids, None, None, row.num_input_tokens)

    def _accept(self, row: _OpenRequest) -> None:
        if self._failure:
            _send([(row, Step(error=UnavailableError(self._failure), num_input_tokens=row.num_input_tokens))])
        else:
            self._open[row.request.request_id] = row
            self._scheduler.add(row)

    def _cancel(self, request_id: str) -> None:
        row = self._open.pop(request_id, None)
        if row is not None:
            self._scheduler.remove(row)
            _send([(row, Step(finish_reason="cancelled", num_input_tokens=row.num_input_tokens))])

    def _fail(self, reason: str) -> None:
        self._failure = reason
        rows = self._take_all()
        _send([(row, Step(error=UnavailableError(reason), num_input_tokens=row.num_input_tokens)) for row in rows])

    def _close(self) -> None:
        """Cancel what is open and what still comes in, until nothing can come any more."""
        while self._answering:
            self._obey()
            rows = self._take_all()
            _send([(row, Step(finish_reason="cancelled", num_input_tokens=row.num_input_tokens)) for row in rows])
            with self._lock:
                self._answering = not self._inbox.empty()

    def _take_all(self) -> list[_OpenRequest]:
        """The open requests, no longer open nor scheduled."""
        rows = list(self._open.values())
        self._open.clear()
        for row in rows:
            self._scheduler.remove(row)
        return rows


def _make_scheduler(options: SimulatedOptions) -> Scheduler:
    return Scheduler(options.limits, num_ranks=options.deployment.num_ranks if options.deployment else 1)


def _too_long(num_input_tokens: int, max_seq_len: int) -> RequestError:
    return RequestError(
        f"the prompt has {num_input_tokens} tokens, expected at most {max_seq_len - 1} (max_seq_len {max_seq_len} "
        "less one to generate): shorten the prompt, or serve with a larger max_seq_len",
        code=ErrorCode.PROMPT_TOO_LONG,
    )


def _seed(sampling: SamplingParams) -> int | None:
    """What the text depends on beside the prompt; None for greedy decoding."""
    if sampling.greedy:
        return None
    return sampling.seed if sampling.seed is not None else random.getrandbits(64)


def _last_step(row: _OpenRequest, first: int) -> Step:
    """The step with the tokens from `first` to the end; the token that stops a request is counted and seldom shown."""
    token_ids, text = row.script.read(first, row.length)
    if row.finish_reason == "stop":
        sampling = row.request.sampling
        if row.stop_reason is None:
            stop_id, shown = EOS_ID, sampling.skip_special_tokens is False
        else:
            stop_id, shown = row.stop_reason, bool(sampling.include_stop_str_in_output)
        token_ids = (*token_ids[:-1], stop_id)
        text = row.script.read(first, row.length - 1)[1] + (VOCABULARY[stop_id] if shown else "")
    return Step(text, token_ids, row.finish_reason, row.stop_reason, row.num_input_tokens)


def _send(steps: Sequence[tuple[_OpenRequest, Step]]) -> None:
    """One call for each sink."""
    batches: dict[int, tuple[StepSink, list[tuple[GenerateRequest, Step]]]] = {}
    sink: StepSink | None = None
    for row, step in steps:
        if row.sink is not sink:
            sink = row.sink
            batch = batches.setdefault(id(sink), (sink, []))[1]
        batch.append((row.request, step))
    for sink, batch in batches.values():
        sink.on_steps(batch)


def _wake() -> None:
    """Ends the wait for a command."""
