"""The formats that a plan, or a disaggregated pair of plans, can be written in: a Triton repository, or scripts."""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from deepseek_triton_build.build_errors import RefusedPlanError, UnknownNameError
from deepseek_triton_build.data.catalog import find_variant
from deepseek_triton_build.data.profiles import ANY_WORKLOAD, DISAGGREGATED, Workload, profiles
from deepseek_triton_build.data.releases import CANDIDATES, DEFAULT_RELEASE, find_dynamo, without_image
from deepseek_triton_build.planning.disaggregated import REQUEST_TIMEOUT_S, DisaggregatedPlan, server_ports
from deepseek_triton_build.planning.plan import Plan, make_plan
from deepseek_triton_build.planning.plan_request import PYTHON_BACKEND, PlanRequest
from deepseek_triton_build.planning.trtllm_sizes import LONGEST_ANSWER
from deepseek_triton_build.render import shell
from deepseek_triton_build.render import trtllm_commands as trtllm
from deepseek_triton_build.render import vllm_commands as vllm
from deepseek_triton_build.render.dynamo import DYNAMO_YAML, dynamo_pair_yaml, dynamo_yaml
from deepseek_triton_build.render.model_configuration import yaml_lines
from deepseek_triton_build.render.repository_files import MODEL, File, model_files, settings_files, stamped, text_file
from deepseek_triton_build.render.stamp import MANIFEST, given_options, manifest, stamp_line, stamped_by
from deepseek_triton_build.render.trtllm_commands import quickstart_sh
from deepseek_triton_build.rules.orchestrator import CONFIG_NAME, SCRIPT_NAME

DEFAULT_FORMAT = "triton"
VLLM_SERVE = "vllm-serve"
TRTLLM_SERVE = "trtllm-serve"
DYNAMO = "dynamo"
PAIR_FORMATS: Mapping[str, str] = {
    DEFAULT_FORMAT: "a Triton model repository for each side",
    TRTLLM_SERVE: "trtllm-serve's servers and their orchestrator",
    DYNAMO: "one DynamoGraphDeployment for NVIDIA Dynamo",
}
"""Format of a pair -> its title."""
EVALUATION = Workload(isl=8192, osl=LONGEST_ANSWER)
"""The lengths that an evaluation is planned for: trtllm-eval's own max_num_tokens, and the answers to GPQA, to which
trtllm-eval gives as many tokens as R1's model card (TensorRT-LLM tensorrt_llm/evaluate)."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """One form that a plan can be written in."""

    title: str
    start: str
    """The script that runs what was written."""
    files: Callable[[Plan, str], list[File]]
    """A function from a plan and its stamp to the files, but for the manifest."""
    folder: str = ""
    """Where the manifest lies."""


def _program(program: str, script: str, render: Callable[..., str], title: str) -> Format:
    """Return the format for one of TensorRT-LLM's programs.

    :param render: serve_sh, bench_sh or eval_sh, which writes the script.
    """

    def files(plan: Plan, stamp: str) -> list[File]:
        args = trtllm.arguments(plan, program)
        config = trtllm.extra_llm_api_config(args, stamp=stamp, program=program, script=script)
        scripts = {script: render}
        if program == "trtllm-bench" and plan.num_nodes > 1:
            scripts["bench.slurm"] = trtllm.bench_slurm
        return [
            text_file(trtllm.YAML_NAME, config),
            *settings_files(plan, stamp),
            *(text_file(name, write(plan, args, stamp=stamp), executable=True) for name, write in scripts.items()),
        ]

    return Format(title=title, start=script, files=files)


def _scripts(title: str, scripts: Mapping[str, Callable[..., str]]) -> Format:
    """Return a format that has scripts alone, the first of which starts what was written."""

    def files(plan: Plan, stamp: str) -> list[File]:
        return [text_file(name, write(plan, stamp=stamp), executable=True) for name, write in scripts.items()]

    return Format(title=title, start=next(iter(scripts)), files=files)


FORMATS: Mapping[str, Format] = {
    "triton": Format(title="a Triton model repository", start="start.sh", files=model_files, folder=MODEL),
    TRTLLM_SERVE: _program(TRTLLM_SERVE, "serve.sh", trtllm.serve_sh, "TensorRT-LLM's OpenAI-compatible server"),
    "trtllm-bench": _program("trtllm-bench", "bench.sh", trtllm.bench_sh, "TensorRT-LLM's throughput benchmark"),
    "trtllm-eval": _program("trtllm-eval", "eval.sh", trtllm.eval_sh, "TensorRT-LLM's accuracy evaluation"),
    VLLM_SERVE: _scripts(
        "vLLM's OpenAI-compatible server, and its benchmark", {"serve.sh": vllm.serve_sh, "bench.sh": vllm.bench_sh}
    ),
    DYNAMO: Format(
        title="a DynamoGraphDeployment for NVIDIA Dynamo with TensorRT-LLM",
        start=DYNAMO_YAML,
        files=lambda plan, stamp: [text_file(DYNAMO_YAML, dynamo_yaml(plan, stamp=stamp))],
    ),
    "quickstart": _scripts(
        "TensorRT-LLM's quickstart_advanced.py, a few prompts once", {"quickstart.sh": quickstart_sh}
    ),
}


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
    if name == DEFAULT_FORMAT and plan.release is not None and not plan.release.containers:
        named = " or ".join(f"--format {entry}" for entry in usable)
        cause = f"TensorRT-LLM {plan.release.version}: {without_image()}"
        other = "--engine vllm" if plan.variant.min_release in CANDIDATES else f"--trtllm {DEFAULT_RELEASE}"
        raise RefusedPlanError(cause, fix=f"use {named}, or {other}")
    if name not in usable:
        of_profile = plan.profile if plan.vllm is None else None
        what = f"profile {of_profile.name}" if of_profile is not None else f"the {plan.engine} engine"
        engine = "tensorrt_llm" if plan.vllm is not None else "vllm" if name == VLLM_SERVE else ""
        has_other = engine in plan.variant.engines and not plan.carries_checkpoint
        named = f"--engine {engine}" if has_other else " or ".join(f"--format {entry}" for entry in usable)
        raise RefusedPlanError(f"{what} can't be written as {name} ({FORMATS[name].title}); use {named}")
    refuse_options(name, plan)
    files = FORMATS[name].files(plan, stamp_line(plan, version, format=name))
    return stamped(plan, files, version=version, format=name, folder=FORMATS[name].folder)


def refuse_options(name: str, plan: Plan) -> None:
    """Raise RefusedPlanError for options that only another format than `name` has a use for."""
    request = plan.request
    for_triton = {"--no-decoupled": not request.decoupled, "--backend-name": request.backend_name != PYTHON_BACKEND}
    useless = " and ".join(option for option, is_set in for_triton.items() if is_set)
    if useless and name != DEFAULT_FORMAT:
        what = f"{name} ({FORMATS[name].title})"
        raise RefusedPlanError(f"{useless}: only Triton has a use for it, {what} has none")
    for_dynamo = {"--dynamo": request.dynamo is not None, "--kv-routing": request.kv_routing}
    useless = " and ".join(option for option, is_set in for_dynamo.items() if is_set)
    if useless and name != DYNAMO:
        raise RefusedPlanError(f"{useless}: only for --format {DYNAMO}; leave it out, or add that")


def usable_formats(plan: Plan) -> tuple[str, ...]:
    """Return the formats that make sense for the plan. A checkpoint that travels in a repository needs one."""
    if plan.vllm is not None:
        return (DEFAULT_FORMAT,) if plan.carries_checkpoint else (DEFAULT_FORMAT, VLLM_SERVE)
    if plan.profile is None or plan.release is None:
        return (DEFAULT_FORMAT,)
    # Dynamo serves what trtllm-serve does, but one side of a pair alone serves nothing.
    dynamo = (DYNAMO,) if "trtllm-serve" in plan.profile.formats and plan.profile.name not in ("ctx", "gen") else ()
    formats = (*plan.profile.formats, *dynamo)
    return formats if plan.release.containers else tuple(name for name in formats if name != DEFAULT_FORMAT)


def format_request(name: str, request: PlanRequest) -> PlanRequest:
    """Return `request` with what the format `name` has of its own and is not asked for: workload, release or engine."""
    if name == VLLM_SERVE and request.engine is None:
        return replace(request, engine="vllm")
    if name == DYNAMO and (request.engine or find_variant(request.variant).engines[0]) == "tensorrt_llm":
        nearest = find_dynamo(request.dynamo).keys_of  # to the build in its container
        return request if request.release or nearest == DEFAULT_RELEASE else replace(request, release=nearest)
    if name != "trtllm-eval" or request.workload != ANY_WORKLOAD:
        return request
    # An evaluation's prompts would be too long for the sizes of a benchmark.
    limits = make_plan(request).canonical
    fits = limits.get("enable_chunked_prefill") or limits.get("max_num_tokens", EVALUATION.isl) >= EVALUATION.isl
    return request if fits else replace(request, workload=EVALUATION)


def pair_files(plan: DisaggregatedPlan, *, version: str, format: str = DEFAULT_FORMAT) -> list[File]:
    """Return every file of `plan`, sorted by path, and after them the manifest of the whole.

    Each side is as the same plan is written by itself, so that its folder is started, checked and built by itself too.
    For Dynamo, one file has both.

    :param version: this program's version, for the stamps.
    :raises UnknownNameError: for a format nobody knows.
    :raises RefusedPlanError: for a format that only a single server has.
    """
    if format not in FORMATS:
        raise UnknownNameError("format", format, PAIR_FORMATS)
    if format not in PAIR_FORMATS:
        usable = " or ".join(f"--format {name}" for name in PAIR_FORMATS)
        raise RefusedPlanError(f"profile {DISAGGREGATED} can't be written as {format}; use {usable}")
    options = pair_options(plan, format=format)
    joining = _joining_files(plan, format, stamped_by(version, options, plan.context))
    files = (
        []
        if format == DYNAMO
        else [
            File(PurePosixPath(side) / file.path, file.content, executable=file.executable)
            for side, server in plan.sides.items()
            for file in format_files(format, server, version=version)
        ]
    )
    if format != TRTLLM_SERVE and plan.request.orchestrator:
        raise RefusedPlanError(
            f"--disagg is for trtllm-serve's orchestrator; leave it out, or add --format {TRTLLM_SERVE}"
        )
    ordered = sorted([*files, *joining], key=lambda file: file.path)
    text = manifest(
        plan.context,
        version=version,
        options=options,
        format=format,
        files={file.path.as_posix(): file.content for file in ordered},
        # The common facts are those of the context servers.
        more={
            "gpus": plan.num_gpus or None,
            "profile": DISAGGREGATED,
            "context_servers": plan.num_context,
            "generation_servers": plan.num_generation,
        },
        # A side's texts are in the side's own manifest.
        generated={file.path.as_posix(): file.content for file in joining},
    )
    return [*ordered, File(PurePosixPath(MANIFEST), text)]


def _joining_files(plan: DisaggregatedPlan, format: str, stamp: str) -> list[File]:
    """Return what joins the two sides."""
    if format == TRTLLM_SERVE:
        config = "\n".join([f"# {stamp}", *yaml_lines(plan.orchestrator), ""])
        ports = server_ports(plan.num_context, plan.num_generation)
        values = {
            "stamp": f"# {stamp}",
            "title": shell.model_title(plan.context),
            "image": plan.context.image_for(TRTLLM_SERVE),
            "config": CONFIG_NAME,
            "starts": ", ".join(f"PORT={port} {side}/serve.sh" for side, numbers in ports.items() for port in numbers),
            "start_timeout": plan.start_timeout_s,
            "request_timeout": REQUEST_TIMEOUT_S,
        }
        script = shell.filled("orchestrator.sh", values)
        return [text_file(CONFIG_NAME, config), text_file(SCRIPT_NAME, script, executable=True)]
    if format != DYNAMO:
        return []
    if plan.context.release is None:
        raise RefusedPlanError(f"--format {DYNAMO} is for TensorRT-LLM, not for the {plan.context.engine} engine")
    refuse_options(DYNAMO, plan.context)
    return [text_file(DYNAMO_YAML, dynamo_pair_yaml(plan, stamp=stamp))]


def pair_options(plan: DisaggregatedPlan, *, format: str = DEFAULT_FORMAT) -> str:
    """Return the words, quoted for a shell, that make `build` write the same files again; --output is left out."""
    request = plan.request
    words = [request.both.variant]
    for option, value in (("--gpu", request.both.gpu), ("--gpus", request.both.num_gpus)):
        words += [] if value is None else [option, str(value)]
    words += given_options(request.both)
    words += ["--context-servers", str(plan.num_context), "--generation-servers", str(plan.num_generation)]
    given = (
        ("--context-set", request.context),
        ("--generation-set", request.generation),
        ("--disagg", request.orchestrator),
    )
    for option, changes in given:
        for key, value in changes:
            words += [option, f"{key}={json.dumps(value, allow_nan=False)}"]
    if format != DEFAULT_FORMAT:
        words += ["--format", format]
    return shlex.join(words)
