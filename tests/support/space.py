"""The whole space of requests to the generator, which tests/build/test_space.py walks.

python tests/support/space.py check 2     # builds and checks every distinct plan in every format, in 2 processes
"""

import itertools
import multiprocessing
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from deepseek_triton_build import Plan, PlanRequest, RefusedPlanError, format_files, make_plan, write_repository
from deepseek_triton_build.arithmetic.gpu_memory import GPU_COUNTS
from deepseek_triton_build.catalog import CANDIDATES, PRECISIONS, RELEASES, gpus, profiles, variants
from deepseek_triton_build.check import CheckOptions, check_repository
from deepseek_triton_build.render.stamp import plan_hash


def all_requests():
    """Yield every variant x GPU x count x precision x profile x release, for TensorRT-LLM in Triton's containers."""
    precisions = [name for name in PRECISIONS if name not in ("mxfp4", "w4a16")]  # vLLM's: rule H007 refuses w4a16
    served = [
        name
        for name, variant in variants().items()
        if "tensorrt_llm" in variant.engines and variant.min_release not in CANDIDATES
    ]
    axes = (served, gpus(), (None, *GPU_COUNTS), precisions, profiles(), RELEASES)
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
    """Return a pairwise sample of `all_requests`, the same each time, and 750 more, because most are refused.

    Variants with a single profile and GPUs for few models are refused in nearly all of them, so each is also asked for
    plainly.
    """
    requests = list(all_requests())
    random.Random(1).shuffle(requests)
    pairs = pairwise(
        requests, lambda one: (one.variant, one.gpu, one.num_gpus, one.precision, one.profile, one.release)
    )
    plain = [
        one
        for one in requests
        if (one.num_gpus, one.profile, one.release)
        == (None, variants()[one.variant].profile or "balanced", RELEASES[0])
        and (one.variant == "deepseek-r1" or (one.gpu, one.precision) == ("h200", "fp8"))
    ]
    return [*dict.fromkeys([*pairs, *requests[:750], *plain])]


def plan_axes(plan):
    layout = plan.layout
    names = plan.variant.name, plan.gpu.name, plan.precision, plan.profile.name, plan.release.version
    return *names, plan.world_size, layout.attention_dp, layout.expert_parallel_size


def build_and_check(plan, output, formats=()):
    """Write `plan` below `output` in the formats, or in all, check the folders, and return the problems in words."""
    problems = []
    for name in formats or plan.profile.formats:
        write_repository(format_files(name, plan, version="0"), output / name, force=True)
        report = check_repository(output / name, CheckOptions())
        wrong = [finding for finding in report.findings if finding.severity == "error"]
        problems += [f"{name}: {plan.request}: {finding.code} {finding.message}" for finding in wrong]
        if [model.variant for model in report.models] != [plan.variant.name]:
            problems.append(f"{name}: {plan.request}: not checked as {plan.variant.name}")
    return problems


def check_in_scratch(plan):
    memory = Path("/dev/shm")  # some 150,000 small files are written; a disk is no part of the question
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        return build_and_check(plan, Path(scratch))


def main():
    plans = distinct_plans(plan for plan in map(plan_or_refusal, all_requests()) if isinstance(plan, Plan))
    with multiprocessing.get_context("fork").Pool(int(sys.argv[2]) if len(sys.argv) > 2 else 2) as pool:
        wrong = [line for lines in pool.imap(check_in_scratch, plans, chunksize=20) for line in lines]
    print("\n".join(wrong[:50]))
    print(f"{len(plans)} plans, {sum(len(plan.profile.formats) for plan in plans)} folders, {len(wrong)} errors")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
