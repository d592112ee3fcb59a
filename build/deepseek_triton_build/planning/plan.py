"""Variant, GPUs, profile and release -> every setting of a deployment, each with its reason.

It reads the catalogue, the release records and, for --model, the checkpoint's small JSON files. It writes nothing.

    names -> target.py                      which weights on which GPUs, or a refusal
          -> trtllm_sizes.py, vllm_sizes.py  parallelism and limits, made smaller until they fit the memory
          -> tensorrt_llm.py, vllm.py        the engine's arguments under its own keys, with their reasons
          -> backend_settings.py             the user's own, put in last, and the backend's settings
          -> rules/                          refuse what can't work and warn of what may not work

`trtllm_settings.py` has the reasons of TensorRT-LLM's arguments. An embedded engine needs only backend_settings.py.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations, product
from typing import Any

from deepseek_triton_build.arithmetic.gpu_memory import GPU_COUNTS, Budget, Layout, host_memory_to_prefetch
from deepseek_triton_build.build_errors import RefusedPlanError, UnknownNameError
from deepseek_triton_build.data import releases
from deepseek_triton_build.data.catalog import PRECISIONS, Gpu, KnownCheckpoint, Variant, find_variant, gpus, title_of
from deepseek_triton_build.data.finding import Code
from deepseek_triton_build.data.planned_settings import EnvironmentVariable, Omission, Setting, SettingsFile
from deepseek_triton_build.data.profiles import ANY_WORKLOAD, DEFAULT_PROFILE, Profile, Recipe, Workload
from deepseek_triton_build.data.vllm import VllmVersion, vllm_image_name, vllm_since
from deepseek_triton_build.planning.backend_settings import backend_settings, embedded_settings, holds_or_lies_in
from deepseek_triton_build.planning.plan_request import ENGINES, OPTIONS, PlanRequest
from deepseek_triton_build.planning.target import refuse, resolve_target
from deepseek_triton_build.planning.tensorrt_llm import TrtllmEngine
from deepseek_triton_build.planning.trtllm_sizes import choose_sizes
from deepseek_triton_build.planning.vllm import VllmEngine
from deepseek_triton_build.planning.vllm_sizes import choose_vllm_sizes, resolve_vllm_target
from deepseek_triton_build.rules.moe import UNPUBLISHED
from deepseek_triton_build.rules.rule import Violation


@dataclass(frozen=True, kw_only=True)
class PlanWarning:
    """A broken rule, or a known issue, that the plan is not refused for: a warning or a note."""

    rule: Code
    violation: Violation


_ONE_GPU = Layout(tensor_parallel_size=1, expert_parallel_size=1)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything a repository is written from."""

    request: PlanRequest
    variant: Variant
    engine: str
    settings: tuple[Setting, ...]
    """All settings under the release's own keys, in writing order: LLM arguments, then triton_config.*."""
    canonical: Mapping[str, Any] = field(default_factory=dict)
    """The LLM arguments, those of `files` too, under the keys of rules.rule.CANONICAL_RELEASE; vLLM's under its own."""
    environment: tuple[EnvironmentVariable, ...] = ()
    files: tuple[SettingsFile, ...] = ()
    """Files that settings name by their paths. They lie beside the YAML that names them."""
    unset_environment: tuple[EnvironmentVariable, ...] = ()
    """Variables that the guides set and the plan does not, with the guides' values; the reason says why."""
    layout: Layout = _ONE_GPU
    num_nodes: int = 1
    gpu: Gpu | None = None
    release: releases.Release | None = None
    vllm: VllmVersion | None = None
    checkpoint: KnownCheckpoint | None = None
    profile: Profile | None = None
    recipe: Recipe | None = None
    budget: Budget | None = None
    has_fp8_kv: bool = False
    """Whether TensorRT-LLM's KV cache is FP8, by the settings or the checkpoint."""
    workload: Workload = ANY_WORKLOAD
    max_concurrency: int = 0
    """Requests that decode together, in the whole instance."""
    host_memory: int = 0
    """Bytes of memory that a node should have available: for prefetching the checkpoint, and `shared_memory`."""
    shared_memory: int = 0
    """Bytes in each node's /dev/shm of the online load balancer's copy of the experts, or of Engram's tables."""
    host_tables: int = 0
    """Bytes of Engram's tables in the memory of a node, in /dev/shm or not."""
    warnings: tuple[PlanWarning, ...] = ()
    omissions: tuple[Omission, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of GPUs of one instance, which is also its number of MPI ranks."""
        return self.layout.num_gpus

    @property
    def title(self) -> str:
        return title_of(self.variant, self.checkpoint)

    @property
    def precision(self) -> str | None:
        return None if self.checkpoint is None else self.checkpoint.precision

    @property
    def carries_checkpoint(self) -> bool:
        """Whether the variant's own checkpoint lies in the repository. The simulated engine reads none."""
        return bool(self.variant.model) and not self.request.model and self.engine != "simulated"

    @property
    def image(self) -> str | None:
        """The container to run the plan in: the one asked for, else the newest with the release or the vLLM version.
        None: no published one has it."""
        if self.vllm is not None:
            tags = self.vllm.containers
            return vllm_image_name(self.request.container or tags[0]) if tags else None
        if self.release is None or not self.release.containers:
            return None
        asked, known = self.request.container, self.release.containers
        return releases.image_name(asked if asked in known else known[0])

    def image_for(self, format: str) -> str | None:
        """The container to run a format's script in. TensorRT-LLM's own has its examples and benchmarks, too; vLLM has
        one of its own for every version."""
        if self.vllm is not None and format != "triton" and self.request.container is None:
            return f"vllm/vllm-openai:v{self.vllm.version}"
        if format == "dynamo":
            return releases.find_dynamo(self.request.dynamo).image
        if format == "triton" or self.release is None or self.request.container is not None:
            return self.image
        return releases.release_image_name(self.release.version)

    @property
    def gpus_per_node(self) -> int:
        return self.world_size // self.num_nodes


def make_plan(request: PlanRequest) -> Plan:
    """Make the plan for `request`.

    Of a checkpoint in `request.model` only config.json and hf_quant_config.json are read, as the weights may be on
    another machine. `check.read_facts` compares them with the tensors (W022, W023), and the command line asks it first.

    :raises UnknownNameError: for an unknown variant, GPU, precision, profile, engine or release.
    :raises RefusedPlanError: for a combination that can't work; its text and `suggestion` give the nearest that does.
    :raises UnusableCheckpointError: when a file of the checkpoint in `request.model` can't be read.
    """
    try:
        return _make_plan(request)
    except RefusedPlanError as refused:
        if refused.suggestion:
            raise
        ways = [{**way, **_refused_beside(way, request)} for way in _ways_that_work(request)]
        typed = ", or ".join(filter(None, map(_as_options, ways)))
        said = f"{refused.cause}; what works: {typed}" if typed else f"{refused}"
        raise RefusedPlanError(said, suggestion=ways[0] if ways else None) from None


def _refused_beside(way: Mapping[str, Any], request: PlanRequest) -> dict[str, Any]:
    """Return what the command line refuses beside `way`."""
    not_vllms = {"release": None, "allow_unpublished": False} if way.get("engine") == "vllm" else {}
    dropped = {name: value for name, value in not_vllms.items() if getattr(request, name)}
    return dropped | ({"container": None} if request.container and way.keys() & {"release", "vllm", "engine"} else {})


# The combinations of a refusal are tried in thousands, most of them again for the next refusal of a matrix.
@lru_cache(maxsize=65536)
def _works(request: PlanRequest) -> bool:
    try:
        _make_plan(request)
    except RefusedPlanError:
        return False
    return True


@lru_cache(maxsize=512)
def _make_plan(request: PlanRequest) -> Plan:
    variant = find_variant(request.variant)
    engine = _engine(request, variant)
    if engine == "vllm":
        vllm = resolve_vllm_target(request)
        return _plan_on_gpus(VllmEngine(vllm, *choose_vllm_sizes(vllm)))
    if engine == "tensorrt_llm":
        target = resolve_target(request)
        return _plan_on_gpus(TrtllmEngine(target, *choose_sizes(target)))
    return Plan(request=request, variant=variant, engine=engine, settings=embedded_settings(request, variant, engine))


def _engine(request: PlanRequest, variant: Variant) -> str:
    engine = request.engine or variant.engines[0]
    if engine not in ENGINES:
        raise UnknownNameError("engine", engine, ENGINES)
    if engine not in variant.engines:
        raise RefusedPlanError(
            f"{variant.name} is not served on the {engine} engine here; it runs on: {', '.join(variant.engines)}"
        )
    if request.preset and engine != "simulated":
        other = "add --engine simulated, or " if "simulated" in variant.engines else ""
        said = f"--preset paces the simulated engine, not {engine}; {other}leave it out"
        raise RefusedPlanError(said, suggestion={"preset": None})
    if engine != "vllm" and (request.vllm is not None or request.parallel is not None):
        given = "--parallel" if request.vllm is None else "--vllm"
        without = {"vllm": None, "parallel": None}
        raise RefusedPlanError(f"{given} is for --engine vllm; leave it out, or add that", suggestion=without)
    if request.preset and not request.preset.endswith(".json") and request.preset not in variant.presets:
        raise UnknownNameError("preset", request.preset, variant.presets)
    return engine


def _plan_on_gpus(engine: TrtllmEngine | VllmEngine) -> Plan:
    target, workload, budget = engine.target, engine.sizes.workload, engine.budget
    arguments = engine.arguments(budget)
    if target.request.overrides:  # the reasons quote the memory that is left in the end
        budget = engine.left_by_own(arguments)
        arguments = engine.arguments(budget)
    triton, unsampled = backend_settings(target, workload, budget, engine.limits(arguments), arguments.own)
    deployment, found, facts = engine.judged(
        arguments,
        triton={setting.key.removeprefix("triton_config."): setting.value for setting in triton},
        held_requests=budget.concurrent_requests(workload.isl or 0, workload.osl or 0),
    )
    refuse(found, also=() if target.request.takes_unpublished_experts else UNPUBLISHED)
    return Plan(
        request=target.request,
        variant=target.variant,
        engine=target.engine,
        settings=(*arguments.settings, *triton),
        canonical=deployment.settings,
        environment=engine.environment,
        files=arguments.files,
        unset_environment=engine.unset_environment,
        num_nodes=target.num_nodes,
        gpu=target.gpu,
        checkpoint=target.checkpoint,
        profile=target.profile,
        budget=budget,
        workload=workload,
        max_concurrency=deployment.get(engine.batch_key) * facts["layout"].attention_dp_size,
        host_memory=host_memory_to_prefetch(target.checkpoint)
        + (facts.get("host_tables") or facts.get("shared_memory", 0)),
        warnings=tuple(PlanWarning(rule=rule, violation=violation) for rule, violation in found),
        omissions=tuple(
            omission
            for omission in (*arguments.omissions, *unsampled)
            if not any(holds_or_lies_in(key, omission.key) for key, _ in target.request.overrides)
        ),
        **facts,
    )


# The requests that work nearest to one that is refused

_MOST_WAYS = 3
_TARGET = ("num_gpus", "precision", "engine", "parallel", "release", "vllm", "profile", "gpu")
"""The fields that say what a request is for. The others are extras: all are given up when nothing less helps."""
_DROPPED_OPTIONS = {
    **OPTIONS,
    "overrides": "--set",
    "relaxed_acceptance": "--relaxed-acceptance",
    "allow_unpublished": "--allow-unpublished",
    "workload": "--isl, --osl or --concurrency",
}
"""Field of PlanRequest -> its option or options, for values that a suggestion leaves out."""


def _as_options(suggestion: Mapping[str, Any]) -> str:
    """Return the suggestion as command line options; empty where only --set or the workload is wrong, for which the
    refusal's own fix says more."""
    if suggestion.keys() <= {"overrides", "workload"}:
        return ""
    words, without = [], []
    for name, value in suggestion.items():
        if value is True:
            words.append(_DROPPED_OPTIONS[name])
        elif name in OPTIONS and value is not None:
            words.append(f"{OPTIONS[name]} {value}")
        elif name != "release" or "container" not in suggestion:  # the release is that of --image
            without.append(_DROPPED_OPTIONS[name])
    return " ".join([*words, *(["without", " and ".join(without)] if without else [])])


def _ways_that_work(request: PlanRequest) -> tuple[Mapping[str, Any], ...]:
    """Return the fewest changes to `request`'s fields that make it work, the nearest first; none when nothing helps.

    There are several where one change is enough. Where only the user's own settings are wrong, they are the only way.
    """
    alternatives = _alternatives(request)
    engines = ({"engine": [engine]} for engine in alternatives.get("engine", ()))  # each is as near
    others = ({name: alternatives[name]} for name in alternatives if name != "engine")
    found = [way for row in (*engines, *others) if (way := _first_way(request, row, (*row,)))]
    if {"overrides": ()} in found:
        return ({"overrides": ()},)
    # Another checkpoint or no workload is no way to get what was asked for, unless there is no other.
    usual = [way for way in found if not way.keys() & {"workload", "model"}]
    if found:
        return tuple(usual[:_MOST_WAYS] or found[:1])
    # More than five changes make another request; nobody would take that for advice.
    for number in (2, 3, 4, 5):
        for names in combinations(alternatives, number):
            if way := _first_way(request, alternatives, names):
                return (way,)
    without_extras = {name: values[0] for name, values in alternatives.items() if name not in _TARGET}
    bare = dataclasses.replace(request, **without_extras)
    way = without_extras
    if without_extras and not _works(bare):
        way = {**without_extras, **_ways_that_work(bare)[0]}
    for name in tuple(way):
        fewer = {other: value for other, value in way.items() if other != name}
        way = fewer if _works(dataclasses.replace(request, **fewer)) else way
    return (way,)


def _first_way(
    request: PlanRequest, alternatives: Mapping[str, list[Any]], names: tuple[str, ...]
) -> dict[str, Any] | None:
    """Return the first change of all these fields that works; None when none does."""
    rows = (dict(zip(names, values, strict=True)) for values in product(*map(alternatives.__getitem__, names)))
    changes = (row | _refused_beside(row, request) for row in rows)
    return next((change for change in changes if _works(dataclasses.replace(request, **change))), None)


def _alternatives(request: PlanRequest) -> dict[str, list[Any]]:
    """Return field -> other values to try, the likeliest first. Extras are given up before the GPU."""

    def nearest_above(count: int) -> tuple[int, int]:
        """A sort key: more GPUs than asked for first, then the nearest number."""
        asked = request.num_gpus or 0
        return (0 if count > asked else 1, abs(count - asked))

    variant = find_variant(request.variant)
    has_engine = request.engine is None or request.engine in variant.engines
    usual = [releases.DEFAULT_RELEASE, None] if request.release else []
    tried: dict[str, list[Any]] = {
        "engine": [*variant.engines] if not has_engine else ["vllm"] if request.precision == "w4a16" else [],
        "num_gpus": sorted(set(GPU_COUNTS) - {request.num_gpus}, key=nearest_above),
        "precision": [] if request.model else [name for name in PRECISIONS if name != request.precision],
        "parallel": [None] if request.engine != "vllm" else [None, "tp", "dp"],
        "release": [*({variant.min_release} & {*releases.CANDIDATES}), *usual],
        "vllm": [vllm_since(variant.min_vllm)] if request.vllm else [],
        "profile": [variant.profile or DEFAULT_PROFILE],
        "allow_unpublished": [True] if request.engine != "vllm" else [],
        "pipeline_parallel_size": [1],
        "mtp": [3, None] if request.relaxed_acceptance else [None],
        "relaxed_acceptance": [False],
        "kv_dtype": [None],
        "overrides": [()],
        "workload": [ANY_WORKLOAD],
        "preset": [None],
        "model": [None],
        "gpu": [name for name in ("h200", "b200", "gb200-nvl72") if name in gpus()],
    }
    return {
        name: other
        for name, values in tried.items()
        if (other := [value for value in values if value != getattr(request, name)])
    }
