"""Facts that must be the same on every host, and those that must differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deepseek_triton_tools.doctor.machine.capabilities import MPIRUN, SERVE
from deepseek_triton_tools.doctor.machine.examine import MACHINE, HostReport
from deepseek_triton_tools.doctor.machine.expected import Expected
from deepseek_triton_tools.doctor.machine.machine_finding import MachineFinding, Reported, error, ok, warning

_NEEDS = (SERVE, MPIRUN)
_MAX_CLOCK_SKEW_S = 2.0
"""An assumption: with this much, logs of several hosts can still be read side by side."""
_UNKNOWN = "none"


@dataclass(frozen=True, kw_only=True)
class SharedFact:
    """A fact of HostReport.facts that must have one value on all hosts."""

    fact: str
    cause: str
    fix: str = "run the same container on every host"
    is_error: bool = True
    """Whether a difference is an error with a repository for an engine on GPUs; else it is a warning."""


SHARED_FACTS: Sequence[SharedFact] = (
    SharedFact(
        fact="TensorRT-LLM",
        cause="the ranks talk to each other in the engine's own messages, which change between releases",
    ),
    SharedFact(
        fact="vLLM",
        cause="the nodes of an instance exchange pickled objects of one program",
        fix="use the same container, or the same environment, on every host",
    ),
    SharedFact(fact="container", cause="all ranks must run the same program"),
    SharedFact(
        fact="Python", cause="the ranks exchange pickled objects, which need the same minor version", is_error=False
    ),
    SharedFact(
        fact="MPI",
        cause="mpirun and its daemons on the other hosts must have the same version",
        fix="run the same container on every host, or install the same Open MPI",
    ),
    SharedFact(
        fact="mpi4py", cause="the ranks exchange pickled objects", fix="install the same version", is_error=False
    ),
    SharedFact(
        fact="GPUs",
        cause="the slowest GPU sets the pace, and every rank gets the same share of memory",
        fix="use hosts with the same GPUs, all of them visible",
    ),
    SharedFact(
        fact="GPU driver",
        cause="NVLink and NCCL are tested with one driver on all hosts",
        fix="install the same driver",
        is_error=False,
    ),
    SharedFact(
        fact="repository",
        cause="every rank reads its own copy of model.yaml and of the backend",
        fix="copy it again (rsync -a --delete), or put it on a shared file system",
    ),
    SharedFact(
        fact="checkpoint index",
        cause="every rank reads its own copy of the weights",
        fix="copy it again, or put it on a shared file system",
    ),
)


def compare(reports: Sequence[HostReport], expected: Expected) -> Iterator[Reported]:
    """Yield whether each host is a machine of its own, and one finding for each shared fact that any host knows.

    Fewer than two hosts give no finding.
    """
    if len(reports) < 2:
        return
    all_hosts = ", ".join(report.host for report in reports)
    if any(MACHINE in report.facts for report in reports):
        yield Reported(check="machines", title="machines", host=all_hosts, finding=_machines(reports), needs=_NEEDS)
    for shared in SHARED_FACTS:
        values = {report.host: report.facts.get(shared.fact, _UNKNOWN) for report in reports}
        if set(values.values()) == {_UNKNOWN}:
            continue
        title = f"{shared.fact}, on every host"
        name = shared.fact.lower().replace(" ", "-")
        finding = _compare_values(shared, values, expected)
        yield Reported(check=f"same-{name}", title=title, host=all_hosts, finding=finding, needs=_NEEDS)


def _machines(reports: Sequence[HostReport]) -> MachineFinding:
    names: dict[str, list[str]] = {}
    for report in reports:
        names.setdefault(report.facts.get(MACHINE, report.host), []).append(report.host)
    if same := [" and ".join(hosts) for hosts in names.values() if len(hosts) > 1]:
        cause = "each host gets ranks of its own, and those of two names of one machine want the same GPUs and ports"
        return error(f"{'; '.join(same)} are the same machine", cause, "name each machine once")
    return ok(f"{len(names)}, each by one name")


def _compare_values(shared: SharedFact, values: Mapping[str, str], expected: Expected) -> MachineFinding:
    if len(set(values.values())) == 1:
        return ok(next(iter(values.values())))
    hosts_of: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts_of.setdefault(value, []).append(host)
    result = "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in hosts_of.items())
    is_error = shared.is_error and (expected.uses_gpus or shared.fact in ("repository", "checkpoint index"))
    return (error if is_error else warning)(result, shared.cause, shared.fix)


def clock(report: HostReport, asked: float, answered: float) -> Reported:
    """Report by how much the host's clock differs from this machine's, at the least.

    :param asked: when this machine asked the host, by its own clock.
    :param answered: when it had the answer.
    """
    ahead, behind = report.ended - answered, asked - report.began
    skew = max(ahead, behind)
    if skew <= _MAX_CLOCK_SKEW_S:
        finding = ok("agrees with this machine's")
    else:
        result = f"at least {skew:.0f} s {'ahead of' if ahead > behind else 'behind'} this machine's"
        cause = "logs can't be compared, and Slurm and Kerberos may refuse tickets"
        finding = warning(result, cause, "let it follow a time server (chrony, systemd-timesyncd)")
    return Reported(check="clock", title="clock", host=report.host, finding=finding)
