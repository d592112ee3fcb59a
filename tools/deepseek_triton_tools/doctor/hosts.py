"""This machine and other hosts examined, and their reports compared.

The checks travel as a zip, which a bare `python3` runs from its standard input and which leaves no file behind.
"""

import io
import json
import shlex
import subprocess
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from deepseek_triton_tools.doctor.examine import (
    EXPECTED_FILE,
    MACHINE,
    REPORT_PREFIX,
    HostReport,
    examine,
    report_from_json,
)
from deepseek_triton_tools.doctor.findings import CAPABILITIES, MPIRUN, SERVE, Expected, Reported, error, ok, warning
from deepseek_triton_tools.doctor.machine import Machine

_NEEDS = (SERVE, MPIRUN)
# An assumption: with this much, logs of several hosts can still be read side by side.
_MAX_CLOCK_SKEW_S = 2.0
_UNKNOWN = "none"
_SAME_CONTAINER = "run the same container on every host"
_CONNECT_S = 10
# For all checks of one host, which read the headers of 163 files, perhaps on a slow file system.
_DEADLINE_S = 120
# Hosts that are examined at the same time.
_MAX_CONNECTIONS = 32
_PACKAGE = "deepseek_triton_tools"
# The files and folders that are sent. They import each other and the standard library only (a test holds that).
SENT = (
    *("__init__.py", "_version.py", "pages.py", "tool_errors.py", "host", "doctor/__init__.py"),
    *("doctor/examine.py", "doctor/findings.py", "doctor/gpu.py", "doctor/launches.py", "doctor/machine.py"),
    *("doctor/mpi.py", "doctor/software.py", "doctor/storage.py", "doctor/system.py", "doctor/tuning.py"),
)
_NEEDED = "Python 3.10 or newer is needed"
# Code for `python3 -c`, which takes the zip on its standard input. The zip is kept in memory (memfd_create(2)).
BOOTSTRAP = (
    "import os,sys\n"
    f"sys.version_info>=(3,10) or sys.exit('{_NEEDED}, this is %d.%d' % sys.version_info[:2])\n"
    "f=os.memfd_create('doctor')\n"
    "open(f,'wb',closefd=False).write(sys.stdin.buffer.read())\n"
    "sys.path.insert(0,'/proc/self/fd/%d' % f)\n"
    "from deepseek_triton_tools.doctor.examine import main\n"
    "main()\n"
)
_NO_PYTHON = ("there is no such Python on it", "install python3, or name its Python with --python")
# Words on standard error -> cause and fix; the first that fits counts.
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


# Fact of HostReport.facts that must have one value on all hosts -> cause, fix.
SHARED_FACTS: Mapping[str, tuple[str, str]] = {
    "TensorRT-LLM": (
        "the ranks talk to each other in the engine's own messages, which change between releases",
        _SAME_CONTAINER,
    ),
    "vLLM": (
        "the nodes of an instance exchange pickled objects of one program",
        "use the same container, or the same environment, on every host",
    ),
    "container": ("all ranks must run the same program", _SAME_CONTAINER),
    "Python": ("the ranks exchange pickled objects, which need the same minor version", _SAME_CONTAINER),
    "MPI": (
        "mpirun and its daemons on the other hosts must have the same version",
        f"{_SAME_CONTAINER}, or install the same Open MPI",
    ),
    "mpi4py": ("the ranks exchange pickled objects", "install the same version"),
    "GPUs": (
        "the slowest GPU sets the pace, and every rank gets the same share of memory",
        "use hosts with the same GPUs, all of them visible",
    ),
    "GPU driver": ("NVLink and NCCL are tested with one driver on all hosts", "install the same driver"),
    "repository": (
        "every rank reads its own copy of model.yaml and of the backend",
        "copy it again (rsync -a --delete), or put it on a shared file system",
    ),
    "checkpoint index": (
        "every rank reads its own copy of the weights",
        "copy it again, or put it on a shared file system",
    ),
}
_ONLY_WARN = ("Python", "mpi4py", "GPU driver")
# Of the other facts a difference is an error with a repository for an engine on GPUs, else a warning.
_ALWAYS_ERRORS = ("repository", "checkpoint index")


def compare(reports: Sequence[HostReport], expected: Expected) -> Iterator[Reported]:
    """Yield whether each host is a machine of its own, and one finding for each shared fact that any host knows.

    Fewer than two hosts give no finding.
    """
    if len(reports) < 2:
        return
    all_hosts = ", ".join(report.host for report in reports)
    if any(MACHINE in report.facts for report in reports):
        names: dict[str, list[str]] = {}
        for report in reports:
            names.setdefault(report.facts.get(MACHINE, report.host), []).append(report.host)
        finding = ok(f"{len(names)}, each by one name")
        if same := [" and ".join(hosts) for hosts in names.values() if len(hosts) > 1]:
            cause = (
                "each host gets ranks of its own, and those of two names of one machine want the same GPUs and ports"
            )
            finding = error(f"{'; '.join(same)} are the same machine", cause, "name each machine once")
        yield Reported(check="machines", title="machines", host=all_hosts, finding=finding, needs=_NEEDS)
    for fact, (cause, fix) in SHARED_FACTS.items():
        hosts_of: dict[str, list[str]] = {}
        for report in reports:
            hosts_of.setdefault(report.facts.get(fact, _UNKNOWN), []).append(report.host)
        if [*hosts_of] == [_UNKNOWN]:
            continue
        finding = ok(next(iter(hosts_of)))
        if len(hosts_of) > 1:
            result = "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in hosts_of.items())
            is_error = fact in _ALWAYS_ERRORS or (expected.uses_gpus and fact not in _ONLY_WARN)
            finding = (error if is_error else warning)(result, cause, fix)
        check, title = f"same-{fact.lower().replace(' ', '-')}", f"{fact}, on every host"
        yield Reported(check=check, title=title, host=all_hosts, finding=finding, needs=_NEEDS)


def clock(report: HostReport, asked_at: float, answered_at: float) -> Reported:
    """Report by how much the host's clock differs from this machine's, at the least.

    :param asked_at: when this machine asked the host, by its own clock.
    :param answered_at: when it had the answer.
    """
    ahead, behind = report.ended - answered_at, asked_at - report.began
    skew = max(ahead, behind)
    if skew <= _MAX_CLOCK_SKEW_S:
        finding = ok("agrees with this machine's")
    else:
        result = f"at least {skew:.0f} s {'ahead of' if ahead > behind else 'behind'} this machine's"
        cause = "logs can't be compared, and Slurm and Kerberos may refuse tickets"
        finding = warning(result, cause, "let it follow a time server (chrony, systemd-timesyncd)")
    return Reported(check="clock", title="clock", host=report.host, finding=finding)


def pack(expected: Expected) -> bytes:
    """Return the zip. It is not compressed, because not every Python has zlib."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as packed:
        for name, path in sent_files():
            packed.writestr(f"{_PACKAGE}/{name}", path.read_bytes())
        packed.writestr(EXPECTED_FILE, json.dumps(asdict(expected)))
    return content.getvalue()


def sent_files() -> Iterator[tuple[str, Path]]:
    """Name in the package, and path here, of every file that is sent."""
    root = Path(__file__).parent.parent
    for name in SENT:
        path = root / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            yield file.relative_to(root).as_posix(), file


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
        return examine_by_command(ssh.command(host, [python or "python3", "-c", BOOTSTRAP]), expected, host=host)

    with ThreadPoolExecutor(min(_MAX_CONNECTIONS, max(1, len(hosts)))) as threads:
        return list(threads.map(examine_host, hosts))


def examine_here(machine: Machine, expected: Expected, *, host: str, python: str | None) -> HostResult:
    """Examine this machine.

    :param python: another Python that runs the checks, instead of this one.
    """
    if python is not None:
        return examine_by_command([python, "-c", BOOTSTRAP], expected, host=host)
    return HostResult(host=host, report=examine(machine, expected, host=host), findings=())


def examine_through(through: Sequence[str], expected: Expected, *, python: str | None) -> HostResult:
    """Examine by a command that runs another command, for example in a container."""
    command = [*through, python or "python3", "-c", BOOTSTRAP]
    return examine_by_command(command, expected, host=shlex.join(through))


def examine_by_command(command: Sequence[str], expected: Expected, *, host: str) -> HostResult:
    """Run a command that takes the zip on its standard input, and read its report. Without one, nothing works."""

    def unreached(result: str, cause: str, fix: str) -> HostResult:
        finding, needs = error(result, cause, fix), tuple(CAPABILITIES)
        reported = Reported(check="reached", title="reached", host=host, finding=finding, needs=needs)
        return HostResult(host=host, report=None, findings=(reported,))

    asked_at = time.time()
    try:
        done = subprocess.run(command, input=pack(expected), capture_output=True, timeout=_DEADLINE_S)
    except subprocess.TimeoutExpired:
        result = f"no report within {_DEADLINE_S} s"
        return unreached(result, "a check or the connection hangs", f"run doctor on {host} itself")
    except OSError as problem:
        return unreached(f"{command[0]}: {problem.strerror}", "it can't be run", "correct its name, or install it")
    answered_at = time.time()
    lines = done.stdout.decode(errors="replace").splitlines()
    line = next((line for line in lines if line.startswith(REPORT_PREFIX)), None)
    if line is None:
        said = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        how = f"{command[0]} ended with {done.returncode}"
        known = (why for words, *why in _KNOWN_MESSAGES if any(words in line for line in said))
        return unreached(said[-1] if said else how, *next(known, [how, "run the command by hand"]))
    try:
        report = report_from_json(line.removeprefix(REPORT_PREFIX))
    except ValueError as problem:
        cause = "another version of doctor wrote it"
        return unreached(f"its report can't be read: {problem}", cause, "install the same version")
    # The host is called as it was asked for: several containers may have one host name.
    report = replace(report, host=host, findings=tuple(replace(each, host=host) for each in report.findings))
    reached = Reported(check="reached", title="reached", host=host, finding=ok("without a password"))
    findings = (reached, clock(report, asked_at, answered_at)) if command[0] == "ssh" else ()
    return HostResult(host=host, report=report, findings=findings)


def parse_host_file(text: str) -> list[str]:
    """Return the host of each line, in the forms of mpirun and Slurm: `node1 slots=8`, `node1:8`, comments after #."""
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return list(dict.fromkeys(words[0].partition(":")[0] for words in lines if words))
