"""Questions to nvidia-smi, and its answers parsed: GPUs, their processes, and the links between them (NVLink)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepseek_triton_tools.doctor.machine.machine import NOT_FOUND, Done, Machine

_FORMAT = "--format=csv,noheader,nounits"
_BASIC = (
    "index",
    "name",
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
"""Drivers before R535 don't know all of these fields. One unknown field makes nvidia-smi refuse the whole query."""
_UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field')
_LOST = ("[GPU is lost]", "[GPU requires reset]")
"""Any field of a GPU may hold one of these when the GPU no longer answers."""
_ERROR_WORDS = re.compile("lost|mismatch|rror|ailed|[Uu]nable")
_MAX_MESSAGE = 160
"""Characters of a message of nvidia-smi that are shown."""
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
NO_ANSWER = "no answer before its deadline"


class NoGpusError(Exception):
    """nvidia-smi is missing, or it names no GPU. The text is what it said."""

    def __init__(self, message: str, *, is_missing: bool) -> None:
        super().__init__(message)
        self.is_missing = is_missing


@dataclass(frozen=True, kw_only=True)
class InstalledGpu:
    index: int
    name: str
    """Such as `NVIDIA H200`."""
    memory_mib: int
    used_mib: int
    compute_capability: str
    """Such as `9.0`."""
    driver: str
    is_persistent: bool | None
    """None when nvidia-smi doesn't tell."""
    is_mig: bool
    lost: str | None = None
    """`[GPU is lost]` or `[GPU requires reset]` when it no longer answers."""


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that holds memory of a GPU."""

    pid: int
    name: str
    used_mib: int | None


def gpus(machine: Machine) -> Sequence[InstalledGpu]:
    """:raises NoGpusError: when none is seen."""
    return [_gpu(row) for row in _query(machine, _BASIC)]


def error_line(machine: Machine) -> str | None:
    """Return what nvidia-smi says, beside the rows of the GPUs it sees, about a GPU that it can't reach."""
    done = machine.run("nvidia-smi", f"--query-gpu={','.join(_BASIC)}", _FORMAT)
    return next((line.strip()[:_MAX_MESSAGE] for line in done.out.splitlines() if _ERROR_WORDS.search(line)), None)


def health(machine: Machine) -> Sequence[Mapping[str, str]]:
    """Return one mapping for each GPU: field -> value, without the fields that it doesn't tell.

    :raises NoGpusError: when no GPU is seen, or the driver refuses the query.
    """
    fields: tuple[str, ...] = _HEALTH
    while fields:
        done = machine.run("nvidia-smi", f"--query-gpu={','.join(('index', *fields))}", _FORMAT)
        unknown = _UNKNOWN_FIELD.search(done.out + done.err)
        if done.code == 0 or unknown is None or unknown[1] not in fields:
            break
        fields = tuple(field for field in fields if field != unknown[1])
    rows = _query(machine, ("index", *fields))
    return [{name: value for name, value in row.items() if not _is_unknown(value)} for row in rows]


def gpu_processes(machine: Machine) -> Sequence[GpuProcess]:
    done = machine.run("nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", _FORMAT)
    rows = [[cell.strip() for cell in line.split(",")] for line in done.out.splitlines()] if done.code == 0 else []
    return [
        GpuProcess(pid=int(pid), name=", ".join(name), used_mib=int(used) if used.isdecimal() else None)
        for pid, *name, used in (row for row in rows if len(row) >= 3)
        if pid.isdecimal()
    ]


def links(machine: Machine) -> Mapping[tuple[int, int], str]:
    """Return how each two GPUs are joined: `NV18`, `PIX`, `PHB`, `SYS` and so on; {} when it doesn't tell."""
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


def _query(machine: Machine, fields: Sequence[str]) -> Sequence[Mapping[str, str]]:
    done = machine.run("nvidia-smi", f"--query-gpu={','.join(fields)}", _FORMAT)
    if done.code != 0:
        raise NoGpusError(_message(done), is_missing=done.code == NOT_FOUND)
    rows = [[cell.strip() for cell in line.split(",")] for line in done.out.splitlines() if line.strip()]
    whole = [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]
    if not whole:
        raise NoGpusError(_message(done), is_missing=False)
    return whole


def _message(done: Done) -> str:
    """Return the line that tells most: rows of the GPUs that still answer may come before it."""
    if done.code is None:
        return NO_ANSWER
    lines = [line.strip() for line in f"{done.out}\n{done.err}".splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR_WORDS.search(line)] or lines
    return errors[0][:_MAX_MESSAGE] if errors else f"it names no GPU, and ended with {done.code}"


def _gpu(row: Mapping[str, str]) -> InstalledGpu:
    persistence = row["persistence_mode"]
    return InstalledGpu(
        index=_number(row["index"]),
        name=row["name"],
        memory_mib=_number(row["memory.total"]),
        used_mib=_number(row["memory.used"]),
        compute_capability=row["compute_cap"],
        driver=row["driver_version"],
        is_persistent=None if _is_unknown(persistence) else persistence == "Enabled",
        is_mig=row["mig.mode.current"] == "Enabled",
        lost=next((cell for cell in row.values() if cell in _LOST), None),
    )


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _is_unknown(value: str) -> bool:
    return value.strip("[]") in ("N/A", "Not Supported", "Unknown Error", "")
