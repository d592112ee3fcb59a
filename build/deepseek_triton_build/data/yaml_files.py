"""The package's own YAML files, which lie beside this module: tables, and in records/ one file a release."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent


def read_data(file: str) -> str:
    """Return the text of `file`, a path in this folder."""
    return (_FOLDER / file).read_text("utf-8")


def load_yaml(file: str) -> Any:
    """Return the content of `file`, a path in this folder. It is ours, so it needs none of parse_yaml's care."""
    import yaml

    return yaml.load(read_data(file), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
