"""A made-up machine for the checks of `doctor`: by default a Triton container with eight H200s, where all is well."""

import errno
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deepseek_triton_tools.doctor.machine import NOT_FOUND, Disk, Done, HostProcess, Interface, Limit, Python
from deepseek_triton_tools.host.host_memory import HostMemory

GIB = 2**30

# The answers of one real H200 with driver 580.159.04, here for each of eight GPUs.
BASIC = "{}, NVIDIA H200, 143771, {}, 9.0, 580.159.04, Enabled, Disabled"
HEALTH = "{}, 0, No, No, N/A, N/A"
LDD = "\tlinux-vdso.so.1 (0x1)\n\tlibpython3.12.so.1.0 => /usr/lib/x86_64-linux-gnu/libpython3.12.so.1.0 (0x2)\n"
MPIRUN = "mpirun (Open MPI) 4.1.6\n\nReport bugs to http://www.open-mpi.org/community/help/\n"
LIBRARY = "Open MPI v4.1.6, package: Debian OpenMPI, ident: 4.1.6, repo rev: v4.1.6, Sep 30, 2023\x00\n"
STUB = "/opt/tritonserver/backends/python/triton_python_backend_stub"


def topology(link: str = "NV18", *, count: int = 8) -> str:
    """The matrix that `nvidia-smi topo -m` prints, with its underlined heading."""
    names = [f"GPU{n}" for n in range(count)]
    lines = ["\t\x1b[4m" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"]
    for row, name in enumerate(names):
        cells = [" X " if row == column else link for column in range(count)]
        lines.append(f"{name}\t" + "\t".join(cells) + "\t0-95\t0\t\tN/A")
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self", "  NV#  = Connection traversing a bonded set"])


def nvidia_smi(
    *, count: int = 8, basic: str = BASIC, health: str = HEALTH, apps: str = "", used: int = 9, topo: str | None = None
) -> dict[str, Done]:
    """Start of a command line -> nvidia-smi's answer."""
    return {
        "nvidia-smi --query-gpu=index,name": Done(
            code=0, out="\n".join(basic.format(n, used) for n in range(count)) + "\n"
        ),
        "nvidia-smi --query-gpu=index,ecc": Done(code=0, out="\n".join(health.format(n) for n in range(count)) + "\n"),
        "nvidia-smi --query-compute-apps": Done(code=0, out=apps),
        "nvidia-smi topo -m": Done(code=0, out=topology(count=count) if topo is None else topo),
    }


GOOD_RUNS: Mapping[str, Done] = {
    **nvidia_smi(),
    "ldd": Done(code=0, out=LDD),
    "mpirun --version": Done(code=0, out=MPIRUN),
    "mpirun --allow-run-as-root": Done(code=0, out="hello 0 2\nhello 1 2\n"),
    "/usr/bin/python3 -c from mpi4py import rc": Done(code=0, out=LIBRARY),
    "/usr/bin/python3 -c import sys; from mpi4py": Done(code=0, out="spawned\n"),
    "/usr/bin/python3 -c import locale": Done(code=0),
    "docker info": Done(code=0, out='{"nvidia":{},"runc":{}} null\n'),
    "sinfo": Done(code=0, out="debug* up 2 idle\n"),
    "kubectl config": Done(code=0, out="prod\n"),
}
GOOD_PROGRAMS = {
    name: f"/usr/bin/{name}"
    for name in ("tritonserver", "trtllm-llmapi-launch", "mpirun", "nvidia-smi", "ssh", "docker", "sbatch", "srun")
} | {"tritonserver": "/opt/tritonserver/bin/tritonserver", "kubectl": "/usr/bin/kubectl"}
PYTHON = Python(
    executable="/usr/bin/python3",
    version="3.12.3",
    packages={"numpy": "1.26.4", "tensorrt_llm": "1.2.1", "mpi4py": "3.1.5", "openai": "1.109.0", "pyyaml": "6.0.3"},
    libpython="/usr/lib/x86_64-linux-gnu/libpython3.12.so.1.0",
    glibc="2.39",
)


MEMORY = HostMemory(total=2000 * GIB, available=1900 * GIB, cgroups=())


@dataclass(kw_only=True)
class FakedMachine:
    hostname: str = "node1"
    environ: Mapping[str, str] = field(
        default_factory=lambda: {
            "HOME": "/root",
            "NVIDIA_TRITON_SERVER_VERSION": "26.07",
            "TRITON_SERVER_VERSION": "2.71.0",
        }
    )
    python: Python = PYTHON
    files: Mapping[str, str | bytes | OSError] = field(default_factory=dict)
    """Path -> content, or the error that reading raises. Their folders exist too."""
    folders: frozenset[str] = frozenset({"/root/.cache", "/root/.triton", "/tmp", "/dev/shm"})
    closed: frozenset[str] = frozenset()
    """Folders that can't be written to."""
    disks: Mapping[str, Disk | OSError] = field(default_factory=dict)
    programs: Mapping[str, str] = field(default_factory=lambda: dict(GOOD_PROGRAMS))
    runs: Mapping[str, Done] = field(default_factory=lambda: dict(GOOD_RUNS))
    """Start of a command line -> how the program ends."""
    limits: Mapping[Limit, tuple[int | None, int | None]] = field(default_factory=dict)
    memory: HostMemory | OSError = MEMORY
    nics: Sequence[Interface] = (
        Interface(name="lo", is_up=True, addresses=("127.0.0.1", "::1")),
        Interface(name="eth0", is_up=True, addresses=("10.0.0.1",)),
    )
    names_of_hosts: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"node1": ("10.0.0.1",)})
    running: Sequence[HostProcess] = ()
    taken: Mapping[int, str] = field(default_factory=dict)
    now: float = 1_000_000.0

    def _file(self, path: str) -> str | bytes:
        content = self.files.get(path)
        if content is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if isinstance(content, OSError):
            raise content
        return content

    def read(self, path: str) -> str:
        content = self._file(path)
        return content if isinstance(content, str) else content.decode()

    def read_bytes(self, path: str, size: int = -1) -> bytes:
        content = self._file(path)
        content = content.encode() if isinstance(content, str) else content
        return content if size < 0 else content[:size]

    def list_folder(self, folder: str) -> Sequence[str]:
        if not self.is_folder(folder):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
        below = f"{folder.rstrip('/')}/"
        return sorted({path.removeprefix(below).partition("/")[0] for path in self._paths() if path.startswith(below)})

    def _paths(self) -> Sequence[str]:
        return [*self.files, *self.folders]

    def is_folder(self, path: str) -> bool:
        return path in self.folders or any(each.startswith(f"{path.rstrip('/')}/") for each in self._paths())

    def exists(self, path: str) -> bool:
        return path in self.files or self.is_folder(path)

    def size(self, path: str) -> int:
        return len(self.read_bytes(path))

    def can_write(self, path: str) -> bool:
        return path not in self.closed

    def disk(self, path: str) -> Disk:
        found = self.disks.get(path, Disk(total=512 * GIB, free=500 * GIB))
        if isinstance(found, OSError):
            raise found
        return found

    def which(self, program: str) -> str | None:
        return self.programs.get(program)

    def run(self, *command: str, timeout_s: float = 20, environ: Mapping[str, str] | None = None) -> Done:
        line = " ".join(command)
        fitting = [start for start in self.runs if line.startswith(start)]
        return self.runs[max(fitting, key=len)] if fitting else Done(code=NOT_FOUND, err=f"{command[0]}: not found")

    def limit(self, name: Limit) -> tuple[int | None, int | None]:
        return self.limits.get(name, (None, None))

    def host_memory(self) -> HostMemory:
        if isinstance(self.memory, OSError):
            raise self.memory
        return self.memory

    def interfaces(self) -> Sequence[Interface]:
        return self.nics

    def resolve(self, host: str) -> Sequence[str]:
        if host not in self.names_of_hosts:
            raise socket.gaierror(-2, "Name or service not known")
        return self.names_of_hosts[host]

    def processes(self) -> Sequence[HostProcess]:
        return self.running

    def listener(self, port: int) -> str | None:
        return self.taken.get(port)

    def time(self) -> float:
        return self.now
