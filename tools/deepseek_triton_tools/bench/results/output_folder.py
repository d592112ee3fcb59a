"""The folder of a benchmark's files. What was measured is written after every run, so that nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deepseek_triton_tools.bench.load.load_settings import LoadPoint
from deepseek_triton_tools.bench.measuring.request_record import RequestRecord
from deepseek_triton_tools.bench.results import result_files, serving_json
from deepseek_triton_tools.bench.results.bench_result import BenchResult
from deepseek_triton_tools.tool_errors import ToolError


class OutputFolder:
    def __init__(self, folder: Path) -> None:
        """Make the folder. Raises ToolError when there is a result in it already, or it can't be made."""
        if (folder / result_files.FILE_NAME).exists():
            raise ToolError(f"{folder} has a result already: name another --output, or remove it", exit_code=2)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.names: list[str] = []

    def write(self, result: BenchResult, load: LoadPoint, number: int, records: Sequence[RequestRecord]) -> None:
        """Write the result so far, and the files of its last run: the one of `number`, from 0, at `load`."""
        name = f"{serving_json.run_name(load, number)}.json"
        figures = result.points[-1].runs[-1].figures
        document = serving_json.serving_document(result, load, figures, records=records)
        result_files.write_document(document, self._folder / name)
        result_files.write_result(result, self._folder / result_files.FILE_NAME)
        self.names = [*dict.fromkeys([result_files.FILE_NAME, *self.names, name])]
