"""Two machines as far as ssh, MPI and Slurm can tell, made of this one's namespaces.

Each host has its own process numbers, host name, network with one interface to the other, /dev/shm, /run, and an ssh
server with keys of its own. Files are shared, as over a network file system, but what MPI leaves goes with the host. A
host ends with its first process and that one with this process, whatever happens to it; no name or address is taken on
the machine itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from support.waiting import PATIENCE_S, wait_for

INTERFACE = "fabric0"
"""What connects the hosts; their only interface besides lo."""
SSH_PORT = 2222
"""Besides 22: a port that has to be said."""

_FIRST_PROCESS = """\
set -e
hostname "$1"
for name in hosts ssh slurm openmpi/openmpi-mca-params.conf; do mount --bind "$2/$name" "/etc/$name"; done
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/sshd
ip link set lo up
exec /usr/sbin/sshd -D -e
"""
"""It stays the ssh server, which takes in the orphans as an init does."""

_DIE_WITH_PARENT = """\
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
if os.getppid() != int(sys.argv[1]):
    sys.exit("the starting process is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


class HostsError(Exception):
    """Why there can be no hosts here."""


class Running:
    """A program on a host."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        """What entered the host; it waits for the program and ends as that did."""
        self._log = log

    @property
    def pid(self) -> int:
        """The program's, as this machine counts."""
        return wait_for(lambda: _only_child(self._process.pid), self.output)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code, negative for a signal."""
        try:
            return self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it goes on:\n{self.output()}") from None

    def wait_for(self, text: str) -> None:
        """Until it has written `text`."""
        wait_for(lambda: text in self.output() or self.ended, self.output)
        assert text in self.output(), f"ended without {text!r}:\n{self.output()}"

    def end(self) -> None:
        """At once, if it runs; what it started on the hosts is theirs."""
        if not self.ended:
            child = _only_child(self._process.pid)
            if child:
                os.kill(child, signal.SIGKILL)
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True)
class Host:
    """One of the two, while it lasts."""

    name: str
    address: str
    pid: int
    """Of its first process, as this machine counts."""
    etc: Path
    """What is in /etc of both."""

    def run(self, *argv: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """To its end, with its output."""
        return subprocess.run(self._entered(argv), env=env, text=True, capture_output=True, timeout=PATIENCE_S)

    def start(self, *argv: str, log: Path, env: Mapping[str, str] | None = None) -> Running:
        """In a session of its own, with its output in `log`."""
        command = [*_dying_with_this_process(), *self._entered(argv)]
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        return Running(process, log)

    def end(self, program: str, *, argument: str = "") -> None:
        """What runs as `program`, with `argument` among its own, and has gone when this returns."""
        for pid, command in self.processes().items():
            name, *arguments = command.split()
            if Path(name).name.rstrip(":") == program and (not argument or argument in arguments):
                os.kill(pid, signal.SIGTERM)
                wait_for(partial(self._has_gone, pid), lambda: str(self.processes()))

    def process(self, command: str, *, rank: int) -> int:
        """The one of a launch's rank with `command` in its command line, by this machine's process numbers."""
        variable = f"\0DEEPSEEK_TRITON_RANK={rank}\0".encode()
        found = [
            pid
            for pid, line in self.processes().items()
            if command in line and variable in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
        ]
        assert len(found) == 1, f"{command} of rank {rank}: {found} among {self.processes()}"
        return found[0]

    def listening(self) -> set[int]:
        """TCP ports."""
        lines = self.run("ss", "--no-header", "--listening", "--tcp", "--numeric").stdout.splitlines()
        return {int(line.split()[3].rpartition(":")[2]) for line in lines}

    def processes(self) -> dict[int, str]:
        """The command lines of what lives there besides its first process, by this machine's process numbers."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        everything = [Path("/proc", name) for name in os.listdir("/proc") if name.isdecimal()]
        found = {int(path.name): _command_in(namespace, path) for path in everything}
        return {pid: command for pid, command in found.items() if command and pid != self.pid}

    def _has_gone(self, pid: int) -> bool:
        return pid not in self.processes()

    def _entered(self, argv: Iterable[str]) -> list[str]:
        namespaces = ["--mount", "--uts", "--net", "--ipc", "--pid"]
        return ["nsenter", "--target", str(self.pid), *namespaces, "--wd=/", "--", *argv]


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """node1 and node2, with what they have in /etc under `folder`.

    :raises HostsError: when this machine's user or kernel does not allow it.
    """
    addresses = {"node1": "10.77.0.1", "node2": "10.77.0.2"}
    _write_etc(folder, addresses)
    with ExitStack() as stack:
        hosts = [stack.enter_context(_host(name, address, folder)) for name, address in addresses.items()]
        _connect(hosts)
        for host in hosts:
            wait_for(partial(_listens, host), (folder / f"{host.name}.log").read_text)
        yield hosts[0], hosts[1]


@contextmanager
def _host(name: str, address: str, folder: Path) -> Iterator[Host]:
    namespaces = ["--mount", "--uts", "--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    first = ["bash", "-c", _FIRST_PROCESS, "bash", name, str(folder / "etc")]
    log = folder / f"{name}.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [*_dying_with_this_process(), "unshare", *namespaces, *first],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        wait_for(lambda: "Server listening" in log.read_text() or process.poll() is not None, log.read_text)
        if process.poll() is not None:
            raise HostsError(f"a host of namespaces can't be made: {log.read_text().strip()}")
        first_process = _only_child(process.pid)
        assert first_process, log.read_text()
        yield Host(name, address, first_process, folder / "etc")
    finally:
        child = None if process.poll() is not None else _only_child(process.pid)
        if child:
            os.kill(child, signal.SIGKILL)  # with which the kernel ends all others of the host
        process.wait()


def _connect(hosts: list[Host]) -> None:
    """One cable."""
    ends = [["name", INTERFACE, "netns", str(host.pid)] for host in hosts]
    _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
    for host in hosts:
        for command in (["addr", "add", f"{host.address}/24", "dev", INTERFACE], ["link", "set", INTERFACE, "up"]):
            done = host.run("ip", *command)
            if done.returncode:
                raise HostsError(f"ip {' '.join(command)}: {done.stderr.strip()}")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], text=True, capture_output=True)
    if done.returncode:
        raise HostsError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _listens(host: Host) -> bool:
    """Whether it lets itself in by name, which takes its keys, its address and its server."""
    return host.run("ssh", "-p", str(SSH_PORT), host.name, "true").returncode == 0


def _write_etc(folder: Path, addresses: Mapping[str, str]) -> None:
    """Keys, names and the rest of what is mounted over the hosts' /etc."""
    ssh = folder / "etc/ssh"
    ssh.mkdir(parents=True)
    (folder / "etc/slurm").mkdir()
    (folder / "etc/openmpi").mkdir()
    own_settings = Path("/etc/openmpi", _MPI_SETTINGS).read_text()
    (folder / "etc/openmpi" / _MPI_SETTINGS).write_text(f"{own_settings}\norte_tmpdir_base = /run\n")
    lines = [f"{address} {name}" for name, address in addresses.items()]
    (folder / "etc/hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    for key in ("user_key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / key)], check=True)
    host_key = (ssh / "host_key.pub").read_text()
    (ssh / "known_hosts").write_text("".join(f"{name},[{name}]:{SSH_PORT} {host_key}" for name in addresses))
    (ssh / "ssh_config").write_text(_SSH_CONFIG)
    (ssh / "sshd_config").write_text(_SSHD_CONFIG)


_MPI_SETTINGS = "openmpi-mca-params.conf"

_SSH_CONFIG = """\
IdentityFile /etc/ssh/user_key
GlobalKnownHostsFile /etc/ssh/known_hosts
BatchMode yes
"""

_SSHD_CONFIG = f"""\
Port 22
Port {SSH_PORT}
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/user_key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
PidFile none
"""


def _dying_with_this_process() -> list[str]:
    return [sys.executable, "-c", _DIE_WITH_PARENT, str(os.getpid())]


def _only_child(pid: int) -> int | None:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


def _command_in(namespace: str, process: Path) -> str | None:
    """Its command line, if it is alive and in the namespace."""
    try:
        if os.readlink(process / "ns/pid") != namespace:
            return None
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip() or None
    except OSError:
        return None  # it has ended
