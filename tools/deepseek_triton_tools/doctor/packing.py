"""The checks as a zip, which a bare `python3` runs from its standard input and which leaves no file behind."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from deepseek_triton_tools.doctor.machine.expected import Expected, expected_to_json
from deepseek_triton_tools.doctor.machine.remote import EXPECTED_FILE

_PACKAGE = "deepseek_triton_tools"
SENT = ("__init__.py", "_version.py", "pages.py", "tool_errors.py", "host", "doctor/__init__.py", "doctor/machine")
"""The files and folders that are sent. They import each other and the standard library only (a test holds that)."""
_NEEDED = "Python 3.10 or newer is needed"
BOOTSTRAP = (
    "import os,sys\n"
    f"sys.version_info>=(3,10) or sys.exit('{_NEEDED}, this is %d.%d' % sys.version_info[:2])\n"
    "f=os.memfd_create('doctor')\n"
    "open(f,'wb',closefd=False).write(sys.stdin.buffer.read())\n"
    "sys.path.insert(0,'/proc/self/fd/%d' % f)\n"
    "from deepseek_triton_tools.doctor.machine.remote import main\n"
    "main()\n"
)
"""Code for `python3 -c`, which takes the zip on its standard input. The zip is kept in memory (memfd_create(2))."""


def pack(expected: Expected) -> bytes:
    """Return the zip. It is not compressed, because not every Python has zlib."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as packed:
        for name, path in sent_files():
            packed.writestr(f"{_PACKAGE}/{name}", path.read_bytes())
        packed.writestr(EXPECTED_FILE, expected_to_json(expected))
    return content.getvalue()


def sent_files() -> Iterator[tuple[str, Path]]:
    """Name in the package, and path here, of every file that is sent."""
    root = Path(__file__).parent.parent
    for name in SENT:
        path = root / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            yield file.relative_to(root).as_posix(), file
