"""All checks on one machine, as a report that is data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from deepseek_triton_tools.doctor.machine.check_table import CHECKS
from deepseek_triton_tools.doctor.machine.checks import gpu, mpi_setup, software, storage
from deepseek_triton_tools.doctor.machine.expected import Expected
from deepseek_triton_tools.doctor.machine.machine import Machine
from deepseek_triton_tools.doctor.machine.machine_finding import (
    MachineCheck,
    MachineFinding,
    Reported,
    skipped,
    warning,
)

MACHINE = "machine"
"""The fact that tells machines apart: containers and namespaces of one kernel have names of their own."""
_BOOT = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, kw_only=True)
class HostReport:
    host: str
    findings: tuple[Reported, ...]
    facts: Mapping[str, str]
    """What has to be the same on every host, and `machine`, which has not: name -> value, without what is not known."""
    began: float
    """By the host's own clock, seconds since 1970."""
    ended: float


def examine(
    machine: Machine, expected: Expected, *, host: str | None = None, checks: Sequence[MachineCheck] = CHECKS
) -> HostReport:
    """
    :param host: what the findings call it; its own name unless given.
    """
    host = host or machine.hostname
    began = machine.time()
    reported = [
        Reported(
            check=check.id, title=check.title, host=host, finding=_run(check, machine, expected), needs=check.needs
        )
        for check in checks
    ]
    return HostReport(
        host=host, findings=tuple(reported), facts=_facts(machine, expected), began=began, ended=machine.time()
    )


def _run(check: MachineCheck, machine: Machine, expected: Expected) -> MachineFinding:
    try:
        return check.run(machine, expected)
    except OSError as problem:
        what = f"{problem.filename}: " if problem.filename else ""
        return skipped(f"can't be looked at: {what}{problem.strerror or problem}")
    except Exception as problem:  # a fault in one check must not keep back what the others found
        what = f"{type(problem).__name__}: {problem}"
        return warning("the check itself failed", what, "report it, with this line")


def _facts(machine: Machine, expected: Expected) -> Mapping[str, str]:
    packages = machine.python.packages
    asked: Mapping[str, Callable[[], str | None]] = {
        MACHINE: lambda: f"{machine.hostname}, boot {machine.read(_BOOT).strip()}",
        "Python": lambda: machine.python.version,
        "TensorRT-LLM": lambda: packages.get("tensorrt_llm"),
        "container": lambda: software.container_tag(machine),
        "mpi4py": lambda: packages.get("mpi4py"),
        "MPI": lambda: " ".join(mpi_setup.mpi_version(machine) or ()),
        "GPUs": lambda: gpu.counted(machine),
        "GPU driver": lambda: gpu.driver(machine),
        "repository": lambda: (
            storage.repository_digest(machine, expected.repository)
            if expected.repository and machine.is_folder(expected.repository)
            else None
        ),
        "checkpoint index": lambda: storage.index_digest(machine, expected),
    }
    facts = {}
    for name, ask in asked.items():
        try:
            facts[name] = ask() or ""
        except OSError:  # a check has said so
            facts[name] = ""
    return {name: value for name, value in facts.items() if value}


def report_to_json(report: HostReport) -> str:
    return json.dumps(asdict(report))


def report_from_json(text: str) -> HostReport:
    """:raises ValueError: when it is none."""
    try:
        values = json.loads(text)
        values["findings"] = tuple(
            Reported(**{**row, "finding": MachineFinding(**row["finding"]), "needs": tuple(row["needs"])})
            for row in values["findings"]
        )
        return HostReport(**values)
    except (KeyError, TypeError) as problem:
        raise ValueError(f"not a report: {problem}") from problem
