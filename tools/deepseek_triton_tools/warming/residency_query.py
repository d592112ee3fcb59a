"""Asking the kernel what is resident, in a thread: to open a file of a server that is gone never returns."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepseek_triton_tools.warming.checkpoint.survey import SurveyedFile

_TICK_S = 0.1
_PATIENCE_S = 2.0
"""For the answer once it was said to stop."""

Residency = Mapping[Path, int | None]
"""File -> bytes of it in the page cache; None: unknown."""


class Asking:
    """One question, begun at once. A daemon thread, as those that read."""

    def __init__(self, files: Sequence[SurveyedFile]) -> None:
        self.ended = threading.Event()
        self.answer: Residency = {}
        """Once it has ended."""
        self._files = files
        threading.Thread(target=self._run, name="warm-ask", daemon=True).start()

    def _run(self) -> None:
        try:
            self.answer = {each.file.path: each.ask_resident() for each in self._files}
        finally:
            self.ended.set()


def ask(files: Sequence[SurveyedFile], *, stop: threading.Event, limit_s: float | None) -> Residency:
    """What is resident of each; nothing is known when no answer comes in `limit_s`, or soon once `stop` is set."""
    asking, started = Asking(files), time.monotonic()
    while not asking.ended.wait(_TICK_S):
        limits = [limit for limit in (limit_s, _PATIENCE_S if stop.is_set() else None) if limit is not None]
        if limits and time.monotonic() - started > min(limits):
            return dict.fromkeys(each.file.path for each in files)
    return asking.answer


def total(residency: Residency) -> int | None:
    """Of all files; None when it is unknown of one."""
    known = [part for part in residency.values() if part is not None]
    return sum(known) if len(known) == len(residency) else None
