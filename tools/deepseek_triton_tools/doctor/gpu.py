"""GPUs, by nvidia-smi: which there are, how they are linked, whether they are healthy, and who holds their memory."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deepseek_triton_tools.doctor.findings import (
    VLLM,
    Expected,
    MachineFinding,
    error,
    error_or_note,
    note,
    ok,
    skipped,
    warning,
    warning_or_note,
)
from deepseek_triton_tools.doctor.machine import NOT_FOUND, Done, Machine
from deepseek_triton_tools.doctor.software import container_tag, is_before

_FORMAT = "--format=csv,noheader,nounits"
_BASIC = (
    "index",
    "name",
    "memory.total",
    "memory.used",
    "compute_cap",
    "driver_version",
    "persistence_mode",
    "mig.mode.current",
)
# Drivers before R535 don't know all of these fields. One unknown field makes nvidia-smi refuse the whole query.
_HEALTH = (
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "fabric.state",
    "fabric.status",
)
_UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field')
# Any field of a GPU may hold one of these when the GPU no longer answers.
_LOST_WORDS = ("[GPU is lost]", "[GPU requires reset]")
_ERROR_WORDS = re.compile("lost|mismatch|rror|ailed|[Uu]nable")
# Characters of a message of nvidia-smi that are shown.
_MAX_MESSAGE = 160
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
NO_ANSWER = "no answer before its deadline"
# Pattern of the name and MiB that nvidia-smi tells -> the catalogue's names; the first that fits counts. PCIe and NVL
# cards have other memory sizes and no NVSwitch; the catalogue does not have them.
_CATALOGUE_NAMES: Mapping[str, tuple[str, ...]] = {
    r"GB200": ("gb200", "gb200-nvl72"),
    r"GB300": ("gb300", "gb300-nvl72"),
    r"B300": ("b300",),
    r"RTX PRO 6000 Blackwell Server": ("rtx-pro-6000",),
    r"B200": ("b200",),
    r"\bH200(?! NVL)": ("h200",),
    r"H100 80GB HBM3|H100 SXM": ("h100",),
    r"H20\b.*, \d{5} MiB": ("h20-96",),
    r"H20\b.*, \d{6} MiB": ("h20-141",),
    r"A100.*80GB": ("a100",),
}
# Hopper: TensorRT-LLM's examples/models/core/deepseek_v3/README.md says that Ampere is not supported.
_OLDEST_CAPABILITY = "9.0"
# Memory that a driver, a display or a monitor may hold of a GPU; more than any of them takes (an idle H200: 9 MiB).
_IDLE_MIB = 1024
# Share of a GPU's memory. An assumption: a plan leaves no more than this free besides the KV cache.
_MUCH = 0.1
# Cause and fix.
_LOST = (
    "a GPU has fallen off the bus or has stopped working (Xid 79 and others in dmesg)",
    "drain the machine; nvidia-smi -r resets a GPU that still answers, otherwise restart the machine",
)
# Words of nvidia-smi -> cause and fix.
_KNOWN_MESSAGES: Mapping[str, tuple[str, str]] = {
    "version mismatch": (
        "the driver was replaced while it was loaded",
        "restart the machine, or unload and load nvidia.ko",
    ),
    "communicate with the NVIDIA driver": (
        "the driver is not loaded, or it was not built for this kernel",
        "modprobe nvidia, or install the driver again",
    ),
    "Failed to initialize NVML": (
        "a container loses its devices when systemd reloads the host's cgroups",
        "restart the container; to prevent it, run docker with the cgroupfs driver or give --device for each "
        "/dev/nvidia*",
    ),
    "GPU is lost": _LOST,
    "requires reset": _LOST,
    "Unable to determine the device handle": _LOST,
    NO_ANSWER: (
        "the driver hangs, usually because a GPU has failed",
        "look for Xid and NVRM in dmesg; restart the machine",
    ),
}
_INSTALL_DRIVER = "install NVIDIA's driver"


class NoGpusError(Exception):
    """nvidia-smi is missing, or it names no GPU. The text is what it said."""

    def __init__(self, message: str, *, is_missing: bool) -> None:
        super().__init__(message)
        self.is_missing = is_missing


@dataclass(frozen=True, kw_only=True)
class InstalledGpu:
    index: int
    name: str
    """Such as `NVIDIA H200`."""
    memory_mib: int
    used_mib: int
    compute_capability: str
    """Such as `9.0`."""
    driver: str
    is_persistent: bool | None
    """None when nvidia-smi doesn't tell."""
    is_mig: bool
    lost: str | None = None
    """`[GPU is lost]` or `[GPU requires reset]` when it no longer answers."""


def gpus(machine: Machine) -> Sequence[InstalledGpu]:
    """:raises NoGpusError: when none is seen."""
    return [
        InstalledGpu(
            index=_number(row["index"]),
            name=row["name"],
            memory_mib=_number(row["memory.total"]),
            used_mib=_number(row["memory.used"]),
            compute_capability=row["compute_cap"],
            driver=row["driver_version"],
            is_persistent=None if _is_unknown(row["persistence_mode"]) else row["persistence_mode"] == "Enabled",
            is_mig=row["mig.mode.current"] == "Enabled",
            lost=next((cell for cell in row.values() if cell in _LOST_WORDS), None),
        )
        for row in _query(machine, _BASIC)
    ]


def _query(machine: Machine, fields: Sequence[str]) -> Sequence[Mapping[str, str]]:
    done = machine.run("nvidia-smi", f"--query-gpu={','.join(fields)}", _FORMAT)
    if done.code != 0:
        raise NoGpusError(_message(done), is_missing=done.code == NOT_FOUND)
    rows = [[cell.strip() for cell in line.split(",")] for line in done.out.splitlines() if line.strip()]
    whole = [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]
    if not whole:
        raise NoGpusError(_message(done), is_missing=False)
    return whole


def _message(done: Done) -> str:
    """Return the line that tells most: rows of the GPUs that still answer may come before it."""
    if done.code is None:
        return NO_ANSWER
    lines = [line.strip() for line in f"{done.out}\n{done.err}".splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR_WORDS.search(line)] or lines
    return errors[0][:_MAX_MESSAGE] if errors else f"it names no GPU, and ended with {done.code}"


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _is_unknown(value: str) -> bool:
    return value.strip("[]") in ("N/A", "Not Supported", "Unknown Error", "")


def check_gpus(machine: Machine, expected: Expected) -> MachineFinding:
    try:
        seen_gpus = gpus(machine)
    except NoGpusError as problem:
        result = "no nvidia-smi" if problem.is_missing else f"nvidia-smi: {problem}"
        return error_or_note(expected, result, *_why_none(machine, problem))
    models = gpu_models(seen_gpus)
    if lost := [gpu for gpu in seen_gpus if gpu.lost]:
        return error_or_note(expected, f"{_listed([gpu.index for gpu in lost])}: {lost[0].lost}", *_LOST)
    num_needed = expected.gpus_per_node
    if expected.gpu and not all(expected.gpu in catalogue_names(gpu) for gpu in seen_gpus):
        fix = "use a machine with those GPUs, or build again with --gpu for this one"
        return error(models, f"the repository was made for {expected.gpu}", fix)
    if expected.uses_gpus and num_needed and len(seen_gpus) < num_needed:
        needed = f"the repository needs {num_needed} on each machine"
        # Beside the rows of the GPUs that it sees, nvidia-smi speaks of one that it can't reach.
        out = machine.run("nvidia-smi", f"--query-gpu={','.join(_BASIC)}", _FORMAT).out
        if lines := [line.strip() for line in out.splitlines() if _ERROR_WORDS.search(line)]:
            return error(f"{models}; nvidia-smi: {lines[0][:_MAX_MESSAGE]}", f"{needed}; {_LOST[0]}", _LOST[1])
        fix = "make all of them visible (docker --gpus all, NVIDIA_VISIBLE_DEVICES), or build again with fewer --gpus"
        return error(models, needed, fix)
    old = [gpu for gpu in seen_gpus if is_before(gpu.compute_capability, _OLDEST_CAPABILITY)]
    if old and expected.engine != VLLM:
        cause = f"DeepSeek on TensorRT-LLM needs compute capability {_OLDEST_CAPABILITY} (Hopper) or newer"
        result = f"{models}, compute capability {old[0].compute_capability}"
        return error_or_note(expected, result, cause, "use Hopper or newer")
    return ok(f"{models}, compute capability {seen_gpus[0].compute_capability}")


def catalogue_names(gpu: InstalledGpu) -> tuple[str, ...]:
    """Return the names that the catalogue may have for it."""
    text = f"{gpu.name}, {gpu.memory_mib} MiB"
    return next((names for pattern, names in _CATALOGUE_NAMES.items() if re.search(pattern, text)), ())


def gpu_models(installed: Sequence[InstalledGpu]) -> str:
    """Return such as `8 x NVIDIA H200, 143771 MiB`."""
    models = Counter((gpu.name, gpu.memory_mib) for gpu in installed)
    return "; ".join(f"{count} x {name}, {mib} MiB" for (name, mib), count in models.items())


def _why_none(machine: Machine, problem: NoGpusError) -> tuple[str, str]:
    """Return cause and fix."""
    for words, why in _KNOWN_MESSAGES.items():
        if words in str(problem):
            return why
    if not is_on_the_bus(machine):
        return (
            "serving needs GPUs, and no NVIDIA device is on the PCI bus",
            f"{_INSTALL_DRIVER}, or use a machine with GPUs",
        )
    if machine.exists("/.dockerenv"):
        return "the machine has GPUs, but this container was started without them", "docker run --gpus all"
    return "an NVIDIA device is on the PCI bus, but no driver works", _INSTALL_DRIVER


def is_on_the_bus(machine: Machine) -> bool:
    """Return whether sysfs has a PCI device of vendor 0x10de (NVIDIA) and class 0x03 (display)."""
    root = "/sys/bus/pci/devices"
    try:
        return any(
            machine.read(f"{root}/{name}/vendor").strip() == "0x10de"
            and machine.read(f"{root}/{name}/class").startswith("0x03")
            for name in machine.list_folder(root)
        )
    except OSError:
        return False


def check_driver(machine: Machine, expected: Expected) -> MachineFinding:
    version = gpus(machine)[0].driver
    tag = container_tag(machine)
    needed = expected.drivers.get(tag or "", expected.driver)
    if needed is None or not is_before(version, needed):
        return ok(version + (f", needed: {needed}" if needed else ""))
    return warning(
        version,
        f"the container is made for driver {needed}; an older one works with data-centre GPUs only, by the CUDA "
        "compatibility libraries in the container, and not every older driver does (Triton's release notes, driver "
        "requirements)",
        f"install driver {needed.partition('.')[0]} or newer, or keep the compatibility libraries in LD_LIBRARY_PATH",
    )


def check_memory(machine: Machine, expected: Expected) -> MachineFinding:
    """Check that no process holds memory of a GPU."""
    used = [gpu for gpu in gpus(machine) if gpu.used_mib > _IDLE_MIB]
    if not used:
        return ok("free")
    result = f"{sum(gpu.used_mib for gpu in used)} MiB of {_listed([gpu.index for gpu in used])} held"
    cause, fix = _who_holds_memory(machine)
    if expected.uses_gpus and any(gpu.used_mib > _MUCH * gpu.memory_mib for gpu in used):
        return error(result, cause, fix)
    return warning_or_note(expected, result, cause, fix)


def _listed(indices: Iterable[int | str]) -> str:
    return "GPU " + ", ".join(map(str, indices))


def _who_holds_memory(machine: Machine) -> tuple[str, str]:
    """Return cause and fix."""
    done = machine.run("nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", _FORMAT)
    rows = [[cell.strip() for cell in line.split(",")] for line in done.out.splitlines()] if done.code == 0 else []
    launches = {process.pid: process.launch for process in machine.processes()}
    described, ids, others = [], set(), []
    for pid, *name, used in (row for row in rows if len(row) >= 3 and row[0].isdecimal()):
        launch = launches.get(int(pid))
        size = f"{used} MiB" if used.isdecimal() else "memory"
        described.append(f"{pid} ({', '.join(name)}) {size}" + (f", of launch {launch}" if launch else ""))
        if launch:
            ids.add(launch)
        else:
            others.append(pid)
    if not described:
        return (
            "no process is seen that holds it: it belongs to another container or another user, or was killed and has "
            "not gone yet",
            "look on the host: nvidia-smi, fuser -v /dev/nvidia*; nvidia-smi -r -i N frees memory that nobody holds",
        )
    fixes = [f"deepseek-triton launch stop {' '.join(sorted(ids))}"] if ids else []
    fixes += [f"end {', '.join(others)}"] if others else []
    return "; ".join(described), f"if nobody needs them: {'; '.join(fixes)}"


def health(machine: Machine) -> Sequence[Mapping[str, str]]:
    """Return one mapping for each GPU: field -> value, without the fields that it doesn't tell.

    :raises NoGpusError: when no GPU is seen, or the driver refuses the query.
    """
    fields: tuple[str, ...] = _HEALTH
    while fields:
        done = machine.run("nvidia-smi", f"--query-gpu={','.join(('index', *fields))}", _FORMAT)
        unknown = _UNKNOWN_FIELD.search(done.out + done.err)
        if done.code == 0 or unknown is None or unknown[1] not in fields:
            break
        fields = tuple(field for field in fields if field != unknown[1])
    rows = _query(machine, ("index", *fields))
    return [{name: value for name, value in row.items() if not _is_unknown(value)} for row in rows]


def check_health(machine: Machine, expected: Expected) -> MachineFinding:
    gpus(machine)  # without GPUs there is nothing to check
    try:
        rows = health(machine)
    except NoGpusError as problem:
        return skipped(f"nvidia-smi: {problem}")
    unhealthy: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for fault in _faults(row):
            unhealthy.setdefault(fault, []).append(row["index"])
    if not unhealthy:
        fabric = ", fabric ready" if all(row.get("fabric.state") == "Completed" for row in rows) else ""
        return ok(f"no uncorrected error, no row to remap{fabric}")
    result = "; ".join(f"{_listed(indices)}: {fault}" for (fault, _), indices in unhealthy.items())
    cause = "CUDA fails at its first call, or while the model serves"
    return error_or_note(expected, result, cause, "; ".join(dict.fromkeys(fix for _, fix in unhealthy)))


def _faults(row: Mapping[str, str]) -> Sequence[tuple[str, str]]:
    """Return each fault of a GPU with its fix."""
    faults = []
    count = row.get("ecc.errors.uncorrected.volatile.total", "0")
    if count != "0":
        faults.append((f"{count} uncorrected ECC errors since the driver was loaded", "drain it and reset the GPU"))
    if row.get("remapped_rows.pending") == "Yes":
        faults.append(("rows wait to be remapped", "reset the GPU, or restart the machine"))
    if row.get("remapped_rows.failure") == "Yes":
        faults.append(("a row could not be remapped", "have the GPU replaced"))
    state, status = row.get("fabric.state", "Completed"), row.get("fabric.status", "Success")
    if state != "Completed":
        fix = "systemctl start nvidia-fabricmanager, in exactly the driver's version"
        faults.append((f"NVSwitch fabric {state.lower()}, which is CUDA error 802 (system not yet initialized)", fix))
    elif status != "Success":
        faults.append((f"NVSwitch fabric: {status}", "look at the log of nvidia-fabricmanager"))
    return faults


def check_mig(machine: Machine, expected: Expected) -> MachineFinding:
    split = [gpu.index for gpu in gpus(machine) if gpu.is_mig]
    if not split:
        return ok("off")
    cause = "a MIG slice has only a part of the GPU's memory, and no NVLink to other GPUs"
    return error_or_note(expected, f"on: {_listed(split)}", cause, "nvidia-smi -mig 0, while nothing runs on it")


def check_links(machine: Machine, expected: Expected) -> MachineFinding:
    """Check how each two GPUs are joined: `NV18`, `PIX`, `PHB`, `SYS` and so on."""
    if len(gpus(machine)) < 2:
        return skipped("one GPU")
    done = machine.run("nvidia-smi", "topo", "-m")
    rows = [_ESCAPE.sub("", line).split() for line in done.out.splitlines()] if done.code == 0 else []
    columns = next(([name for name in row if re.fullmatch(r"GPU\d+", name)] for row in rows if row), [])
    kinds = Counter(
        link
        for row in rows
        if len(row) > len(columns) and row[0] in columns and "X" in row  # unlike in the heading
        for name, link in zip(columns, row[1:], strict=False)
        if int(row[0][3:]) < int(name[3:])
    )
    if not kinds:
        return skipped("nvidia-smi topo -m says nothing")
    result = ", ".join(f"{count} pair{'s' if count > 1 else ''} {link}" for link, count in sorted(kinds.items()))
    if all(link.startswith("NV") for link in kinds):
        return ok(result)
    slower = "the all-reduce of each step goes over PCIe, which is several times slower"
    cause = f"some GPUs are not joined by NVLink: {slower}"
    fix = "use GPUs of one NVLink domain, or put a pipeline boundary (build --pp) where NVLink is missing"
    return warning_or_note(expected, result, cause, fix)


def check_persistence(machine: Machine, expected: Expected) -> MachineFinding:
    off = [gpu.index for gpu in gpus(machine) if gpu.is_persistent is False]
    if not off:
        return ok("on")
    cause = "the driver unloads when the last program ends, and loading it again takes seconds for each GPU"
    return note(f"off: {_listed(off)}", cause, "systemctl enable --now nvidia-persistenced, or nvidia-smi -pm 1")
