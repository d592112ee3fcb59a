"""Everything a check may see of its surroundings. `RealMachine` looks at this machine; tests use a made-up one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from deepseek_triton_tools.host.host_memory import HostMemory

Limit = Literal["memlock", "nofile", "stack"]

NOT_FOUND = 127
"""Exit code of a program that can't be started, as in a shell."""


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
    """A network interface."""

    name: str
    is_up: bool
    addresses: tuple[str, ...] = ()
    """IPv4 addresses, then IPv6 ones without the link-local ones (fe80::)."""

    @property
    def is_loopback(self) -> bool:
        return self.name == "lo"


@dataclass(frozen=True, kw_only=True)
class HostProcess:
    pid: int
    parent: int
    name: str
    """The kernel's name of it: at most 15 characters."""
    command: tuple[str, ...] = ()
    launch: str | None = None
    """Launch tag (DEEPSEEK_TRITON_LAUNCH) in its environment; None when it has none or can't be read."""


@dataclass(frozen=True, kw_only=True)
class Python:
    """The interpreter that runs the checks, and what is installed for it."""

    executable: str
    version: str
    """Such as `3.12.3`."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Distribution -> version, for the installed ones among real_machine.PACKAGES."""
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


class Machine(Protocol):
    """Paths are absolute. Methods that look at files raise OSError as the system calls do."""

    @property
    def hostname(self) -> str: ...

    @property
    def environ(self) -> Mapping[str, str]: ...

    @property
    def python(self) -> Python: ...

    def read(self, path: str) -> str:
        """Return the content of a text file."""

    def read_bytes(self, path: str, size: int = -1) -> bytes:
        """Return the first `size` bytes, or all."""

    def list_folder(self, folder: str) -> Sequence[str]:
        """Return the names of its entries, sorted."""

    def is_folder(self, path: str) -> bool: ...

    def exists(self, path: str) -> bool: ...

    def size(self, path: str) -> int:
        """Return the bytes of a file; a link is followed."""

    def can_write(self, path: str) -> bool: ...

    def disk(self, path: str) -> Disk:
        """Return the size of the file system that holds `path`."""

    def which(self, program: str) -> str | None: ...

    def run(self, *command: str, timeout_s: float = 20, environ: Mapping[str, str] | None = None) -> Done:
        """Run a program once: the same command again returns the first result.

        :param timeout_s: the deadline, at which its whole process group is killed.
        :param environ: variables that are set besides the present ones.
        """

    def limit(self, name: Limit) -> tuple[int | None, int | None]:
        """Return the soft and the hard limit, as getrlimit(2) does; None stands for unlimited."""

    def host_memory(self) -> HostMemory: ...

    def interfaces(self) -> Sequence[Interface]: ...

    def resolve(self, host: str) -> Sequence[str]:
        """Return the host's addresses; OSError when it has none."""

    def processes(self) -> Sequence[HostProcess]:
        """Return the processes that can be seen, without this one and its ancestors."""

    def listener(self, port: int) -> str | None:
        """Describe the process that listens on a TCP port, in words; None when nobody does."""

    def time(self) -> float:
        """Return the seconds since 1970."""
