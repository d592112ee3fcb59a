"""`check`: any repository, generated, upstream's or edited by hand, against what is known of releases, GPUs and models.

    report = check_repository(Path("repository"), CheckOptions(gpu="h200"))

Every problem is found at once, with its file, line and fix; nothing is imported from, or run of, what is checked.
"""

from deepseek_triton_build.check.codes import CHECKS
from deepseek_triton_build.check.finding import Check, CheckedModel, Finding, Report
from deepseek_triton_build.check.identity import CheckOptions
from deepseek_triton_build.check.repository import check_repository

__all__ = [
    "CHECKS",
    "Check",
    "CheckOptions",
    "CheckedModel",
    "Finding",
    "Report",
    "check_repository",
]
