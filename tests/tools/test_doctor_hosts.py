"""Several hosts are compared, and exchange messages by MPI; those that can't be reached get a finding with a fix.

test_doctor_command.py has a made-up ssh, tests/live/test_doctor_exchange.py a real one and real ranks.
"""

import json

from deepseek_triton_tools.doctor.examine import HostReport
from deepseek_triton_tools.doctor.exchanging_rank import STEP_PREFIX
from deepseek_triton_tools.doctor.findings import CAPABILITIES, Expected
from deepseek_triton_tools.doctor.hosts import (
    HostResult,
    Ssh,
    clock,
    compare,
    examine_by_command,
    is_here,
    parse_host_file,
)
from deepseek_triton_tools.doctor.machine import Done
from deepseek_triton_tools.doctor.mpi_exchange import Mpirun, exchange_findings
from support.faked_machine import GOOD_RUNS, MPIRUN, FakedMachine

R1 = Expected(engine="tensorrt_llm", repository="/r1", interface="eth0")
FACTS = {"Python": "3.12.3", "TensorRT-LLM": "1.2.1", "GPUs": "8 x NVIDIA H200, 143771 MiB", "repository": "aa"}


def report(host, **facts):
    changed = {**FACTS, **{name.replace("_", " "): value for name, value in facts.items()}}
    there = {name: value for name, value in changed.items() if value is not None}
    return HostReport(host=host, findings=(), facts=there, began=100.0, ended=101.0)


def test_hosts_that_are_alike_and_two_names_of_one():
    found = list(compare([report("a"), report("b")], R1))
    alike = ["same-tensorrt-llm", "same-python", "same-gpus", "same-repository"]
    assert [(each.check, each.finding.level) for each in found] == [(check, "ok") for check in alike]
    assert {each.host for each in found} == {"a, b"}
    assert list(compare([report("a")], R1)) == []  # one host is not compared
    reports = [report("a", machine="m"), report("b", machine="n"), report("a-ib", machine="m"), report("c")]
    [found] = [each for each in compare(reports, R1) if each.check == "machines"]
    assert (found.finding.level, found.finding.result) == ("error", "a and a-ib are the same machine")
    [found] = [each for each in compare(reports[:2] + reports[3:], R1) if each.check == "machines"]
    assert found.finding.level == "ok"


def test_hosts_that_differ():
    cases = [
        ({"repository": "bb"}, R1, "same-repository", "error", "aa on a, c; bb on b"),
        ({"repository": "bb"}, Expected(), "same-repository", "error", "aa on a, c; bb on b"),
        ({"GPUs": None}, R1, "same-gpus", "error", "8 x NVIDIA H200, 143771 MiB on a, c; none on b"),
        ({"GPUs": None}, Expected(), "same-gpus", "warning", "none on b"),
        ({"Python": "3.11.2"}, R1, "same-python", "warning", "3.12.3 on a, c; 3.11.2 on b"),
        ({"GPU_driver": "580.1"}, R1, "same-gpu-driver", "warning", "none on a, c; 580.1 on b"),
        ({"checkpoint_index": "cc"}, R1, "same-checkpoint-index", "error", "none on a, c; cc on b"),
    ]
    for other, expected, check, level, said in cases:
        reports = [report("a"), report("b", **other), report("c")]
        found = {each.check: each.finding for each in compare(reports, expected)}[check]
        assert (found.level, bool(found.fix)) == (level, True), check
        assert said in found.result


def test_clocks():
    cases = [
        (99.5, 101.5, "ok", "agrees"),
        (101.0, 103.0, "ok", "agrees"),  # a second behind at the least
        (160.0, 162.0, "warning", "at least 60 s behind"),
        (40.0, 42.0, "warning", "at least 59 s ahead"),
    ]
    for asked, answered, level, said in cases:
        found = clock(report("b"), asked, answered).finding
        assert (found.level, said in found.result) == (level, True), asked


def test_names_of_hosts():
    machine = FakedMachine(names_of_hosts={"this": ("10.0.0.1",), "loop": ("127.0.1.1",), "node2": ("10.0.0.2",)})
    here = {"node1": True, "localhost": True, "this": True, "loop": True, "node2": False, "nobody": False}
    assert {host: is_here(host, machine) for host in here} == here
    both = ["node1", "node2"]
    files = {"node1 slots=8\nnode2 slots=8\n": both, "# ours\nnode1:8\n\n  node2 # spare\nnode1\n": both, "": []}
    assert {text: parse_host_file(text) for text in files} == files


def test_a_host_that_is_not_reached():
    fixes = {
        "user@b: Permission denied (publickey,password).": "launch ssh-setup",
        "Host key verification failed.": "ssh-keyscan",
        "ssh: Could not resolve hostname b: Name or service not known": "/etc/hosts",
        "ssh: connect to host b port 22: Connection refused": "--ssh-port",
        "ssh: connect to host b port 22: Connection timed out": "check both",
        "ssh: connect to host b port 22: No route to host": "routes",
        "sh: 1: python3: not found": "--python",
        "something new": "run the command by hand",
    }
    for said, fix in fixes.items():
        result = examine_by_command(["sh", "-c", 'cat >/dev/null; echo "$1" >&2; exit 255', "sh", said], R1, host="b")
        [found] = result.findings
        assert result.report is None
        assert (found.host, found.finding.level, found.finding.result) == ("b", "error", said)
        assert fix in found.finding.fix, said
        assert (found.finding.blocks, {*found.needs}) == (True, {*CAPABILITIES})
    result = examine_by_command(["sh", "-c", "cat >/dev/null; echo 'deepseek-triton diagnosis {}'"], R1, host="b")
    assert "its report can't be read" in result.findings[0].finding.result


# The exchange by MPI

SSH = Ssh(port=2233, args=("-i", "/key"))
STARTED, JOINED = {"step": "started"}, {"step": "joined", "rank": 0, "size": 2}
NO_DAEMON = Done(code=1, err="bash: line 1: orted: command not found\n")


def visits(*hosts, unreached=()):
    reports = {host: None if host in unreached else report(host) for host in hosts}
    return [HostResult(host=host, report=report, findings=()) for host, report in reports.items()]


def exchanged(*missing):
    return {"step": "exchanged", "missing": [*missing]}


def wrote(code, **ranks):
    """mpirun has passed on the last line of each rank, all on one line."""
    return Done(code=code, out="".join(STEP_PREFIX + json.dumps({"host": host, **ranks[host]}) for host in ranks))


def well(*hosts):
    return wrote(0, **{host: exchanged() for host in hosts})


def machine(*done):
    """Hosts -> how mpirun over them ends."""
    runs = {" ".join(Mpirun(FakedMachine(), "eth0", SSH, "python3", 10).command(hosts)): end for hosts, end in done}
    return FakedMachine(runs={**GOOD_RUNS, **runs})


def found_on(faked, hosts, expected=R1, ssh=SSH):
    found = list(exchange_findings(hosts, faked, expected, ssh=ssh, python=None))
    assert all(each.host == ", ".join(host.host for host in hosts) for each in found)
    return found[0].finding if found else None


def test_the_command_is_that_of_a_launch():
    command = Mpirun(FakedMachine(), "eth0", SSH, "python3", 10).command(("a", "b"))
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
    for of_c, said in [(NO_DAEMON, "in pairs, these fail: a and c"), (well("a", "c"), "a works with each other alone")]:
        faked = machine((("a", "b", "c"), NO_DAEMON), (("a", "b"), well("a", "b")), (("a", "c"), of_c))
        assert said in found_on(faked, visits("a", "b", "c")).result
