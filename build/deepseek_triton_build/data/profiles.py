"""Profiles: what a deployment is tuned for. Each profile is one or more published recipes, as data in profiles.yaml.

A recipe is used as published when its own workload is asked for. For another workload its choices stay, and the sizes
are computed again (planning/trtllm_sizes.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cache
from typing import Any

from deepseek_triton_build.build_errors import UnknownNameError
from deepseek_triton_build.data.catalog import Gpu
from deepseek_triton_build.data.own_files import entry_of, load_yaml
from deepseek_triton_build.data.planned_settings import EnvironmentVariable, Setting

DEFAULT_PROFILE = "balanced"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The requests that a deployment is for. None: not given."""

    isl: int | None = None
    """Input length of a request, in tokens."""
    osl: int | None = None
    """Output length, in tokens."""
    concurrency: int | None = None
    """Concurrent requests of the whole instance."""

    def covers(self, other: Workload) -> bool:
        """Tell whether this workload gives every value that `other` gives."""
        return all(theirs is None or ours == theirs for ours, theirs in self._pairs(other))

    def agreement(self, other: Workload) -> int | None:
        """Count the values that both give alike; None when they contradict each other."""
        both = [ours == theirs for ours, theirs in self._pairs(other) if ours is not None and theirs is not None]
        return sum(both) if all(both) else None

    def filled_from(self, other: Workload) -> Workload:
        """Return this workload, with the values that it doesn't give taken from `other`."""
        return replace(other, **{name: value for name, value in asdict(self).items() if value is not None})

    def _pairs(self, other: Workload) -> Iterator[tuple[int | None, int | None]]:
        return zip(astuple(self), astuple(other), strict=True)


ANY_WORKLOAD = Workload()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One published configuration."""

    id: str
    architectures: tuple[str, ...]
    """GPU architectures that the recipe is for."""
    precisions: tuple[str, ...]
    gpus: tuple[str, ...] = ()
    """GPUs that the recipe is for; empty: all GPUs of `architectures`."""
    num_gpus: int | None = None
    """Number of GPUs it was published for; None: any. Sizes that depend on the number hold for that one only."""
    workload: Workload = field(default_factory=Workload)
    source: str
    settings: tuple[Setting, ...]
    """Settings under canonical keys. tensor_parallel_size is never among them: it follows from the GPUs."""
    environment: tuple[EnvironmentVariable, ...] = ()

    def value(self, key: str, default: Any = None) -> Any:
        """Return the recipe's value of `key`, or `default` when the recipe doesn't set it."""
        return next((setting.value for setting in self.settings if setting.key == key), default)

    def holds_for(self, gpu: Gpu, precision: str) -> bool:
        """Tell whether the recipe is for this GPU and precision."""
        return (
            gpu.architecture in self.architectures
            and precision in self.precisions
            and (not self.gpus or gpu.name in self.gpus)
        )


@dataclass(frozen=True, kw_only=True)
class Profile:
    name: str
    title: str
    recipes: tuple[Recipe, ...]
    """Recipes, the default first: the first that holds for the GPU and precision. A recipe that was published for the
    number of GPUs and the workload asked for goes before it."""
    formats: tuple[str, ...]
    """The output formats (render/formats.py) that the profile makes sense in."""

    def recipe_for(self, gpu: Gpu, precision: str, num_gpus: int | None, asked: Workload) -> Recipe | None:
        """Return the recipe to start from; None when the profile has none for this GPU and precision.

        :param num_gpus: None when no number was asked for.
        """
        usable = [recipe for recipe in self.recipes if recipe.holds_for(gpu, precision)]
        same_size = [recipe for recipe in usable if num_gpus is None or recipe.num_gpus in (None, num_gpus)]
        same_size.sort(key=lambda recipe: num_gpus is not None and recipe.num_gpus != num_gpus)
        if asked != ANY_WORKLOAD:

            def distance(recipe: Recipe) -> tuple[bool, bool, int]:
                """Recipes that agree in most values, then those for a concurrency that was not asked for, last those
                that contradict."""
                agreement = recipe.workload.agreement(asked)
                says_more = recipe.workload.concurrency is not None and asked.concurrency is None
                return agreement is None, says_more, -(agreement or 0)

            same_size.sort(key=distance)
        return next(iter((*same_size, *usable)), None)


PROFILES = (
    *("balanced", "latency", "throughput", "long-64k", "long-128k"),
    *("ctx", "gen", "quickstart", "wide-ep", "rehearsal"),
)
"""Their names, in the order of profiles.yaml."""
DISAGGREGATED = "disagg"
"""The profile that stands for a pair, whose sides have profiles of their own."""


def find_profile(name: str) -> Profile:
    """Return the profile of that name, or raise UnknownNameError, which names the nearest."""
    if name not in PROFILES:
        note = "a pair of servers, which make_disaggregated_plan plans" if name == DISAGGREGATED else ""
        raise UnknownNameError("profile", name, (*PROFILES, DISAGGREGATED), note=note)
    # A plan needs one profile, and reading all takes a tenth of its time. Its aliases are of profiles before it.
    return _profiles_through(name)[name]


def profiles() -> Mapping[str, Profile]:
    return _profiles_through(PROFILES[-1])


@cache
def _profiles_through(last: str) -> Mapping[str, Profile]:
    _, *following = PROFILES[PROFILES.index(last) :]
    rows = load_yaml("profiles.yaml", until=f"{following[0]}:" if following else "")
    return {
        name: Profile(
            name=name,
            title=entry["title"],
            formats=tuple(entry["formats"]),
            recipes=tuple(map(_recipe, entry["recipes"])),
        )
        for name, entry in rows.items()
    }


def _recipe(row: Mapping[str, Any]) -> Recipe:
    source = row["source"]
    lists = {key: tuple(row.get(key, ())) for key in ("architectures", "precisions", "gpus")}
    settings = (
        Setting(key, line["value"], line["why"], source=line.get("source", source))
        for key, line in row["settings"].items()
    )
    environment = (
        EnvironmentVariable(name, str(line["value"]), line["why"], source=line.get("source", source))
        for name, line in row.get("environment", {}).items()
    )
    return Recipe(
        id=row["id"],
        **lists,
        num_gpus=row.get("num_gpus"),
        workload=entry_of(f"profiles.yaml: {row['id']}: workload", Workload, row.get("workload", {})),
        source=source,
        settings=tuple(settings),
        environment=tuple(environment),
    )
