"""The checks by another Python, or on another host: the zip goes in, a report comes out."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from deepseek_triton_tools.doctor.comparing import clock
from deepseek_triton_tools.doctor.machine.capabilities import CAPABILITIES, MPIRUN, SERVE
from deepseek_triton_tools.doctor.machine.examine import HostReport, examine, report_from_json
from deepseek_triton_tools.doctor.machine.expected import Expected
from deepseek_triton_tools.doctor.machine.machine import Machine
from deepseek_triton_tools.doctor.machine.machine_finding import Reported, error, ok
from deepseek_triton_tools.doctor.machine.remote import MARK
from deepseek_triton_tools.doctor.packing import BOOTSTRAP, pack

_CONNECT_S = 10
_DEADLINE_S = 120
"""Of all checks on one host, the headers of 163 files on a slow file system among them."""
_AT_ONCE = 32


@dataclass(frozen=True, kw_only=True)
class Ssh:
    """How hosts are reached. Never by a password: mpirun could not give one either."""

    port: int | None = None
    args: tuple[str, ...] = ()
    """Of ssh, before the host."""

    def command(self, host: str, remote: Sequence[str]) -> list[str]:
        port = ["-p", str(self.port)] if self.port else []
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}"]
        return ["ssh", *options, *port, *self.args, "--", host, shlex.join(remote)]


@dataclass(frozen=True, kw_only=True)
class Visit:
    """What came of a host: a report, or why there is none."""

    host: str
    report: HostReport | None
    findings: tuple[Reported, ...]
    """About reaching it."""


def is_here(host: str, machine: Machine) -> bool:
    """Whether `host` names this machine, by its name or its addresses."""
    if host in (machine.hostname, "localhost"):
        return True
    try:
        addresses = set(machine.resolve(host))
    except OSError:
        return False
    own = {address for interface in machine.interfaces() for address in interface.addresses}
    return bool(addresses & own) or any(address.startswith("127.") or address == "::1" for address in addresses)


def visit_all(
    hosts: Sequence[str], machine: Machine, expected: Expected, *, ssh: Ssh, python: str | None
) -> list[Visit]:
    """Every host at the same time, this machine without ssh."""

    def visit(host: str) -> Visit:
        if is_here(host, machine):
            return visit_here(machine, expected, host=host, python=python)
        return visit_by(ssh.command(host, bootstrap(python or "python3")), expected, host=host)

    with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(hosts)))) as threads:
        return list(threads.map(visit, hosts))


def visit_here(machine: Machine, expected: Expected, *, host: str, python: str | None) -> Visit:
    """This machine, by this Python or by another."""
    if python is not None:
        return visit_by(bootstrap(python), expected, host=host, needs=tuple(CAPABILITIES))
    return Visit(host=host, report=examine(machine, expected, host=host), findings=())


def visit_through(through: Sequence[str], expected: Expected, *, python: str | None) -> Visit:
    """By a command that runs another one, in a container say."""
    host = shlex.join(through)
    return visit_by([*through, *bootstrap(python or "python3")], expected, host=host, needs=tuple(CAPABILITIES))


def bootstrap(python: str) -> list[str]:
    return [python, "-c", BOOTSTRAP]


def visit_by(
    command: Sequence[str],
    expected: Expected,
    *,
    host: str,
    needs: tuple[str, ...] = (SERVE, MPIRUN),
    now: Callable[[], float] = time.time,
) -> Visit:
    """By a command that takes the zip on its standard input.

    :param needs: what can't be done where there is no report.
    """

    def unreached(result: str, cause: str, fix: str) -> Visit:
        found = error(result, cause, fix)
        reported = Reported(check="reached", title="reached", host=host, finding=found, needs=needs)
        return Visit(host=host, report=None, findings=(reported,))

    asked = now()
    try:
        done = subprocess.run(command, input=pack(expected), capture_output=True, timeout=_DEADLINE_S)
    except subprocess.TimeoutExpired:
        said = f"no report within {_DEADLINE_S} s"
        return unreached(said, "it hangs in a check, or on the way", f"run doctor on {host} itself")
    except OSError as problem:
        return unreached(f"{command[0]}: {problem.strerror}", "it can't be run", f"install {command[0]}")
    answered = now()
    line = next((line for line in done.stdout.decode(errors="replace").splitlines() if line.startswith(MARK)), None)
    if line is None:
        return unreached(*_why(done, command))
    try:
        report = report_from_json(line.removeprefix(MARK))
    except ValueError as problem:
        return unreached(f"its report can't be read: {problem}", "another version", "install the same version")
    report = _renamed(report, host)
    reached = Reported(check="reached", title="reached", host=host, finding=ok("without a password"))
    findings = (reached, clock(report, asked, answered)) if command[0] == "ssh" else ()
    return Visit(host=host, report=report, findings=findings)


def _renamed(report: HostReport, host: str) -> HostReport:
    """As it was asked for: several containers may have one host name."""
    findings = tuple(
        Reported(check=each.check, title=each.title, host=host, finding=each.finding, needs=each.needs)
        for each in report.findings
    )
    return HostReport(host=host, findings=findings, facts=report.facts, began=report.began, ended=report.ended)


_SAID = (
    (
        "Permission denied",
        "ssh needs a password or another key, and mpirun can give neither",
        "ssh-copy-id, or an ssh-agent: deepseek-triton launch ssh-setup prints the steps",
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
    ("Connection refused", "no sshd listens there at that port", "start sshd, or give its port by --ssh-port"),
    ("timed out", "nothing answers at that address: a firewall, or the machine is off", "look at both"),
    ("No route to host", "no way leads to that address", "look at its network, and at the routes of this machine"),
    ("not found", "there is no such Python on it", "install python3, or name its Python by --python"),
    ("No such file", "there is no such Python on it", "install python3, or name its Python by --python"),
    ("3.10 or newer is needed", "its Python is too old for the checks and the backend", "name another by --python"),
)


def _why(done: subprocess.CompletedProcess[bytes], command: Sequence[str]) -> tuple[str, str, str]:
    """Result, cause and fix."""
    lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    said = lines[-1] if lines else f"{command[0]} ended with {done.returncode}"
    found = next((row for row in _SAID if any(row[0] in line for line in lines)), None)
    if found is None:
        return said, f"{command[0]} ended with {done.returncode}", "run the command by hand"
    return said, found[1], found[2]


def parse_host_file(text: str) -> list[str]:
    """A host on each line, as mpirun's host files and Slurm's have them: `node1 slots=8`, `node1:8`, comments by #."""
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return list(dict.fromkeys(words[0].partition(":")[0] for words in lines if words))
