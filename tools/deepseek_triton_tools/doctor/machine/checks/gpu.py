"""GPUs, by nvidia-smi: those there are, whether they are well, and who holds their memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from deepseek_triton_tools.doctor.machine.checks.software import container_tag
from deepseek_triton_tools.doctor.machine.expected import Expected
from deepseek_triton_tools.doctor.machine.machine import Machine
from deepseek_triton_tools.doctor.machine.machine_finding import MachineFinding, error, lack, note, ok, skipped, warning
from deepseek_triton_tools.doctor.machine.nvidia_smi import (
    NO_ANSWER,
    Holder,
    InstalledGpu,
    NoGpusError,
    complaint,
    gpus,
    health,
    holders,
    links,
)
from deepseek_triton_tools.doctor.machine.versions import is_before

_KINDS: Sequence[tuple[str, Callable[[int], bool], tuple[str, ...]]] = (
    (r"GB200", lambda mib: True, ("gb200", "gb200-nvl72")),
    (r"B200", lambda mib: True, ("b200",)),
    (r"\bH200(?! NVL)", lambda mib: True, ("h200",)),
    (r"H100 80GB HBM3|H100 SXM", lambda mib: True, ("h100",)),
    (r"H20\b", lambda mib: mib < 120_000, ("h20-96",)),
    (r"H20\b", lambda mib: mib >= 120_000, ("h20-141",)),
    (r"A100.*80GB", lambda mib: True, ("a100",)),
)
"""Name and MiB as nvidia-smi has them -> the catalogue's names. PCIe and NVL cards have other memory and no NVSwitch,
and the catalogue does not know them."""
_OLDEST_CAPABILITY = "9.0"
"""Hopper: TensorRT-LLM's examples/models/core/deepseek_v3/README.md, Ampere is not supported."""
_IDLE_MIB = 1024
"""What a driver, a display or a monitor may hold of a GPU; more than any of them (an H200 by itself: 9 MiB)."""
_MUCH = 0.1
"""Of a GPU's memory. An assumption: so much less is left of KV cache at the least, and a plan leaves no more over."""
_LOST = (
    "a GPU has fallen off the bus or has stopped (Xid 79 and others in dmesg)",
    "drain the machine; nvidia-smi -r resets a GPU that still answers, else restart the machine",
)
"""Cause and fix."""
_SAID: Mapping[str, tuple[str, str]] = {
    "version mismatch": (
        "the driver was replaced while it was loaded",
        "restart the machine, or unload and load nvidia.ko",
    ),
    "communicate with the NVIDIA driver": (
        "the driver is not loaded, or not built for this kernel",
        "modprobe nvidia, or install the driver again",
    ),
    "Failed to initialize NVML": (
        "a container loses its devices when systemd reloads the host's cgroups",
        "restart the container; docker with the cgroupfs driver, or --device for each /dev/nvidia*",
    ),
    "GPU is lost": _LOST,
    "requires reset": _LOST,
    "Unable to determine the device handle": _LOST,
    NO_ANSWER: (
        "the driver hangs, mostly over a GPU that has failed",
        "look for Xid and NVRM in dmesg; restart the machine",
    ),
}
"""Words of nvidia-smi's -> cause and fix."""
_INSTALL = "install NVIDIA's driver, or use a machine with GPUs"


def _seen(machine: Machine) -> Sequence[InstalledGpu] | MachineFinding:
    """The GPUs, or why there is nothing to look at."""
    try:
        return gpus(machine)
    except NoGpusError:
        return skipped("no GPU is seen")


def check_gpus(machine: Machine, expected: Expected) -> MachineFinding:
    try:
        found = gpus(machine)
    except NoGpusError as problem:
        result = "no nvidia-smi" if problem.is_missing else f"nvidia-smi: {problem}"
        return lack(expected, result, *_why_none(machine, problem))
    said = _counted(found)
    if lost := [gpu for gpu in found if gpu.lost]:
        return lack(expected, f"{_listed([gpu.index for gpu in lost])}: {lost[0].lost}", *_LOST)
    wanted = expected.gpus_per_node
    if expected.gpu and not all(expected.gpu in kinds(gpu) for gpu in found):
        fix = "use such a machine, or build again with --gpu for this one"
        return error(said, f"the repository was made for {expected.gpu}", fix)
    if expected.is_tensorrt_llm and wanted and len(found) < wanted:
        needed = f"the repository needs {wanted} on each machine"
        if words := complaint(machine):
            return error(f"{said}; nvidia-smi: {words}", f"{needed}; {_LOST[0]}", _LOST[1])
        fix = "make all of them visible (docker --gpus all, NVIDIA_VISIBLE_DEVICES), or build again with fewer --gpus"
        return error(said, needed, fix)
    old = [gpu for gpu in found if is_before(gpu.compute_capability, _OLDEST_CAPABILITY)]
    if old:
        cause = f"DeepSeek on TensorRT-LLM needs compute capability {_OLDEST_CAPABILITY} (Hopper) or newer"
        return lack(expected, f"{said}, compute capability {old[0].compute_capability}", cause, "use Hopper or newer")
    return ok(f"{said}, compute capability {found[0].compute_capability}")


def kinds(gpu: InstalledGpu) -> tuple[str, ...]:
    """What the catalogue may call it."""
    known = (names for pattern, fits, names in _KINDS if re.search(pattern, gpu.name) and fits(gpu.memory_mib))
    return next(known, ())


def counted(machine: Machine) -> str | None:
    """`8 x NVIDIA H200, 143771 MiB`; None without any."""
    found = _seen(machine)
    return None if isinstance(found, MachineFinding) else _counted(found)


def driver(machine: Machine) -> str | None:
    found = _seen(machine)
    return None if isinstance(found, MachineFinding) else found[0].driver


def _counted(found: Sequence[InstalledGpu]) -> str:
    kinds_of = Counter((gpu.name, gpu.memory_mib) for gpu in found)
    return "; ".join(f"{count} x {name}, {mib} MiB" for (name, mib), count in kinds_of.items())


def _why_none(machine: Machine, problem: NoGpusError) -> tuple[str, str]:
    """Cause and fix."""
    for words, why in _SAID.items():
        if words in str(problem):
            return why
    if not is_on_the_bus(machine):
        return "for serving with TensorRT-LLM; no NVIDIA device is on the PCI bus either", _INSTALL
    if machine.exists("/.dockerenv"):
        return "the machine has some, this container was started without them", "docker run --gpus all"
    return "an NVIDIA device is on the PCI bus, without a driver that works", "install NVIDIA's driver"


def is_on_the_bus(machine: Machine) -> bool:
    """By sysfs: vendor 0x10de, class 0x03 (display)."""
    root = "/sys/bus/pci/devices"
    try:
        return any(
            machine.read(f"{root}/{name}/vendor").strip() == "0x10de"
            and machine.read(f"{root}/{name}/class").startswith("0x03")
            for name in machine.names(root)
        )
    except OSError:
        return False


def check_driver(machine: Machine, expected: Expected) -> MachineFinding:
    found = _seen(machine)
    if isinstance(found, MachineFinding):
        return found
    version = found[0].driver
    tag = container_tag(machine)
    needed = next((row.driver for row in expected.containers if row.tag == tag), expected.driver)
    if needed is None or not is_before(version, needed):
        return ok(version + (f", needed: {needed}" if needed else ""))
    return warning(
        version,
        f"the container is made for {needed}; with an older one only data-centre GPUs work, by the CUDA compatibility "
        "libraries that it carries, and not with every older driver (Triton's release notes, driver requirements)",
        f"install driver {needed.partition('.')[0]} or newer, or keep the compatibility libraries in LD_LIBRARY_PATH",
    )


def check_memory(machine: Machine, expected: Expected) -> MachineFinding:
    """Who holds it."""
    found = _seen(machine)
    if isinstance(found, MachineFinding):
        return found
    used = [gpu for gpu in found if gpu.used_mib > _IDLE_MIB]
    if not used:
        return ok("free")
    said = f"{sum(gpu.used_mib for gpu in used)} MiB of {_listed([gpu.index for gpu in used])} held"
    cause, fix = _who(machine, holders(machine))
    if not expected.is_tensorrt_llm:
        return note(said, cause, fix)
    if any(gpu.used_mib > _MUCH * gpu.memory_mib for gpu in used):
        return error(said, cause, fix)
    return warning(said, cause, fix)


def _listed(indices: Iterable[int | str]) -> str:
    return "GPU " + ", ".join(map(str, indices))


def _who(machine: Machine, holding: Sequence[Holder]) -> tuple[str, str]:
    """Cause and fix."""
    if not holding:
        return (
            "no process is seen that holds it: another container's, another user's, or one killed but not gone",
            "look on the host: nvidia-smi, fuser -v /dev/nvidia*; what nobody holds is freed by nvidia-smi -r -i N",
        )
    launches = {process.pid: process.launch for process in machine.processes()}
    said = []
    for holder in holding:
        launch = launches.get(holder.pid)
        size = f"{holder.used_mib} MiB" if holder.used_mib is not None else "memory"
        said.append(f"{holder.pid} ({holder.name}) {size}" + (f", of launch {launch}" if launch else ""))
    ids = sorted({launch for holder in holding if (launch := launches.get(holder.pid))})
    others = [str(holder.pid) for holder in holding if not launches.get(holder.pid)]
    fixes = [f"deepseek-triton launch stop {' '.join(ids)}"] if ids else []
    fixes += [f"end {', '.join(others)} if nobody needs them"] if others else []
    return "; ".join(said), "; ".join(fixes)


def check_health(machine: Machine, expected: Expected) -> MachineFinding:
    found = _seen(machine)
    if isinstance(found, MachineFinding):
        return found
    try:
        rows = health(machine)
    except NoGpusError as problem:
        return skipped(f"nvidia-smi: {problem}")
    ill: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for ailment in _ailments(row):
            ill.setdefault(ailment, []).append(row["index"])
    if not ill:
        return ok("no uncorrected error, no row to remap" + _fabric(rows))
    said = "; ".join(f"{_listed(indices)}: {ailment}" for (ailment, _), indices in ill.items())
    cause = "CUDA would fail at its first call, or stop while it serves"
    return lack(expected, said, cause, "; ".join(dict.fromkeys(fix for _, fix in ill)))


def _ailments(row: Mapping[str, str]) -> Sequence[tuple[str, str]]:
    """Each with its fix."""
    found = []
    count = row.get("ecc.errors.uncorrected.volatile.total", "0")
    if count != "0":
        found.append((f"{count} uncorrected ECC errors since it was started", "drain it and reset the GPU"))
    if row.get("remapped_rows.pending") == "Yes":
        found.append(("rows wait to be remapped", "reset the GPU, or restart the machine"))
    if row.get("remapped_rows.failure") == "Yes":
        found.append(("a row could not be remapped", "have the GPU replaced"))
    state, status = row.get("fabric.state", "Completed"), row.get("fabric.status", "Success")
    if state != "Completed":
        fix = "systemctl start nvidia-fabricmanager, of the driver's very version"
        found.append((f"NVSwitch fabric {state.lower()}, which is CUDA error 802 (system not yet initialized)", fix))
    elif status != "Success":
        found.append((f"NVSwitch fabric: {status}", "look at the log of nvidia-fabricmanager"))
    return found


def _fabric(rows: Sequence[Mapping[str, str]]) -> str:
    return ", fabric ready" if all(row.get("fabric.state") == "Completed" for row in rows) else ""


def check_mig(machine: Machine, expected: Expected) -> MachineFinding:
    found = _seen(machine)
    if isinstance(found, MachineFinding):
        return found
    split = [gpu.index for gpu in found if gpu.is_mig]
    if not split:
        return ok("off")
    cause = "a slice has a part of the memory, and no NVLink to others"
    return lack(expected, f"on: {_listed(split)}", cause, "nvidia-smi -mig 0, with nothing running")


def check_links(machine: Machine, expected: Expected) -> MachineFinding:
    found = _seen(machine)
    if isinstance(found, MachineFinding):
        return found
    if len(found) < 2:
        return skipped("one GPU")
    joined = links(machine)
    if not joined:
        return skipped("nvidia-smi topo -m says nothing")
    kinds_of = Counter(joined.values())
    said = ", ".join(f"{count} pair{'s' if count > 1 else ''} {kind}" for kind, count in sorted(kinds_of.items()))
    if all(kind.startswith("NV") for kind in kinds_of):
        return ok(said)
    cause = "not every two GPUs are joined by NVLink: each step's all-reduce goes over PCIe, several times slower"
    fix = "use GPUs of one NVLink domain, or pipeline stages (build --pp) across the gap"
    return warning(said, cause, fix) if expected.is_tensorrt_llm else note(said, cause, fix)


def check_persistence(machine: Machine, expected: Expected) -> MachineFinding:
    found = _seen(machine)
    if isinstance(found, MachineFinding):
        return found
    off = [gpu.index for gpu in found if gpu.is_persistent is False]
    if not off:
        return ok("on")
    cause = "the driver starts anew each time that the last program ends, which takes seconds a GPU"
    return note(f"off: {_listed(off)}", cause, "systemctl enable --now nvidia-persistenced, or nvidia-smi -pm 1")
