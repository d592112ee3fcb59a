"""Settings of the machine around the GPUs, as the kernel tells them: NUMA, interrupts, memory pages, CPU clocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from deepseek_triton_tools.doctor.machine.machine import Machine
from deepseek_triton_tools.doctor.machine.tuning.setting import (
    Advice,
    SettingReading,
    Surroundings,
    UnreadableError,
    by_value,
    numbers_in,
)

_PCI = "/sys/bus/pci/devices"
_CARDS = "/sys/class/infiniband"
_CPUS = "/sys/devices/system/cpu"
_NODES = "/sys/devices/system/node"
_BALANCING = "/proc/sys/kernel/numa_balancing"
_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
_AFFINITY = "TLLM_NUMA_AWARE_WORKER_AFFINITY"


def _gpu_nodes(surroundings: Surroundings) -> SettingReading:
    machine = surroundings.machine
    folders = [f"{_PCI}/{_sysfs_name(gpu.get('id', ''))}" for gpu in surroundings.need_gpus()]
    nodes = [machine.read(f"{folder}/numa_node").strip() for folder in folders]
    if "-1" in nodes:  # ABI/testing/sysfs-bus-pci: the firmware names no node
        raise UnreadableError("the firmware (or the virtual machine) does not tell the NUMA node of a GPU")
    cpus = [machine.read(f"{folder}/local_cpulist").strip() for folder in folders]
    allowed = _allowed(machine)
    kept_away = {cpu for text in cpus for cpu in numbers_in(text)} - numbers_in(allowed)
    switch = machine.environ.get(_AFFINITY)
    found = by_value([f"node {node}, CPUs {text}" for node, text in zip(nodes, cpus, strict=True)])
    found += f"; this process may use CPUs {allowed}" + (f"; {_AFFINITY}={switch}" if switch is not None else "")
    is_bound = switch == "1" or (switch is None and not kept_away)
    return SettingReading(found=found, is_as_advised=is_bound, commands=[f"export {_AFFINITY}=1"])


def _sysfs_name(bus_id: str) -> str:
    """Return 0000:1b:00.0 for nvidia-smi's 00000000:1B:00.0."""
    domain, _, rest = bus_id.partition(":")
    return f"{domain[-4:]}:{rest}".lower()


def _allowed(machine: Machine) -> str:
    lines = machine.read("/proc/self/status").splitlines()
    return next(line.split()[1] for line in lines if line.startswith("Cpus_allowed_list:"))


def _numa_balancing(surroundings: Surroundings) -> SettingReading:
    machine = surroundings.machine
    value = machine.read(_BALANCING).strip()
    nodes = [name for name in machine.list_folder(_NODES) if name.removeprefix("node").isdecimal()]
    found = f"{value}, {len(nodes)} NUMA node{'' if len(nodes) == 1 else 's'}"
    is_off = value == "0" or len(nodes) < 2
    return SettingReading(found=found, is_as_advised=is_off, commands=["sudo sysctl -w kernel.numa_balancing=0"])


def _interrupts(surroundings: Surroundings) -> SettingReading:
    machine = surroundings.machine
    cards = machine.list_folder(_CARDS) if machine.is_folder(_CARDS) else []
    if not cards:
        raise UnreadableError("no RDMA card is seen")
    found, commands = [], []
    for card in cards:
        folder = f"{_CARDS}/{card}/device"
        local = machine.read(f"{folder}/local_cpulist").strip()
        interrupts = machine.list_folder(f"{folder}/msi_irqs") if machine.is_folder(f"{folder}/msi_irqs") else []
        outside = [
            number
            for number in interrupts
            if not numbers_in(machine.read(f"/proc/irq/{number}/smp_affinity_list")) <= numbers_in(local)
        ]
        found.append(f"{card} (CPUs {local}): {len(outside)} of {len(interrupts)} interrupts on other CPUs")
        if outside:
            place = f"echo {local} | sudo tee /proc/irq/${{irq##*/}}/smp_affinity_list"
            commands.append(f"for irq in {folder}/msi_irqs/*; do {place}; done")
    is_as_advised = not commands
    if any(process.name == "irqbalance" for process in machine.processes()):
        found.append("irqbalance runs")
        commands.insert(0, "sudo systemctl disable --now irqbalance")
    return SettingReading(found="; ".join(found), is_as_advised=is_as_advised, commands=commands)


def _transparent_pages(surroundings: Surroundings) -> SettingReading:
    text = surroundings.machine.read(_PAGES).strip()
    value = text.partition("[")[2].partition("]")[0] or text
    commands = [f"echo madvise | sudo tee {_PAGES}"]
    return SettingReading(found=value, is_as_advised=value in ("madvise", "always"), commands=commands)


def _reserved_pages(surroundings: Surroundings) -> SettingReading:
    lines = (line.split() for line in surroundings.machine.read("/proc/meminfo").splitlines())
    values = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
    count, kib = values.get("HugePages_Total", 0), values.get("Hugepagesize", 0)
    found = f"{count} pages, {count * kib / 2**20:.1f} GiB" if count else "none"
    return SettingReading(found=found, is_as_advised=not count, commands=["sudo sysctl -w vm.nr_hugepages=0"])


def _governor(surroundings: Surroundings) -> SettingReading:
    machine = surroundings.machine
    paths = [
        f"{_CPUS}/{name}/cpufreq/scaling_governor"
        for name in machine.list_folder(_CPUS)
        if name.removeprefix("cpu").isdecimal()
    ]
    values = {path: machine.read(path).strip() for path in paths if machine.exists(path)}
    if not values:
        raise UnreadableError(
            "this kernel does not set the CPUs' clocks: the firmware or a virtual machine's host does"
        )
    counts = Counter(values.values())
    found = ", ".join(f"{value} ({count} CPUs)" if len(counts) > 1 else value for value, count in counts.items())
    commands = ["sudo cpupower frequency-set -g performance"]
    return SettingReading(found=found, is_as_advised=set(counts) == {"performance"}, commands=commands)


HOST_ADVICE: Sequence[Advice] = (
    Advice(
        id="gpu-numa",
        title="NUMA nodes of the GPUs",
        advised="every rank may use the CPUs of its GPU's node",
        reason="TensorRT-LLM binds each rank to the CPUs beside its GPU by itself, unless the process is kept to other "
        f"CPUs (docker --cpuset-cpus, Slurm, mpirun --bind-to); {_AFFINITY}=1 makes it do so",
        source="NVIDIA/TensorRT-LLM docs: deployment-guide/configuring-cpu-affinity; pull request 9549",
        read=_gpu_nodes,
    ),
    Advice(
        id="numa-balancing",
        title="NUMA balancing",
        advised="0",
        reason="the kernel unmaps pages to see who uses them; the ranks are bound to nodes already",
        source="Linux Documentation/admin-guide/sysctl/kernel.rst, numa_balancing",
        read=_numa_balancing,
    ),
    Advice(
        id="rdma-irqs",
        title="interrupts of the RDMA cards",
        advised="on the CPUs of the card's node",
        reason="an interrupt on another node adds a way through the link between the processors; irqbalance moves "
        "them again",
        source="NVIDIA MLNX_OFED user manual, Tuning for NUMA Architecture; Linux "
        "Documentation/core-api/irq/irq-affinity.rst",
        read=_interrupts,
    ),
    Advice(
        id="transparent-hugepages",
        title="transparent huge pages",
        advised="madvise or always",
        reason="with never, programs that ask for huge pages (numpy does, for large arrays) get small ones",
        source="Linux Documentation/admin-guide/mm/transhuge.rst; numpy docs, Global state",
        read=_transparent_pages,
    ),
    Advice(
        id="hugepages",
        title="reserved huge pages",
        advised="none, unless another program needs them",
        reason="reserved pages are lost to the page cache, from which the ranks read the checkpoint",
        source="Linux Documentation/admin-guide/mm/hugetlbpage.rst",
        read=_reserved_pages,
    ),
    Advice(
        id="governor",
        title="CPU governor",
        advised="performance",
        reason="the host works in short bursts between the GPU's steps; other governors raise the clock only once they "
        "have seen a load",
        source="Linux Documentation/admin-guide/pm/cpufreq.rst",
        read=_governor,
    ),
)
