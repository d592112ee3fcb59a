"""Bringing a checkpoint into the page cache before the engine reads it, as a library.

    survey = take_survey(["/models/DeepSeek-R1"], WarmOptions(jobs=4))
    result = warm(survey, observe=lambda progress: print(progress.rate))

The verbs are `deepseek-triton warm files`, `report` and `evict`; docs/warm.md explains them.
"""

from deepseek_triton_tools.warming.survey import Share, WarmOptions, take_survey
from deepseek_triton_tools.warming.warm_up import examine, warm

__all__ = ["Share", "WarmOptions", "examine", "take_survey", "warm"]
