"""Runs pip for the Makefile: shows what it does, and says in one line why it failed.

Run as `python pip_install.py LOG ARGUMENT...`, with the Python of the new environment. The ARGUMENTs are those of
`pip install`. pip's own output goes to LOG. A terminal gets one line that changes, a file a line every five seconds.
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

# Without --no-compile pip also compiles the modules that nothing imports: 55 MB for the demo.
_INSTALL = ("pip", "install", "--no-compile", "--progress-bar", "off")
# `python -m venv` would run ensurepip, but an interrupt then shows a traceback. Dependency groups need pip 25.1.
_PIP = (("ensurepip", "--default-pip"), (*_INSTALL, "pip>=25.1"))
_UNREACHABLE = "the package index can't be reached ({0}); PIP_INDEX_URL names another, https_proxy a proxy"
# A pattern in pip's output -> what it means. The first that is found counts: what comes later follows from it.
_CAUSES = (
    (r"(No space left on device|Disk quota exceeded)", "{0}: make room, or let TMPDIR name another folder"),
    (r"connection broken by '\w*ProxyError.*?(\[Errno -?\d+\] [^'\x22)]+|\d{3} [\w ]+)", _UNREACHABLE),
    (
        r"(CERTIFICATE_VERIFY_FAILED[^']*?)\s*\(",
        "the package index can't be trusted ({0}); PIP_CERT names its authority",
    ),
    (r"connection broken by '.*?(\[Errno -?\d+\] [^'\x22)]+|timed out)", _UNREACHABLE),
    (r"ERROR: No matching distribution found for (.+)", "no package index that answered has {0} for this Python"),
    (r"ERROR: Could not install packages due to an OSError: (.+)", "{0}"),
)


def failure(output: str) -> str:
    """Say why pip failed, by its output."""
    for pattern, meaning in _CAUSES:
        if match := re.search(pattern, output):
            return meaning.format(match[1].strip())
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["no output"])[-1]


def _show(started_s: float, text: str) -> None:
    line = f"{time.monotonic() - started_s:4.0f} s  {text}"
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1
        print("\r" + line[:width].ljust(width), end="", flush=True)
    else:
        print(line, flush=True)


def _run_module(arguments: Sequence[str], log: Path, started_s: float) -> int:
    """Return its exit status."""
    command = (sys.executable, "-m", *arguments)
    with log.open("w") as output:
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(command, stdout=output, stderr=output, env=environment) as pip:
            while True:
                try:
                    return pip.wait(0.2 if sys.stdout.isatty() else 5)
                except subprocess.TimeoutExpired:
                    lines = log.read_text(errors="replace").split("\n")[:-1]
                    _show(started_s, lines[-1].strip() if lines else "pip begins")


def main() -> int:
    log, arguments, started_s = Path(sys.argv[1]), sys.argv[2:], time.monotonic()
    try:
        failed = any(_run_module(step, log, started_s) for step in (*_PIP, (*_INSTALL, *arguments)))
    except KeyboardInterrupt:
        print("\nthe installation was interrupted; type make again to go on", file=sys.stderr)
        return 130
    _show(started_s, "pip failed" if failed else "installed")
    if sys.stdout.isatty():
        print()
    if failed:
        print(f"pip failed: {failure(log.read_text(errors='replace'))} (its output: {log})", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
