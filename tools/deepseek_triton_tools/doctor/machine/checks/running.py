"""The remains of earlier launches, and the programs that start new ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from deepseek_triton_tools.doctor.machine.checks.process_limits import SHM
from deepseek_triton_tools.doctor.machine.checks.software import STUB
from deepseek_triton_tools.doctor.machine.expected import Expected
from deepseek_triton_tools.doctor.machine.machine import Done, HostProcess, Machine
from deepseek_triton_tools.doctor.machine.machine_finding import MachineFinding, note, ok, warning

_SUPERVISOR = "supervise.py"
_REGION_PREFIX = "deepseek_triton_"
"""Begins the name of a launch's shared memory; the launch tag and an underscore follow."""
_MOST_NAMED = 3
_DAEMONS = ("orted", "prted", "slurmstepd")
"""Programs that start ranks on a host where the supervisor is not, and end them when it ends: Open MPI 4, 5, Slurm."""


def check_leftovers(machine: Machine, expected: Expected) -> MachineFinding:
    processes = machine.processes()
    launches: dict[str, list[HostProcess]] = {}
    for process in processes:
        if process.launch:
            launches.setdefault(process.launch, []).append(process)
    by_pid = {process.pid: process for process in processes}
    orphaned = {name: members for name, members in launches.items() if not any(_supervises(m, by_pid) for m in members)}
    stubs = _orphaned_stubs(by_pid)
    regions = _unused_regions(machine, launches)
    problems = [f"launch {name}: {_counted(members)}, no supervisor" for name, members in orphaned.items()]
    fixes = [f"deepseek-triton launch stop {' '.join(orphaned)}"] if orphaned else []
    if stubs:
        problems.append(f"stubs without a tritonserver: {', '.join(map(str, stubs))}")
        fixes.append(f"kill {' '.join(map(str, stubs))}")
    if problems:
        cause = "they may hold GPUs, shared memory or ports of a server that has ended"
        return warning("; ".join(problems), cause, "; ".join(fixes))
    if regions:
        cause = "the launch has ended, or it belongs to another user or container and can't be seen from here"
        return note(f"{len(regions)} regions in {SHM}", cause, f"if none of these launches runs: {_removal(regions)}")
    running = ", ".join(f"{name} ({_counted(members)})" for name, members in launches.items())
    return ok(f"running: {running}" if running else "nothing left")


def _counted(members: Sequence[HostProcess]) -> str:
    return "1 process" if len(members) == 1 else f"{len(members)} processes"


def _removal(regions: Sequence[str]) -> str:
    launches = sorted({_launch_of(name) for name in regions})
    paths = " ".join(f"{SHM}/{_REGION_PREFIX}{launch}_*" for launch in launches[:_MOST_NAMED])
    more = f", and of {len(launches) - _MOST_NAMED} more launches" if len(launches) > _MOST_NAMED else ""
    return f"rm {paths}{more}"


def _launch_of(region: str) -> str:
    return region.removeprefix(_REGION_PREFIX).partition("_")[0]


def _supervises(process: HostProcess, by_pid: Mapping[int, HostProcess]) -> bool:
    """Return whether it is `supervise.py run`, or `supervise.py rank` for a supervisor on another host."""
    for script, verb in zip(process.command, process.command[1:], strict=False):
        if script.rpartition("/")[2] == _SUPERVISOR and verb in ("run", "rank"):
            return verb == "run" or any(each.name in _DAEMONS for each in _ancestors(process, by_pid))
    return False


def _orphaned_stubs(by_pid: Mapping[int, HostProcess]) -> Sequence[int]:
    """Return the pids of stubs, and of their forks, that no longer have a tritonserver above them."""
    stubs = [process for process in by_pid.values() if process.command and process.command[0].endswith(STUB)]
    return [stub.pid for stub in stubs if not any(each.name == "tritonserver" for each in _ancestors(stub, by_pid))]


def _ancestors(process: HostProcess, by_pid: Mapping[int, HostProcess]) -> Iterator[HostProcess]:
    seen = {process.pid}
    while (above := by_pid.get(process.parent)) and above.pid not in seen:
        seen.add(above.pid)
        yield above
        process = above


def _unused_regions(machine: Machine, launches: dict[str, list[HostProcess]]) -> Sequence[str]:
    """Return the names of /dev/shm/deepseek_triton_<launch>_* whose launches don't run."""
    try:
        names = [name for name in machine.list_folder(SHM) if name.startswith(_REGION_PREFIX)]
    except OSError:
        return []
    return [name for name in names if _launch_of(name) not in launches]


def check_docker(machine: Machine, expected: Expected) -> MachineFinding:
    program = next((name for name in ("docker", "podman") if machine.which(name)), None)
    if program is None:
        return note("none", "launch docker needs it", "install Docker or Podman", blocks=True)
    done = machine.run(program, "info", "--format", "{{json .Runtimes}} {{json .CDISpecDirs}}")
    if done.code != 0:
        fix = "start its daemon, or let this user use it (add it to the group docker)"
        return note(f"{program} doesn't answer{_last_line(done)}", "launch docker needs it", fix, blocks=True)
    if machine.which("nvidia-smi") and "nvidia" not in done.out and not machine.which("nvidia-ctk"):
        cause = "containers see no GPU without the NVIDIA Container Toolkit"
        return note(f"{program}, without NVIDIA's runtime", cause, "install nvidia-container-toolkit", blocks=True)
    return ok(program)


def check_slurm(machine: Machine, expected: Expected) -> MachineFinding:
    missing = [name for name in ("sbatch", "srun") if machine.which(name) is None]
    if missing:
        fix = "submit it on a machine with Slurm"
        return note(f"{', '.join(missing)} not on PATH", "launch slurm --submit needs it", fix, blocks=True)
    done = machine.run("sinfo", "--noheader", "--format=%P %a %D %t")
    if done.code != 0:
        fix = "start slurmctld and munge"
        return note(f"sinfo failed{_last_line(done)}", "launch slurm --submit needs it", fix, blocks=True)
    return ok("; ".join(line.strip() for line in done.out.splitlines()) or "no partition")


def check_kubectl(machine: Machine, expected: Expected) -> MachineFinding:
    if machine.which("kubectl") is None:
        fix = "apply it on a machine with kubectl"
        return note("no kubectl on PATH", "launch kubernetes --submit needs it", fix, blocks=True)
    done = machine.run("kubectl", "config", "current-context")
    if done.code != 0:
        result, fix = f"kubectl knows no cluster{_last_line(done)}", "kubectl config use-context NAME"
        return note(result, "launch kubernetes --submit needs it", fix, blocks=True)
    return ok(f"context {done.out.strip()}")


def _last_line(done: Done) -> str:
    if done.code is None:
        return ": nothing before its deadline"
    lines = (done.err or done.out).strip().splitlines()
    return f": {lines[-1].strip()[:160]}" if lines else ""
