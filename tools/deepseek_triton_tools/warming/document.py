"""The JSON documents of a survey, a warm-up and an eviction: "deepseek-triton/warm/1"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from deepseek_triton_tools.warming.hold import Evicted
from deepseek_triton_tools.warming.page_cache import known_sum
from deepseek_triton_tools.warming.report import (
    engine_prefetches,
    file_systems,
    files_to_show,
    in_flight,
    lacking,
    remedies,
)
from deepseek_triton_tools.warming.survey import Survey
from deepseek_triton_tools.warming.warm_up import WarmResult

SCHEMA = "deepseek-triton/warm/1"
_OF_CGROUPS = ("limit", "usage", "file_cache", "headroom")


def survey_document(survey: Survey, *, action: str, exit_code: int, verbose: bool = False) -> dict[str, Any]:
    """The document of `warm report`; the other actions add to it."""
    options, memory = survey.options, survey.memory
    return {
        "schema": SCHEMA,
        "action": action,
        "ok": exit_code == 0,
        "exit_code": exit_code,
        "checkpoints": [
            {
                "source": checkpoint.source,
                "folder": str(checkpoint.folder),
                "found_by": checkpoint.found_by,
                "num_files": len(checkpoint.files),
                "size_bytes": checkpoint.size,
                "engine_prefetches": engine_prefetches(checkpoint, survey),
                "findings": [asdict(finding) for finding in checkpoint.findings],
            }
            for checkpoint in survey.checkpoints
        ],
        "file_systems": [
            {**asdict(system.mount), "read_ahead_kb": system.read_ahead_kb, "reading": asdict(system.reading)}
            for system in file_systems(survey)
        ],
        "memory": {
            **{f"{name}_bytes": getattr(memory, name) for name in ("total", "available", "headroom")},
            "decided_by": "MemAvailable" if memory.tightest is None else memory.tightest.path,
            "cgroups": [
                {
                    "path": cgroup.path,
                    "version": cgroup.version,
                    **{f"{name}_bytes": getattr(cgroup, name) for name in _OF_CGROUPS},
                }
                for cgroup in memory.cgroups
            ],
        },
        "size_bytes": survey.size,
        "num_files": len(survey.files),
        "resident_bytes": survey.resident,
        "residency_by": sorted({each.residency_method for each in survey.files if each.residency_method}),
        "budget_bytes": survey.budget,
        "fits": not lacking(survey),
        "lacking_bytes": lacking(survey),
        "remedies": remedies(survey) if lacking(survey) else None,
        "chosen_bytes": survey.chosen_size,
        "chosen_files": len(survey.chosen),
        "share": str(options.share),
        "num_working_shares": survey.num_working_shares,
        "jobs": survey.jobs,
        "rate_limit_bytes_per_s": options.rate_limit,
        "in_flight_bytes": in_flight(survey),
        "files": [
            {
                "path": str(each.file.path),
                "size_bytes": each.file.size,
                "resident_bytes": each.resident,
                "fate": each.selection,
                "mount_point": each.file_system.mount.mount_point,
            }
            for each in files_to_show(survey, verbose=verbose)
        ],
    }


def result_document(result: WarmResult, *, exit_code: int, verbose: bool = False) -> dict[str, Any]:
    """The document of `warm files`."""
    progress = result.progress
    read = progress.done - progress.found + progress.again
    return survey_document(result.survey, action="warm", exit_code=exit_code, verbose=verbose) | {
        # With --hold a signal ends the verb with exit code 0, whatever was warm by then.
        "ok": exit_code == 0 and not result.was_stopped,
        "result": {
            "total_bytes": progress.total,
            "done_bytes": progress.done,
            "found_bytes": progress.found,
            "read_bytes": read,
            "read_again_bytes": progress.again,
            "resident_bytes": result.resident,
            "num_files": progress.num_files,
            "num_files_done": progress.num_files_done,
            "elapsed_s": round(progress.elapsed_s, 3),
            "read_bytes_per_s": round(read / progress.elapsed_s) if progress.elapsed_s else None,
            "was_stopped": result.was_stopped,
            "gave_up": result.gave_up,
            "num_verified": result.num_verified,
            "num_unverified": result.num_unverified,
            "problems": [asdict(problem) | {"path": str(problem.path)} for problem in progress.problems],
            "stalls": [asdict(stall) | {"path": str(stall.path)} for stall in progress.stalls],
        },
    }


def evict_document(
    survey: Survey, evicted: Sequence[Evicted], *, exit_code: int, verbose: bool = False
) -> dict[str, Any]:
    """The document of `warm evict`."""
    return survey_document(survey, action="evict", exit_code=exit_code, verbose=verbose) | {
        "result": {
            "resident_bytes": known_sum(each.left for each in evicted),
            "stayed": [
                {"path": str(each.path), "resident_bytes": each.left, "reason": each.reason}
                for each in evicted
                if each.reason or verbose
            ],
        }
    }
