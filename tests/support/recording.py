"""Programs that only write down how they were called, to stand on PATH in the place of real ones."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from deepseek_triton_tools.cli.main import main

_PROGRAM = """\
#!{python} -IS
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
        """`args`, `env` and `stdin` of each."""
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    @property
    def args(self) -> list[str]:
        """Of its only call."""
        [call] = self.calls
        args: list[str] = call["args"]
        return args


def recording(folder: Path, name: str, *, reads: bool = False, after: str = "") -> Recorded:
    """Put `name` into `folder`.

    :param reads: its standard input too.
    :param after: Python that it ends with.
    """
    folder.mkdir(exist_ok=True)
    program, record = folder / name, folder / f"{name}.calls"
    program.write_text(_PROGRAM.format(python=sys.executable, record=str(record), reads=reads, after=after))
    program.chmod(0o755)
    return Recorded(record)


class _BecomeError(Exception):
    """In the place of a process that has become another program."""

    def __init__(self, command: list[str]) -> None:
        super().__init__(command)
        self.command = command


def become_by(monkeypatch: pytest.MonkeyPatch, *argv: str) -> list[str]:
    """What `deepseek-triton` takes the place of its process by, which it would not come back from."""

    def become(_: str, command: list[str]) -> NoReturn:
        raise _BecomeError(command)

    with monkeypatch.context() as patched:
        patched.setattr(os, "execvp", become)
        with pytest.raises(_BecomeError) as caught:
            main(argv)
    return caught.value.command
