"""The ranks of a launch: which have started, where, how far each is, and which have ended."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deepseek_launcher import processes
from deepseek_launcher.launch_tag import LAUNCH_VARIABLE
from deepseek_launcher.phases import PHASES, STARTED, phase_of, rank_of
from deepseek_launcher.processes import how_ended
from deepseek_launcher.rank import parse_event

_EVENT_WITHIN_S = 2
"""Seconds that the `ended` event of a rank may be late."""
_NAMED_RANKS = 8
_READ_CHARACTERS = 4096
"""Characters of a line that are searched for a phase: the engine names it at the beginning."""


@dataclass
class Rank:
    """Everything known of one rank."""

    number: int
    expected_host: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts of its `started` event; empty before it."""
    alive: dict[str, Any] = field(default_factory=dict)
    """Facts of its last `alive` event."""
    furthest: int = -1
    """Index in PHASES of the latest phase that it has reached."""
    phase: str = STARTED
    phase_since_s: float = 0.0
    """Start of the phase, by time.monotonic()."""
    process: processes.Process | None = None
    """Its process, where it runs on this machine."""
    gone_since_s: float | None = None
    """Time at which its process was first missed, by time.monotonic()."""
    code: int | None = None
    """Exit code of its command; None while it runs."""

    @property
    def host(self) -> str | None:
        return self.facts.get("host") or self.expected_host

    def ending(self, *, loading: bool) -> str:
        """Return how it ended, on which host, and in which phase of a start."""
        return f"{self} {how_ended(self.code or 0)}{self.in_phase(loading=loading)}"

    def in_phase(self, *, loading: bool) -> str:
        return f" (phase: {self.phase})" if loading else ""

    def __str__(self) -> str:
        return f"rank {self.number} on {self.host}" if self.host else f"rank {self.number}"


class World:
    """The ranks of one attempt. One thread feeds it with output, line by line, and another one queries it."""

    def __init__(self, size: int, *, launch: str, ranks_per_node: int | None = None, hosts: Sequence[str] = ()) -> None:
        """`launch` is the launch's id: its ranks on this machine are also watched as processes."""
        self._lock = threading.Lock()
        each = ranks_per_node or max(1, size // len(hosts)) if hosts else size
        host_of_node = dict(enumerate(hosts))
        self._ranks = [Rank(number, host_of_node.get(number // each)) for number in range(size)]
        self._launch = launch
        self._own_host = socket.gethostname()
        self._has_events = False
        """Whether ranks send events: they don't where the command has no `supervise.py rank` in it."""

    def take(self, line: str) -> Rank | None:
        """Learn from a line of output; return the rank that has failed, if the line says so."""
        facts = parse_event(line, self._launch)
        with self._lock:
            if facts is not None:
                return self._take_event(facts)
            self._take_phase(line)
            return None

    def _take_event(self, facts: dict[str, Any]) -> Rank | None:
        if facts["rank"] >= len(self._ranks):
            return None
        self._has_events = True
        rank = self._ranks[facts["rank"]]
        if facts["event"] == "started":
            rank.facts, rank.phase_since_s, rank.code = facts, time.monotonic(), None
            rank.process = self._local_process(facts)
        elif facts["event"] == "alive":
            rank.alive = facts
        elif facts["event"] == "ended":
            rank.code = int(facts["code"])
            return rank if rank.code else None
        return None

    def _take_phase(self, line: str) -> None:
        line = line[:_READ_CHARACTERS]
        number = phase_of(line)
        if number is None:
            return
        rank = self._ranks[rank_of(line, len(self._ranks))]
        rank.furthest = max(rank.furthest, number)
        if rank.phase != PHASES[number].name:
            rank.phase, rank.phase_since_s = PHASES[number].name, time.monotonic()

    def gone(self, now: float, *, loading: bool) -> str | None:
        """Return a message about a rank of this machine whose process is gone and whose `ended` event has not come.

        Once mpirun ends the other ranks, it passes on no output for the whole of its odls_base_sigkill_timeout, so that
        the event can be late.
        """
        with self._lock:
            watched = [rank for rank in self._ranks if rank.process is not None and rank.code is None]
        for rank in watched:
            if rank.process is None or processes.runs(rank.process):
                continue
            rank.gone_since_s = rank.gone_since_s or now
            if now - rank.gone_since_s > _EVENT_WITHIN_S and rank.code is None:
                return f"{rank} is gone, its exit code is unknown{rank.in_phase(loading=loading)}"
        return None

    def _local_process(self, facts: dict[str, Any]) -> processes.Process | None:
        """Return the rank's process; None on another machine, or in another container that has the same host name."""
        pid = facts["pid"]
        is_local = (
            facts["host"] == self._own_host and processes.environment_of(pid).get(LAUNCH_VARIABLE) == self._launch
        )
        with contextlib.suppress(OSError):  # at a limit of open files; the rank's event has to be enough then
            return processes.look_up(pid) if is_local else None
        return None

    def disagreement(self) -> str | None:
        """Return a message about ranks that would serve other files than rank 0; None while they agree."""
        with self._lock:
            first = self._ranks[0].facts
            for key, what in (("repository", "model repository"), ("checkpoint", "checkpoint")):
                known = [rank for rank in self._ranks if rank.facts.get(key)]
                odd = [rank for rank in known if first.get(key) and rank.facts[key] != first[key]]
                if odd:
                    hosts = ", ".join(sorted({str(rank.host) for rank in odd}))
                    return (
                        f"the {what} on {hosts} is not that of rank 0 on {first.get('host')} "
                        f"({odd[0].facts[key]}, {first[key]}): copy it there, or mount the same"
                    )
            return None

    def laggards(self) -> str:
        """Return why it is not ready: the ranks that never started, that have ended, or that are behind the others."""
        with self._lock:
            missing = [rank for rank in self._ranks if self._has_events and not rank.facts]
            ended = [rank for rank in self._ranks if rank.code is not None]
            running = [rank for rank in self._ranks if rank not in missing and rank not in ended]
            parts = []
            if missing:
                parts.append(f"{_listed(missing)} never started")
            if ended:
                more = f" and {len(ended) - _NAMED_RANKS} more" if len(ended) > _NAMED_RANKS else ""
                parts.append(", ".join(f"{rank} {how_ended(rank.code or 0)}" for rank in ended[:_NAMED_RANKS]) + more)
            if running:
                parts.append(_progress_of_slowest(running))
            return "; ".join(parts)

    def progress(self) -> str:
        """Return one line: how many ranks have started, and how far they are."""
        with self._lock:
            num_started = sum(bool(rank.facts) for rank in self._ranks)
            counted = len(self._ranks) > 1 and self._has_events
            started = f"{num_started} of {len(self._ranks)} ranks, " if counted else ""
            read = sum(rank.alive.get("read_bytes") or 0 for rank in self._ranks)
            volume = f", {read / 1e9:.1f} GB read" if read > 1e8 else ""
            return f"{started}{_progress_of_slowest(self._ranks)}{volume}"


def _progress_of_slowest(ranks: Sequence[Rank]) -> str:
    """Return the phase of the ranks that are furthest behind.

    Ranks that have named no phase count only when none has: most engines' ranks but 0 say little.
    """
    speaking = [rank for rank in ranks if rank.furthest >= 0] or list(ranks)
    behind = min(rank.furthest for rank in speaking)
    slowest = [rank for rank in speaking if rank.furthest == behind]
    since = min(rank.phase_since_s for rank in slowest)
    duration = f" for {time.monotonic() - since:.0f} s" if since else ""
    who = f"{_listed(slowest)}: " if len(ranks) > 1 else ""
    return f"{who}{slowest[0].phase}{duration}"


def _listed(ranks: Sequence[Rank]) -> str:
    """Return the ranks by host, as `rank 3 on node2` or `ranks 8, 9 on node2, rank 16 on node3`."""
    by_host: dict[str | None, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(rank.host, []).append(rank.number)
    return ", ".join(
        f"{'ranks' if len(numbers) > 1 else 'rank'} {_numbers(numbers)}{f' on {host}' if host else ''}"
        for host, numbers in by_host.items()
    )


def _numbers(numbers: Sequence[int]) -> str:
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))
