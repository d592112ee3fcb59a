"""Shared memory and the limits of a process. Containers often start with too little of both."""

from __future__ import annotations

from collections.abc import Mapping

from deepseek_triton_tools.doctor.machine.checks.gpu import is_on_the_bus
from deepseek_triton_tools.doctor.machine.expected import Expected
from deepseek_triton_tools.doctor.machine.machine import Machine
from deepseek_triton_tools.doctor.machine.machine_finding import (
    MachineFinding,
    error,
    note,
    ok,
    skipped,
    warning,
    warning_or_note,
)
from deepseek_triton_tools.host.units import part_of, sized

GIB, MIB = 2**30, 2**20
SHM = "/dev/shm"
_REGION_PREFIXES = ("triton_python_backend_shm_region", "deepseek_triton_")
"""Begin the names of a tritonserver's shared memory: Triton's own prefix, and start.sh's."""
_SHM_WANTED = GIB
"""Bytes that NVIDIA asks for in a container that uses NCCL: --shm-size=1g (NCCL's user guide, troubleshooting)."""
_SHM_LEAST = 64 * MIB
"""Docker's own default. A model of the Python backend takes 1 MiB at the start and more for what it hands over; NCCL
takes some for each pair of ranks."""
_NOFILE_WANTED = 4096
"""An assumption: each open request takes a descriptor, and so do weights, workers and metrics."""
_STACK_WANTED = 8 * MIB
"""Linux's default. NVIDIA starts its containers with 64 MiB (docker --ulimit stack=67108864)."""
_CAP_IPC_LOCK = 1 << 14
_CAP_SYS_NICE = 1 << 23
"""capabilities(7), linux/capability.h."""
_ALL_USERS = ["0", "0", "4294967295"]
"""uid_map of the first user namespace (user_namespaces(7))."""


def check_shm(machine: Machine, expected: Expected) -> MachineFinding:
    try:
        disk = machine.disk(SHM)
    except OSError as problem:
        cause = "tritonserver hands requests to its Python backend through it"
        return error(f"{SHM}: {problem.strerror}", cause, f"mount a tmpfs on {SHM}")
    result = f"{part_of(disk.total - disk.free, disk.total)} used"
    fix = "docker --ipc=host, or --shm-size=16g; Kubernetes: an emptyDir with medium: Memory on /dev/shm"
    fix += _left_behind(machine)
    if disk.free < _SHM_LEAST / 2:
        return error(result, "tritonserver's Python backend ends with SIGBUS when it is full", fix)
    if disk.free < _SHM_WANTED:
        cause = f"NCCL asks for {sized(_SHM_WANTED)}, and the Python backend takes more as batches grow"
        # Several ranks can't start in the 64 MiB that docker gives.
        has_several_ranks = expected.uses_gpus and (expected.gpus_per_node or 1) > 1
        return (error if disk.total <= _SHM_LEAST and has_several_ranks else warning)(result, cause, fix)
    return ok(result)


def _left_behind(machine: Machine) -> str:
    try:
        number = sum(name.startswith(_REGION_PREFIXES) for name in machine.list_folder(SHM))
    except OSError:
        return ""
    return f"; it holds {number} regions of tritonservers: remove those of servers that have ended" if number else ""


def check_memlock(machine: Machine, expected: Expected) -> MachineFinding:
    soft, hard = machine.limit("memlock")
    if soft is None:
        return ok("unlimited")
    if _may_lock_all(machine):
        return ok(f"{sized(soft)}, which the capability IPC_LOCK lifts")
    result = f"{sized(soft)}, at most {sized(hard) if hard is not None else 'unlimited'}"
    cause = "NCCL and UCX register memory with the network cards, and registered memory counts as locked"
    fix = "ulimit -l unlimited; docker --ulimit memlock=-1; LimitMEMLOCK=infinity in a systemd unit"
    if expected.uses_gpus and expected.num_nodes > 1:
        return error(result, cause, fix)
    if not expected.uses_gpus:
        cause += "; warm files --hold=lock locks memory too"
    return warning_or_note(expected, result, cause, fix)


def check_nofile(machine: Machine, expected: Expected) -> MachineFinding:
    soft, hard = machine.limit("nofile")
    if soft is None or soft >= _NOFILE_WANTED:
        return ok("unlimited" if soft is None else f"{soft}")
    result = f"{soft}, at most {hard if hard is not None else 'unlimited'}"
    fix = "ulimit -n 65536; docker --ulimit nofile=65536; LimitNOFILE=65536 in a systemd unit"
    cause = "every open request takes a descriptor, and a server that has none left refuses connections"
    return warning(result, cause, fix)


def check_stack(machine: Machine, expected: Expected) -> MachineFinding:
    soft, _ = machine.limit("stack")
    if soft is None or soft >= _STACK_WANTED:
        return ok("unlimited" if soft is None else sized(soft))
    fix = "ulimit -s 8192; docker --ulimit stack=67108864"
    return warning(sized(soft), "Linux's default is 8 MiB: libraries that rely on it end with SIGSEGV", fix)


def check_container(machine: Machine, expected: Expected) -> MachineFinding:
    """Check whether this is a container, and which options of its start are missing."""
    kind = container_kind(machine)
    if kind is None:
        return ok("not in a container")
    missing = []
    if machine.exists(SHM) and machine.disk(SHM).total <= _SHM_LEAST:
        missing.append("--ipc=host or --shm-size")
    if expected.uses_gpus and not machine.exists("/dev/nvidiactl") and is_on_the_bus(machine):
        missing.append("--gpus all")
    if machine.limit("memlock")[0] is not None and expected.uses_gpus and not _may_lock_all(machine):
        missing.append("--ulimit memlock=-1")
    if not missing:
        return ok(kind)
    cause = "the container was started without options that serving needs"
    fix = f"start it with {', '.join(missing)}; deepseek-triton launch docker DIR --dry-run prints the whole command"
    return warning_or_note(expected, f"{kind}, without {', '.join(missing)}", cause, fix)


def container_kind(machine: Machine) -> str | None:
    """Return the kind by the files and variables that Docker, Podman, Kubernetes and Apptainer leave."""
    if machine.environ.get("KUBERNETES_SERVICE_HOST"):
        return "Kubernetes"
    if machine.exists("/.singularity.d"):
        return "Apptainer"
    if machine.exists("/run/.containerenv"):
        return "Podman"
    return "Docker" if machine.exists("/.dockerenv") else None


def check_seccomp(machine: Machine, expected: Expected) -> MachineFinding:
    """Check the system call filter: Docker's own forbids the NUMA calls unless the container has SYS_NICE."""
    try:
        status = _status(machine)
    except OSError as problem:
        return skipped(f"/proc/self/status: {problem.strerror}")
    if status.get("Seccomp") != "2":
        return ok("no system call filter")
    if _has(status, _CAP_SYS_NICE):
        return ok("a filter, with SYS_NICE")
    cause = "set_mempolicy and get_mempolicy fail, and NCCL can't place its buffers by NUMA node (NCCL's user guide)"
    return note("system calls are filtered, without SYS_NICE", cause, "docker --cap-add SYS_NICE")


def _status(machine: Machine) -> Mapping[str, str]:
    lines = machine.read("/proc/self/status").splitlines()
    return {name: value.strip() for name, colon, value in (line.partition(":") for line in lines) if colon}


def _has(status: Mapping[str, str], capability: int) -> bool:
    return bool(int(status.get("CapEff") or "0", 16) & capability)


def _may_lock_all(machine: Machine) -> bool:
    """Return whether CAP_IPC_LOCK lifts the limit (mlock(2)): not in a user namespace, as in rootless containers."""
    try:
        owners = machine.read("/proc/self/uid_map").split()
        return owners == _ALL_USERS and _has(_status(machine), _CAP_IPC_LOCK)
    except OSError:
        return False
