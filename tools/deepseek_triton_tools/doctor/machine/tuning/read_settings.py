"""Every setting of this machine, in the order in which they are shown. docs/doctor.md describes them."""

from __future__ import annotations

from deepseek_triton_tools.doctor.machine.expected import Expected
from deepseek_triton_tools.doctor.machine.machine import Machine
from deepseek_triton_tools.doctor.machine.tuning.gpu_advice import GPU_ADVICE, read_gpus
from deepseek_triton_tools.doctor.machine.tuning.host_advice import HOST_ADVICE
from deepseek_triton_tools.doctor.machine.tuning.setting import (
    Advice,
    MachineSetting,
    SettingReading,
    SettingState,
    Surroundings,
    UnreadableError,
)


def read_settings(machine: Machine, expected: Expected) -> tuple[MachineSetting, ...]:
    gpus, why = read_gpus(machine)
    surroundings = Surroundings(machine=machine, expected=expected, gpus=gpus, why_no_gpus=why)
    return tuple(_setting(advice, surroundings) for advice in (*GPU_ADVICE, *HOST_ADVICE))


def _setting(advice: Advice, surroundings: Surroundings) -> MachineSetting:
    state: SettingState = "unknown"
    try:
        reading = advice.read(surroundings)
        state = "as advised" if reading.is_as_advised else "differs"
    except UnreadableError as why:
        reading = SettingReading(found=str(why), is_as_advised=False)
    except OSError as problem:
        where = f"{problem.filename}: " if problem.filename else ""
        reading = SettingReading(found=f"{where}{problem.strerror or problem}", is_as_advised=False)
    return MachineSetting(
        id=advice.id,
        title=advice.title,
        state=state,
        found=reading.found,
        advised=reading.advised or advice.advised,
        reason=advice.reason,
        source=advice.source,
        commands=tuple(reading.commands) if state == "differs" else (),
    )
