"""Applies the work-arounds of ../../workarounds.py in the engine's worker processes.

Python imports this file at start wherever this folder is on PYTHONPATH. It installs an import hook that applies the
work-arounds just before a process imports tensorrt_llm. The sitecustomize that this file hides is run too.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


class _BeforeTensorRTLLM:
    """An import hook that finds no module itself."""

    _done = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "tensorrt_llm" and not self._done:
            self._done = True
            _apply_quirks(_HERE.parents[2])


def _apply_quirks(version_dir: Path) -> None:
    sys.path.append(str(version_dir))
    try:
        from deepseek_backend.release import read_release
        from deepseek_backend.workarounds import apply_quirks

        for supplied in apply_quirks(read_release(version_dir).record):
            print(f"deepseek-triton: supplied {supplied}", file=sys.stderr)
    finally:
        sys.path.remove(str(version_dir))


def _run_hidden_sitecustomize() -> None:
    path = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _BeforeTensorRTLLM())
_run_hidden_sitecustomize()
