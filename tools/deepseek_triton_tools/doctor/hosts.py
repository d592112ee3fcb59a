"""Examining this machine, or another host: the zip of the checks is sent there, and a report comes back."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from deepseek_triton_tools.doctor.comparing import clock
from deepseek_triton_tools.doctor.machine.capabilities import CAPABILITIES, MPIRUN, SERVE
from deepseek_triton_tools.doctor.machine.examine import HostReport, examine, report_from_json
from deepseek_triton_tools.doctor.machine.expected import Expected
from deepseek_triton_tools.doctor.machine.machine import Machine
from deepseek_triton_tools.doctor.machine.machine_finding import Reported, error, ok
from deepseek_triton_tools.doctor.machine.remote import REPORT_PREFIX
from deepseek_triton_tools.doctor.packing import BOOTSTRAP, pack

_CONNECT_S = 10
_DEADLINE_S = 120
"""For all checks of one host, which read the headers of 163 files, perhaps on a slow file system."""
_MAX_CONNECTIONS = 32
"""Hosts that are examined at the same time."""


@dataclass(frozen=True, kw_only=True)
class Ssh:
    """How hosts are reached. Passwords are not asked for, because mpirun could not give one either."""

    port: int | None = None
    args: tuple[str, ...] = ()
    """Further arguments of ssh, before the host."""

    def options(self) -> list[str]:
        port = ["-p", str(self.port)] if self.port else []
        return ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}", *port, *self.args]

    def command(self, host: str, remote: Sequence[str]) -> list[str]:
        return ["ssh", *self.options(), "--", host, shlex.join(remote)]


@dataclass(frozen=True, kw_only=True)
class HostResult:
    """The report of a host, or why there is none."""

    host: str
    report: HostReport | None
    findings: tuple[Reported, ...]
    """Findings about reaching the host; its report has its own."""


def is_here(host: str, machine: Machine) -> bool:
    """Return whether `host` is a name or an address of this machine."""
    if host in (machine.hostname, "localhost"):
        return True
    try:
        addresses = set(machine.resolve(host))
    except OSError:
        return False
    own = {address for interface in machine.interfaces() for address in interface.addresses}
    return bool(addresses & own) or any(address.startswith("127.") or address == "::1" for address in addresses)


def examine_hosts(
    hosts: Sequence[str], machine: Machine, expected: Expected, *, ssh: Ssh, python: str | None
) -> list[HostResult]:
    """Examine all hosts at the same time; this machine is examined without ssh."""

    def examine_host(host: str) -> HostResult:
        if is_here(host, machine):
            return examine_here(machine, expected, host=host, python=python)
        return examine_by_command(ssh.command(host, bootstrap_command(python or "python3")), expected, host=host)

    with ThreadPoolExecutor(min(_MAX_CONNECTIONS, max(1, len(hosts)))) as threads:
        return list(threads.map(examine_host, hosts))


def examine_here(machine: Machine, expected: Expected, *, host: str, python: str | None) -> HostResult:
    """Examine this machine.

    :param python: another Python that runs the checks, instead of this one.
    """
    if python is not None:
        return examine_by_command(bootstrap_command(python), expected, host=host, needs=tuple(CAPABILITIES))
    return HostResult(host=host, report=examine(machine, expected, host=host), findings=())


def examine_through(through: Sequence[str], expected: Expected, *, python: str | None) -> HostResult:
    """Examine by a command that runs another command, for example in a container."""
    command = [*through, *bootstrap_command(python or "python3")]
    return examine_by_command(command, expected, host=shlex.join(through), needs=tuple(CAPABILITIES))


def bootstrap_command(python: str) -> list[str]:
    """Return the command that takes the zip of the checks on its standard input and prints the report."""
    return [python, "-c", BOOTSTRAP]


def examine_by_command(
    command: Sequence[str],
    expected: Expected,
    *,
    host: str,
    needs: tuple[str, ...] = (SERVE, MPIRUN),
) -> HostResult:
    """Run a command that takes the zip on its standard input, and read its report.

    :param needs: the capabilities that don't work when there is no report.
    """

    def unreached(result: str, cause: str, fix: str) -> HostResult:
        found = error(result, cause, fix)
        reported = Reported(check="reached", title="reached", host=host, finding=found, needs=needs)
        return HostResult(host=host, report=None, findings=(reported,))

    asked = time.time()
    try:
        done = subprocess.run(command, input=pack(expected), capture_output=True, timeout=_DEADLINE_S)
    except subprocess.TimeoutExpired:
        result = f"no report within {_DEADLINE_S} s"
        return unreached(result, "a check or the connection hangs", f"run doctor on {host} itself")
    except OSError as problem:
        return unreached(f"{command[0]}: {problem.strerror}", "it can't be run", f"install {command[0]}")
    answered = time.time()
    lines = done.stdout.decode(errors="replace").splitlines()
    line = next((line for line in lines if line.startswith(REPORT_PREFIX)), None)
    if line is None:
        return unreached(*_why_no_report(done, command))
    try:
        report = report_from_json(line.removeprefix(REPORT_PREFIX))
    except ValueError as problem:
        cause = "another version of doctor wrote it"
        return unreached(f"its report can't be read: {problem}", cause, "install the same version")
    # The host is called as it was asked for: several containers may have one host name.
    report = replace(report, host=host, findings=tuple(replace(each, host=host) for each in report.findings))
    reached = Reported(check="reached", title="reached", host=host, finding=ok("without a password"))
    findings = (reached, clock(report, asked, answered)) if command[0] == "ssh" else ()
    return HostResult(host=host, report=report, findings=findings)


_NO_PYTHON = ("there is no such Python on it", "install python3, or name its Python with --python")
_KNOWN_MESSAGES = (
    (
        "Permission denied",
        "ssh needs a password or another key, and mpirun can give neither",
        "use ssh-copy-id or an ssh-agent; `deepseek-triton launch ssh-setup DIR --hosts A,B` prints all steps",
    ),
    (
        "Host key verification failed",
        "the host's key is not known here, or has changed",
        "ssh to it once by hand, or ssh-keyscan HOST >> ~/.ssh/known_hosts",
    ),
    (
        "Could not resolve hostname",
        "its name has no address here",
        "correct the name, or add it to /etc/hosts or ~/.ssh/config",
    ),
    ("Connection refused", "no sshd listens at that port", "start sshd, or give its port with --ssh-port"),
    ("timed out", "nothing answers: a firewall is in between, or the machine is off", "check both"),
    ("No route to host", "no route leads to that address", "check its network and the routes of this machine"),
    ("not found", *_NO_PYTHON),
    ("No such file", *_NO_PYTHON),
    (
        "3.10 or newer is needed",
        "its Python is too old for the checks and the backend",
        "name another Python with --python",
    ),
)
"""Words on standard error -> cause and fix; the first that fits counts."""


def _why_no_report(done: subprocess.CompletedProcess[bytes], command: Sequence[str]) -> tuple[str, str, str]:
    """Return result, cause and fix."""
    lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    result = lines[-1] if lines else f"{command[0]} ended with {done.returncode}"
    for words, cause, fix in _KNOWN_MESSAGES:
        if any(words in line for line in lines):
            return result, cause, fix
    return result, f"{command[0]} ended with {done.returncode}", "run the command by hand"


def parse_host_file(text: str) -> list[str]:
    """Return the host of each line, in the forms of mpirun and Slurm: `node1 slots=8`, `node1:8`, comments after #."""
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return list(dict.fromkeys(words[0].partition(":")[0] for words in lines if words))
