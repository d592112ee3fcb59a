"""Rules G: the orchestrator of trtllm-serve, which joins context and generation servers (disagg_config.yaml)."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from deepseek_triton_build.data.releases import Release, load_release
from deepseek_triton_build.data.type_strings import fits, in_words
from deepseek_triton_build.rules.disaggregation import CONTEXT, GENERATION, ServerPair
from deepseek_triton_build.rules.rule import CANONICAL_RELEASE, RuleTable, Violation
from deepseek_triton_build.text import nearest_name, short_repr

RULES = RuleTable()
CONFIG_NAME = "disagg_config.yaml"
SCRIPT_NAME = "orchestrator.sh"
_DEFAULT_PORT, _DEFAULT_HOST = 8000, "localhost"
_THIS_MACHINE = ("localhost", "127.0.0.1", "0.0.0.0")
DEFAULT_TIMEOUT_S = 180
"""Seconds that trtllm-serve waits for its servers to start, and for a request, unless -t and -r say more."""
KV_AWARE = "kv_cache_aware"
CLUSTER = "disagg_cluster"
_ROUTERS = ("round_robin", "load_balancing", KV_AWARE)
_CLUSTER_KEYS = ("cluster_uri", "cluster_name", "minimal_instances", "heartbeat_interval_sec", "inactive_timeout_sec")
# Top-level keys that the orchestrator reads itself. Both sections inherit every other one.
_OWN_KEYS = (
    *("hostname", "port", "max_retries", "perf_metrics_max_requests", "conditional_disagg_config", CLUSTER),
    *("context_servers", "generation_servers"),
)
_SERVER_KEYS = ("num_instances", "urls", "router")
_ADDRESS = re.compile(r"[^:/\s]+:[0-9]{1,5}")
_COUNT = "int 0.."
_SERVERS = {
    "num_instances": "int 1..",
    "router": "dict",
    "router.type": "str",
    "router.use_tokens": "bool",
    "router.max_batch_size": "int 1..",
    "router.tokens_per_block": "int 1..",
}
# Dotted path of disagg_config.yaml -> the type of its value.
_TYPES: Mapping[str, str] = {
    "hostname": "str",
    "port": "int 1..65535",
    "max_retries": _COUNT,
    "perf_metrics_max_requests": _COUNT,
    "conditional_disagg_config": "dict",
    "conditional_disagg_config.max_local_prefill_length": _COUNT,
    CLUSTER: "dict",
    f"{CLUSTER}.cluster_uri": "str",
    f"{CLUSTER}.cluster_name": "str",
    f"{CLUSTER}.minimal_instances": "dict",
    f"{CLUSTER}.minimal_instances.context_servers": _COUNT,
    f"{CLUSTER}.minimal_instances.generation_servers": _COUNT,
    f"{CLUSTER}.heartbeat_interval_sec": "int 1..",
    f"{CLUSTER}.inactive_timeout_sec": "int 1..",
    **{f"{side}_servers": "dict" for side in (CONTEXT, GENERATION)},
    **{f"{side}_servers.{key}": kind for side in (CONTEXT, GENERATION) for key, kind in _SERVERS.items()},
}
# Sections that have no other keys than those of _TYPES; for CLUSTER itself: G026.
_CLOSED = (
    "conditional_disagg_config",
    f"{CLUSTER}.minimal_instances",
    *(f"{side}_servers.router" for side in (CONTEXT, GENERATION)),
)


@dataclass(frozen=True, kw_only=True)
class Orchestrator:
    """The content of disagg_config.yaml, and how the orchestrator is started. None: not known."""

    config: Mapping[str, Any]
    release: Release | None = None
    start_timeout_s: int | None = None
    request_timeout_s: int | None = None
    has_metadata_server: bool = False
    load_s: int | None = None
    """Seconds within which a server has to be ready."""
    pair: ServerPair | None = None
    ports: Mapping[str, str] = field(default_factory=dict)
    """Side -> the port that its script gives a server, unless PORT says otherwise."""

    def section(self, side: str) -> Mapping[str, Any]:
        """Return the section of a side; an empty one where it is missing or no mapping."""
        return self.mapping(f"{side}_servers")

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return what a top-level key holds; nothing where it is no mapping."""
        return _mapping(self.config.get(key))

    @property
    def own_addresses(self) -> set[str]:
        """Every HOST:PORT that is the orchestrator itself."""
        port, host = self.config.get("port", _DEFAULT_PORT), self.config.get("hostname", _DEFAULT_HOST)
        return {f"{name}:{port}" for name in (_THIS_MACHINE if host in _THIS_MACHINE else (host,))}

    @cached_property
    def misspelled(self) -> Mapping[str, str]:
        """Dotted path of a key at the top or in a server section, where most keys are the servers' own -> the key of
        the orchestrator that is meant."""
        found: dict[str, str] = {}
        sections = {f"{side}_servers.": self.section(side) for side in (CONTEXT, GENERATION)}
        for path, value in {"": self.config, **sections}.items():
            known = _SERVER_KEYS if path else _OWN_KEYS
            for key in value.keys() - {*known}:
                near = nearest_name(key, known, lacks_some=True)
                if near is not None and load_release(CANONICAL_RELEASE).find_key(str(key)) is None:
                    found[f"{path}{key}"] = f"{path}{near}"
        return found

    def router(self, side: str) -> Mapping[str, Any]:
        return _mapping(self.section(side).get("router"))

    def is_before(self, version: str) -> bool:
        """Tell whether the release is known and older than `version`."""
        return self.release is not None and self.release.is_before(version)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


@RULES.error("G020")
def _addresses(orchestrator: Orchestrator) -> Iterator[Violation]:
    for side in (CONTEXT, GENERATION):
        urls = orchestrator.section(side).get("urls") or ()
        for url in urls if isinstance(urls, list | tuple) else (urls,):
            port = url.rpartition(":")[2] if isinstance(url, str) and _ADDRESS.fullmatch(url) else "0"
            if not 1 <= int(port) <= 65535:
                message = f"{short_repr(url)} is no HOST:PORT (port 1 to 65535), all that the orchestrator reads"
                fix = "write the host's name or IPv4 address and the port, without http://"
                yield Violation(f"{side}_servers.urls", message, fix)


@RULES.error("G021")
def _counts(orchestrator: Orchestrator) -> Iterator[Violation]:
    if orchestrator.mapping(CLUSTER):
        return
    for side in (CONTEXT, GENERATION):
        if {f"{side}_servers", f"{side}_servers.urls"}.intersection(orchestrator.misspelled.values()):  # G031
            continue
        section = orchestrator.section(side)
        urls, count = section.get("urls"), section.get("num_instances", 1)
        given = len(urls) if isinstance(urls, list | tuple) else 0
        if not given:
            message = f"no {side} server is named"
            fix = f"set {side}_servers.urls: [localhost:8001], with the address of each"
            yield Violation(f"{side}_servers.urls", message, fix)
        elif given != count:
            message = f"{side}_servers.num_instances is {short_repr(count)} and urls has {given}"
            fix = f"set {side}_servers.num_instances: {given}"
            yield Violation(f"{side}_servers.num_instances", message, fix)


@RULES.error("G022")
def _conditional(orchestrator: Orchestrator) -> Iterator[Violation]:
    kind = orchestrator.router(GENERATION).get("type", _ROUTERS[0])
    if orchestrator.mapping("conditional_disagg_config") and kind != KV_AWARE:
        message = f"conditional_disagg_config needs the generation router {KV_AWARE}, found {short_repr(kind)}"
        yield Violation("conditional_disagg_config", message, f"set generation_servers.router.type: {KV_AWARE}")


@RULES.error("G023")
def _routers(orchestrator: Orchestrator) -> Iterator[Violation]:
    for side in (CONTEXT, GENERATION):
        kind = orchestrator.router(side).get("type", _ROUTERS[0])
        if kind not in _ROUTERS:
            message = f"{short_repr(kind)} is no router of TensorRT-LLM 1.0 to 1.2"
            yield Violation(f"{side}_servers.router.type", message, f"use {', '.join(_ROUTERS)}")


@RULES.error("G024")
def _events(orchestrator: Orchestrator) -> Iterator[Violation]:
    if orchestrator.pair is None:
        return
    for side, d in orchestrator.pair.sides.items():
        if orchestrator.router(side).get("type") != KV_AWARE:
            continue
        key = "kv_cache_config.event_buffer_max_size"
        if not d.get(key):
            message = f"the {side} servers keep no events of their KV cache, which the router {KV_AWARE} reads"
            yield Violation(f"{side}_servers.router.type", message, f"set {key}: 1024 on the {side} servers")
        if not d.get("kv_cache_config.enable_block_reuse"):
            message = f"the {side} servers reuse no KV blocks, so that the router {KV_AWARE} has nothing to go by"
            fix = f"set kv_cache_config.enable_block_reuse: true on the {side} servers, or use another router"
            yield Violation(f"{side}_servers.router.type", message, fix)


@RULES.warning("G025")
def _block_size(orchestrator: Orchestrator) -> Iterator[Violation]:
    if orchestrator.pair is None:
        return
    for side, d in orchestrator.pair.sides.items():
        router = orchestrator.router(side)
        # 32 is the router's own default, whatever the servers' blocks hold.
        size = router.get("tokens_per_block", 32)
        if router.get("type") == KV_AWARE and size != d.tokens_per_block:
            message = f"the router's blocks have {size} tokens and the {side} servers' have {d.tokens_per_block}"
            yield Violation(f"{side}_servers.router.tokens_per_block", message, f"set it to {d.tokens_per_block}")


@RULES.error("G026")
def _cluster(orchestrator: Orchestrator) -> Iterator[Violation]:
    given = orchestrator.mapping(CLUSTER)
    if given and orchestrator.is_before("1.2.0"):
        assert orchestrator.release is not None  # is_before knows it
        message = f"TensorRT-LLM {orchestrator.release.version} has no {CLUSTER}"
        yield Violation(CLUSTER, message, "name the servers by urls, or use 1.2.0 or newer")
    for key in given:
        if key not in _CLUSTER_KEYS:
            # TensorRT-LLM's README of disaggregated serving has the wrong name.
            meant = "inactive_timeout_sec" if key == "inactive_interval_sec" else ", ".join(_CLUSTER_KEYS)
            yield Violation(f"{CLUSTER}.{key}", f"{CLUSTER} has no {short_repr(key)}", f"use {meant}")
    if given and "cluster_uri" not in given:
        yield Violation(CLUSTER, f"{CLUSTER} has no cluster_uri", "set it to http://HOST:PORT of the orchestrator")


@RULES.error("G027")
def _two_sources(orchestrator: Orchestrator) -> Iterator[Violation]:
    if orchestrator.mapping(CLUSTER) and orchestrator.has_metadata_server:
        message = f"the orchestrator is started with a metadata server, beside {CLUSTER}"
        yield Violation(CLUSTER, message, f"remove {CLUSTER}, or the flag --metadata_server_config_file")


@RULES.error("G028")
def _inherited(orchestrator: Orchestrator) -> Iterator[Violation]:
    for key, value in orchestrator.config.items():
        for side in (CONTEXT, GENERATION):
            theirs = orchestrator.section(side).get(key, value)
            if key not in _OWN_KEYS and theirs != value:
                message = f"{key} is {short_repr(value)} at the top and {short_repr(theirs)} for the {side} servers"
                yield Violation(f"{side}_servers.{key}", message, "write it in the sections only")


@RULES.error("G029")
def _start_timeout(orchestrator: Orchestrator) -> Iterator[Violation]:
    waits, load = orchestrator.start_timeout_s, orchestrator.load_s
    if waits is not None and load is not None and waits < load:
        message = f"the orchestrator waits {waits:,} s for its servers, and a load may take {load:,} s"
        yield Violation(None, message, f"start it with -t {load}")


@RULES.warning("G030")
def _request_timeout(orchestrator: Orchestrator) -> Iterator[Violation]:
    waits = orchestrator.request_timeout_s
    if waits is not None and waits <= DEFAULT_TIMEOUT_S:
        message = f"the orchestrator ends requests after {waits:,} s, with those that wait and decode for longer"
        yield Violation(None, message, "start it with -r 1200")


@RULES.error("G031")
def _types(orchestrator: Orchestrator) -> Iterator[Violation]:
    for key, meant in orchestrator.misspelled.items():
        message = f"{key} is no key of the orchestrator, and would go to the servers"
        yield Violation(key, message, f"did you mean {meant}?")
    given = dict(_below(orchestrator.config))
    for key, value in given.items():
        if key in _TYPES and value is not None and not fits(value, _TYPES[key]):
            words = in_words(_TYPES[key])
            yield Violation(key, f"{key}: expected {words}, found {short_repr(value)}", f"set it to {words}")
        section, _, name = key.rpartition(".")
        if section in _CLOSED and key not in _TYPES:
            known = [path.rpartition(".")[2] for path in _TYPES if path.rpartition(".")[0] == section]
            yield Violation(key, f"{section} has no {short_repr(name)}", f"use {', '.join(known)}")


def _below(values: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of each key, and of those below it."""
    for key, value in values.items():
        yield f"{path}{key}", value
        if isinstance(value, dict):
            yield from _below(value, f"{path}{key}.")


@RULES.error("G032")
def _once(orchestrator: Orchestrator) -> Iterator[Violation]:
    seen: set[str] = set()
    for side in (CONTEXT, GENERATION):
        urls = orchestrator.section(side).get("urls")
        for url in urls if isinstance(urls, list | tuple) else ():
            if isinstance(url, str) and url in seen:
                yield Violation(f"{side}_servers.urls", f"{short_repr(url)} is named twice", "name each server once")
            seen.add(str(url))


@RULES.error("G033")
def _own_port(orchestrator: Orchestrator) -> Iterator[Violation]:
    for side in (CONTEXT, GENERATION):
        urls = orchestrator.section(side).get("urls")
        for url in urls if isinstance(urls, list | tuple) else ():
            if isinstance(url, str) and url in orchestrator.own_addresses:
                message = f"{short_repr(url)} is the orchestrator's own address"
                yield Violation(f"{side}_servers.urls", message, "give the server another port, here and in its script")


@RULES.warning("G034")
def _scripts_port(orchestrator: Orchestrator) -> Iterator[Violation]:
    for side, port in orchestrator.ports.items():
        urls = orchestrator.section(side).get("urls")
        # Of several servers, each is started with a PORT of its own.
        url = urls[0] if isinstance(urls, list) and len(urls) == 1 else None
        is_other = isinstance(url, str) and _ADDRESS.fullmatch(url) and url.rpartition(":")[2] != port
        if is_other and url not in orchestrator.own_addresses:  # G033
            message = f"{side}_servers has {short_repr(url)}, and the {side} server's script listens on {port}"
            yield Violation(f"{side}_servers.urls", message, "write one port in both, or start the script with PORT")
