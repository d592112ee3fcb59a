"""The files of a disaggregated pair: a folder for the servers of each side, and what joins them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import PurePosixPath

from deepseek_triton_build.build_errors import RefusedPlanError, UnknownNameError
from deepseek_triton_build.planning.disaggregated import (
    CONFIG_NAME,
    DISAGGREGATED,
    REQUEST_TIMEOUT_S,
    SCRIPT_NAME,
    DisaggregatedPlan,
    server_ports,
)
from deepseek_triton_build.render import shell
from deepseek_triton_build.render.dynamo import DYNAMO_YAML, dynamo_pair_yaml
from deepseek_triton_build.render.formats import DEFAULT_FORMAT, DYNAMO, FORMATS, format_files, refuse_options
from deepseek_triton_build.render.repository_files import File
from deepseek_triton_build.render.stamp import MANIFEST, given_options, packed_texts, sha256, stamped_by
from deepseek_triton_build.render.yaml_text import yaml_lines

TRTLLM_SERVE = "trtllm-serve"
PAIR_FORMATS: Mapping[str, str] = {
    DEFAULT_FORMAT: "a Triton model repository for each side",
    TRTLLM_SERVE: "trtllm-serve's servers and their orchestrator",
    DYNAMO: "one DynamoGraphDeployment for NVIDIA Dynamo",
}
"""Format of a pair -> its title."""


def pair_files(plan: DisaggregatedPlan, *, version: str, format: str = DEFAULT_FORMAT) -> list[File]:
    """Return every file of `plan`, sorted by path, and after them the manifest of the whole.

    Each side is as the same plan is written by itself, so that its folder is started, checked and built by itself too.
    For Dynamo, one file has both.

    :param version: this program's version, for the stamps.
    :raises UnknownNameError: for a format nobody knows.
    :raises RefusedPlanError: for a format that only a single server has.
    """
    if format not in PAIR_FORMATS:
        if format not in FORMATS:
            raise UnknownNameError("format", format, PAIR_FORMATS)
        usable = " or ".join(f"--format {name}" for name in PAIR_FORMATS)
        raise RefusedPlanError(f"profile {DISAGGREGATED} can't be written as {format}; use {usable}")
    if format == DYNAMO:
        files = [_dynamo_file(plan, version)]
    else:
        files = [
            File(PurePosixPath(side) / file.path, file.content, executable=file.executable)
            for side, server in plan.sides.items()
            for file in format_files(format, server, version=version)
        ]
    if format == TRTLLM_SERVE:
        stamp = stamped_by(version, pair_options(plan, format=format), plan.context)
        config = "\n".join([f"# {stamp}", *yaml_lines(plan.orchestrator), ""])
        files += [
            File(PurePosixPath(CONFIG_NAME), config.encode()),
            File(PurePosixPath(SCRIPT_NAME), _orchestrator_sh(plan, stamp).encode(), executable=True),
        ]
    elif plan.request.orchestrator:
        raise RefusedPlanError(
            f"--disagg is for trtllm-serve's orchestrator; leave it out, or add --format {TRTLLM_SERVE}"
        )
    ordered = sorted(files, key=lambda file: file.path)
    return [*ordered, File(PurePosixPath(MANIFEST), _manifest(plan, ordered, version, format))]


def _orchestrator_sh(plan: DisaggregatedPlan, stamp: str) -> str:
    """Return orchestrator.sh, which starts the server that clients ask."""
    ports = server_ports(plan.num_context, plan.num_generation)
    values = {
        "stamp": f"# {stamp}",
        "title": shell.model_title(plan.context),
        "image": plan.context.image_for("trtllm-serve"),
        "config": CONFIG_NAME,
        "starts": ", ".join(f"PORT={port} {side}/serve.sh" for side, numbers in ports.items() for port in numbers),
        "start_timeout": plan.start_timeout_s,
        "request_timeout": REQUEST_TIMEOUT_S,
    }
    return shell.filled("orchestrator.sh", values)


def _dynamo_file(plan: DisaggregatedPlan, version: str) -> File:
    if plan.context.release is None:
        raise RefusedPlanError(f"--format {DYNAMO} is for TensorRT-LLM, not for the {plan.context.engine} engine")
    refuse_options(DYNAMO, plan.context)
    stamp = stamped_by(version, pair_options(plan, format=DYNAMO), plan.context)
    return File(PurePosixPath(DYNAMO_YAML), dynamo_pair_yaml(plan, stamp=stamp).encode())


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


def _manifest(plan: DisaggregatedPlan, files: list[File], version: str, format: str) -> bytes:
    """Return the manifest of the pair, in which the common facts are those of the context servers. A side's texts are
    in the side's own manifest."""
    server = plan.context
    joining = {file.path.as_posix(): file.content for file in files if file.path.parts[0] not in plan.sides}
    record = {
        "version": version,
        "options": pair_options(plan, format=format),
        "format": format,
        "variant": server.variant.name,
        "engine": server.engine,
        "gpu": server.gpu.name if server.gpu else None,
        "gpus": plan.num_gpus or None,
        "precision": server.precision,
        "profile": DISAGGREGATED,
        "release": server.release.version if server.release else None,
        "image": server.image_for(format),
        "context_servers": plan.num_context,
        "generation_servers": plan.num_generation,
        "files": {file.path.as_posix(): sha256(file.content) for file in files},
        "generated": packed_texts(joining),
    }
    return (json.dumps(record, indent=2, allow_nan=False) + "\n").encode()
