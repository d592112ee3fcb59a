"""Runs pip for the Makefile: shows how far it is, and says in one line why it failed.

Run as `python pip_install.py LOG MEGABYTES ARGUMENT...`, with the Python of the new environment. The ARGUMENTs are
those of `pip install`, MEGABYTES is about what they download into a new environment. pip's own output goes to LOG. A
terminal gets one line that changes, a file a line every five seconds.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_UPGRADE = ("pip>=25.1",)
"""Dependency groups need 25.1, `--progress-bar raw` 24.1."""

_FILE = re.compile(r"^ *(?:Downloading|Using cached) (\S+)(?<!\.metadata) \(([\d.]+) (bytes|kB|MB|GB)\)$", re.MULTILINE)
_FETCHED = re.compile(r"^Progress (\d+) of (\d+)$", re.MULTILINE)
_PACKAGES = re.compile(r"^Installing collected packages: (.+)$", re.MULTILINE)
_MEGABYTES = {"bytes": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}

_UNREACHABLE = "the package index can't be reached ({0}); PIP_INDEX_URL names another, https_proxy a proxy"
_CAUSES = (
    (r"(No space left on device|Disk quota exceeded)", "{0}: make room, or let TMPDIR name another folder"),
    (r"connection broken by '\w*ProxyError.*?(\[Errno -?\d+\] [^')]+|\d{3} [\w ]+)", _UNREACHABLE),
    (
        r"(CERTIFICATE_VERIFY_FAILED[^']*?)\s*\(",
        "the package index can't be trusted ({0}); PIP_CERT names its authority",
    ),
    (r"connection broken by '.*?(\[Errno -?\d+\] [^')]+|timed out)", _UNREACHABLE),
    (r"ERROR: No matching distribution found for (.+)", "no package index that answered has {0} for this Python"),
    (r"ERROR: Could not install packages due to an OSError: (.+)", "{0}"),
)
"""A pattern in pip's output -> what it means. The first that is found counts: what comes later follows from it."""


def failure(output: str) -> str:
    """Say why pip failed, by its output."""
    for pattern, meaning in _CAUSES:
        if match := re.search(pattern, output):
            return meaning.format(match[1].strip())
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["no output"])[-1]


def progress(output: str, expected_mb: int) -> str:
    """Say how far pip is, by its output."""
    if _PACKAGES.search(output):
        return _summary("installing", output)
    files = list(_FILE.finditer(output))
    if not files:
        return "asking the package index"
    name = "-".join(files[-1][1].split("-")[:2])
    return f"{_megabytes(output):.0f} of about {expected_mb} MB: {name}, {files[-1][2]} {files[-1][3]}"


def _summary(verb: str, output: str) -> str:
    packages = _PACKAGES.search(output)
    if packages is None:
        return "nothing to install"
    count = packages[1].count(",") + 1
    return f"{verb} {count} {'package' if count == 1 else 'packages'}, {_megabytes(output):.0f} MB"


def _megabytes(output: str) -> float:
    """Size of the files that pip has, whether they came from the index or from its cache. pip rounds each size."""
    files = list(_FILE.finditer(output))
    size = sum(float(file[2]) * _MEGABYTES[file[3]] for file in files)
    # Files of less than 500 kB have no progress; that of the last file stands below its name.
    fetched = list(_FETCHED.finditer(output, files[-1].end())) if files else []
    return size - (int(fetched[-1][2]) - int(fetched[-1][1])) / 1e6 if fetched else size


def _show(started_s: float, text: str) -> None:
    line = f"{time.monotonic() - started_s:4.0f} s  {text}"
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1
        print("\r" + line[:width].ljust(width), end="", flush=True)
    else:
        print(line, flush=True)


def _pip_install(arguments: Sequence[str], log: Path, started_s: float, expected_mb: int) -> int:
    """Return pip's exit status."""
    # Without --no-compile pip also compiles the modules that nothing imports: 55 MB for the demo.
    command = (sys.executable, "-m", "pip", "install", "--no-compile", *arguments)
    interval_s = 0.2 if sys.stdout.isatty() else 5
    with log.open("w") as output:
        pip = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | {"PYTHONUNBUFFERED": "1"})
        with pip:
            while True:
                try:
                    return pip.wait(interval_s)
                except subprocess.TimeoutExpired:
                    _show(started_s, progress(log.read_text(errors="replace"), expected_mb))


def main() -> int:
    log, expected_mb, arguments = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    started_s = time.monotonic()
    steps = (_UPGRADE, ("--progress-bar", "raw", *arguments))
    failed = any(_pip_install(step, log, started_s, expected_mb) for step in steps)
    output = log.read_text(errors="replace")
    _show(started_s, "pip failed" if failed else _summary("installed", output))
    if sys.stdout.isatty():
        print()
    if failed:
        print(f"pip failed: {failure(output)} (its output: {log})", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
