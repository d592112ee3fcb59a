"""A setting of a machine, and how one is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

from deepseek_triton_tools.doctor.machine.expected import Expected
from deepseek_triton_tools.doctor.machine.machine import Machine

SettingState = Literal["differs", "unknown", "as advised"]


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


@dataclass(frozen=True, kw_only=True)
class SettingReading:
    found: str
    is_as_advised: bool
    commands: Sequence[str] = ()
    advised: str = ""
    """The advised value where it depends on the machine."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    machine: Machine
    expected: Expected
    gpus: Sequence[ElementTree.Element]
    """The element `gpu` of `nvidia-smi -q -x` for each GPU."""
    why_no_gpus: str = ""

    def need_gpus(self) -> Sequence[ElementTree.Element]:
        """:raises UnreadableError: when there are none."""
        if not self.gpus:
            raise UnreadableError(self.why_no_gpus)
        return self.gpus


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The advised value of a setting, and how its present one is read."""

    id: str
    title: str
    advised: str
    reason: str
    source: str
    read: Callable[[Surroundings], SettingReading]
    """It may raise UnreadableError and OSError."""


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
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def by_value(values: Sequence[str]) -> str:
    """Return the value that all have, or each value with its GPUs: `Enabled (GPU 0-6), Disabled (GPU 7)`."""
    different = dict.fromkeys(values)
    if len(different) == 1:
        return values[0]
    numbers = {value: [number for number, each in enumerate(values) if each == value] for value in different}
    return ", ".join(f"{value} (GPU {ranges(those)})" for value, those in numbers.items())
