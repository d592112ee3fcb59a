"""`doctor --tune`: each setting on a made-up machine, as advised, otherwise and unknown; and on the real machine."""

import errno
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.doctor.examine import examine, report_from_json
from deepseek_triton_tools.doctor.findings import Expected
from deepseek_triton_tools.doctor.hosts import BOOTSTRAP, examine_by_command
from deepseek_triton_tools.doctor.machine import Done, HostProcess, Machine
from deepseek_triton_tools.doctor.tuning import ADVICE, numbers_in, ranges, read_settings
from support.faked_machine import GOOD_RUNS, PYTHON, FakedMachine
from support.nvidia_smi_xml import HEAD, smi_xml

ROOT = Path(__file__).parents[2]
TUNE = Expected(tune=True)
R1 = replace(TUNE, engine="tensorrt_llm", release="1.2.1")
CARD = "/sys/class/infiniband/mlx5_0/device"
CPU = "/sys/devices/system/cpu"
PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
GOVERNOR = "cpufreq/scaling_governor"
GOOD_FILES: Mapping[str, str | OSError] = {
    **{f"/sys/bus/pci/devices/0000:{bus}:00.0/numa_node": f"{node}\n" for node, bus in enumerate(("1b", "1c"))},
    "/sys/bus/pci/devices/0000:1b:00.0/local_cpulist": "0-1\n",
    "/sys/bus/pci/devices/0000:1c:00.0/local_cpulist": "2-3\n",
    "/proc/self/status": "Name:\tpython3\nCpus_allowed:\tf\nCpus_allowed_list:\t0-3\n",
    "/proc/sys/kernel/numa_balancing": "0\n",
    "/sys/devices/system/node/node0/cpulist": "0-1\n",
    "/sys/devices/system/node/node1/cpulist": "2-3\n",
    "/sys/devices/system/node/online": "0-1\n",
    f"{CARD}/local_cpulist": "0-1\n",
    f"{CARD}/msi_irqs/64": "msix\n",
    f"{CARD}/msi_irqs/65": "msix\n",
    "/proc/irq/64/smp_affinity_list": "0\n",
    "/proc/irq/65/smp_affinity_list": "0-1\n",
    PAGES: "always [madvise] never\n",
    "/proc/meminfo": "MemTotal: 1000 kB\nHugePages_Total:       0\nHugepagesize:       2048 kB\n",
    f"{CPU}/cpu0/{GOVERNOR}": "performance\n",
    f"{CPU}/cpu1/{GOVERNOR}": "performance\n",
    f"{CPU}/online": "0-3\n",
}
SLIDER = "|   {}     |   vboost   |   4   |   {}   |\n"
"""Row of `nvidia-smi boost-slider -l`: GPU, highest value, present value."""


def smi(xml, *, vboost="44"):
    """Programs' answers; `vboost` has the present value of each GPU."""
    rows = "".join(SLIDER.format(number, value) for number, value in enumerate(vboost))
    answers = {"nvidia-smi -q -x": Done(code=0, out=xml), "nvidia-smi boost-slider -l": Done(code=0, out=rows)}
    return {**GOOD_RUNS, **answers}


def machine(*, files=None, **given):
    """A machine where all is as advised, with changed files; None removes one."""
    changed = {**GOOD_FILES, **(files or {})}
    there = {path: content for path, content in changed.items() if content is not None}
    return FakedMachine(**{"runs": smi(smi_xml()), "files": there, **given})


def settings(faked, expected=R1):
    return {setting.id: setting for setting in read_settings(faked, expected)}


def test_all_is_as_advised():
    found = settings(machine())
    assert {id: setting.state for id, setting in found.items() if setting.state != "as advised"} == {}
    assert not any(setting.commands for setting in found.values())
    assert all(setting.reason and setting.source for setting in found.values())
    assert found["clocks"].found == "SM 345 MHz of 1980 MHz, memory 3201 MHz of 3201 MHz"
    assert found["power"].found == "700 W of 700 W"
    assert found["gpu-numa"].found.startswith("node 0, CPUs 0-1 (GPU 0), node 1, CPUs 2-3 (GPU 1); this process may")


AT_REST = "SM 345 MHz of 1980 MHz, memory 3201 MHz of 3201 MHz"
EVENT = "clocks_event_reasons__clocks_event_reason_"
THROTTLE = "clocks_throttle_reasons__clocks_throttle_reason_applications_clocks_setting"
BY_APPLICATIONS = {f"{EVENT}applications_clocks_setting": None, THROTTLE: "Active", "only": 0}
OLD_LIMITS = {"gpu_power_readings__current_power_limit": None, "gpu_power_readings__max_power_limit": None}
OLD_LIMITS |= {"power_readings__enforced_power_limit": "350.00 W", "power_readings__max_power_limit": "400.00 W"}
HELD_DOWN = f"{AT_REST}, held down by applications clocks (GPU 0), {AT_REST} (GPU 1)"
OF_GPUS = [  # the setting, what nvidia-smi says, what is found, and the commands: without any it is as advised
    ("persistence", {"persistence_mode": "Disabled"}, "Disabled", ["-pm 1"]),
    ("persistence", {"persistence_mode": "Disabled", "only": 1}, "Enabled (GPU 0), Disabled (GPU 1)", ["-i 1 -pm 1"]),
    ("clocks", {f"{EVENT}hw_thermal_slowdown": "Active"}, f"{AT_REST}, held down by heat (hardware)", ["-rgc", "-rac"]),
    ("clocks", {THROTTLE: "Active"}, AT_REST, []),  # the newer name says that it is not active
    ("clocks", BY_APPLICATIONS, HELD_DOWN, ["-i 0 -rgc", "-i 0 -rac"]),
    ("power", {"gpu_power_readings__current_power_limit": "500.00 W"}, "500 W of 700 W", ["-pl 700"]),
    ("power", OLD_LIMITS, "350 W of 400 W", ["-pl 400"]),
    ("ecc", {"ecc_mode__current_ecc": "Disabled"}, "Disabled", ["-e 1", "-r"]),
    ("mig", {"mig_mode__current_mig": "Enabled"}, "Enabled", ["-mig 0"]),
    ("compute-mode", {"compute_mode": "Exclusive_Process"}, "Exclusive_Process", ["-c 0"]),
]


def test_the_settings_of_the_gpus():
    for id, changes, found, commands in OF_GPUS:
        setting = settings(machine(runs=smi(smi_xml(**changes))))[id]
        assert (setting.found, list(setting.commands)) == (found, [f"sudo nvidia-smi {rest}" for rest in commands])
        assert setting.state == ("differs" if commands else "as advised")


def test_the_boost_slider():
    cases = [
        ("00", "0 of 4", "boost-slider --vboost 4"),
        ("41", "4 of 4 (GPU 0), 1 of 4 (GPU 1)", "boost-slider -i 1 --vboost 4"),
    ]
    for vboost, found, command in cases:
        setting = settings(machine(runs=smi(smi_xml(), vboost=vboost)))["boost"]
        assert (setting.found, setting.advised, setting.commands) == (found, "4", (f"sudo nvidia-smi {command}",))
    runs = {**smi(smi_xml()), "nvidia-smi boost-slider -l": Done(code=2, out="\nInvalid Argument\n")}
    setting = settings(machine(runs=runs))["boost"]
    assert (setting.state, setting.commands) == ("unknown", ())
    assert setting.found.endswith("names no slider vboost: Invalid Argument")


def test_what_the_driver_does_not_tell_is_unknown():
    names = ("persistence_mode", "ecc_mode__current_ecc", "gpu_power_readings__max_power_limit", "clocks__sm_clock")
    for value in ("N/A", "[N/A]", "Requested functionality has been deprecated", None):
        found = settings(machine(runs=smi(smi_xml(**dict.fromkeys(names, value)))))
        assert {found[id].state for id in ("persistence", "ecc", "power")} == {"unknown"}
        assert found["clocks"].found == "SM ? of 1980 MHz, memory 3201 MHz of 3201 MHz"


def test_without_gpus_they_are_unknown_and_the_rest_is_read():
    cases = [
        (Done(code=127), "no nvidia-smi"),
        (Done(code=9, out="No devices were found\n"), "nvidia-smi -q -x: No devices were found"),
        (Done(code=None), "nvidia-smi -q -x: failed"),
        (Done(code=0, out="<nvidia_smi_log><gpu>"), "nvidia-smi -q -x: no element found"),
        (Done(code=0, out=f"{HEAD}<nvidia_smi_log/>"), "nvidia-smi names no GPU"),
    ]
    of_gpus = ["persistence", "clocks", "boost", "power", "ecc", "mig", "compute-mode", "gpu-numa"]
    for done, said in cases:
        found = settings(machine(runs={**GOOD_RUNS, "nvidia-smi -q -x": done}))
        assert [id for id, setting in found.items() if setting.state == "unknown"] == of_gpus
        assert all(found[id].found.startswith(said) for id in of_gpus), said


def test_a_recorded_h200():
    """The answers of driver 580.159.04 on an H200 in a virtual machine; serial number and UUID are taken out."""
    samples = Path(__file__).parent / "samples"
    files = {"-q -x": "nvidia_smi_h200.xml", "boost-slider -l": "boost_slider_h200.txt"}
    runs = {f"nvidia-smi {what}": Done(code=0, out=(samples / name).read_text()) for what, name in files.items()}
    found = settings(machine(runs=GOOD_RUNS | runs))
    assert (found["boost"].found, found["boost"].state) == ("0 of 4", "differs")
    assert found["clocks"].found == AT_REST
    others = ("persistence", "clocks", "power", "ecc", "mig", "compute-mode")
    assert {found[name].state for name in others} == {"as advised"}


def test_pdl_by_release():
    hopper, blackwell = smi(smi_xml()), smi(smi_xml(product_architecture="Blackwell"))
    cases = [
        ("1.1.0", {}, blackwell, ["export TRTLLM_ENABLE_PDL=1"]),
        ("1.1.0", {"TRTLLM_ENABLE_PDL": "1"}, blackwell, []),
        ("1.1.0", {}, hopper, []),
        ("1.2.1", {}, blackwell, []),
        ("1.2.1", {"TRTLLM_ENABLE_PDL": "0"}, blackwell, ["unset TRTLLM_ENABLE_PDL"]),
        ("1.2.0rc6", {}, blackwell, []),
    ]
    for release, environ, runs, commands in cases:
        setting = settings(machine(runs=runs, environ=environ), replace(R1, release=release))["pdl"]
        assert (setting.state, list(setting.commands)) == ("differs" if commands else "as advised", commands), release
        assert release in setting.found
    assert settings(machine(python=replace(PYTHON, packages={})), TUNE)["pdl"].state == "unknown"
    assert settings(machine(), TUNE)["pdl"].found == "unset, TensorRT-LLM 1.2.1"
    assert settings(machine(), Expected(engine="vllm"))["pdl"].found == "vLLM does not read it"


MOVE_IRQS = f"for irq in {CARD}/msi_irqs/*; do echo 0-1 | sudo tee /proc/irq/${{irq##*/}}/smp_affinity_list; done"
STATUS, BALANCING, IRQ = "/proc/self/status", "/proc/sys/kernel/numa_balancing", "/proc/irq/65/smp_affinity_list"
HUGE = "HugePages_Total:    512\nHugepagesize:    2048 kB\n"
OF_HOST = [  # the setting, the file that says so, what is found, and the command
    ("gpu-numa", STATUS, "Cpus_allowed_list:\t0-1\n", "may use CPUs 0-1", "export TLLM_NUMA_AWARE_WORKER_AFFINITY=1"),
    ("numa-balancing", BALANCING, "1\n", "1, 2 NUMA nodes", "sudo sysctl -w kernel.numa_balancing=0"),
    ("rdma-irqs", IRQ, "0-3\n", "mlx5_0 (CPUs 0-1): 1 of 2 interrupts on other CPUs", MOVE_IRQS),
    ("transparent-hugepages", PAGES, "always madvise [never]\n", "never", f"echo madvise | sudo tee {PAGES}"),
    ("hugepages", "/proc/meminfo", HUGE, "512 pages, 1.0 GiB", "sudo sysctl -w vm.nr_hugepages=0"),
    (
        "governor",
        f"{CPU}/cpu1/{GOVERNOR}",
        "powersave\n",
        "performance (1 CPUs), powersave (1 CPUs)",
        "sudo cpupower frequency-set -g performance",
    ),
]


def test_the_settings_of_the_host():
    for id, path, text, found, command in OF_HOST:
        setting = settings(machine(files={path: text}))[id]
        assert (setting.state, setting.commands) == ("differs", (command,))
        assert found in setting.found
    one_node = {BALANCING: "1", "/sys/devices/system/node/node1/cpulist": None}
    assert settings(machine(files=one_node))["numa-balancing"].state == "as advised"
    for value, state in {"0": "differs", "1": "as advised"}.items():
        setting = settings(machine(environ={"TLLM_NUMA_AWARE_WORKER_AFFINITY": value}))["gpu-numa"]
        assert setting.state == state
        assert setting.found.endswith(f"TLLM_NUMA_AWARE_WORKER_AFFINITY={value}")
    running = (HostProcess(pid=7, parent=1, name="irqbalance"),)
    placed = settings(machine(running=running))["rdma-irqs"]
    moved = settings(machine(running=running, files={IRQ: "3\n"}))["rdma-irqs"]
    assert (placed.state, placed.commands) == ("as advised", ())
    assert moved.commands[0] == "sudo systemctl disable --now irqbalance"
    assert moved.found.endswith("irqbalance runs")


def test_what_the_kernel_does_not_tell_is_unknown():
    numa = "/sys/bus/pci/devices/0000:1c:00.0/numa_node"
    denied = PermissionError(errno.EACCES, "Permission denied")
    cases = [
        ("gpu-numa", {numa: "-1\n"}, "does not tell the NUMA node"),
        ("gpu-numa", {numa: None}, "0000:1c:00.0/numa_node: No such file"),
        ("numa-balancing", {BALANCING: None}, "numa_balancing: No such file"),
        ("rdma-irqs", {path: None for path in GOOD_FILES if path.startswith(CARD)}, "no RDMA card is seen"),
        ("rdma-irqs", {"/proc/irq/64/smp_affinity_list": denied}, "denied"),
        ("transparent-hugepages", {PAGES: None}, "No such file"),
        ("hugepages", {"/proc/meminfo": None}, "No such file"),
        ("governor", {path: None for path in GOOD_FILES if path.endswith(GOVERNOR)}, "does not set the CPUs' clocks"),
    ]
    for id, files, said in cases:
        setting = settings(machine(files=files))[id]
        assert (setting.state, setting.commands, said in setting.found) == ("unknown", (), True), said


@pytest.mark.slow
@given(st.sets(st.integers(0, 300)))
@example({0, 1, 2, 8})
@example(set())
def test_a_list_of_cpus_is_read_as_it_is_written(numbers):
    assert numbers_in(ranges([*numbers]) + "\n") == numbers
    assert ranges([0, 1, 2, 8]) == "0-2,8"


@pytest.mark.slow
def test_settings_travel_whole_from_a_python_with_nothing_installed():
    report = examine(machine(), R1, host="here")
    assert (report.findings, len(report.settings)) == ((), 14)
    assert report_from_json(json.dumps(asdict(report))) == report
    result = examine_by_command([sys.executable, "-I", "-S", "-c", BOOTSTRAP], TUNE, host="there")
    here = [setting.id for setting in read_settings(Machine(), TUNE)]
    assert [setting.id for setting in result.report.settings] == here


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    """An nvidia-smi that gives the answers of GPUs with a lowered power limit."""
    (tmp_path / "xml").write_text(smi_xml(gpu_power_readings__current_power_limit="500.00 W"))
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$1" = -q ] && exec cat "{tmp_path}/xml"\nexit 2\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def test_the_text_and_the_document(on_path, capsys):
    assert main(["doctor", "--tune"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("  differs     power limit: 500 W of 700 W")
    assert lines[at + 1].startswith("              advised: 700 W; at the limit the driver lowers the clocks (NVIDIA/")
    assert lines[at + 2] == "              sudo nvidia-smi -pl 700"
    assert "  as advised  MIG: Disabled" in lines
    assert main(["doctor", "--tune", "-v"]) == 0
    assert capsys.readouterr().out.count("advised: ") == 14
    code = main(["doctor", "--tune", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (code, document["exit_code"], document["ok"]) == (0, 0, True)
    assert document["schema"] == "deepseek-triton/tune/1"
    [host] = document["hosts"]
    power = next(setting for setting in host["settings"] if setting["id"] == "power")
    expected = {"id": "power", "title": "power limit", "state": "differs", "found": "500 W of 700 W"}
    expected |= {"advised": "700 W", "reason": "at the limit the driver lowers the clocks"}
    assert power == {**expected, "source": power["source"], "commands": ["sudo nvidia-smi -pl 700"]}


def test_a_host_that_gives_no_report(capsys):
    assert main(["doctor", "--tune", "--through", "false", "--json"]) == 1
    [host] = json.loads(capsys.readouterr().out)["hosts"]
    assert (host["settings"], len(host["problems"])) == ([], 1)
    assert main(["doctor", "--tune", "--through", "false"]) == 1
    assert "false ended with 1" in capsys.readouterr().out


def test_the_page_describes_every_setting():
    page = (ROOT / "docs/doctor.md").read_text()
    section = page.partition("## Settings for speed")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([a-z-]+)` \|", section, re.M) == [advice.id for advice in ADVICE]
