"""Progress of a warm-up on stderr: one line that is rewritten, and lasting lines for stalls and problems."""

from __future__ import annotations

from pathlib import Path

from deepseek_triton_tools.host.units import about, part_of, sized
from deepseek_triton_tools.terminal.status_line import StatusLine
from deepseek_triton_tools.warming.transfer import Problem
from deepseek_triton_tools.warming.warm_progress import Stall, WarmProgress

PLAIN_S = 15.0
"""Seconds between two lines in a log: short enough to see that a load of minutes moves."""


class ProgressView:
    """Shows the progress that `warm` reports; give it as `observe`."""

    def __init__(self) -> None:
        self._status = StatusLine(PLAIN_S)
        self._shown_problems: set[Problem] = set()
        self._stalled: dict[Path, float] = {}
        """File -> seconds that it had stalled for when that was shown last."""

    def __call__(self, progress: WarmProgress) -> None:
        for problem in progress.problems:
            if problem not in self._shown_problems:
                self._shown_problems.add(problem)
                self._status.say(str(problem))
        self._show_stalls(progress.stalls)
        self._status.show(lambda: progress_line(progress))

    def clear(self) -> None:
        """Remove the line from the terminal, so that others can write there."""
        self._status.clear()

    def _show_stalls(self, stalls: tuple[Stall, ...]) -> None:
        stalled = {stall.path: stall for stall in stalls}
        for path in set(self._stalled) - set(stalled):
            self._status.say(f"{path}: goes on")
        self._stalled = {path: shown_s for path, shown_s in self._stalled.items() if path in stalled}
        for path, stall in stalled.items():
            if path not in self._stalled or stall.waited_s > 2 * self._stalled[path]:
                self._stalled[path] = stall.waited_s
                self._status.say(stall_line(stall))


def progress_line(progress: WarmProgress) -> str:
    parts = [
        f"shards {progress.num_files_done}/{progress.num_files}",
        part_of(progress.done, progress.total),
        f"{sized(progress.rate)}/s",
    ]
    if progress.eta_s is not None and progress.done < progress.total:
        parts.append(f"{about(progress.eta_s)} left")
    if progress.resident is not None and progress.total:
        parts.append(f"{min(1.0, progress.resident / progress.total):.0%} resident")
    if progress.again:
        parts.append(f"{sized(progress.again)} read again")
    return ", ".join(parts)


def stall_line(stall: Stall) -> str:
    where = f"; the kernel waits in {stall.waits_in}" if stall.waits_in else ""
    return f"{stall.path}: not a byte for {about(stall.waited_s)}, at byte {stall.offset:,}; on {stall.mount}{where}"
