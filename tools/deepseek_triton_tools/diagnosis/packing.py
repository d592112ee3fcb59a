"""The checks as a zip that a bare `python3` runs from its standard input; nothing of it is left behind."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from deepseek_triton_tools.diagnosis.expected import Expected, to_json

_PACKAGE = "deepseek_triton_tools"
MODULES = (
    "__init__.py",
    "_version.py",
    "errors.py",
    "ports.py",
    "preflight.py",
    "sizes.py",
    "tritonserver.py",
    "warming/__init__.py",
    "warming/host_memory.py",
    "warming/mounts.py",
)
"""What the checks use of the rest of this package: standard library only, as they are."""
EXPECTED = "expected.json"
MARK = "deepseek-triton diagnosis "
"""Before the report, on its line: a login script may print what it likes."""
_NEEDED = "Python 3.10 or newer is needed"
BOOTSTRAP = (
    "import os,sys\n"
    f"sys.version_info>=(3,10) or sys.exit('{_NEEDED}, this is %d.%d' % sys.version_info[:2])\n"
    "f=os.memfd_create('doctor')\n"
    "open(f,'wb',closefd=False).write(sys.stdin.buffer.read())\n"
    "sys.path.insert(0,'/proc/self/fd/%d' % f)\n"
    "from deepseek_triton_tools.diagnosis.remote import main\n"
    "main()\n"
)
"""For `python3 -c`, the zip on its standard input. The file it makes is in memory alone."""


def pack(expected: Expected) -> bytes:
    """The zip. Uncompressed: not every Python has zlib."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as packed:
        for name, path in _sources():
            packed.writestr(f"{_PACKAGE}/{name}", path.read_bytes())
        packed.writestr(EXPECTED, to_json(expected))
    return content.getvalue()


def _sources() -> Iterator[tuple[str, Path]]:
    root = Path(__file__).parent.parent
    for name in MODULES:
        yield name, root / name
    for path in sorted((root / "diagnosis").rglob("*.py")):
        yield path.relative_to(root).as_posix(), path
