"""Programs that only record how they were called. They are put on PATH in place of the real ones."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from deepseek_triton_tools.cli.main import main

_PROGRAM = """\
#!/bin/sh
'''exec' '{python}' -IS "$0" "$@" # sh runs this line, Python takes it for a string: #! takes no path with a blank
' '''
import json, os, sys
with open({record!r}, "a") as record:
    stdin = sys.stdin.read() if {reads} else ""
    print(json.dumps({{"args": sys.argv[1:], "env": dict(os.environ), "stdin": stdin}}), file=record)
{after}
"""


@dataclass(frozen=True)
class Recorded:
    file: Path

    @property
    def calls(self) -> list[dict[str, Any]]:
        """`args`, `env` and `stdin` of each call."""
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    @property
    def args(self) -> list[str]:
        """Arguments of its only call."""
        [call] = self.calls
        args: list[str] = call["args"]
        return args


def recording(folder: Path, name: str, *, reads: bool = False, after: str = "") -> Recorded:
    """Put a program `name` into `folder`.

    :param reads: whether it records its standard input too.
    :param after: Python code that it runs at its end.
    """
    folder.mkdir(exist_ok=True)
    program, record = folder / name, folder / f"{name}.calls"
    program.write_text(_PROGRAM.format(python=sys.executable, record=str(record), reads=reads, after=after))
    program.chmod(0o755)
    return Recorded(record)


class _BecomeError(Exception):
    """Raised instead of becoming another program."""

    def __init__(self, command: list[str]) -> None:
        super().__init__(command)
        self.command = command


def become_by(monkeypatch: pytest.MonkeyPatch, *argv: str) -> list[str]:
    """Run `deepseek-triton` until it would become another program, and return the command of that program."""

    def become(_: str, command: list[str]) -> NoReturn:
        raise _BecomeError(command)

    with monkeypatch.context() as patched:
        patched.setattr(os, "execvp", become)
        with pytest.raises(_BecomeError) as caught:
            main(argv)
    return caught.value.command
