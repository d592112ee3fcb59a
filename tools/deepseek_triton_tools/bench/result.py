"""Holds what is measured: the times of each request, the figures of a run, and a whole benchmark with its files."""

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from deepseek_triton_tools.bench.workload import LoadPoint
from deepseek_triton_tools.host.whole_file import whole_file
from deepseek_triton_tools.tool_errors import ToolError

Outcome = Literal["completed", "failed", "cancelled"]
"""failed: an error, or an end that is none (finish reason "timeout"). cancelled: left by the client."""


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Times are seconds since the start of the run, on one clock for all processes of it."""

    index: int
    """Number of the conversation in the dataset."""
    turn: int = 0
    due_s: float | None = None
    """Open loop and trace: when it was to be sent."""
    sent_s: float = 0.0
    chunk_s: Sequence[float] = field(default_factory=list)
    """When each chunk that held tokens came."""
    chunk_tokens: Sequence[int] = field(default_factory=list)
    """The number of tokens in each of them. They add up to `num_output_tokens`."""
    ended_s: float = 0.0
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    asked_tokens: int | None = None
    """The number of tokens that the answer was to have; None: as many as the model likes."""
    num_cached_tokens: int | None = None
    outcome: Outcome = "completed"
    finish_reason: str | None = None
    error: str = ""
    """For a request that failed, the machine-readable code if there is one, and the message."""
    url: str = ""
    """The server that was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """The values of one quantity; all zero when nothing was measured."""

    mean: float = 0.0
    std: float = 0.0
    min: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Limits that a request must keep to count for goodput, in milliseconds; None is no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_ms: float | None = None
    """The request's longest gap between two tokens."""
    e2el_ms: float | None = None

    def __str__(self) -> str:
        limits = asdict(self).items()
        return ", ".join(f"{name.removesuffix('_ms').upper()} {limit:g} ms" for name, limit in limits if limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineBin:
    """One part of the run's time."""

    at_s: float
    """Its begin."""
    inflight: float
    """Requests under way, on average."""
    output_tokens: int
    requests_sent: int
    requests_ended: int
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSummary:
    """One series of a server's /metrics during a run."""

    first: float
    last: float
    mean: float
    max: float

    @property
    def increase(self) -> float:
        return self.last - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Only completed requests count, but for the numbers that say otherwise. Times are in milliseconds.

    Several tools call different things TPS/user; here each has a name of its own.
    """

    duration_s: float
    """From the first request sent to the last end."""
    completed: int
    failed: int
    cancelled: int
    short: int = 0
    """Completed requests with fewer tokens than were asked for with ignore_eos: the server has a limit."""
    errors: dict[str, int] = field(default_factory=dict)
    """Error -> how often, the most frequent ones; what the server cancelled is one too."""
    total_input_tokens: int
    total_output_tokens: int
    total_cached_tokens: int = 0
    input_tokens: Distribution = Distribution()
    """A value for each request; this holds of the next one too."""
    output_tokens: Distribution = Distribution()
    request_throughput: float
    """Completed requests a second."""
    output_throughput: float
    """Output tokens a second."""
    total_token_throughput: float
    """Input and output tokens a second."""
    peak_output_throughput: float = 0.0
    """The most tokens in one second; seconds are counted from the first request."""
    peak_concurrency: int = 0
    """The most requests under way at once; failed and cancelled ones too."""
    output_throughput_per_gpu: float | None = None
    """None where the number of GPUs is not known."""
    user_throughput: float
    """Mean over requests of output tokens / end-to-end latency: trtllm-bench's and benchmark_serving's TPS/user."""
    decode_user_throughput: float
    """1000 / mean TPOT in ms: without the first token; InferenceX's interactivity."""
    decode_speed: Distribution = Distribution()
    """For each request 1000 / TPOT in ms, tokens a second: AIPerf's TPS/user, trtllm-bench's GTPS."""
    concurrency_user_throughput: float | None = None
    """Output throughput / concurrency: vLLM's Pareto plot. None in an open loop."""
    ttft_ms: Distribution
    """Time to first token."""
    tpot_ms: Distribution
    """For each request (last chunk - first chunk) / (tokens - those of the first chunk)."""
    itl_ms: Distribution
    """For each token the gap between chunks, divided by the tokens of the later chunk."""
    chunk_gap_ms: Distribution
    """The gap between two chunks: what benchmark_serving calls ITL."""
    e2el_ms: Distribution
    lag_ms: Distribution
    """Open loop and trace: from when a request was due to when it was sent; of all requests, failed ones too. A large
    one means that this client, not the server, was the limit."""
    client_delay_ms: float = 0.0
    """How late the load processes woke up, 99th percentile: times are not exact to more than this."""
    goodput: float | None = None
    """Requests a second that kept the SLO; None without one."""
    good_share: float | None = None
    """Those requests / all that were sent."""

    def value(self, path: str) -> float | None:
        """Return a number by its path, such as "goodput" or "ttft_ms.p99"; None where nothing was measured."""
        name, _, statistic = path.partition(".")
        value: Distribution | float | None = getattr(self, name)
        if isinstance(value, Distribution):
            return float(getattr(value, statistic)) if value.count else None
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    figures: Figures
    timeline: tuple[TimelineBin, ...] = ()
    server_metrics: Mapping[str, MetricSummary] = field(default_factory=dict)
    """Series of the servers' /metrics, GPU telemetry too, by name with labels."""
    interrupted: bool = False
    """Ctrl-C ended it early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPoint:
    load: LoadPoint
    runs: tuple[BenchRun, ...]
    """Repeated runs of the same load, at least one."""

    @property
    def whole_runs(self) -> tuple[BenchRun, ...]:
        return tuple(run for run in self.runs if not run.interrupted)

    @property
    def counted_runs(self) -> tuple[BenchRun, ...]:
        """Those that figures are of: the whole runs, or the interrupted one if it is the only one."""
        return self.whole_runs or self.runs

    @property
    def label(self) -> str:
        """The load's name, which says so if a run was interrupted."""
        return self.load.label + (", interrupted" if len(self.whole_runs) < len(self.runs) else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """This is written as bench.json, and every table and picture is made of it."""

    date: str
    """ISO 8601, UTC."""
    urls: tuple[str, ...]
    endpoint: str
    """triton-http, triton-grpc or openai."""
    model: str
    gpus: int | None
    dataset: str
    """The dataset in a few words: its kind and lengths."""
    slo: Slo
    points: tuple[BenchPoint, ...]
    command: str = ""
    preset: str = ""
    server: Mapping[str, Any] = field(default_factory=dict)
    """The server's own words: engine, variant, limits."""

    @property
    def served_model(self) -> str:
        """The model as its server calls it, for people. `model` is what requests name, such as tensorrt_llm."""
        return str(self.server.get("name") or self.model)


FILE_NAME = "bench.json"
SCHEMA = "deepseek-triton/bench/1"
"""Its number grows when a field goes or means something else; a field with a default may be added."""


def write_result(result: BenchResult, path: Path) -> None:
    """Write it whole or not at all. Raises ToolError."""
    write_document(result_document(result), path)


def result_document(result: BenchResult) -> dict[str, Any]:
    """Return the result as JSON has it. Infinity becomes "inf"."""
    document = {"schema": SCHEMA, **asdict(result)}
    for point in document["points"]:
        if point["load"]["rate"] == math.inf:
            point["load"]["rate"] = "inf"
    return document


def write_document(document: Mapping[str, Any], path: Path) -> None:
    """Write JSON, whole or not at all. Raises ToolError."""
    with whole_file(path) as file:
        json.dump(document, file, indent=1, allow_nan=False)
        file.write("\n")


def read_result(path: Path) -> BenchResult:
    """Read a file that `write_result` wrote, or FILE_NAME in a folder.

    :raises ToolError: where it can't be read; it names the first field that is wrong.
    """
    import msgspec

    path = path / FILE_NAME if path.is_dir() else path
    try:
        document = json.loads(path.read_text("utf-8"), object_hook=_with_infinity)
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"its schema is {schema!r}")
        return msgspec.convert(document, BenchResult)
    except OSError as error:
        raise ToolError(f"{path} can't be read: {error.strerror}", exit_code=2) from error
    except (ValueError, msgspec.ValidationError) as error:  # JSON's and UTF-8's errors are ValueErrors
        said = f"{path}: expected what deepseek-triton bench writes, {SCHEMA}; {error}"
        raise ToolError(said, exit_code=2) from error


def _with_infinity(part: dict[str, Any]) -> dict[str, Any]:
    return part | {"rate": math.inf} if part.get("rate") == "inf" else part


# --- figures.csv ---


def csv_text(result: BenchResult) -> str:
    """A row for each run, a column for each number, and the same columns in every file; what is unknown is empty."""
    rows = [
        {
            **{name: getattr(result, name) for name in ("date", "model", "endpoint", "dataset", "gpus")},
            "load": point.load.label,
            **{name: getattr(point.load, name) for name in ("concurrency", "rate", "burstiness", "num_requests")},
            "run": number,
            "interrupted": int(run.interrupted),
            **dict(_numbers(run.figures)),
        }
        for point in result.points
        for number, run in enumerate(point.runs, start=1)
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0] if rows else (), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _numbers(figures: Figures) -> Iterator[tuple[str, float | None]]:
    for each in fields(figures):
        value = getattr(figures, each.name)
        if isinstance(value, Distribution):
            yield from ((f"{each.name}_{part.name}", getattr(value, part.name)) for part in fields(value))
        elif not isinstance(value, dict):
            yield each.name, value


# --- The records of a run ---

# Times are written in microseconds, which halves the file.
_DIGITS = 6
_TIMES = ("due_s", "sent_s", "ended_s")


def write_samples(records: Iterable[RequestRecord], path: Path) -> None:
    """Write a line of JSON for each request, whole or not at all; compressed where the name ends in .gz.

    :raises ToolError: where it can't be written.
    """
    with whole_file(path) as file:
        for record in records:
            sample = {each.name: getattr(record, each.name) for each in fields(record)}
            sample |= {name: round(sample[name], _DIGITS) for name in _TIMES if sample[name] is not None}
            sample["chunk_s"] = [round(time, _DIGITS) for time in record.chunk_s]
            sample["chunk_tokens"] = list(record.chunk_tokens)
            file.write(json.dumps(sample, separators=(",", ":")) + "\n")
