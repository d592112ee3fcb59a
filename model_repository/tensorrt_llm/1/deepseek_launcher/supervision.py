"""What all attempts of a supervisor share: its signals, its words, its record, and what belongs to its launch."""

from __future__ import annotations

import os
import signal
import time

from deepseek_launcher import children, launch_record, launch_tag, process_table
from deepseek_launcher.command import option
from deepseek_launcher.launch_tag import LaunchTag
from deepseek_launcher.launcher_errors import LauncherError
from deepseek_launcher.output import OutputWriter
from deepseek_launcher.process_table import Process
from deepseek_launcher.run_options import RunOptions
from deepseek_launcher.server_processes import PATIENCE_S
from deepseek_launcher.signals import END_NOW, SAME_WISH_S, Signals
from deepseek_launcher.supervisor_guard import SupervisorGuard

ORDERLY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_AT_ONCE = (signal.SIGQUIT, END_NOW)


class Supervision:
    """Make it in the main thread, which alone uses it, after the guard."""

    def __init__(self, options: RunOptions, mark: LaunchTag, models: list[str], guard: SupervisorGuard | None) -> None:
        self.options = options
        self.mark = mark
        # With a control mode given, models come and go on request.
        self.models = [] if option(options.command, "--model-control-mode") else models
        self.watches_stubs = option(options.command, "--model-control-mode") is None
        self.spare = () if guard is None else (guard.pid,)
        self.num_restarts = 0
        self.stop_by: float | None = None
        self._asked_at = 0.0
        self.end_now = False
        self.is_stuck = False
        self._signals = Signals((*ORDERLY, *_AT_ONCE))
        children.adopt_orphans()
        self.stdout, self._stderr = OutputWriter(1), OutputWriter(2)
        self._book = self._open_book()
        self.set_ready(False)  # of one that was killed together with its guard, or whose machine was

    def take_signals(self, timeout_s: float) -> bool:
        """True when a first orderly stop was among them."""
        first = False
        for signum in self._signals.wait(timeout_s):
            now = time.monotonic()
            if signum in ORDERLY and not self.stopping:
                first = True
                patience_s = self.options.exit_timeout_s + PATIENCE_S
                self._asked_at, self.stop_by = now, now + patience_s
                self.say(f"stopping, within {patience_s:g} s; once more ends it at once")
                self.note("stopping")
            elif signum not in ORDERLY or now - self._asked_at > SAME_WISH_S:
                self.end_now = True
        children.reap()
        return first

    @property
    def stopping(self) -> bool:
        return self.stop_by is not None or self.end_now

    def pause(self, seconds: float) -> bool:
        """False when a stop was asked for meanwhile."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self.stopping:
            self.take_signals(left)
        return not self.stopping

    def members(self) -> list[Process]:
        return launch_tag.members(self.mark, spare=self.spare)

    def close(self) -> None:
        """What is still to be written gets a moment."""
        self.set_ready(False)
        if self._book is not None:
            self._book.close()
        self.stdout.flush(2)
        self._stderr.flush(2)

    def say(self, text: str) -> None:
        self._stderr.write(f"deepseek-triton: {text}\n".encode("utf-8", errors="replace"))

    def note(self, state: str) -> None:
        if self._book is not None:
            self._book.note(state=state, restarts=self.num_restarts)

    def stay_listed(self) -> None:
        """What cleans up /tmp, or the end of this user's last session, takes the records of what runs along."""
        if self._book is not None:
            self._book.keep()

    def set_ready(self, ready: bool) -> None:
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

    def _open_book(self) -> launch_record.LaunchRecordFile | None:
        me = process_table.look_up(os.getpid())
        if me is None:
            raise LauncherError("/proc shows nothing of this process: it has to be mounted")
        repository = self.options.repository
        try:
            return launch_record.LaunchRecordFile(
                launch_record.LaunchRecord(
                    id=self.mark.launch,
                    pid=me.pid,
                    started=me.started,
                    namespace=launch_record.namespace(),
                    state="loading",
                    ports=self.options.ports,
                    repository=str(repository.absolute()) if repository else None,
                    restarts=0,
                    exit_timeout_s=self.options.exit_timeout_s,
                )
            )
        except (LauncherError, OSError) as error:
            self.say(f"goes on without being listed: {error}")
            return None
