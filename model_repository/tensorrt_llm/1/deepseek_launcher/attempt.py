"""One start attempt: the command is started, watched until it is ready and after that, and ended with all it started.

Three threads take part. The main thread starts, signals and reaps; a reader takes the command's output, learns from it
and gives it to a writer; a third one asks for the server's health. When the reader is slower than the command, the
output stays in the pipe, and the command waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Mapping

from deepseek_launcher.launch_tag import LAUNCH_VARIABLE, kill_all, remove_shared_memory, terminate_servers
from deepseek_launcher.options import StillRunningError
from deepseek_launcher.output import Lines, OutputReader
from deepseek_launcher.phases import cause_of, lost_node_of
from deepseek_launcher.processes import END_NOW, KILLED_CODE, ORDERLY, ChildProcess, Process, how_ended
from deepseek_launcher.rank import is_alive_event
from deepseek_launcher.server_watch import LEAVE_S, HealthAnswer, ServerHealth, StubWatch
from deepseek_launcher.supervision import End, Outcome, Supervision
from deepseek_launcher.world import Rank, World

DEADLINE_CODE = 4
_TICK_S = 0.2
_READY_TICK_S = 0.5
"""Pauses of the main loop while loading and when ready. A signal or the command's end wakes it up at once."""
_PROGRESS_EVERY_S = 15
_RANKS_END_S = 5
"""Seconds that the MPI launcher gets to pass on the signal that ends every rank."""
_STUB_GRACE_S = 2
"""Seconds that the command gets to end by itself when a stub has gone: the backend's guard ends tritonserver at
once."""
_MISSES = 3
"""Number of health checks without an answer after which the server counts as not ready."""
_TAIL_LINES = 400
_TAIL_CHARACTERS = 4096
"""Characters that are kept of a line."""
_LAST_OUTPUT_S = 0.5


class Attempt:
    """The state of a single attempt."""

    def __init__(self, supervision: Supervision) -> None:
        self._supervision = supervision
        self._options = supervision.options
        self._world = World(
            self._options.ranks,
            launch=supervision.tag.launch,
            ranks_per_node=self._options.ranks_per_node,
            hosts=self._options.hosts,
        )
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._lost_node: str | None = None
        self._began = time.monotonic()
        self._progress_at = self._began + _PROGRESS_EVERY_S
        self._ready_at: float | None = None
        """Time at which it first became ready; None while it is loading."""
        self._is_ready = False
        self._first_failed: Rank | None = None
        self._stubs: StubWatch | None = None
        self._gone_stub: tuple[float, Process] | None = None
        """A stub that has ended, and when that was noticed."""
        self._num_checks = self._misses = 0
        self._nothing_to_drain = self._is_over = False

    def run(self) -> Outcome:
        """Run the attempt; return when no process of it is left."""
        supervision = self._supervision
        supervision.record_state("loading")
        reading, writing = os.pipe2(os.O_CLOEXEC)
        environment: Mapping[str, str] = {**os.environ, LAUNCH_VARIABLE: supervision.tag.launch}
        self._child = ChildProcess(self._options.command, environment, output=writing)
        os.close(writing)
        if self._options.with_parent is not None:
            supervision.say(f"started process {self._child.pid}")
        lines = Lines(self._take_line, tagged=self._options.ranks > 1)
        self._reader = OutputReader(reading, supervision.stdout, lines)
        address = "127.0.0.1" if self._options.http_address == "0.0.0.0" else self._options.http_address
        self._health = ServerHealth(
            address, self._options.http_port, supervision.models, every_s=self._options.health_every_s
        )
        try:
            outcome = self._watch()
        finally:
            self._health.close()
            supervision.set_ready(False)
            self._clear_away()
            self._reader.join(2)
        return outcome

    def _take_line(self, line: str) -> bool:
        """Learn from a line of output; return whether to pass it on. Called in the reader's thread."""
        self._tail.append(line[:_TAIL_CHARACTERS])
        self._lost_node = self._lost_node or lost_node_of(line)
        failed = self._world.take(line)
        if failed is not None and self._first_failed is None and not (self._supervision.stop.stopping or self._is_over):
            self._first_failed = failed
            if self._options.ranks > 1:  # said at once, because it takes time to end the other ranks
                self._supervision.say(failed.ending(loading=self._ready_at is None))
        return not is_alive_event(line)

    def _watch(self) -> Outcome:
        supervision = self._supervision
        stop = supervision.stop
        while True:
            if supervision.take_signals(_TICK_S if self._ready_at is None or stop.stopping else _READY_TICK_S):
                self._stop_orderly()
            if self._child.exit_code is not None:
                return self._ended(self._child.exit_code)
            outcome = self._check_stop() if stop.stopping else self._check()
            if outcome is not None:
                self._is_over = True
                self._end_by_force()
                return outcome

    def _stop_orderly(self) -> None:
        """Let tritonserver drain while the engine's workers go on; its end ends the rest."""
        self._supervision.set_ready(False)
        has_server = terminate_servers(self._supervision.members())
        if not has_server and self._options.ranks == 1:
            self._child.send(signal.SIGTERM)
        self._nothing_to_drain = not has_server and self._options.ranks > 1

    def _check_stop(self) -> Outcome | None:
        """Return the outcome when the stop may not go on any longer."""
        stop = self._supervision.stop
        if stop.end_now:
            return self._outcome(End.STOPPED, KILLED_CODE, "ended at once, as asked")
        if self._nothing_to_drain:
            return self._outcome(End.STOPPED, 0, "stopped before tritonserver ran")
        if stop.is_overdue:
            return self._outcome(End.STOPPED, KILLED_CODE, "did not end in time and was killed")
        return None

    def _ended(self, code: int) -> Outcome:
        """Return the outcome of a command that has ended by itself, or because it was asked to."""
        if self._supervision.stop.stopping:
            drained = self._ready_at is None or code in (128 + signum for signum in ORDERLY)
            return self._outcome(End.STOPPED, 0 if drained else code, "stopped")
        if code == 0:
            return self._outcome(End.DONE, 0, "the command has ended")
        self._reader.join(_LAST_OUTPUT_S)
        first = self._first_failed
        loading = self._ready_at is None
        return self._fatal(first.ending(loading=loading) if first else f"the command {how_ended(code)}", code)

    def _check(self) -> Outcome | None:
        """Return the outcome when something has failed; None while all is well."""
        if problem := self._world.disagreement():
            return self._outcome(End.DISAGREEMENT, 1, problem)
        loading = self._ready_at is None
        if self._first_failed is not None and self._options.ranks > 1:
            return self._fatal(self._first_failed.ending(loading=loading), self._first_failed.code or 1)
        now = time.monotonic()
        if gone := self._world.gone(now, loading=loading):
            return self._fatal(gone, KILLED_CODE)
        self._take_health()
        if self._ready_at is None:
            return self._check_loading(now)
        if self._stubs is not None and self._gone_stub is None and (stub := self._stubs.gone()):
            self._gone_stub = now, stub
        if self._gone_stub is not None and now - self._gone_stub[0] > _STUB_GRACE_S:
            stub = self._gone_stub[1]
            return self._fatal(f"the model's process died ({stub.pid}, {stub.name})", KILLED_CODE)
        return None

    def _check_loading(self, now: float) -> Outcome | None:
        elapsed_s = now - self._began
        within_s = self._options.ready_within_s
        if within_s and elapsed_s > within_s:
            why = f"{self._world.laggards()}; {self._health.answer.problem}"
            return self._outcome(End.DEADLINE, DEADLINE_CODE, f"not ready within {within_s:g} s: {why}")
        if now >= self._progress_at:
            self._progress_at = now + _PROGRESS_EVERY_S
            limit = f" of {_clock(within_s)}" if within_s else ""
            self._supervision.say(f"loading for {_clock(elapsed_s)}{limit}: {self._world.progress()}")
        return None

    def _take_health(self) -> None:
        """Act on a health check that has not been looked at yet."""
        health = self._health
        if health.num_asked == self._num_checks:
            return
        self._num_checks = health.num_asked
        self._supervision.restore_record()
        answer = health.answer
        self._misses = 0 if answer.ready else self._misses + 1
        if answer.ready and not self._is_ready:
            self._became_ready()
        elif self._is_ready and not answer.ready and (answer.answered or self._misses == _MISSES):
            self._stopped_answering(answer)

    def _became_ready(self) -> None:
        supervision = self._supervision
        if self._ready_at is None:
            self._ready_at = time.monotonic()
            if supervision.watches_stubs:
                self._stubs = StubWatch(supervision.tag, spare=supervision.spare)
            supervision.say(f"ready after {_clock(self._ready_at - self._began)}, HTTP port {self._options.http_port}")
        else:
            supervision.say("ready again")
        self._is_ready = True
        supervision.set_ready(True)
        supervision.record_state("ready")

    def _stopped_answering(self, answer: HealthAnswer) -> None:
        """Report it, and do nothing else: a server that has too much to do must not be ended for it."""
        supervision = self._supervision
        self._is_ready = False
        supervision.set_ready(False)
        supervision.record_state("not ready")
        what = "not ready" if answer.answered else f"does not answer, {_MISSES} times now"
        supervision.say(f"{what} ({answer.problem}); its processes run, nothing is done about it")

    def _fatal(self, reason: str, code: int) -> Outcome:
        cause = self._lost_node or next(filter(None, map(cause_of, reversed(list(self._tail)))), None)
        return self._outcome(End.FATAL, code, f"{reason}: {cause}" if cause else reason)

    def _outcome(self, end: End, code: int, reason: str) -> Outcome:
        ready_s = None if self._ready_at is None else time.monotonic() - self._ready_at
        return Outcome(end=end, exit_code=code, reason=reason, ready_s=ready_s)

    def _end_by_force(self) -> None:
        """End the ranks of other nodes through their launcher, then everything on this machine."""
        supervision = self._supervision
        if self._options.ranks > 1:
            self._child.send(END_NOW)
            end = time.monotonic() + _RANKS_END_S
            while self._child.exit_code is None and time.monotonic() < end:
                supervision.take_signals(_TICK_S)
        with contextlib.suppress(StillRunningError):  # _clear_away tries again, and reports it
            kill_all(supervision.tag, spare=supervision.spare)

    def _clear_away(self) -> None:
        """Leave nothing of this attempt behind: no process and no shared memory."""
        supervision = self._supervision
        leave_by = time.monotonic() + (LEAVE_S if self._child.exit_code == 0 else 0)
        while supervision.members() and time.monotonic() < leave_by and not supervision.stop.end_now:
            supervision.take_signals(0.1)
        try:
            kill_all(supervision.tag, spare=supervision.spare)
        except StillRunningError as error:
            supervision.say(f"{error}; not started again while they are there")
            supervision.is_stuck = True
        remove_shared_memory(supervision.tag.launch)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
