"""Runs pip for `make venv`, and says in one line why it failed.

Run as `python pip_install.py LOG`, with the Python of the new environment. pip's own output goes to LOG.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_STEPS = (("--upgrade", "pip>=25.1"), ("--editable", ".[demo]", "--group", "dev"))
"""Arguments of `pip install`, one run after the other. Dependency groups need pip 25.1."""

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


def main() -> int:
    log = Path(sys.argv[1])
    for step in _STEPS:
        with log.open("w") as output:
            done = subprocess.run([sys.executable, "-m", "pip", "install", *step], stdout=output, stderr=output)
        if done.returncode:
            print(f"pip failed: {failure(log.read_text(errors='replace'))} (its output: {log})", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
