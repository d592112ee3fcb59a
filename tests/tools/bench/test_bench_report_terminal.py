"""The report's pictures in the terminal."""

import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton_tools.bench.figures import Distribution
from deepseek_triton_tools.bench.report_points import ExpectedPoint, NamedResult
from deepseek_triton_tools.bench.terminal_pictures import TextScale, show_pictures, terminal_pictures
from support.made_up_bench import made_up_point, made_up_result

ONE = NamedResult(name="one", result=made_up_result())
OTHER = NamedResult(name="other", result=made_up_result([made_up_point(n, (1.3,)) for n in (1, 16, 256)]))


def drawn(*results, expected=(), columns=80, is_colored=False):
    return list(terminal_pictures(results, expected, columns=columns, is_colored=is_colored))


def of(*points, **more):
    return NamedResult(name="x", result=made_up_result(points, **more))


@pytest.mark.slow
def test_every_load_is_marked_and_named_in_every_picture():
    pareto, *latencies, names = drawn(ONE)
    assert [picture.split(",")[0].strip() for picture in latencies] == ["TTFT p99", "TPOT p99", "E2EL p99"]
    for picture in (pareto, *latencies):
        assert picture.count("●") == 5
        assert {label for label in ("●1", "●16", "●64", "●256") if label not in picture} == set()
    assert names == "  ● one\n"
    # Each result has a mark of its own, without colours too.
    pareto, *_, names = drawn(ONE, OTHER)
    assert (pareto.count("●"), pareto.count("▲")) == (5, 3)
    assert names == "  ● one\n  ▲ other\n"
    for columns in (40, 80, 120):
        lines = "".join(drawn(ONE, OTHER, columns=columns)).splitlines()
        assert max(map(len, lines)) <= columns


@pytest.mark.slow
def test_colours_only_where_asked_for():
    assert "\x1b" not in "".join(drawn(ONE))
    colored = drawn(ONE, is_colored=True)[0]
    assert "\x1b[38;5;12m●256" in colored
    plain = "\n".join(line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", colored).splitlines()) + "\n"
    assert plain == drawn(ONE)[0]


def test_expected_points_are_marked_where_throughput_is_per_gpu():
    expected = [ExpectedPoint(name="published\x1b[2J", tps_user=60, tps_gpu=1200)]
    pareto, *_, names = drawn(ONE, expected=expected)
    assert pareto.count("★") == 1
    assert "★ expected: published\\x1b[2J" in names

    pareto, *_, names = drawn(NamedResult(name="unknown", result=made_up_result(gpus=None)), expected=expected)
    assert "per server" in pareto
    assert "★" not in pareto + names


def test_what_was_not_measured_has_no_picture():
    assert len(drawn(of(made_up_point(4)))) == 2  # a single load
    assert drawn(of(made_up_point(4, completed=0))) == []
    without = drawn(of(*(made_up_point(n, ttft_ms=Distribution()) for n in (1, 4))))
    assert not any("TTFT" in picture for picture in without)


@pytest.mark.slow
def test_a_terminal_gets_its_width_and_colours_and_a_pipe_80_columns_without(monkeypatch, capsys):
    def shown():
        show_pictures([ONE])
        text = capsys.readouterr().out
        return "\x1b" in text, max(map(len, text.splitlines()))

    is_colored, width = shown()
    assert (is_colored, width <= 80) == (False, True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert shown()[0]
    monkeypatch.setenv("NO_COLOR", "1")
    is_colored, width = shown()
    assert (is_colored, 55 < width <= 60) == (False, True)


@pytest.mark.slow
@given(st.lists(st.floats(1e-6, 1e9), min_size=1), st.booleans())
def test_a_scale_holds_its_values_and_has_round_ticks(values, may_be_log):
    scale = TextScale.holding(values, may_be_log=may_be_log)

    assert all(0 <= scale.at(value) < 1 for value in values)
    assert 2 <= len(scale.ticks) <= (50 if scale.is_log else 7)
    assert all(-1e-9 <= scale.at(tick) <= 1 + 1e-9 for tick in scale.ticks)
    assert scale.ticks == sorted(scale.ticks)
