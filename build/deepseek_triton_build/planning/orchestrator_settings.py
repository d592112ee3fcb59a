"""The settings of trtllm-serve's orchestrator, which joins context and generation servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deepseek_triton_build.arithmetic.load_time import ready_within_s
from deepseek_triton_build.data.planned_settings import Setting
from deepseek_triton_build.rules.disaggregation import CONTEXT, GENERATION, ServerPair
from deepseek_triton_build.rules.orchestrator import CLUSTER, KV_AWARE, Orchestrator

CONFIG_NAME = "disagg_config.yaml"
SCRIPT_NAME = "orchestrator.sh"
ORCHESTRATOR_PORT = 8000
LAST_PORT = 65535
MOST_SERVERS = LAST_PORT - ORCHESTRATOR_PORT
"""Servers of both sides together, each of which has a port of its own."""
REQUEST_TIMEOUT_S = 1200
"""Seconds that a request may take (TensorRT-LLM examples/disaggregated/slurm/benchmark)."""
_SEED = "TensorRT-LLM examples/models/core/deepseek_v3/README.md, Disaggregated Serving"


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
        start_timeout_s=load_limit_s(pair),
        request_timeout_s=REQUEST_TIMEOUT_S,
        load_s=load_limit_s(pair),
        pair=pair.well_typed(),
    )


def load_limit_s(pair: ServerPair) -> int:
    """Return the seconds within which all servers have to be ready."""
    return max(ready_within_s(d.checkpoint.weight_bytes) for d in pair.sides.values() if d.checkpoint is not None)


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
