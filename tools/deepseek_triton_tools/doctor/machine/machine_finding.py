"""A check, and the finding that it returns."""

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
    """The observation, on one line."""
    cause: str = ""
    """The consequence of the result, and the reason for it."""
    fix: str = ""
    """The steps that repair it."""
    blocks: bool = False
    """Whether the capabilities in MachineCheck.needs can't work. A note may block too, when nobody asked for them."""


def ok(result: str) -> MachineFinding:
    return MachineFinding(level="ok", result=result)


def skipped(reason: str) -> MachineFinding:
    """There was nothing to check."""
    return MachineFinding(level="skipped", result=reason)


def note(result: str, cause: str = "", fix: str = "", *, blocks: bool = False) -> MachineFinding:
    return MachineFinding(level="note", result=result, cause=cause, fix=fix, blocks=blocks)


def warning(result: str, cause: str, fix: str) -> MachineFinding:
    return MachineFinding(level="warning", result=result, cause=cause, fix=fix)


def error(result: str, cause: str, fix: str) -> MachineFinding:
    return MachineFinding(level="error", result=result, cause=cause, fix=fix, blocks=True)


def error_or_note(expected: Expected, result: str, cause: str, fix: str) -> MachineFinding:
    """An error when a repository for an engine on GPUs is to be served here, else a note that blocks."""
    return error(result, cause, fix) if expected.uses_gpus else note(result, cause, fix, blocks=True)


def warning_or_note(expected: Expected, result: str, cause: str, fix: str) -> MachineFinding:
    """A warning when a repository for an engine on GPUs is to be served here, else a note."""
    return warning(result, cause, fix) if expected.uses_gpus else note(result, cause, fix)


@dataclass(frozen=True, kw_only=True)
class MachineCheck:
    id: str
    title: str
    needs: tuple[str, ...] = ()
    """Ids of the capabilities (capabilities.py) that don't work when this check's finding blocks."""
    run: Callable[[Machine, Expected], MachineFinding]


@dataclass(frozen=True, kw_only=True)
class Reported:
    """A finding, with the check and the host that it comes from."""

    check: str
    title: str
    host: str
    """The host's name. A comparison names all its hosts, separated by commas."""
    finding: MachineFinding
    needs: tuple[str, ...] = ()
