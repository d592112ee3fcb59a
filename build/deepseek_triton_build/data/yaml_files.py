"""The package's own YAML files."""

from __future__ import annotations

from importlib import resources
from typing import Any

from deepseek_triton_build.text import parse_yaml


def load_yaml(package: str, file: str) -> Any:
    """Return the content of `file`, which lies beside the modules of `package`."""
    return parse_yaml((resources.files(package) / file).read_text("utf-8"))
