import math
from dataclasses import asdict, replace

import pytest
from bench.client_load import imports, table
from bench.client_load.cases import CASES, PAIRS, Target
from bench.client_load.contenders import CONTENDERS, _has_text
from bench.client_load.driving import _on_asyncio, _on_greenlets, _on_threads
from bench.client_load.leaving import Findings
from bench.client_load.leaving import Sample as Left
from bench.client_load.measures import Measures, Sample, measure, medians
from bench.client_load.stayed import Limits, problems
from bench.client_load.stayed import table as left_table

SAMPLE = Sample(num_requests=50, num_chunks=10_000, wall_s=4.0, cpu_s=2.0, num_threads=1, others_cpu_s=1.0)


def test_a_sample_is_measured_by_request_and_by_chunk():
    assert measure(SAMPLE) == Measures(
        requests_per_s=12.5,
        chunks_per_request=200,
        cpu_ms_per_request=40,
        cpu_ms_per_1000_chunks=200,
        cores=0.5,
        others=0.25,
    )


def test_without_chunks_there_is_no_cost_of_a_chunk():
    assert math.isnan(measure(replace(SAMPLE, num_chunks=0)).cpu_ms_per_1000_chunks)


def test_medians_are_taken_field_by_field():
    measured = [measure(replace(SAMPLE, wall_s=wall_s, cpu_s=cpu_s)) for wall_s, cpu_s in ((1, 3), (2, 1), (5, 2))]
    assert medians(measured).requests_per_s == 25
    assert medians(measured).cpu_ms_per_request == 40


@pytest.mark.parametrize(
    ("target", "met", "said"),
    [
        pytest.param({"at_most": 1.15}, False, "is 1.2, target at most 1.15: MISSED", id="at-most"),
        pytest.param({"at_most": 1.2}, True, "is 1.2, target at most 1.2: met", id="at-most-itself"),
        pytest.param({"at_least": 1}, True, "is 1.2, target at least 1: met", id="at-least"),
        pytest.param({"at_least": 1.3}, False, "is 1.2, target at least 1.3: MISSED", id="too-little"),
        pytest.param({"at_most_more": 20}, True, "is 20, target at most 20: met", id="more"),
        pytest.param({"at_most_more": 19}, False, "is 20, target at most 19: MISSED", id="too-much-more"),
    ],
)
def test_a_target_is_the_ratio_of_two_medians_or_their_difference(target, met, said):
    ((line, verdict),) = table.verdicts(
        [Target(contender="ours", measure="ms", versus="raw", **target)], {"ours": {"ms": 120}, "raw": {"ms": 100}}
    )
    assert line.endswith(said)
    assert verdict is met


def test_a_target_of_a_contender_that_did_not_run_is_neither_met_nor_missed():
    target = Target(contender="ours", measure="ms", versus="raw", at_most=1)
    assert table.verdicts([target], {"ours": {"ms": 120}})[0][1] is None


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_targets_speak_of_contenders_and_measures_of_their_case(case):
    fields = asdict(measure(SAMPLE))
    for target in case.targets:
        assert {target.contender, target.versus} <= set(case.contenders)
        assert target.measure in fields
    assert set(case.contenders) <= set(CONTENDERS)


def test_imports_have_targets_of_what_is_imported():
    assert {target.versus for target in imports.TARGETS} | {target.contender for target in imports.TARGETS} <= set(
        imports.STATEMENTS
    )


@pytest.mark.parametrize(("verb", "ratio"), [("stream", 4), ("generate", 2)])
def test_ours_is_shown_beside_its_library_by_chunk_in_streams_and_by_request_otherwise(verb, ratio):
    ours, raw = PAIRS[0]
    case = next(case for case in CASES.values() if case.verb == verb)
    measured = {ours: measure(replace(SAMPLE, cpu_s=4.0, num_chunks=5_000)), raw: measure(SAMPLE)}
    assert table.cpu_over_raw(case, ours, measured) == ratio
    assert math.isnan(table.cpu_over_raw(case, raw, measured))


def test_a_row_shows_what_cannot_be_compared_as_a_dash():
    assert table.row("ours", measure(SAMPLE)).endswith("-")


def test_only_events_with_text_count():
    assert _has_text('data: {"text_output": "a"}')
    assert not _has_text('data: {"text_output": ""}')
    assert not _has_text("")
    with pytest.raises(RuntimeError, match="full"):
        _has_text('data: {"error": "full"}')


class Opened:
    """A contender that counts what it is asked."""

    def __init__(self, asynchronous):
        self.asked = []
        self.asynchronous = asynchronous

    def ask(self, num_tokens):
        self.asked.append(num_tokens)
        return num_tokens

    async def ask_async(self, num_tokens):
        return self.ask(num_tokens)

    def __enter__(self):
        return self.ask

    def __exit__(self, *exc):
        pass

    async def __aenter__(self):
        return self.ask_async

    async def __aexit__(self, *exc):
        pass


class Clock:
    def start(self):
        self.started = True

    def stop(self, num_chunks):
        assert self.started
        return num_chunks


@pytest.mark.parametrize(
    ("drive", "asynchronous"), [(_on_asyncio, True), (_on_threads, False)], ids=["asyncio", "threads"]
)
def test_every_driver_asks_for_each_request_once_and_counts_none_of_the_warm_up(drive, asynchronous):
    case = replace(CASES["stream-64"], num_requests=100, concurrency=4, num_tokens=7)
    opened = Opened(asynchronous)
    assert drive(opened, case, Clock()) == 700
    assert opened.asked.count(7) == 100


def test_the_driver_on_greenlets_does_so_too():
    pytest.importorskip("gevent")
    assert callable(_on_greenlets)


# --- what stayed behind ---


def left(when, **changes):
    numbers = {
        "descriptors": 8,
        "threads": 2,
        "under_way": 1,
        "objects": 100,
        "left": 0,
        "traced_kib": 100.0,
        "rss_mib": 50.0,
        **changes,
    }
    return Left(when=when, **numbers)


WHEN = ("before", "warm", "quarter 1", "quarter 2", "quarter 3", "quarter 4", "closed")
LIMITS = Limits(idle_connections=64)


def found(**changes):
    """`changes` by when."""
    samples = [left(when, **changes.get(when.replace(" ", "_"), {})) for when in WHEN]
    return Findings(samples=samples, outcomes={"finish: length": 3}, unexpected=[])


def test_level_numbers_are_no_problem():
    assert problems(found(warm={"descriptors": 72}, quarter_4={"descriptors": 70}), LIMITS) == []


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"quarter_2": {"under_way": 2}}, id="a request under way"),
        pytest.param({"warm": {"descriptors": 8 + 64 + 9}}, id="more descriptors than idle connections"),
        pytest.param({"closed": {"descriptors": 9}}, id="a descriptor after close"),
        pytest.param({"quarter_3": {"left": 1}}, id="a request on the server"),
        pytest.param({"quarter_4": {"threads": 5}}, id="threads"),
        pytest.param({"closed": {"threads": 5}}, id="threads after close"),
        pytest.param({"quarter_4": {"traced_kib": 700.0}}, id="memory"),
        pytest.param({"quarter_4": {"rss_mib": 60.0}}, id="resident memory"),
    ],
)
def test_each_thing_that_stays_is_a_problem(changes):
    assert len(problems(found(**changes), LIMITS)) == 1


def test_an_exception_that_nobody_expects_is_a_problem():
    (problem,) = problems(replace(found(), unexpected=["drop: ValueError()"]), LIMITS)
    assert "drop: ValueError()" in problem


def test_the_table_has_a_line_for_each_sample_and_the_outcomes():
    lines = left_table(found()).splitlines()
    assert len(lines) == 1 + len(WHEN) + 1
    assert lines[-1] == "finish: length 3"
