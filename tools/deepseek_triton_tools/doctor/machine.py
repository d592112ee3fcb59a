"""Everything a check may see of its surroundings: the machine that this runs on, and the Python that runs it."""

import contextlib
import errno
import fcntl
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from deepseek_triton_tools.host.host_memory import HostMemory, read_host_memory
from deepseek_triton_tools.host.preflight import find_libpython
from deepseek_triton_tools.host.processes import holder_of, listening_inodes
from deepseek_triton_tools.host.tritonserver import wheel_package

Limit = Literal["memlock", "nofile", "stack"]

NOT_FOUND = 127
"""Exit code of a program that can't be started, as in a shell."""

PACKAGES = (
    "certifi",
    "cuda-python",
    "deepseek-triton",
    "h11",
    "jinja2",
    "mpi4py",
    "numpy",
    "nvidia-pytriton",
    "openai",
    "pyyaml",
    "rich",
    "tensorrt_llm",
    "tokenizers",
    "transformers",
    "tritonclient",
    "vllm",
)
# netdevice(7): asks for an interface's IPv4 address.
_SIOCGIFADDR = 0x8915
_IFF_UP = 1
_KILLED_WITHIN_S = 2


@dataclass(frozen=True, kw_only=True)
class Done:
    """How a program ended, and what it printed."""

    code: int | None
    """Exit code; None when it was killed at its deadline, negative when a signal ended it."""
    out: str = ""
    err: str = ""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Size of a file system, in bytes."""

    total: int
    free: int
    """Bytes that this user may still write."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    name: str
    is_up: bool
    addresses: tuple[str, ...] = ()
    """IPv4 addresses, then IPv6 ones without the link-local ones (fe80::)."""


@dataclass(frozen=True, kw_only=True)
class HostProcess:
    pid: int
    parent: int
    name: str
    """The kernel's name of it: at most 15 characters."""
    command: tuple[str, ...] = ()
    pid_inside: int | None = None
    """Its pid as processes of its own container know it; None where the kernel does not tell (NSpid, proc(5))."""
    launch: str | None = None
    """Launch tag (DEEPSEEK_TRITON_LAUNCH) in its environment; None when it has none or can't be read."""


@dataclass(frozen=True, kw_only=True)
class Python:
    """The interpreter that runs the checks, and what is installed for it."""

    executable: str
    version: str
    """Such as `3.12.3`."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Distribution -> version, for the installed ones among PACKAGES."""
    libpython: str | None = None
    """Path of its shared library."""
    glibc: str | None = None
    """Such as `2.35`; None with another C library."""
    pytriton: str | None = None
    """Folder of the package that nvidia-pytriton installs."""

    @property
    def minor(self) -> str:
        """Such as `3.12`."""
        return ".".join(self.version.split(".")[:2])


class Machine:
    """Paths are absolute. Methods that look at files raise OSError as the system calls do."""

    def __init__(self) -> None:
        self._done: dict[tuple[str, ...], Done] = {}

    @property
    def hostname(self) -> str:
        return socket.gethostname()

    @property
    def environ(self) -> Mapping[str, str]:
        return os.environ

    @cached_property
    def python(self) -> Python:
        packages = {}
        for name in PACKAGES:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                packages[name] = importlib.metadata.version(name)
        libc, version = platform.libc_ver()
        libpython, pytriton = find_libpython(), wheel_package()
        return Python(
            executable=sys.executable,
            version=platform.python_version(),
            packages=packages,
            libpython=str(libpython) if libpython else None,
            glibc=version if libc == "glibc" else None,
            pytriton=str(pytriton) if pytriton else None,
        )

    def read(self, path: str) -> str:
        return Path(path).read_text(errors="replace")

    def read_bytes(self, path: str, size: int = -1) -> bytes:
        """Return the first `size` bytes, or all."""
        with open(path, "rb") as file:
            return file.read(size)

    def list_folder(self, folder: str) -> Sequence[str]:
        return sorted(os.listdir(folder))

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def size(self, path: str) -> int:
        """Return the bytes of a file; a link is followed."""
        return os.stat(path).st_size

    def can_write(self, path: str) -> bool:
        return os.access(path, os.W_OK)

    def disk(self, path: str) -> Disk:
        """Return the size of the file system that holds `path`."""
        status = os.statvfs(path)
        return Disk(total=status.f_blocks * status.f_frsize, free=status.f_bavail * status.f_frsize)

    def which(self, program: str) -> str | None:
        return shutil.which(program)

    def run(self, *command: str, timeout_s: float = 20, environ: Mapping[str, str] | None = None) -> Done:
        """Run a program once: the same command again returns the first result.

        :param timeout_s: the deadline, at which its whole process group is killed.
        :param environ: variables that are set besides the present ones.
        """
        if command not in self._done:
            self._done[command] = _run(command, timeout_s, environ or {})
        return self._done[command]

    def limit(self, name: Limit) -> tuple[int | None, int | None]:
        """Return the soft and the hard limit, as getrlimit(2) does; None stands for unlimited."""
        limits = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
        soft, hard = (None if value == resource.RLIM_INFINITY else value for value in limits)
        return soft, hard

    def host_memory(self) -> HostMemory:
        return read_host_memory()

    def interfaces(self) -> Sequence[Interface]:
        v6: dict[str, list[str]] = {}
        # The columns are address, index, prefix length, scope (20: link-local), flags, name.
        with contextlib.suppress(OSError):  # a kernel without IPv6
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                address, _, _, scope, _, name = line.split()
                if scope != "20":
                    v6.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)))
        interfaces = []
        for _, name in socket.if_nameindex():
            v4, flags = [], 0
            with contextlib.suppress(OSError, ValueError):
                flags = int(Path("/sys/class/net", name, "flags").read_text(), 16)
            with (
                socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket,
                contextlib.suppress(OSError),  # no IPv4 address
            ):
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                v4 = [socket.inet_ntoa(answer[20:24])]
            is_up = bool(flags & _IFF_UP)
            interfaces.append(Interface(name=name, is_up=is_up, addresses=(*v4, *v6.get(name, ()))))
        return interfaces

    def resolve(self, host: str) -> Sequence[str]:
        """Return the host's addresses; OSError when it has none."""
        try:
            answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except UnicodeError as error:  # a label is empty or has more than 63 characters
            raise OSError(errno.EINVAL, "not a valid host name") from error
        return list(dict.fromkeys(str(address[0]) for *_, address in answers))

    def processes(self) -> Sequence[HostProcess]:
        """Return the processes that can be seen, without this one and its ancestors."""
        processes = list(_processes())
        parents = {process.pid: process.parent for process in processes}
        pid = os.getpid()
        own = {pid}
        while (pid := parents.get(pid, 0)) and pid not in own:
            own.add(pid)
        return [process for process in processes if process.pid not in own]

    def listener(self, port: int) -> str | None:
        """Describe the process that listens on a TCP port, in words; None when nobody does."""
        if not any(listening_inodes(port)):
            return None
        return holder_of(port) or "a process of another user"

    def time(self) -> float:
        """Return the seconds since 1970."""
        return time.time()


def _run(command: Sequence[str], timeout_s: float, environ: Mapping[str, str]) -> Done:
    # Files and not pipes: a process that the program leaves behind may hold a pipe open after the program has ended.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            program = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **environ},
                start_new_session=True,
            )
        except OSError as error:
            return Done(code=NOT_FOUND, err=f"{command[0]}: {error.strerror}")
        code: int | None
        try:
            code = program.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(program.pid, signal.SIGKILL)
            # A process may be stuck in the kernel, in a driver that hangs. It is left behind.
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(_KILLED_WITHIN_S)
        return Done(code=code, out=_content(out.fileno()), err=_content(err.fileno()))


def _content(descriptor: int) -> str:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")


def _processes() -> Iterator[HostProcess]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            stat = (folder / "stat").read_text(errors="replace")
            # The name stands in parentheses and may hold anything. State and parent follow it (proc_pid_stat(5)).
            before, _, behind = stat.rpartition(")")
            state, parent = behind.split()[:2]
            if state in "ZX":
                continue
            command = (folder / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            status = (folder / "status").read_text(errors="replace")
            # One pid for each pid namespace, from this one to the process's.
            pids = re.search(r"^NSpid:.*?(\d+)$", status, re.M)
            launch = None
            with contextlib.suppress(OSError):  # another user's process
                launch = re.search(rb"(?:^|\0)DEEPSEEK_TRITON_LAUNCH=([^\0]*)", (folder / "environ").read_bytes())
            yield HostProcess(
                pid=int(folder.name),
                parent=int(parent),
                name=before.partition("(")[2],
                command=tuple(os.fsdecode(word) for word in command if word),
                pid_inside=int(pids[1]) if pids else None,
                launch=os.fsdecode(launch[1]) if launch else None,
            )
