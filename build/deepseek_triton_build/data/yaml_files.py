"""The package's YAML files."""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml

# libyaml's loader is about ten times as fast; a build reads a thousand lines of records.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_yaml(package: str, file: str) -> Any:
    """The content of `file` beside `package`'s modules."""
    return parse_yaml((resources.files(package) / file).read_text("utf-8"))


def parse_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)
