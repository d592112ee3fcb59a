"""One server of a fleet: whether it is well, what it has to do, and the checks that tell."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal
from uuid import uuid4

import msgspec

from deepseek_triton_tools.gateway.shared_generation import Role
from deepseek_triton_tools.gateway.triton_call import Call, Load, UpstreamError, error_of_status
from deepseek_triton_tools.gateway.triton_server import TritonServer, within

CHECK_PERIOD_S = 2.0
"""Between two checks of a server that is up. The backend publishes its load once a second."""
_FIRST_PAUSE_S = 0.25
"""Before the first check after a failure; each further failure doubles it."""
_LONGEST_PAUSE_S = 5.0
# Checks of many gateways must not come in step.
_JITTER = 0.2
# Its own generator: a program that seeds the module's would find it advanced by another thread.
_rng = random.Random()
_ANSWER_S = 5.0
"""For the answer to one check."""
_SILENT_CHECKS = 3
"""After so many checks without any answer, one after the other, in which no request had an answer either, the server
counts as frozen."""
_NO_METRICS_PAUSE_S = 30.0
"""Until a server is asked for its metrics again after it did not give them."""
_NO_METRICS = "%s: its metrics can't be read, so a dead engine and the work of others may go unseen: %s"
_NAMED = "#metrics=PORT behind its address names its own; 8002 is assumed only beside 8000 and 8001"
_CANARY_PERIOD_S = 30.0
"""Between two canaries of a server that shares requests."""
# For a canary's token, while no request gets any either. An engine that waits for KV caches which never come, or for
# others to fetch those that it has, is stuck and says that it is ready (NVIDIA/TensorRT-LLM#13713).
_CANARY_S = 30.0
_NO_TOKEN = "no token within {:g} s, though it says that it is ready"
_WORK: dict[Role, bytes] = {
    "context": b"time_to_first_token_seconds_count",
    # A generation server sends the first token before it has the KV cache, so only further tokens show that it works.
    "generation": b"inter_token_latency_seconds_count",
}
"""The metric that grows while the engine works, for whomever."""
_AVOIDED_S = 1.0
"""After a refusal with E_OVERLOADED that names no time."""

State = Literal["new", "up", "down", "left out"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FleetServer:
    """A server as it is now, for people and programs that watch the fleet.

    own: the work that this gateway has given it, by all workers. others: the further work that its metrics show.
    no_metrics: why they can't be read. leaving: it is no longer in the list, and only finishes what it has.
    """

    url: str
    state: State
    reason: str
    own: Load
    others: Load
    failures: int
    avoided: bool
    leaving: bool
    role: Role = "generation"
    no_metrics: str = ""


class FleetMember:
    """Checks its server until it is stopped, and counts the requests on it.

    server, metrics: the ways to it; None where it has no metrics. accept: returns why a server with its model may
    not take part, or "". is_shared: it does parts of requests, so its engine has to be able to.
    """

    def __init__(
        self,
        url: str,
        triton_model: str,
        *,
        server: TritonServer,
        metrics: TritonServer | None,
        accept: Callable[[FleetMember], Awaitable[str]],
        role: Role = "generation",
        is_shared: bool = False,
    ) -> None:
        self.url = url
        self.role: Role = role
        self._is_shared = is_shared
        self.state: State = "new"
        self.reason = "not yet asked"
        self.model_info = self.identity = ""
        self.max_seq_len, self.is_decoupled = 0, True
        self.leaving = False
        self.server = server
        self._model_path = f"/v2/models/{triton_model}/ready"
        self.metrics = metrics
        self._metric_lines = re.compile(
            rb"^deepseek_triton_(inflight_sequences|inflight_tokens|ready|engine_running_requests|engine_waiting_requests|"
            rb'%b)\{[^}]*model="%b"[^}]*\} (\d{1,18})\b' % (_WORK[role], re.escape(triton_model).encode()),
            re.MULTILINE,
        )
        self._accept = accept
        self.own = self.elsewhere = self._others = Load()  # of this worker, of the gateway's others, beside both
        self._most_own = Load()
        """The most that all workers had at once since the last look at the metrics."""
        self._failures = 0
        self._check_answered = False
        """Whether anything of the check under way has had an answer."""
        self._silent_checks = 0
        self._work: float | None = None
        """The last number of the metric _WORK."""
        self._worked_at = 0.0
        self._is_stuck = False
        """Canaries took it down, so readiness alone does not bring it back."""
        self._canary: asyncio.Task[str] | None = None
        self._canary_at = 0.0
        """When the canary under way was sent, or the next is to be."""
        self._went_down_at = -math.inf
        self._avoided_until = 0.0
        self.metrics_at = 0.0
        self._metrics_failed = False
        """The last try to read them. It is made once more soon: a server that starts opens its ports one by one."""
        self._no_metrics = self.metrics_also_of = ""
        self.wants_metrics = False
        self._check_at = 0.0
        self._wake = asyncio.Event()
        self.idle = asyncio.Event()
        """Set while it has no request of ours."""
        self.idle.set()
        self.checked = asyncio.Event()
        """Set when the first check has ended."""
        self.told = asyncio.Event()  # its model, since check_now; or its check has ended

    # Work.

    @property
    def load(self) -> Load:
        return self.own.plus(self.elsewhere).plus(self._others)

    @property
    def avoided(self) -> bool:
        return time.monotonic() < self._avoided_until

    @property
    def check_in_s(self) -> float:
        return max(0.0, self._check_at - time.monotonic())

    @property
    def up_until(self) -> float:
        """When it was last up, by time.monotonic(); -inf for never."""
        return time.monotonic() if self.state == "up" else self._went_down_at

    def snapshot(self) -> FleetServer:
        work = (self.own.plus(self.elsewhere), self._others, self._failures, self.avoided, self.leaving)
        return FleetServer(self.url, self.state, self.reason, *work, self.role, self._no_metrics)

    @contextmanager
    def working(self, cost: Load) -> Iterator[TritonServer]:
        """A request is on this server."""
        self.has(self.own.plus(cost), self.elsewhere)
        self.idle.clear()
        try:
            yield self.server
        finally:
            self.own = self.own.minus(cost)
            if not self.own.sequences:
                self.idle.set()

    def has(self, own: Load, elsewhere: Load) -> None:
        """Take the work of this worker, and that of the gateway's others."""
        self.own, self.elsewhere = own, elsewhere
        self._most_own = Load(*map(max, self._most_own, own.plus(elsewhere)))

    def answered(self) -> None:
        """A request has got its first response, so the server is well."""
        self._failures = 0

    def worked(self) -> None:
        """The engine has generated a token that is not a context server's, or the context that was asked for."""
        self._worked_at = time.monotonic()

    def failed(self, call: Call, error: UpstreamError, *, begun: bool) -> None:
        """A request has failed, before its first response or after it had begun."""
        if error.died:
            call.died.append(self.url)
        if error.code == "E_OVERLOADED":
            self._avoided_until = time.monotonic() + (error.retry_after_s or _AVOIDED_S)
        elif begun and error.unprocessed and not error.code:  # a lost connection may be that connection's own fault
            self.check_now()
        elif self.state == "up" and (error.code == "E_UNAVAILABLE" or (error.unprocessed and not error.code)):
            self._down(str(error))

    # Checks.

    async def read_from(self, metrics: TritonServer | None) -> None:
        """Take the metrics from there from now on."""
        former, self.metrics = self.metrics, metrics
        self.metrics_at, self._metrics_failed, self._no_metrics, self._others = 0.0, False, "", Load()
        if former is not None:
            await former.close()

    def check_now(self) -> None:
        self.told.clear()
        self._check_at = 0.0
        self._wake.set()

    async def watch(self) -> None:
        """Check it again and again, until cancelled."""
        while True:
            # Before the time is read: whoever brings the next check forward sets the time first, then this.
            self._wake.clear()
            if (pause := self.check_in_s) > 0:
                alarm = asyncio.get_running_loop().call_later(pause, self._wake.set)
                await self._wake.wait()
                alarm.cancel()
            else:
                try:
                    await self._check()
                except Exception:  # a server that nobody checks would keep its last state for ever
                    _log.exception("the check of %s failed", self.url)
                    self._down("its check failed; the gateway's log says how")
                self.told.set()
                self.checked.set()

    async def _check(self) -> None:
        before, is_silent, self._check_answered = self._failures, False, False
        try:
            problem = await within(_ANSWER_S, self._ask())
        except TimeoutError:
            is_silent, problem = not self._check_answered, f"no answer within {_ANSWER_S:g} s"
        except UpstreamError as error:
            problem = str(error)
        heard = self.server.heard()
        # At the first silent check, what was heard may have come before the check began, so it does not count.
        self._silent_checks = self._silent_checks + 1 if is_silent and not (heard and self._silent_checks) else 0
        if self._silent_checks >= _SILENT_CHECKS:
            # Its connections stay open, so requests would wait for ever.
            self.server.abandon(f"the server is frozen: {_SILENT_CHECKS} checks have had no answer, nor any request")
        if problem := problem or self._stuck() or await self._read_metrics() or await self._read_model():
            self._down(problem)
        elif self._failures == before:  # else a request failed meanwhile, which is the newer news
            self._check_at = time.monotonic() + _jittered(CHECK_PERIOD_S)

    async def _ask(self) -> str:
        """Why the server is not ready, or "". Raises UpstreamError where it does not answer."""
        for path, cause in (
            ("/v2/health/ready", "it is not ready, or no Triton server"),
            (self._model_path, "the model is not ready, or has another name there (--triton-model)"),
        ):
            status, body = await self.server.get(path, fresh=True)
            self._check_answered = True
            if status in (401, 403):
                raise error_of_status(status, body)
            if status != 200:
                return f"GET {path}: HTTP {status}: {cause}"
        return ""

    def _stuck(self) -> str:
        """Why the engine seems to be stuck, or "": a canary, which is a request for one token, has not come back.

        It is a whole request for context servers too: these would keep the KV cache of another.
        """
        if not self._is_shared or self.state != "up":
            return ""
        now = time.monotonic()
        if self._canary is None:
            if now >= max(self._canary_at, self._worked_at + _CANARY_PERIOD_S):
                self._canary, self._canary_at = asyncio.create_task(self._send_canary()), now
            return ""
        if self._canary.done():
            problem = self._canary.result()
        elif now - max(self._canary_at, self._worked_at) >= _CANARY_S:
            problem = _NO_TOKEN.format(_CANARY_S)
        else:
            return ""
        self._drop_canary()
        self._is_stuck = bool(problem)
        return problem

    async def _send_canary(self) -> str:
        """Have the engine generate a token, once it has room for the request. Returns why it does not, or ""."""
        while True:
            call = Call({"text_input": ".", "sampling_parameters": '{"max_tokens":1}'}, f"canary-{uuid4().hex}")
            try:
                async with aclosing(self.server.generate(call)) as answer:
                    async for _ in answer:
                        pass
                return ""
            except UpstreamError as error:
                if error.code != "E_OVERLOADED":
                    return str(error)
                await asyncio.sleep(error.retry_after_s or _AVOIDED_S)

    def _drop_canary(self) -> None:
        if self._canary is not None:
            self._canary.cancel()
            self._canary, self._canary_at = None, time.monotonic() + _CANARY_PERIOD_S

    async def _read_metrics(self) -> str:
        """Take the load from the metrics, and the engine's health, for which Triton before 26.03 never asks a model."""
        if (metrics := self.metrics) is None and self.wants_metrics:
            self._take_metrics_problem(_NAMED)
        if metrics is None or time.monotonic() < self.metrics_at:
            return ""
        problem = "they have nothing of this model"
        try:
            if self.metrics_also_of:
                raise UpstreamError(f"it is also that of {self.metrics_also_of}")
            status, body = await within(_ANSWER_S, metrics.get("/metrics"))
            if status != 200:
                body, problem = b"", f"HTTP {status}"
        except (TimeoutError, UpstreamError) as error:
            body, problem = b"", str(error).removeprefix(f"{metrics.url}: ")
        found = {name: float(number) for name, number in self._metric_lines.findall(body)}
        self._take_metrics_problem("" if found else f"{metrics.url}/metrics: {problem}; {_NAMED}")
        # What the server counted, up to a second ago, has our requests in it too, also those that have ended since; and
        # the gateway only estimates tokens.
        there = Load(int(found.get(b"inflight_sequences", 0)), int(found.get(b"inflight_tokens", 0)))
        others, self._most_own = there.minus(self._most_own), self.own.plus(self.elsewhere)
        self._others = others if others.sequences else Load()
        work, self._work = self._work, found.get(_WORK[self.role])
        if work is not None and self._work is not None and self._work != work:
            self.worked()
        num_running, num_waiting = found.get(b"engine_running_requests"), found.get(b"engine_waiting_requests")
        if self.role == "context" and num_waiting and not num_running:
            # Its blocks are full of KV caches that wait to be fetched.
            self._avoided_until = max(self._avoided_until, time.monotonic() + 2 * CHECK_PERIOD_S)
        return "" if found.get(b"ready", 1) else "its metrics say that its engine is not ready"

    def _take_metrics_problem(self, problem: str) -> None:
        """Note why the metrics could not be read, or "", and say what has changed."""
        is_sure, self._metrics_failed = self._metrics_failed or not problem, bool(problem)
        if problem and is_sure:
            self.metrics_at = time.monotonic() + _NO_METRICS_PAUSE_S
        if not is_sure or problem == self._no_metrics:
            return
        self._no_metrics = problem
        if problem:
            _log.warning(_NO_METRICS, self.url, problem)
        else:
            _log.info("%s: its metrics can be read now%s", self.url, f", at {self.metrics.url}" if self.metrics else "")

    async def _read_model(self) -> str:
        """See which model it has, unless that is known and fits. Returns why it can't be told, or ""."""
        if self.leaving or (self.state == "up" and not await self._accept(self)):
            return ""
        before = self._failures
        try:
            outputs = await within(_ANSWER_S, self.server.ask(Call({"task": "describe"}, uuid4().hex)))
            self.model_info = str(outputs.get("model_info", ""))
            model = msgspec.json.decode(self.model_info, type=ToldModel)
        except (TimeoutError, UpstreamError, msgspec.MsgspecError, RecursionError) as error:
            return f"it does not tell its model: {error}"
        self.identity, self.max_seq_len, self.is_decoupled = model.identity, model.max_seq_len, model.decoupled
        reason = ""
        if self._is_shared and (why := model.fields.get("request_type", "its backend is too old")):
            reason = f"It can't share requests with another server: {why}"
        elif self._is_stuck and self._worked_at <= self._went_down_at:
            self._drop_canary()
            try:
                problem = await within(_CANARY_S, self._send_canary())
            except TimeoutError:
                problem = _NO_TOKEN.format(_CANARY_S)
            if problem:
                return problem
        if self._failures == before:  # last, because the other workers then know that it is up
            self._is_stuck = False
            reason = reason or await self._accept(self)
            self._enter("left out" if reason else "up", reason)
        return ""

    def _down(self, reason: str) -> None:
        self._drop_canary()  # its end would be older than the server's return
        self._enter("down", reason.removeprefix(f"{self.url}: "))
        pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self._failures, 10))
        self._failures += 1
        self.metrics_at, self._metrics_failed = 0.0, False  # they may come with the server
        self._others = Load()
        self._check_at = time.monotonic() + _jittered(pause)
        self._wake.set()

    def _enter(self, state: State, reason: str) -> None:
        self._went_down_at = self.up_until
        if state != self.state:
            told = f"{self.url} is {state}" + (f": {reason}" if reason else "")
            _log.log(logging.INFO if state == "up" else logging.WARNING, "%s", told)
        self.state, self.reason = state, reason
        for server in filter(None, (self.server, self.metrics)):
            server.keep_idle(state == "up")  # one that exits waits until the last connection is closed

    async def close(self) -> None:
        self._drop_canary()
        await self.server.close()
        if self.metrics is not None:
            await self.metrics.close()


def compare_metrics(members: Iterable[FleetMember]) -> None:
    """Let none take its load from metrics at the address of another's, because whose they are can't be told."""
    readers: dict[str, list[FleetMember]] = {}
    for member in members:
        if member.metrics is not None:
            readers.setdefault(member.metrics.url, []).append(member)
    for alike in readers.values():
        for member in alike:  # one server may be of several models
            other = next((reader.url for reader in alike if reader.url != member.url), "")
            if other != member.metrics_also_of:
                member.metrics_also_of, member.metrics_at = other, 0.0


def _jittered(seconds: float) -> float:
    return seconds * _rng.uniform(1 - _JITTER, 1 + _JITTER)


class ToldModel(msgspec.Struct):
    """The part of `model_info` that decides whether a server may take part, and how it is asked."""

    name: str = ""
    checkpoint: str = ""
    tool_form: str | None = None
    simulation: object = None
    max_seq_len: int = 0
    decoupled: bool = True
    fields: dict[str, object] = {}
    """Input that it can't do -> why, or ""."""

    @property
    def identity(self) -> str:
        """All servers of a fleet have the same. The checkpoint may lie in another folder on each host."""
        text = f"{self.name} from {PurePath(self.checkpoint).name} (tool_form {self.tool_form})"
        return text if self.simulation is None else f"{text}, simulated"
