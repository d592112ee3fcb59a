"""Bringing a checkpoint into the page cache before the engine reads it, as a library.

    survey = take_survey(["/models/DeepSeek-R1"], WarmOptions(jobs=4))
    result = warm(survey, observe=lambda progress: print(progress.rate))

The verb is `deepseek-triton warm`; docs/warm.md explains.
"""

from deepseek_triton_tools.warming.checking import examine
from deepseek_triton_tools.warming.options import Share, WarmOptions
from deepseek_triton_tools.warming.survey import Survey, take_survey
from deepseek_triton_tools.warming.transfer import Problem
from deepseek_triton_tools.warming.warming import Progress, Stall, WarmResult, warm

__all__ = [
    "Problem",
    "Progress",
    "Share",
    "Stall",
    "Survey",
    "WarmOptions",
    "WarmResult",
    "examine",
    "take_survey",
    "warm",
]
