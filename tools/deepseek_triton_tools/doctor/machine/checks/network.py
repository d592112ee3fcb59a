"""Ports, interfaces and names."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from deepseek_triton_tools.doctor.machine.expected import Expected
from deepseek_triton_tools.doctor.machine.machine import Interface, Machine
from deepseek_triton_tools.doctor.machine.machine_finding import MachineFinding, error, note, ok, warning

_VIRTUAL = re.compile(r"docker|veth|virbr|br-|cni|flannel|cali|lxc|tun|tap|ifb|dummy|kube")
"""Interfaces that don't lead to another machine."""


def check_ports(machine: Machine, expected: Expected) -> MachineFinding:
    ports = {"HTTP": expected.http_port, "gRPC": expected.grpc_port, "metrics": expected.metrics_port}
    taken = {name: holder for name, port in ports.items() if (holder := machine.listener(port))}
    said = ", ".join(f"{name} {port}" for name, port in ports.items())
    if not taken:
        return ok(f"free: {said}")
    result = "; ".join(f"{ports[name]} ({name}) is taken by {holder}" for name, holder in taken.items())
    fix = "end that (deepseek-triton launch list, launch stop), or set HTTP_PORT, GRPC_PORT and METRICS_PORT"
    cause = "tritonserver takes its ports when the model has loaded, and ends then"
    return error(result, cause, fix) if expected.repository else note(result, cause, fix)


def check_interface(machine: Machine, expected: Expected) -> MachineFinding:
    found = machine.interfaces()
    if expected.interface:
        return _named(found, expected.interface)
    chosen = _by_default(machine, found)
    if chosen is None:
        said = "none but loopback is up with an address"
        if expected.num_nodes > 1 or expected.hosts:
            return error(said, "no other machine can be reached", "bring one up, or join the container to the network")
        return note(said, "enough for one machine; no other can be reached")
    said = f"{chosen.name} {', '.join(chosen.addresses)}"
    real = [each for each in found if _is_usable(each) and not _VIRTUAL.match(each.name)]
    if (expected.num_nodes > 1 or len(expected.hosts) > 1) and len(real) > 1:
        names = ", ".join(each.name for each in real)
        cause = f"MPI and NCCL may choose any of {names}, another one on each host, and then wait for ever"
        return warning(f"{len(real)} to choose from", cause, f"name one: --interface, INTERFACE={chosen.name}")
    return ok(said)


def _named(found: Sequence[Interface], names: str) -> MachineFinding:
    """As NCCL_SOCKET_IFNAME takes them: several separated by commas."""
    for name in names.split(","):
        each = next((each for each in found if each.name == name), None)
        here = ", ".join(each.name for each in found)
        if each is None:
            return error(f"{name} is not there", "MPI and NCCL are told to use it", f"name one of {here}")
        if not _is_usable(each):
            why = "is down" if not each.is_up else "has no address"
            return error(f"{name} {why}", "MPI and NCCL are told to use it", f"bring it up, or name one of {here}")
    chosen = [each for each in found if each.name in names.split(",")]
    return ok("; ".join(f"{each.name} {', '.join(each.addresses)}" for each in chosen))


def _is_usable(interface: Interface) -> bool:
    return interface.is_up and bool(interface.addresses) and not interface.is_loopback


def _by_default(machine: Machine, found: Sequence[Interface]) -> Interface | None:
    """That of the default route, else the first that can be used."""
    usable = [each for each in found if _is_usable(each) and not _VIRTUAL.match(each.name)]
    route = _default_route(machine)
    return next((each for each in usable if each.name == route), usable[0] if usable else None)


def _default_route(machine: Machine) -> str | None:
    """By /proc/net/route: name, destination and so on, in hexadecimal."""
    try:
        rows = [line.split() for line in machine.read("/proc/net/route").splitlines()[1:]]
    except OSError:
        return None
    return next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), None)


def check_hostname(machine: Machine, expected: Expected) -> MachineFinding:
    name = machine.hostname
    several = expected.num_nodes > 1 or len(expected.hosts) > 1
    try:
        addresses = machine.resolve(name)
    except OSError as problem:
        cause = f"Open MPI asks for it ({problem.strerror or problem})"
        fix = f"a line for {name} in /etc/hosts, with this machine's address"
        return (error if several else warning)(f"{name} has no address", cause, fix)
    own = {address for interface in machine.interfaces() for address in interface.addresses}
    beyond = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    said = f"{name} is {', '.join(addresses)}"
    if not beyond:
        if not several:
            return ok(f"{said}, which is enough for one machine")
        cause = "the other hosts are told to call back there, and call themselves"
        return warning(said, cause, f"give {name} the address of the interface between the hosts in /etc/hosts")
    if not own.intersection(beyond):
        cause = "that is no address of this machine: MPI waits for an answer from elsewhere"
        return (error if several else warning)(said, cause, f"correct {name} in /etc/hosts or in the name service")
    return ok(said)


def check_ssh(machine: Machine, expected: Expected) -> MachineFinding:
    program = machine.which("ssh")
    if program:
        return ok(program)
    if expected.num_nodes > 1 or len(expected.hosts) > 1:
        return error("none", "mpirun starts the other hosts' ranks by it", "apt install openssh-client")
    return note("none", "mpirun starts other hosts' ranks by it", "apt install openssh-client", blocks=True)
