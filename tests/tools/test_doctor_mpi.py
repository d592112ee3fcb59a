"""The MPI exchange between hosts on a made-up machine. tests/live/test_doctor_exchange.py has real ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from deepseek_triton_tools.doctor.exchanging_rank import STEP_PREFIX
from deepseek_triton_tools.doctor.hosts import HostResult, Ssh
from deepseek_triton_tools.doctor.machine.examine import HostReport
from deepseek_triton_tools.doctor.machine.expected import Expected
from deepseek_triton_tools.doctor.machine.machine import Done
from deepseek_triton_tools.doctor.machine.machine_finding import MachineFinding
from deepseek_triton_tools.doctor.mpi_exchange import Mpirun, exchange_findings
from support.faked_machine import GOOD_RUNS, MPIRUN, FakedMachine

R1 = Expected(engine="tensorrt_llm", repository="/r1", interface="eth0")
SSH = Ssh(port=2233, args=("-i", "/key"))
STARTED, JOINED = {"step": "started"}, {"step": "joined", "rank": 0, "size": 2}
NO_DAEMON = Done(code=1, err="bash: line 1: orted: command not found\n")


def visits(*hosts: str, unreached: Sequence[str] = ()) -> list[HostResult]:
    report = HostReport(host="", findings=(), facts={}, began=0, ended=0)
    return [HostResult(host=host, report=None if host in unreached else report, findings=()) for host in hosts]


def wrote(code: int | None, **ranks: dict[str, object]) -> Done:
    """mpirun has passed on the last line of each rank, all on one line."""
    return Done(code=code, out="".join(STEP_PREFIX + json.dumps({"host": host, **ranks[host]}) for host in ranks))


def well(*hosts: str) -> Done:
    return wrote(0, **{host: exchanged() for host in hosts})


def exchanged(*missing: int) -> dict[str, object]:
    return {"step": "exchanged", "missing": [*missing]}


def machine(*done: tuple[Sequence[str], Done]) -> FakedMachine:
    """Hosts -> how mpirun over them ends."""
    runs = {" ".join(Mpirun(FakedMachine(), R1, SSH, "python3", 10).command(hosts)): end for hosts, end in done}
    return FakedMachine(runs={**GOOD_RUNS, **runs})


def found_on(
    faked: FakedMachine, hosts: Sequence[HostResult], expected: Expected = R1, ssh: Ssh = SSH
) -> MachineFinding | None:
    found = list(exchange_findings(hosts, faked, expected, ssh=ssh, python=None))
    assert all(each.host == ", ".join(host.host for host in hosts) for each in found)
    return found[0].finding if found else None


def test_the_command_is_that_of_a_launch() -> None:
    command = Mpirun(FakedMachine(), R1, SSH, "python3", 10).command(("a", "b"))

    words = " ".join(word for word in command if "\n" not in word)
    assert words == (
        "mpirun --allow-run-as-root --oversubscribe --bind-to none "
        "-mca plm_rsh_args -o BatchMode=yes -o ConnectTimeout=10 -p 2233 -i /key "
        "-mca btl_tcp_if_include eth0 -mca oob_tcp_if_include eth0 "
        "-n 1 -H a python3 -c a 10 : -n 1 -H b python3 -c b 10"
    )


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (visits("a"), R1),
        (visits("a", "b"), Expected(engine="vllm")),
        (visits("a", "b"), Expected(engine="simulated")),
    ],
)
def test_where_mpi_is_not_used(hosts: list[HostResult], expected: Expected) -> None:
    assert found_on(FakedMachine(), hosts, expected) is None


@pytest.mark.parametrize(
    ("faked", "unreached", "ssh", "said"),
    [
        (FakedMachine(), ["b"], SSH, "no report from b"),
        (FakedMachine(programs={}), [], SSH, "no mpirun on this machine"),
        (FakedMachine(runs={"mpirun --version": Done(code=0, out="Version: 4.2")}), [], SSH, "MPICH"),
        (FakedMachine(), [], Ssh(args=("-o", "ProxyCommand=ssh x")), "splits --ssh-args at blanks"),
    ],
)
def test_what_keeps_it_from_running(faked: FakedMachine, unreached: list[str], ssh: Ssh, said: str) -> None:
    found = found_on(faked, visits("a", "b", unreached=unreached), ssh=ssh)

    assert found
    assert (found.level, said in found.result) == ("skipped", True)


@pytest.mark.parametrize(
    ("done", "level", "result", "fix"),
    [
        (well("a", "b"), "ok", "2 hosts, 1 pair, 1 MiB both ways", ""),
        (wrote(1, a=exchanged(1), b=exchanged()), "error", "no message passes within 10 s: a and b", "--interface"),
        (wrote(142, a=STARTED, b=STARTED), "error", "MPI_Init does not end on a, b; mpirun ended with 142", "eth0"),
        (wrote(142, a=JOINED, b=STARTED), "error", "MPI_Init does not end on b", "eth0"),
        (wrote(None, a=JOINED, b=JOINED), "error", "gave nothing before its deadline", "eth0"),
        (NO_DAEMON, "error", "no rank started on a, b; mpirun ended with 1: bash: line 1: orted", "OPAL_PREFIX"),
        (Done(code=1, out=f'{STEP_PREFIX}{{"host": "a", "st'), "error", "no rank started on a, b", "which orted"),
        (
            wrote(1, a=STARTED, b={"step": "failed", "why": "libmpi.so.40: cannot open shared object file"}),
            "error",
            "MPI_Init does not end on a, b; libmpi.so.40: cannot open shared object file",
            "LD_LIBRARY_PATH",
        ),
    ],
)
def test_two_hosts(done: Done, level: str, result: str, fix: str) -> None:
    found = found_on(machine((("a", "b"), done)), visits("a", "b"))

    assert found
    assert found.level == level
    assert result in found.result
    assert fix in found.fix


def test_without_a_repository_a_fault_is_a_note() -> None:
    faked = FakedMachine(runs={"mpirun --version": Done(code=0, out=MPIRUN), "mpirun": NO_DAEMON})

    found = found_on(faked, visits("a", "b"), Expected())

    assert found
    assert (found.level, found.blocks) == ("note", True)


def test_the_pair_is_named_among_three() -> None:
    done = wrote(1, a=exchanged(), b=exchanged(2), c=exchanged(1))

    found = found_on(machine((("a", "b", "c"), done)), visits("a", "b", "c"))

    assert found
    assert found.result == "no message passes within 10 s: b and c"


@pytest.mark.parametrize(
    ("of_c", "said"),
    [(NO_DAEMON, "in pairs, these fail: a and c"), (well("a", "c"), "a works with each other host alone")],
)
def test_the_host_that_keeps_all_from_starting_is_named(of_c: Done, said: str) -> None:
    faked = machine((("a", "b", "c"), NO_DAEMON), (("a", "b"), well("a", "b")), (("a", "c"), of_c))

    found = found_on(faked, visits("a", "b", "c"))

    assert found
    assert said in found.result
