"""The package's own YAML files, and their twins in JSON, which are read where they are up to date.

Reading YAML and importing PyYAML is a third of what a build takes. `make generated` writes the twins.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

from deepseek_triton_build.text import parse_yaml


def read_data(package: str, file: str) -> str:
    """Return the text of `file`, which lies beside the modules of `package`, an imported one.

    importlib.resources would do the same, but it imports twenty modules, which takes longer than parsing most files.
    """
    return (_folder(package) / file).read_text("utf-8")


def load_yaml(package: str, file: str) -> Any:
    """Return the content of `file`, which lies beside the modules of `package`, an imported one."""
    text = read_data(package, file)
    try:
        twin = json.loads(_twin(_folder(package) / file).read_bytes())
    except FileNotFoundError:
        return parse_yaml(text)
    return twin["content"] if twin["crc32"] == _crc32(text) else parse_yaml(text)


def json_twins() -> dict[Path, bytes]:
    """Return path -> content of the twin of every YAML file."""
    texts = {path: path.read_text("utf-8") for path in Path(__file__).parent.rglob("*.yaml")}
    return {
        _twin(path): json.dumps({"crc32": _crc32(text), "content": parse_yaml(text)}, separators=(",", ":")).encode()
        for path, text in sorted(texts.items())
    }


def _folder(package: str) -> Path:
    return Path(str(sys.modules[package].__file__)).parent


def _twin(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _crc32(text: str) -> int:
    """The checksum by which a twin is known to be of this very text: somebody may have edited it since."""
    return zlib.crc32(text.encode())
