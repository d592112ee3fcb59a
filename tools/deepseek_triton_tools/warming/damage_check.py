"""Checking indexes and headers of checkpoints while their files are being read.

The check takes a third of a second for DeepSeek's 92,000 tensors, and longer where the storage is slow. The warm-up
does not wait for it, and reads no more of a file that the check has found damaged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from deepseek_triton_build.check import Finding
from deepseek_triton_tools.repository.checkpoint_files import find_damage
from deepseek_triton_tools.warming.checkpoint.survey import Survey, with_findings
from deepseek_triton_tools.warming.transfer import Problem


class DamageCheck:
    """A thread that checks the checkpoints of `survey`, and calls `on_damage` for each damaged file."""

    def __init__(self, survey: Survey, on_damage: Callable[[Problem], None]) -> None:
        self.problems: list[Problem] = []
        self.ended = threading.Event()
        self.error: BaseException | None = None
        """The error that ended the thread before its time: a bug."""
        self.path = survey.checkpoints[0].folder if survey.checkpoints else Path()
        """The file or folder that it reads now."""
        self.since_s = time.monotonic()
        """Time when it began with `path`."""
        self.thread_id = 0
        """The kernel's number of the thread."""
        self._survey = survey
        self._on_damage = on_damage
        self._findings: dict[Path, list[Finding]] = {}
        """Folder of a checkpoint -> its findings."""

    def start(self) -> None:
        # A daemon, like the threads that read: storage that does not answer must not keep the process alive.
        threading.Thread(target=self._run, name="warm-check", daemon=True).start()

    def examined(self) -> Survey:
        """The survey with the findings so far."""
        return with_findings(self._survey, self._findings)

    def _run(self) -> None:
        self.thread_id = threading.get_native_id()
        try:
            for checkpoint in self._survey.checkpoints:
                for finding in find_damage(checkpoint, self._begin_file):
                    self._findings.setdefault(checkpoint.folder, []).append(finding)
                    if finding.severity == "error":
                        self._report(finding)
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.ended.set()

    def _begin_file(self, path: Path) -> None:
        self.path, self.since_s = path, time.monotonic()

    def _report(self, finding: Finding) -> None:
        problem = Problem(path=Path(finding.file), message=finding.message, fix=finding.fix)
        self.problems.append(problem)
        self._on_damage(problem)


def examine(survey: Survey) -> Survey:
    """`survey` with the findings about its checkpoints; damaged files are no longer chosen."""
    return with_findings(survey, {each.folder: list(find_damage(each)) for each in survey.checkpoints})
