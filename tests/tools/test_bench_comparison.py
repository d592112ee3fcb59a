"""Tables over repeated runs, and two results side by side."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton_tools.bench.result import BenchPoint, BenchRun, RequestRecord, Slo, write_result
from deepseek_triton_tools.bench.result_tables import (
    Estimate,
    compare,
    comparison_document,
    comparison_tables,
    difference,
    estimate,
    number_text,
    result_note,
    result_tables,
    t_quantile,
)
from deepseek_triton_tools.bench.run_figures import run_figures
from deepseek_triton_tools.bench.workload import LoadPoint
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.tool_errors import ToolError
from support.made_up_bench import made_up_result

LOAD = LoadPoint(num_requests=10, concurrency=4)
AT_64 = replace(LOAD, concurrency=64)
OPEN = LoadPoint(num_requests=1, rate=2.0)


def run(seconds, failed=0):
    """A run in which each answer of 10 tokens takes this long."""
    times = list(np.linspace(seconds / 10, seconds, 10))
    tokens = {"chunk_s": times, "chunk_tokens": [1] * 10, "num_input_tokens": 5, "num_output_tokens": 10}
    done = RequestRecord(index=0, ended_s=seconds, **tokens)
    broken = RequestRecord(index=1, outcome="failed", error="overloaded", ended_s=seconds)
    return BenchRun(figures=run_figures([done] * 10 + [broken] * failed, gpus=2, concurrency=4))


def cut(seconds):
    return replace(run(seconds), interrupted=True)


def point(*runs, load=LOAD):
    """With a run for each number of seconds."""
    return BenchPoint(load=load, runs=tuple(one if isinstance(one, BenchRun) else run(one) for one in runs))


def result(*parts, load=LOAD, **more):
    """Of points, or of one point with these runs."""
    points = parts if isinstance(parts[0], BenchPoint) else [point(*parts, load=load)]
    return made_up_result(points, **{"gpus": 2, "dataset": "token-norm-dist 5/10", "server": {}} | more)


def rows(table):
    return [dict(zip(table.headings, row, strict=True)) for row in table.rows]


# --- Intervals ---


def test_intervals_are_those_of_students_distribution():
    known = {1: 12.706, 2: 4.303, 5: 2.571, 10: 2.228, 11: 2.201, 20: 2.086, 40: 2.021, 120: 1.980}
    assert {freedom: t_quantile(freedom) for freedom in known} == pytest.approx(known, abs=0.003)
    assert estimate([5.0]) == Estimate(5.0, None)
    assert difference([5.0], [6.0, 7.0]) == Estimate(1.5, None)
    # Mean 10.2, standard deviation 0.38079, quantile 2.776 of 4 degrees of freedom.
    five = estimate([10.0, 10.5, 9.8, 10.7, 10.0])
    assert (five.mean, five.half_width) == pytest.approx((10.2, 0.4727), abs=0.001)
    # Welch's degrees of freedom are 4.35 here, rounded down to 4: the first list hardly scatters.
    unequal = difference([10.0, 10.1, 9.9, 10.0, 10.0], [11.0, 12.0, 10.5, 11.5, 13.0])
    assert (unequal.mean, unequal.half_width) == pytest.approx((1.6, 1.198), abs=0.005)


_RUNS = st.lists(st.floats(0.001, 1e6), min_size=2, max_size=8)


@settings(max_examples=30)
@given(_RUNS, _RUNS)
def test_there_is_an_interval_for_all_runs(a, b):
    forth, back = difference(a, b), difference(b, a)
    assert forth.mean == -back.mean
    assert forth.half_width == pytest.approx(back.half_width)
    assert math.isfinite(forth.half_width)
    assert forth.half_width >= 0


# --- Our own tables ---


def test_tables_have_a_row_for_each_point_and_no_column_without_numbers():
    both = result(point(1.0), point(2.0, load=AT_64), model="deepseek-r1")
    throughput, latencies = result_tables(both)

    assert throughput.title == "Throughput: deepseek-r1, token-norm-dist 5/10, 2 GPUs"
    assert [row["load"] for row in rows(throughput)] == ["concurrency 4", "concurrency 64"]
    first = rows(throughput)[0]
    assert (first["tok/s"], first["tok/s/GPU"], first["tok/s/user"]) == ("100", "50", "10")
    assert rows(latencies)[1]["E2EL p50"] == "2,000"
    assert not {"goodput req/s", "lag p99"} & {*throughput.headings, *latencies.headings}
    assert "--repeat" in result_note(both)


def test_repeated_runs_have_an_interval_and_an_interrupted_one_is_in_no_mean_if_there_is_another():
    repeated, partly = result(1.0, 1.1, 0.9), result(1.0, 1.1, 0.9, cut(9.0))
    shown = [rows(next(iter(result_tables(each))))[0] for each in (repeated, partly, result(cut(1.0)))]

    assert [row["tok/s"] for row in shown] == ["100.7 ± 25.1", "100.7 ± 25.1", "100"]
    assert shown[1]["load"] == "concurrency 4, interrupted"
    assert ["interrupted" in result_note(each) for each in (repeated, partly)] == [False, True]


def test_numbers_are_as_long_as_needed():
    texts = {0: "0", 3: "3", 3.25: "3.25", 0.13412: "0.134", 5.678: "5.68", 171.54: "171.5", 43146.2: "43,146"}
    assert {value: number_text(value) for value in texts} == texts
    assert number_text(3.0) == "3"


# --- Comparison ---


def verdicts(comparison):
    [compared] = comparison.points
    return {each.figure.name: each.verdict for each in compared.figures}


def test_verdicts():
    """Each figure of a comparison has the same one."""
    cases = {
        ((1.0, 1.01, 0.99), (1.5, 1.52, 1.48)): "worse",
        ((1.5, 1.52, 1.48), (1.0, 1.01, 0.99)): "better",
        ((1.0, 1.2, 0.8), (1.05, 1.25, 0.85)): "noise",
        ((1.0, 1.0), (1.0, 1.0)): "noise",
        ((1.0,), (2.0,)): "can't say",
        ((1.0,), (2.0, 2.1)): "can't say",
        ((1.0, 1.1), (2.0,)): "can't say",
    }
    found = {(a, b): verdicts(compare(result(*a), result(*b))) for a, b in cases}
    assert {case: set(each.values()) for case, each in found.items()} == {case: {one} for case, one in cases.items()}
    # Goodput and failures, which both lack, are left out.
    assert {len(each) for each in found.values()} == {12}


def test_failures_are_worse_than_none():
    failing = result(run(1.0, failed=2), run(1.0, failed=2))
    comparison = compare(result(1.0, 1.0), failing)
    assert verdicts(comparison)["failed"] == "worse"
    assert comparison.worse_by(5) == ["concurrency 4: failed 0 ± 0 -> 2 ± 0"]


def test_points_are_matched_by_their_load():
    b = result(point(2.0, load=replace(AT_64, num_requests=99)), point(1.0, load=OPEN))
    comparison = compare(result(point(1.0), point(2.0, load=AT_64)), b)

    assert [each.load for each in comparison.points] == [AT_64]
    assert comparison.differences == (
        "concurrency 64: 10 requests in A, 99 in B",
        "only A has concurrency 4",
        "only B has rate 2",
    )
    with pytest.raises(ToolError, match="A has concurrency 4, B has rate 2"):
        compare(result(1.0), result(1.0, load=OPEN))


def test_the_number_of_requests_at_once_is_their_load():
    loads = [LoadPoint(num_requests=number, rate=rate) for number, rate in ((1, 1e4), (16, 1e4), (16, math.inf))]
    both = result(*(point(1.0 + number, load=load) for number, load in enumerate(loads)))
    comparison = compare(both, both)

    labels = ["1 at once, rate 10000", "16 at once, rate 10000", "16 at once"]
    assert [each.load.label for each in comparison.points] == labels
    assert {figure.change_percent for each in comparison.points for figure in each.figures} == {0}
    assert comparison.differences == ()


def test_interrupted_runs_are_not_compared():
    other = point(cut(1.0), load=AT_64)
    comparison = compare(result(point(1.0, 1.01, cut(9.0)), other), result(point(1.0, 1.01), point(1.0, load=AT_64)))

    assert [each.load for each in comparison.points] == [LOAD]
    assert set(verdicts(comparison).values()) == {"noise"}
    assert comparison.differences == (
        "concurrency 4: a run of A was interrupted, and is left out",
        "concurrency 64: a run of A was interrupted, and is left out",
        "only B has concurrency 64",
    )
    with pytest.raises(ToolError, match="A has concurrency 64, interrupted, B has concurrency 64"):
        compare(result(other), result(1.0, load=AT_64))


def test_what_else_differs_is_said():
    a = result(1.0, server={"engine": "tensorrt_llm", "engine_version": "1.0.0"})
    server = {"engine": "tensorrt_llm", "engine_version": "1.2.1"}
    b = result(1.0, gpus=4, dataset="real", slo=Slo(ttft_ms=500), server=server)
    assert compare(a, b).differences == (
        "dataset differs: token-norm-dist 5/10 and real",
        "gpus differs: 2 and 4",
        "slo differs: none and TTFT 500 ms",
        "the server's engine_version differs: '1.0.0' and '1.2.1'",
    )


def test_worse_by_a_percentage():
    cases = {
        ((1.0, 1.01), (1.2, 1.21), 10): True,
        ((1.0, 1.01), (1.2, 1.21), 30): False,
        ((1.2, 1.21), (1.0, 1.01), 10): False,  # better
        ((1.0, 1.4), (1.2, 1.6), 10): False,  # noise
        ((1.0,), (1.2,), 10): True,  # a single run counts as it is
        ((1.0,), (1.05,), 10): False,
    }
    found = {(a, b, percent): compare(result(*a), result(*b)).worse_by(percent) for a, b, percent in cases}
    assert {case: bool(worse) for case, worse in found.items()} == cases


def test_the_tables_and_the_document_of_a_comparison():
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


# --- The command ---


@pytest.fixture
def bench_compare(tmp_path):
    """Runs `bench compare` on two results."""

    def run_it(a, b, *options):
        (tmp_path / "b").mkdir(exist_ok=True)
        write_result(a, tmp_path / "a.json")
        write_result(b, tmp_path / "b/bench.json")
        return main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b"), *options])

    return run_it


def test_the_command_prints_tables_or_json_and_says_what_a_verdict_lacks(bench_compare, capsys):
    a, b = result(1.0, 1.01), result(2.0, 2.01, gpus=4)
    assert bench_compare(a, b) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("gpus differs: 2 and 4\nconcurrency 4\n")
    assert re.search(r"^  tok/s +99\.50 ± 6\.29 +49\.88 ± 1\.58 +-49\.9 % +worse$", printed, re.MULTILINE)

    assert bench_compare(a, b, "--json") == 0
    [compared] = json.loads(capsys.readouterr().out)["points"]
    assert {figure["verdict"] for figure in compared["figures"]} == {"worse"}

    assert bench_compare(result(1.0), result(2.0)) == 0
    assert "can't say: " in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_fails_where_a_figure_is_worse(bench_compare, capsys):
    """Latencies are 50 % more."""
    for percent, code in (("5", 1), ("60", 0)):
        assert bench_compare(result(1.0, 1.0), result(1.5, 1.5), "--fail-if-worse", percent) == code
        assert ("more than 5 %: concurrency 4: tok/s 100" in capsys.readouterr().err) == (code == 1)
    for percent in ("-1", "much", "inf", "nan"):
        with pytest.raises(SystemExit, match="2"):
            bench_compare(result(1.0), result(1.0), "--fail-if-worse", percent)
        assert "--fail-if-worse" in capsys.readouterr().err
