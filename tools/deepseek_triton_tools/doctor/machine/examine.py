"""All checks on one machine, or its settings. The report is plain data, which JSON carries."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from deepseek_triton_tools.doctor.machine import nvidia_smi
from deepseek_triton_tools.doctor.machine.capabilities import concerns
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
from deepseek_triton_tools.doctor.machine.tuning.read_settings import read_settings
from deepseek_triton_tools.doctor.machine.tuning.setting import MachineSetting

MACHINE = "machine"
"""The fact that tells machines apart. A host name can't: containers of one kernel have names of their own."""
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, kw_only=True)
class HostReport:
    host: str
    findings: tuple[Reported, ...]
    facts: Mapping[str, str]
    """Facts that must be the same on every host, and `machine`, which must differ. Unknown ones are left out."""
    began: float
    """Seconds since 1970 by the host's own clock, before the first check."""
    ended: float
    """The same clock after the last check."""
    settings: tuple[MachineSetting, ...] = ()


def examine(
    machine: Machine, expected: Expected, *, host: str | None = None, checks: Sequence[MachineCheck] = CHECKS
) -> HostReport:
    """Run the checks, or read the settings if they are asked for.

    :param host: the host's name in the findings; the machine's own name unless given.
    """
    host = host or machine.hostname
    began = machine.time()
    if expected.tune:
        settings = read_settings(machine, expected)
        return HostReport(host=host, findings=(), facts={}, began=began, ended=machine.time(), settings=settings)
    reported = []
    for check in checks:
        finding = _run(check, machine, expected)
        reported.append(Reported(check=check.id, title=check.title, host=host, finding=finding, needs=check.needs))
    facts = _facts(machine, expected)
    return HostReport(host=host, findings=tuple(reported), facts=facts, began=began, ended=machine.time())


def _run(check: MachineCheck, machine: Machine, expected: Expected) -> MachineFinding:
    try:
        finding = check.run(machine, expected)
        # It still says no to the capabilities that need it.
        return finding if concerns(check.needs, expected) else replace(finding, level="skipped")
    except nvidia_smi.NoGpusError:  # check_gpus says why
        return skipped("no GPU is seen")
    except OSError as problem:
        what = f"{problem.filename}: " if problem.filename else ""
        return skipped(f"can't be checked: {what}{problem.strerror or problem}")
    except Exception as problem:  # a fault in one check must not hide what the others found
        what = f"{type(problem).__name__}: {problem}"
        return warning("the check itself failed", what, "this is a bug in doctor: report it with this line")


def _facts(machine: Machine, expected: Expected) -> Mapping[str, str]:
    packages = machine.python.packages
    sources: Mapping[str, Callable[[], str | None]] = {
        MACHINE: lambda: f"{machine.hostname}, boot {machine.read(_BOOT_ID).strip()}",
        "Python": lambda: machine.python.version,
        "TensorRT-LLM": lambda: packages.get("tensorrt_llm"),
        "vLLM": lambda: packages.get("vllm"),
        "container": lambda: software.container_tag(machine),
        "mpi4py": lambda: packages.get("mpi4py"),
        "MPI": lambda: " ".join(mpi_setup.mpi_version(machine) or ()),
        "GPUs": lambda: gpu.gpu_models(nvidia_smi.gpus(machine)),
        "GPU driver": lambda: gpu.driver_version(machine),
        "repository": lambda: (
            storage.repository_digest(machine, expected.repository)
            if expected.repository and machine.is_folder(expected.repository)
            else None
        ),
        "checkpoint index": lambda: storage.index_digest(machine, expected),
    }
    facts = {}
    for name, source in sources.items():
        try:
            facts[name] = source() or ""
        except (OSError, nvidia_smi.NoGpusError):  # a check has reported it
            facts[name] = ""
    return {name: value for name, value in facts.items() if value}


def report_to_json(report: HostReport) -> str:
    return json.dumps(asdict(report))


def report_from_json(text: str) -> HostReport:
    """:raises ValueError: when the text is no report."""
    try:
        values = json.loads(text)
        values["findings"] = tuple(
            Reported(**{**row, "finding": MachineFinding(**row["finding"]), "needs": tuple(row["needs"])})
            for row in values["findings"]
        )
        values["settings"] = tuple(
            MachineSetting(**{**row, "commands": tuple(row["commands"])}) for row in values["settings"]
        )
        return HostReport(**values)
    except (KeyError, TypeError) as problem:
        raise ValueError(f"not a report: {problem}") from problem
