"""An exchange of messages by MPI between each two hosts. This machine's mpirun starts the ranks, as for a launch."""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepseek_triton_tools.doctor import exchanging_rank, mpi
from deepseek_triton_tools.doctor.findings import (
    MPIRUN,
    SERVE,
    Expected,
    MachineFinding,
    Reported,
    error_or_note,
    ok,
    skipped,
)
from deepseek_triton_tools.doctor.hosts import HostResult, Ssh
from deepseek_triton_tools.doctor.machine import Done, Machine

# For the exchange itself. A rank ends after twice as long, mpirun after three times.
PATIENCE_S = 10
_PAIRS_AT_ONCE = 8
_NETWORK = (
    "name the network between the hosts (--interface eth0), and let TCP connections between them pass at all ports: "
    "Open MPI takes free ones"
)


@dataclass(frozen=True)
class RankExchange:
    hosts: Sequence[str]
    done: Done
    """How mpirun ended."""
    steps: Mapping[str, Mapping[str, Any]]
    """Host -> the last line of its rank; a host whose rank did not start has none."""

    def not_joined(self) -> list[str]:
        """Return the hosts whose rank has not come through MPI_Init."""
        return [host for host in self.hosts if self.steps.get(host, {}).get("step") not in ("joined", "exchanged")]

    def pairs(self) -> list[tuple[str, str]]:
        """Return each two hosts of which at least one misses the other's message, or its receipt."""
        missing = {
            tuple(sorted((number, other)))
            for number, host in enumerate(self.hosts)
            for other in self.steps.get(host, {}).get("missing", [])
        }
        return [(self.hosts[first], self.hosts[second]) for first, second in sorted(missing)]

    @property
    def worked(self) -> bool:
        return self.done.code == 0 and not self.not_joined() and not self.pairs()


@dataclass(frozen=True)
class Mpirun:
    machine: Machine
    interface: str | None
    ssh: Ssh
    python: str
    patience_s: float

    def command(self, hosts: Sequence[str]) -> list[str]:
        words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        words += ["-mca", "plm_rsh_args", " ".join(self.ssh.options())]
        if self.interface:
            for parameter in ("btl_tcp_if_include", "oob_tcp_if_include"):
                words += ["-mca", parameter, self.interface]
        program = [self.python, "-c", Path(exchanging_rank.__file__).read_text("utf-8")]
        for host in hosts:
            words += ["-n", "1", "-H", host, *program, host, str(self.patience_s), ":"]
        return words[:-1]

    def exchange(self, hosts: Sequence[str]) -> RankExchange:
        done = self.machine.run(*self.command(hosts), timeout_s=3 * self.patience_s, environ=mpi.AS_ROOT)
        return RankExchange(hosts, done, {step["host"]: step for step in steps_in(done.out)})


def steps_in(text: str) -> Iterator[dict[str, Any]]:
    """Parse what the ranks have written. mpirun may join lines of different ranks, and cut one off that was killed."""
    for part in text.split(exchanging_rank.STEP_PREFIX)[1:]:
        with suppress(ValueError):
            yield json.JSONDecoder().raw_decode(part)[0]


def exchange_findings(
    results: Sequence[HostResult], machine: Machine, expected: Expected, *, ssh: Ssh, python: str | None
) -> Iterator[Reported]:
    """Run the exchange where a launch would use MPI between hosts."""
    if len(results) < 2 or (expected.engine is not None and not expected.is_tensorrt_llm):
        return
    hosts = [result.host for result in results]
    unreached = [result.host for result in results if result.report is None]
    kind, _ = mpi.mpi_version(machine) or ("", "")
    if unreached:
        finding = skipped(f"no report from {', '.join(unreached)}")
    elif not kind:
        finding = skipped("there is no mpirun on this machine; run doctor in the container, which has it")
    elif kind != "Open MPI":
        finding = skipped(f"{kind} is not Open MPI, which start.sh needs")
    elif any(set(" '\"\\") & set(word) for word in ssh.args):
        finding = skipped("mpirun splits --ssh-args at blanks and knows no quotes; use ~/.ssh/config instead")
    else:
        mpirun = Mpirun(machine, expected.interface, ssh, python or "python3", PATIENCE_S)
        exchange = mpirun.exchange(hosts)
        num_pairs = len(hosts) * (len(hosts) - 1) // 2
        passed = f"{len(hosts)} hosts, {num_pairs} pair{'s' if num_pairs > 1 else ''}, 1 MiB both ways"
        finding = ok(passed) if exchange.worked else _fault(mpirun, exchange, expected)
    yield Reported(
        check="mpi-exchange",
        title="MPI between the hosts",
        host=", ".join(hosts),
        finding=finding,
        needs=(SERVE, MPIRUN),
    )


def _fault(mpirun: Mpirun, exchange: RankExchange, expected: Expected) -> MachineFinding:
    if pairs := exchange.pairs():
        result = f"no message passes within {mpirun.patience_s:g} s: {_listed(pairs)}"
        cause = "the ranks have found each other, but their data connection does not work"
        return error_or_note(expected, result, cause, _NETWORK)
    missing = [host for host in exchange.hosts if host not in exchange.steps]
    waiting = exchange.not_joined()
    where = f"MPI_Init does not end on {', '.join(waiting)}" if waiting else "the exchange does not end"
    cause, fix = "the ranks have started, but don't find each other", _NETWORK
    if missing:
        where = f"no rank started on {', '.join(missing)}"
        cause = "mpirun could not start its daemon there, or the daemon can't connect back to mpirun"
        fix = f"check that mpirun and orted of the same version are on PATH there (ssh HOST which orted); {_NETWORK}"
    why = next((step["why"] for step in exchange.steps.values() if step["step"] == "failed"), "")
    explained = mpi.explain(replace(exchange.done, err=f"{exchange.done.err}\n{why}"))
    if explained in mpi.KNOWN_FAILURES.values():
        cause, fix = explained
    result = f"{where}; {why or mpi.failed('mpirun', exchange.done)}"
    first, *others = exchange.hosts
    if len(others) > 1:  # mpirun starts nothing anywhere if one host of several fails
        with ThreadPoolExecutor(_PAIRS_AT_ONCE) as threads:
            worked = list(threads.map(lambda other: mpirun.exchange((first, other)).worked, others))
        broken = [(first, other) for other, works in zip(others, worked, strict=True) if not works]
        result += f"; in pairs, these fail: {_listed(broken)}" if broken else f"; {first} works with each other alone"
    return error_or_note(expected, result, cause, fix)


def _listed(pairs: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{first} and {second}" for first, second in pairs)
