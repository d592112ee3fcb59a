"""A disaggregated pair: context servers, which read prompts, and generation servers, which take over the KV cache.

Both sides are plans of one request. The rules of rules/disaggregation.py say whether they fit each other.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepseek_triton_build.build_errors import RefusedPlanError
from deepseek_triton_build.data.catalog import find_variant
from deepseek_triton_build.data.planned_settings import Setting
from deepseek_triton_build.data.profiles import ANY_WORKLOAD, DEFAULT_PROFILE, DISAGGREGATED
from deepseek_triton_build.planning.plan import Plan, PlanWarning, make_plan
from deepseek_triton_build.planning.plan_request import EMBEDDED_ENGINES, OPTIONS, PlanRequest
from deepseek_triton_build.planning.target import refuse
from deepseek_triton_build.rules import disaggregation_violations, orchestrator_violations
from deepseek_triton_build.rules.disaggregation import (
    BUFFER,
    CONTEXT,
    GENERATION,
    ServerPair,
    buffer_tokens,
    longest_prompt,
)
from deepseek_triton_build.rules.orchestrator import CLUSTER, KV_AWARE, Orchestrator
from deepseek_triton_build.rules.rule import Deployment

ORCHESTRATOR_PORT = 8000
LAST_PORT = 65535
MOST_SERVERS = LAST_PORT - ORCHESTRATOR_PORT
"""Servers of both sides together, each of which has a port of its own."""
REQUEST_TIMEOUT_S = 1200
"""Seconds that a request may take (TensorRT-LLM examples/disaggregated/slurm/benchmark)."""
_SEED = "TensorRT-LLM examples/models/core/deepseek_v3/README.md, Disaggregated Serving"
SIDE_PROFILES: Mapping[str, str] = {CONTEXT: "ctx", GENERATION: "gen"}
"""Side of a pair -> its profile."""


@dataclass(frozen=True, kw_only=True)
class DisaggregatedRequest:
    """A request for a plan of context and generation servers."""

    both: PlanRequest
    """The request for the servers of both sides. Its workload is the whole pair's; num_gpus is one server's number. Its
    profile is not read: each side has its own."""
    num_context: int = 1
    num_generation: int = 1
    context: tuple[tuple[str, Any], ...] = ()
    """Changes of the context servers: fields of PlanRequest (`num_gpus`, `pipeline_parallel_size`, `mtp`, `preset`),
    or LLM arguments under the release's keys."""
    generation: tuple[tuple[str, Any], ...] = ()
    """The same for the generation servers."""
    orchestrator: tuple[tuple[str, Any], ...] = ()
    """Own settings of trtllm-serve's orchestrator, by dotted paths of disagg_config.yaml."""


_OWN_FIELDS: Mapping[str, int] = {"num_gpus": 1, "pipeline_parallel_size": 1, "mtp": 0}
"""Field of PlanRequest that a side may change -> its least value."""


@dataclass(frozen=True, kw_only=True)
class DisaggregatedPlan:
    """The plan of one context server, of one generation server, and how many there are of each."""

    request: DisaggregatedRequest
    context: Plan
    generation: Plan
    num_context: int
    num_generation: int
    orchestrator: tuple[Setting, ...] = ()
    """Settings of trtllm-serve's orchestrator; none for an embedded engine."""
    start_timeout_s: int = 0
    """Seconds that the orchestrator waits for the servers."""
    warnings: tuple[PlanWarning, ...] = ()
    """The rules about the two sides together that are broken; each side's own are in its plan."""

    @property
    def sides(self) -> Mapping[str, Plan]:
        """Side -> its plan."""
        return {CONTEXT: self.context, GENERATION: self.generation}

    def count(self, side: str) -> int:
        """Return the number of servers of a side."""
        return self.num_context if side == CONTEXT else self.num_generation

    @property
    def num_gpus(self) -> int:
        """GPUs of all servers; 0 for an embedded engine."""
        if self.context.gpu is None:
            return 0
        return self.num_context * self.context.world_size + self.num_generation * self.generation.world_size


def make_disaggregated_plan(request: DisaggregatedRequest) -> DisaggregatedPlan:
    """Plan both sides of `request`, and check that they fit each other.

    The concurrency that is asked for is divided among the servers of a side.

    :raises UnknownNameError: as `make_plan` does.
    :raises RefusedPlanError: for a side or a pair that can't work.
    """
    _refuse_counts(request)
    engines = find_variant(request.both.variant).engines
    engine = request.both.engine or engines[0]
    if engine == "vllm":
        fix = f"leave {f'--profile {DISAGGREGATED}' if engines[0] == engine else '--engine vllm'} out"
        raise RefusedPlanError("profile disagg is for TensorRT-LLM's KV transfer", fix=fix)
    embedded = engine in EMBEDDED_ENGINES
    context, generation = (_plan_server(request, side, embedded=embedded) for side in SIDE_PROFILES)
    plan = DisaggregatedPlan(
        request=request,
        context=context,
        generation=generation,
        num_context=request.num_context,
        num_generation=request.num_generation,
    )
    if embedded:
        return plan
    if (longest := longest_prompt(_deployment(context))) is not None:
        context, generation = (_with_buffer(server, longest) for server in (context, generation))
        plan = replace(plan, context=context, generation=generation)
    pair = ServerPair(context=_deployment(context), generation=_deployment(generation))
    settings = orchestrator_settings(pair, request.num_context, request.num_generation, dict(request.orchestrator))
    found = [*disaggregation_violations(pair), *orchestrator_violations(make_orchestrator(pair, settings))]
    refuse(found)
    return replace(
        plan,
        orchestrator=settings,
        start_timeout_s=pair.load_limit_s,
        warnings=tuple(PlanWarning(rule=rule, violation=violation) for rule, violation in found),
    )


def _refuse_counts(request: DisaggregatedRequest) -> None:
    counts = {"--context-servers": request.num_context, "--generation-servers": request.num_generation}
    wrong = [f"{option} {count}: expected a whole number from 1" for option, count in counts.items() if count < 1]
    if sum(counts.values()) > MOST_SERVERS:
        given = " and ".join(f"{option} {count}" for option, count in counts.items())
        wrong.append(f"{given}: expected at most {MOST_SERVERS:,} together, whose ports end at {LAST_PORT:,}")
    for side, changes in ((CONTEXT, request.context), (GENERATION, request.generation)):
        for name, value in changes:
            if name in _OWN_FIELDS and (type(value) is not int or value < _OWN_FIELDS[name]):
                wrong.append(f"--{side}-set {name}={value}: expected a whole number from {_OWN_FIELDS[name]}")
    if wrong:
        raise RefusedPlanError("; ".join(wrong))


def _plan_server(request: DisaggregatedRequest, side: str, *, embedded: bool) -> Plan:
    try:
        return make_plan(_server_request(request, side, embedded=embedded))
    except RefusedPlanError as refused:
        said = f"{side}: {refused}"
        for name in _OWN_FIELDS.keys() & dict(request.context if side == CONTEXT else request.generation).keys():
            said = said.replace(f"{OPTIONS[name]} ", f"--{side}-set {name}=")  # where --gpus has no effect
        raise RefusedPlanError(said, suggestion=refused.suggestion) from None


def _server_request(request: DisaggregatedRequest, side: str, *, embedded: bool) -> PlanRequest:
    """Return the request for one server of a side. The embedded engines have no profiles."""
    changes = request.context if side == CONTEXT else request.generation
    count = request.num_context if side == CONTEXT else request.num_generation
    asked = request.both.workload
    if asked != ANY_WORKLOAD and asked.concurrency is not None:
        asked = replace(asked, concurrency=-(-asked.concurrency // count))
    own = (*_OWN_FIELDS, "preset")
    fields: dict[str, Any] = {name: value for name, value in changes if name in own}
    settings = tuple((name, value) for name, value in changes if name not in own)
    overrides = dict(request.both.overrides) | dict(settings)
    profile = DEFAULT_PROFILE if embedded else SIDE_PROFILES[side]
    return replace(request.both, profile=profile, workload=asked, overrides=tuple(overrides.items()), **fields)


def _with_buffer(server: Plan, longest: int) -> Plan:
    """Return the plan with a transfer buffer for prompts of `longest` tokens, unless its size was set by hand."""
    request, size = server.request, buffer_tokens(longest)
    if BUFFER in dict(request.overrides) or server.canonical.get(BUFFER, size) >= size:
        return server
    why = f"the context servers' longest prompt, {longest:,} tokens, in whole KV blocks"
    return make_plan(
        replace(request, overrides=(*request.overrides, (BUFFER, size)), measured=(*request.measured, (BUFFER, why)))
    )


def _deployment(plan: Plan) -> Deployment:
    return Deployment(
        settings=plan.canonical,
        release=plan.release,
        variant=plan.variant,
        architecture=plan.variant.architecture,
        checkpoint=plan.checkpoint,
        gpu=plan.gpu,
        environment={variable.name: variable.value for variable in plan.environment},
        isl=plan.request.workload.isl,
    )


# trtllm-serve's orchestrator, which joins the servers


def server_ports(num_context: int, num_generation: int) -> Mapping[str, tuple[int, ...]]:
    """Return side -> the port of each of its servers, which follow the orchestrator's."""
    first = ORCHESTRATOR_PORT + 1
    return {
        CONTEXT: tuple(range(first, first + num_context)),
        GENERATION: tuple(range(first + num_context, first + num_context + num_generation)),
    }


def orchestrator_settings(
    pair: ServerPair, num_context: int, num_generation: int, own: Mapping[str, Any]
) -> tuple[Setting, ...]:
    """Return the settings of disagg_config.yaml.

    :param own: the user's own settings, by their dotted paths, applied last.
    """
    rows = {row.key: row for row in _published(num_context, num_generation)}
    if any(key.startswith(CLUSTER) for key in own):  # the servers register themselves there
        rows = {key: row for key, row in rows.items() if not key.endswith((".num_instances", ".urls"))}
    for side, server in pair.sides.items():
        key = f"{side}_servers.router.tokens_per_block"
        if own.get(f"{side}_servers.router.type") == KV_AWARE:
            reason = "the size of the servers' KV blocks, or the hashes of blocks never match"
            rows[key] = Setting(key, server.tokens_per_block, reason)
    return tuple((rows | {key: Setting(key, value, "set by hand") for key, value in own.items()}).values())


def _published(num_context: int, num_generation: int) -> Iterator[Setting]:
    yield Setting("hostname", "localhost", "the address it listens on; 0.0.0.0 for clients on other machines", _SEED)
    yield Setting("port", ORCHESTRATOR_PORT, "for clients", _SEED)
    yield Setting("backend", "pytorch", "of all servers; both sections inherit it", _SEED)
    for side, ports in server_ports(num_context, num_generation).items():
        count = "how many addresses follow"
        addresses = f"HOST:PORT of each {side} server, as its serve.sh was started; no scheme, and no IPv6"
        yield Setting(f"{side}_servers.num_instances", len(ports), count)
        yield Setting(f"{side}_servers.urls", tuple(f"localhost:{port}" for port in ports), addresses)


def make_orchestrator(pair: ServerPair, settings: tuple[Setting, ...]) -> Orchestrator:
    """Return what the rules look at."""
    return Orchestrator(
        config=nested({setting.key: setting.value for setting in settings}),
        release=pair.context.release,
        start_timeout_s=pair.load_limit_s,
        request_timeout_s=REQUEST_TIMEOUT_S,
        load_s=pair.load_limit_s,
        pair=pair.well_typed(),
    )


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted paths as nested mappings."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *path, name = key.split(".")
        section = tree
        for part in path:
            if not isinstance(section.get(part), dict):
                section[part] = {}
            section = section[part]
        section[name] = value
    return tree
