"""Where the documentation is, and how an extra is installed: what messages point to."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_CANDIDATES = (_PACKAGE / "docs", _PACKAGE.parents[1] / "docs")
"""The wheel holds the folder inside this package (force-include); an editable install reads the checkout's."""


def pages_folder() -> Path:
    """Return the folder of the pages that messages name."""
    return next((folder for folder in _CANDIDATES if (folder / "index.md").is_file()), _CANDIDATES[0])


def install_extra(extra: str) -> str:
    """Say how to install an extra. No public index has this project."""
    return f"pip install '.[{extra}]' in a clone of deepseek-triton, or 'FILE.whl[{extra}]' with its wheel"
