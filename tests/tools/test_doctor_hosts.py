"""Several hosts are compared, and those that can't be reached get a finding with a fix. test_doctor_command.py has a
made-up ssh, tests/live/test_doctor_exchange.py a real one."""

from deepseek_triton_tools.doctor.comparing import clock, compare
from deepseek_triton_tools.doctor.hosts import (
    examine_by_command,
    is_here,
    parse_host_file,
)
from deepseek_triton_tools.doctor.machine.examine import HostReport
from deepseek_triton_tools.doctor.machine.expected import Expected
from support.faked_machine import FakedMachine

R1 = Expected(engine="tensorrt_llm", repository="/r1")
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
        assert found.finding.blocks
    result = examine_by_command(["sh", "-c", "cat >/dev/null; echo 'deepseek-triton diagnosis {}'"], R1, host="b")
    assert "its report can't be read" in result.findings[0].finding.result
