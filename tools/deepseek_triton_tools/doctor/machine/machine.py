"""All that a check sees of its surroundings. `real.RealMachine` looks at this machine; tests have a made-up one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from deepseek_triton_tools.host.host_memory import HostMemory

Limit = Literal["memlock", "nofile", "stack"]

NOT_FOUND = 127
"""Exit code of what can't be started, as in a shell."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """A program that has ended."""

    code: int | None
    """None: it was killed at its deadline. Below 0: by a signal."""
    out: str = ""
    err: str = ""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Bytes of a file system."""

    total: int
    free: int
    """For this user."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """Of the network."""

    name: str
    is_up: bool
    addresses: tuple[str, ...] = ()
    """IPv4, then IPv6; without those of the link alone (fe80::)."""

    @property
    def is_loopback(self) -> bool:
        return self.name == "lo"


@dataclass(frozen=True, kw_only=True)
class HostProcess:
    pid: int
    parent: int
    name: str
    """As the kernel has it: at most 15 characters."""
    command: tuple[str, ...] = ()
    launch: str | None = None
    """The id of the launch it belongs to (DEEPSEEK_TRITON_LAUNCH); None also where that can't be read."""


@dataclass(frozen=True, kw_only=True)
class Python:
    """The interpreter that runs the checks, and what is installed for it."""

    executable: str
    version: str
    """`3.12.3`."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Distribution -> version, of those in real.PACKAGES that are there."""
    libpython: str | None = None
    """The file."""
    glibc: str | None = None
    """`2.35`; None: another libc."""
    pytriton: str | None = None
    """The folder of the package that nvidia-pytriton installs."""

    @property
    def minor(self) -> str:
        """`3.12`."""
        return ".".join(self.version.split(".")[:2])


class Machine(Protocol):
    """Paths are absolute. What looks at files raises OSError as the system calls do."""

    @property
    def hostname(self) -> str: ...

    @property
    def environ(self) -> Mapping[str, str]: ...

    @property
    def python(self) -> Python: ...

    def read(self, path: str) -> str:
        """A text file."""
        ...

    def read_bytes(self, path: str, size: int = -1) -> bytes:
        """The first `size` bytes, or all."""
        ...

    def names(self, folder: str) -> Sequence[str]:
        """Of what is in it, sorted."""
        ...

    def is_folder(self, path: str) -> bool: ...

    def exists(self, path: str) -> bool: ...

    def size(self, path: str) -> int:
        """Bytes, of what a link leads to."""
        ...

    def can_write(self, path: str) -> bool: ...

    def disk(self, path: str) -> Disk:
        """Of the file system that holds `path`."""
        ...

    def which(self, program: str) -> str | None: ...

    def run(self, *command: str, timeout_s: float = 20, environ: Mapping[str, str] | None = None) -> Done:
        """Run a program, once: the same command again gives what it gave.

        :param environ: what is set besides. With its deadline over, all of its process group is killed.
        """
        ...

    def limit(self, name: Limit) -> tuple[int | None, int | None]:
        """Soft and hard, as of getrlimit(2); None: unlimited."""
        ...

    def host_memory(self) -> HostMemory: ...

    def interfaces(self) -> Sequence[Interface]: ...

    def resolve(self, host: str) -> Sequence[str]:
        """Its addresses; OSError where it has none."""
        ...

    def processes(self) -> Sequence[HostProcess]:
        """Those that can be seen, this one and those it descends from left out."""
        ...

    def listener(self, port: int) -> str | None:
        """Who listens on a TCP port, for people; None: nobody."""
        ...

    def time(self) -> float:
        """Seconds since 1970."""
        ...
