"""Asking the kernel what is resident, in a thread: opening a file of a server that is gone never returns."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepseek_triton_tools.warming.checkpoint.survey import SurveyedFile

_TICK_S = 0.1
_STOP_PATIENCE_S = 2.0
"""Seconds that an answer may take once the warm-up is to stop."""

Residency = Mapping[Path, int | None]
"""File -> bytes of it in the page cache; None: unknown."""


class ResidencyQuery:
    """One query, begun at once in a daemon thread."""

    def __init__(self, files: Sequence[SurveyedFile]) -> None:
        self.ended = threading.Event()
        self.answer: Residency = {}
        """Complete when `ended` is set."""
        self._files = files
        threading.Thread(target=self._run, name="warm-residency", daemon=True).start()

    def _run(self) -> None:
        try:
            self.answer = {each.file.path: each.ask_resident() for each in self._files}
        finally:
            self.ended.set()


def ask_residency(files: Sequence[SurveyedFile], *, stop: threading.Event, limit_s: float | None) -> Residency:
    """The residency of each file. All are unknown after `limit_s`, or two seconds after `stop`, without an answer."""
    query, started = ResidencyQuery(files), time.monotonic()
    while not query.ended.wait(_TICK_S):
        limits = [limit for limit in (limit_s, _STOP_PATIENCE_S if stop.is_set() else None) if limit is not None]
        if limits and time.monotonic() - started > min(limits):
            return dict.fromkeys(each.file.path for each in files)
    return query.answer
