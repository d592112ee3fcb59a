"""One published benchmark run: what to send, how much of it, and which figures were published."""

from __future__ import annotations

from dataclasses import dataclass

from deepseek_triton_tools.bench.load.load_settings import LoadPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFigures:
    """None: the source doesn't have it. Means over the requests, by the definitions of `Figures`."""

    request_throughput: float | None = None
    output_throughput: float | None = None
    total_token_throughput: float | None = None
    user_throughput: float | None = None
    output_throughput_per_gpu: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetPoint:
    load: LoadPoint
    """The published one."""
    short: LoadPoint | None = None
    """Takes its place on the simulated engine, with as many users and fewer requests."""
    published: PublishedFigures | None = None

    def describes(self, load: LoadPoint) -> bool:
        """Tell whether `load` is this point's, with however many requests, unless they are all the load there is."""
        same_pace = (load.concurrency, load.rate) == (self.load.concurrency, self.load.rate)
        return same_pace and (self.load.rate is None or load.num_requests == self.load.num_requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPreset:
    title: str
    source: str
    """The document that has the run, with its section."""
    input_tokens: int
    output_tokens: int
    points: tuple[PresetPoint, ...]
    gpus: int
    server: str
    """The options of `deepseek-triton build` that make the server of the run."""
    simulated: str | None = None
    """The simulated engine's preset that stands for that server; None: it has none."""
    real_text: bool = False
    """Whether the figures depend on real prompts, as those of speculative decoding do."""
    note: str = ""
    """To be read before figures are compared."""

    def loads(self, *, short: bool) -> tuple[LoadPoint, ...]:
        """Return the points of the sweep, as published or shortened for the simulated engine. A point that has no
        shortened form is left out then, unless none has one."""
        shortened = tuple(point.short for point in self.points if point.short is not None)
        return shortened if short and shortened else tuple(point.load for point in self.points)
