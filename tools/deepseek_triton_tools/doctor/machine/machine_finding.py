"""What a check says, and what a check is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from deepseek_triton_tools.doctor.machine.expected import Expected
from deepseek_triton_tools.doctor.machine.machine import Machine

Level = Literal["ok", "skipped", "note", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "skipped", "note", "warning", "error")
"""From the best to the worst."""


@dataclass(frozen=True, kw_only=True)
class MachineFinding:
    level: Level
    result: str
    """What was found, on one line."""
    cause: str = ""
    """What that leads to, and why."""
    fix: str = ""
    blocks: bool = False
    """It stands in the way of what the check is needed for; a note may, where nobody asked for that."""


def ok(result: str) -> MachineFinding:
    return MachineFinding(level="ok", result=result)


def skipped(reason: str) -> MachineFinding:
    """Nothing was looked at."""
    return MachineFinding(level="skipped", result=reason)


def note(result: str, cause: str = "", fix: str = "", *, blocks: bool = False) -> MachineFinding:
    return MachineFinding(level="note", result=result, cause=cause, fix=fix, blocks=blocks)


def warning(result: str, cause: str, fix: str) -> MachineFinding:
    return MachineFinding(level="warning", result=result, cause=cause, fix=fix)


def error(result: str, cause: str, fix: str) -> MachineFinding:
    return MachineFinding(level="error", result=result, cause=cause, fix=fix, blocks=True)


def lack(expected: Expected, result: str, cause: str, fix: str) -> MachineFinding:
    """Of what only TensorRT-LLM needs: an error where a repository for it is to be served, else a note."""
    return error(result, cause, fix) if expected.is_tensorrt_llm else note(result, cause, fix, blocks=True)


@dataclass(frozen=True, kw_only=True)
class MachineCheck:
    id: str
    title: str
    about: str
    """What it looks at and what it says when, for docs/doctor.md."""
    needs: tuple[str, ...]
    """Capabilities (capabilities.py) that a blocking finding stands in the way of."""
    run: Callable[[Machine, Expected], MachineFinding]


@dataclass(frozen=True, kw_only=True)
class Reported:
    """A finding, and whose."""

    check: str
    title: str
    host: str
    """Where; several are separated by commas."""
    finding: MachineFinding
    needs: tuple[str, ...] = ()
