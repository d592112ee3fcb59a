"""The folder of a benchmark's files. What was measured is written after every run, so that nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deepseek_triton_tools.bench.presets.bench_preset import BenchPreset
from deepseek_triton_tools.bench.report.report_page import write_report
from deepseek_triton_tools.bench.report.report_points import ExpectedPoint, NamedResult
from deepseek_triton_tools.bench.results.bench_result import BenchResult
from deepseek_triton_tools.bench.results.request_samples import write_samples
from deepseek_triton_tools.bench.results.result_csv import csv_text
from deepseek_triton_tools.bench.results.result_files import FILE_NAME, write_document, write_result
from deepseek_triton_tools.bench.results.serving_json import run_name, serving_document
from deepseek_triton_tools.bench.results.trtllm_report import trtllm_document
from deepseek_triton_tools.bench.sweep import SweepStep
from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.tool_errors import ToolError

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
