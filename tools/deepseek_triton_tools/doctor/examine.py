"""Every check, in the order in which they are shown, and a run of all on one machine. docs/doctor.md describes them.

The report is plain data, which JSON carries from another host or another Python, where `main` runs.
"""

import json
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from deepseek_triton_tools.doctor import gpu, launches, mpi, software, storage, system
from deepseek_triton_tools.doctor.findings import (
    CLIENT,
    DEMO,
    DOCKER,
    KUBERNETES,
    MPIRUN,
    NEED_ENGINE,
    NEED_GPUS,
    NEED_REPOSITORY,
    NEED_TOOLS,
    NEED_TRITONSERVER,
    SERVE,
    SERVE_VLLM,
    SLURM,
    Expected,
    MachineCheck,
    MachineFinding,
    Reported,
    RepositoryFinding,
    concerns,
    expected_from_json,
    skipped,
    warning,
)
from deepseek_triton_tools.doctor.machine import Machine
from deepseek_triton_tools.doctor.tuning import MachineSetting, read_settings

CHECKS: Sequence[MachineCheck] = (
    MachineCheck("python", "Python", NEED_TRITONSERVER, software.check_python),
    MachineCheck("libpython", "libpython", NEED_TRITONSERVER, software.check_libpython),
    MachineCheck("glibc", "C library", NEED_TRITONSERVER, software.check_glibc),
    MachineCheck("numpy", "numpy", NEED_TRITONSERVER, software.check_numpy),
    MachineCheck("yaml", "PyYAML", NEED_TRITONSERVER, software.check_yaml),
    MachineCheck("tools", "the tools' packages", NEED_TOOLS, software.check_tools),
    MachineCheck("client", "the client's packages", (CLIENT,), software.check_client),
    MachineCheck("reference", "the demo's packages", (DEMO,), software.check_reference),
    MachineCheck("tritonserver", "tritonserver", NEED_TRITONSERVER, software.check_tritonserver),
    MachineCheck("python-backend", "Python backend", NEED_TRITONSERVER, software.check_python_backend),
    MachineCheck("tensorrt-llm", "TensorRT-LLM", (SERVE,), software.check_tensorrt_llm),
    MachineCheck("vllm", "vLLM", (SERVE_VLLM,), software.check_vllm),
    MachineCheck("torch", "PyTorch", (SERVE_VLLM,), software.check_torch),
    MachineCheck("locale", "locale", (SERVE_VLLM,), software.check_locale),
    MachineCheck("nvcc", "NVCC", (SERVE,), software.check_nvcc),
    MachineCheck("known-bad", "known faults", NEED_ENGINE, software.check_known_bad),
    MachineCheck("mpi", "MPI", (SERVE, MPIRUN), mpi.check_mpi),
    MachineCheck("mpi-hello", "MPI, two ranks", (SERVE, MPIRUN), mpi.check_hello),
    MachineCheck("mpi-spawn", "MPI, spawning", (SERVE,), mpi.check_spawn),
    MachineCheck("gpus", "GPUs", NEED_GPUS, gpu.check_gpus),
    MachineCheck("gpu-driver", "GPU driver", NEED_GPUS, gpu.check_driver),
    MachineCheck("gpu-memory", "GPU memory", NEED_GPUS, gpu.check_memory),
    MachineCheck("gpu-health", "GPU health", NEED_GPUS, gpu.check_health),
    MachineCheck("gpu-mig", "MIG", NEED_GPUS, gpu.check_mig),
    MachineCheck("gpu-links", "GPU links", (), gpu.check_links),
    MachineCheck("gpu-persistence", "GPU persistence", (), gpu.check_persistence),
    MachineCheck("shm", "/dev/shm", NEED_TRITONSERVER, system.check_shm),
    MachineCheck("memlock", "locked memory", NEED_ENGINE, system.check_memlock),
    MachineCheck("nofile", "file descriptors", (), system.check_nofile),
    MachineCheck("stack", "stack", (), system.check_stack),
    MachineCheck("container", "container", (), system.check_container),
    MachineCheck("seccomp", "system calls", (), system.check_seccomp),
    MachineCheck("repository", "repository", NEED_REPOSITORY, storage.check_repository),
    MachineCheck("checkpoint", "checkpoint", NEED_REPOSITORY, storage.check_checkpoint),
    MachineCheck("host-memory", "host memory", NEED_GPUS, storage.check_host_memory),
    MachineCheck("disk", "disk", (), storage.check_disk),
    MachineCheck("ports", "ports", NEED_REPOSITORY, system.check_ports),
    MachineCheck("send-buffer", "send buffer", (), system.check_send_buffer),
    MachineCheck("interface", "network interface", (MPIRUN,), system.check_interface),
    MachineCheck("hostname", "host name", (MPIRUN,), system.check_hostname),
    MachineCheck("ssh", "ssh", (MPIRUN,), system.check_ssh),
    MachineCheck("leftovers", "leftovers", (), launches.check_leftovers),
    MachineCheck("docker", "Docker", (DOCKER,), launches.check_docker),
    MachineCheck("slurm", "Slurm", (SLURM,), launches.check_slurm),
    MachineCheck("kubectl", "Kubernetes", (KUBERNETES,), launches.check_kubectl),
)
# The fact that tells machines apart. A host name can't: containers of one kernel have names of their own.
MACHINE = "machine"
EXPECTED_FILE = "expected.json"
# Begins the line of the report: a login script may print other lines before it.
REPORT_PREFIX = "deepseek-triton diagnosis "
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
    """Run the checks, or read the settings if these are to be shown.

    :param host: the host's name in the findings; the machine's own name unless given.
    """
    host = host or machine.hostname
    began = machine.time()
    if expected.tune:
        settings = read_settings(machine, expected)
        return HostReport(host=host, findings=(), facts={}, began=began, ended=machine.time(), settings=settings)
    findings = tuple(_reported(one, machine, expected, host) for one in checks)
    facts = _facts(machine, expected)
    return HostReport(host=host, findings=findings, facts=facts, began=began, ended=machine.time())


def _reported(check: MachineCheck, machine: Machine, expected: Expected, host: str) -> Reported:
    try:
        finding = check.run(machine, expected)
        if not concerns(check.needs, expected):  # it still says no to the capabilities that need it
            finding = replace(finding, level="skipped")
    except gpu.NoGpusError:  # check_gpus says why
        finding = skipped("no GPU is seen")
    except OSError as problem:
        what = f"{problem.filename}: " if problem.filename else ""
        finding = skipped(f"can't be checked: {what}{problem.strerror or problem}")
    except Exception as problem:  # a fault in one check must not hide what the others found
        what = f"{type(problem).__name__}: {problem}"
        finding = warning("the check itself failed", what, "this is a bug in doctor: report it with this line")
    of_repository = tuple(name for name in check.needs if name in NEED_REPOSITORY)
    needs = of_repository if isinstance(finding, RepositoryFinding) else check.needs
    if check.needs == NEED_GPUS and not expected.uses_gpus:  # docker starts an embedded engine without one
        needs = NEED_ENGINE
    return Reported(check=check.id, title=check.title, host=host, finding=finding, needs=needs)


def _facts(machine: Machine, expected: Expected) -> Mapping[str, str]:
    packages = machine.python.packages
    facts = {
        "Python": machine.python.version,
        "TensorRT-LLM": packages.get("tensorrt_llm"),
        "vLLM": packages.get("vllm"),
        "container": software.container_tag(machine),
        "mpi4py": packages.get("mpi4py"),
        "MPI": " ".join(mpi.mpi_version(machine) or ()),
    }
    sources: Mapping[str, Callable[[], str | None]] = {
        MACHINE: lambda: f"{machine.hostname}, boot {machine.read(_BOOT_ID).strip()}",
        "GPUs": lambda: gpu.gpu_models(gpu.gpus(machine)),
        "GPU driver": lambda: gpu.gpus(machine)[0].driver,
        "repository": lambda: (
            storage.repository_digest(machine, expected.repository)
            if expected.repository and machine.is_folder(expected.repository)
            else None
        ),
        "checkpoint index": lambda: storage.index_digest(machine, expected),
    }
    for name, source in sources.items():
        with suppress(OSError, gpu.NoGpusError):  # a check has reported it
            facts[name] = source()
    return {name: value for name, value in facts.items() if value}


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


def main() -> None:
    """Read the needs of the repository from the zip, run all checks, and print their report on one line."""
    # hosts.BOOTSTRAP has put the zip first.
    with zipfile.ZipFile(sys.path[0]) as packed:
        expected = expected_from_json(packed.read(EXPECTED_FILE).decode())
    print(f"\n{REPORT_PREFIX}{json.dumps(asdict(examine(Machine(), expected)))}", flush=True)
