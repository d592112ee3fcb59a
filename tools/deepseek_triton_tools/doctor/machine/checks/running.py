"""What earlier launches left, and the programs that start new ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from deepseek_triton_tools.doctor.machine.checks.process_limits import SHM
from deepseek_triton_tools.doctor.machine.expected import Expected
from deepseek_triton_tools.doctor.machine.machine import Done, HostProcess, Machine
from deepseek_triton_tools.doctor.machine.machine_finding import MachineFinding, note, ok, warning

_STUB = "triton_python_backend_stub"
_SUPERVISOR = "supervise.py"
_OWN = "deepseek_triton_"
"""What the names of a launch's shared memory begin with; then its id and an underscore."""
_MOST_NAMED = 3
_DAEMONS = ("orted", "prted", "slurmstepd")
"""What starts ranks on a host without the supervisor, and ends them with it: of Open MPI 4, Open MPI 5, Slurm."""


def check_leftovers(machine: Machine, expected: Expected) -> MachineFinding:
    processes = machine.processes()
    launches: dict[str, list[HostProcess]] = {}
    for process in processes:
        if process.launch:
            launches.setdefault(process.launch, []).append(process)
    by_pid = {process.pid: process for process in processes}
    left = {name: members for name, members in launches.items() if not any(_supervises(m, by_pid) for m in members)}
    stubs = _stubs_alone(processes)
    regions = _regions_of_nobody(machine, launches)
    problems = [f"launch {name}: {_processes(members)}, no supervisor" for name, members in left.items()]
    fixes = [f"deepseek-triton launch stop {' '.join(left)}"] if left else []
    if stubs:
        problems.append(f"stubs without a tritonserver: {', '.join(map(str, stubs))}")
        fixes.append(f"kill {' '.join(map(str, stubs))}")
    if problems:
        cause = "they hold GPUs, shared memory or ports of a server that is gone"
        return warning("; ".join(problems), cause, "; ".join(fixes))
    if regions:
        cause = (
            "shared memory of launches that have ended, or of another user or container, whose launches are not seen"
        )
        return note(f"{len(regions)} regions in {SHM}", cause, f"where none of those runs, {_removal(regions)}")
    running = ", ".join(f"{name} ({_processes(members)})" for name, members in launches.items())
    return ok(f"running: {running}" if running else "nothing left")


def _processes(members: Sequence[HostProcess]) -> str:
    return "1 process" if len(members) == 1 else f"{len(members)} processes"


def _removal(regions: Sequence[str]) -> str:
    launches = sorted({_launch_of(name) for name in regions})
    said = " ".join(f"{SHM}/{_OWN}{launch}_*" for launch in launches[:_MOST_NAMED])
    more = f", and of {len(launches) - _MOST_NAMED} more launches" if len(launches) > _MOST_NAMED else ""
    return f"rm {said}{more}"


def _launch_of(region: str) -> str:
    return region.removeprefix(_OWN).partition("_")[0]


def _supervises(process: HostProcess, by_pid: Mapping[int, HostProcess]) -> bool:
    """`python3 .../supervise.py run ...`, or a rank's guard whose supervisor is on another host."""
    for script, verb in zip(process.command, process.command[1:], strict=False):
        if script.rpartition("/")[2] == _SUPERVISOR and verb in ("run", "rank"):
            return verb == "run" or any(each.name in _DAEMONS for each in _ancestors(process, by_pid))
    return False


def _stubs_alone(processes: Sequence[HostProcess]) -> Sequence[int]:
    """Stubs, and what they forked, that descend from no tritonserver any more."""
    by_pid = {process.pid: process for process in processes}
    stubs = [process for process in processes if process.command and process.command[0].endswith(_STUB)]
    return [stub.pid for stub in stubs if not any(each.name == "tritonserver" for each in _ancestors(stub, by_pid))]


def _ancestors(process: HostProcess, by_pid: Mapping[int, HostProcess]) -> Iterator[HostProcess]:
    seen = {process.pid}
    while (above := by_pid.get(process.parent)) and above.pid not in seen:
        seen.add(above.pid)
        yield above
        process = above


def _regions_of_nobody(machine: Machine, launches: dict[str, list[HostProcess]]) -> Sequence[str]:
    """/dev/shm/deepseek_triton_<launch>_*, of launches that don't run."""
    try:
        names = [name for name in machine.names(SHM) if name.startswith(_OWN)]
    except OSError:
        return []
    return [name for name in names if _launch_of(name) not in launches]


def check_docker(machine: Machine, expected: Expected) -> MachineFinding:
    program = next((name for name in ("docker", "podman") if machine.which(name)), None)
    if program is None:
        return note("none", "for launch docker", "install Docker or Podman", blocks=True)
    done = machine.run(program, "info", "--format", "{{json .Runtimes}} {{json .CDISpecDirs}}")
    if done.code != 0:
        fix = "start its daemon, or let this user use it (the group docker)"
        return note(f"{program} doesn't answer{_said(done)}", "for launch docker", fix, blocks=True)
    if machine.which("nvidia-smi") and "nvidia" not in done.out and not machine.which("nvidia-ctk"):
        cause = "containers see no GPU without the NVIDIA Container Toolkit"
        return note(f"{program}, without NVIDIA's runtime", cause, "install nvidia-container-toolkit", blocks=True)
    return ok(program)


def check_slurm(machine: Machine, expected: Expected) -> MachineFinding:
    lacking = [name for name in ("sbatch", "srun") if machine.which(name) is None]
    if lacking:
        fix = "submit it where Slurm is"
        return note(f"{', '.join(lacking)} not on PATH", "for launch slurm --submit", fix, blocks=True)
    done = machine.run("sinfo", "--noheader", "--format=%P %a %D %t")
    if done.code != 0:
        fix = "start slurmctld, and munge"
        return note(f"sinfo failed{_said(done)}", "for launch slurm --submit", fix, blocks=True)
    return ok("; ".join(line.strip() for line in done.out.splitlines()) or "no partition")


def check_kubectl(machine: Machine, expected: Expected) -> MachineFinding:
    if machine.which("kubectl") is None:
        fix = "apply it where kubectl is"
        return note("no kubectl on PATH", "for launch kubernetes --submit", fix, blocks=True)
    done = machine.run("kubectl", "config", "current-context")
    if done.code != 0:
        fix = "kubectl config use-context NAME"
        return note(f"kubectl knows no cluster{_said(done)}", "for launch kubernetes --submit", fix, blocks=True)
    return ok(f"context {done.out.strip()}")


def _said(done: Done) -> str:
    if done.code is None:
        return ": nothing before its deadline"
    lines = (done.err or done.out).strip().splitlines()
    return f": {lines[-1].strip()[:160]}" if lines else ""
