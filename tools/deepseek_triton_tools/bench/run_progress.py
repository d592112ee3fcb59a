"""The line that shows how far a benchmark is."""

from __future__ import annotations

from collections.abc import Sequence

from deepseek_triton_tools.bench.load.load_run import LoadProgress
from deepseek_triton_tools.bench.load.load_settings import LoadPoint
from deepseek_triton_tools.bench.sweep import SweepStep
from deepseek_triton_tools.terminal.status_line import StatusLine, clock


class RunProgress:
    def __init__(self, points: Sequence[LoadPoint], repeat: int) -> None:
        self._line = StatusLine()
        self._later = [point for point in points for _ in range(repeat)]
        """The run under way, and those after it."""
        self._seconds = {point: point.duration_s for point in points if point.duration_s is not None}
        """How long a run takes."""

    def show(self, name: str, progress: LoadProgress) -> None:
        self._line.show(lambda: f"{name}: {self.text(progress)}")

    def clear(self) -> None:
        self._line.clear()

    def end(self, step: SweepStep) -> None:
        """Leave a line for a run that has ended."""
        figures = step.run.figures
        self._later = self._later[1:]
        self._seconds.setdefault(step.load, figures.duration_s)
        parts = [f"{figures.completed} completed"]
        parts += [f"{number} {name}" for name in ("failed", "cancelled") if (number := getattr(figures, name))]
        speed = f"{figures.output_throughput:,.0f} tokens/s"
        self._line.say(f"{step.load.label}: {', '.join(parts)} in {clock(figures.duration_s)}, {speed}")

    def text(self, progress: LoadProgress) -> str:
        """Say how far the run under way is, and how long it and all runs will take."""
        point, *later = self._later
        # A run of a fixed time sends as many requests as it can.
        of_total = f" of {progress.total:,}" if point.duration_s is None else " answered"
        parts = [f"{progress.ended:,}{of_total}", f"{progress.inflight:,} under way"]
        if progress.failed:
            parts.append(f"{progress.failed:,} failed")
        if progress.elapsed_s > 0:
            parts.append(f"{progress.output_tokens / progress.elapsed_s:,.0f} tokens/s")
        left_s = _seconds_left(point, progress)
        if left_s is not None:
            parts.append(f"about {clock(left_s)} left{' of this run' if later else ''}")
        if later:
            parts.append(f"{len(later)} more {'run' if len(later) == 1 else 'runs'}")
            if left_s is not None and all(each in self._seconds for each in later):
                parts.append(f"{clock(left_s + sum(self._seconds[each] for each in later))} in all")
        return ", ".join(parts)


def _seconds_left(point: LoadPoint, progress: LoadProgress) -> float | None:
    if point.duration_s is not None:
        return max(0.0, point.duration_s - progress.elapsed_s)
    if not progress.ended:
        return None
    return max(0.0, progress.elapsed_s * (progress.total - progress.ended) / progress.ended)
