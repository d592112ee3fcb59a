"""The report's page and the form that writes it. test_bench_report_browser.py opens the page."""

import json
import math
import re
import shlex
from dataclasses import replace
from html.parser import HTMLParser

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton_tools.bench.load.load_settings import LoadPoint
from deepseek_triton_tools.bench.measuring.figures import Distribution, Slo
from deepseek_triton_tools.bench.report.report_page import report_page, report_warnings, write_report
from deepseek_triton_tools.bench.report.report_pictures import (
    latency_over_load,
    latency_over_throughput,
    pareto_picture,
    timeline_pictures,
)
from deepseek_triton_tools.bench.report.report_points import (
    ExpectedPoint,
    NamedResult,
    load_order,
    load_title,
    pareto_front,
    readable,
    short_load,
    spread,
)
from deepseek_triton_tools.bench.results.result_files import write_result
from deepseek_triton_tools.cli.bench_report import add_report_form
from deepseek_triton_tools.cli.parsing import VerbParser
from deepseek_triton_tools.tool_errors import ToolError
from support.made_up_bench import distribution, made_up_point, made_up_result

EVIL = "</script><script>alert(1)</script>"
ONE = [NamedResult(name="one", result=made_up_result())]


def page_without_plotly(page):
    """The page's own text, without the library's millions of characters."""
    first, _, rest = page.partition("<script>/**")
    return first + rest[rest.index('<script type="application/json"') :]


class PageReader(HTMLParser):
    """Which elements there are, with their attributes, and the text of the tables' rows."""

    def __init__(self, page):
        super().__init__()
        self.elements = []
        self.rows = []
        self.is_cell = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

        self.is_cell = tag in ("td", "th", "small")

    def handle_endtag(self, tag):
        self.is_cell = False

    def handle_data(self, data):
        if self.is_cell:
            self.rows[-1][-1] += data

    def row(self, first):
        return next(row[1:] for row in self.rows if row[0] == first)


# --- Points ---


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))))
def test_the_front_has_every_point_that_none_beats(points):
    front = pareto_front(points)
    on_front = [points[n] for n in front]

    def beaten(point):
        return any(x >= point[0] and y >= point[1] and (x, y) != point for x, y in points)

    assert set(on_front) == {point for point in points if not beaten(point)}
    assert on_front == sorted(set(on_front))


def test_labels_and_titles_of_loads():
    closed = LoadPoint(num_requests=1, concurrency=8)
    opened = LoadPoint(num_requests=1, rate=0.5)
    at_once = LoadPoint(num_requests=1, rate=math.inf, concurrency=4)
    trace = LoadPoint(num_requests=1)

    assert [*map(short_load, (closed, opened, at_once, trace))] == ["8", "0.5/s", "1 at once", "trace"]
    assert sorted((at_once, opened, closed, trace), key=load_order) == [trace, closed, opened, at_once]
    several = [LoadPoint(num_requests=number, rate=10_000.0) for number in (512, 16)]
    assert [*map(short_load, sorted(several, key=load_order))] == ["16 at once", "512 at once"]
    assert load_title(several) == "Requests at once"
    assert [load_title([closed]), load_title([opened, at_once]), load_title([closed, opened])] == [
        "Concurrency",
        "Request rate",
        "Load",
    ]


def test_a_spread_is_over_the_runs_that_completed_something():
    point = made_up_point(4, runs=(1.0, 1.2, 0.8))
    dead = replace(point.runs[0], figures=replace(point.runs[0].figures, completed=0, user_throughput=0.0))
    found = spread(replace(point, runs=(*point.runs, dead)), lambda figures: figures.user_throughput)

    assert found is not None
    assert (found.low, found.high) == (point.runs[1].figures.user_throughput, point.runs[2].figures.user_throughput)
    assert spread(replace(point, runs=(dead,)), lambda figures: figures.user_throughput) is None
    assert spread(point, lambda figures: figures.goodput) is None


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.077211, "0.07721"), (274.4168, "274.4"), (43146.2, "43,146"), (1e7, "10,000,000")]
)
def test_a_number_is_readable(value, text):
    assert readable(value) == text


# --- Pictures ---


@pytest.mark.slow
def test_plotly_knows_everything_in_the_figures():
    """In a browser it would drop silently what it doesn't know. (Colours are the page's variables until then.)"""
    results = [*ONE, NamedResult(name="two", result=made_up_result([made_up_point(8, (1, 1.1), failed=3)]))]
    pictures = [
        pareto_picture(results, [ExpectedPoint(name="published", tps_user=11, tps_gpu=1436)]),
        *latency_over_throughput(results),
        *latency_over_load(results),
        *timeline_pictures(results),
    ]

    for picture in pictures:
        figure = json.loads(re.sub(r'"var\(--[a-z0-9-]+\)"', '"red"', json.dumps(picture.figure)))
        assert len(go.Figure(figure).data) > 0
        assert picture.alt


def test_the_front_is_a_line_and_what_is_behind_it_hollow():
    points = [made_up_point(n, user_throughput=user, output_throughput=8.0 * gpu) for n, user, gpu in BEHIND]
    line, shown = pareto_picture([NamedResult(name="x", result=made_up_result(points))]).figure["data"]

    assert (line["x"], line["y"]) == ([10, 80, 100], [900, 500, 100])
    assert shown["text"] == ["1", "4", "16", "64"]
    assert shown["marker"]["symbol"] == ["circle", "circle", "circle-open", "circle"]


BEHIND = ((1, 100, 100), (4, 80, 500), (16, 70, 400), (64, 10, 900))
"""Concurrency, tokens/s per user, tokens/s per GPU: that of 16 is worse than that of 4."""


def test_repeated_runs_are_a_mean_with_bars_to_the_lowest_and_the_highest():
    point = made_up_point(4, runs=(1.0, 1.2, 0.8))
    *_, shown = pareto_picture([NamedResult(name="x", result=made_up_result([point]))]).figure["data"]
    values = [run.figures.user_throughput for run in point.runs]

    assert shown["x"] == [pytest.approx(sum(values) / 3)]
    assert shown["x"][0] + shown["error_x"]["array"][0] == pytest.approx(max(values))
    assert shown["x"][0] - shown["error_x"]["arrayminus"][0] == pytest.approx(min(values))
    assert "error_x" not in pareto_picture(ONE).figure["data"][1]


def test_without_the_number_of_gpus_throughput_is_per_server():
    unknown = made_up_result([made_up_point(4)], gpus=None, urls=("http://a", "http://b"))
    results = [*ONE, NamedResult(name="unknown", result=unknown)]
    expected = [ExpectedPoint(name="published", tps_user=1, tps_gpu=2)]
    data = pareto_picture(results, expected).figure["data"]

    whole = unknown.points[0].runs[0].figures.output_throughput
    assert [trace["y"] for trace in data if trace.get("name") == "unknown"] == [[whole / 2]]
    assert "expected" not in {trace.get("name") for trace in data}
    text = report_page(results, expected)
    assert "per server, because the number of GPUs is not known" in text
    assert "The expected figures are per GPU, so they are left out." in text


def test_a_latency_that_was_not_measured_has_no_picture():
    result = made_up_result([made_up_point(n, ttft_ms=Distribution()) for n in (1, 4)])
    results = [NamedResult(name="not streamed", result=result)]

    assert [picture.title for picture in latency_over_load(results)] == [
        "Time per output token (TPOT), ms",
        "End-to-end latency (E2EL), s",
    ]
    assert "TTFT" not in page_without_plotly(report_page(results))


def test_a_timeline_has_counts_for_each_second_and_ends_where_the_run_does():
    result = made_up_result([made_up_point(16, failed=7)])
    (picture,) = timeline_pictures([NamedResult(name="x", result=result)])
    run = result.points[0].runs[0]
    tokens, failed = (trace for trace in picture.figure["data"] if trace["name"] in ("tokens/s", "failed/s"))
    width = run.timeline[1].at_s

    assert sum(tokens["y"][:-1]) * width == pytest.approx(sum(one.output_tokens for one in run.timeline))
    assert sum(failed["y"][:-1]) * width == pytest.approx(7)
    assert tokens["x"][-1] == pytest.approx(run.figures.duration_s)


# --- The page ---


def test_the_page_says_what_was_run_and_has_every_figure():
    slo = Slo(ttft_ms=500, tpot_ms=30)
    read = PageReader(page_without_plotly(report_page([NamedResult(name="one", result=made_up_result(slo=slo))])))
    first = made_up_point(1).runs[0].figures

    assert read.row("Engine") == ["simulated"]
    assert read.row("Simulation") == ["preset made-up, speed 2.0"]
    assert read.row("SLO") == ["TTFT 500 ms, TPOT 30 ms"]
    assert read.row("Command") == [made_up_result().command]
    assert read.row("concurrency 1")[:3] == ["10", "0", readable(first.request_throughput)]
    assert len(read.row("concurrency 1")) == len(read.row("Load")) == 12


def test_the_page_can_be_read_by_a_screen_reader():
    read = PageReader(page_without_plotly(report_page(ONE)))
    by_tag = {}
    for tag, attributes in read.elements:
        by_tag.setdefault(tag, []).append(attributes)

    assert by_tag["html"] == [{"lang": "en"}]
    assert len(by_tag["title"]) == len(by_tag["h1"]) == 1
    assert {attributes["scope"] for attributes in by_tag["th"]} == {"col", "row"}
    pictures = [attributes for attributes in by_tag["div"] if attributes.get("class") == "picture"]
    assert len(pictures) == 8
    assert all(picture["role"] == "img" and picture["aria-label"] for picture in pictures)
    assert {"for": "run"} in by_tag["label"]


def test_the_page_loads_nothing():
    page = report_page(ONE)

    assert "default-src 'none'" in page
    read = PageReader(page_without_plotly(page))
    assert not [(tag, found) for tag, found in read.elements if "src" in found or (tag == "a" and "href" in found)]


def test_names_stay_text():
    result = made_up_result(model=EVIL, dataset=EVIL, command=EVIL, server={"engine": EVIL})
    results = [NamedResult(name=EVIL, result=result), NamedResult(name="other", result=made_up_result())]
    page = page_without_plotly(report_page(results, [ExpectedPoint(name=EVIL, tps_user=1, tps_gpu=1)]))

    assert EVIL not in page
    assert page.count("<script") == 2
    assert PageReader(page).row("Dataset")[0] == EVIL


def test_a_result_in_which_nothing_was_completed_has_a_table_and_warnings():
    point = made_up_point(4, completed=0, failed=40, errors={"overloaded: full": 30, "timeout": 10})
    results = [NamedResult(name="dead", result=made_up_result([point]))]
    page = page_without_plotly(report_page(results))

    assert PageReader(page).row("concurrency 4")[:2] == ["0", "40"]
    assert 'class="picture"' not in page
    assert "dead, concurrency 4: 40 of 40 requests failed; most often: overloaded: full" in page


def test_a_client_that_was_the_limit_is_named():
    points = [made_up_point(n, lag_ms=distribution(200.0 * n), client_delay_ms=7.0 * n) for n in (1, 4, 16)]
    points[0] = made_up_point(1, lag_ms=distribution(4.0))
    points[2] = replace(points[2], runs=(*points[2].runs, *points[1].runs))
    late, busy = report_warnings([NamedResult(name="x", result=made_up_result(points))])

    assert late.startswith("x: this client, not the server, was the limit at concurrency 4; concurrency 16: ")
    assert "up to 6,400 ms late" in late
    assert busy.startswith("x: this client was busy at concurrency 4; concurrency 16: times are exact to 112 ms only")


def test_an_interrupted_run_is_marked_and_in_no_mean():
    point = made_up_point(4, runs=(1.0, 1.2, 9.0))
    cut = replace(point, runs=(*point.runs[:2], replace(point.runs[2], interrupted=True)))
    results = [NamedResult(name="x", result=made_up_result([cut]))]
    whole = made_up_result([replace(point, runs=point.runs[:2])])
    read, expected = (
        PageReader(page_without_plotly(report_page([NamedResult(name="x", result=each)])))
        for each in (results[0].result, whole)
    )

    assert read.row("concurrency 4, interrupted") == expected.row("concurrency 4")
    titles = [picture.title for picture in timeline_pictures(results)]
    assert titles[1:] == ["concurrency 4, run 2", "concurrency 4, run 3, interrupted"]


@pytest.mark.parametrize(
    ("dataset", "cached", "says"),
    [
        ("random 1000/1000", 400, "x, concurrency 4: the server had 40% of the prompts in its cache"),
        ("random 1000/1000", 20, ""),
        ("random 500/1000, a prefix of 500", 400, ""),
        ("random 500/1000, 2 turns", 400, ""),
        ("random prompts.jsonl", 400, ""),
    ],
)
def test_random_prompts_that_the_server_knew_are_no_measure(dataset, cached, says):
    point = made_up_point(4, total_cached_tokens=40 * cached)
    warnings = "".join(report_warnings([NamedResult(name="x", result=made_up_result([point], dataset=dataset))]))
    assert warnings.startswith(says)
    assert bool(warnings) == bool(says)


def test_what_the_server_cancelled_is_a_warning():
    point = made_up_point(4, cancelled=3, errors={"[E_CANCELLED] shutting down": 3})
    [warning] = report_warnings([NamedResult(name="x", result=made_up_result([point]))])
    assert warning == "x, concurrency 4: the server cancelled requests; most often: [E_CANCELLED] shutting down"


def test_a_report_replaces_the_last_one_or_leaves_it(tmp_path):
    path = tmp_path / "report.html"
    write_report(path, ONE)
    assert path.read_text("utf-8").endswith("</html>\n")

    with pytest.raises(ToolError, match=r"missing.report\.html can't be written"):
        write_report(tmp_path / "missing" / "report.html", ONE)
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


# --- The form ---


def form_parser():
    parser = VerbParser(prog="bench")
    add_report_form(parser.add_forms("FORM", notes=""))
    return parser


def run_form(*argv):
    args = form_parser().parse_args(["report", *argv])
    code = args.handler(args)
    return code


def test_the_form_compares_results_by_the_names_of_their_folders(tmp_path, capsys):
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        write_result(made_up_result(), tmp_path / name / "bench.json")
    page = tmp_path / "both.html"

    assert run_form(str(tmp_path / "before"), str(tmp_path / "after/bench.json"), "--output", str(page)) == 0
    assert PageReader(page_without_plotly(page.read_text("utf-8"))).rows[0] == ["", "before", "after"]
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"written to {page}\n")


def test_a_report_takes_no_other_files_place(tmp_path):
    write_result(made_up_result(), tmp_path / "bench.json")
    before = (tmp_path / "bench.json").read_bytes()
    with pytest.raises(ToolError, match="is no HTML page"):
        run_form(str(tmp_path), "--output", str(tmp_path / "bench.json"))
    assert (tmp_path / "bench.json").read_bytes() == before


def test_results_of_the_same_name_are_told_apart_by_their_paths(tmp_path):
    files = [tmp_path / folder / "run" / "bench.json" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir(parents=True)
        write_result(made_up_result(), file)
    run_form(*map(str, files), "--output", str(tmp_path / "x.html"))

    assert PageReader(page_without_plotly((tmp_path / "x.html").read_text("utf-8"))).rows[0] == ["", *map(str, files)]
    with pytest.raises(ToolError, match="got one twice"):
        run_form(str(files[0]), str(files[0].parent), "--output", str(tmp_path / "y.html"))
    assert not (tmp_path / "y.html").exists()


@pytest.mark.slow
def test_the_form_draws_in_a_pipe_if_asked(tmp_path, capsys):
    write_result(made_up_result(), tmp_path / "bench.json")

    assert run_form(str(tmp_path), "--picture", "--output", str(tmp_path / "x.html")) == 0
    printed = capsys.readouterr().out
    assert "Output tokens/s per GPU" in printed
    assert "\x1b" not in printed


def test_the_forms_examples_parse(capsys):
    with pytest.raises(SystemExit):
        form_parser().parse_args(["report", "--help"])
    examples = capsys.readouterr().out.partition("examples:\n")[2].partition("\n\n")[0].splitlines()

    assert [len(form_parser().parse_args(shlex.split(example)[2:]).results) for example in examples] == [1, 2]
