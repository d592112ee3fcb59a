"""One start attempt: the command is started, watched until it is ready and after that, and ended with all it started.

Three threads take part. The main thread starts, signals and reaps; a reader takes the command's output, learns from it
and gives it to a writer; a third one asks for the server's health. When the reader is slower than the command, the
output stays in the pipe, and the command waits.
"""

import contextlib
import fcntl
import os
import signal
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from deepseek_launcher import launch_tag, processes
from deepseek_launcher.command import option
from deepseek_launcher.launch_tag import (
    LAUNCH_VARIABLE,
    LaunchTag,
    SupervisorGuard,
    kill_all,
    remove_shared_memory,
    terminate_servers,
)
from deepseek_launcher.launches import LaunchRecord, LaunchRecordFile
from deepseek_launcher.options import LauncherError, Policy, RunOptions, StillRunningError
from deepseek_launcher.output import Lines, OutputReader, OutputWriter
from deepseek_launcher.processes import (
    END_NOW,
    KILLED_CODE,
    ORDERLY,
    ChildProcess,
    Process,
    Signals,
    StopRequests,
    how_ended,
)
from deepseek_launcher.rank import is_alive_event
from deepseek_launcher.server_watch import LEAVE_S, PATIENCE_S, ServerHealth, StubWatch
from deepseek_launcher.world import HOPELESS, Rank, World, cause_of, lost_node_of

_LONGEST_DELAY_S = 60
# An attempt that was ready for this long sets the count of restarts back to zero.
_PROVEN_S = 600


class End(Enum):
    """How an attempt ended."""

    STOPPED = "stopped"
    """A stop was requested."""
    DONE = "done"
    """The command ended with 0 by itself."""
    FATAL = "fatal"
    """Something failed."""
    DEADLINE = "deadline"
    """It was not ready in time."""
    DISAGREEMENT = "disagreement"
    """The nodes would serve different files, and would do so again after a restart."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one attempt."""

    end: End
    exit_code: int
    reason: str = ""
    ready_s: float | None = None
    """Seconds since it first became ready; None when it never did."""


class Restarts:
    """Counts the restarts and applies the policy."""

    def __init__(self, policy: Policy, most: int) -> None:
        self.done = 0
        """Number of restarts since the server was last ready for ten minutes."""
        self._policy = policy
        self._most = most

    def delay_s(self, outcome: Outcome) -> float | None:
        """Return the seconds to wait before the next attempt; None when there is to be no further one."""
        if outcome.end in (End.STOPPED, End.DISAGREEMENT) or self._policy == "never":
            return None
        # A server that never became ready would need an hour to fail again, nearly always for the same reason.
        if self._policy != "always" and (outcome.end is not End.FATAL or outcome.ready_s is None):
            return None
        if (outcome.ready_s or 0) >= _PROVEN_S:
            self.done = 0
        if self.done >= self._most:
            return None
        self.done += 1
        return float(min(_LONGEST_DELAY_S, 2 ** (self.done - 1)))


class Supervision:
    """State that all attempts of a supervisor share: signals, output, record, the launch's processes.

    Make it in the main thread, after the guard, and use it only there.
    """

    def __init__(self, options: RunOptions, tag: LaunchTag, models: list[str], guard: SupervisorGuard | None) -> None:
        self.options = options
        self.tag = tag
        # With --model-control-mode, models and their stubs come and go on request.
        models_stay = option(options.command, "--model-control-mode") is None
        self.models = models if models_stay else []
        # A program that runs a server of its own (serve) may want one that stays up without its model: on_fatal.
        self.watches_stubs = models_stay and options.with_parent is None
        self.spare = () if guard is None else (guard.pid,)
        self.num_restarts = 0
        self.stop = StopRequests(options.exit_timeout_s + PATIENCE_S)
        self.is_stuck = False
        """Whether processes could not be killed, so that nothing may be started again."""
        self._signals = Signals((*ORDERLY, signal.SIGQUIT, END_NOW))
        processes.adopt_orphans()
        self.stdout, self._stderr = OutputWriter(1), OutputWriter(2)
        self._record_file = self._write_record()
        # The lock on a generated repository's stamp tells `deepseek-triton build` not to replace it until this process
        # has ended. The kernel keeps it with the file, so that it is seen outside a container too.
        for stamp in options.repository.glob("*/deepseek-triton.json") if options.repository else ():
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(os.open(stamp, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_SH | fcntl.LOCK_NB)
        self.set_ready(False)  # a supervisor that was killed with its guard, or a crash, may have left the file

    def take_signals(self, timeout_s: float) -> bool:
        """Wait for signals and reap children; return True when an orderly stop was requested for the first time."""
        is_first = False
        for signum in self._signals.wait(timeout_s):
            if self.stop.take(signum):
                is_first = True
                patience_s = self.options.exit_timeout_s + PATIENCE_S
                self.say(f"stopping, within {patience_s:g} s; a second signal ends it at once")
                self.record_state("stopping")
        # Asked at each tick: the signal at a parent's death also comes when just the thread that started us ends.
        if self.options.with_parent not in (None, os.getppid()):
            self.stop.end_now = True
        processes.reap()
        return is_first

    def pause(self, seconds: float) -> bool:
        """Wait; return False when a stop was requested meanwhile."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self.stop.stopping:
            self.take_signals(left)
        return not self.stop.stopping

    def members(self) -> list[Process]:
        return launch_tag.members(self.tag, spare=self.spare)

    def close(self) -> None:
        """Remove the ready file and the record, and give the output 2 s to be written."""
        self.set_ready(False)
        if self._record_file is not None:
            self._record_file.close()
        self.stdout.flush(2)
        self._stderr.flush(2)

    def say(self, text: str) -> None:
        """Write a line of the supervisor's own to stderr."""
        self._stderr.write(f"deepseek-triton: {text}\n".encode("utf-8", errors="replace"))

    def record_state(self, state: str, progress: str = "") -> None:
        if self._record_file is not None:
            self._record_file.update(state=state, progress=progress, restarts=self.num_restarts)

    def restore_record(self) -> None:
        """Write the record again if it is gone, as after a cleanup of /tmp or the end of the user's last session."""
        if self._record_file is not None:
            self._record_file.restore()

    def set_ready(self, ready: bool) -> None:
        """Make or remove the ready file."""
        path = self.options.ready_file
        if path is None:
            return
        try:
            if ready:
                path.touch()
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            self.say(f"--ready-file {path}: {error.strerror}")

    def _write_record(self) -> LaunchRecordFile | None:
        """Write this launch's record; None where that fails, for the server runs without it all the same."""
        me = processes.look_up(os.getpid())
        if me is None:
            raise LauncherError("/proc shows nothing of this process: it has to be mounted")
        repository = self.options.repository
        record = LaunchRecord(
            id=self.tag.launch,
            pid=me.pid,
            started=me.started,
            namespace=processes.namespace(),
            state="loading",
            ports=self.options.ports,
            repository=str(repository.absolute()) if repository else None,
            restarts=0,
            exit_timeout_s=self.options.exit_timeout_s,
        )
        try:
            return LaunchRecordFile(record)
        except (LauncherError, OSError) as error:
            self.say(f"goes on without being listed: {error}")
            return None


DEADLINE_CODE = 4
# Pauses of the main loop while loading and when ready. A signal or the command's end wakes it up at once.
_TICK_S = 0.2
_READY_TICK_S = 0.5
_PROGRESS_EVERY_S = 15
# Seconds that the MPI launcher gets to pass on the signal that ends every rank.
_RANKS_END_S = 5
# Seconds that the command gets to end by itself when a stub has gone: the backend's guard ends tritonserver at once.
_STUB_GRACE_S = 2
# Number of health checks without an answer after which the server counts as not ready.
_MISSES = 3
_TAIL_LINES = 400
# Characters that are kept of a line.
_TAIL_CHARACTERS = 4096
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
        self._nothing_to_drain = self._is_over = self._is_hopeless = False

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
            return self._watch()
        finally:
            self._health.close()
            supervision.set_ready(False)
            self._clear_away()
            self._reader.join(2)

    def _take_line(self, line: str) -> bool:
        """Learn from a line of output; return whether to pass it on. Called in the reader's thread."""
        self._tail.append(line[:_TAIL_CHARACTERS])
        self._lost_node = self._lost_node or lost_node_of(line)
        self._is_hopeless = self._is_hopeless or HOPELESS in line
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
                # tritonserver drains while the engine's workers go on; its end ends the rest.
                supervision.set_ready(False)
                has_server = terminate_servers(supervision.members())
                if not has_server and self._options.ranks == 1:
                    self._child.send(signal.SIGTERM)
                self._nothing_to_drain = not has_server and self._options.ranks > 1
            if self._child.exit_code is not None:
                return self._ended(self._child.exit_code)
            outcome = self._check_stop() if stop.stopping else self._check()
            if outcome is not None:
                self._is_over = True
                if self._options.ranks > 1:  # those of other nodes end through their launcher
                    self._child.send(END_NOW)
                    end = time.monotonic() + _RANKS_END_S
                    while self._child.exit_code is None and time.monotonic() < end:
                        supervision.take_signals(_TICK_S)
                with contextlib.suppress(StillRunningError):  # _clear_away tries again, and reports it
                    kill_all(supervision.tag, spare=supervision.spare)
                return outcome

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
            loaded = self._ready_at is not None
            drained = not loaded or code in (128 + signum for signum in ORDERLY)
            reason = "stopped" if loaded or code == 0 else "stopped while it was loading"
            return self._outcome(End.STOPPED, 0 if drained else code, reason)
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
        if loading and self._is_hopeless and self._supervision.watches_stubs:
            return self._fatal("tritonserver would wait for ever", 1)
        if self._ready_at is None:
            elapsed_s, within_s = now - self._began, self._options.ready_within_s
            if within_s and elapsed_s > within_s:
                why = f"{self._world.laggards()}; {self._health.answer.problem}"
                return self._outcome(End.DEADLINE, DEADLINE_CODE, f"not ready within {within_s:g} s: {why}")
            if now >= self._progress_at:
                self._progress_at = now + _PROGRESS_EVERY_S
                limit = f" of {_clock(within_s)}" if within_s else ""
                progress = f"for {_clock(elapsed_s)}{limit}: {self._world.progress()}"
                self._supervision.say(f"loading {progress}")
                self._supervision.record_state("loading", progress)
            return None
        if self._stubs is not None and self._gone_stub is None and (stub := self._stubs.gone()):
            self._gone_stub = now, stub
        if self._gone_stub is not None and now - self._gone_stub[0] > _STUB_GRACE_S:
            stub = self._gone_stub[1]
            return self._fatal(f"the model's process died ({stub.pid}, {stub.name})", KILLED_CODE)
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
            self._set_ready()
        elif self._is_ready and not answer.ready and (answer.answered or self._misses == _MISSES):
            # It is only reported: a server that has too much to do must not be ended for it.
            self._is_ready = False
            self._supervision.set_ready(False)
            self._supervision.record_state("not ready")
            what = "not ready" if answer.answered else f"does not answer, {_MISSES} times now"
            self._supervision.say(f"{what} ({answer.problem}); its processes run, nothing is done about it")

    def _set_ready(self) -> None:
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

    def _fatal(self, reason: str, code: int) -> Outcome:
        cause = self._lost_node or next(filter(None, map(cause_of, reversed(list(self._tail)))), None)
        return self._outcome(End.FATAL, code, f"{reason}: {cause}" if cause else reason)

    def _outcome(self, end: End, code: int, reason: str) -> Outcome:
        ready_s = None if self._ready_at is None else time.monotonic() - self._ready_at
        return Outcome(end=end, exit_code=code, reason=reason, ready_s=ready_s)

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
