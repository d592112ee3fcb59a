"""Settings of the GPUs, as `nvidia-smi -q -x` and `nvidia-smi boost-slider -l` tell them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from xml.etree import ElementTree

from deepseek_triton_tools.doctor.machine.expected import VLLM
from deepseek_triton_tools.doctor.machine.machine import NOT_FOUND, Machine
from deepseek_triton_tools.doctor.machine.tuning.setting import (
    Advice,
    SettingReading,
    Surroundings,
    UnreadableError,
    by_value,
)
from deepseek_triton_tools.doctor.machine.versions import is_before

_UNTOLD = re.compile(r"\[?(N/A|Not Supported|Unknown Error|Requested functionality has been deprecated)\]?|")
_BENCHMARKING = "NVIDIA/TensorRT-LLM docs: performance/perf-benchmarking, Before Benchmarking"
_MANUAL = "nvidia-smi(1)"
_SLOWED_BY = {
    "hw_slowdown": "hardware slowdown",
    "hw_thermal_slowdown": "heat (hardware)",
    "hw_power_brake_slowdown": "power brake",
    "sw_thermal_slowdown": "heat (driver)",
    "applications_clocks_setting": "applications clocks",
}
"""Clock event reason -> words. A GPU at its power limit under load is none of them: the power limit has its own row."""
_PDL = "TRTLLM_ENABLE_PDL"


def read_gpus(machine: Machine) -> tuple[Sequence[ElementTree.Element], str]:
    """Return the GPUs' elements, and why there is none."""
    done = machine.run("nvidia-smi", "-q", "-x")
    if done.code != 0:
        lines = (done.out + done.err).strip().splitlines()
        return [], "no nvidia-smi" if done.code == NOT_FOUND else f"nvidia-smi -q -x: {lines[0] if lines else 'failed'}"
    try:
        gpus = ElementTree.fromstring(done.out).findall("gpu")
    except ElementTree.ParseError as error:
        return [], f"nvidia-smi -q -x: {error}"
    return gpus, "nvidia-smi names no GPU"


def _told(gpu: ElementTree.Element, *paths: str) -> str | None:
    """Return the text of the first path that says something. Drivers have moved some of them."""
    texts = ((gpu.findtext(path) or "").strip() for path in paths)
    return next((text for text in texts if not _UNTOLD.fullmatch(text)), None)


def _number(gpu: ElementTree.Element, *paths: str) -> float | None:
    """Return the number in front of a unit."""
    found = re.match(r"[\d.]+", _told(gpu, *paths) or "")
    return float(found[0]) if found else None


def _selected(numbers: Sequence[int], gpus: Sequence[object]) -> str:
    """Return nvidia-smi's option for these GPUs; nothing for all."""
    return "" if len(numbers) == len(gpus) else f"-i {','.join(map(str, numbers))} "


def _switch(path: str, advised: str, option: str, after: str = "") -> Callable[[Surroundings], SettingReading]:
    """Return how a setting of a few words is read.

    :param option: the words of nvidia-smi that set it.
    :param after: a further command that it needs.
    """

    def read(surroundings: Surroundings) -> SettingReading:
        gpus = surroundings.need_gpus()
        values = [_told(gpu, path) for gpu in gpus]
        other = [number for number, value in enumerate(values) if value not in (advised, None)]
        if not any(values):
            raise UnreadableError("nvidia-smi does not tell it for these GPUs")
        commands = [f"sudo nvidia-smi {_selected(other, gpus)}{option}", *([after] if after else [])]
        found = by_value([value or "not told" for value in values])
        return SettingReading(found=found, is_as_advised=not other, commands=commands)

    return read


def _power(surroundings: Surroundings) -> SettingReading:
    gpus = surroundings.need_gpus()
    pairs = [
        (
            _number(gpu, "gpu_power_readings/current_power_limit", "power_readings/enforced_power_limit"),
            _number(gpu, "gpu_power_readings/max_power_limit", "power_readings/max_power_limit"),
        )
        for gpu in gpus
    ]
    known = {number: (now, most) for number, (now, most) in enumerate(pairs) if now and most}
    if not known:
        raise UnreadableError("nvidia-smi does not tell it for these GPUs")
    lower: dict[float, list[int]] = {}
    for number, (now, most) in known.items():
        if now < most:
            lower.setdefault(most, []).append(number)
    return SettingReading(
        found=by_value([f"{now:g} W of {most:g} W" if now and most else "not told" for now, most in pairs]),
        advised=by_value([f"{most:g} W" if most else "not told" for _, most in pairs]),
        is_as_advised=not lower,
        commands=[f"sudo nvidia-smi {_selected(numbers, gpus)}-pl {most:g}" for most, numbers in lower.items()],
    )


def _clocks(surroundings: Surroundings) -> SettingReading:
    gpus = surroundings.need_gpus()
    found, held = [], []
    for number, gpu in enumerate(gpus):
        words = ", ".join(
            f"{name} {_told(gpu, f'clocks/{clock}') or '?'} of {_told(gpu, f'max_clocks/{clock}') or '?'}"
            for name, clock in (("SM", "sm_clock"), ("memory", "mem_clock"))
        )
        slowed = [text for reason, text in _SLOWED_BY.items() if _is_slowed(gpu, reason)]
        found.append(words + (f", held down by {', '.join(slowed)}" if slowed else ""))
        if slowed:
            held.append(number)
    commands = [f"sudo nvidia-smi {_selected(held, gpus)}{option}" for option in ("-rgc", "-rac")]
    return SettingReading(found=by_value(found), is_as_advised=not held, commands=commands)


def _is_slowed(gpu: ElementTree.Element, reason: str) -> bool:
    paths = (f"clocks_{word}_reasons/clocks_{word}_reason_{reason}" for word in ("event", "throttle"))
    return _told(gpu, *paths) == "Active"


def _boost(surroundings: Surroundings) -> SettingReading:
    gpus = surroundings.need_gpus()
    done = surroundings.machine.run("nvidia-smi", "boost-slider", "-l")
    # Each row of its table has GPU, the word vboost, the highest and the present value.
    rows = re.findall(r"(\d+)\W+vboost\W+(\d+)\W+(\d+)", done.out)
    if not rows:
        lines = [line.strip() for line in (done.out + done.err).splitlines() if line.strip()]
        said = f": {lines[0][:120]}" if lines else ""
        raise UnreadableError(f"nvidia-smi boost-slider -l names no slider vboost{said}")
    lower: dict[str, list[int]] = {}
    for number, most, now in rows:
        if int(now) < int(most):
            lower.setdefault(most, []).append(int(number))
    return SettingReading(
        found=by_value([f"{now} of {most}" for _, most, now in rows]),
        advised=by_value([most for _, most, _ in rows]),
        is_as_advised=not lower,
        commands=[
            f"sudo nvidia-smi boost-slider {_selected(numbers, gpus)}--vboost {most}" for most, numbers in lower.items()
        ],
    )


def _pdl(surroundings: Surroundings) -> SettingReading:
    expected, machine = surroundings.expected, surroundings.machine
    if expected.engine == VLLM:
        raise UnreadableError("vLLM does not read it")
    release = expected.release or machine.python.packages.get("tensorrt_llm")
    if release is None:
        raise UnreadableError("the release of TensorRT-LLM is not known: name a repository, or run it in the container")
    value = machine.environ.get(_PDL)
    found = f"{'unset' if value is None else value}, TensorRT-LLM {release}"
    if not is_before(release, "1.2"):
        return SettingReading(
            found=found, advised="unset or 1", is_as_advised=value in (None, "1"), commands=[f"unset {_PDL}"]
        )
    if not any(_told(gpu, "product_architecture") == "Blackwell" for gpu in surroundings.need_gpus()):
        return SettingReading(
            found=found, advised="anything: no figure is published for these GPUs", is_as_advised=True
        )
    return SettingReading(found=found, advised="1", is_as_advised=value == "1", commands=[f"export {_PDL}=1"])


GPU_ADVICE: Sequence[Advice] = (
    Advice(
        id="persistence",
        title="persistence mode",
        advised="Enabled",
        reason="the driver unloads when the last program ends: the next start waits for it, and clock, power and "
        "boost settings are lost",
        source=_BENCHMARKING,
        read=_switch("persistence_mode", "Enabled", "-pm 1"),
    ),
    Advice(
        id="clocks",
        title="clocks",
        advised="not held down",
        reason="an idle GPU lowers its clocks by itself, but a clock that was locked, or heat, holds them down under "
        "load. Locking them at their highest value may bring on the slowdown by heat",
        source=_BENCHMARKING,
        read=_clocks,
    ),
    Advice(
        id="boost",
        title="boost slider vboost",
        advised="the highest value",
        reason="it gives more of the power to the compute units; for one user on B200 TensorRT-LLM's guide names "
        "about 8 tokens/s more. It is optional",
        source="NVIDIA/TensorRT-LLM docs: Best_perf_practice_on_DeepSeek-R1, Tune GPU clocks; perf-benchmarking",
        read=_boost,
    ),
    Advice(
        id="power",
        title="power limit",
        advised="the highest value",
        reason="at the limit the driver lowers the clocks",
        source=_BENCHMARKING,
        read=_power,
    ),
    Advice(
        id="ecc",
        title="ECC",
        advised="Enabled",
        reason="without it a flipped bit of a weight goes unnoticed. The change needs a reset of the GPU",
        source=_MANUAL,
        read=_switch("ecc_mode/current_ecc", "Enabled", "-e 1", "sudo nvidia-smi -r"),
    ),
    Advice(
        id="mig",
        title="MIG",
        advised="Disabled",
        reason="a MIG slice has only a part of the GPU's memory, and no NVLink to other GPUs",
        source=_MANUAL,
        read=_switch("mig_mode/current_mig", "Disabled", "-mig 0"),
    ),
    Advice(
        id="compute-mode",
        title="compute mode",
        advised="Default",
        reason="in the exclusive mode one process alone may use a GPU, so that a second server, a profiler or a "
        "rehearsal fails beside the engine; Prohibited lets none",
        source=_MANUAL,
        read=_switch("compute_mode", "Default", "-c 0"),
    ),
    Advice(
        id="pdl",
        title=_PDL,
        advised="1 before TensorRT-LLM 1.2 on Blackwell",
        reason="a kernel starts before the previous one has ended. TensorRT-LLM turns it on by itself from 1.2; the "
        "start.sh of a generated repository sets it where it is needed",
        source="NVIDIA/TensorRT-LLM release notes 1.2; Best_perf_practice_on_DeepSeek-R1, B200 min-latency",
        read=_pdl,
    ),
)
