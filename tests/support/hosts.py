"""Two hosts made of this machine's namespaces, which ssh, MPI and Slurm can't tell from two machines.

Each host has its own process numbers, host name, network with one interface to the other, /dev/shm, /run, and an ssh
server with its own keys. Files are shared, as over a network file system, but what MPI leaves behind goes with the
host. A host ends with its first process, which ends with this process, however this one ends. No name or address is
taken on the machine itself.
"""

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
"""Interface that connects the hosts; each host has only this one and lo."""
SSH_PORT = 2222
"""A second port besides 22, which ssh has to be told."""

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
"""It becomes the ssh server, to which orphans return as to an init process."""

_DIE_WITH_PARENT = """\
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
if os.getppid() != int(sys.argv[1]):
    sys.exit("the starting process is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


class HostsError(Exception):
    """The hosts can't be made on this machine; the message says why."""


class Running:
    """A program on a host."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        """The nsenter process; it waits for the program and ends with its exit code."""
        self._log = log

    @property
    def pid(self) -> int:
        """The program's process number on this machine, outside of the host."""
        return wait_for(lambda: _only_child(self._process.pid), self.output)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Wait until it ends, and return its exit code, negative for a signal."""
        try:
            return self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it goes on:\n{self.output()}") from None

    def wait_for(self, text: str) -> None:
        """Wait until it has written `text`."""
        wait_for(lambda: text in self.output() or self.ended, self.output)
        assert text in self.output(), f"ended without {text!r}:\n{self.output()}"

    def end(self) -> None:
        """Kill it, if it runs. The processes that it started on the hosts stay."""
        if not self.ended:
            if child := _only_child(self._process.pid):
                # nsenter has to reap it: a host whose dead nobody reaps does not end. A stopped program stops nsenter.
                os.kill(child, signal.SIGKILL)
                self._process.send_signal(signal.SIGCONT)
            else:
                self._process.kill()
            self._process.wait(PATIENCE_S)


@dataclass(frozen=True)
class Host:
    """One of the two hosts, while it exists."""

    name: str
    address: str
    pid: int
    """Process number of its first process on this machine, outside of the host."""
    etc: Path
    """Folder whose files are mounted over /etc of both hosts."""

    def run(self, *argv: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, and return its output."""
        return subprocess.run(self._entered(argv), env=env, text=True, capture_output=True, timeout=PATIENCE_S)

    def start(self, *argv: str, log: Path, env: Mapping[str, str] | None = None) -> Running:
        """Start a program in a session of its own, with its output in `log`."""
        command = [*_dying_with_this_process(), *self._entered(argv)]
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        return Running(process, log)

    def end(self, program: str, *, argument: str = "") -> None:
        """End the processes of `program`, or only those with `argument`, and wait until they are gone."""
        for pid, command in self.processes().items():
            name, *arguments = command.split()
            if Path(name).name.rstrip(":") == program and (not argument or argument in arguments):
                os.kill(pid, signal.SIGTERM)
                wait_for(partial(self._has_gone, pid), lambda: str(self.processes()))

    def process(self, command: str, *, rank: int) -> int:
        """Return the process number, on this machine, of the rank's process with `command` in its command line."""
        variable = f"\0DEEPSEEK_TRITON_RANK={rank}\0".encode()
        found = [
            pid
            for pid, line in self.processes().items()
            if command in line and variable in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
        ]
        assert len(found) == 1, f"{command} of rank {rank}: {found} among {self.processes()}"
        return found[0]

    def environment(self, command: str, *, rank: int) -> dict[str, str]:
        """Return the environment of the rank's process with `command` in its command line."""
        text = Path(f"/proc/{self.process(command, rank=rank)}/environ").read_text(encoding="utf-8")
        return dict(setting.split("=", 1) for setting in text.split("\0") if setting)

    def listening(self) -> set[int]:
        """Return the TCP ports on which the host listens."""
        lines = self.run("ss", "--no-header", "--listening", "--tcp", "--numeric").stdout.splitlines()
        return {int(line.split()[3].rpartition(":")[2]) for line in lines}

    def processes(self) -> dict[int, str]:
        """Return process number on this machine -> command line, for the host's processes without its first one."""
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
    """Make node1 and node2; the files of their /etc are put below `folder`.

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
            os.kill(child, signal.SIGKILL)  # the kernel then ends all other processes of the host
        process.wait(PATIENCE_S)


def _connect(hosts: list[Host]) -> None:
    """Connect the two hosts by one virtual cable."""
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
    """Return whether ssh from the host to itself works, by name: this tests its keys, its address and its server."""
    return host.run("ssh", "-p", str(SSH_PORT), host.name, "true").returncode == 0


def _write_etc(folder: Path, addresses: Mapping[str, str]) -> None:
    """Write keys, names and all other files that are mounted over the hosts' /etc."""
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
    """Return its command line; None when it has ended or is not in the namespace."""
    try:
        if os.readlink(process / "ns/pid") != namespace:
            return None
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip() or None
    except OSError:
        return None  # it has ended
