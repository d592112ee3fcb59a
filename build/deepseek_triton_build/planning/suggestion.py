"""Find the requests that work nearest to one that is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from deepseek_triton_build.arithmetic.gpu_memory import GPU_COUNTS
from deepseek_triton_build.data.catalog import PRECISIONS, find_variant, gpus
from deepseek_triton_build.data.profiles import ANY_WORKLOAD, DEFAULT_PROFILE
from deepseek_triton_build.data.releases import DEFAULT_RELEASE
from deepseek_triton_build.data.vllm import DEFAULT_VLLM
from deepseek_triton_build.planning.plan_request import PlanRequest


def ways_that_work(request: PlanRequest, works: Callable[[PlanRequest], bool]) -> tuple[Mapping[str, Any], ...]:
    """Return the fewest changes to `request`'s fields with which `works` is true, the nearest first; none when nothing
    helps.

    There are several where one change is enough. Where only the user's own settings are wrong, they are the only way.
    """
    alternatives = _alternatives(request)
    found = [way for name in alternatives if (way := _first(request, works, _changes(alternatives, (name,))))]
    if {"overrides": ()} in found:
        return ({"overrides": ()},)
    # Another checkpoint or no workload is no way to get what was asked for, unless there is no other.
    usual = [way for way in found if not way.keys() & {"workload", "model"}]
    if found:
        return tuple(usual[:_MOST_WAYS] or found[:1])
    for number in (2, 3, 4, 5):
        for names in combinations(alternatives, number):
            if way := _first(request, works, _changes(alternatives, names)):
                return (way,)
    without_extras = {name: values[0] for name, values in alternatives.items() if name not in _TARGET}
    bare = replace(request, **without_extras)
    if not without_extras or works(bare):
        return (without_extras,)
    return ({**without_extras, **ways_that_work(bare, works)[0]},)


def _first(
    request: PlanRequest, works: Callable[[PlanRequest], bool], changes: Iterator[dict[str, Any]]
) -> dict[str, Any] | None:
    return next((change for change in changes if works(replace(request, **change))), None)


_MOST_WAYS = 3
_TARGET = ("num_gpus", "precision", "engine", "parallel", "release", "vllm", "profile", "gpu")
"""The fields that say what a request is for. The others are extras: all are given up when nothing less helps."""


def _changes(alternatives: Mapping[str, list[Any]], names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for values in product(*(alternatives[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def _alternatives(request: PlanRequest) -> dict[str, list[Any]]:
    """Return field -> other values to try, the likeliest first. Extras are given up before the GPU."""
    tried: dict[str, list[Any]] = {
        "engine": ["vllm"] if request.precision == "w4a16" else [],
        "num_gpus": sorted(set(GPU_COUNTS) - {request.num_gpus}, key=lambda count: _distance(request.num_gpus, count)),
        "precision": [] if request.model else [name for name in PRECISIONS if name != request.precision],
        "parallel": [None] if request.engine != "vllm" else [None, "tp", "dp"],
        "release": [DEFAULT_RELEASE],
        "vllm": [DEFAULT_VLLM],
        "profile": [find_variant(request.variant).profile or DEFAULT_PROFILE],
        "allow_unpublished": [True] if request.engine != "vllm" else [],
        "pipeline_parallel_size": [1],
        "mtp": [3, None] if request.relaxed_acceptance else [None],
        "relaxed_acceptance": [False],
        "kv_dtype": [None],
        "overrides": [()],
        "workload": [ANY_WORKLOAD],
        "model": [None],
        "gpu": [name for name in ("h200", "b200", "gb200-nvl72") if name in gpus()],
    }
    return {
        name: other
        for name, values in tried.items()
        if (other := [value for value in values if value != getattr(request, name)])
    }


def _distance(asked: int | None, count: int) -> tuple[int, int]:
    """Return a sort key: more GPUs than asked for first, then the nearest number."""
    return (0 if count > (asked or 0) else 1, abs(count - (asked or 0)))
