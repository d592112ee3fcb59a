"""Tables of what can be served on what, by how many GPUs, tuned for what."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from deepseek_triton_build import FORMATS, PlanRequest, RefusedPlanError, resolve_target, resolve_vllm_target
from deepseek_triton_build.arithmetic import minimum_gpus
from deepseek_triton_build.catalog import (
    CANDIDATES,
    DEFAULT_RELEASE,
    PRECISIONS,
    RELEASES,
    VLLM_VERSIONS,
    Gpu,
    KnownCheckpoint,
    Profile,
    Variant,
    find_gpu,
    gpus,
    profiles,
    tags_with,
    variants,
    version_numbers,
    vllm_tags_with,
)
from deepseek_triton_tools.terminal import tables
from deepseek_triton_tools.terminal.output_streams import print_json, to_reader
from deepseek_triton_tools.terminal.tables import Table, paragraph, show

SCHEMA = "deepseek-triton/variants/1"
# Characters of a table beside the names of variant and GPUs: its edge, precision and release, and the blanks between.
_OTHER_COLUMNS = 23
_LEGEND = (
    "GPUs of one instance: with TensorRT-LLM the fewest as published (and as recommended for the best performance), "
    "with vLLM the fewest that fit by arithmetic; -: can't work or is not published; *: your own checkpoint: --model, "
    "as nobody publishes one of this very model; since: the oldest TensorRT-LLM. `variants --json` has the reasons and "
    "what fits by arithmetic; `plan VARIANT --gpu GPU` shows the whole deployment."
)


# Stands for a user's own checkpoint, whose name changes nothing.
_OWN = "your-own"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One checkpoint on one kind of GPU."""

    gpu: str
    published_gpus: int | None = None
    """Fewest GPUs of one instance. None: not published, or it can't work."""
    minimum_gpus: int | None = None
    """Fewest GPUs by arithmetic. None: it can't work."""
    recommended_gpus: int | None = None
    """GPUs that the publisher recommends for the best performance, where they are more than the fewest."""
    profiles: tuple[str, ...] = ()
    """Names of the profiles that have a recipe for it."""
    vllm_gpus: int | None = None
    """Fewest GPUs with vLLM, by arithmetic. None: it can't work."""
    reason: str
    """The reason why it can't work, or the source of the published number."""


Served = Sequence[tuple[Variant, KnownCheckpoint, Sequence[Cell]]]
"""Each variant and its weights, with a cell for each GPU."""


def show_variants(gpu: str | None, *, as_json: bool) -> None:
    """Print the support tables of one GPU, or of all.

    :raises UnknownNameError: for an unknown GPU.
    """
    chosen = [find_gpu(gpu)] if gpu else list(gpus().values())
    served = [
        (variant, checkpoint, [_cell(variant, checkpoint, one) for one in chosen])
        for variant in variants().values()
        for checkpoint in (*variant.checkpoints.values(), *variant.own_checkpoints.values())
    ]
    with to_reader():
        if as_json:
            print_json(_document(served, chosen))
            return
        for table in (*_gpu_tables(served, chosen), *_other_tables(chosen)):
            show(table)
        print(paragraph(_LEGEND, "", ""))


def _target(variant: Variant, checkpoint: KnownCheckpoint, gpu: Gpu, engine: str, **version: Any) -> Any:
    """Return what a plan for the engine starts from.

    :raises RefusedPlanError: when it can't work.
    """
    request = PlanRequest(
        variant=variant.name,
        gpu=gpu.name,
        precision=checkpoint.precision,
        model=None if variant.model else checkpoint.model or _OWN,
        engine=engine,
        allow_unpublished=engine == "tensorrt_llm",
        **version,
    )
    return resolve_vllm_target(request) if engine == "vllm" else resolve_target(request)


def _cell(variant: Variant, checkpoint: KnownCheckpoint, gpu: Gpu) -> Cell:
    vllm_gpus = None
    with suppress(RefusedPlanError):
        vllm_gpus = _target(variant, checkpoint, gpu, "vllm").num_gpus
    if "tensorrt_llm" not in variant.engines:
        return Cell(gpu=gpu.name, vllm_gpus=vllm_gpus, reason="no Triton container has a TensorRT-LLM that serves it")
    try:
        release = variant.min_release if variant.min_release in CANDIDATES else DEFAULT_RELEASE
        target = _target(variant, checkpoint, gpu, "tensorrt_llm", release=release)
    except RefusedPlanError as refused:
        return Cell(gpu=gpu.name, vllm_gpus=vllm_gpus, reason=str(refused))
    fewest = minimum_gpus(gpu, target.architecture, target.checkpoint)
    published = fewest if variant.model else gpu.published_min_gpus.get(checkpoint.precision)
    published = published and max(published, fewest or 0)
    kept = {entry.profile for entry in variants().values()}
    usable = [
        name
        for name, profile in profiles().items()
        if name not in kept and any(recipe.holds_for(gpu, checkpoint.precision) for recipe in profile.recipes)
    ]
    # What is published is about the models at full size.
    reason = "fits by arithmetic" if published else "fits by arithmetic; not published"
    return Cell(
        gpu=gpu.name,
        published_gpus=published,
        minimum_gpus=fewest,
        recommended_gpus=None if variant.model else gpu.recommended_gpus.get(checkpoint.precision),
        profiles=(variant.profile,) if variant.model else tuple(usable),
        vllm_gpus=vllm_gpus,
        reason=gpu.published_source if published and not variant.model else reason,
    )


@dataclass(frozen=True)
class Support:
    """The machines and engines that serve one checkpoint, as a whole."""

    cells: tuple[Cell, ...]
    """One for each kind of GPU."""
    releases: tuple[str, ...]
    """TensorRT-LLM releases that serve it on at least one kind of GPU."""
    vllm_versions: tuple[str, ...]


def support_of(variant: Variant, precision: str) -> Support | None:
    """Return what serves the variant in that precision; None when nobody has such weights."""
    checkpoint = variant.checkpoints.get(precision) or variant.own_checkpoints.get(precision)
    if checkpoint is None:
        return None

    def is_served(engine: str, **version: Any) -> bool:
        """Whether at least one kind of GPU does."""
        for gpu in gpus().values():
            with suppress(RefusedPlanError):
                _target(variant, checkpoint, gpu, engine, **version)
                return True
        return False

    return Support(
        cells=tuple(_cell(variant, checkpoint, gpu) for gpu in gpus().values()),
        releases=tuple(
            release
            for release in (*CANDIDATES, *RELEASES)
            if "tensorrt_llm" in variant.engines and is_served("tensorrt_llm", release=release)
        ),
        vllm_versions=tuple(version for version in VLLM_VERSIONS if is_served("vllm", vllm=version)),
    )


def _since(variant: Variant, shown: list[Gpu]) -> str:
    """Return the oldest release that a repository with the model is written for, on one of these GPUs."""
    # By the numbers alone, because a record takes 10 ms to read.
    oldest = min((gpu.min_release or RELEASES[-1] for gpu in shown), key=version_numbers)
    return max(oldest, variant.min_release or RELEASES[-1], key=version_numbers)


def _gpu_tables(served: Served, chosen: list[Gpu]) -> Iterator[Table]:
    """Yield the tables with a column for each GPU: of TensorRT-LLM, then of vLLM."""
    room = tables.width() - _OTHER_COLUMNS - max((len(variant.name) for variant, *_ in served), default=0)
    parts = []
    first = used = 0
    for place, gpu in enumerate(chosen):
        used += len(gpu.name) + 2
        if used > room and place > first:
            parts.append(slice(first, place))
            first, used = place, len(gpu.name) + 2
    parts.append(slice(first, len(chosen)))
    titles = {"GPUs of one instance": "w4a16", "With --engine vllm": "w4a8"}  # title -> the other engine's precision
    for (title, other), part in itertools.product(titles.items(), parts):
        is_vllm = other == "w4a8"
        rows = [
            (
                variant.name,
                f"{weights.precision}{'' if weights.model else '*'}",
                *(str(cell.vllm_gpus or "-") if is_vllm else _count(cell) for cell in cells[part]),
                *([] if is_vllm else [_since(variant, chosen[part])]),
            )
            for variant, weights, cells in served
            if weights.precision != other and ("vllm" if is_vllm else "tensorrt_llm") in variant.engines
        ]
        columns = [gpu.name for gpu in chosen[part]] + ([] if is_vllm else ["since"])
        yield Table(title=title, headings=("variant", "precision", *columns), rows=rows, is_grid=True)


def _count(cell: Cell) -> str:
    """Such as `4(8)`: the fewest GPUs, and the recommended number where it is larger."""
    recommended = f"({cell.recommended_gpus})" if cell.recommended_gpus else ""
    return f"{cell.published_gpus}{recommended}" if cell.published_gpus else "-"


def _other_tables(chosen: list[Gpu]) -> Iterator[Table]:
    """Yield the tables of profiles, of TensorRT-LLM's releases and of vLLM's versions."""
    of_tensorrt_llm = set(FORMATS) - {"vllm-serve", "dynamo"}
    rows = [
        (
            name,
            profile.title,
            _where(profile, chosen),
            "all" if set(profile.formats) == of_tensorrt_llm else ", ".join(profile.formats),
        )
        for name, profile in profiles().items()
    ]
    yield Table(title="Profiles", headings=("profile", "for", "recipes for", "formats"), rows=rows)
    candidates = [(version, "none: for the formats of its own programs and Dynamo") for version in CANDIDATES]
    releases = candidates + [(version, ", ".join(tags_with(version))) for version in RELEASES]
    yield Table(title="Releases", headings=("TensorRT-LLM", "in Triton containers (--image)"), rows=releases)
    versions = [(version, ", ".join(vllm_tags_with(version)) or "-") for version in VLLM_VERSIONS]
    yield Table(title="Versions", headings=("vLLM", "in Triton containers (--image)"), rows=versions)


def _where(profile: Profile, chosen: list[Gpu]) -> str:
    """Say which precisions have recipes on which GPUs or GPU architectures: `fp8 on hopper; fp4 on b200`."""

    def precisions(gpu: Gpu) -> str:
        return ", ".join(name for name in PRECISIONS if any(recipe.holds_for(gpu, name) for recipe in profile.recipes))

    places: dict[str, list[str]] = {}
    for architecture in dict.fromkeys(gpu.architecture for gpu in chosen):
        named = {gpu.name: precisions(gpu) for gpu in chosen if gpu.architecture == architecture}
        if len(named) > 1 and len(set(named.values())) == 1:
            named = {architecture: next(iter(named.values()))}
        for name, on_it in named.items():
            places.setdefault(on_it, []).append(name)
    return "; ".join(f"{on_it} on {', '.join(names)}" for on_it, names in places.items() if on_it) or "-"


def _document(served: Served, chosen: list[Gpu]) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "variants": [
            {
                "variant": variant.name,
                "title": variant.title,
                "precision": checkpoint.precision,
                "model": checkpoint.model or None,
                "also_named": list(checkpoint.alternatives),
                "weight_bytes": checkpoint.weight_bytes or None,
                "min_release": _since(variant, chosen) if "tensorrt_llm" in variant.engines else None,
                "gpus": [asdict(cell) for cell in cells],
            }
            for variant, checkpoint, cells in served
        ],
        "profiles": [
            {
                "profile": name,
                "title": profile.title,
                "formats": list(profile.formats),
                "recipes": [
                    {
                        "id": recipe.id,
                        "source": recipe.source,
                        "precisions": list(recipe.precisions),
                        "gpus": [
                            gpu.name for gpu in chosen if any(recipe.holds_for(gpu, name) for name in recipe.precisions)
                        ],
                        "num_gpus": recipe.num_gpus,
                        "workload": asdict(recipe.workload),
                    }
                    for recipe in profile.recipes
                ],
            }
            for name, profile in profiles().items()
        ],
        "releases": [{"release": name, "containers": list(tags_with(name))} for name in (*CANDIDATES, *RELEASES)],
        "vllm": [{"version": version, "containers": list(vllm_tags_with(version))} for version in VLLM_VERSIONS],
    }
