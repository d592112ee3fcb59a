"""Applies the work-arounds of ../../release.py in the engine's worker processes.

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
        if name != "tensorrt_llm" or self._done:
            return
        self._done = True
        version_dir = _HERE.parents[2]
        sys.path.append(str(version_dir))
        try:
            from deepseek_backend.release import apply_quirks, read_release

            for supplied in apply_quirks(read_release(version_dir).record):
                print(f"deepseek-triton: supplied {supplied}", file=sys.stderr)
        finally:
            sys.path.remove(str(version_dir))


sys.meta_path.insert(0, _BeforeTensorRTLLM())
_path = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
_hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", _path)
if _hidden is not None and _hidden.loader is not None:
    _hidden.loader.exec_module(importlib.util.module_from_spec(_hidden))
