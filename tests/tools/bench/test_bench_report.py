"""The report's page and the form that writes it. test_bench_report_browser.py opens the page."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import plotly.graph_objects as go
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton_tools.bench.report import (
    ExpectedPoint,
    NamedResult,
    latency_pictures,
    load_order,
    pareto_front,
    pareto_picture,
    report_warnings,
    short_load,
    spread,
    timeline_pictures,
    write_report,
)
from deepseek_triton_tools.bench.result import Distribution, Slo, write_result
from deepseek_triton_tools.bench.result_tables import number_text
from deepseek_triton_tools.bench.workload import LoadPoint
from deepseek_triton_tools.cli.bench import add_report_form
from deepseek_triton_tools.cli.parsing import VerbParser
from deepseek_triton_tools.tool_errors import ToolError
from support.made_up_bench import distribution, made_up_point, made_up_result


def named(*points, name="x", **more):
    return [NamedResult(name=name, result=made_up_result(points, **more))]


ONE = named(name="one")


@pytest.fixture
def page_of(tmp_path):
    """Writes a report and returns its text, without the library's millions of characters."""

    def write(results, expected=()):
        write_report(tmp_path / "page.html", results, expected)
        return page_without_plotly((tmp_path / "page.html").read_text("utf-8"))

    return write


def page_without_plotly(page):
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


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))))
def test_the_front_has_every_point_that_none_beats(points):
    front = pareto_front(points)
    on_front = [points[n] for n in front]

    def beaten(point):
        return any(x >= point[0] and y >= point[1] and (x, y) != point for x, y in points)

    assert set(on_front) == {point for point in points if not beaten(point)}
    assert on_front == sorted(set(on_front))


def test_labels_of_loads():
    closed, opened = LoadPoint(num_requests=1, concurrency=8), LoadPoint(num_requests=1, rate=0.5)
    at_once, trace = LoadPoint(num_requests=1, rate=math.inf, concurrency=4), LoadPoint(num_requests=1)

    assert [*map(short_load, (closed, opened, at_once, trace))] == ["8", "0.5/s", "1 at once", "trace"]
    assert sorted((at_once, opened, closed, trace), key=load_order) == [trace, closed, opened, at_once]
    several = [LoadPoint(num_requests=number, rate=10_000.0) for number in (512, 16)]
    assert [*map(short_load, sorted(several, key=load_order))] == ["16 at once", "512 at once"]


def test_a_spread_is_over_the_runs_that_completed_something():
    point = made_up_point(4, runs=(1.0, 1.2, 0.8))
    dead = replace(point.runs[0], figures=replace(point.runs[0].figures, completed=0, user_throughput=0.0))
    users = spread(replace(point, runs=(*point.runs, dead)), "user_throughput")

    assert (users.low, users.high) == tuple(run.figures.user_throughput for run in point.runs[1:])
    assert spread(replace(point, runs=(dead,)), "user_throughput") is None
    assert spread(point, "goodput") is None


# --- Pictures ---


@pytest.mark.slow
def test_plotly_knows_everything_in_the_figures():
    """In a browser it would drop silently what it doesn't know. (Colours are the page's variables until then.)"""
    results = [*ONE, *named(made_up_point(8, (1, 1.1), failed=3), name="two")]
    pictures = [
        pareto_picture(results, [ExpectedPoint(tps_user=11, tps_gpu=1436)]),
        *latency_pictures(results),
        *timeline_pictures(results),
    ]

    for picture in pictures:
        figure = json.loads(re.sub(r'"var\(--[a-z0-9-]+\)"', '"red"', json.dumps(picture.figure)))
        assert len(go.Figure(figure).data) > 0
        assert picture.alt


def test_the_front_is_a_line_and_what_is_behind_it_hollow():
    """Concurrency, tokens/s per user, tokens/s per GPU: that of 16 is worse than that of 4."""
    behind = ((1, 100, 100), (4, 80, 500), (16, 70, 400), (64, 10, 900))
    points = [made_up_point(n, user_throughput=user, output_throughput=8.0 * gpu) for n, user, gpu in behind]
    line, shown = pareto_picture(named(*points)).figure["data"]

    assert (line["x"], line["y"]) == ([10, 80, 100], [900, 500, 100])
    assert shown["text"] == ["1", "4", "16", "64"]
    assert shown["marker"]["symbol"] == ["circle", "circle", "circle-open", "circle"]


def test_repeated_runs_are_a_mean_with_bars_to_the_lowest_and_the_highest():
    point = made_up_point(4, runs=(1.0, 1.2, 0.8))
    *_, shown = pareto_picture(named(point)).figure["data"]
    values = [run.figures.user_throughput for run in point.runs]

    assert shown["x"] == [pytest.approx(sum(values) / 3)]
    assert shown["x"][0] + shown["error_x"]["array"][0] == pytest.approx(max(values))
    assert shown["x"][0] - shown["error_x"]["arrayminus"][0] == pytest.approx(min(values))
    assert "error_x" not in pareto_picture(ONE).figure["data"][1]


def test_without_the_number_of_gpus_throughput_is_per_address(page_of):
    unknown = named(made_up_point(4), name="unknown", gpus=None, urls=("http://a", "http://b"))
    expected = [ExpectedPoint(tps_user=1, tps_gpu=2)]
    data = pareto_picture([*ONE, *unknown], expected).figure["data"]

    whole = unknown[0].result.points[0].runs[0].figures.output_throughput
    assert [trace["y"] for trace in data if trace.get("name") == "unknown"] == [[whole / 2]]
    assert "expected" not in {trace.get("name") for trace in data}
    text = page_of([*ONE, *unknown], expected)
    assert "per address, because the number of GPUs is not known" in text
    assert "The expected figures are per GPU, so they are left out." in text


def test_a_latency_that_was_not_measured_has_no_picture(page_of):
    results = named(*(made_up_point(n, ttft_ms=Distribution()) for n in (1, 4)))
    assert [re.findall(r"\((\w+)\)", picture.title) for picture in latency_pictures(results)] == [["TPOT"], ["E2EL"]]
    assert "TTFT" not in page_of(results)


def test_a_timeline_has_counts_for_each_second_and_ends_where_the_run_does():
    results = named(made_up_point(16, failed=7))
    (picture,) = timeline_pictures(results)
    run = results[0].result.points[0].runs[0]
    tokens, failed = (trace for trace in picture.figure["data"] if trace["name"] in ("tokens/s", "failed/s"))
    width = run.timeline[1].at_s

    assert sum(tokens["y"][:-1]) * width == pytest.approx(sum(one.output_tokens for one in run.timeline))
    assert sum(failed["y"][:-1]) * width == pytest.approx(7)
    assert tokens["x"][-1] == pytest.approx(run.figures.duration_s)


# --- The page ---


def test_the_page_says_what_was_run_and_has_every_figure(page_of):
    read = PageReader(page_of(named(name="one", slo=Slo(ttft_ms=500, tpot_ms=30))))
    first = made_up_point(1).runs[0].figures

    assert read.row("Engine") == ["simulated"]
    assert read.row("Simulation") == ["preset made-up, speed 2.0"]
    assert read.row("SLO") == ["TTFT 500 ms, TPOT 30 ms"]
    assert read.row("Command") == [made_up_result().command]
    assert read.row("load")[:2] == ["req/s", "tok/s"]
    assert read.row("concurrency 1")[0] == number_text(first.request_throughput)
    assert len(read.row("concurrency 1")) == len(read.row("load"))


def test_the_page_can_be_read_by_a_screen_reader_and_loads_nothing(page_of):
    page = page_of(ONE)
    assert "default-src 'none'" in page
    by_tag = {}
    for tag, attributes in PageReader(page).elements:
        by_tag.setdefault(tag, []).append(attributes)
        assert "src" not in attributes
        assert tag != "a" or "href" not in attributes

    assert by_tag["html"] == [{"lang": "en"}]
    assert len(by_tag["title"]) == len(by_tag["h1"]) == 1
    assert {attributes["scope"] for attributes in by_tag["th"]} == {"col", "row"}
    pictures = [attributes for attributes in by_tag["div"] if attributes.get("class") == "picture"]
    assert len(pictures) == 5
    assert all(picture["role"] == "img" and picture["aria-label"] for picture in pictures)
    assert {"for": "run"} in by_tag["label"]


def test_names_stay_text(page_of):
    evil = "</script><script>alert(1)</script>"
    results = named(name=evil, model=evil, dataset=evil, command=evil, server={"engine": evil})
    page = page_of([*results, *ONE], [ExpectedPoint(tps_user=1, tps_gpu=1)])

    assert evil not in page
    assert page.count("<script") == 2
    assert PageReader(page).row("Dataset")[0] == evil


def test_a_result_in_which_nothing_was_completed_has_a_table_and_warnings(page_of):
    page = page_of(named(made_up_point(4, completed=0, failed=40, errors={"overloaded: full": 30, "timeout": 10})))
    headings, cells = PageReader(page).row("load"), PageReader(page).row("concurrency 4")
    assert dict(zip(headings, cells, strict=True))["failed"] == "40"
    assert "class=picture" not in page
    assert "x, concurrency 4: 40 of 40 requests failed; most often: overloaded: full" in page


def test_a_client_that_was_the_limit_is_named():
    quick = made_up_point(1, lag_ms=distribution(4.0))
    four, many = (made_up_point(n, lag_ms=distribution(200.0 * n), client_delay_ms=7.0 * n) for n in (4, 16))
    late, busy = report_warnings(named(quick, four, replace(many, runs=(*many.runs, *four.runs))))

    assert late.startswith("x: this client, not the server, was the limit at concurrency 4; concurrency 16: ")
    assert "up to 6,400 ms late" in late
    assert busy.startswith("x: this client was busy at concurrency 4; concurrency 16: times are exact to 112 ms only")


def test_an_interrupted_run_is_marked_and_in_no_mean(page_of):
    point = made_up_point(4, runs=(1.0, 1.2, 9.0))
    results = named(replace(point, runs=(*point.runs[:2], replace(point.runs[2], interrupted=True))))
    expected = PageReader(page_of(named(replace(point, runs=point.runs[:2]))))

    assert PageReader(page_of(results)).row("concurrency 4, interrupted") == expected.row("concurrency 4")
    titles = [picture.title for picture in timeline_pictures(results)]
    assert titles[1:] == ["concurrency 4, run 2", "concurrency 4, run 3, interrupted"]


def test_warnings():
    """Random prompts that the server knew are no measure; what it cancelled is a failure."""
    cached = {
        ("random 1000/1000", 400): ["x, concurrency 4"],
        ("random 1000/1000", 20): [],
        ("random 500/1000, a prefix of 500", 400): [],
        ("random 500/1000, 2 turns", 400): [],
        ("random prompts.jsonl", 400): [],
    }
    for (dataset, share), says in cached.items():
        warnings = report_warnings(named(made_up_point(4, total_cached_tokens=40 * share), dataset=dataset))
        assert [one.partition(":")[0] for one in warnings] == says
    [warning] = report_warnings(named(made_up_point(4, cancelled=3, errors={"[E_CANCELLED] shutting down": 3})))
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
    args = form_parser().parse_args(["report", *map(str, argv)])
    return args.handler(args)


def written(*folders):
    """The file of a result in each."""
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        write_result(made_up_result(), folder / "bench.json")
    return [folder / "bench.json" for folder in folders]


def first_row(page):
    return PageReader(page_without_plotly(page.read_text("utf-8"))).rows[0]


@pytest.mark.slow
def test_the_form_compares_results_by_the_names_of_their_folders_or_their_paths(tmp_path, capsys):
    page = tmp_path / "both.html"
    before, after = written(tmp_path / "before", tmp_path / "after")
    assert run_form(before.parent, after, "--output", page) == 0
    assert first_row(page) == ["", "before", "after"]
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"written to {page}\n")

    same = written(tmp_path / "a/run", tmp_path / "b/run")
    run_form(*same, "--output", page)
    assert first_row(page) == ["", *map(str, same)]
    with pytest.raises(ToolError, match="got one twice"):
        run_form(same[0], same[0].parent, "--output", tmp_path / "other.html")
    assert not (tmp_path / "other.html").exists()


def test_a_report_takes_no_other_files_place(tmp_path):
    [file] = written(tmp_path)
    before = file.read_bytes()
    with pytest.raises(ToolError, match="is no HTML page"):
        run_form(tmp_path, "--output", file)
    assert file.read_bytes() == before
    run_form(tmp_path)
    assert first_row(tmp_path / "report.html") == ["", tmp_path.name]
