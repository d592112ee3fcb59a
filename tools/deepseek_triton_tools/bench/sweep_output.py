"""What a sweep shows while it runs, and the folder of its files, which are written after every run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deepseek_triton_tools.bench.foreign_results import run_name, serving_document, trtllm_document
from deepseek_triton_tools.bench.load_run import LoadProgress
from deepseek_triton_tools.bench.presets import BenchPreset
from deepseek_triton_tools.bench.report_page import write_report
from deepseek_triton_tools.bench.report_points import ExpectedPoint, NamedResult
from deepseek_triton_tools.bench.result import (
    FILE_NAME,
    BenchResult,
    csv_text,
    write_document,
    write_result,
    write_samples,
)
from deepseek_triton_tools.bench.sweep import SweepStep
from deepseek_triton_tools.bench.workload import LoadPoint
from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.terminal.status_line import StatusLine, clock
from deepseek_triton_tools.tool_errors import ToolError


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


_CSV_NAME = "figures.csv"
_REPORT_NAME = "report.html"


def expected_points(preset: BenchPreset) -> list[ExpectedPoint]:
    """Return the published throughputs of a preset, for pictures."""
    return [
        ExpectedPoint(name="published", tps_user=known.user_throughput, tps_gpu=known.output_throughput_per_gpu)
        for point in preset.points
        if (known := point.published) and known.user_throughput and known.output_throughput_per_gpu
    ]


class OutputFolder:
    def __init__(self, folder: Path, expected: Sequence[ExpectedPoint] = ()) -> None:
        """Make the folder. Raises ToolError when there is a result in it already, or it can't be made."""
        if (folder / FILE_NAME).exists():
            raise ToolError(f"{folder} has a result already: name another --output, or remove it", exit_code=2)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ToolError(f"--output {folder}: {error.strerror}", exit_code=2) from error
        self._folder = folder
        self._expected = expected
        self._num_runs = 0

    def write(self, result: BenchResult, step: SweepStep) -> None:
        """Write the result so far, and the files of its last run, `step`."""
        name = run_name(step.load, step.number)
        figures = step.run.figures
        write_document(serving_document(result, step.load, figures), self._folder / f"{name}.json")
        write_document(trtllm_document(result, figures), self._folder / f"{name}.trtllm-bench.json")
        write_samples(step.measured.records, self._folder / f"{name}.requests.jsonl.gz")
        write_result(result, self._folder / FILE_NAME)
        with whole_file(self._folder / _CSV_NAME) as file:
            file.write(csv_text(result))
        own = NamedResult(name=result.preset or self._folder.name, result=result)
        write_report(self._folder / _REPORT_NAME, [own], self._expected)
        self._num_runs += 1

    @property
    def summary(self) -> str:
        """The files in a few words."""
        return f"{_REPORT_NAME}, {FILE_NAME}, {_CSV_NAME}, and the figures and requests of {self._num_runs} runs"
