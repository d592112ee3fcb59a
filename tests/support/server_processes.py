"""The processes of a server or of a program that has Triton inside, and whether they have ended."""

from __future__ import annotations

from pathlib import Path

from deepseek_backend.process_guard import NAME
from deepseek_triton_tools.host.process_sessions import session_members
from support.supervising import runs
from support.waiting import wait_for


def children_of(pid: int | None) -> tuple[int, int]:
    """Return the pids of the model's process (the stub) and of its guard."""
    assert pid is not None
    by_name = {_name(member): member for member in session_members(pid)}
    return by_name["triton_python_b"], by_name[NAME]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def assert_gone(*pids: int) -> None:
    wait_for(lambda: not any(map(runs, pids)), lambda: f"of {pids} these run: {[pid for pid in pids if runs(pid)]}")
