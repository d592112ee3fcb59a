"""The MPI exchange between hosts on a made-up machine. tests/live/test_doctor_exchange.py has real ranks."""

import json

from deepseek_triton_tools.doctor.exchanging_rank import STEP_PREFIX
from deepseek_triton_tools.doctor.hosts import HostResult, Ssh
from deepseek_triton_tools.doctor.machine.examine import HostReport
from deepseek_triton_tools.doctor.machine.expected import Expected
from deepseek_triton_tools.doctor.machine.machine import Done
from deepseek_triton_tools.doctor.mpi_exchange import Mpirun, exchange_findings
from support.faked_machine import GOOD_RUNS, MPIRUN, FakedMachine

R1 = Expected(engine="tensorrt_llm", repository="/r1", interface="eth0")
SSH = Ssh(port=2233, args=("-i", "/key"))
STARTED, JOINED = {"step": "started"}, {"step": "joined", "rank": 0, "size": 2}
NO_DAEMON = Done(code=1, err="bash: line 1: orted: command not found\n")


def visits(*hosts, unreached=()):
    report = HostReport(host="", findings=(), facts={}, began=0, ended=0)
    return [HostResult(host=host, report=None if host in unreached else report, findings=()) for host in hosts]


def exchanged(*missing):
    return {"step": "exchanged", "missing": [*missing]}


def wrote(code, **ranks):
    """mpirun has passed on the last line of each rank, all on one line."""
    return Done(code=code, out="".join(STEP_PREFIX + json.dumps({"host": host, **ranks[host]}) for host in ranks))


def well(*hosts):
    return wrote(0, **{host: exchanged() for host in hosts})


def machine(*done):
    """Hosts -> how mpirun over them ends."""
    runs = {" ".join(Mpirun(FakedMachine(), R1, SSH, "python3", 10).command(hosts)): end for hosts, end in done}
    return FakedMachine(runs={**GOOD_RUNS, **runs})


def found_on(faked, hosts, expected=R1, ssh=SSH):
    found = list(exchange_findings(hosts, faked, expected, ssh=ssh, python=None))
    assert all(each.host == ", ".join(host.host for host in hosts) for each in found)
    return found[0].finding if found else None


def test_the_command_is_that_of_a_launch():
    command = Mpirun(FakedMachine(), R1, SSH, "python3", 10).command(("a", "b"))
    words = " ".join(word for word in command if "\n" not in word)
    assert words == (
        "mpirun --allow-run-as-root --oversubscribe --bind-to none "
        "-mca plm_rsh_args -o BatchMode=yes -o ConnectTimeout=10 -p 2233 -i /key "
        "-mca btl_tcp_if_include eth0 -mca oob_tcp_if_include eth0 "
        "-n 1 -H a python3 -c a 10 : -n 1 -H b python3 -c b 10"
    )


def test_where_mpi_is_not_used_or_does_not_run():
    both = visits("a", "b")
    assert found_on(FakedMachine(), visits("a")) is None
    for engine in ("vllm", "simulated"):
        assert found_on(FakedMachine(), both, Expected(engine=engine)) is None
    cases = [
        (FakedMachine(), visits("a", "b", unreached=["b"]), SSH, "no report from b"),
        (FakedMachine(programs={}), both, SSH, "no mpirun on this machine"),
        (FakedMachine(runs={"mpirun --version": Done(code=0, out="Version: 4.2")}), both, SSH, "MPICH"),
        (FakedMachine(), both, Ssh(args=("-o", "ProxyCommand=ssh x")), "splits --ssh-args at blanks"),
    ]
    for faked, hosts, ssh, said in cases:
        found = found_on(faked, hosts, ssh=ssh)
        assert (found.level, said in found.result) == ("skipped", True), said


def test_two_hosts():
    failed = {"step": "failed", "why": "libmpi.so.40: cannot open shared object file"}
    cut = Done(code=1, out=f'{STEP_PREFIX}{{"host": "a", "st')
    cases = [
        (well("a", "b"), "ok", "2 hosts, 1 pair, 1 MiB both ways", ""),
        (wrote(1, a=exchanged(1), b=exchanged()), "error", "no message passes within 10 s: a and b", "--interface"),
        (wrote(142, a=STARTED, b=STARTED), "error", "MPI_Init does not end on a, b; mpirun ended with 142", "eth0"),
        (wrote(142, a=JOINED, b=STARTED), "error", "MPI_Init does not end on b", "eth0"),
        (wrote(None, a=JOINED, b=JOINED), "error", "gave nothing before its deadline", "eth0"),
        (NO_DAEMON, "error", "no rank started on a, b; mpirun ended with 1: bash: line 1: orted", "OPAL_PREFIX"),
        (cut, "error", "no rank started on a, b", "which orted"),
        (wrote(1, a=STARTED, b=failed), "error", "does not end on a, b; libmpi.so.40: cannot open", "LD_LIBRARY_PATH"),
    ]
    for done, level, result, fix in cases:
        found = found_on(machine((("a", "b"), done)), visits("a", "b"))
        assert found.level == level, done
        assert result in found.result
        assert fix in found.fix
    faked = FakedMachine(runs={"mpirun --version": Done(code=0, out=MPIRUN), "mpirun": NO_DAEMON})
    found = found_on(faked, visits("a", "b"), Expected())  # without a repository a fault is a note
    assert (found.level, bool(found.blocks)) == ("note", True)


def test_who_is_named_among_three():
    done = wrote(1, a=exchanged(), b=exchanged(2), c=exchanged(1))
    found = found_on(machine((("a", "b", "c"), done)), visits("a", "b", "c"))
    assert found.result == "no message passes within 10 s: b and c"
    for of_c, said in [
        (NO_DAEMON, "in pairs, these fail: a and c"),
        (well("a", "c"), "a works with each other host alone"),
    ]:
        faked = machine((("a", "b", "c"), NO_DAEMON), (("a", "b"), well("a", "b")), (("a", "c"), of_c))
        assert said in found_on(faked, visits("a", "b", "c")).result
