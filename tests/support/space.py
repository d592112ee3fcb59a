"""The whole space of requests to the generator: tests/build/test_space.py walks it, tests/bench times it.

python tests/support/space.py check 2           # builds and checks every distinct plan in every format, in 2 processes
python tests/support/space.py build 0/2         # the same for every second plan; the problems as JSON
python tests/support/space.py build 0/2 FILE    # the same for the plans that `save_plans` wrote to FILE
"""

import itertools
import json
import pickle
import random
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from deepseek_triton_build import (
    FORMATS,
    Plan,
    PlanRequest,
    RefusedPlanError,
    format_files,
    make_plan,
    write_repository,
)
from deepseek_triton_build.arithmetic.gpu_memory import GPU_COUNTS
from deepseek_triton_build.catalog import PRECISIONS, RELEASES, gpus, profiles, variants
from deepseek_triton_build.check import CheckOptions, check_repository
from deepseek_triton_build.render.stamp import plan_hash


def all_requests():
    """Yield every variant x GPU x count x precision x profile x release, for TensorRT-LLM."""
    precisions = [name for name in PRECISIONS if name != "w4a16"]  # vLLM's: rule H007 refuses all of it
    axes = (variants(), gpus(), (None, *GPU_COUNTS), precisions, profiles(), RELEASES)
    for variant, gpu, count, precision, profile, release in itertools.product(*axes):
        yield PlanRequest(
            variant=variant,
            gpu=gpu,
            num_gpus=count,
            precision=precision,
            profile=profile,
            release=release,
            engine=engine_of(variant),
        )


def engine_of(variant):
    """Return the engine to ask for: none where TensorRT-LLM is the variant's own."""
    return None if variants()[variant].engines[0] == "tensorrt_llm" else "tensorrt_llm"


def plan_or_refusal(request):
    try:
        return make_plan(request)
    except RefusedPlanError as refused:
        return refused


def neighbour(request, refused):
    """Return the request that the refusal suggests."""
    changes = dict(refused.suggestion)
    return replace(request, **changes)


def distinct_plans(plans):
    """Return the first plan of each hash, in the given order."""
    found = {}
    for plan in plans:
        found.setdefault(plan_hash(plan), plan)
    return list(found.values())


T = TypeVar("T")


def pairwise(candidates, axes):
    """Return a sample that has each pair of values of any two axes that occurs in `candidates`."""
    seen = set()
    sample = []
    for candidate in candidates:
        pairs = set(itertools.combinations(enumerate(axes(candidate)), 2))
        if not pairs <= seen:
            sample.append(candidate)
            seen |= pairs
    return sample


def some_requests():
    """Return a pairwise sample of `all_requests`, the same each time, and 1,000 more, because most are refused."""
    requests = list(all_requests())
    random.Random(1).shuffle(requests)
    pairs = pairwise(
        requests, lambda one: (one.variant, one.gpu, one.num_gpus, one.precision, one.profile, one.release)
    )
    return [*dict.fromkeys([*pairs, *requests[:1000]])]


def plan_axes(plan):
    assert plan.gpu is not None
    assert plan.profile is not None
    assert plan.release is not None
    return (
        plan.variant.name,
        plan.gpu.name,
        plan.world_size,
        plan.precision,
        plan.profile.name,
        plan.release.version,
        plan.layout.attention_dp,
        plan.layout.expert_parallel_size,
    )


def build_and_check(plan, output):
    """Write `plan` into folders below `output`, in every format, check them, and return the problems in words."""
    assert plan.profile is not None
    problems = []
    for name in plan.profile.formats:
        write_repository(format_files(name, plan, version="0"), output / name, force=True)
        report = check_repository(output / name, CheckOptions())
        wrong = [finding for finding in report.findings if finding.severity == "error"]
        problems += [f"{name}: {plan.request}: {finding.code} {finding.message}" for finding in wrong]
        if [model.variant for model in report.models] != [plan.variant.name]:
            problems.append(f"{name}: {plan.request}: not checked as {plan.variant.name}")
    return problems


def render_every_format(plan):
    """Return the bytes of all formats that the plan makes sense in."""
    usable = plan.profile.formats if plan.profile is not None else ("triton",)
    rendered = (format_files(name, plan, version="0") for name in usable if name in FORMATS)
    return sum(len(file.content) for files in rendered for file in files)


def save_plans(plans, path):
    path.write_bytes(pickle.dumps(distinct_plans(plans)))


def _plans(saved):
    if saved:
        return pickle.loads(Path(saved[0]).read_bytes())
    return distinct_plans(plan for plan in map(plan_or_refusal, all_requests()) if isinstance(plan, Plan))


def check_all(processes, saved):
    """Build and check every distinct plan in every format, in several processes, and print what is wrong."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(saved[0]) if saved else Path(scratch, "plans")
        if not saved:
            save_plans((plan for plan in map(plan_or_refusal, all_requests()) if isinstance(plan, Plan)), file)
        shares = [
            subprocess.Popen([sys.executable, __file__, "build", f"{n}/{processes}", file], stdout=subprocess.PIPE)
            for n in range(processes)
        ]
        results = [json.loads(share.communicate()[0]) for share in shares]
    wrong = [line for result in results for line in result["wrong"]]
    print("\n".join(wrong[:50]))
    plans, folders = (sum(result[what] for result in results) for what in ("plans", "folders"))
    print(f"{plans} plans, {folders} folders, {len(wrong)} errors")
    sys.exit(bool(wrong))


def main():
    if sys.argv[1] == "check":
        check_all(int(sys.argv[2]) if len(sys.argv) > 2 else 2, sys.argv[3:])
    number, _, of = sys.argv[2].partition("/")
    memory = Path("/dev/shm")  # some 150,000 small files are written; a disk is no part of the question
    mine = _plans(sys.argv[3:])[int(number) :: int(of)]
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        folders = {profile: Path(scratch, profile) for profile in profiles()}
        wrong = [line for plan in mine if plan.profile for line in build_and_check(plan, folders[plan.profile.name])]
    count = sum(len(plan.profile.formats) for plan in mine if plan.profile)
    print(json.dumps({"plans": len(mine), "folders": count, "wrong": wrong}))


if __name__ == "__main__":
    main()
