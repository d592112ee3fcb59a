"""The package's own files: the YAML beside this module, and the model repository that each build is a copy of."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

_FOLDER = Path(__file__).parent


def read_data(file: str) -> str:
    """Return the text of `file`, a path in this folder."""
    return (_FOLDER / file).read_text("utf-8")


def load_yaml(file: str, *, until: str = "") -> Any:
    """Return the content of `file`, a path in this folder, up to the first line that is `until`, or all of it. It is
    ours, so it needs none of parse_yaml's care."""
    import yaml

    text = read_data(file).partition(f"\n{until}\n")[0] if until else read_data(file)
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


_PACKAGE = Path(__file__).resolve().parents[1]
# The wheel holds the folder inside this package (force-include); an editable install reads the checkout's.
_CANDIDATES = (_PACKAGE / "model_repository", _PACKAGE.parents[1] / "model_repository")


def model_repository() -> Path:
    """Return the folder that holds `tensorrt_llm/`.

    :raises FileNotFoundError: when neither place has it.
    """
    for candidate in _CANDIDATES:
        if (candidate / "tensorrt_llm" / "1" / "model.py").is_file():
            return candidate
    raise FileNotFoundError(f"the package is incomplete: no model_repository at {' or '.join(map(str, _CANDIDATES))}")


def version_dir() -> Path:
    """Return the folder of model.py. On sys.path it makes `deepseek_backend` importable."""
    return model_repository() / "tensorrt_llm" / "1"


@cache
def contract() -> ModuleType:
    """Return the backend's contract.py as a module. It is loaded alone: the generator never imports the backend."""
    path = version_dir() / "deepseek_backend" / "contract.py"
    spec = importlib.util.spec_from_file_location("deepseek_triton_build._contract", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{path}: can't be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module
