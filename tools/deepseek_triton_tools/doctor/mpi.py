"""MPI, by which the engine's ranks find each other: which one is installed, and whether it works."""

import re
from collections.abc import Mapping

from deepseek_triton_tools.doctor.findings import (
    Expected,
    MachineFinding,
    error,
    error_or_note,
    note,
    ok,
    skipped,
    warning,
)
from deepseek_triton_tools.doctor.machine import Done, Machine
from deepseek_triton_tools.doctor.software import version_numbers

_DEADLINE_S = 5
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_RANK = "from mpi4py import MPI; w = MPI.COMM_WORLD; print('hello', w.rank, w.size, flush=True)"
_CHILD = "from mpi4py import MPI; MPI.Comm.Get_parent().Disconnect()"
_SPAWN = (
    "import sys; from mpi4py import MPI; "
    f"MPI.COMM_SELF.Spawn(sys.executable, ['-c', {_CHILD!r}], maxprocs=1).Disconnect(); print('spawned')"
)
_LIBRARY = "from mpi4py import rc; rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"

# Kind -> how `mpirun --version` names its version.
_MPI_KINDS = (
    ("Open MPI", r"Open MPI\) (\S+)"),
    ("Intel MPI", r"Intel\(R\) MPI Library.* Version (\S+)"),
    ("MPICH", r"Version:\s+(\S+)"),
)
_REINSTALL_MPI4PY = "pip install --force-reinstall --no-binary mpi4py mpi4py, with mpirun's own mpicc first on PATH"


# Expression for a message -> cause and fix. The first that fits counts. The messages are those of Open MPI and mpi4py;
# they are reported in NVIDIA/TensorRT-LLM issues 5495 and 167, NVIDIA/TensorRT issue 4501 (the silent one),
# open-mpi/ompi issues 10590 and 11885.
KNOWN_FAILURES: Mapping[str, tuple[str, str]] = {
    "All nodes which are allocated for this job are already filled|not enough slots": (
        "Open MPI counts no free slot for another process",
        "start with start.sh (trtllm-llmapi-launch), which spawns nothing; by hand: --oversubscribe, or host:slots",
    ),
    "not built with SLURM's PMI|PMI2?_Init failed|OMPI was not built with .*PMI": (
        "inside a Slurm job step this MPI finds no process manager",
        "use srun --mpi=pmix, or leave the step: unset the SLURM_* and PMI* variables",
    ),
    "libmpi[^ ]*: cannot open shared object": (
        "mpi4py's MPI library is not found",
        "put its folder on LD_LIBRARY_PATH; in NVIDIA's containers it is /opt/hpcx/ompi/lib or /usr/local/mpi/lib",
    ),
    "run.*as root|allow-run-as-root": ("mpirun refuses to run as root", "mpirun --allow-run-as-root"),
    r"plm_rsh_agent|\bssh : rsh": (
        "Open MPI looks for ssh even on one machine",
        "apt install openssh-client, or OMPI_MCA_plm=isolated on one machine",
    ),
    "No space left on device|unable to create shared memory|shared_mem.* could not be created": (
        "there is no room for its shared memory or its session folder",
        "give it more /dev/shm (docker --ipc=host), or set TMPDIR to a disk with room",
    ),
    "(orted|prted).*(not found|No such file)": (
        "mpirun doesn't find its daemon where it was installed",
        "set OPAL_PREFIX to the folder of the installation, or let PATH begin with one complete installation",
    ),
    "MPI_ERR_SPAWN|MPI_ERR_UNKNOWN|[Cc]ould not spawn": (
        "this MPI can't start further processes from a running one",
        "start with start.sh (trtllm-llmapi-launch), which spawns nothing",
    ),
}
_SILENT = (
    "there was no answer: usually it waits at a network interface that leads nowhere",
    "on one machine set OMPI_MCA_btl_tcp_if_include=lo and OMPI_MCA_oob_tcp_if_include=lo, between several INTERFACE",
)
_OTHER = ("the engine's ranks find each other by MPI", "run it by hand: mpirun -n 2 hostname")


def mpi_version(machine: Machine) -> tuple[str, str] | None:
    """Return kind and version of mpirun, such as ("Open MPI", "4.1.4"); None when it is not on PATH."""
    if machine.which("mpirun") is None:
        return None
    text = machine.run("mpirun", "--version").out
    for kind, pattern in _MPI_KINDS:
        if match := re.search(pattern, text):
            return kind, match[1]
    return "another MPI", "?"


def check_mpi(machine: Machine, expected: Expected) -> MachineFinding:
    if (installed := mpi_version(machine)) is None:
        fix = "run in the container, which has it; or apt install openmpi-bin libopenmpi-dev"
        return error_or_note(expected, "no mpirun on PATH", "TensorRT-LLM starts its ranks by MPI", fix)
    kind, version = installed
    result, mpi4py = f"{kind} {version}", machine.python.packages.get("mpi4py")
    if mpi4py:
        result += f", mpi4py {mpi4py}"
    if kind != "Open MPI":
        cause = "start.sh gives mpirun Open MPI's options"
        return error_or_note(expected, result, cause, "put Open MPI's mpirun first on PATH")
    library = machine.run(machine.python.executable, "-c", _LIBRARY, timeout_s=_DEADLINE_S).out if mpi4py else ""
    linked = re.search(r"Open MPI v?(\d+)", library)
    other = library.strip().partition("\n")[0].strip()
    if other and not (linked and int(linked[1]) == version_numbers(version)[0]):
        cause = f"mpi4py is linked with {other[:60]}: every rank would be an MPI world of its own"
        return error_or_note(expected, result, cause, _REINSTALL_MPI4PY)
    if version_numbers(version) >= (5,):
        return warning(
            result,
            "its MPI_Comm_spawn goes through PRRTE, and failed in all four configurations that were tried "
            "(ai-dynamo/dynamo pull request 15060; open-mpi/ompi issues 10590 and 12307)",
            "start with start.sh (trtllm-llmapi-launch), which spawns nothing; other launchers need Open MPI 4",
        )
    return ok(result)


def check_hello(machine: Machine, expected: Expected) -> MachineFinding:
    """Check that `mpirun -n 2` starts two ranks of one world."""
    if (installed := mpi_version(machine)) is None:
        return skipped("there is no mpirun")
    program = ["echo", "hello"]
    if has_mpi4py := "mpi4py" in machine.python.packages:
        program = [machine.python.executable, "-c", _RANK]
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if installed[0] == "Open MPI" else []
    done = machine.run("mpirun", *options, "-n", "2", *program, timeout_s=2 * _DEADLINE_S, environ=AS_ROOT)
    greetings = [line.strip() for line in done.out.splitlines() if "hello" in line]
    if done.code == 0 and has_mpi4py and sorted(greetings) == ["hello 0 1", "hello 0 1"]:
        cause = "mpi4py is linked with another MPI than mpirun's: each rank is an MPI world of its own"
        return error_or_note(expected, "two worlds of one rank", cause, _REINSTALL_MPI4PY)
    if done.code == 0 and len(greetings) == 2:
        return ok("two ranks" + ("" if has_mpi4py else ", without mpi4py"))
    return error_or_note(expected, failed("mpirun -n 2", done), *explain(done))


def check_spawn(machine: Machine, expected: Expected) -> MachineFinding:
    """Check that a running process can start another (MPI.COMM_SELF.Spawn)."""
    if "mpi4py" not in machine.python.packages:
        return skipped("mpi4py is not installed for this Python")
    done = machine.run(machine.python.executable, "-c", _SPAWN, timeout_s=_DEADLINE_S, environ=AS_ROOT)
    if done.code == 0 and "spawned" in done.out:
        return ok("one process spawned")
    why, fix = explain(done)
    cause = f"{why}; plain tritonserver and trtllm-serve start their workers in this way"
    if expected.is_tensorrt_llm and not expected.is_ours:
        return error(failed("COMM_SELF.Spawn", done), cause, fix)
    return note(failed("COMM_SELF.Spawn", done), f"{cause}; start.sh does not", fix)


def explain(done: Done) -> tuple[str, str]:
    """Return cause and fix of the known failure that the messages fit, or ones that say that nothing is known."""
    text = done.err + done.out
    known = next((why for words, why in KNOWN_FAILURES.items() if re.search(words, text)), None)
    return known or (_SILENT if done.code is None else _OTHER)


def failed(what: str, done: Done) -> str:
    """Return how a program ended, with its last line that has an error in it, else its last line."""
    how = "gave nothing before its deadline" if done.code is None else f"ended with {done.code}"
    lines = [line.strip() for line in (done.err or done.out).splitlines() if line.strip(" -\t")]
    errors = [line for line in lines if re.search("rror|ailed|MPI_ERR|not enough|already filled", line)] or lines
    return f"{what} {how}" + (f": {errors[-1][:160]}" if errors else "")
