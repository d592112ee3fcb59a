"""The remains of earlier launches, and the programs that start new ones."""

import re
from collections.abc import Iterator, Mapping, Sequence

from deepseek_triton_tools.doctor.findings import Expected, MachineFinding, note, ok, warning
from deepseek_triton_tools.doctor.machine import Done, HostProcess, Machine
from deepseek_triton_tools.doctor.software import STUB
from deepseek_triton_tools.doctor.system import SHM

_SUPERVISOR = "supervise.py"
# Begins the name of a launch's shared memory; the launch tag and an underscore follow.
_REGION_PREFIX = "deepseek_triton_"
_MOST_NAMED = 3
_VLLM_TITLE = "VLLM::"
# Programs that start ranks on a host where the supervisor is not, and end them when it ends: Open MPI 4, 5, Slurm.
_DAEMONS = ("orted", "prted", "slurmstepd")
# Expression for what sinfo 22.05 says -> cause and fix. The first that fits counts.
_SLURM_MESSAGES: Mapping[str, tuple[str, str]] = {
    "configuration source|configuration file|cannot stat file": (
        "this machine belongs to no Slurm cluster: it has no slurm.conf, and DNS names none",
        "submit it on a machine of the cluster, or name its slurm.conf with SLURM_CONF",
    ),
    "Unable to contact slurm controller": (
        "the slurmctld that slurm.conf names doesn't answer",
        "scontrol ping says which one that is: start it there",
    ),
    "(?i)munge|authentication": ("Slurm's programs prove by munge who they are", "start munge, with the cluster's key"),
}


def check_leftovers(machine: Machine, expected: Expected) -> MachineFinding:
    processes = machine.processes()
    launches: dict[str, list[HostProcess]] = {}
    for process in processes:
        if process.launch:
            launches.setdefault(process.launch, []).append(process)
    by_pid = {process.pid: process for process in processes}
    orphaned = {name: members for name, members in launches.items() if not any(_supervises(m, by_pid) for m in members)}
    serving = [name for name, members in orphaned.items() if any(_is_served(member, by_pid) for member in members)]
    ended = [name for name in orphaned if name not in serving]
    stubs = [each.pid for each in processes if _is_stub(each) and not _is_served(each, by_pid)]
    engines = [each.pid for each in processes if each.launch not in orphaned and _is_orphaned_engine(each, by_pid)]
    regions = _unused_regions(machine, processes)
    problems = [f"launch {name}: {_counted(members)}, no supervisor" for name, members in orphaned.items()]
    fixes = [f"deepseek-triton launch stop {' '.join(ended)}"] if ended else []
    if serving:
        problems.append(f"a tritonserver of {' '.join(serving)} still runs")
        fixes.append(f"when nobody needs that server any more: deepseek-triton launch stop {' '.join(serving)}")
    for title, pids in (("stubs without a tritonserver", stubs), ("vLLM's processes without a server", engines)):
        if pids:
            problems.append(f"{title}: {', '.join(map(str, pids))}")
            fixes.append(f"kill {' '.join(map(str, pids))}")
    if problems:
        cause = "they may hold GPUs, shared memory or ports of a server that has ended"
        return warning("; ".join(problems), cause, "; ".join(fixes))
    if regions:
        cause = "the launch has ended, or it belongs to another user or container and can't be seen from here"
        names = sorted(set(regions))
        paths = " ".join(f"{SHM}/{_REGION_PREFIX}{name}_*" for name in names[:_MOST_NAMED])
        more = f", and of {len(names) - _MOST_NAMED} more launches" if len(names) > _MOST_NAMED else ""
        return note(f"{len(regions)} regions in {SHM}", cause, f"if none of these launches runs: rm {paths}{more}")
    running = ", ".join(f"{name} ({_counted(members)})" for name, members in launches.items())
    return ok(f"running: {running}" if running else "nothing left")


def _counted(members: Sequence[HostProcess]) -> str:
    return "1 process" if len(members) == 1 else f"{len(members)} processes"


def _supervises(process: HostProcess, by_pid: Mapping[int, HostProcess]) -> bool:
    """Return whether it is `supervise.py run`, or `supervise.py rank` for a supervisor on another host."""
    for script, verb in zip(process.command, process.command[1:], strict=False):
        if script.rpartition("/")[2] == _SUPERVISOR and verb in ("run", "rank"):
            return verb == "run" or any(each.name in _DAEMONS for each in _ancestors(process, by_pid))
    return False


def _is_orphaned_engine(process: HostProcess, by_pid: Mapping[int, HostProcess]) -> bool:
    """Return whether it is a process of vLLM, by its title (VLLM::EngineCore, VLLM::Worker_TP0), whose server is gone.

    Orphans go to process 1, which in a container may be the server itself: `vllm serve`, or a Python program.
    """
    if not process.name.startswith(_VLLM_TITLE):
        return False
    top = next((each for each in _ancestors(process, by_pid) if not each.name.startswith(_VLLM_TITLE)), None)
    if top is None:
        return True
    return top.pid == 1 and not any("vllm" in word or "python" in word for word in top.command)


def _is_stub(process: HostProcess) -> bool:
    """Return whether it is a stub of Triton's Python backend, or a fork of one, which has the same command line."""
    return bool(process.command) and process.command[0].endswith(STUB)


def _is_served(stub: HostProcess, by_pid: Mapping[int, HostProcess]) -> bool:
    """Return whether it is a stub whose tritonserver, whatever its name, is still its parent, or its original's.

    Triton gives the stub the server's pid, as the server's pid namespace counts. At which place is Triton's own affair,
    so any place counts: a healthy server is never taken for one that is gone.
    """
    if not _is_stub(stub):
        return False
    parent = stub.parent
    for above in _ancestors(stub, by_pid):
        if above.command != stub.command:
            return str(above.pid_inside or above.pid) in stub.command
        parent = above.parent
    return str(parent) in stub.command


def _ancestors(process: HostProcess, by_pid: Mapping[int, HostProcess]) -> Iterator[HostProcess]:
    seen = {process.pid}
    while (above := by_pid.get(process.parent)) and above.pid not in seen:
        seen.add(above.pid)
        yield above
        process = above


def _unused_regions(machine: Machine, processes: Sequence[HostProcess]) -> list[str]:
    """Return the launch of each /dev/shm/deepseek_triton_<launch>_* whose launch doesn't run.

    `serve` has no launch tag in its environment, but its server and its stubs have the beginning of the name on their
    command lines, which every user may read.
    """
    try:
        names = [name for name in machine.list_folder(SHM) if name.startswith(_REGION_PREFIX)]
    except OSError:
        return []
    running = {process.launch for process in processes}
    lines = [" ".join(process.command) for process in processes]
    launches = [name.removeprefix(_REGION_PREFIX).partition("_")[0] for name in names]
    return [
        launch
        for launch in launches
        if launch not in running and not any(f"{_REGION_PREFIX}{launch}_" in line for line in lines)
    ]


def check_docker(machine: Machine, expected: Expected) -> MachineFinding:
    if expected.num_nodes > 1 and (expected.is_tensorrt_llm or not expected.by_triton):
        cause = f"the repository takes {expected.num_nodes} nodes, and launch docker starts one container"
        fix = "start one on each node: launch ssh-setup prints how; or use launch slurm or kubernetes"
        return note("not for several nodes", cause, fix, blocks=True)
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
    if missing := [name for name in ("sbatch", "srun") if machine.which(name) is None]:
        fix = "submit it on a machine with Slurm"
        return note(f"{', '.join(missing)} not on PATH", "launch slurm --submit needs it", fix, blocks=True)
    done = machine.run("sinfo", "--noheader", "--format=%P %a %D %t")
    if done.code != 0:
        fallback = ("launch slurm --submit needs it", "make sinfo work first; it needs slurm.conf, slurmctld and munge")
        cause, fix = next((why for words, why in _SLURM_MESSAGES.items() if re.search(words, done.err)), fallback)
        return note(f"sinfo failed{_last_line(done)}", cause, fix, blocks=True)
    return ok("; ".join(line.strip() for line in done.out.splitlines()) or "no partition")


def check_kubectl(machine: Machine, expected: Expected) -> MachineFinding:
    if machine.which("kubectl") is None:
        fix = "apply it on a machine with kubectl"
        return note("no kubectl on PATH", "launch kubernetes --submit needs it", fix, blocks=True)
    done = machine.run("kubectl", "config", "current-context")
    if done.code != 0:
        result = f"kubectl knows no cluster{_last_line(done)}"
        contexts = machine.run("kubectl", "config", "get-contexts", "--output=name").out.split()
        fix = "put the cluster's kubeconfig at ~/.kube/config, or name it with KUBECONFIG"
        if contexts:
            fix = f"kubectl config use-context {contexts[0]}"
            fix += f" (or {', '.join(contexts[1:_MOST_NAMED])})" if contexts[1:] else ""
        return note(result, "launch kubernetes --submit needs it", fix, blocks=True)
    return ok(f"context {done.out.strip()}")


def _last_line(done: Done) -> str:
    lines = (done.err or done.out).strip().splitlines()
    if done.code is None and not lines:
        return ": nothing before its deadline"
    return f": {lines[-1].strip()[:160]}" if lines else ""
