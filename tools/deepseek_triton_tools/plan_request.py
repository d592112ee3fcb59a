"""The options of `plan` and `build` -> what the generator is asked for."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deepseek_triton_build import PlanRequest, Workload
from deepseek_triton_build.catalog import find_precision, variant_of_model, variants
from deepseek_triton_build.catalog.profiles import DEFAULT_PROFILE
from deepseek_triton_build.check.checkpoint import read_facts
from deepseek_triton_build.planning.request import DEFAULT_RELEASE
from deepseek_triton_build.releases import container_tag, release_for_container
from deepseek_triton_tools.errors import ToolError


class OptionError(ToolError):
    """What was typed means nothing: exit code 2."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=2)


@dataclass(frozen=True, kw_only=True)
class _Named:
    """What a name stands for."""

    variant: str
    precision: str | None = None
    model: str | None = None


def plan_request(args: argparse.Namespace) -> PlanRequest:
    """The request that `args` (arguments.add_plan_options) make.

    Says on stderr when --model is a folder that isn't here.

    :raises OptionError: for what can't be read as an option's value, and for a Hugging Face name nobody knows.
    :raises UnknownNameError: for a container nobody knows.
    :raises RefusedPlanError: for a container whose release can't be used.
    """
    named = _named(args.variant)
    _refuse_meaningless(args, named.variant)
    model = args.model or named.model
    precision = _precision(args.precision, named, args.model)
    if args.model and (note := _note_on_model(args.model)):
        print(f"note: {note}", file=sys.stderr)
    return PlanRequest(
        variant=named.variant,
        gpu=args.gpu,
        num_gpus=args.gpus,
        precision=precision,
        profile=args.profile or DEFAULT_PROFILE,
        release=release_for_container(args.image).version if args.image else args.trtllm or DEFAULT_RELEASE,
        container=container_tag(args.image) if args.image else None,
        workload=Workload(isl=args.isl, osl=args.osl, concurrency=args.concurrency),
        mtp=args.mtp,
        relaxed_acceptance=args.relaxed_acceptance,
        kv_dtype=args.kv_cache_dtype,
        pipeline_parallel_size=args.pp,
        engine=args.engine,
        preset=args.preset,
        model=model,
        allow_unpublished=args.allow_unpublished,
        overrides=tuple(row for text in args.set for row in overrides(text)),
    )


_FOR_GPUS = (
    "--gpu",
    "--gpus",
    "--precision",
    "--profile",
    "--trtllm",
    "--image",
    "--isl",
    "--osl",
    "--concurrency",
    "--mtp",
    "--relaxed-acceptance",
    "--kv-cache-dtype",
    "--set",
)
"""Options that mean nothing without TensorRT-LLM."""


def _refuse_meaningless(args: argparse.Namespace, variant: str) -> None:
    """An option that changes nothing is refused, not accepted and forgotten."""
    if variant not in variants() or variants()[variant].checkpoints:
        return
    values = {option: getattr(args, option[2:].replace("-", "_")) for option in _FOR_GPUS}
    given = [option for option, value in values.items() if value is not None and value is not False and value != []]
    if given:
        raise OptionError(f"{variant} runs on the spot, without TensorRT-LLM: leave out {', '.join(given)}")


def is_path(model: str) -> bool:
    """A folder of this machine or of the container's, rather than a Hugging Face name (`owner/name`)."""
    return model.startswith(("/", ".", "~")) or model.count("/") > 1 or Path(model).is_dir()


def overrides(text: str) -> Iterator[tuple[str, Any]]:
    """What one --set says: several settings when the value is a mapping. Values are hashable.

    :raises OptionError: when it is not KEY=VALUE with a value in YAML.
    """
    key, equals, written = text.partition("=")
    key = key.strip()
    if not equals or not all(part.isidentifier() for part in key.split(".")):
        raise OptionError(f"--set {text}: expected KEY=VALUE, as in --set kv_cache_config.dtype=fp8")
    try:
        value = yaml.safe_load(written)
    except yaml.YAMLError as error:
        problem = " ".join(str(getattr(error, "problem", error)).split())
        raise OptionError(f"--set {text}: the value is not YAML: {problem}; quote it") from error
    yield from _flat(key, value, text)


def _flat(key: str, value: Any, text: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _flat(f"{key}.{name}", below, text)
    else:
        yield key, _hashable(value, text)


def _hashable(value: Any, text: str) -> Any:
    if isinstance(value, list):
        return tuple(_hashable(item, text) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = "a mapping here" if isinstance(value, dict) else f"a {type(value).__name__}"
    raise OptionError(f"--set {text}: expected numbers, text, true, false, null or lists of them, found {kind}")


def _named(given: str) -> _Named:
    """VARIANT as a variant, from its own name or that of a checkpoint on Hugging Face."""
    if given.lower() in variants():
        return _Named(variant=given.lower())
    if Path(given).is_dir() or given.startswith(("/", ".", "~")):
        raise OptionError(_about_folder(given))
    if "/" not in given:
        return _Named(variant=given)  # the planner names the nearest
    found = variant_of_model(given)
    if found is None:
        raise OptionError(_unknown_model(given))
    variant, checkpoint = found
    model = None if given == checkpoint.model else given  # the planner's own choice is not a wish of the user's
    return _Named(variant=variant.name, precision=checkpoint.precision, model=model)


def _about_folder(given: str) -> str:
    """A folder tells DeepSeek-V3's architecture from V3.2's, but not R1 from V3."""
    name = read_facts(Path(given), given)[0].class_name if (Path(given) / "config.json").is_file() else None
    alike = [v.name for v in variants().values() if v.architecture and name in (None, v.architecture.class_name)]
    what = f"{given} is a path" + (f", of a {name}" if name else "")
    if not alike:
        return f"{what}, which is no model that is served here; known so far: {', '.join(variants())}"
    return f"{what}; say which variant it is ({', '.join(alike)}) and give it as --model: {alike[0]} --model {given}"


def _unknown_model(given: str) -> str:
    models = [checkpoint.model for variant in variants().values() for checkpoint in variant.checkpoints.values()]
    nearest = difflib.get_close_matches(given, models, n=1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    return (
        f"unknown Hugging Face name {given!r}: {hint}known so far: {', '.join(models)}; for a copy under another name "
        f"give the variant and --model {given}"
    )


def _precision(asked: str | None, named: _Named, model: str | None) -> str | None:
    """What was asked for, or what the checkpoint says by its name or, in a folder here, by its files.

    :raises OptionError: when they contradict each other.
    """
    of_checkpoint = (_precision_of(model, named.variant) if model else None) or named.precision
    if asked is None:
        return of_checkpoint
    precision = find_precision(asked)
    if of_checkpoint is not None and precision != of_checkpoint:
        raise OptionError(
            f"--precision {asked}: the checkpoint named holds {of_checkpoint} weights; leave --precision out, or name "
            f"{named.variant} by itself"
        )
    return precision


def _precision_of(model: str, variant: str) -> str | None:
    """The precision of --model's weights, where it can be known.

    :raises OptionError: when it is a checkpoint of another variant.
    """
    served = variants().get(variant)
    by_name = variant_of_model(model)
    if by_name is not None:
        if by_name[0] is not served:
            raise OptionError(f"--model {model} is {by_name[0].name}, not {variant}")
        return by_name[1].precision
    if served is None or served.architecture is None or not (Path(model) / "config.json").is_file():
        return None
    facts, _ = read_facts(Path(model), model)
    if facts.architecture not in (None, served.architecture):
        expected, found = served.architecture.class_name, facts.class_name
        raise OptionError(f"--model {model}: expected a {expected} for {variant}, its config.json says {found}")
    return facts.precision


def _note_on_model(model: str) -> str | None:
    """What may be overlooked about the --model given."""
    if not is_path(model):
        known = "/" not in model or variant_of_model(model)
        return None if known else f"{model} is not a folder here; the engine will take it for a Hugging Face name"
    if not model.startswith("/"):
        return f"--model {model} is written as given; in the container it is looked up from where the server starts"
    return None if Path(model).exists() else f"{model} is not on this machine; the container must have it there"
