"""Tables over repeated runs, and two results side by side."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton_tools.bench.load.load_settings import LoadPoint
from deepseek_triton_tools.bench.measuring.figures import Slo
from deepseek_triton_tools.bench.measuring.request_record import RequestRecord
from deepseek_triton_tools.bench.measuring.run_figures import run_figures
from deepseek_triton_tools.bench.results.bench_result import BenchPoint, BenchResult, BenchRun
from deepseek_triton_tools.bench.results.comparison import (
    Comparison,
    compare,
    comparison_document,
    comparison_tables,
)
from deepseek_triton_tools.bench.results.main_figures import Estimate, difference, estimate, t_quantile
from deepseek_triton_tools.bench.results.result_files import write_result
from deepseek_triton_tools.bench.results.result_tables import number_text, result_note, result_tables
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.tool_errors import ToolError

LOAD = LoadPoint(num_requests=10, concurrency=4)


def run(seconds: float, failed: int = 0) -> BenchRun:
    """A run in which each answer of 10 tokens takes this long."""
    done = RequestRecord(
        index=0,
        chunk_s=list(np.linspace(seconds / 10, seconds, 10)),
        chunk_tokens=[1] * 10,
        ended_s=seconds,
        num_input_tokens=5,
        num_output_tokens=10,
    )
    broken = RequestRecord(index=1, outcome="failed", error="overloaded", ended_s=seconds)
    return BenchRun(figures=run_figures([done] * 10 + [broken] * failed, gpus=2, concurrency=4))


def result(*seconds: float, load: LoadPoint = LOAD, **more) -> BenchResult:
    """One point, with a run for each of `seconds`."""
    return replace(
        BenchResult(
            date="2026-01-31T12:00:05+00:00",
            urls=("http://localhost:8000",),
            endpoint="triton-http",
            model="deepseek-r1",
            gpus=2,
            dataset="token-norm-dist 5/10",
            slo=Slo(),
            points=(BenchPoint(load=load, runs=tuple(map(run, seconds))),),
        ),
        **more,
    )


# --- Intervals ---


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706), (2, 4.303), (5, 2.571), (10, 2.228), (11, 2.201), (20, 2.086), (40, 2.021), (120, 1.980)],
)
def test_quantiles_are_the_published_ones(freedom, quantile) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, abs=0.003)


def test_an_interval_needs_two_runs() -> None:
    assert estimate([5.0]) == Estimate(5.0, None)
    assert difference([5.0], [6.0, 7.0]) == Estimate(1.5, None)


def test_an_interval_of_five_runs() -> None:
    """Mean 10.2, standard deviation 0.38079, quantile 2.776 of 4 degrees of freedom."""
    known = estimate([10.0, 10.5, 9.8, 10.7, 10.0])
    assert (known.mean, known.half_width) == pytest.approx((10.2, 0.4727), abs=0.001)


def test_welchs_interval_of_unequal_scatter() -> None:
    """The degrees of freedom are 4.35 here, rounded down to 4: the first list hardly scatters."""
    known = difference([10.0, 10.1, 9.9, 10.0, 10.0], [11.0, 12.0, 10.5, 11.5, 13.0])
    assert (known.mean, known.half_width) == pytest.approx((1.6, 1.198), abs=0.005)


_RUNS = st.lists(st.floats(0.001, 1e6), min_size=2, max_size=8)


@given(_RUNS, _RUNS)
def test_there_is_an_interval_for_all_runs(a, b) -> None:
    forth, back = difference(a, b), difference(b, a)
    assert forth.mean == -back.mean
    assert forth.half_width == pytest.approx(back.half_width)
    assert math.isfinite(forth.half_width)
    assert forth.half_width >= 0


@pytest.mark.slow
def test_the_interval_holds_the_true_difference_as_often_as_it_says() -> None:
    random = np.random.default_rng(5)
    trials = [difference(random.normal(10, 1, 4).tolist(), random.normal(12, 3, 6).tolist()) for _ in range(2000)]
    share = sum(abs(trial.mean - 2) <= trial.half_width for trial in trials) / len(trials)
    assert 0.94 <= share <= 0.98


# --- Our own tables ---


def test_tables_have_a_row_for_each_point() -> None:
    other = replace(LOAD, concurrency=64)
    points = (*result(1.0).points, *result(2.0, load=other).points)
    throughput, latencies = result_tables(result(points=points))

    assert throughput.title == "Throughput: deepseek-r1, token-norm-dist 5/10, 2 GPUs"
    assert [row[0] for row in throughput.rows] == ["concurrency 4", "concurrency 64"]
    named = dict(zip(throughput.headings, throughput.rows[0], strict=True))
    assert (named["tok/s"], named["tok/s/GPU"], named["tok/s/user"]) == ("100", "50", "10")
    assert dict(zip(latencies.headings, latencies.rows[1], strict=True))["E2EL p50"] == "2,000"


def test_columns_without_numbers_are_left_out() -> None:
    throughput, latencies = result_tables(result(1.0))
    assert "goodput req/s" not in throughput.headings
    assert "lag p99" not in latencies.headings


def test_repeated_runs_have_an_interval() -> None:
    throughput, _ = result_tables(result(1.0, 1.1, 0.9))
    assert dict(zip(throughput.headings, throughput.rows[0], strict=True))["tok/s"] == "100.7 ± 25.1"
    assert result_note(result(1.0, 1.1, 0.9)).startswith("± is the 95 % interval")


def cut(seconds: float) -> BenchRun:
    return replace(run(seconds), interrupted=True)


def test_an_interrupted_run_is_in_no_mean_and_is_named() -> None:
    point = result(1.0, 1.1, 0.9).points[0]
    partly = result(points=(replace(point, runs=(*point.runs, cut(9.0))),))
    throughput, _ = result_tables(partly)
    named = dict(zip(throughput.headings, throughput.rows[0], strict=True))

    assert named["load"] == "concurrency 4, interrupted"
    assert named["tok/s"] == "100.7 ± 25.1"
    assert "An interrupted run is in no figure" in result_note(partly)
    assert "interrupted" not in result_note(result(1.0, 1.1))


def test_an_interrupted_run_has_figures_if_it_is_the_only_one() -> None:
    throughput, _ = result_tables(result(points=(BenchPoint(load=LOAD, runs=(cut(1.0),)),)))
    assert dict(zip(throughput.headings, throughput.rows[0], strict=True))["tok/s"] == "100"


def test_a_single_run_says_that_it_has_no_interval() -> None:
    throughput, _ = result_tables(result(1.0))
    assert "±" not in str(throughput.rows)
    assert result_note(result(1.0)) == "Each point was run once, so there is no interval; --repeat 5 gives one."


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (3, "3"), (3.0, "3"), (0.13412, "0.134"), (5.678, "5.68"), (171.54, "171.5"), (43146.2, "43,146")],
)
def test_numbers_are_as_long_as_needed(value, text) -> None:
    assert number_text(value) == text


# --- Comparison ---


def verdicts(comparison: Comparison) -> dict[str, str]:
    [point] = comparison.points
    return {each.figure.name: each.verdict for each in point.figures}


def test_a_slower_server_is_worse_in_everything() -> None:
    found = verdicts(compare(result(1.0, 1.01, 0.99), result(1.5, 1.52, 1.48)))
    assert len(found) == 12
    assert set(found.values()) == {"worse"}


def test_a_faster_server_is_better_in_everything() -> None:
    found = verdicts(compare(result(1.5, 1.52, 1.48), result(1.0, 1.01, 0.99)))
    assert set(found.values()) == {"better"}


def test_a_change_within_the_scatter_is_noise() -> None:
    found = verdicts(compare(result(1.0, 1.2, 0.8), result(1.05, 1.25, 0.85)))
    assert set(found.values()) == {"noise"}


def test_the_same_figures_without_scatter_are_noise() -> None:
    assert set(verdicts(compare(result(1.0, 1.0), result(1.0, 1.0))).values()) == {"noise"}


@pytest.mark.parametrize(("a", "b"), [((1.0,), (2.0,)), ((1.0,), (2.0, 2.1)), ((1.0, 1.1), (2.0,))])
def test_nobody_can_say_after_a_single_run(a, b) -> None:
    assert set(verdicts(compare(result(*a), result(*b))).values()) == {"can't say"}


def test_figures_that_both_lack_are_left_out() -> None:
    assert "goodput" not in verdicts(compare(result(1.0), result(1.0)))
    assert "failed" not in verdicts(compare(result(1.0), result(1.0)))


def test_failures_are_worse_than_none() -> None:
    clean = result(1.0, 1.0)
    failing = replace(clean, points=(BenchPoint(load=LOAD, runs=(run(1.0, failed=2), run(1.0, failed=2))),))
    comparison = compare(clean, failing)
    assert verdicts(comparison)["failed"] == "worse"
    assert comparison.worse_by(5) == ["concurrency 4: failed 0 ± 0 -> 2 ± 0"]


def test_points_are_matched_by_their_load() -> None:
    at_64 = replace(LOAD, concurrency=64)
    a = result(points=(*result(1.0).points, *result(2.0, load=at_64).points))
    b = result(
        points=(
            *result(2.0, load=replace(at_64, num_requests=99)).points,
            *result(1.0, load=LoadPoint(num_requests=1, rate=2.0)).points,
        )
    )
    comparison = compare(a, b)

    assert [point.load for point in comparison.points] == [at_64]
    assert comparison.differences == (
        "concurrency 64: 10 requests in A, 99 in B",
        "only A has concurrency 4",
        "only B has rate 2",
    )


def test_the_number_of_requests_at_once_is_their_load() -> None:
    points = [result(1.0 + number, load=LoadPoint(num_requests=number, rate=10_000.0)).points[0] for number in (1, 16)]
    both = result(points=(*points, *result(2.0, load=LoadPoint(num_requests=16, rate=math.inf)).points))
    comparison = compare(both, both)

    labels = ["1 at once, rate 10000", "16 at once, rate 10000", "16 at once"]
    assert [point.load.label for point in comparison.points] == labels
    assert {figure.change_percent for point in comparison.points for figure in point.figures} == {0}
    assert comparison.differences == ()


def test_interrupted_runs_are_not_compared() -> None:
    at_64 = replace(LOAD, concurrency=64)
    point, other = result(1.0, 1.01).points[0], BenchPoint(load=at_64, runs=(cut(1.0),))
    a = result(points=(replace(point, runs=(*point.runs, cut(9.0))), other))
    b = result(points=(*result(1.0, 1.01).points, *result(1.0, load=at_64).points))
    comparison = compare(a, b)

    assert [each.load for each in comparison.points] == [LOAD]
    assert set(verdicts(comparison).values()) == {"noise"}
    assert comparison.differences == (
        "concurrency 4: a run of A was interrupted, and is left out",
        "concurrency 64: a run of A was interrupted, and is left out",
        "only B has concurrency 64",
    )
    with pytest.raises(ToolError, match="A has concurrency 64, interrupted, B has concurrency 64"):
        compare(result(points=(other,)), result(1.0, load=at_64))


def test_what_else_differs_is_said() -> None:
    a = result(1.0, server={"engine": "tensorrt_llm", "engine_version": "1.0.0"})
    b = result(1.0, gpus=4, dataset="real", server={"engine": "tensorrt_llm", "engine_version": "1.2.1"})
    assert compare(a, b).differences == (
        "dataset differs: 'token-norm-dist 5/10' and 'real'",
        "gpus differs: 2 and 4",
        "the server's engine_version differs: '1.0.0' and '1.2.1'",
    )


@pytest.mark.parametrize(
    ("a", "b", "percent", "is_worse"),
    [
        pytest.param((1.0, 1.01), (1.2, 1.21), 10, True, id="worse by more"),
        pytest.param((1.0, 1.01), (1.2, 1.21), 30, False, id="worse by less"),
        pytest.param((1.2, 1.21), (1.0, 1.01), 10, False, id="better"),
        pytest.param((1.0, 1.4), (1.2, 1.6), 10, False, id="noise"),
        pytest.param((1.0,), (1.2,), 10, True, id="a single run counts as it is"),
        pytest.param((1.0,), (1.05,), 10, False, id="a single run, worse by less"),
    ],
)
def test_worse_by_a_percentage(a, b, percent, is_worse) -> None:
    assert bool(compare(result(*a), result(*b)).worse_by(percent)) == is_worse


def test_the_tables_and_the_document_of_a_comparison() -> None:
    comparison = compare(result(1.0, 1.01), result(2.0, 2.01))
    [table] = comparison_tables(comparison)
    assert table.title == "concurrency 4"
    assert table.rows[1][0] == "tok/s"
    assert table.rows[1][3:] == ("-49.9 %", "worse")

    document = json.loads(json.dumps(comparison_document(comparison), allow_nan=False))
    assert document["schema"] == "deepseek-triton/bench-compare/1"
    [figure] = [each for each in document["points"][0]["figures"] if each["name"] == "output_throughput"]
    assert figure["verdict"] == "worse"
    assert figure["change"]["mean"] == pytest.approx(-49.6, abs=0.1)


def test_results_without_a_common_load_cannot_be_compared() -> None:
    with pytest.raises(ToolError, match="no load in common: A has concurrency 4, B has rate 2"):
        compare(result(1.0), result(1.0, load=LoadPoint(num_requests=1, rate=2.0)))


# --- The command ---


@pytest.fixture
def bench_compare(tmp_path):
    """Runs `bench compare` on two results."""

    def run_it(a: BenchResult, b: BenchResult, *options: str) -> int:
        write_result(a, tmp_path / "a.json")
        (tmp_path / "b").mkdir()
        write_result(b, tmp_path / "b/bench.json")
        return main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b"), *options])

    return run_it


def test_the_command_prints_a_table_for_each_load(bench_compare, capsys) -> None:
    assert bench_compare(result(1.0, 1.01), result(2.0, 2.01, gpus=4)) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("gpus differs: 2 and 4\nconcurrency 4\n")
    assert re.search(r"^  tok/s +99\.50 ± 6\.29 +49\.88 ± 1\.58 +-49\.9 % +worse$", printed, re.MULTILINE)


def test_the_command_says_what_is_missing_for_a_verdict(bench_compare, capsys) -> None:
    assert bench_compare(result(1.0), result(2.0)) == 0
    assert "can't say: a single run doesn't show" in capsys.readouterr().out


def test_the_command_prints_json(bench_compare, capsys) -> None:
    assert bench_compare(result(1.0, 1.0), result(2.0, 2.0), "--json") == 0
    [point] = json.loads(capsys.readouterr().out)["points"]
    assert {figure["verdict"] for figure in point["figures"]} == {"worse"}


@pytest.mark.parametrize(("percent", "code"), [("5", 1), ("60", 0)])
def test_the_command_fails_where_a_figure_is_worse(percent, code, bench_compare, capsys) -> None:
    """Latencies are 50 % more."""
    assert bench_compare(result(1.0, 1.0), result(1.5, 1.5), "--fail-if-worse", percent) == code
    assert ("worse by more than 5 %: concurrency 4: tok/s 100" in capsys.readouterr().err) == (code == 1)


@pytest.mark.parametrize("percent", ["-1", "much", "inf", "nan"])
def test_a_percentage_that_is_none(percent, bench_compare, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_compare(result(1.0), result(1.0), "--fail-if-worse", percent)
    assert stopped.value.code == 2
    assert "expected a percentage from 0, such as 5, got" in capsys.readouterr().err


def test_a_file_that_cannot_be_compared(tmp_path, capsys) -> None:
    assert main(["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "a can't be read: No such file" in capsys.readouterr().err
