"""The package's own YAML files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from deepseek_triton_build.text import parse_yaml


def read_data(package: str, file: str) -> str:
    """Return the text of `file`, which lies beside the modules of `package`, an imported one.

    importlib.resources would do the same, but it imports twenty modules, which takes longer than parsing most files.
    """
    return (Path(str(sys.modules[package].__file__)).parent / file).read_text("utf-8")


def load_yaml(package: str, file: str) -> Any:
    """Return the content of `file`, which lies beside the modules of `package`, an imported one."""
    return parse_yaml(read_data(package, file))
