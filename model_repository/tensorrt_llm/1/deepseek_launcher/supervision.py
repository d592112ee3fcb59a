"""State that all start attempts of a supervisor share: signals, output, record, the launch's processes, restarts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from deepseek_launcher import launch_tag, launches, processes
from deepseek_launcher.command import option
from deepseek_launcher.launch_tag import LaunchTag, SupervisorGuard
from deepseek_launcher.launches import LaunchRecord, LaunchRecordFile
from deepseek_launcher.options import LauncherError, Policy, RunOptions
from deepseek_launcher.output import OutputWriter
from deepseek_launcher.processes import END_NOW, ORDERLY, Process, Signals, StopRequests
from deepseek_launcher.server_watch import PATIENCE_S

_LONGEST_DELAY_S = 60
_PROVEN_S = 600
"""An attempt that was ready for this long sets the count of restarts back to zero."""


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
        if not self._is_wanted(outcome):
            return None
        if (outcome.ready_s or 0) >= _PROVEN_S:
            self.done = 0
        if self.done >= self._most:
            return None
        self.done += 1
        return float(min(_LONGEST_DELAY_S, 2 ** (self.done - 1)))

    def _is_wanted(self, outcome: Outcome) -> bool:
        if outcome.end in (End.STOPPED, End.DISAGREEMENT) or self._policy == "never":
            return False
        # A server that never became ready would need an hour to fail again, nearly always for the same reason.
        return self._policy == "always" or (outcome.end is End.FATAL and outcome.ready_s is not None)


class Supervision:
    """Make it in the main thread, after the guard, and use it only there."""

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
        if options.repository is not None:
            _mark_as_used(options.repository)
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

    def record_state(self, state: str) -> None:
        if self._record_file is not None:
            self._record_file.update(state=state, restarts=self.num_restarts)

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
            namespace=launches.namespace(),
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


def _mark_as_used(repository: Path) -> None:
    """Lock the stamp of a generated repository until this process has ended.

    The lock tells `deepseek-triton build` not to replace the repository. The kernel keeps it with the file, so it is
    seen outside a container too.
    """
    for stamp in repository.glob("*/deepseek-triton.json"):
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(os.open(stamp, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_SH | fcntl.LOCK_NB)
