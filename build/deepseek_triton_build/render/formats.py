"""The formats that one plan can be written in: a Triton repository, or scripts for TensorRT-LLM's own programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from deepseek_triton_build.build_errors import RefusedPlanError, UnknownNameError
from deepseek_triton_build.data.dynamo_releases import find_dynamo
from deepseek_triton_build.data.profiles import ANY_WORKLOAD, Workload, profiles
from deepseek_triton_build.data.releases import DEFAULT_RELEASE
from deepseek_triton_build.planning.plan import Plan, make_plan
from deepseek_triton_build.planning.plan_request import PYTHON_BACKEND, PlanRequest
from deepseek_triton_build.planning.trtllm_sizes import LONGEST_ANSWER
from deepseek_triton_build.render import trtllm_commands as trtllm
from deepseek_triton_build.render import vllm_commands as vllm
from deepseek_triton_build.render.dynamo import DYNAMO_YAML, dynamo_yaml
from deepseek_triton_build.render.quickstart import quickstart_sh
from deepseek_triton_build.render.repository_files import File, repository_files, stamped
from deepseek_triton_build.render.stamp import stamp_line
from deepseek_triton_build.render.yaml_text import settings_file_text

DEFAULT_FORMAT = "triton"
VLLM_SERVE = "vllm-serve"
DYNAMO = "dynamo"


@dataclass(frozen=True, kw_only=True)
class Format:
    """One form that a plan can be written in."""

    title: str
    start: str
    """The script that runs what was written."""
    files: Callable[[Plan, str], list[File]]
    """A function from a plan and this program's version to the files."""


def format_files(name: str, plan: Plan, *, version: str) -> list[File]:
    """Return every file of `plan` in the format `name`; the same plan and version give the same bytes.

    :param version: this program's version, for the stamp.
    :raises UnknownNameError: for a format nobody knows.
    :raises RefusedPlanError: for a format that makes no sense for the plan; the message names one that does.
    """
    if name not in FORMATS:
        note = f"{name} is a profile: --profile {name}" if name in profiles() else ""
        raise UnknownNameError("format", name, FORMATS, note=note)
    usable = usable_formats(plan)
    if name not in usable:
        of_profile = plan.profile if plan.vllm is None else None
        what = f"profile {of_profile.name}" if of_profile is not None else f"the {plan.engine} engine"
        named = "--engine vllm" if name == VLLM_SERVE and plan.vllm is None and not plan.carries_checkpoint else ""
        named = named or " or ".join(f"--format {entry}" for entry in usable)
        raise RefusedPlanError(f"{what} can't be written as {name} ({FORMATS[name].title}); use {named}")
    refuse_options(name, plan)
    return FORMATS[name].files(plan, version)


def refuse_options(name: str, plan: Plan) -> None:
    """Raise RefusedPlanError for options that only another format than `name` has a use for."""
    for_triton = {
        "--no-decoupled": not plan.request.decoupled,
        "--backend-name": plan.request.backend_name != PYTHON_BACKEND,
    }
    given = [option for option, is_given in for_triton.items() if is_given]
    if given and name != DEFAULT_FORMAT:
        what = f"{name} ({FORMATS[name].title})"
        raise RefusedPlanError(f"{' and '.join(given)}: only Triton has a use for it, {what} has none")
    for_dynamo = {"--dynamo": plan.request.dynamo is not None, "--kv-routing": plan.request.kv_routing}
    given = [option for option, is_given in for_dynamo.items() if is_given]
    if given and name != DYNAMO:
        raise RefusedPlanError(f"{' and '.join(given)}: only for --format {DYNAMO}; leave it out, or add that")


def usable_formats(plan: Plan) -> tuple[str, ...]:
    """Return the formats that make sense for the plan. A checkpoint that travels in a repository needs one."""
    if plan.vllm is not None:
        return (DEFAULT_FORMAT,) if plan.carries_checkpoint else (DEFAULT_FORMAT, VLLM_SERVE)
    if plan.profile is None:
        return (DEFAULT_FORMAT,)
    # Dynamo serves what trtllm-serve does, but one side of a pair alone serves nothing.
    dynamo = (DYNAMO,) if "trtllm-serve" in plan.profile.formats and plan.profile.name not in ("ctx", "gen") else ()
    return (*plan.profile.formats, *dynamo)


EVALUATION = Workload(isl=8192, osl=LONGEST_ANSWER)
"""The lengths that an evaluation is planned for: trtllm-eval's own max_num_tokens, and the answers to GPQA, to which
trtllm-eval gives as many tokens as R1's model card (TensorRT-LLM tensorrt_llm/evaluate)."""


def format_request(name: str, request: PlanRequest) -> PlanRequest:
    """Return `request` with the workload of the format `name`, where it has one and none is asked for.

    Of a benchmark's sizes, an evaluation's prompts would be too long. For Dynamo, the release is the nearest to the
    build in its container.
    """
    if name == DYNAMO:
        nearest = find_dynamo(request.dynamo).keys_of
        return replace(request, release=nearest) if request.release == DEFAULT_RELEASE else request
    if name != "trtllm-eval" or request.workload != ANY_WORKLOAD:
        return request
    limits = make_plan(request).canonical
    fits = limits.get("enable_chunked_prefill") or limits.get("max_num_tokens", EVALUATION.isl) >= EVALUATION.isl
    return request if fits else replace(request, workload=EVALUATION)


def _quickstart(plan: Plan, version: str) -> list[File]:
    text = quickstart_sh(plan, stamp=stamp_line(plan, version, format="quickstart"))
    script = File(PurePosixPath("quickstart.sh"), text.encode(), executable=True)
    return stamped(plan, [script], version=version, format="quickstart")


def _program(program: str, script: str, render: Callable[..., str], title: str) -> Format:
    """Return the format for one of TensorRT-LLM's programs.

    :param render: serve_sh, bench_sh or eval_sh, which writes the script.
    """

    def files(plan: Plan, version: str) -> list[File]:
        stamp = stamp_line(plan, version, format=program)
        args = trtllm.arguments(plan, program)
        config = trtllm.extra_llm_api_config(args, stamp=stamp, program=program, script=script)
        written = [
            File(PurePosixPath(trtllm.YAML_NAME), config.encode()),
            *(File(PurePosixPath(file.name), settings_file_text(file, stamp=stamp).encode()) for file in plan.files),
            File(PurePosixPath(script), render(plan, args, stamp=stamp).encode(), executable=True),
        ]
        if program == "trtllm-bench" and plan.num_nodes > 1:
            text = trtllm.bench_slurm(plan, args, stamp=stamp)
            written.append(File(PurePosixPath("bench.slurm"), text.encode(), executable=True))
        return stamped(plan, written, version=version, format=program)

    return Format(title=title, start=script, files=files)


def _dynamo(plan: Plan, version: str) -> list[File]:
    text = dynamo_yaml(plan, stamp=stamp_line(plan, version, format=DYNAMO))
    return stamped(plan, [File(PurePosixPath(DYNAMO_YAML), text.encode())], version=version, format=DYNAMO)


def _vllm_serve(plan: Plan, version: str) -> list[File]:
    stamp = stamp_line(plan, version, format=VLLM_SERVE)
    scripts = {"serve.sh": vllm.serve_sh, "bench.sh": vllm.bench_sh}
    files = [
        File(PurePosixPath(name), render(plan, stamp=stamp).encode(), executable=True)
        for name, render in scripts.items()
    ]
    return stamped(plan, files, version=version, format=VLLM_SERVE)


_QUICKSTART = "TensorRT-LLM's quickstart_advanced.py, a few prompts once"
FORMATS: Mapping[str, Format] = {
    "triton": Format(title="a Triton model repository", start="start.sh", files=repository_files),
    "trtllm-serve": _program("trtllm-serve", "serve.sh", trtllm.serve_sh, "TensorRT-LLM's OpenAI-compatible server"),
    "trtllm-bench": _program("trtllm-bench", "bench.sh", trtllm.bench_sh, "TensorRT-LLM's throughput benchmark"),
    "trtllm-eval": _program("trtllm-eval", "eval.sh", trtllm.eval_sh, "TensorRT-LLM's accuracy evaluation"),
    VLLM_SERVE: Format(title="vLLM's OpenAI-compatible server, and its benchmark", start="serve.sh", files=_vllm_serve),
    DYNAMO: Format(title="a DynamoGraphDeployment for NVIDIA Dynamo", start=DYNAMO_YAML, files=_dynamo),
    "quickstart": Format(title=_QUICKSTART, start="quickstart.sh", files=_quickstart),
}
