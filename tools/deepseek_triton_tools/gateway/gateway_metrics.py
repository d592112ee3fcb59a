"""The gateway's own metrics, for Prometheus. With several processes, each counts into a file, and any can sum them."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from deepseek_triton_tools.gateway.handled_request import HandledRequest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "deepseek_triton_gateway_"
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client reads it when it is imported."""

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_DURATION_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


@dataclass(frozen=True)
class GatewayFamily:
    """One metric with its labels."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


FAMILIES = tuple(
    GatewayFamily(PREFIX + name, kind, labels, text, buckets)
    for name, kind, labels, text, buckets in (
        (
            "requests_total",
            "counter",
            ("route", "model", "status", "error"),
            "Requests answered, by HTTP status and by the error's code; refusals by a key's limit have "
            "rate_limit_exceeded. The status is 0 where the client left before there was one.",
            (),
        ),
        ("inflight_requests", "gauge", (), "Requests under way.", ()),
        ("clients_left_total", "counter", ("model",), "Requests whose client left before the end.", ()),
        ("retries_total", "counter", (), "Servers that were asked in vain, after which another was asked.", ()),
        ("server_requests_total", "counter", ("server", "status"), "Requests by the server that answered last.", ()),
        ("server_up", "gauge", ("server",), "1 for a server that gets requests, otherwise 0.", ()),
        ("prompt_tokens_total", "counter", ("model",), "Prompt tokens.", ()),
        ("cached_prompt_tokens_total", "counter", ("model",), "Prompt tokens found in a KV cache.", ()),
        ("generated_tokens_total", "counter", ("model",), "Tokens generated.", ()),
        ("reasoning_tokens_total", "counter", ("model",), "Tokens generated as reasoning.", ()),
        ("key_requests_total", "counter", ("key",), "Requests of an API key, by its name; refused ones too.", ()),
        ("key_tokens_total", "counter", ("key",), "Tokens of an API key, prompts and answers together.", ()),
        (
            "time_to_first_token_seconds",
            "histogram",
            ("model",),
            "Time from a streaming request's first line to its first token.",
            _TTFT_S,
        ),
        (
            "inter_token_latency_seconds",
            "histogram",
            ("model",),
            "Mean time between two tokens of a stream: one value for each request.",
            _ITL_S,
        ),
        (
            "request_duration_seconds",
            "histogram",
            ("route",),
            "Time from a request's first line to the end of its response.",
            _DURATION_S,
        ),
    )
)


class GatewayMetrics:
    """Counts what RequestRecords say."""

    def __init__(self) -> None:
        self._folder = os.environ.get(FOLDER_VARIABLE)
        self._registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for family in FAMILIES:
            key = family.name.removeprefix(PREFIX)
            if family.kind == "counter":
                self._counters[key] = Counter(family.name, family.help, family.labels, registry=self._registry)
            elif family.kind == "histogram":
                self._histograms[key] = Histogram(
                    family.name, family.help, family.labels, registry=self._registry, buckets=family.buckets
                )
            else:
                mode: Literal["livesum", "livemostrecent"] = "livemostrecent" if family.labels else "livesum"
                self._gauges[key] = Gauge(
                    family.name, family.help, family.labels, registry=self._registry, multiprocess_mode=mode
                )

    def begins(self, record: HandledRequest) -> None:
        self._gauges["inflight_requests"].inc()

    def ends(self, record: HandledRequest) -> None:
        self._gauges["inflight_requests"].dec()
        model = record.model
        self._count("requests_total", 1, record.route, model, str(record.status), record.error_code)
        self._count("retries_total", record.retries)
        self._count("clients_left_total", int(record.client_left), model)
        self._count("prompt_tokens_total", record.num_input_tokens, model)
        self._count("cached_prompt_tokens_total", record.num_cached_tokens, model)
        self._count("generated_tokens_total", record.num_output_tokens, model)
        self._count("reasoning_tokens_total", record.num_reasoning_tokens, model)
        if record.server:
            self._count("server_requests_total", 1, record.server, str(record.status))
        if record.key_name:
            self._count("key_requests_total", 1, record.key_name)
            self._count("key_tokens_total", record.num_input_tokens + record.num_output_tokens, record.key_name)
        self._histograms["request_duration_seconds"].labels(record.route).observe(record.duration_s)
        for name, seconds in (
            ("time_to_first_token_seconds", record.ttft_s),
            ("inter_token_latency_seconds", record.mean_itl_s),
        ):
            if seconds is not None:
                self._histograms[name].labels(model).observe(seconds)

    def close(self) -> None:
        pass

    def text(self, servers_up: Iterable[tuple[str, bool]] = (), *, names: bool = True) -> bytes:
        """All of it in Prometheus's text format, over all processes.

        servers_up: what this process knows now. names: with the series of single servers and API keys.
        """
        known = dict(servers_up)
        for server, is_up in known.items():
            self._gauges["server_up"].labels(server).set(is_up)
        registry = self._registry
        if self._folder is not None:
            _forget_dead_processes(self._folder)
            registry = CollectorRegistry()
            MultiProcessCollector(registry, path=self._folder)  # type: ignore[no-untyped-call]
        return generate_latest(_ToldMetrics(registry, known if names else None))

    def _count(self, name: str, amount: int, *labels: str) -> None:
        if amount:
            counter = self._counters[name]
            (counter.labels(*labels) if labels else counter).inc(amount)


class _ToldMetrics(Collector):
    """A registry without the series of servers that have left; their counters go on when they come back.

    servers: those that are there. None for no series of single servers and API keys.
    """

    def __init__(self, registry: CollectorRegistry, servers: Container[str] | None) -> None:
        self._registry = registry
        self._servers = servers

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if self._is_told(sample.labels)]
            yield family

    def _is_told(self, labels: Mapping[str, str]) -> bool:
        if self._servers is None:
            return labels.keys().isdisjoint({"server", "key"})
        return "server" not in labels or labels["server"] in self._servers


def _forget_dead_processes(folder: str) -> None:
    """Remove the gauges of workers that have ended: a killed one leaves its requests in flight there. Its counters
    stay, because counters must not fall."""
    for pid in {int(path.stem.rpartition("_")[2]) for path in Path(folder).glob("gauge_live*_*.db")}:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            mark_process_dead(pid, folder)  # type: ignore[no-untyped-call]
