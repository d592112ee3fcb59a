"""The names of the simulated engine's presets, and the published runs that `bench --preset` measures it with."""

from array import array

import pytest

from deepseek_backend.engines.simulated.presets import PRESETS
from deepseek_backend.engines.simulated.scheduler import ScheduledRow, Scheduler
from deepseek_backend.engines.simulated.simulated_options import parse_options
from deepseek_triton_build.catalog import variants
from deepseek_triton_tools.bench.expected import compared_figures, presets
from deepseek_triton_tools.bench.result import BenchPoint, BenchResult, BenchRun, RequestRecord, Slo
from deepseek_triton_tools.bench.run_figures import run_figures

QUICKEST = "r1-h200-max-throughput"
SIMULATED = [name for name, preset in presets().items() if preset.simulated]


def test_each_simulated_deployment_is_in_the_catalogue_and_has_its_published_run():
    assert set(variants()["tiny"].presets) == set(PRESETS)
    assert sorted(presets()[name].simulated for name in SIMULATED) == sorted(PRESETS)


def closed_loop(preset, load):
    """Run a load on the simulated deployment's scheduler, on a virtual clock: the server and its client cost nothing.

    Returns the records of the measured requests.
    """
    options = parse_options({"preset": preset.simulated})
    scheduler = Scheduler(options.limits, num_ranks=options.deployment.num_ranks)
    records, unsent, now = {}, iter(range(load.num_warmup + load.num_requests)), 0.0

    def send():
        if (index := next(unsent, None)) is not None:
            row = ScheduledRow(
                num_input_tokens=preset.input_tokens, max_tokens=preset.output_tokens, length=preset.output_tokens
            )
            records[row] = RequestRecord(
                index=index,
                sent_s=now,
                num_input_tokens=preset.input_tokens,
                num_output_tokens=preset.output_tokens,
                chunk_tokens=array("I", (1, preset.output_tokens - 1)),
            )
            scheduler.add(row)

    for _ in range(load.concurrency):
        send()
    while not scheduler.idle:
        iteration = scheduler.step()
        now += options.deployment.step_seconds(iteration.loads)
        for row in iteration.moved:
            if not records[row].chunk_s:
                records[row].chunk_s = [now]
            if row.generated == row.length:
                records[row].chunk_s.append(now)
                records[row].ended_s = now
                send()
    return [record for record in records.values() if record.index >= load.num_warmup]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == QUICKEST else pytest.mark.nightly) for name in SIMULATED],
)
def test_the_shortened_run_of_a_simulated_deployment_gives_the_published_figures(name):
    preset = presets()[name]
    (load,) = preset.loads(short=True)
    figures = run_figures(closed_loop(preset, load), gpus=preset.gpus, concurrency=load.concurrency)
    nothing = {"date": "", "urls": (), "model": "", "dataset": ""}
    points = (BenchPoint(load=load, runs=(BenchRun(figures=figures),)),)
    result = BenchResult(endpoint="triton-http", gpus=preset.gpus, slo=Slo(), points=points, **nothing)
    deviations = {figure.name: figure.deviation for figure in compared_figures(preset, result)}
    assert len(deviations) >= 5
    assert {name: deviation for name, deviation in deviations.items() if abs(deviation) > 0.1} == {}
