"""One life of the command: started, watched until it is ready and after that, ended with all that it started.

Threads: the main one starts, signals and reaps; a reader takes the command's output, learns from it and gives it to a
writer; one asks for the health. What the reader can't keep up with stays in the pipe, and its writers wait.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Mapping

from deepseek_launcher import process_table, rank_events
from deepseek_launcher.children import ChildProcess, how_ended
from deepseek_launcher.launch_tag import LAUNCH, SERVER_NAME, kill_all, remove_shared_memory
from deepseek_launcher.launcher_errors import StillRunningError
from deepseek_launcher.line_splitter import Lines
from deepseek_launcher.output import OutputReader
from deepseek_launcher.phases import cause_of
from deepseek_launcher.process_table import Process
from deepseek_launcher.restarts import End, Outcome
from deepseek_launcher.server_health import HealthAnswer, ServerHealth
from deepseek_launcher.server_processes import StubWatch
from deepseek_launcher.signals import END_NOW
from deepseek_launcher.supervision import ORDERLY, Supervision
from deepseek_launcher.world import Rank, World

DEADLINE_CODE = 4
_KILLED = 128 + signal.SIGKILL
_TICK_S = 0.2
_READY_TICK_S = 0.5
"""A signal or the end of the command is taken at once in any case."""
_PROGRESS_EVERY_S = 15
_RANKS_END_S = 5
"""For the MPI launcher to hand on the signal that ends every rank."""
_LEAVE_S = 5
"""For what a command that has ended leaves behind: a stub goes within 2 s of its server."""
_STUB_GRACE_S = 2
"""For the command to end by itself when a stub has gone: the backend's guard ends tritonserver at once."""
_MISSES = 3
_TAIL_LINES = 400
_TAIL_CHARACTERS = 4096
"""Of a line."""
_LAST_WORDS_S = 0.5


class Attempt:
    """The state of a single life of the command."""

    def __init__(self, supervision: Supervision) -> None:
        self._up = supervision
        self._options = supervision.options
        self._world = World(
            self._options.ranks,
            launch=supervision.mark.launch,
            ranks_per_node=self._options.ranks_per_node,
            hosts=self._options.hosts,
        )
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._began = time.monotonic()
        self._progress_at = self._began + _PROGRESS_EVERY_S
        self._ready_at: float | None = None
        self._is_ready = False
        self._first_to_end: Rank | None = None
        self._stubs: StubWatch | None = None
        self._stub_gone: tuple[float, Process] | None = None
        self._asked = self._misses = 0
        self._nothing_to_drain = self._is_over = False

    def run(self) -> Outcome:
        """Returns when nothing of it is left."""
        up = self._up
        up.note("loading")
        reading, writing = os.pipe2(os.O_CLOEXEC)
        environment: Mapping[str, str] = {**os.environ, LAUNCH: up.mark.launch}
        self._child = ChildProcess(self._options.command, environment, output=writing)
        os.close(writing)
        self._reader = OutputReader(reading, up.stdout, Lines(self._hear, tagged=self._options.ranks > 1))
        address = "127.0.0.1" if self._options.http_address == "0.0.0.0" else self._options.http_address
        self._health = ServerHealth(address, self._options.http_port, up.models, every_s=self._options.health_every_s)
        try:
            outcome = self._watch()
        finally:
            self._health.close()
            up.set_ready(False)
            self._clear_away()
            self._reader.join(2)
        return outcome

    def _hear(self, line: str) -> bool:
        """The reader's thread."""
        self._tail.append(line[:_TAIL_CHARACTERS])
        ended = self._world.take(line)
        if ended is not None and self._first_to_end is None and not (self._up.stopping or self._is_over):
            self._first_to_end = ended
            if self._options.ranks > 1:  # the others are still to be ended, which takes its time
                self._up.say(ended.last_words(loading=self._ready_at is None))
        return not rank_events.is_alive(line)

    def _watch(self) -> Outcome:
        up = self._up
        while True:
            if up.take_signals(_TICK_S if self._ready_at is None or up.stopping else _READY_TICK_S):
                self._ask_to_end()
            if self._child.exit_code is not None:
                return self._ended(self._child.exit_code)
            outcome = self._overdue() if up.stopping else self._look()
            if outcome is not None:
                self._is_over = True
                self._end_by_force()
                return outcome

    def _ask_to_end(self) -> None:
        """tritonserver drains while the engine's workers go on; its end ends the rest."""
        self._up.set_ready(False)
        servers = [process for process in self._up.members() if process.name == SERVER_NAME]
        for process in servers:
            process_table.send(process, signal.SIGTERM)
        if not servers and self._options.ranks == 1:
            self._child.send(signal.SIGTERM)
        self._nothing_to_drain = not servers and self._options.ranks > 1

    def _overdue(self) -> Outcome | None:
        up = self._up
        if up.end_now:
            return self._outcome(End.STOPPED, _KILLED, "ended at once, as asked")
        if self._nothing_to_drain:
            return self._outcome(End.STOPPED, 0, "stopped before tritonserver ran")
        if up.stop_by is not None and time.monotonic() > up.stop_by:
            return self._outcome(End.STOPPED, _KILLED, "did not end in time and was killed")
        return None

    def _ended(self, code: int) -> Outcome:
        """The command ended by itself, or as asked."""
        if self._up.stopping:
            drained = self._ready_at is None or code in (128 + signum for signum in ORDERLY)
            return self._outcome(End.STOPPED, 0 if drained else code, "stopped")
        if code == 0:
            return self._outcome(End.DONE, 0, "the command has ended")
        self._reader.join(_LAST_WORDS_S)  # they may still be on their way
        first = self._first_to_end
        loading = self._ready_at is None
        return self._fatal(first.last_words(loading=loading) if first else f"the command {how_ended(code)}", code)

    def _look(self) -> Outcome | None:
        """What is wrong, if anything."""
        if problem := self._world.disagreement():
            return self._outcome(End.DISAGREEMENT, 1, problem)
        loading = self._ready_at is None
        if self._first_to_end is not None and self._options.ranks > 1:
            return self._fatal(self._first_to_end.last_words(loading=loading), self._first_to_end.code or 1)
        now = time.monotonic()
        if gone := self._world.gone(now, loading=loading):
            return self._fatal(gone, _KILLED)
        self._take_health()
        if self._ready_at is None:
            return self._look_while_loading(now)
        if self._stubs is not None and self._stub_gone is None and (stub := self._stubs.gone()):
            self._stub_gone = now, stub
        if self._stub_gone is not None and now - self._stub_gone[0] > _STUB_GRACE_S:
            stub = self._stub_gone[1]
            return self._fatal(f"the model's process died ({stub.pid}, {stub.name})", _KILLED)
        return None

    def _look_while_loading(self, now: float) -> Outcome | None:
        elapsed_s = now - self._began
        within_s = self._options.ready_within_s
        if within_s and elapsed_s > within_s:
            answer = self._health.answer
            why = f"{self._world.laggards()}; {answer.problem}"
            return self._outcome(End.DEADLINE, DEADLINE_CODE, f"not ready within {within_s:g} s: {why}")
        if now >= self._progress_at:
            self._progress_at = now + _PROGRESS_EVERY_S
            limit = f" of {_clock(within_s)}" if within_s else ""
            self._up.say(f"loading for {_clock(elapsed_s)}{limit}: {self._world.progress()}")
        return None

    def _take_health(self) -> None:
        health = self._health
        if health.num_asked == self._asked:
            return
        self._asked = health.num_asked
        self._up.stay_listed()
        answer = health.answer
        self._misses = 0 if answer.ready else self._misses + 1
        if answer.ready and not self._is_ready:
            self._became_ready()
        elif self._is_ready and not answer.ready and (answer.spoke or self._misses == _MISSES):
            self._stopped_answering(answer)

    def _became_ready(self) -> None:
        up = self._up
        if self._ready_at is None:
            self._ready_at = time.monotonic()
            if up.watches_stubs:
                self._stubs = StubWatch(up.mark, spare=up.spare)
            up.say(f"ready after {_clock(self._ready_at - self._began)}, HTTP port {self._options.http_port}")
        else:
            up.say("ready again")
        self._is_ready = True
        up.set_ready(True)
        up.note("ready")

    def _stopped_answering(self, answer: HealthAnswer) -> None:
        """Said, and no more: a server that has too much to do must not be ended for it."""
        up = self._up
        self._is_ready = False
        up.set_ready(False)
        up.note("not ready")
        what = "not ready" if answer.spoke else f"does not answer, {_MISSES} times now"
        up.say(f"{what} ({answer.problem}); its processes run, nothing is done about it")

    def _fatal(self, reason: str, code: int) -> Outcome:
        cause = next(filter(None, map(cause_of, reversed(list(self._tail)))), None)
        return self._outcome(End.FATAL, code, f"{reason}: {cause}" if cause else reason)

    def _outcome(self, end: End, code: int, reason: str) -> Outcome:
        ready_s = None if self._ready_at is None else time.monotonic() - self._ready_at
        return Outcome(end=end, exit_code=code, reason=reason, ready_s=ready_s)

    def _end_by_force(self) -> None:
        """The ranks of other nodes through their launcher, then all that is here."""
        if self._options.ranks > 1:
            self._child.send(END_NOW)
            end = time.monotonic() + _RANKS_END_S
            while self._child.exit_code is None and time.monotonic() < end:
                self._up.take_signals(_TICK_S)
        with contextlib.suppress(StillRunningError):  # clearing away tries again, and says so
            kill_all(self._up.mark, spare=self._up.spare)

    def _clear_away(self) -> None:
        """Afterwards nothing of this attempt is left: no process, no shared memory."""
        up = self._up
        leave_by = time.monotonic() + (_LEAVE_S if self._child.exit_code == 0 else 0)
        while up.members() and time.monotonic() < leave_by and not up.end_now:
            up.take_signals(0.1)
        try:
            kill_all(up.mark, spare=up.spare)
        except StillRunningError as error:
            up.say(f"{error}; not started again while they are there")
            up.is_stuck = True
        remove_shared_memory(up.mark.launch)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
