"""The settings of a machine that `doctor --tune` shows, as they are and as advised. Nothing is changed.

Those of the GPUs are told by `nvidia-smi -q -x` and `nvidia-smi boost-slider -l`, those around them by the kernel.
docs/doctor.md describes them.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias
from xml.etree import ElementTree

from deepseek_triton_tools.doctor.findings import VLLM, Expected
from deepseek_triton_tools.doctor.machine import NOT_FOUND, Machine
from deepseek_triton_tools.doctor.software import is_before

SettingState = Literal["differs", "unknown", "as advised"]
_UNTOLD = re.compile(r"\[?(N/A|Not Supported|Unknown Error|Requested functionality has been deprecated)\]?|")
_NOT_TOLD = "nvidia-smi does not tell it for these GPUs"
_BENCHMARKING = "NVIDIA/TensorRT-LLM docs: performance/perf-benchmarking, Before Benchmarking"
_MANUAL = "nvidia-smi(1)"
# Clock event reason -> words. A GPU at its power limit under load is none of them: the power limit has its own row.
_SLOWED_BY = {
    "hw_slowdown": "hardware slowdown",
    "hw_thermal_slowdown": "heat (hardware)",
    "hw_power_brake_slowdown": "power brake",
    "sw_thermal_slowdown": "heat (driver)",
    "applications_clocks_setting": "applications clocks",
}
_PDL = "TRTLLM_ENABLE_PDL"
_SLIDER = r"(\d+)\W+vboost\W+(\d+)\W+(\d+)"
_PCI = "/sys/bus/pci/devices"
_CARDS = "/sys/class/infiniband"
_CPUS = "/sys/devices/system/cpu"
_NODES = "/sys/devices/system/node"
_BALANCING = "/proc/sys/kernel/numa_balancing"
_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
_AFFINITY = "TLLM_NUMA_AWARE_WORKER_AFFINITY"


class UnreadableError(Exception):
    """A setting can't be read; the text says why."""


@dataclass(frozen=True, kw_only=True)
class MachineSetting:
    id: str
    title: str
    state: SettingState
    found: str
    """The present value, or why it is not known."""
    advised: str
    reason: str
    source: str
    commands: tuple[str, ...] = ()
    """Lines for a shell that set the advised value. There is none where a command can't do it."""


class SettingReading(NamedTuple):
    found: str
    is_as_advised: bool
    commands: Sequence[str] = ()
    advised: str = ""
    """The advised value where it depends on the machine."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    machine: Machine
    expected: Expected

    def gpus(self) -> Sequence[ElementTree.Element]:
        """Return the element `gpu` of `nvidia-smi -q -x` for each GPU.

        :raises UnreadableError: when there are none.
        """
        done = self.machine.run("nvidia-smi", "-q", "-x")
        if done.code == NOT_FOUND:
            raise UnreadableError("no nvidia-smi")
        if done.code != 0:
            raise UnreadableError(f"nvidia-smi -q -x: {[*(done.out + done.err).strip().splitlines(), 'failed'][0]}")
        try:
            gpus = ElementTree.fromstring(done.out).findall("gpu")
        except ElementTree.ParseError as error:
            raise UnreadableError(f"nvidia-smi -q -x: {error}") from error
        if not gpus:
            raise UnreadableError("nvidia-smi names no GPU")
        return gpus

    def command(self, options: str, numbers: Sequence[int], program: str = "nvidia-smi") -> str:
        """Return the command that sets something for the GPUs of these numbers."""
        selection = "" if len(numbers) == len(self.gpus()) else f"-i {','.join(map(str, numbers))} "
        return f"sudo {program} {selection}{options}"


Reader: TypeAlias = Callable[[Surroundings], SettingReading]
"""May raise UnreadableError and OSError."""


class Advice(NamedTuple):
    """The advised value of a setting, and how its present one is read."""

    id: str
    title: str
    advised: str
    read: Reader
    source: str
    reason: str


def read_settings(machine: Machine, expected: Expected) -> tuple[MachineSetting, ...]:
    """Return every setting, in the order in which they are shown."""
    surroundings = Surroundings(machine=machine, expected=expected)
    settings = []
    for advice in ADVICE:
        state: SettingState = "unknown"
        try:
            reading = advice.read(surroundings)
            state = "as advised" if reading.is_as_advised else "differs"
        except UnreadableError as why_not:
            reading = SettingReading(str(why_not), is_as_advised=False)
        except OSError as problem:
            where = f"{problem.filename}: " if problem.filename else ""
            reading = SettingReading(f"{where}{problem.strerror or problem}", is_as_advised=False)
        commands = tuple(reading.commands) if state == "differs" else ()
        advised = reading.advised or advice.advised
        told = {name: getattr(advice, name) for name in ("id", "title", "reason", "source")}
        settings.append(MachineSetting(state=state, found=reading.found, advised=advised, commands=commands, **told))
    return tuple(settings)


def _told(gpu: ElementTree.Element, *paths: str) -> str | None:
    """Return the text of the first path that says something. Drivers have moved some of them."""
    texts = ((gpu.findtext(path) or "").strip() for path in paths)
    return next((text for text in texts if not _UNTOLD.fullmatch(text)), None)


def ranges(numbers: Sequence[int]) -> str:
    """Return such as `0-3,8`, as the kernel writes CPU lists."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)


def numbers_in(text: str) -> frozenset[int]:
    """Parse a CPU list of the kernel, such as `0-3,8`."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def by_value(values: Sequence[str]) -> str:
    """Return the value that all have, or each value with its GPUs: `Enabled (GPU 0-6), Disabled (GPU 7)`."""
    different = dict.fromkeys(values)
    if len(different) == 1:
        return values[0]
    numbers = {value: [number for number, each in enumerate(values) if each == value] for value in different}
    return ", ".join(f"{value} (GPU {ranges(those)})" for value, those in numbers.items())


def _switch(path: str, advised: str, option: str, after: str = "") -> Reader:
    """Return how a setting of a few words is read.

    :param option: the words of nvidia-smi that set it.
    :param after: a further command that it needs.
    """

    def read(surroundings: Surroundings) -> SettingReading:
        values = [_told(gpu, path) for gpu in surroundings.gpus()]
        other = [number for number, value in enumerate(values) if value not in (advised, None)]
        if not any(values):
            raise UnreadableError(_NOT_TOLD)
        commands = [surroundings.command(option, other), *([after] if after else [])]
        return SettingReading(by_value([value or "not told" for value in values]), not other, commands)

    return read


def _raising(pairs: Iterable[tuple[int, float | None, float | None]], command: Callable[..., str]) -> list[str]:
    """Return the commands that give each GPU its highest value.

    :param pairs: number of the GPU, its present and its highest value.
    :param command: called with the highest value and the numbers of the GPUs that have less.
    """
    lower: dict[float, list[int]] = {}
    for number, now, most in pairs:
        if now is not None and most is not None and now < most:
            lower.setdefault(most, []).append(number)
    return [command(most, numbers) for most, numbers in lower.items()]


def read_power(surroundings: Surroundings) -> SettingReading:
    def watts(gpu: ElementTree.Element, *paths: str) -> float | None:
        number = re.match(r"[\d.]+", _told(gpu, *paths) or "")
        return (float(number[0]) or None) if number else None

    limits = [
        (
            number,
            watts(gpu, "gpu_power_readings/current_power_limit", "power_readings/enforced_power_limit"),
            watts(gpu, "gpu_power_readings/max_power_limit", "power_readings/max_power_limit"),
        )
        for number, gpu in enumerate(surroundings.gpus())
    ]
    if not any(now and most for _, now, most in limits):
        raise UnreadableError(_NOT_TOLD)
    commands = _raising(limits, lambda most, numbers: surroundings.command(f"-pl {most:g}", numbers))
    found = by_value([f"{now:g} W of {most:g} W" if now and most else "not told" for _, now, most in limits])
    highest = by_value([f"{most:g} W" if most else "not told" for _, _, most in limits])
    return SettingReading(found, not commands, commands, highest)


def read_boost(surroundings: Surroundings) -> SettingReading:
    surroundings.gpus()
    done = surroundings.machine.run("nvidia-smi", "boost-slider", "-l")
    # Each row of its table has GPU, the word vboost, the highest and the present value.
    rows = [(int(number), int(now), int(most)) for number, most, now in re.findall(_SLIDER, done.out)]
    if not rows:
        lines = [line.strip() for line in (done.out + done.err).splitlines() if line.strip()]
        words = f": {lines[0][:120]}" if lines else ""
        raise UnreadableError(f"nvidia-smi boost-slider -l names no slider vboost{words}")
    commands = _raising(
        rows, lambda most, numbers: surroundings.command(f"--vboost {most}", numbers, "nvidia-smi boost-slider")
    )
    found = by_value([f"{now} of {most}" for _, now, most in rows])
    return SettingReading(found, not commands, commands, by_value([str(most) for _, _, most in rows]))


def read_clocks(surroundings: Surroundings) -> SettingReading:
    found, held = [], []
    for number, gpu in enumerate(surroundings.gpus()):
        words = ", ".join(
            f"{name} {_told(gpu, f'clocks/{clock}') or '?'} of {_told(gpu, f'max_clocks/{clock}') or '?'}"
            for name, clock in (("SM", "sm_clock"), ("memory", "mem_clock"))
        )
        paths = "clocks_event_reasons/clocks_event_reason_{}", "clocks_throttle_reasons/clocks_throttle_reason_{}"
        slowed = [
            text
            for reason, text in _SLOWED_BY.items()
            if _told(gpu, *(path.format(reason) for path in paths)) == "Active"
        ]
        found.append(words + (f", held down by {', '.join(slowed)}" if slowed else ""))
        held += [number] if slowed else []
    commands = [surroundings.command(option, held) for option in ("-rgc", "-rac")]
    return SettingReading(by_value(found), not held, commands)


def read_pdl(surroundings: Surroundings) -> SettingReading:
    expected, machine = surroundings.expected, surroundings.machine
    if expected.engine == VLLM:
        raise UnreadableError("vLLM does not read it")
    if (release := expected.release or machine.python.packages.get("tensorrt_llm")) is None:
        raise UnreadableError("the release of TensorRT-LLM is not known: name a repository, or run it in the container")
    value = machine.environ.get(_PDL)
    found = f"{'unset' if value is None else value}, TensorRT-LLM {release}"
    if not is_before(release, "1.2"):
        return SettingReading(found, value in (None, "1"), [f"unset {_PDL}"], "unset or 1")
    if not any(_told(gpu, "product_architecture") == "Blackwell" for gpu in surroundings.gpus()):
        return SettingReading(found, True, advised="anything: no figure is published for these GPUs")
    return SettingReading(found, value == "1", [f"export {_PDL}=1"], "1")


def read_gpu_nodes(surroundings: Surroundings) -> SettingReading:
    machine = surroundings.machine
    # sysfs calls the device 0000:1b:00.0 that is 00000000:1B:00.0 for nvidia-smi.
    addresses = [gpu.get("id", "").lower().partition(":") for gpu in surroundings.gpus()]
    folders = [f"{_PCI}/{domain[-4:]}:{rest}" for domain, _, rest in addresses]
    nodes = [machine.read(f"{folder}/numa_node").strip() for folder in folders]
    if "-1" in nodes:  # ABI/testing/sysfs-bus-pci: the firmware names no node
        raise UnreadableError("the firmware (or the virtual machine) does not tell the NUMA node of a GPU")
    cpus = [machine.read(f"{folder}/local_cpulist").strip() for folder in folders]
    status = machine.read("/proc/self/status").splitlines()
    allowed = next(line.split()[1] for line in status if line.startswith("Cpus_allowed_list:"))
    kept_away = {cpu for text in cpus for cpu in numbers_in(text)} - numbers_in(allowed)
    switch = machine.environ.get(_AFFINITY)
    found = by_value([f"node {node}, CPUs {text}" for node, text in zip(nodes, cpus, strict=True)])
    found += f"; this process may use CPUs {allowed}" + (f"; {_AFFINITY}={switch}" if switch is not None else "")
    is_bound = switch == "1" or (switch is None and not kept_away)
    return SettingReading(found, is_bound, [f"export {_AFFINITY}=1"])


def read_numa_balancing(surroundings: Surroundings) -> SettingReading:
    machine = surroundings.machine
    value = machine.read(_BALANCING).strip()
    nodes = [name for name in machine.list_folder(_NODES) if name.removeprefix("node").isdecimal()]
    found = f"{value}, {len(nodes)} NUMA node{'' if len(nodes) == 1 else 's'}"
    return SettingReading(found, value == "0" or len(nodes) < 2, ["sudo sysctl -w kernel.numa_balancing=0"])


def read_interrupts(surroundings: Surroundings) -> SettingReading:
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
    return SettingReading("; ".join(found), is_as_advised, commands)


def read_transparent_pages(surroundings: Surroundings) -> SettingReading:
    text = surroundings.machine.read(_PAGES).strip()
    value = text.partition("[")[2].partition("]")[0] or text
    return SettingReading(value, value in ("madvise", "always"), [f"echo madvise | sudo tee {_PAGES}"])


def read_reserved_pages(surroundings: Surroundings) -> SettingReading:
    lines = (line.split() for line in surroundings.machine.read("/proc/meminfo").splitlines())
    values = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
    count, kib = values.get("HugePages_Total", 0), values.get("Hugepagesize", 0)
    found = f"{count} pages, {count * kib / 2**20:.1f} GiB" if count else "none"
    return SettingReading(found, not count, ["sudo sysctl -w vm.nr_hugepages=0"])


def read_governor(surroundings: Surroundings) -> SettingReading:
    machine = surroundings.machine
    names = [name for name in machine.list_folder(_CPUS) if name.removeprefix("cpu").isdecimal()]
    paths = [f"{_CPUS}/{name}/cpufreq/scaling_governor" for name in names]
    if not (counts := Counter(machine.read(path).strip() for path in paths if machine.exists(path))):
        raise UnreadableError(
            "this kernel does not set the CPUs' clocks: the firmware or a virtual machine's host does"
        )
    found = ", ".join(f"{value} ({count} CPUs)" if len(counts) > 1 else value for value, count in counts.items())
    return SettingReading(found, set(counts) == {"performance"}, ["sudo cpupower frequency-set -g performance"])


ADVICE: Sequence[Advice] = (
    Advice(
        "persistence",
        "persistence mode",
        "Enabled",
        _switch("persistence_mode", "Enabled", "-pm 1"),
        _BENCHMARKING,
        "the driver unloads when the last program ends: the next start waits for it, and clock, power and "
        "boost settings are lost",
    ),
    Advice(
        "clocks",
        "clocks",
        "not held down",
        read_clocks,
        _BENCHMARKING,
        "an idle GPU lowers its clocks by itself, but a clock that was locked, or heat, holds them down under "
        "load. Locking them at their highest value may bring on the slowdown by heat",
    ),
    Advice(
        "boost",
        "boost slider vboost",
        "the highest value",
        read_boost,
        "NVIDIA/TensorRT-LLM docs: Best_perf_practice_on_DeepSeek-R1, Tune GPU clocks; perf-benchmarking",
        "it gives more of the power to the compute units; for one user on B200 TensorRT-LLM's guide names "
        "about 8 tokens/s more. It is optional",
    ),
    Advice(
        "power",
        "power limit",
        "the highest value",
        read_power,
        _BENCHMARKING,
        "at the limit the driver lowers the clocks",
    ),
    Advice(
        "ecc",
        "ECC",
        "Enabled",
        _switch("ecc_mode/current_ecc", "Enabled", "-e 1", "sudo nvidia-smi -r"),
        _MANUAL,
        "without it a flipped bit of a weight goes unnoticed. The change needs a reset of the GPU",
    ),
    Advice(
        "mig",
        "MIG",
        "Disabled",
        _switch("mig_mode/current_mig", "Disabled", "-mig 0"),
        _MANUAL,
        "a MIG slice has only a part of the GPU's memory, and no NVLink to other GPUs",
    ),
    Advice(
        "compute-mode",
        "compute mode",
        "Default",
        _switch("compute_mode", "Default", "-c 0"),
        _MANUAL,
        "in the exclusive mode one process alone may use a GPU, so that a second server, a profiler or a "
        "rehearsal fails beside the engine; Prohibited lets none",
    ),
    Advice(
        *("pdl", _PDL, "1 before TensorRT-LLM 1.2 on Blackwell"),
        read_pdl,
        "NVIDIA/TensorRT-LLM release notes 1.2; Best_perf_practice_on_DeepSeek-R1, B200 min-latency",
        "a kernel starts before the previous one has ended. TensorRT-LLM turns it on by itself from 1.2; the "
        "start.sh of a generated repository sets it where it is needed",
    ),
    Advice(
        "gpu-numa",
        "NUMA nodes of the GPUs",
        "every rank may use the CPUs of its GPU's node",
        read_gpu_nodes,
        "NVIDIA/TensorRT-LLM docs: deployment-guide/configuring-cpu-affinity; pull request 9549",
        "TensorRT-LLM binds each rank to the CPUs beside its GPU by itself, unless the process is kept to other "
        f"CPUs (docker --cpuset-cpus, Slurm, mpirun --bind-to); {_AFFINITY}=1 makes it do so",
    ),
    Advice(
        "numa-balancing",
        "NUMA balancing",
        "0",
        read_numa_balancing,
        "Linux Documentation/admin-guide/sysctl/kernel.rst, numa_balancing",
        "the kernel unmaps pages to see who uses them; the ranks are bound to nodes already",
    ),
    Advice(
        "rdma-irqs",
        "interrupts of the RDMA cards",
        "on the CPUs of the card's node",
        read_interrupts,
        "NVIDIA MLNX_OFED user manual, Tuning for NUMA Architecture; Linux Documentation/core-api/irq/irq-affinity.rst",
        "an interrupt on another node adds a way through the link between the processors; irqbalance moves them again",
    ),
    Advice(
        "transparent-hugepages",
        "transparent huge pages",
        "madvise or always",
        read_transparent_pages,
        "Linux Documentation/admin-guide/mm/transhuge.rst; numpy docs, Global state",
        "with never, programs that ask for huge pages (numpy does, for large arrays) get small ones",
    ),
    Advice(
        "hugepages",
        "reserved huge pages",
        "none, unless another program needs them",
        read_reserved_pages,
        "Linux Documentation/admin-guide/mm/hugetlbpage.rst",
        "reserved pages are lost to the page cache, from which the ranks read the checkpoint",
    ),
    Advice(
        "governor",
        "CPU governor",
        "performance",
        read_governor,
        "Linux Documentation/admin-guide/pm/cpufreq.rst",
        "the host works in short bursts between the GPU's steps; other governors raise the clock only once they "
        "have seen a load",
    ),
)
