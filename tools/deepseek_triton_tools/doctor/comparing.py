"""What has to be the same on every host, and what another one on each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deepseek_triton_tools.doctor.machine.capabilities import MPIRUN, SERVE
from deepseek_triton_tools.doctor.machine.examine import MACHINE, HostReport
from deepseek_triton_tools.doctor.machine.expected import Expected
from deepseek_triton_tools.doctor.machine.machine_finding import MachineFinding, Reported, error, ok, warning

_NEEDS = (SERVE, MPIRUN)
_MOST_SKEW_S = 2.0
"""An assumption: logs of several hosts can still be read side by side."""
_UNKNOWN = "none"


@dataclass(frozen=True, kw_only=True)
class Same:
    """A fact of HostReport.facts that all hosts share."""

    fact: str
    cause: str
    fix: str
    is_error: bool = True


SAME: Sequence[Same] = (
    Same(
        fact="TensorRT-LLM",
        cause="the ranks talk by the engine's own messages, which change between releases",
        fix="run the same container on every host",
    ),
    Same(fact="container", cause="the ranks are of one program", fix="run the same container on every host"),
    Same(
        fact="Python",
        cause="the ranks exchange pickled objects, which need the same minor version",
        fix="run the same container on every host",
        is_error=False,
    ),
    Same(
        fact="MPI",
        cause="mpirun and its daemons on the other hosts must be of one version",
        fix="run the same container on every host, or install the same Open MPI",
    ),
    Same(fact="mpi4py", cause="the ranks exchange pickled objects", fix="install the same version", is_error=False),
    Same(
        fact="GPUs",
        cause="the slowest GPU decides, and every rank is given the same memory",
        fix="use hosts with the same GPUs, all of them visible",
    ),
    Same(
        fact="GPU driver",
        cause="NVLink and NCCL are tested with one driver on all hosts",
        fix="install the same driver",
        is_error=False,
    ),
    Same(
        fact="repository",
        cause="every rank reads its own copy of model.yaml and of the backend",
        fix="copy it anew (rsync -a --delete), or share it by the network",
    ),
    Same(
        fact="checkpoint index",
        cause="every rank reads its own copy of the weights",
        fix="copy it anew, or share it by the network",
    ),
)


def compare(reports: Sequence[HostReport], expected: Expected) -> Iterator[Reported]:
    """Whether each is a machine of its own, and a finding for each fact that any host has; nothing for fewer than two
    hosts."""
    if len(reports) < 2:
        return
    everywhere = ", ".join(report.host for report in reports)
    if any(MACHINE in report.facts for report in reports):
        yield Reported(check="machines", title="machines", host=everywhere, finding=_machines(reports), needs=_NEEDS)
    for same in SAME:
        values = {report.host: report.facts.get(same.fact, _UNKNOWN) for report in reports}
        if set(values.values()) == {_UNKNOWN}:
            continue
        title = f"{same.fact}, on every host"
        name = same.fact.lower().replace(" ", "-")
        finding = _finding(same, values, expected)
        yield Reported(check=f"same-{name}", title=title, host=everywhere, finding=finding, needs=_NEEDS)


def _machines(reports: Sequence[HostReport]) -> MachineFinding:
    names: dict[str, list[str]] = {}
    for report in reports:
        names.setdefault(report.facts.get(MACHINE, report.host), []).append(report.host)
    if same := [" and ".join(hosts) for hosts in names.values() if len(hosts) > 1]:
        cause = "each host is given ranks of its own, and two on one machine want the same GPUs and ports"
        return error(f"{'; '.join(same)} are one", cause, "name each machine once")
    return ok(f"{len(names)}, each by one name")


def _finding(same: Same, values: Mapping[str, str], expected: Expected) -> MachineFinding:
    if len(set(values.values())) == 1:
        return ok(next(iter(values.values())))
    hosts_of: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts_of.setdefault(value, []).append(host)
    said = "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in hosts_of.items())
    is_error = same.is_error and (expected.is_tensorrt_llm or same.fact in ("repository", "checkpoint index"))
    return (error if is_error else warning)(said, same.cause, same.fix)


def clock(report: HostReport, asked: float, answered: float) -> Reported:
    """How far its clock is from this machine's at the least, by when it was asked and when it had answered."""
    ahead, behind = report.ended - answered, asked - report.began
    skew = max(ahead, behind)
    if skew <= _MOST_SKEW_S:
        finding = ok("agrees with this machine's")
    else:
        finding = warning(
            f"at least {skew:.0f} s {'ahead of' if ahead > behind else 'behind'} this machine's",
            "logs can't be compared, and Slurm's and Kerberos's tickets may be refused",
            "let it follow a time server (chrony, systemd-timesyncd)",
        )
    return Reported(check="clock", title="clock", host=report.host, finding=finding)
