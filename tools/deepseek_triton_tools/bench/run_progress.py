"""The line that shows how far a benchmark is."""

from __future__ import annotations

from deepseek_triton_tools.bench.load.load_run import LoadProgress
from deepseek_triton_tools.bench.sweep import SweepStep
from deepseek_triton_tools.terminal.status_line import StatusLine, clock


class RunProgress:
    def __init__(self) -> None:
        self._line = StatusLine()

    def show(self, name: str, progress: LoadProgress) -> None:
        self._line.show(lambda: f"{name}: {_text(progress)}")

    def end(self, step: SweepStep) -> None:
        """Leave a line for a run that has ended."""
        figures = step.run.figures
        parts = [f"{figures.completed} completed"]
        parts += [f"{number} {name}" for name in ("failed", "cancelled") if (number := getattr(figures, name))]
        speed = f"{figures.output_throughput:,.0f} tokens/s"
        self._line.say(f"{step.load.label}: {', '.join(parts)} in {clock(figures.duration_s)}, {speed}")


def _text(progress: LoadProgress) -> str:
    parts = [f"{progress.ended:,} of {progress.total:,}", f"{progress.inflight:,} under way"]
    if progress.failed:
        parts.append(f"{progress.failed:,} failed")
    if progress.elapsed_s > 0:
        parts.append(f"{progress.output_tokens / progress.elapsed_s:,.0f} tokens/s")
    if progress.ended:
        left_s = progress.elapsed_s * (progress.total - progress.ended) / progress.ended
        parts.append(f"about {clock(max(0.0, left_s))} left")
    return ", ".join(parts)
