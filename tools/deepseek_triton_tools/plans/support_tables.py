"""Tables of what can be served on what, by how many GPUs, tuned for what."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

from deepseek_triton_build import FORMATS, PlanRequest, RefusedPlanError, resolve_target, resolve_vllm_target
from deepseek_triton_build.arithmetic import minimum_gpus
from deepseek_triton_build.catalog import (
    PRECISIONS,
    RELEASES,
    VLLM_VERSIONS,
    Gpu,
    KnownCheckpoint,
    Profile,
    Recipe,
    Variant,
    containers,
    find_gpu,
    gpus,
    load_release,
    load_vllm,
    profiles,
    variants,
)
from deepseek_triton_tools.terminal import tables
from deepseek_triton_tools.terminal.output_streams import print_json, to_reader
from deepseek_triton_tools.terminal.tables import Table, paragraph, show

SCHEMA = "deepseek-triton/variants/1"
_WIDE = 110
"""Columns of a terminal from which one table holds every GPU."""
_FIT_80_COLUMNS = 4
"""GPUs of one table on a narrower terminal."""
_LEGEND = (
    "GPUs of one instance: with TensorRT-LLM the fewest as published (and as recommended for the best performance), "
    "with vLLM the fewest that fit by arithmetic; -: can't work or is not published; *: your own checkpoint: --model, "
    "as nobody publishes one of this very model; since: the oldest TensorRT-LLM. `variants --json` has the reasons and "
    "what fits by arithmetic; `plan VARIANT --gpu GPU` shows the whole deployment."
)


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


def show_variants(gpu: str | None, *, as_json: bool) -> None:
    """Print the support tables of one GPU, or of all. Raises UnknownNameError for an unknown GPU."""
    chosen = [find_gpu(gpu)] if gpu else list(gpus().values())
    with to_reader():
        if as_json:
            print_json(_document(chosen))
        else:
            _show(chosen)


def _show(chosen: list[Gpu]) -> None:
    at_once = len(chosen) if tables.width() >= _WIDE else _FIT_80_COLUMNS
    for first in range(0, len(chosen), at_once):
        show(_support_table(chosen[first : first + at_once]))
    for first in range(0, len(chosen), at_once):
        show(_vllm_table(chosen[first : first + at_once]))
    show(_profile_table(chosen))
    show(_release_table())
    show(_vllm_versions_table())
    print(paragraph(_LEGEND, "", ""))


def _served() -> Iterable[tuple[Variant, KnownCheckpoint]]:
    for variant in variants().values():
        for checkpoint in (*variant.checkpoints.values(), *variant.own_checkpoints.values()):
            yield variant, checkpoint


def _request(variant: Variant, checkpoint: KnownCheckpoint, gpu: Gpu, engine: str) -> PlanRequest:
    return PlanRequest(
        variant=variant.name,
        gpu=gpu.name,
        precision=checkpoint.precision,
        model=None if variant.model else checkpoint.model or _OWN,
        engine=engine,
        allow_unpublished=engine == "tensorrt_llm",
    )


def _vllm_gpus(variant: Variant, checkpoint: KnownCheckpoint, gpu: Gpu) -> int | None:
    """Return the fewest GPUs with vLLM; None where it can't work."""
    try:
        return resolve_vllm_target(_request(variant, checkpoint, gpu, "vllm")).num_gpus
    except RefusedPlanError:
        return None


def _cell(variant: Variant, checkpoint: KnownCheckpoint, gpu: Gpu) -> Cell:
    request = _request(variant, checkpoint, gpu, "tensorrt_llm")
    try:
        target = resolve_target(request)
    except RefusedPlanError as refused:
        return Cell(gpu=gpu.name, reason=str(refused))
    fewest = minimum_gpus(gpu, target.architecture, target.checkpoint)
    if variant.model:  # what is published is about the models at full size
        reason = "fits by arithmetic"
        return Cell(
            gpu=gpu.name, published_gpus=fewest, minimum_gpus=fewest, profiles=(variant.profile,), reason=reason
        )
    published = gpu.published_min_gpus.get(checkpoint.precision)
    kept = {entry.profile for entry in variants().values()}
    usable = [
        name
        for name, profile in profiles().items()
        if name not in kept and _recipes(profile, gpu, checkpoint.precision)
    ]
    reason = gpu.published_source if published else "fits by arithmetic; not published"
    return Cell(
        gpu=gpu.name,
        published_gpus=published,
        minimum_gpus=fewest,
        recommended_gpus=gpu.recommended_gpus.get(checkpoint.precision),
        profiles=tuple(usable),
        reason=reason,
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
    cells = tuple(
        replace(_cell(variant, checkpoint, gpu), vllm_gpus=_vllm_gpus(variant, checkpoint, gpu))
        for gpu in gpus().values()
    )
    requests = [_request(variant, checkpoint, gpu, "tensorrt_llm") for gpu in gpus().values()]
    releases = [
        version
        for version in RELEASES
        if any(_is_served(resolve_target, replace(request, release=version)) for request in requests)
    ]
    requests = [_request(variant, checkpoint, gpu, "vllm") for gpu in gpus().values()]
    versions = [
        version
        for version in VLLM_VERSIONS
        if any(_is_served(resolve_vllm_target, replace(request, vllm=version)) for request in requests)
    ]
    return Support(cells, tuple(releases), tuple(versions))


def _is_served(resolve: Callable[[PlanRequest], object], request: PlanRequest) -> bool:
    try:
        resolve(request)
    except RefusedPlanError:
        return False
    return True


_OWN = "your-own"
"""Stands for a user's own checkpoint, whose name changes nothing."""


def _since(variant: Variant) -> str:
    """Return the oldest release that a repository with the model is written for."""
    oldest = RELEASES[-1]
    return variant.min_release if load_release(oldest).is_before(variant.min_release) else oldest


def _recipes(profile: Profile, gpu: Gpu, precision: str) -> list[Recipe]:
    return [recipe for recipe in profile.recipes if recipe.holds_for(gpu, precision)]


def _support_table(chosen: list[Gpu]) -> Table:
    rows = []
    for variant, checkpoint in _served():
        if checkpoint.precision == "w4a16":
            continue
        cells = [_cell(variant, checkpoint, gpu) for gpu in chosen]
        counts = [_count(cell) for cell in cells]
        mark = "" if checkpoint.model else "*"
        rows.append((variant.name, f"{checkpoint.precision}{mark}", *counts, _since(variant)))
    headings = ("variant", "precision", *(gpu.name for gpu in chosen), "since")
    return Table(title="GPUs of one instance", headings=headings, rows=rows, is_grid=True)


def _vllm_table(chosen: list[Gpu]) -> Table:
    rows = []
    for variant, checkpoint in _served():
        counts = [_vllm_gpus(variant, checkpoint, gpu) for gpu in chosen]
        if checkpoint.precision != "w4a8":
            mark = "" if checkpoint.model else "*"
            rows.append((variant.name, f"{checkpoint.precision}{mark}", *(str(count or "-") for count in counts)))
    headings = ("variant", "precision", *(gpu.name for gpu in chosen))
    return Table(title="With --engine vllm", headings=headings, rows=rows, is_grid=True)


def _count(cell: Cell) -> str:
    """Such as `4(8)`: the fewest GPUs, and the recommended number where it is larger."""
    recommended = f"({cell.recommended_gpus})" if cell.recommended_gpus else ""
    return f"{cell.published_gpus}{recommended}" if cell.published_gpus else "-"


def _profile_table(chosen: list[Gpu]) -> Table:
    rows = [(name, profile.title, _where(profile, chosen), _formats(profile)) for name, profile in profiles().items()]
    return Table(title="Profiles", headings=("profile", "for", "recipes for", "formats"), rows=rows)


def _formats(profile: Profile) -> str:
    of_tensorrt_llm = set(FORMATS) - {"vllm-serve", "dynamo"}
    return "all" if set(profile.formats) == of_tensorrt_llm else ", ".join(profile.formats)


def _where(profile: Profile, chosen: list[Gpu]) -> str:
    """Say which precisions have recipes on which GPUs or GPU architectures: `fp8 on hopper; fp4 on b200`."""
    found: dict[str, list[str]] = {}
    for alike in _by_architecture(chosen):
        named = {gpu.name: _precisions(profile, gpu) for gpu in alike}
        if len(alike) > 1 and len(set(named.values())) == 1:
            named = {alike[0].architecture: named[alike[0].name]}
        for name, precisions in named.items():
            found.setdefault(precisions, []).append(name)
    return "; ".join(f"{precisions} on {', '.join(names)}" for precisions, names in found.items() if precisions) or "-"


def _precisions(profile: Profile, gpu: Gpu) -> str:
    return ", ".join(precision for precision in PRECISIONS if _recipes(profile, gpu, precision))


def _by_architecture(chosen: list[Gpu]) -> list[list[Gpu]]:
    return [
        [gpu for gpu in chosen if gpu.architecture == name] for name in dict.fromkeys(g.architecture for g in chosen)
    ]


def _release_table() -> Table:
    rows = [
        (version, ", ".join(tag for tag, container in containers().items() if container.trtllm == version))
        for version in RELEASES
    ]
    return Table(title="Releases", headings=("TensorRT-LLM", "in Triton containers (--image)"), rows=rows)


def _vllm_versions_table() -> Table:
    rows = [(version, ", ".join(load_vllm(version).containers) or "-") for version in VLLM_VERSIONS]
    return Table(title="Versions", headings=("vLLM", "in Triton containers (--image)"), rows=rows)


def _document(chosen: list[Gpu]) -> dict[str, object]:
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
                "min_release": _since(variant),
                "gpus": [
                    asdict(replace(_cell(variant, checkpoint, gpu), vllm_gpus=_vllm_gpus(variant, checkpoint, gpu)))
                    for gpu in chosen
                ],
            }
            for variant, checkpoint in _served()
        ],
        "profiles": [
            {
                "profile": name,
                "title": profile.title,
                "formats": list(profile.formats),
                "recipes": [_recipe(recipe, chosen) for recipe in profile.recipes],
            }
            for name, profile in profiles().items()
        ],
        "releases": [
            {"release": version, "containers": [tag for tag, row in containers().items() if row.trtllm == version]}
            for version in RELEASES
        ],
        "vllm": [{"version": version, "containers": list(load_vllm(version).containers)} for version in VLLM_VERSIONS],
    }


def _recipe(recipe: Recipe, chosen: list[Gpu]) -> dict[str, object]:
    return {
        "id": recipe.id,
        "source": recipe.source,
        "precisions": list(recipe.precisions),
        "gpus": [gpu.name for gpu in chosen if any(recipe.holds_for(gpu, name) for name in recipe.precisions)],
        "num_gpus": recipe.num_gpus,
        "workload": asdict(recipe.workload),
    }
