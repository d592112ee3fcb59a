"""The backend's counts: the table of metric families, and `BackendMetrics`, which counts in this process.

`publishing` writes the numbers to Triton's /metrics. Names follow the rules of Prometheus: base units, and _total for
counters.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate
from typing import get_args

from deepseek_backend.config import BackendConfig
from deepseek_backend.contract import ErrorCode
from deepseek_backend.engines.base import EngineStats, FinishReason
from deepseek_backend.release import recorded_version


class Kind(Enum):
    COUNTER = auto()
    GAUGE = auto()
    HISTOGRAM = auto()


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """One metric with all its series."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    """Names of its labels, beside model and version, which every series has."""
    known_values: tuple[str, ...] = ()
    """Values of its one label for which a series is there from the start, at 0: rate() can't see a step from nothing to
    1."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without infinity."""

    @property
    def series_names(self) -> tuple[str, ...]:
        """The names of its series in PromQL."""
        if self.kind is not Kind.HISTOGRAM:
            return (self.name,)
        return tuple(self.name + suffix for suffix in ("_bucket", "_sum", "_count"))


PREFIX = "deepseek_triton_"
ROUTING_PREFIX = "nv_trt_llm_"
"""Prefix of the two families that Triton's C++ backend for TensorRT-LLM has too. Routers read them by these names and
labels: Triton itself for its ORCA header (server/src/orca_http.cc), and the endpoint picker of the Gateway API
(llm-d-inference-scheduler, core-metrics-extractor)."""
_CODES = tuple(code.value for code in ErrorCode)


def _counter(name: str, text: str, label: str = "", known_values: tuple[str, ...] = ()) -> Family:
    labels = (label,) if label else ()
    return Family(name=PREFIX + name, kind=Kind.COUNTER, help=text, labels=labels, known_values=known_values)


def _gauge(name: str, text: str, *labels: str) -> Family:
    return Family(name=PREFIX + name, kind=Kind.GAUGE, help=text, labels=labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> Family:
    return Family(name=PREFIX + name, kind=Kind.HISTOGRAM, help=text, buckets=buckets)


ACCEPTED = _counter("requests_accepted_total", "Requests admitted.")
SEQUENCES = _counter(
    "sequences_accepted_total", "Sequences of the requests admitted: prompts times answers to each prompt."
)
REFUSED = _counter(
    "requests_refused_total", "Requests answered with an error before the engine got them.", "code", _CODES
)
FINISHED = _counter(
    "requests_finished_total",
    "Admitted requests that have had their final response, by finish reason or error code.",
    "outcome",
    (*get_args(FinishReason), *_CODES),
)
ABORTS = _counter(
    "aborts_total",
    "How often the engine was told to end a request early.",
    "cause",
    ("client_gone", "stop", "deadline", "drain", "stop_string", "error"),
)
PROMPT_TOKENS = _counter("prompt_tokens_total", "Prompt tokens, counted when a request ends.")
CACHED_TOKENS = _counter(
    "cached_prompt_tokens_total", "Prompt tokens found in the KV cache, counted when a request ends."
)
GENERATED_TOKENS = _counter(
    "generated_tokens_total", "Tokens generated. Under load up to 32 tokens of a sequence are counted at once."
)
DRAFT_TOKENS = _counter("draft_tokens_proposed_total", "Tokens that speculative decoding proposed.")
ACCEPTED_DRAFT_TOKENS = _counter(
    "draft_tokens_accepted_total", "Tokens that speculative decoding proposed and the model accepted."
)

INFLIGHT = _gauge("inflight_sequences", "Sequences admitted and not yet answered.")
INFLIGHT_TOKENS = _gauge(
    "inflight_tokens", "Tokens of the sequences in flight, prompts and max_tokens together, as admission counts them."
)
RUNNING = _gauge("engine_running_requests", "Sequences in the engine's running batch.")
WAITING = _gauge("engine_waiting_requests", "Sequences that wait in the engine to be scheduled.")
KV_USED = _gauge("kv_cache_used_blocks", "KV cache blocks in use.")
KV_CAPACITY = _gauge("kv_cache_capacity_blocks", "KV cache blocks in total; 0 where the engine does not report them.")
ROUTED_REQUESTS = Family(
    name=ROUTING_PREFIX + "request_metrics",
    kind=Kind.GAUGE,
    help="Sequences that wait in the engine, that its running batch has, and both together (active).",
    labels=("request_type",),
    known_values=("waiting", "scheduled", "active"),
)
ROUTED_BLOCKS = Family(
    name=ROUTING_PREFIX + "kv_cache_block_metrics",
    kind=Kind.GAUGE,
    help="KV cache blocks in use, free and in total (max), tokens in a block, and the share in use, from 0 to 1.",
    labels=("kv_cache_block_type",),
    known_values=("used", "free", "max", "tokens_per", "fraction"),
)
ENGINE_STAT = _gauge("engine_stat", "Other numbers that this engine reports, by name.", "name")
LAST_TOKEN_AGE = _gauge(
    "last_token_age_seconds",
    "Time since the last token of any request. It has a meaning only while sequences are in flight.",
)
READY = _gauge("ready", "1 when requests should be sent here, otherwise 0.")
LOAD_SECONDS = _gauge("load_duration_seconds", "Duration of a phase of the load.", "phase")
FIELD_UNSUPPORTED = _gauge(
    "field_unsupported", "1 for a request field that is refused here; the log has the reason.", "field"
)
INFO = _gauge("info", "Always 1; the labels say what is served, by which engine.", "engine", "checkpoint", "release")

FIRST_TOKEN = _histogram(
    "time_to_first_token_seconds",
    "Time from a request's arrival to its first token.",
    (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300),
)
INTER_TOKEN = _histogram(
    "inter_token_latency_seconds",
    "Time between two tokens of a sequence. For tokens that came together, the time is divided equally.",
    (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1, 5),
)
DURATION = _histogram(
    "request_duration_seconds",
    "Time from an admitted request's arrival to its final response.",
    (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600),
)
_POWERS_OF_2 = tuple(2.0**power for power in range(4, 18))
REQUEST_PROMPT_TOKENS = _histogram("request_prompt_tokens", "Prompt tokens of a request.", _POWERS_OF_2)
REQUEST_GENERATED_TOKENS = _histogram("request_generated_tokens", "Generated tokens of a request.", _POWERS_OF_2)

FAMILIES = tuple(value for value in list(globals().values()) if isinstance(value, Family))
"""The table: every family above."""

COMMON_LABELS = ("model", "version", "model_instance")
"""Labels of every series, the same as those of Triton's own metrics. model_instance is there only where a model has
several instances."""


@dataclass(frozen=True)
class MetricSample:
    """One number of a counter or a gauge."""

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, str]
    value: float


class Histogram:
    """Counts the values that fell into each bucket, and adds them up. Not thread-safe."""

    __slots__ = ("counts", "family", "sum")

    def __init__(self, family: Family) -> None:
        self.family = family
        self.counts = [0] * (len(family.buckets) + 1)
        """Values in each bucket; the last bucket is for what lies above all bounds."""
        self.sum = 0.0
        """Sum of all values."""

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.family.buckets, value)] += times
        self.sum += value * times

    def as_counters(self) -> Iterator[MetricSample]:
        """Yield the series that Prometheus makes of a histogram, each of them as a counter."""
        family, (bucket, total, count) = self.family, self.family.series_names
        cumulative = list(accumulate(self.counts))
        for bound, below in zip((*family.buckets, float("inf")), cumulative, strict=True):
            yield MetricSample(bucket, Kind.COUNTER, family.help, {"le": bound_text(bound)}, below)
        yield MetricSample(total, Kind.COUNTER, family.help, {}, self.sum)
        yield MetricSample(count, Kind.COUNTER, family.help, {}, cumulative[-1])


def bound_text(bound: float) -> str:
    """Return a bucket's bound as Triton's own histograms write it."""
    return "+Inf" if bound == float("inf") else f"{bound:.16g}"


class BackendMetrics:
    """Counts in this process. Thread-safe."""

    def __init__(self, info: Mapping[str, str] | None = None) -> None:
        """`info`: label of the family INFO -> its value."""
        self._lock = threading.Lock()
        self._values: dict[Family, dict[tuple[str, ...], float]] = {
            family: {(value,): 0.0 for value in family.known_values} if family.labels else {(): 0.0}
            for family in FAMILIES
            if family.kind is not Kind.HISTOGRAM
        }
        """Family -> label values -> number."""
        self._histograms = {family: Histogram(family) for family in FAMILIES if family.kind is Kind.HISTOGRAM}
        self._num_first_tokens = 0
        self._inter_token = self._histograms[INTER_TOKEN]
        if info is not None:
            self._values[INFO][tuple(info[label] for label in INFO.labels)] = 1

    def accepted(self, num_sequences: int) -> None:
        """A request was admitted."""
        with self._lock:
            self._add(ACCEPTED, 1)
            self._add(SEQUENCES, num_sequences)

    def refused(self, code: ErrorCode) -> None:
        """A request was answered with an error before it reached the engine."""
        with self._lock:
            self._add(REFUSED, 1, code.value)

    def first_token(self, seconds: float) -> None:
        """A request had its first token, `seconds` after it arrived."""
        with self._lock:
            self._histograms[FIRST_TOKEN].observe(seconds)

    def tokens(self, num_tokens: int, seconds: float | None) -> None:
        """A sequence had `num_tokens` more, `seconds` after its previous ones; None: these are its first.

        It is called once for steps of a sequence that are taken together; at low load, for each step.
        """
        with self._lock:
            if seconds is None:
                self._num_first_tokens += num_tokens
                return
            self._inter_token.observe(seconds / num_tokens, num_tokens)

    def ended(
        self, outcome: str, seconds: float, *, num_input_tokens: int, num_output_tokens: int, num_cached_tokens: int
    ) -> None:
        """A request had its final response: a finish reason or an error code, `seconds` after it arrived."""
        with self._lock:
            self._add(FINISHED, 1, outcome)
            self._add(PROMPT_TOKENS, num_input_tokens)
            self._add(CACHED_TOKENS, num_cached_tokens)
            self._histograms[DURATION].observe(seconds)
            self._histograms[REQUEST_PROMPT_TOKENS].observe(num_input_tokens)
            self._histograms[REQUEST_GENERATED_TOKENS].observe(num_output_tokens)

    def aborted(self, cause: str) -> None:
        """The engine was told to end something early; the causes are the known values of ABORTS."""
        with self._lock:
            self._add(ABORTS, 1, cause)

    def loaded(self, phases: Mapping[str, float], unsupported: Mapping[str, str]) -> None:
        """The engine is loaded: seconds of each phase, and the fields it refuses with the reasons."""
        with self._lock:
            for phase, seconds in phases.items():
                self._values[LOAD_SECONDS][(phase,)] = seconds
            for field in unsupported:
                self._values[FIELD_UNSUPPORTED][(field,)] = 1

    def observe_state(
        self, *, inflight: int, inflight_tokens: int, idle_s: float, ready: bool, stats: EngineStats
    ) -> None:
        """Set the gauges. Called once for each publication."""
        used, total = stats.kv_blocks_used, stats.kv_blocks_total
        waiting, running = stats.num_waiting, stats.num_running
        state = {
            INFLIGHT: inflight,
            INFLIGHT_TOKENS: inflight_tokens,
            LAST_TOKEN_AGE: idle_s,
            READY: ready,
            RUNNING: running,
            WAITING: waiting,
            KV_USED: used,
            KV_CAPACITY: total,
            DRAFT_TOKENS: stats.num_draft_tokens,
            ACCEPTED_DRAFT_TOKENS: stats.num_accepted_draft_tokens,
        }
        with self._lock:
            for family, value in state.items():
                self._values[family][()] = value
            for family, numbers in (
                (ROUTED_REQUESTS, (waiting, running, waiting + running)),
                (ROUTED_BLOCKS, (used, total - used, total, stats.tokens_per_block, used / total if total else 0)),
            ):
                for label, number in zip(family.known_values, numbers, strict=True):
                    self._values[family][(label,)] = number
            for name, value in stats.extra.items():
                self._values[ENGINE_STAT][(name,)] = value

    def samples(self) -> list[MetricSample]:
        """Return the present number of every series."""
        with self._lock:
            self._values[GENERATED_TOKENS][()] = self._num_first_tokens + sum(self._inter_token.counts)
            plain = [
                MetricSample(
                    family.name, family.kind, family.help, dict(zip(family.labels, values, strict=True)), number
                )
                for family, series in self._values.items()
                for values, number in series.items()
            ]
            return plain + [sample for each in self._histograms.values() for sample in each.as_counters()]

    def _add(self, family: Family, number: float, *values: str) -> None:
        series = self._values[family]
        series[values] = series.get(values, 0.0) + number


def info(config: BackendConfig) -> dict[str, str]:
    """Return the labels of INFO for this deployment.

    :raises ConfigError: when release.yaml is there but is not a release record.
    """
    return {"engine": config.engine, "checkpoint": config.model, "release": recorded_version(config.version_dir)}
