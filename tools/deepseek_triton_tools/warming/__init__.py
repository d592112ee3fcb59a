"""Bringing a checkpoint into the page cache before the engine reads it, as a library.

    survey = take_survey(["/models/DeepSeek-R1"], WarmOptions(jobs=4))
    result = warm(survey, observe=lambda progress: print(progress.rate))

The verb is `deepseek-triton warm`; docs/warm.md explains.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepseek_triton_tools.warming.checkpoint.survey import Survey, take_survey
    from deepseek_triton_tools.warming.damage_check import examine
    from deepseek_triton_tools.warming.transfer import Problem
    from deepseek_triton_tools.warming.warm_options import Share, WarmOptions
    from deepseek_triton_tools.warming.warming import Stall, WarmProgress, WarmResult, warm

__all__ = [
    "Problem",
    "Share",
    "Stall",
    "Survey",
    "WarmOptions",
    "WarmProgress",
    "WarmResult",
    "examine",
    "take_survey",
    "warm",
]

_HOMES = {
    "examine": "damage_check",
    **dict.fromkeys(("Share", "WarmOptions"), "warm_options"),
    **dict.fromkeys(("Survey", "take_survey"), "checkpoint.survey"),
    "Problem": "transfer",
    **dict.fromkeys(("WarmProgress", "Stall", "WarmResult", "warm"), "warming"),
}
"""Name -> its module, imported when the name is asked for: `doctor` needs only host_memory, and nothing installed."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
