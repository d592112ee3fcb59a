"""All that is known of one request, and who is told of it: the metrics, the access log, the traces."""

import logging
import os
import re
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from deepseek_triton_tools.gateway.triton_call import Part

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class HandledRequest:
    """One HTTP request to the API, from its first line to its last byte.

    Times are those of time.perf_counter(), in seconds. Counts are those of all choices together.
    """

    request_id: str
    """The client's X-Request-Id, or one that was made."""
    route: str
    """The path as the gateway declares it, such as /v1/chat/completions."""
    began_s: float = field(default_factory=time.perf_counter)
    upstream_id: str = ""
    """Triton's `id` of the request. It differs from every other request's, whatever clients send."""
    key_name: str = ""
    """Whose API key it was; "" without a keys file."""
    model: str = ""
    """The name by which the gateway serves it; "" until it is known to exist."""
    stream: bool = False
    server: str = ""
    """The URL of the server that answered, or the last that was tried."""
    context_server: str = ""
    """The URL of the server that computed the prompt for it; "" where that server did all of it."""
    retries: int = 0
    """How many servers were asked in vain before that one."""
    status: int = 0
    """The response's; 0 where the client left before there was one."""
    error_code: str = ""
    """The error's code, or its type where it has none; "" for an answer."""
    finish_reason: str = ""
    """The first choice's."""
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None
    num_reasoning_tokens: int | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    client_left: bool = False
    """The client closed the connection before the answer was complete."""
    last_words: list[Part] = field(default_factory=list)
    """The model's server said this when it was told that the client had left: the counts to that moment."""
    tell: Callable[["HandledRequest"], None] = lambda record: None
    """Brings the counts above up to date while the answer goes on."""
    counted: dict[str, int] = field(default_factory=dict)
    """Metric -> as much of it as has been counted for this request."""
    trace_parent: str = ""
    """The client's `traceparent` header."""
    upstream_headers: dict[str, str] = field(default_factory=dict)
    """Headers of the request to Triton beside the settings' headers, such as a `traceparent` of our own span."""

    def token_came(self) -> None:
        """Note the time of tokens, the first and the last."""
        self.last_token_s = time.perf_counter()
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s

    @property
    def duration_s(self) -> float:
        return (self.ended_s or time.perf_counter()) - self.began_s

    @property
    def ttft_s(self) -> float | None:
        """Time to a stream's first token, from the request's first line. Other answers come all at once."""
        return self.first_token_s - self.began_s if self.stream and self.first_token_s is not None else None

    @property
    def mean_itl_s(self) -> float | None:
        """The mean time between two tokens of a stream; None for less than two."""
        if not self.stream or self.first_token_s is None or self.last_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output_tokens - 1)


def begin_record(route: str, headers: Iterable[tuple[bytes, bytes]]) -> HandledRequest:
    """The record of a request with these headers, as ASGI gives them.

    An X-Request-Id that isn't of at most 128 letters, digits and . _ : - is replaced, because it goes into headers and
    logs.
    """
    given = {name: value for name, value in headers if name in (b"x-request-id", b"traceparent")}
    request_id = given.get(b"x-request-id", b"").decode("latin-1")
    unique = uuid.uuid4().hex
    if not _REQUEST_ID.fullmatch(request_id):
        request_id = f"req-{unique}"
    # Clients send an id again with a retry, and a stop request at Triton ends every request that has the id.
    upstream_id = request_id if request_id.endswith(unique) else f"{request_id}-{unique[:12]}"
    trace_parent = given.get(b"traceparent", b"").decode("latin-1")
    return HandledRequest(request_id, route, upstream_id=upstream_id, trace_parent=trace_parent)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "deepseek_triton_gateway_"
MODEL_ROUTES = {"/v1/chat/completions": "chat", "/v1/responses": "chat", "/v1/completions": "text_completion"}
"""The routes that ask a model -> OpenTelemetry's gen_ai.operation.name."""
_TTFT, _ITL = "time_to_first_token_seconds", "inter_token_latency_seconds"
_SUMMED = {"generated_tokens_total", *(f"{name}_{end}" for name in (_TTFT, _ITL) for end in ("sum", "count"))}
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""The folder in which several processes count. prometheus_client reads it when it is imported."""


class GatewayFamily(NamedTuple):
    """One metric with its labels. A name that ends with _total is a counter's; buckets make a histogram."""

    name: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "histogram" if self.buckets else "gauge"


FAMILIES = (
    GatewayFamily(
        PREFIX + "requests_total",
        ("route", "model", "status", "error"),
        "Requests answered, by HTTP status and by the error's code; refusals by a key's limit have "
        "rate_limit_exceeded. The status is 0 where the client left before there was one.",
    ),
    GatewayFamily(PREFIX + "inflight_requests", (), "Requests under way."),
    GatewayFamily(PREFIX + "clients_left_total", ("model",), "Requests whose client left before the end."),
    GatewayFamily(PREFIX + "retries_total", (), "Servers that were asked in vain, after which another was asked."),
    GatewayFamily(PREFIX + "server_requests_total", ("server", "status"), "Requests by the server that answered last."),
    GatewayFamily(PREFIX + "server_up", ("server",), "1 for a server that gets requests, otherwise 0."),
    GatewayFamily(PREFIX + "prompt_tokens_total", ("model",), "Prompt tokens."),
    GatewayFamily(PREFIX + "cached_prompt_tokens_total", ("model",), "Prompt tokens found in a KV cache."),
    GatewayFamily(PREFIX + "generated_tokens_total", ("model",), "Tokens generated."),
    GatewayFamily(PREFIX + "reasoning_tokens_total", ("model",), "Tokens generated as reasoning."),
    GatewayFamily(PREFIX + "key_requests_total", ("key",), "Requests of an API key, by its name; refused ones too."),
    GatewayFamily(PREFIX + "key_tokens_total", ("key",), "Tokens of an API key, prompts and answers together."),
    GatewayFamily(
        PREFIX + _TTFT,
        ("model",),
        "Time from a streaming request's first line to its first token.",
        (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
    ),
    GatewayFamily(
        PREFIX + _ITL,
        ("model",),
        "Mean time between two tokens of a stream: one value for each request.",
        (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
    ),
    GatewayFamily(
        PREFIX + "request_duration_seconds",
        ("route",),
        "Time from a request's first line to the end of its response.",
        (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800),
    ),
)


class GatewayMetrics:
    """Counts what records say. With several processes, each counts into a file, and any can sum them."""

    def __init__(self) -> None:
        self._folder = os.environ.get(FOLDER_VARIABLE)
        self._registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._running: dict[str, HandledRequest] = {}
        for name, labels, text, buckets in FAMILIES:
            key = name.removeprefix(PREFIX)
            if name.endswith("_total"):
                self._counters[key] = Counter(name, text, labels, registry=self._registry)
            elif buckets:
                self._histograms[key] = Histogram(name, text, labels, registry=self._registry, buckets=buckets)
            else:  # every worker checks every server itself, so the newest word counts; requests add up
                mode: Literal["livemostrecent", "livesum"] = "livemostrecent" if labels else "livesum"
                self._gauges[key] = Gauge(name, text, labels, registry=self._registry, multiprocess_mode=mode)

    def begins(self, record: HandledRequest) -> None:
        self._gauges["inflight_requests"].inc()
        self._running[record.upstream_id] = record

    def ends(self, record: HandledRequest) -> None:
        self._gauges["inflight_requests"].dec()
        self._running.pop(record.upstream_id, None)
        model = record.model
        self._count("requests_total", 1, record.route, model, str(record.status), record.error_code)
        self._count("retries_total", record.retries)
        self._count("clients_left_total", int(record.client_left), model)
        self._count_tokens(record)
        if record.server:
            self._count("server_requests_total", 1, record.server, str(record.status))
        if record.key_name:
            self._count("key_requests_total", 1, record.key_name)
        self._histograms["request_duration_seconds"].labels(record.route).observe(record.duration_s)
        if (itl_s := record.mean_itl_s) is not None:
            self._histograms[_ITL].labels(model).observe(itl_s)

    def count_running(self) -> None:
        """Count what has come of the answers that go on."""
        for record in self._running.values():
            record.tell(record)
            self._count_tokens(record)

    def _count_tokens(self, record: HandledRequest) -> None:
        counted = record.counted
        num_input, num_output = record.num_input_tokens, record.num_output_tokens
        for name, number, label in (
            ("prompt_tokens_total", num_input, record.model),
            ("cached_prompt_tokens_total", record.num_cached_tokens or 0, record.model),
            ("generated_tokens_total", num_output, record.model),
            ("reasoning_tokens_total", record.num_reasoning_tokens or 0, record.model),
            ("key_tokens_total", num_input + num_output if record.key_name else 0, record.key_name),
        ):
            self._count(name, number - counted.get(name, 0), label)
            counted[name] = number
        if (ttft_s := record.ttft_s) is not None and _TTFT not in counted:
            counted[_TTFT] = 1
            self._histograms[_TTFT].labels(record.model).observe(ttft_s)

    def text(self, servers_up: Iterable[tuple[str, bool]] = (), *, names: bool = True) -> bytes:
        """All of it in Prometheus's text format, over all processes.

        servers_up: URL, and whether it gets requests, as this process knows: for one of its models is enough. names:
        with the series of single servers and API keys.
        """
        known = dict(sorted(servers_up))  # the last word counts
        for server, is_up in known.items():
            self._gauges["server_up"].labels(server).set(is_up)
        return generate_latest(_PresentMetrics(self._of_all_processes(), known if names else None))

    def sums(self) -> dict[str, float]:
        """Return the dashboard's sums, over all labels and processes.

        requests_asked: those to a model; requests_failed: those of them that got an error, be it amid a stream.
        """
        sums: dict[str, float] = defaultdict(float)
        for family in self._of_all_processes().collect():
            for name, labels, value, *_ in family.samples:
                key = name.removeprefix(PREFIX)
                if key in _SUMMED:
                    sums[key] += value
                elif key == "requests_total" and labels["route"] in MODEL_ROUTES:
                    sums["requests_asked"] += value
                    sums["requests_failed"] += value * (labels["error"] != "")
        return sums

    def _of_all_processes(self) -> CollectorRegistry:
        self.count_running()
        if self._folder is None:
            return self._registry
        # A killed worker leaves its requests in flight in its gauges. Its counters stay: they must not fall.
        for pid in {int(path.stem.rpartition("_")[2]) for path in Path(self._folder).glob("gauge_live*_*.db")}:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                mark_process_dead(pid, self._folder)  # type: ignore[no-untyped-call]
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=self._folder)  # type: ignore[no-untyped-call]
        return registry

    def _count(self, name: str, amount: int, *labels: str) -> None:
        if amount > 0:
            counter = self._counters[name]
            (counter.labels(*labels) if labels else counter).inc(amount)


class _PresentMetrics(Collector):
    """A registry without the series of servers that have left; their counters go on when they come back.

    servers: those that are there. None for no series of single servers and API keys.
    """

    def __init__(self, registry: CollectorRegistry, servers: Container[str] | None) -> None:
        self._registry = registry
        self._servers = servers

    def collect(self) -> Iterator[Metric]:
        servers = self._servers
        for family in self._registry.collect():
            family.samples = [
                sample
                for sample in family.samples
                if (
                    sample.labels.keys().isdisjoint({"server", "key"})
                    if servers is None
                    else sample.labels.get("server", "") in servers or "server" not in sample.labels
                )
            ]
            yield family


class _GoesOn(logging.Handler):
    """Tells once that lines can't be written, and how many are missing when they can be again."""

    num_missing = 0
    _is_written = True

    def emit(self, record: logging.LogRecord) -> None:
        self._is_written = True
        try:
            super().emit(record)
        except OSError:  # the file has gone, and can't be opened again
            self.handleError(record)
        if self._is_written and self.num_missing:
            _log.warning("the access log is written again; %d lines are missing", self.num_missing)
            self.num_missing = 0

    def handleError(self, record: logging.LogRecord) -> None:
        self._is_written = False
        if not self.num_missing:
            _log.error("the access log can't be written: %s; requests are served without it", sys.exc_info()[1])
        self.num_missing += 1


class _ToFile(_GoesOn, WatchedFileHandler):
    pass


class _ToStdout(_GoesOn, logging.StreamHandler):  # type: ignore[type-arg]  # Python 3.10 has it without arguments
    pass


class AccessLog:
    """Writes lines to a file or to stdout. Several processes may write to the same one.

    A file that was renamed, as logrotate does, is made anew. Where lines can't be written, as on a full disk, requests
    are served all the same.
    """

    def __init__(self, target: str) -> None:
        """`target` is a path, or "-" for stdout. Raises OSError."""
        self._handler = _ToStdout(sys.stdout) if target == "-" else _ToFile(target, encoding="utf-8")

    def ends(self, record: HandledRequest) -> None:
        """Write all fields; what did not come to be is null."""
        fields = {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "id": record.request_id,
            "upstream_id": record.upstream_id,
            "key": record.key_name or None,
            "route": record.route,
            "model": record.model or None,
            "stream": record.stream,
            "status": record.status or None,
            "error": record.error_code or None,
            "finish_reason": record.finish_reason or None,
            "server": record.server or None,
            "context_server": record.context_server or None,
            "retries": record.retries,
            "prompt_tokens": record.num_input_tokens,
            "cached_tokens": record.num_cached_tokens,
            "generated_tokens": record.num_output_tokens,
            "reasoning_tokens": record.num_reasoning_tokens,
            "ttft_s": record.ttft_s and round(record.ttft_s, 6),
            "itl_s": record.mean_itl_s and round(record.mean_itl_s, 6),
            "duration_s": round(record.duration_s, 6),
            "client_left": record.client_left,
        }
        self._handler.handle(logging.makeLogRecord({"msg": msgspec.json.encode(fields).decode()}))

    def close(self) -> None:
        self._handler.close()
