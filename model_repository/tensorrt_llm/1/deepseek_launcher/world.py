"""The ranks of a launch: which have come, where, how far they are, and which have gone."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepseek_launcher import process_table, rank_events
from deepseek_launcher.children import how_ended
from deepseek_launcher.launch_tag import LAUNCH
from deepseek_launcher.phases import PHASES, STARTED, phase_of, rank_of

_WORD_COMES_S = 2
_NAMED_RANKS = 8
_READ_CHARACTERS = 4096
"""Of a line: what the engine says of its phase is at the beginning."""


@dataclass
class Rank:
    """What is known of one rank."""

    number: int
    expected_host: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """Of its `started` line."""
    alive: dict[str, Any] = field(default_factory=dict)
    """Of its last `alive` line."""
    furthest: int = -1
    """The latest of PHASES that it has reached."""
    phase: str = STARTED
    phase_since_s: float = 0.0
    process: process_table.Process | None = None
    """Where it is on this machine."""
    gone_since_s: float | None = None
    code: int | None = None
    """Of its command, when that has ended."""

    @property
    def host(self) -> str | None:
        return self.facts.get("host") or self.expected_host

    def last_words(self, *, loading: bool) -> str:
        """How it ended, where, and in which phase of a start."""
        return f"{self} {how_ended(self.code or 0)}{self.in_phase(loading=loading)}"

    def in_phase(self, *, loading: bool) -> str:
        return f" (phase: {self.phase})" if loading else ""

    def __str__(self) -> str:
        return f"rank {self.number} on {self.host}" if self.host else f"rank {self.number}"


class World:
    """Fed with the launch's output, line by line, by one thread, and asked by another."""

    def __init__(self, size: int, *, launch: str, ranks_per_node: int | None = None, hosts: Sequence[str] = ()) -> None:
        """`launch`: its ranks on this machine are watched as processes, too."""
        self._lock = threading.Lock()
        each = ranks_per_node or max(1, size // len(hosts)) if hosts else size
        self._ranks = [Rank(number, _nth(hosts, number // each)) for number in range(size)]
        self._launch = launch
        self._own_host = socket.gethostname()
        self.announced = False
        """Whether ranks tell of themselves: they don't where the command has no `supervise.py rank` in it."""

    def take(self, line: str) -> Rank | None:
        """Learn from a line; the rank that has ended and was not to, if it says that."""
        facts = rank_events.parse(line, self._launch)
        with self._lock:
            if facts is not None:
                return self._learn(facts)
            self._follow(line)
            return None

    def _learn(self, facts: dict[str, Any]) -> Rank | None:
        if facts["rank"] >= len(self._ranks):
            return None
        self.announced = True
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

    def gone(self, now: float, *, loading: bool) -> str | None:
        """The sentence for a rank on this machine that is gone, and from which no word of its end has come.

        mpirun hands on no output for the whole of its odls_base_sigkill_timeout once it ends the others, so that such
        a word can be late.
        """
        with self._lock:
            watched = [rank for rank in self._ranks if rank.process is not None and rank.code is None]
        for rank in watched:
            if rank.process is None or process_table.runs(rank.process):
                continue
            rank.gone_since_s = rank.gone_since_s or now
            if now - rank.gone_since_s > _WORD_COMES_S and rank.code is None:
                return f"{rank} is gone without a word{rank.in_phase(loading=loading)}"
        return None

    def _local_process(self, facts: dict[str, Any]) -> process_table.Process | None:
        """None also where another container has this one's host name: its process numbers are not ours."""
        pid = facts["pid"]
        ours = facts["host"] == self._own_host and process_table.environment(pid).get(LAUNCH) == self._launch
        with contextlib.suppress(OSError):  # at a limit; then its word has to do
            return process_table.look_up(pid) if ours else None
        return None

    def disagreement(self) -> str | None:
        """Which ranks would serve something else than rank 0; None while they agree."""
        with self._lock:
            return self._disagreement()

    def _disagreement(self) -> str | None:
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
        """Why it is not ready: the ranks that never came, that have ended, or that are behind the others."""
        with self._lock:
            return self._laggards()

    def _laggards(self) -> str:
        missing = [rank for rank in self._ranks if self.announced and not rank.facts]
        ended = [rank for rank in self._ranks if rank.code is not None]
        running = [rank for rank in self._ranks if rank not in missing and rank not in ended]
        parts = []
        if missing:
            parts.append(f"{_listed(missing)} never started")
        if ended:
            more = f" and {len(ended) - _NAMED_RANKS} more" if len(ended) > _NAMED_RANKS else ""
            parts.append(", ".join(f"{rank} {how_ended(rank.code or 0)}" for rank in ended[:_NAMED_RANKS]) + more)
        if running:
            parts.append(_standing(running))
        return "; ".join(parts)

    def progress(self) -> str:
        """One line: how many have come, and how far they are."""
        with self._lock:
            return self._progress()

    def _progress(self) -> str:
        here = sum(bool(rank.facts) for rank in self._ranks)
        came = f"{here} of {len(self._ranks)} ranks, " if len(self._ranks) > 1 and self.announced else ""
        read = sum(rank.alive.get("read_bytes") or 0 for rank in self._ranks)
        volume = f", {read / 1e9:.1f} GB read" if read > 1e8 else ""
        return f"{came}{_standing(self._ranks)}{volume}"

    def _follow(self, line: str) -> None:
        line = line[:_READ_CHARACTERS]
        number = phase_of(line)
        if number is None:
            return
        rank = self._ranks[rank_of(line, len(self._ranks))]
        rank.furthest = max(rank.furthest, number)
        if rank.phase != PHASES[number].name:
            rank.phase, rank.phase_since_s = PHASES[number].name, time.monotonic()


def _standing(ranks: Sequence[Rank]) -> str:
    """The phase of those that are furthest behind among those that speak; most engines' ranks but 0 say little."""
    speaking = [rank for rank in ranks if rank.furthest >= 0] or list(ranks)
    behind = min(rank.furthest for rank in speaking)
    last = [rank for rank in speaking if rank.furthest == behind]
    since = min(rank.phase_since_s for rank in last)
    lasting = f" for {time.monotonic() - since:.0f} s" if since else ""
    who = f"{_listed(last)}: " if len(ranks) > 1 else ""
    return f"{who}{last[0].phase}{lasting}"


def _listed(ranks: Sequence[Rank]) -> str:
    """`rank 3 on node2`, `ranks 8, 9 on node2; ...`"""
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


def _nth(hosts: Iterable[str], number: int) -> str | None:
    return dict(enumerate(hosts)).get(number)
