"""The benchmark runs that NVIDIA's and vLLM's guides publish, by name, and their figures beside measured ones.

A test runs the shortened loads on the simulated deployments, and compares their figures with the published ones.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from deepseek_triton_tools.bench.figures import Figures
from deepseek_triton_tools.bench.result import BenchPoint, BenchResult
from deepseek_triton_tools.bench.workload import LoadPoint
from deepseek_triton_tools.terminal.tables import Table
from deepseek_triton_tools.tool_errors import ToolError


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


_BLOG = "TensorRT-LLM blog: How to get best performance on DeepSeek-R1"
_README = "TensorRT-LLM examples/models/core/deepseek_v3/README.md"
_GUIDE_0_19 = "TensorRT-LLM 0.19 examples/deepseek_v3/README.md"
_DEPLOYMENT_GUIDE = "TensorRT-LLM deployment guide for DeepSeek-R1"
_RECIPE = "vLLM recipe for DeepSeek-V3 and R1"

_MTP_NOTE = "drafts are accepted more or less often with other prompts: send texts of your own (--dataset FILE)"
_TRTLLM_WARMUP = 2
"""Requests that trtllm-bench sends before, unless --warmup says otherwise."""


def _one_user(published: PublishedFigures) -> tuple[PresetPoint, ...]:
    return (
        PresetPoint(
            load=LoadPoint(num_requests=10, num_warmup=_TRTLLM_WARMUP, concurrency=1),
            short=LoadPoint(num_requests=3, num_warmup=1, concurrency=1),
            published=published,
        ),
    )


def _many_users(
    concurrency: int, num_requests: int, *, num_warmup: int = 0, published: PublishedFigures
) -> tuple[PresetPoint, ...]:
    """A published run has many rounds of its concurrency. The short one has three: prompts in the first round, and
    empty places in the last, weigh as much together as they do in the published one."""
    return (
        PresetPoint(
            load=LoadPoint(num_requests=num_requests, num_warmup=num_warmup, concurrency=concurrency),
            short=LoadPoint(num_requests=3 * concurrency, concurrency=concurrency),
            published=published,
        ),
    )


def _all_at_once(published: dict[int, PublishedFigures] | None = None) -> tuple[PresetPoint, ...]:
    """The recipe's batch sizes, at a rate that sends each of them within a tenth of a second."""
    return tuple(
        PresetPoint(load=LoadPoint(num_requests=number, rate=10_000.0), published=(published or {}).get(number))
        for number in (1, 16, 32, 64, 128, 256, 512)
    )


_RECIPE_NOTE = "the recipe prints figures of one request only, and doesn't say on which GPUs"

PRESETS: dict[str, BenchPreset] = {
    "r1-b200-min-latency": BenchPreset(
        title="R1 in FP4 on 8 x B200, one user",
        source=f"{_BLOG}, B200 min-latency",
        input_tokens=1024,
        output_tokens=2048,
        points=_one_user(
            PublishedFigures(
                request_throughput=0.1341,
                output_throughput=274.4168,
                total_token_throughput=414.0461,
                user_throughput=274.7188,
                output_throughput_per_gpu=34.3021,
                e2el_ms=7456.1219,
            )
        ),
        gpus=8,
        server="deepseek-r1 --gpu b200 --profile latency --isl 1024 --osl 2048 --concurrency 1",
        simulated="b200x8-r1-fp4-min-latency",
        real_text=True,
        note=_MTP_NOTE,
    ),
    "r1-0528-b200-max-throughput": BenchPreset(
        title="R1-0528 in FP4 with an FP8 KV cache on 8 x B200, 7,168 users",
        source=f"{_BLOG}, B200 max-throughput for R1-0528 with FP8 KV cache",
        input_tokens=1024,
        output_tokens=2048,
        points=_many_users(
            7168,
            114_688,
            num_warmup=_TRTLLM_WARMUP,
            published=PublishedFigures(
                request_throughput=21.0675,
                output_throughput=43146.2042,
                total_token_throughput=65100.6376,
                user_throughput=6.1806,
                output_throughput_per_gpu=5393.2755,
                e2el_ms=332826.9898,
            ),
        ),
        gpus=8,
        server="nvidia/DeepSeek-R1-0528-FP4 --gpu b200 --profile throughput --isl 1024 --osl 2048 --concurrency 7168",
        simulated="b200x8-r1-0528-fp4-fp8kv-max-throughput",
    ),
    "r1-b200-max-throughput": BenchPreset(
        title="R1 in FP4 with a 16-bit KV cache on 8 x B200, 3,072 users",
        source=f"{_BLOG}, B200 max-throughput for R1 with FP16 KV cache",
        input_tokens=1024,
        output_tokens=2048,
        points=_many_users(
            3072,
            49_152,
            published=PublishedFigures(
                request_throughput=17.7657,
                output_throughput=36384.0838,
                total_token_throughput=54576.1257,
                user_throughput=11.9263,
                output_throughput_per_gpu=4548.0105,
                e2el_ms=172321.7206,
            ),
        ),
        gpus=8,
        server="deepseek-r1 --gpu b200 --profile throughput --isl 1024 --osl 2048 --concurrency 3072",
        simulated="b200x8-r1-fp4-max-throughput",
    ),
    "r1-h200-min-latency": BenchPreset(
        title="R1 in FP8 on 8 x H200, one user",
        source=f"{_BLOG}, H200 min-latency",
        input_tokens=1024,
        output_tokens=2048,
        points=_one_user(
            PublishedFigures(
                request_throughput=0.0772,
                output_throughput=158.0669,
                user_throughput=158.1196,
                output_throughput_per_gpu=19.7584,
                e2el_ms=12945.9379,
            )
        ),
        gpus=8,
        server="deepseek-r1 --gpu h200 --profile latency --isl 1024 --osl 2048 --concurrency 1",
        simulated="h200x8-r1-fp8-min-latency",
        real_text=True,
        note=_MTP_NOTE,
    ),
    "r1-h200-max-throughput": BenchPreset(
        title="R1 in FP8 on 8 x H200, 1,024 users",
        source=f"{_BLOG}, H200 max-throughput",
        input_tokens=1024,
        output_tokens=2048,
        points=_many_users(
            1024,
            5120,
            published=PublishedFigures(
                request_throughput=5.61,
                output_throughput=11489.2671,
                total_token_throughput=17233.9007,
                user_throughput=11.3476,
                output_throughput_per_gpu=1436.1584,
                e2el_ms=181540.5739,
            ),
        ),
        gpus=8,
        server="deepseek-r1 --gpu h200 --profile throughput --isl 1024 --osl 2048 --concurrency 1024",
        simulated="h200x8-r1-fp8-max-throughput",
    ),
    "r1-sweep": BenchPreset(
        title="R1-0528 with 32 to 4,096 users, five requests for each",
        source=f"{_DEPLOYMENT_GUIDE}, Benchmarking Performance",
        input_tokens=1024,
        output_tokens=1024,
        points=tuple(
            PresetPoint(load=LoadPoint(num_requests=5 * users, concurrency=users))
            for users in (32, 64, 128, 256, 512, 1024, 2048, 4096)
        ),
        gpus=8,
        server="deepseek-r1 --gpu b200 --profile throughput",
        note="the guide prints no figures",
    ),
    "r1-b200-64k": BenchPreset(
        title="R1 in FP4 on 8 x B200, prompts of 65,536 tokens",
        source=f"{_README}, long context support, ISL 64k",
        input_tokens=65_536,
        output_tokens=1024,
        points=(PresetPoint(load=LoadPoint(num_requests=24, rate=math.inf)),),
        gpus=8,
        server="deepseek-r1 --gpu b200 --profile long-64k",
        note="the document prints no figures",
    ),
    "r1-b200-128k": BenchPreset(
        title="R1 in FP4 on 8 x B200, prompts of 131,072 tokens",
        source=f"{_README}, long context support, ISL 128k",
        input_tokens=131_072,
        output_tokens=1024,
        points=(PresetPoint(load=LoadPoint(num_requests=4, rate=math.inf)),),
        gpus=8,
        server="deepseek-r1 --gpu b200 --profile long-128k",
        note="the document prints no figures",
    ),
    "v3-max-throughput": BenchPreset(
        title="V3 in FP8 on 8 x H20 with 141 GB, 1,024 users",
        source=f"{_GUIDE_0_19}, Running the Benchmark",
        input_tokens=1000,
        output_tokens=1000,
        points=(PresetPoint(load=LoadPoint(num_requests=8192, num_warmup=_TRTLLM_WARMUP, concurrency=1024)),),
        gpus=8,
        server="deepseek-v3 --gpu h20-141 --profile throughput --isl 1000 --osl 1000 --concurrency 1024",
        note="the document prints no figures",
    ),
    "v3-two-nodes": BenchPreset(
        title="V3 in FP8 on two nodes of 8 GPUs, 4,096 users",
        source=f"{_README}, Multi-node, mpirun",
        input_tokens=1000,
        output_tokens=1000,
        points=(PresetPoint(load=LoadPoint(num_requests=8192, num_warmup=_TRTLLM_WARMUP, concurrency=4096)),),
        gpus=16,
        server="deepseek-v3 --gpu h200 --gpus 16 --profile throughput --isl 1000 --osl 1000 --concurrency 4096",
        note="the document prints no figures",
    ),
    "r1-gb200-max-throughput": BenchPreset(
        title="R1 in FP4 on two trays of 4 x GB200, 3,072 users",
        source=f"{_README}, multi-node benchmark on a GB200 Slurm cluster",
        input_tokens=1024,
        output_tokens=2048,
        points=(PresetPoint(load=LoadPoint(num_requests=49_152, concurrency=3072)),),
        gpus=8,
        server="deepseek-r1 --gpu gb200 --profile throughput --isl 1024 --osl 2048 --concurrency 3072",
        note="the document prints no figures",
    ),
    "prompt-heavy": BenchPreset(
        title="long prompts, short answers, 1 to 512 at once",
        source=f"{_RECIPE}, Benchmarking",
        input_tokens=8000,
        output_tokens=1000,
        points=_all_at_once(
            {
                1: PublishedFigures(
                    request_throughput=0.06,
                    output_throughput=61.0,
                    total_token_throughput=543.06,
                    ttft_ms=560.0,
                    tpot_ms=15.85,
                )
            }
        ),
        gpus=8,
        server="deepseek-r1 --engine vllm --gpu h200 --gpus 8",
        note=_RECIPE_NOTE,
    ),
    "decode-heavy": BenchPreset(
        title="short prompts, long answers, 1 to 512 at once",
        source=f"{_RECIPE}, Benchmarking",
        input_tokens=1000,
        output_tokens=8000,
        points=_all_at_once(),
        gpus=8,
        server="deepseek-r1 --engine vllm --gpu h200 --gpus 8",
        note=_RECIPE_NOTE,
    ),
    "balanced": BenchPreset(
        title="prompts as long as answers, 1 to 512 at once",
        source=f"{_RECIPE}, Benchmarking",
        input_tokens=1000,
        output_tokens=1000,
        points=_all_at_once(),
        gpus=8,
        server="deepseek-r1 --engine vllm --gpu h200 --gpus 8",
        note=_RECIPE_NOTE,
    ),
}


def preset(name: str) -> BenchPreset:
    """Return the preset of that name.

    :raises ToolError: for an unknown name; it names all.
    """
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name, PRESETS, n=1)
    known = f"did you mean {near[0]}?" if near else f"there are {', '.join(PRESETS)}"
    raise ToolError(f"--preset {name}: there is none of this name; {known}", exit_code=2)


class _PublishedRow(NamedTuple):
    name: str
    published: Callable[[PublishedFigures], float | None]
    measured: Callable[[Figures], float | None]
    is_rate: bool


_ROWS = (
    _PublishedRow("requests/s", lambda p: p.request_throughput, lambda f: f.request_throughput, True),
    _PublishedRow("output tokens/s", lambda p: p.output_throughput, lambda f: f.output_throughput, True),
    _PublishedRow("all tokens/s", lambda p: p.total_token_throughput, lambda f: f.total_token_throughput, True),
    _PublishedRow("tokens/s a user", lambda p: p.user_throughput, lambda f: f.user_throughput, True),
    _PublishedRow("tokens/s a GPU", lambda p: p.output_throughput_per_gpu, lambda f: f.output_throughput_per_gpu, True),
    _PublishedRow("TTFT, ms", lambda p: p.ttft_ms, lambda f: f.ttft_ms.mean, False),
    _PublishedRow("TPOT, ms", lambda p: p.tpot_ms, lambda f: f.tpot_ms.mean, False),
    _PublishedRow("latency, ms", lambda p: p.e2el_ms, lambda f: f.e2el_ms.mean, False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedFigure:
    """One published figure, and what was measured, in the deployment's own time."""

    load: str
    name: str
    published: float
    measured: float

    @property
    def deviation(self) -> float:
        """Share of the published figure by which the measured one is above it."""
        return self.measured / self.published - 1


def compared_figures(preset: BenchPreset, result: BenchResult) -> Iterator[ComparedFigure]:
    """Yield the figures that both have; of repeated runs the mean. Times of a simulated server that runs faster than
    its deployment are multiplied by its speed, and rates divided."""
    speed = _speed(result)
    for point in result.points:
        known = [each.published for each in preset.points if each.describes(point.load) and each.published]
        for published in known:
            for row in _ROWS:
                expected, seen = row.published(published), _mean(row, point)
                if expected is not None and seen is not None:
                    seen = seen / speed if row.is_rate else seen * speed
                    yield ComparedFigure(load=point.load.label, name=row.name, published=expected, measured=seen)


def published_table(preset: BenchPreset, result: BenchResult) -> Table:
    """Lay the published figures beside the measured ones; without rows where the preset has none of these loads."""
    rows = [
        (
            figure.load,
            figure.name,
            _number(figure.published),
            _number(figure.measured),
            f"{100 * figure.deviation:+.1f}%",
        )
        for figure in compared_figures(preset, result)
    ]
    title = "; ".join([f"Beside {preset.source}", *_notes(preset, result)])
    return Table(
        title=title, headings=("load", "figure", "published", "measured", "deviation"), rows=rows, is_grid=True
    )


def _number(value: float) -> str:
    return f"{value:,.2f}" if value >= 1 else f"{value:.4f}"


def _notes(preset: BenchPreset, result: BenchResult) -> Iterator[str]:
    simulation = result.server.get("simulation")
    if simulation:
        simulated, speed = simulation.get("preset"), _speed(result)
        if simulated != preset.simulated:
            yield f"the server simulates {simulated or 'no deployment'}, which is not the one of these figures"
        if speed != 1:
            yield f"measured times are of the deployment, {speed:g} times those of this run"
        yield from _too_slow(result)
    elif preset.note:
        yield preset.note


_LOST = 0.01
"""Share of a run that the simulation may lose without a word."""


def _too_slow(result: BenchResult) -> Iterator[str]:
    """Say so where the server's machine could not keep the pace, which makes all times longer."""
    runs = [run for point in result.points for run in point.runs]
    lost = sum(
        summary.increase
        for run in runs
        for name, summary in run.server_metrics.items()
        if name.startswith("deepseek_triton_engine_stat{") and 'name="late_s"' in name
    )
    lasted = sum(run.figures.duration_s for run in runs)
    if lost > _LOST * lasted:
        yield (
            f"the server's machine was too slow for this pace, and lost {lost:,.0f} of {lasted:,.0f} s: set a lower "
            "speed in model.yaml"
        )


def _speed(result: BenchResult) -> float:
    """How many times as fast as the deployment the server is; 1 for a real one."""
    return float((result.server.get("simulation") or {}).get("speed", 1.0))


def _mean(row: _PublishedRow, point: BenchPoint) -> float | None:
    runs = [run.figures for run in point.counted_runs if run.figures.completed]
    seen = [value for figures in runs if (value := row.measured(figures)) is not None]
    return sum(seen) / len(seen) if seen else None
