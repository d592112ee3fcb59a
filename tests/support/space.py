"""The whole space of requests to the generator: tests/build/test_space.py walks it, tests/bench times it.

python tests/support/space.py build 0/2         # builds and checks every second distinct plan; problems as JSON
python tests/support/space.py build 0/2 FILE    # the same for the plans that `save_plans` wrote to FILE
"""

from __future__ import annotations

import itertools
import json
import pickle
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepseek_triton_build import (
    FORMATS,
    Plan,
    PlanRequest,
    RefusedPlanError,
    format_files,
    make_plan,
    repository_files,
    write_repository,
)
from deepseek_triton_build.arithmetic.gpu_memory import GPU_COUNTS
from deepseek_triton_build.catalog import PRECISIONS, RELEASES, gpus, profiles, variants
from deepseek_triton_build.check import CheckOptions, check_repository
from deepseek_triton_build.render.stamp import plan_hash


def all_requests() -> Iterator[PlanRequest]:
    """Yield every variant x GPU x count x precision x profile x release."""
    names = [name for name, variant in variants().items() if variant.checkpoints]
    axes = (names, gpus(), (None, *GPU_COUNTS), PRECISIONS, profiles(), RELEASES)
    for variant, gpu, count, precision, profile, release in itertools.product(*axes):
        yield PlanRequest(
            variant=variant, gpu=gpu, num_gpus=count, precision=precision, profile=profile, release=release
        )


def plan_or_refusal(request: PlanRequest) -> Plan | RefusedPlanError:
    try:
        return make_plan(request)
    except RefusedPlanError as refused:
        return refused


def neighbour(request: PlanRequest, refused: RefusedPlanError) -> PlanRequest:
    """Return the request that the refusal suggests."""
    changes: dict[str, Any] = dict(refused.suggestion)
    return replace(request, **changes)


def distinct_plans(plans: Iterable[Plan]) -> list[Plan]:
    """Return the first plan of each hash, in the given order."""
    found: dict[str, Plan] = {}
    for plan in plans:
        found.setdefault(plan_hash(plan), plan)
    return list(found.values())


def build_and_check(plan: Plan, output: Path) -> list[str]:
    """Write `plan` into the folder `output`, check it, and return the problems in words."""
    if plan.profile is None or "triton" in plan.profile.formats:
        write_repository(repository_files(plan, version="0"), output)
        report = check_repository(output, CheckOptions())
    else:
        # Of the profiles that Triton can't serve, the YAML for trtllm-serve is what check reads.
        write_repository(format_files("trtllm-serve", plan, version="0"), output)
        report = check_repository(output, CheckOptions())
    errors = [finding for finding in report.findings if finding.severity == "error"]
    return [f"{plan.request}: {finding.code} {finding.message}" for finding in errors]


def render_every_format(plan: Plan) -> int:
    """Return the bytes of all formats that the plan makes sense in."""
    usable = plan.profile.formats if plan.profile is not None else ("triton",)
    rendered = (format_files(name, plan, version="0") for name in usable if name in FORMATS)
    return sum(len(file.content) for files in rendered for file in files)


def save_plans(plans: Iterable[Plan], path: Path) -> None:
    path.write_bytes(pickle.dumps(distinct_plans(plans)))


def _plans(saved: Sequence[str]) -> list[Plan]:
    if saved:
        plans: list[Plan] = pickle.loads(Path(saved[0]).read_bytes())
        return plans
    return distinct_plans(plan for plan in map(plan_or_refusal, all_requests()) if isinstance(plan, Plan))


def main() -> None:
    number, _, of = sys.argv[2].partition("/")
    memory = Path("/dev/shm")  # some 150,000 small files are written; a disk is no part of the question
    mine = _plans(sys.argv[3:])[int(number) :: int(of)]
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        folders = {profile: Path(scratch, profile) for profile in profiles()}
        wrong = [line for plan in mine if plan.profile for line in build_and_check(plan, folders[plan.profile.name])]
    print(json.dumps({"plans": len(mine), "wrong": wrong}))


if __name__ == "__main__":
    main()
