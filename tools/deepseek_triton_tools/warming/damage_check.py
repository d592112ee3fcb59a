"""Looking at checkpoints' indexes and headers while their files are being read.

A look takes a third of a second for DeepSeek's 92,000 tensors, more where the storage is slow: a load should not wait
for it, nor end before it is known to have been for nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from deepseek_triton_build.check.finding import Finding
from deepseek_triton_tools.repository.checkpoint_files import find_damage
from deepseek_triton_tools.warming.checkpoint.survey import Survey, with_findings
from deepseek_triton_tools.warming.transfer import Problem


class Check:
    """A thread that looks at the checkpoints of `survey` and tells `on_damage` of what is damaged."""

    def __init__(self, survey: Survey, on_damage: Callable[[Problem], None]) -> None:
        self.problems: list[Problem] = []
        self.ended = threading.Event()
        self.error: BaseException | None = None
        """What ended the thread before its time, a bug."""
        self.path = survey.checkpoints[0].folder if survey.checkpoints else Path()
        """What it looks at."""
        self.since_s = time.monotonic()
        self.thread_id = 0
        """The kernel's."""
        self._survey = survey
        self._on_damage = on_damage
        self._findings: dict[Path, list[Finding]] = {}
        """By the checkpoint's folder."""

    def start(self) -> None:
        # A daemon, as the threads that read: storage that does not answer must not keep the process.
        threading.Thread(target=self._run, name="warm-check", daemon=True).start()

    def examined(self) -> Survey:
        """The survey with what has been found so far."""
        return with_findings(self._survey, self._findings)

    def _run(self) -> None:
        self.thread_id = threading.get_native_id()
        try:
            for checkpoint in self._survey.checkpoints:
                for finding in find_damage(checkpoint, self._look_at):
                    self._findings.setdefault(checkpoint.folder, []).append(finding)
                    if finding.severity == "error":
                        self._report(finding)
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.ended.set()

    def _look_at(self, path: Path) -> None:
        self.path, self.since_s = path, time.monotonic()

    def _report(self, finding: Finding) -> None:
        problem = Problem(path=Path(finding.file), message=finding.message, fix=finding.fix)
        self.problems.append(problem)
        self._on_damage(problem)


def examine(survey: Survey) -> Survey:
    """`survey` with what is wrong with its checkpoints; damaged files are no longer chosen."""
    return with_findings(survey, {each.folder: list(find_damage(each)) for each in survey.checkpoints})
