"""What nvidia-smi says, parsed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepseek_triton_tools.doctor.machine.machine import NOT_FOUND, Done, Machine

_FORMAT = "--format=csv,noheader,nounits"
_BASIC = (
    "index",
    "name",
    "uuid",
    "memory.total",
    "memory.used",
    "compute_cap",
    "driver_version",
    "persistence_mode",
    "mig.mode.current",
)
_HEALTH = (
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "fabric.state",
    "fabric.status",
)
"""Drivers before R535 don't know all of them, and one that isn't known fails the whole question."""
_UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field')
_LOST = ("[GPU is lost]", "[GPU requires reset]")
"""In any field of a GPU that no longer answers."""
_TELLING = re.compile("lost|mismatch|rror|ailed|[Uu]nable")
_MOST_SAID = 160
"""Characters."""
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


NO_ANSWER = "no answer before its deadline"


class NoGpusError(Exception):
    """nvidia-smi is not there, or has nothing to tell; the text is what it said."""

    def __init__(self, said: str, *, is_missing: bool) -> None:
        super().__init__(said)
        self.is_missing = is_missing


@dataclass(frozen=True, kw_only=True)
class InstalledGpu:
    index: int
    name: str
    """`NVIDIA H200`."""
    uuid: str
    memory_mib: int
    used_mib: int
    compute_capability: str
    """`9.0`."""
    driver: str
    is_persistent: bool | None
    """None: it doesn't say."""
    is_mig: bool
    lost: str | None = None
    """`[GPU is lost]`, where it no longer answers."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process with memory on a GPU."""

    pid: int
    name: str
    used_mib: int | None
    gpu: str
    """Its uuid."""


def gpus(machine: Machine) -> Sequence[InstalledGpu]:
    """:raises NoGpusError: when there is none to be seen."""
    return [_gpu(row) for row in _ask(machine, _BASIC)]


def complaint(machine: Machine) -> str | None:
    """What it says beside the GPUs it sees, of one that it can't ask."""
    done = machine.run("nvidia-smi", f"--query-gpu={','.join(_BASIC)}", _FORMAT)
    return next((line.strip()[:_MOST_SAID] for line in done.out.splitlines() if _TELLING.search(line)), None)


def health(machine: Machine) -> Sequence[Mapping[str, str]]:
    """Of each GPU, by field; those that it doesn't say are left out.

    :raises NoGpusError: as gpus.
    """
    fields: tuple[str, ...] = _HEALTH
    while fields:
        done = machine.run("nvidia-smi", f"--query-gpu={','.join(('index', *fields))}", _FORMAT)
        unknown = _UNKNOWN_FIELD.search(done.out + done.err)
        if done.code == 0 or unknown is None or unknown[1] not in fields:
            break
        fields = tuple(field for field in fields if field != unknown[1])
    rows = _ask(machine, ("index", *fields))
    return [{name: value for name, value in row.items() if not _is_unsaid(value)} for row in rows]


def holders(machine: Machine) -> Sequence[Holder]:
    done = machine.run("nvidia-smi", "--query-compute-apps=pid,process_name,used_memory,gpu_uuid", _FORMAT)
    rows = [[cell.strip() for cell in line.split(",")] for line in done.out.splitlines()] if done.code == 0 else []
    return [
        Holder(pid=int(pid), name=", ".join(name), used_mib=int(used) if used.isdecimal() else None, gpu=gpu)
        for pid, *name, used, gpu in (row for row in rows if len(row) >= 4)
        if pid.isdecimal()
    ]


def links(machine: Machine) -> Mapping[tuple[int, int], str]:
    """How each two GPUs are joined: `NV18`, `PIX`, `PHB`, `SYS` and so on; {} where it doesn't say."""
    done = machine.run("nvidia-smi", "topo", "-m")
    return parse_topology(done.out) if done.code == 0 else {}


def parse_topology(text: str) -> Mapping[tuple[int, int], str]:
    rows = [_ESCAPE.sub("", line).split() for line in text.splitlines()]
    columns = next(([name for name in row if re.fullmatch(r"GPU\d+", name)] for row in rows if row), [])
    found = {}
    for row in rows:
        if len(row) > len(columns) and row[0] in columns and row[1:] != columns[1:]:
            first = int(row[0][3:])
            for name, link in zip(columns, row[1:], strict=False):
                second = int(name[3:])
                if first < second:
                    found[first, second] = link
    return found


def _ask(machine: Machine, fields: Sequence[str]) -> Sequence[Mapping[str, str]]:
    done = machine.run("nvidia-smi", f"--query-gpu={','.join(fields)}", _FORMAT)
    if done.code != 0:
        raise NoGpusError(_said(done), is_missing=done.code == NOT_FOUND)
    rows = [[cell.strip() for cell in line.split(",")] for line in done.out.splitlines() if line.strip()]
    whole = [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]
    if not whole:
        raise NoGpusError(_said(done), is_missing=False)
    return whole


def _said(done: Done) -> str:
    """The line that says most: rows of the GPUs that still answer may come before it."""
    if done.code is None:
        return NO_ANSWER
    lines = [line.strip() for line in f"{done.out}\n{done.err}".splitlines() if line.strip()]
    telling = [line for line in lines if _TELLING.search(line)] or lines
    return telling[0][:_MOST_SAID] if telling else f"it names no GPU, and ended with {done.code}"


def _gpu(row: Mapping[str, str]) -> InstalledGpu:
    persistence = row["persistence_mode"]
    return InstalledGpu(
        index=_number(row["index"]),
        name=row["name"],
        uuid=row["uuid"],
        memory_mib=_number(row["memory.total"]),
        used_mib=_number(row["memory.used"]),
        compute_capability=row["compute_cap"],
        driver=row["driver_version"],
        is_persistent=None if _is_unsaid(persistence) else persistence == "Enabled",
        is_mig=row["mig.mode.current"] == "Enabled",
        lost=next((cell for cell in row.values() if cell in _LOST), None),
    )


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _is_unsaid(value: str) -> bool:
    return value.strip("[]") in ("N/A", "Not Supported", "Unknown Error", "")
