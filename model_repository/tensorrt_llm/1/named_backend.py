"""The model.py of a Triton backend with a name of its own, such as vllm: it runs the model.py of each model.

Some programs choose by the backend's name how they ask. `build --backend-name` writes this file as model.py of a folder
of that name.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


class TritonPythonModel:
    """A model of this backend: the TritonPythonModel of the model.py in its version folder."""

    def initialize(self, args: dict[str, str]) -> None:
        version_dir = Path(args["model_repository"], args["model_version"])
        sys.path.append(str(version_dir))  # as Triton does for a model without a backend of its own
        spec = importlib.util.spec_from_file_location("deepseek_model", version_dir / "model.py")
        if spec is None or spec.loader is None:
            raise ImportError(f"{version_dir / 'model.py'} can't be loaded")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._model = module.TritonPythonModel()
        self._model.initialize(args)

    def execute(self, requests: list[Any]) -> Any:
        return self._model.execute(requests)

    def is_ready(self) -> bool:
        return bool(self._model.is_ready())

    def finalize(self) -> None:
        self._model.finalize()
