"""The options of `plan` and `build`, made into a request to the generator."""

import argparse
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from deepseek_triton_build import DISAGGREGATED, DisaggregatedRequest, Plan, PlanRequest, Workload, make_plan
from deepseek_triton_build.catalog import (
    DEFAULT_PROFILE,
    DEFAULT_RELEASE,
    DEFAULT_VLLM,
    container_month,
    container_tag,
    find_precision,
    full_name,
    release_for_container,
    variant_of_folder,
    variant_of_model,
    variants,
    vllm_for_container,
)
from deepseek_triton_build.text import UNREADABLE_YAML, is_path, printable_line, short_repr
from deepseek_triton_tools.cli.model_options import choose_model
from deepseek_triton_tools.cli.parsing import VerbParser, require_tools
from deepseek_triton_tools.cli.plan_options import OptionError, add_plan_options, brief, preset_or_file
from deepseek_triton_tools.terminal.output_streams import complain

_INFLIGHT = "triton_config.max_inflight"
_FOR_PAIRS = ("--context-servers", "--generation-servers", "--context-set", "--generation-set", "--disagg")
"""Options that only profile disagg has a use for."""
_FOR_GPUS = (
    *("--gpu", "--gpus", "--precision", "--profile", "--trtllm", "--vllm", "--image"),
    *("--isl", "--osl", "--concurrency", "--from-bench", "--from-recipe", "--slo"),
    *("--mtp", "--relaxed-acceptance", "--kv-cache-dtype", "--parallel", "--pp", "--set", "--allow-unpublished"),
)
"""Options that have no meaning without an engine that runs on GPUs."""
_FOR_ONE_ENGINE = {
    "tensorrt_llm": ("--trtllm", "--relaxed-acceptance", "--allow-unpublished"),
    "vllm": ("--vllm", "--parallel"),
}
"""Engine that runs on GPUs -> the options that it alone has."""
_ATTENTION_DP = "enable_attention_dp"
_MOST_RECIPE_BYTES = 2**20
_FETCH_S = 30


def plan_request(args: argparse.Namespace) -> PlanRequest:
    """Make the request from the options that `add_plan_options` adds.

    Raises OptionError for a wrong value of an option and as `choose_model` does, UnknownNameError for an unknown
    container, and RefusedPlanError for one whose release can't be used.
    """
    require_tools()
    if args.slo is not None and args.from_bench is None:
        raise OptionError("--slo: only with --from-bench FILE, the result of a benchmark")
    published, measured = ({}, ()) if args.from_recipe is None else _take_recipe(args)
    if args.variant is None:
        raise OptionError("VARIANT is missing: name the model that is to be served")
    chosen = choose_model(args)
    both = variants()[chosen.variant].engines if chosen.variant in variants() else ()
    if args.engine is None and args.trtllm is not None and both == ("vllm", "tensorrt_llm"):
        args.engine = "tensorrt_llm"  # which the release is of
    _refuse_meaningless(args, chosen.variant)
    if args.gpu is None and _needs_gpu(chosen.variant, args.engine):
        raise OptionError(f"{chosen.variant} needs --gpu, the GPU it will run on (for example --gpu h200 --gpus 8)")
    release, vllm, container = _versions(args, _engine(chosen.variant, args.engine))
    request = PlanRequest(
        variant=chosen.variant,
        gpu=args.gpu,
        num_gpus=args.gpus,
        precision=chosen.precision,
        profile=DEFAULT_PROFILE if args.profile is None else args.profile,
        release=release,
        vllm=vllm,
        parallel=args.parallel,
        container=container,
        workload=Workload(isl=args.isl, osl=args.osl, concurrency=args.concurrency),
        mtp=args.mtp,
        relaxed_acceptance=args.relaxed_acceptance,
        kv_dtype=args.kv_cache_dtype,
        pipeline_parallel_size=args.pp or 1,
        engine=args.engine,
        preset=None if _has_sides(args) else preset_or_file(args.preset),
        decoupled=args.decoupled,
        backend_name=args.backend_name,
        model=chosen.model,
        allow_unpublished=args.allow_unpublished,
        overrides=(*published.items(), *(row for text in args.set for row in overrides(text))),
        measured=measured,
    )
    return request if args.from_bench is None or request.variant not in variants() else _as_measured(request, args)


def _take_recipe(args: argparse.Namespace) -> tuple[dict[str, Any], tuple[tuple[str, str], ...]]:
    """Give the values in the file of --from-recipe to the options that were not typed, and return its settings that
    --set does not give, and the reasons of all.

    Notes go to stderr: of what is left out, and where an option says something else. Raises OptionError for a file that
    can't be read or is for another engine, and RefusedPlanError for one that holds no recipe.
    """
    from deepseek_triton_build.check import read_recipe

    recipe = read_recipe(
        _recipe_text(args.from_recipe),
        args.from_recipe,
        lambda engine: _versions(args, engine)[engine == "vllm"] or (DEFAULT_RELEASE, DEFAULT_VLLM)[engine == "vllm"],
    )
    if args.engine not in (None, recipe.engine):
        raise OptionError(f"--engine {args.engine}: {recipe.name} is for {recipe.engine}; leave one of the two out")
    if args.profile == DISAGGREGATED:
        raise OptionError(f"--from-recipe: {recipe.name} is for one server; leave --profile {DISAGGREGATED} out")
    if recipe.engine == "vllm":
        args.engine = "vllm"
    else:  # the file publishes its number of GPUs
        args.allow_unpublished = args.allow_unpublished or recipe.options["gpus"] is not None
    model = recipe.options.pop("variant")
    if model is not None and (instead := _instead(args, model)):
        recipe.notes.append(f"{recipe.name}: model {model}; {instead} is taken")
    recipe.options = {name: value for name, value in recipe.options.items() if value is not None}
    for name, value in tuple(recipe.options.items()):
        if (typed := getattr(args, name)) is None:
            setattr(args, name, value)
        elif str(typed).lower() != str(value).lower():
            recipe.notes.append(f"{recipe.name}: {name} {value}; --{name} {typed} is taken")
            del recipe.options[name]
    rows = {key: _setting_value(value, f"{recipe.name}: {key}") for key, value in recipe.settings.items()}
    own = dict(row for text in args.set for row in overrides(text))
    if args.mtp is not None and "mtp" not in recipe.options:
        rows = {key: value for key, value in rows.items() if not key.startswith("speculative_config.")}
    if args.kv_cache_dtype is not None:
        own |= dict.fromkeys(("kv_cache_config.dtype", "kv_cache_dtype"), args.kv_cache_dtype)
    for key in [key for key in own if key in rows]:
        if (published := rows.pop(key)) != own[key]:
            recipe.notes.append(f"{recipe.name}: {key} {short_repr(published)}; {short_repr(own[key])} is taken")
    for note in recipe.notes:
        complain(f"note: {printable_line(note)}")
    reasons = dict.fromkeys([*(f"--{name}" for name in recipe.options), *rows], f"from {recipe.name}")
    if recipe.engine == "tensorrt_llm" and _ATTENTION_DP not in {**rows, **own}:
        # A whole configuration has it if it is on, and all sizes depend on it.
        rows[_ATTENTION_DP], reasons[_ATTENTION_DP] = False, f"off: {recipe.name} leaves it out"
    return rows, tuple(reasons.items())


def _instead(args: argparse.Namespace, model: str) -> str | None:
    """Take `model` as VARIANT, or return what was typed instead of it: another model, or another precision."""
    known = variant_of_model(model)
    if args.variant not in (None, model) and full_name(args.variant) != (known and known[0].name):
        return str(args.variant)
    is_other = known is not None and args.precision and find_precision(args.precision) != known[1].precision
    args.variant = known[0].name if known and is_other else model
    return f"--precision {args.precision}" if is_other else None


def _recipe_text(place: str) -> str:
    """Return the text of a file, or of an address, which is asked once. Raises OptionError when it can't be read."""
    import urllib.request
    from http.client import HTTPException

    from deepseek_triton_build.check import read_bytes

    place, shown = place.partition("#")[0], f"--from-recipe {brief(re.split('[?#]', place)[0])}"
    # GitHub's own address of a file gives a page of HTML.
    raw = re.sub(r"^https://github\.com/([^/]+/[^/]+)/blob/", r"https://raw.githubusercontent.com/\1/", place)
    try:
        if "://" not in place:
            content = read_bytes(Path(place), _MOST_RECIPE_BYTES)
        elif not raw.startswith("https://"):
            raise ValueError("expected a path or an https:// address")
        else:
            with urllib.request.urlopen(raw, timeout=_FETCH_S) as answer:
                if not answer.url.startswith("https://"):
                    raise ValueError("it was sent on to an address without TLS")
                content = answer.read(_MOST_RECIPE_BYTES + 1)
        if content is not None and len(content) <= _MOST_RECIPE_BYTES:
            return content.decode()
    except (OSError, HTTPException, ValueError) as error:
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise OptionError(f"{shown}: can't be read: {printable_line(str(why))}") from error
    raise OptionError(f"{shown}: expected a file of at most {_MOST_RECIPE_BYTES:,} bytes, found more")


def _as_measured(request: PlanRequest, args: argparse.Namespace) -> PlanRequest:
    """Take the profile, the workload and the limit of requests from a benchmark where no option gives them.

    :raises ToolError: when the benchmark can't be read, or has no load that keeps the limits.
    """
    from deepseek_triton_tools.bench.expected import choose_load
    from deepseek_triton_tools.bench.result import read_result

    result = read_result(args.from_bench)
    load = choose_load(result, result.slo if args.slo is None else args.slo)
    reasons = {}
    if another := _of_another(result.server, request):
        reasons["--from-bench"] = another
    changes: dict[str, Any] = {"workload": request.workload.filled_from(load.workload)}
    if args.concurrency is None:
        reasons["--concurrency"] = load.why
    if args.profile is None and not variants()[request.variant].profile:
        changes["profile"], reasons["--profile"] = load.profile, load.why_profile
    if load.max_inflight is not None and all(not key.startswith(_INFLIGHT) for key, _ in request.overrides):
        changes["overrides"] = (*request.overrides, (_INFLIGHT, load.max_inflight))
        reasons[_INFLIGHT] = "measured: with more requests at once, the limits were not kept or nothing was tried"
    return replace(request, **changes, measured=(*request.measured, *reasons.items()))


def _of_another(server: Mapping[str, Any], request: PlanRequest) -> str | None:
    """Say that another model or engine was measured; None for the same, or where the server didn't say."""
    planned, engine = variants()[request.variant], _engine(request.variant, request.engine)
    name = str(server.get("name", ""))
    known = variant_of_folder(name)
    measured = known[0].name if known else name
    is_other_model = measured in variants() and measured not in (planned.name, planned.model)
    if not is_other_model and server.get("engine", engine) == engine:
        return None
    return f"measured: of {name} on the {server.get('engine')} engine, not of {planned.name} on {engine}"


def plan_named(text: str) -> Plan:
    """Make the plan of a generated folder, by the options in its stamp, or of options as `plan` takes them.

    :raises OptionError: for a folder that `build` did not write, for a plan without GPUs, which has no limits of
        memory, and as `plan_request` does.
    """
    if is_path(text.partition(" --")[0]) and not os.path.isdir(text):
        raise OptionError(f"there is no folder {text} that `deepseek-triton build` wrote")
    try:
        args = recorded_args(_stamped_options(Path(text)) if os.path.isdir(text) else text)
    except OptionError as error:
        raise OptionError(f"{text}: {error}") from error
    plan = make_plan(plan_request(args))
    if plan.budget is None:
        raise OptionError(
            f"{text}: a plan of the {plan.engine} engine has no limits to compare; name one for a GPU, such as "
            '"deepseek-r1 --gpu h200"'
        )
    return plan


class _RecordedParser(VerbParser):
    """A parser of options that were not typed now, so that no usage is printed."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(message)


def recorded_args(options: str) -> argparse.Namespace:
    """Parse options of `build` as a stamp has them, in one line; --format, --dynamo and --kv-routing are among them.

    :raises OptionError: when they are not such options.
    """
    parser = _RecordedParser(prog="plan", has_help=False)
    add_plan_options(parser)
    for option in ("--format", "--dynamo"):  # a stamp has them; the plan is the same
        parser.add_argument(option)
    parser.add_argument("--kv-routing", action="store_true")
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise OptionError(f"{error}, in the options {brief(options)!r}") from error
    args, unknown = parser.parse_known_args(words)
    if unknown:
        raise OptionError(f"`deepseek-triton plan` has no {' '.join(unknown)}")
    return args


def _stamped_options(folder: Path) -> str:
    from deepseek_triton_build.check import MANIFEST, read_stamp

    for place in sorted(path.parent for path in (*folder.glob(MANIFEST), *folder.glob(f"*/{MANIFEST}"))):
        if options := read_stamp(place, "")[0].text("options"):
            return options
    raise OptionError(f"{folder}: expected a folder that `deepseek-triton build` wrote; it has no {MANIFEST}")


def _versions(args: argparse.Namespace, engine: str | None) -> tuple[str | None, str | None, str | None]:
    """Return the TensorRT-LLM release, the vLLM version and the month of the container. --image names the version of
    the engine that is used."""
    if args.image is None:
        return args.trtllm, args.vllm, None
    if engine == "vllm":
        return None, vllm_for_container(args.image).version, container_month(args.image)
    return release_for_container(args.image).version, args.vllm, container_tag(args.image)


def _engine(variant: str, asked: str | None) -> str | None:
    """Return the engine that is used; None for an unknown variant, which the planner refuses."""
    return asked or (variants()[variant].engines[0] if variant in variants() else None)


def _needs_gpu(variant: str, engine: str | None) -> bool:
    return variant in variants() and _engine(variant, engine) in _FOR_ONE_ENGINE


def _has_sides(args: argparse.Namespace) -> bool:
    """Whether --preset is a folder with a pace for each side of a pair."""
    return args.profile == DISAGGREGATED and args.preset is not None and Path(args.preset).is_dir()


def pair_request(args: argparse.Namespace, both: PlanRequest) -> DisaggregatedRequest:
    """Make the request for context and generation servers.

    :param both: what `plan_request` made of the other options.
    :raises OptionError: for a wrong value of an option.
    """
    sides = {
        name: tuple(row for text in getattr(args, f"{name}_set") for row in overrides(text, f"--{name}-set"))
        for name in ("context", "generation")
    }
    if _has_sides(args):
        sides = {name: (*rows, ("preset", preset_or_file(args.preset, name))) for name, rows in sides.items()}
    return DisaggregatedRequest(
        both=both,
        num_context=args.context_servers or 1,
        num_generation=args.generation_servers or 1,
        orchestrator=tuple(row for text in args.disagg for row in overrides(text, "--disagg")),
        **sides,
    )


def _options_set(args: argparse.Namespace, options: tuple[str, ...]) -> list[str]:
    values = {option: getattr(args, option[2:].replace("-", "_")) for option in options}
    return [option for option, value in values.items() if value is not None and value is not False and value != []]


def _refuse_meaningless(args: argparse.Namespace, variant: str) -> None:
    """Raise OptionError when there are options that would change nothing."""
    if args.profile != DISAGGREGATED and (given := _options_set(args, _FOR_PAIRS)):
        raise OptionError(f"{', '.join(given)}: only for --profile {DISAGGREGATED}; add that, or leave it out")
    if variant not in variants() or args.engine not in (None, *variants()[variant].engines):  # the planner refuses it
        return
    if _needs_gpu(variant, args.engine):
        used = _engine(variant, args.engine)
        for engine, options in _FOR_ONE_ENGINE.items():
            if engine != used and (foreign := _options_set(args, options)):
                raise OptionError(f"{', '.join(foreign)}: only for --engine {engine}, not for {used}; leave it out")
        return
    # The profile that asks for two servers is one of the embedded engines, too.
    is_pair = args.profile == DISAGGREGATED
    if given := _options_set(args, tuple(option for option in _FOR_GPUS if option != "--profile" or not is_pair)):
        engine = "vllm" if {*given}.intersection(_FOR_ONE_ENGINE["vllm"]) else "tensorrt_llm"
        raise OptionError(
            f"{variant} runs on an embedded engine: leave out {', '.join(given)}, or build with --engine {engine}"
        )


def overrides(text: str, option: str = "--set") -> list[tuple[str, Any]]:
    """Return the settings of one --set; there are several when the value is a mapping. Values are hashable.

    :param option: the option that was given instead, for messages.
    :raises OptionError: when it is not KEY=VALUE with a value in YAML.
    """
    import yaml

    given = f"{option} {brief(text)}"
    key, equals, written = text.partition("=")
    key = key.strip()
    if not equals or not all(part.isidentifier() for part in key.split(".")):
        raise OptionError(f"{given}: expected KEY=VALUE, as in {option} kv_cache_config.dtype=fp8")
    try:
        return list(_flat(key, yaml.safe_load(written), given))
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error)
        raise OptionError(f"{given}: the value is not YAML: {printable_line(problem)}; quote it") from error
    except UNREADABLE_YAML as error:
        raise OptionError(f"{given}: expected a value, got one that YAML can't read; quote it") from error


def _flat(key: str, value: Any, given: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _flat(f"{key}.{name}", below, given)
    else:
        yield key, _setting_value(value, given)


def _setting_value(value: Any, given: str) -> Any:
    if isinstance(value, list):
        return tuple(_setting_value(item, given) for item in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise OptionError(f"{given}: expected a finite number, found {value}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise OptionError(f"{given}: expected a number of 64 bits at most")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = "a mapping here" if isinstance(value, dict) else f"a {type(value).__name__}"
    raise OptionError(f"{given}: expected numbers, text, true, false, null or lists of them, found {kind}")
