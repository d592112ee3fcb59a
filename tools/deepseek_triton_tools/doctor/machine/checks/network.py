"""Ports, network interfaces and host names."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from deepseek_triton_tools.doctor.machine.expected import Expected
from deepseek_triton_tools.doctor.machine.machine import Interface, Machine
from deepseek_triton_tools.doctor.machine.machine_finding import MachineFinding, error, note, ok, warning

_VIRTUAL = re.compile(r"docker|veth|virbr|br-|cni|flannel|cali|lxc|tun|tap|ifb|dummy|kube")
"""Beginnings of the names of interfaces that don't lead to another machine."""
_SEND_BUFFER = "/proc/sys/net/core/wmem_default"
_SEND_BUFFER_WANTED = 2**24
"""Bytes with which no stream was torn (docs/tritonserver.md). Linux's default is 212,992."""
_BYTES_PER_RESPONSE = 768
"""One waiting response takes so many of it: 212,992 bytes take 278, and 16 MiB take 21,846 (Linux 6.18, x86-64)."""


def check_ports(machine: Machine, expected: Expected) -> MachineFinding:
    ports = {"HTTP": expected.http_port, "gRPC": expected.grpc_port, "metrics": expected.metrics_port}
    taken = {name: holder for name, port in ports.items() if (holder := machine.listener(port))}
    if not taken:
        return ok("free: " + ", ".join(f"{name} {port}" for name, port in ports.items()))
    result = "; ".join(f"{ports[name]} ({name}) is taken by {holder}" for name, holder in taken.items())
    cause = "tritonserver opens its ports only after the model has loaded, and then it would end"
    fix = "end that process (deepseek-triton launch list, launch stop), or set HTTP_PORT, GRPC_PORT and METRICS_PORT"
    return error(result, cause, fix) if expected.repository else note(result, cause, fix)


def check_send_buffer(machine: Machine, expected: Expected) -> MachineFinding:
    """Check the queue of each thread of tritonserver's HTTP front end, a pair of Unix sockets with default buffers."""
    size = int(machine.read(_SEND_BUFFER))
    result = f"{size} bytes, which take {size // _BYTES_PER_RESPONSE + 1} responses"
    if size >= _SEND_BUFFER_WANTED:
        return ok(result)
    cause = "a thread of tritonserver's HTTP front end that falls further behind loses responses, and streams are torn"
    fix = f"sysctl -w net.core.wmem_default={_SEND_BUFFER_WANTED} on the host before the server starts, or use grpc://"
    return note(result, cause, fix)


def check_interface(machine: Machine, expected: Expected) -> MachineFinding:
    found = machine.interfaces()
    if expected.interface:
        return _named_interfaces(found, expected.interface)
    usable = [each for each in found if _is_usable(each) and not _VIRTUAL.match(each.name)]
    if not usable:
        result = "none but loopback is up with an address"
        if expected.num_nodes > 1 or expected.hosts:
            fix = "bring an interface up, or join the container to the network"
            return error(result, "no other machine can be reached", fix)
        return note(result, "this is enough for one machine; no other machine can be reached")
    route = _default_route(machine)
    chosen = next((each for each in usable if each.name == route), usable[0])
    if expected.has_several_hosts and len(usable) > 1:
        names = ", ".join(each.name for each in usable)
        cause = f"MPI and NCCL may choose any of {names}, and a different one on each host, and then wait for ever"
        return warning(f"{len(usable)} to choose from", cause, f"name one: --interface, INTERFACE={chosen.name}")
    return ok(f"{chosen.name} {', '.join(chosen.addresses)}")


def _named_interfaces(found: Sequence[Interface], names: str) -> MachineFinding:
    """:param names: separated by commas, as NCCL_SOCKET_IFNAME takes them."""
    cause = "MPI and NCCL are told to use it"
    here = ", ".join(each.name for each in found)
    for name in names.split(","):
        each = next((each for each in found if each.name == name), None)
        if each is None:
            return error(f"{name} does not exist", cause, f"name one of {here}")
        if not _is_usable(each):
            why = "is down" if not each.is_up else "has no address"
            return error(f"{name} {why}", cause, f"bring it up, or name one of {here}")
    chosen = [each for each in found if each.name in names.split(",")]
    return ok("; ".join(f"{each.name} {', '.join(each.addresses)}" for each in chosen))


def _is_usable(interface: Interface) -> bool:
    return interface.is_up and bool(interface.addresses) and interface.name != "lo"


def _default_route(machine: Machine) -> str | None:
    """Return the default route's interface by /proc/net/route, whose columns are name, destination in hex and so on."""
    try:
        rows = [line.split() for line in machine.read("/proc/net/route").splitlines()[1:]]
    except OSError:
        return None
    return next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), None)


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
    program = machine.which("ssh")
    if program:
        return ok(program)
    cause, fix = "mpirun starts the ranks of other hosts by ssh", "apt install openssh-client"
    return error("none", cause, fix) if expected.has_several_hosts else note("none", cause, fix, blocks=True)
