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
from deepseek_triton_tools.warming.checkpoint import find_damage
from deepseek_triton_tools.warming.survey import Survey, with_findings
from deepseek_triton_tools.warming.transfer import Problem


class Check:
    """A thread that looks at the checkpoints of `survey` and tells `on_damage` of what is damaged."""

    def __init__(self, survey: Survey, on_damage: Callable[[Problem], None]) -> None:
        self.problems: list[Problem] = []
        self.ended = threading.Event()
        self.since_s = time.monotonic()
        """When it began with a checkpoint."""
        self._survey = survey
        self._on_damage = on_damage
        self._findings: dict[Path, tuple[Finding, ...]] = {}
        """By the checkpoint's folder."""

    def start(self) -> None:
        # A daemon, as the threads that read: storage that does not answer must not keep the process.
        threading.Thread(target=self._run, name="warm-check", daemon=True).start()

    def examined(self) -> Survey:
        """The survey with what has been found so far."""
        return with_findings(self._survey, self._findings)

    def _run(self) -> None:
        try:
            for checkpoint in self._survey.checkpoints:
                self.since_s = time.monotonic()
                self._findings[checkpoint.folder] = find_damage(checkpoint)
                for finding in self._findings[checkpoint.folder]:
                    if finding.severity == "error":
                        self._report(finding)
        finally:
            self.ended.set()

    def _report(self, finding: Finding) -> None:
        problem = Problem(path=Path(finding.file), message=finding.message, fix=finding.fix)
        self.problems.append(problem)
        self._on_damage(problem)


def examine(survey: Survey) -> Survey:
    """`survey` with what is wrong with its checkpoints; damaged files are no longer chosen."""
    return with_findings(survey, {each.folder: find_damage(each) for each in survey.checkpoints})
