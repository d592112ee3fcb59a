"""These checks see what the kernel and the container leave to a process: shared memory, limits, ports, networks."""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

from deepseek_triton_tools.doctor.findings import (
    Expected,
    MachineFinding,
    RepositoryFinding,
    error,
    error_if,
    note,
    ok,
    skipped,
    warning,
    warning_or_note,
)
from deepseek_triton_tools.doctor.gpu import is_on_the_bus
from deepseek_triton_tools.doctor.machine import Interface, Machine
from deepseek_triton_tools.host.units import part_of, sized

GIB, MIB = 2**30, 2**20
SHM = "/dev/shm"
# Begin the names of a tritonserver's shared memory: Triton's own prefix, and start.sh's.
_REGION_PREFIXES = ("triton_python_backend_shm_region", "deepseek_triton_")
# Bytes that NVIDIA asks for in a container that uses NCCL: --shm-size=1g (NCCL's user guide, troubleshooting).
_SHM_WANTED = GIB
# Docker's own default. A model of the Python backend takes 1 MiB at the start and more for what it hands over; NCCL
# takes some for each pair of ranks.
_SHM_LEAST = 64 * MIB
# An assumption: each open request takes a descriptor, and so do weights, workers and metrics.
_NOFILE_WANTED = 4096
# Linux's default. NVIDIA starts its containers with 64 MiB (docker --ulimit stack=67108864).
_STACK_WANTED = 8 * MIB
# capabilities(7), linux/capability.h.
_CAP_IPC_LOCK = 1 << 14
_CAP_SYS_NICE = 1 << 23
# uid_map of the first user namespace (user_namespaces(7)).
_ALL_USERS = ["0", "0", "4294967295"]
# Beginnings of the names of interfaces that don't lead to another machine.
_VIRTUAL = re.compile(r"docker|veth|virbr|br-|cni|flannel|cali|lxc|tun|tap|ifb|dummy|kube")
_SEND_BUFFER = "/proc/sys/net/core/wmem_default"
# Bytes with which no stream was torn (docs/tritonserver.md). Linux's default is 212,992.
_SEND_BUFFER_WANTED = 2**24
# One waiting response takes so many of it: 212,992 bytes take 278, and 16 MiB take 21,846 (Linux 6.18, x86-64).
_BYTES_PER_RESPONSE = 768


def check_shm(machine: Machine, expected: Expected) -> MachineFinding:
    try:
        disk = machine.disk(SHM)
    except OSError as problem:
        cause = "tritonserver hands requests to its Python backend through it"
        return error(f"{SHM}: {problem.strerror}", cause, f"mount a tmpfs on {SHM}")
    result = f"{part_of(disk.total - disk.free, disk.total)} used"
    fix = "docker --ipc=host, or --shm-size=16g; Kubernetes: an emptyDir with medium: Memory on /dev/shm"
    if regions := [name for name in machine.list_folder(SHM) if name.startswith(_REGION_PREFIXES)]:
        fix += f"; it holds {len(regions)} regions of tritonservers: remove those of servers that have ended"
    if disk.free < _SHM_LEAST / 2:
        return error(result, "tritonserver's Python backend ends with SIGBUS when it is full", fix)
    if disk.free < expected.tables[0]:
        cause = f"Engram's tables take {sized(expected.tables[0])} of it; without room each rank keeps its own"
        return warning(result, cause, f"give it {sized(expected.tables[0] + _SHM_WANTED)}")
    if disk.free < _SHM_WANTED:
        cause = f"NCCL asks for {sized(_SHM_WANTED)}, and the Python backend takes more as batches grow"
        # Several ranks can't start in the 64 MiB that docker gives.
        if disk.total <= _SHM_LEAST and expected.uses_gpus and (expected.gpus_per_node or 1) > 1:
            return RepositoryFinding(level="error", result=result, cause=cause, fix=fix, blocks=True)
        return warning(result, cause, fix)
    return ok(result)


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
    if (kind := container_kind(machine)) is None:
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


def check_ports(machine: Machine, expected: Expected) -> MachineFinding:
    ports = {"HTTP": expected.http_port}
    cause, variables = "the server would end", "PORT for serve.sh and --http-port here"
    if expected.by_triton:
        ports |= {"gRPC": expected.grpc_port, "metrics": expected.metrics_port}
        cause = "tritonserver opens its ports only after the model has loaded, and then it would end"
        variables = "HTTP_PORT, GRPC_PORT and METRICS_PORT"
    taken = {name: holder for name, port in ports.items() if (holder := machine.listener(port))}
    if not taken:
        return ok("free: " + ", ".join(f"{name} {port}" for name, port in ports.items()))
    result = "; ".join(f"{ports[name]} ({name}) is taken by {holder}" for name, holder in taken.items())
    fix = f"end that process (deepseek-triton launch list, launch stop), or set {variables}"
    return error(result, cause, fix) if expected.repository else note(result, cause, fix)


def check_send_buffer(machine: Machine, expected: Expected) -> MachineFinding:
    """Check the queue of each thread of tritonserver's HTTP front end, a pair of Unix sockets with default buffers."""
    size = int(machine.read(_SEND_BUFFER))
    result = f"{size} bytes, which take {size // _BYTES_PER_RESPONSE + 1} responses"
    if size >= _SEND_BUFFER_WANTED or not expected.by_triton:
        return ok(result)
    cause = "a thread of tritonserver's HTTP front end that falls further behind loses responses, and streams are torn"
    fix = f"sysctl -w net.core.wmem_default={_SEND_BUFFER_WANTED} on the host before the server starts, or use grpc://"
    return note(result, cause, fix)


def check_interface(machine: Machine, expected: Expected) -> MachineFinding:
    interfaces = machine.interfaces()
    if expected.interface:
        return _named_interfaces(interfaces, expected.interface)
    usable = [each for each in interfaces if _is_usable(each) and not _VIRTUAL.match(each.name)]
    if not usable:
        result = "none but loopback is up with an address"
        if expected.num_nodes > 1 or expected.hosts:
            fix = "bring an interface up, or join the container to the network"
            return error(result, "no other machine can be reached", fix)
        return note(result, "this is enough for one machine; no other machine can be reached")
    route = None
    with suppress(OSError):
        # The columns of /proc/net/route are name, destination in hex and so on.
        rows = [line.split() for line in machine.read("/proc/net/route").splitlines()[1:]]
        route = next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), None)
    chosen = next((each for each in usable if each.name == route), usable[0])
    if expected.has_several_hosts and len(usable) > 1:
        names = ", ".join(each.name for each in usable)
        cause = f"MPI and NCCL may choose any of {names}, and a different one on each host, and then wait for ever"
        return warning(f"{len(usable)} to choose from", cause, f"name one: --interface, INTERFACE={chosen.name}")
    return ok(f"{chosen.name} {', '.join(chosen.addresses)}")


def _named_interfaces(interfaces: Sequence[Interface], names: str) -> MachineFinding:
    """:param names: separated by commas, as NCCL_SOCKET_IFNAME takes them."""
    cause = "MPI and NCCL are told to use it"
    usable = ", ".join(each.name for each in interfaces if _is_usable(each))
    other = f"name one of {usable}" if usable else "join the container to the network"
    for name in names.split(","):
        each = next((each for each in interfaces if each.name == name), None)
        if each is None or name == "lo":
            return error(f"{name} {'reaches no other machine' if each else 'does not exist'}", cause, other)
        if not _is_usable(each):
            why = "is down" if not each.is_up else "has no address"
            return error(f"{name} {why}", cause, f"bring it up, or {other}")
    chosen = [each for each in interfaces if each.name in names.split(",")]
    return ok("; ".join(f"{each.name} {', '.join(each.addresses)}" for each in chosen))


def _is_usable(interface: Interface) -> bool:
    return interface.is_up and bool(interface.addresses) and interface.name != "lo"


def check_hostname(machine: Machine, expected: Expected) -> MachineFinding:
    name = machine.hostname
    error_or_warning = error if expected.has_several_hosts else warning
    try:
        addresses = machine.resolve(name)
    except OSError as problem:
        cause = f"Open MPI looks up the host name ({problem.strerror or problem})"
        fix = f"add a line for {name} to /etc/hosts, with this machine's address"
        return error_or_warning(f"{name} has no address", cause, fix)
    own = {address for interface in machine.interfaces() for address in interface.addresses}
    beyond_loopback = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    result = f"{name} is {', '.join(addresses)}"
    if not beyond_loopback:
        if not expected.has_several_hosts:
            return ok(f"{result}, which is enough for one machine")
        cause = "the other hosts are told to connect to this loopback address, and then connect to themselves"
        return warning(result, cause, f"give {name} the address of the interface between the hosts in /etc/hosts")
    if not own.intersection(beyond_loopback):
        cause = "this is no address of this machine: MPI waits for an answer from somewhere else"
        return error_or_warning(result, cause, f"correct {name} in /etc/hosts or in the name service")
    return ok(result)


def check_ssh(machine: Machine, expected: Expected) -> MachineFinding:
    if program := machine.which("ssh"):
        return ok(program)
    cause, fix = "mpirun starts the ranks of other hosts by ssh", "apt install openssh-client"
    return error_if(expected.has_several_hosts, "none", cause, fix)
