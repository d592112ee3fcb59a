"""A pair on disk: DIR/context has the repository of the servers that read prompts, DIR/generation the other one's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deepseek_triton_build.check import MANIFEST, read_stamp
from deepseek_triton_build.text import safe_name
from deepseek_triton_tools.launching.launch_settings import LaunchOptions
from deepseek_triton_tools.repository.launch_facts import START_SCRIPT, LaunchFacts, facts_of
from deepseek_triton_tools.tool_errors import RepositoryError

CONTEXT, GENERATION = "context", "generation"
SIDES = (CONTEXT, GENERATION)
"""Names of the two folders, and of the roles of their servers."""
MAX_SERVERS = 999
"""Servers of a side. Their numbers are parts of names whose length is limited."""
_PROFILES = {"ctx": CONTEXT, "gen": GENERATION}


@dataclass(frozen=True, kw_only=True)
class PairSide:
    """The servers of one side, which all run the same repository."""

    role: str
    """One of SIDES."""
    facts: LaunchFacts
    count: int

    @property
    def num_nodes(self) -> int:
        """Nodes of all servers together. No two servers share a node."""
        return self.count * self.facts.nodes


@dataclass(frozen=True, kw_only=True)
class LaunchedPair:
    """Context and generation servers that share requests."""

    source: str
    """The folder's path as the user wrote it."""
    context: PairSide
    generation: PairSide

    @property
    def folder(self) -> Path:
        return self.context.facts.folder.parent

    @property
    def sides(self) -> tuple[PairSide, PairSide]:
        return self.context, self.generation

    @property
    def num_nodes(self) -> int:
        return sum(side.num_nodes for side in self.sides)

    def refusals(self) -> Iterator[str]:
        """Yield what is wrong with the numbers of servers, in every form."""
        for side in self.sides:
            if side.count > MAX_SERVERS:
                yield f"--{side.role}-servers: expected at most {MAX_SERVERS}, got {side.count}"

    @property
    def what(self) -> str:
        """A line about the servers, for people."""
        sides = []
        for side in self.sides:
            servers = f"{side.count} {side.role} server" + ("s" if side.count > 1 else "")
            nodes = f"{side.facts.nodes} nodes" if side.facts.nodes > 1 else "one node"
            ranks = f"{side.facts.num_gpus} ranks" if side.facts.num_gpus > 1 else "one rank"
            sides.append(f"{servers} of {ranks} on {nodes} each")
        return f"{self.context.facts.model}: {' and '.join(sides)}."


def is_pair(source: str) -> bool:
    """Whether the folder is a pair or half of one, and no repository itself."""
    return not _has_start_script(source) and any(_has_start_script(os.path.join(source, role)) for role in SIDES)


def _has_start_script(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, START_SCRIPT))


def pair_of(source: str, options: LaunchOptions) -> LaunchedPair:
    """Read both sides. Their numbers of servers are the options', else those that the folder was planned for, else 1.

    :raises RepositoryError: when a side is missing, can't be launched, or doesn't fit the other one.
    :raises CheckpointError: when the checkpoint's size is not known.
    """
    missing = [role for role in SIDES if not _has_start_script(os.path.join(source, role))]
    if missing:
        raise RepositoryError(
            f"{safe_name(source)} is half of a pair: expected {CONTEXT}/ and {GENERATION}/ in it, and "
            f"{missing[0]}/{START_SCRIPT} is missing: copy the whole folder, or write it anew with "
            "build --profile disagg"
        )
    stamp, _ = read_stamp(Path(source), "")
    sides = []
    for role, count in ((CONTEXT, options.context_servers), (GENERATION, options.generation_servers)):
        planned = stamp.values.get(f"{role}_servers")
        default = planned if isinstance(planned, int) and planned > 0 else 1
        sides.append(PairSide(role=role, facts=facts_of(os.path.join(source, role)), count=count or default))
    context, generation = sides
    if wrong := list(_misfits(context, generation)):
        raise RepositoryError(
            f"{safe_name(source)}: {'; '.join(wrong)}: write both sides anew with one build --profile disagg"
        )
    return LaunchedPair(source=source, context=context, generation=generation)


def _misfits(context: PairSide, generation: PairSide) -> Iterator[str]:
    stamps = [read_stamp(side.facts.version_dir.parent, "")[0] for side in (context, generation)]
    for side, stamp in zip((context, generation), stamps, strict=True):
        other = _PROFILES.get(stamp.text("profile") or "", side.role)
        if other != side.role:
            yield f"{side.role}/ holds a {other} server, by its {MANIFEST}"
    first, second = (
        {
            "models": side.facts.model,
            "engines": side.facts.engine,
            "releases": side.facts.release,
            "variants": stamp.text("variant"),
            "checkpoints": ", ".join(side.facts.serving.checkpoints) if side.facts.serving else "none",
        }
        for side, stamp in zip((context, generation), stamps, strict=True)
    )
    for what, value in first.items():
        if value != second[what]:
            yield f"{CONTEXT}/ and {GENERATION}/ are for different {what}, {value} and {second[what]}"
