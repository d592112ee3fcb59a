"""`check`: compare a repository with what is known about releases, GPUs and models.

The repository may be generated, upstream's own or edited by hand.

    report = check_repository(Path("repository"), CheckOptions(gpu="h200"))

All problems are found at once, each with its file, line and fix. Nothing in the repository is imported or run.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepseek_triton_build.check.codes import CHECKS
    from deepseek_triton_build.check.finding import CheckCode, CheckedModel, Finding, Report
    from deepseek_triton_build.check.model_identity import CheckOptions
    from deepseek_triton_build.check.repository_report import check_repository

__all__ = [
    "CHECKS",
    "CheckCode",
    "CheckOptions",
    "CheckedModel",
    "Finding",
    "Report",
    "check_repository",
]

_HOMES = {
    "CHECKS": "deepseek_triton_build.check.codes",
    "CheckCode": "deepseek_triton_build.check.finding",
    "CheckedModel": "deepseek_triton_build.check.finding",
    "Finding": "deepseek_triton_build.check.finding",
    "Report": "deepseek_triton_build.check.finding",
    "CheckOptions": "deepseek_triton_build.check.model_identity",
    "check_repository": "deepseek_triton_build.check.repository_report",
}
"""Name -> its module, which is imported when the name is asked for: what looks at a checkpoint needs no rules."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
