"""MPI, which the engine's ranks find each other by: what there is, and whether it works."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from deepseek_triton_tools.doctor.machine.expected import Expected
from deepseek_triton_tools.doctor.machine.machine import Done, Machine
from deepseek_triton_tools.doctor.machine.machine_finding import MachineFinding, error, lack, note, ok, skipped, warning
from deepseek_triton_tools.doctor.machine.versions import parts

_DEADLINE_S = 5
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_RANK = "from mpi4py import MPI; w = MPI.COMM_WORLD; print('hello', w.rank, w.size, flush=True)"
_CHILD = "from mpi4py import MPI; MPI.Comm.Get_parent().Disconnect()"
_SPAWN = (
    "import sys; from mpi4py import MPI; "
    f"MPI.COMM_SELF.Spawn(sys.executable, ['-c', {_CHILD!r}], maxprocs=1).Disconnect(); print('spawned')"
)
_LIBRARY = "from mpi4py import rc; rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"


@dataclass(frozen=True)
class Trouble:
    """Words of a failure -> why, and what to do."""

    pattern: str
    cause: str
    fix: str


TROUBLES: Sequence[Trouble] = (
    Trouble(
        "All nodes which are allocated for this job are already filled|not enough slots",
        "Open MPI counts no free slot for another process",
        "start by start.sh (trtllm-llmapi-launch), which spawns nothing; by hand: --oversubscribe, or host:slots",
    ),
    Trouble(
        "not built with SLURM's PMI|PMI2?_Init failed|OMPI was not built with .*PMI",
        "inside a Slurm job step, this MPI finds no process manager",
        "srun --mpi=pmix, or leave the step: unset the SLURM_* and PMI* variables",
    ),
    Trouble(
        "libmpi[^ ]*: cannot open shared object",
        "mpi4py's MPI library is not found",
        "put its folder on LD_LIBRARY_PATH; in NVIDIA's containers /opt/hpcx/ompi/lib or /usr/local/mpi/lib",
    ),
    Trouble("run.*as root|allow-run-as-root", "mpirun refuses root", "mpirun --allow-run-as-root"),
    Trouble(
        r"plm_rsh_agent|\bssh : rsh",
        "Open MPI looks for ssh even on one machine",
        "apt install openssh-client, or OMPI_MCA_plm=isolated on one machine",
    ),
    Trouble(
        "No space left on device|unable to create shared memory|shared_mem.* could not be created",
        "its shared memory or session folder finds no room",
        "more /dev/shm (docker --ipc=host), or TMPDIR on a disk with room",
    ),
    Trouble(
        "(orted|prted).*(not found|No such file)",
        "the daemon of mpirun is not where it was installed",
        "set OPAL_PREFIX to its folder, or PATH to one whole installation",
    ),
    Trouble(
        "MPI_ERR_SPAWN|MPI_ERR_UNKNOWN|[Cc]ould not spawn",
        "this MPI can't start processes from within one",
        "start by start.sh (trtllm-llmapi-launch), which spawns nothing",
    ),
)
"""The first that fits; the messages are Open MPI's and mpi4py's. Who saw them: NVIDIA/TensorRT-LLM issues 5495 and 167,
NVIDIA/TensorRT issue 4501 (the silent one), open-mpi/ompi issues 10590 and 11885."""
_SILENT = Trouble(
    "",
    "nothing came: it mostly waits at a network interface that leads nowhere",
    "OMPI_MCA_btl_tcp_if_include=lo and OMPI_MCA_oob_tcp_if_include=lo on one machine, INTERFACE between several",
)
_OTHER = Trouble("", "the engine's ranks find each other by it", "run it by hand: mpirun -n 2 hostname")


def mpi_version(machine: Machine) -> tuple[str, str] | None:
    """mpirun's kind and version: ("Open MPI", "4.1.4"); None without one."""
    if machine.which("mpirun") is None:
        return None
    text = machine.run("mpirun", "--version").out
    for kind, pattern in _KINDS:
        if found := re.search(pattern, text):
            return kind, found[1]
    return "another MPI", "?"


_KINDS = (
    ("Open MPI", r"Open MPI\) (\S+)"),
    ("Intel MPI", r"Intel\(R\) MPI Library.* Version (\S+)"),
    ("MPICH", r"Version:\s+(\S+)"),
)


def check_mpi(machine: Machine, expected: Expected) -> MachineFinding:
    found = mpi_version(machine)
    if found is None:
        fix = "run in the container, which has it; else apt install openmpi-bin libopenmpi-dev"
        return lack(expected, "no mpirun on PATH", "start.sh starts the engine's ranks by it", fix)
    kind, version = found
    said, mpi4py = f"{kind} {version}", machine.python.packages.get("mpi4py")
    if mpi4py:
        said += f", mpi4py {mpi4py}"
    if kind != "Open MPI":
        cause = "start.sh gives mpirun Open MPI's options"
        return lack(expected, said, cause, "put Open MPI's mpirun first on PATH")
    library = machine.run(machine.python.executable, "-c", _LIBRARY, timeout_s=_DEADLINE_S).out if mpi4py else ""
    linked = re.search(r"Open MPI v?(\d+)", library)
    other = _other_mpi(library, linked, version)
    if other:
        cause = f"mpi4py is linked with {other}: every rank would be a world of its own"
        fix = "pip install --force-reinstall --no-binary mpi4py mpi4py, with that mpirun's mpicc on PATH"
        return lack(expected, said, cause, fix)
    if parts(version) >= (5,):
        return warning(
            said,
            "MPI_Comm_spawn goes through PRRTE, and failed in each of four configurations that were tried "
            "(ai-dynamo/dynamo pull request 15060; open-mpi/ompi issues 10590 and 12307)",
            "start by start.sh (trtllm-llmapi-launch), which spawns nothing; what else starts workers needs Open MPI 4",
        )
    return ok(said)


def _other_mpi(library: str, linked: re.Match[str] | None, version: str) -> str | None:
    """The MPI of mpi4py, where it is not mpirun's."""
    first = library.strip().partition("\n")[0].strip()
    if not first or (linked and int(linked[1]) == parts(version)[0]):
        return None
    return first[:60]


def check_hello(machine: Machine, expected: Expected) -> MachineFinding:
    """mpirun -n 2."""
    found = mpi_version(machine)
    if found is None:
        return skipped("there is no mpirun")
    program = ["echo", "hello"]
    if has_mpi4py := "mpi4py" in machine.python.packages:
        program = [machine.python.executable, "-c", _RANK]
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if found[0] == "Open MPI" else []
    done = machine.run("mpirun", *options, "-n", "2", *program, timeout_s=2 * _DEADLINE_S, environ=_AS_ROOT)
    said = [line.strip() for line in done.out.splitlines() if "hello" in line]
    if done.code == 0 and has_mpi4py and sorted(said) == ["hello 0 1", "hello 0 1"]:
        cause = "mpi4py is not of the MPI that mpirun is of: each rank is a world of its own"
        fix = "pip install --force-reinstall --no-binary mpi4py mpi4py, with that mpirun's mpicc on PATH"
        return lack(expected, "two worlds of one rank", cause, fix)
    if done.code == 0 and len(said) == 2:
        return ok("two ranks" + ("" if has_mpi4py else ", without mpi4py"))
    trouble = _trouble(done)
    return lack(expected, _failed("mpirun -n 2", done), trouble.cause, trouble.fix)


def check_spawn(machine: Machine, expected: Expected) -> MachineFinding:
    """COMM_SELF.Spawn."""
    if "mpi4py" not in machine.python.packages:
        return skipped("mpi4py is not installed for this Python")
    done = machine.run(machine.python.executable, "-c", _SPAWN, timeout_s=_DEADLINE_S, environ=_AS_ROOT)
    if done.code == 0 and "spawned" in done.out:
        return ok("one process spawned")
    trouble = _trouble(done)
    cause = "; ".join(filter(None, [trouble.cause, "plain tritonserver and trtllm-serve start their workers so"]))
    if expected.is_tensorrt_llm and not expected.is_ours:
        return error(_failed("COMM_SELF.Spawn", done), cause, trouble.fix)
    return note(_failed("COMM_SELF.Spawn", done), f"{cause}; start.sh does not", trouble.fix)


def _trouble(done: Done) -> Trouble:
    text = done.err + done.out
    found = next((each for each in TROUBLES if re.search(each.pattern, text)), None)
    return found or (_SILENT if done.code is None else _OTHER)


def _failed(what: str, done: Done) -> str:
    how = "gave nothing before its deadline" if done.code is None else f"ended with {done.code}"
    return f"{what} {how}{_last_words(done)}"


def _last_words(done: Done) -> str:
    """The line that says most: the last one with an error in it, else the last one."""
    lines = [line.strip() for line in (done.err or done.out).splitlines() if line.strip(" -\t")]
    telling = [line for line in lines if re.search("rror|ailed|MPI_ERR|not enough|already filled", line)] or lines
    return f": {telling[-1][:160]}" if telling else ""
