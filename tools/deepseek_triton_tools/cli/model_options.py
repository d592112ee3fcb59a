"""VARIANT, --model and --precision of `plan` and `build`: the model that is meant, and the weights it has."""

import argparse
import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from deepseek_triton_build.catalog import (
    Architecture,
    Variant,
    checkpoint_named,
    cut_summary,
    find_precision,
    foreign_weights,
    full_name,
    how_to_plan,
    precision_in_name,
    title_of,
    variant_of_model,
    variants,
)
from deepseek_triton_build.text import is_path, nearest_name, safe_name, short_repr
from deepseek_triton_tools.cli.plan_options import OptionError, brief
from deepseek_triton_tools.terminal.output_streams import complain

_DISTILLED = "a distilled model has the architecture of the Qwen or Llama it was made of, which is not served here"


class ModelChoice(NamedTuple):
    variant: str
    precision: str | None = None
    """None: neither an option nor the checkpoint says it."""
    model: str | None = None
    """A folder here as ./NAME or with a slash, or a Hugging Face name with its owner."""


def choose_model(args: argparse.Namespace) -> ModelChoice:
    """Find the variant, and --model and --precision as the plan takes them. Notes go to stderr.

    Raises OptionError for an unknown Hugging Face name, for a folder that isn't a whole checkpoint of the variant, and
    where names, files and --precision differ.
    """
    named = _named(args)
    model = _model(args.model, named, args.precision)
    precision = _precision(args.precision, named, model, for_vllm=args.engine == "vllm")
    if args.model and model and not is_path(model):
        if "/" in model and not variant_of_model(model):
            complain(f"note: {model} is not a folder here; the engine will take it for a Hugging Face name")
    elif args.model and model and not os.path.exists(model):
        complain(f"note: {model} is not on this machine; the container must have it there")
    return ModelChoice(named.variant, precision, model)


def _named(args: argparse.Namespace) -> ModelChoice:
    """Find the variant by its name or a checkpoint's. Raises OptionError for a path or an unknown Hugging Face name."""
    given = args.variant
    if (name := full_name(given)) in variants():
        return ModelChoice(name)
    if os.path.isdir(given) or is_path(given):
        raise OptionError(_about_folder(given))
    found = variant_of_model(given) or checkpoint_named(given, args.precision)
    if found is None and "/" not in given and not _is_distilled(given):
        return ModelChoice(given)  # the planner names the nearest
    if found is None:
        models = [
            next(iter(variant.checkpoints.values())).model for variant in variants().values() if not variant.model
        ]
        known = f"known so far: {', '.join(models)}"
        if _is_distilled(given):
            raise OptionError(f"{given}: {_DISTILLED}; {known}")
        near = nearest_name(given, models)
        known = f"did you mean {near}? {known}" if near else known
        copy = "; a copy of one of them under another name is given as --model beside its variant"
        hint = how_to_plan(given) or known + copy * ("deepseek" in given.lower())
        raise OptionError(f"unknown Hugging Face name {brief(given)!r}: {hint}")
    variant, checkpoint = found
    if checkpoint.published_for:
        complain(f"note: {title_of(variant, checkpoint)}")
    if args.model is not None and "/" not in given:
        return ModelChoice(variant.name)
    return ModelChoice(variant.name, checkpoint.precision, checkpoint.model)


def _about_folder(given: str) -> str:
    """Say how a folder is given. It tells DeepSeek-V3's architecture from V3.2's, but not R1 from V3."""
    from deepseek_triton_build.check import read_facts

    facts = read_facts(Path(given), given)[0] if os.path.isfile(os.path.join(given, "config.json")) else None
    name = facts.class_name if facts else None
    meant = facts.architecture if facts else None
    alike = [v.name for v in variants().values() if v.architecture == meant or (name is None and not v.model)]
    what = f"{brief(given)} is a path" + (f", of a {brief(name)}" if name else "")
    if not alike:
        return f"{what}, which is no model that is served here; known so far: {', '.join(variants())}"
    one = alike[0] if len(alike) == 1 else "VARIANT"
    which = "" if len(alike) == 1 else f", where VARIANT is what it is: {' or '.join(alike)}"
    return f"{what}; give it as --model: {one} --model {brief(given)}{which}"


def _is_distilled(model: str) -> bool:
    return "distill" in model.rpartition("/")[2].lower()


def _precision(asked: str | None, named: ModelChoice, model: str | None, *, for_vllm: bool) -> str | None:
    """Return the precision asked for, or the checkpoint's, by name or by files. Raises OptionError when they differ."""
    of_folder = _precision_of(model, named.variant, for_vllm=for_vllm) if model else None
    of_checkpoint = of_folder or named.precision
    if asked is None:
        return of_checkpoint or (precision_in_name(model.rstrip("/").rpartition("/")[2]) if model else None)
    precision = find_precision(asked)
    if of_checkpoint is not None and precision != of_checkpoint:
        raise OptionError(
            f"--precision {asked}: the checkpoint named holds {of_checkpoint} weights; leave --precision out, or name "
            f"your own: {named.variant} --model NAME"
        )
    return precision


def _precision_of(model: str, variant: str, *, for_vllm: bool) -> str | None:
    """Return the precision of --model's weights, if known. Raises OptionError for another variant's checkpoint."""
    served = variants().get(variant)
    if served is None or served.architecture is None:
        return None
    if os.path.isdir(model):
        return _precision_of_folder(model, served, served.architecture, for_vllm=for_vllm)
    if (by_name := variant_of_model(model)) is None:
        if not is_path(model) and _is_distilled(model):
            raise OptionError(f"--model {model}: {_DISTILLED}")
        if foreign := foreign_weights(model.rstrip("/").rpartition("/")[2]):
            raise OptionError(f"--model {model}: by its name it has {foreign}; name other weights of {variant}")
        return None
    if by_name[0] is not served:
        raise OptionError(f"--model {model} is {by_name[0].name}, not {variant}")
    return by_name[1].precision


def _precision_of_folder(model: str, served: Variant, architecture: Architecture, *, for_vllm: bool) -> str | None:
    """Read the precision from a checkpoint's folder. Raises OptionError when it holds no whole checkpoint of the
    architecture, or an unknown quantization."""
    from deepseek_triton_build.check import read_facts  # takes as long as half a plan, and few plans need it

    facts, findings = read_facts(Path(model), f"--model {model}", for_vllm=for_vllm)
    if broken := [finding for finding in findings if finding.severity == "error"]:
        problems = "; ".join(f"{finding.file}: {finding.message}" for finding in broken)
        fix = broken[0].fix if facts.is_contradictory else "name the folder of a whole checkpoint"
        raise OptionError(f"{problems}; {fix}")
    if facts.architecture is None or facts.architecture.class_name != architecture.class_name:
        expected, found = architecture.class_name, short_repr(facts.class_name)
        raise OptionError(f"--model {model}: expected a {expected} for {served.name}, its config.json says {found}")
    facts = replace(facts, architecture=architecture)
    if facts.difference and not served.model:  # with the tiny ones' settings, any of the class is served
        expected = f"expected the figures of {served.name}, found {facts.difference}"
        fix = f"name a checkpoint of {served.name}, or the VARIANT that this one is of"
        raise OptionError(f"--model {model}: {expected}; {fix}")
    for finding in findings:
        complain(f"note: {finding.file}: {finding.message}; {finding.fix}")
    if facts.quantization is not None and facts.precision is None:
        known = ", ".join(served.checkpoints)
        raise OptionError(
            f"{facts.quantization_file}: expected {known} weights, found {short_repr(facts.quantization)}"
        )
    if facts.has_16_bits and not served.model:
        known = ", ".join(served.checkpoints)
        raise OptionError(
            f"--model {model}: expected {known} weights, found no quantization: 16-bit weights; quantize them: "
            "deepseek-triton checkpoint quantize"
        )
    if facts.cut is not None:
        left = cut_summary(facts.cut, architecture)
        complain(f"note: --model {model} is cut: it has {left}, so its answers are noise")
    return facts.precision


def absolute_model(model: str | None) -> str | None:
    """Return --model with a folder here as an absolute path, for no container has another one.

    Raises OptionError for a path that is neither here nor absolute.
    """
    full = os.path.abspath(os.path.expanduser(model or "/"))
    if not model or os.path.isabs(model) or "://" in model or not (is_path(model) or os.path.isdir(full)):
        return model
    if not os.path.exists(full):
        raise OptionError(f"--model {safe_name(model)}: expected an absolute path; give --model {safe_name(full)}")
    return full


def _model(given: str | None, named: ModelChoice, precision: str | None) -> str | None:
    """Return --model as it is written into the files: the form tells a folder here (./NAME) from a Hugging Face name,
    which gets its owner. Raises OptionError when it can be neither."""
    if given is None:
        return named.model
    try:
        given.encode()
        os.stat(given)
    except UnicodeEncodeError as error:
        raise OptionError(f"--model {brief(given)}: expected a name in UTF-8; rename the folder") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise OptionError(f"--model {brief(given)}: is too long for a path") from error
    if not given:
        raise OptionError("--model: expected a folder or a Hugging Face name, found nothing")
    if os.path.isfile(given):
        raise OptionError(f"--model {given}: expected a folder, found a file; name its folder: {Path(given).parent}")
    if os.path.isdir(given):
        return given if is_path(given) else f"./{given}"
    known = checkpoint_named(given, precision)
    return given if known is None else known[1].model
