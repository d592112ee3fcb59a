"""The checker finds nothing in histories that are right, and every kind of wrong that it is there for."""

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reliability.checker import Verdict, check_history
from reliability.front_end_queues import LONG_BYTES
from reliability.history import NO_END, Record, read_records
from reliability.jobs import CONTEXT, GRPC, HTTP, REFUSALS, SERVER, Asked, make_job
from reliability.run_verdict import add_torn

ENGINES = ["simulated", "trtllm"]
NUM_JOBS = 400


@pytest.fixture(scope="module", autouse=True)
def made_once() -> Iterator[None]:
    """Making the jobs takes longer than checking them."""
    with mock.patch("reliability.checker.make_job", cache(make_job)):
        yield


def right_record(job: int, part: int, asked: Asked, engine: str) -> Record:
    """What a client sees of a request that ends as its kind should."""
    record = Record(job=job, part=part, ended_s=1.0, status=0 if asked.protocol == GRPC else 200, responses=1)
    record.closed, record.finals = True, 1 if asked.protocol == GRPC else None
    record.ids = [asked.request_id or f"chatcmpl-{job}-{part}"]
    if asked.outcomes <= REFUSALS:
        record.status = 400
        record.errors = ["[E_INVALID_ARGUMENT] x: expected y, got z"] if not asked.path else ["x: expected y"]
        return record
    if not asked.words:
        record.reasons = {0: ["stop"]}
        return record
    for index, words in enumerate(asked.words):
        whole = "".join(words)
        limit = 1 if asked.target == CONTEXT else asked.max_tokens
        units = [word.encode() for word in words] if engine == "simulated" else [bytes([b]) for b in whole.encode()]
        reason, text = "stop", whole
        if limit <= len(units):
            reason, text = "length", b"".join(units[:limit]).decode(errors="replace")
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in asked.stops if stop in text]
        if ends:
            reason, text = "stop", text[: min(ends)[1]]
        if asked.call:
            reason = "tool_calls"
            record.call = asked.call
        record.texts[index], record.reasons[index] = text, [reason]
        record.tokens[index] = min(limit, len(units) + 1) if not ends else min(limit, len(units))
        if reason == "tool_calls":
            record.texts[index] = whole
    record.prompt_tokens = [7]
    if asked.path:
        record.total_tokens = 7 + record.tokens[0]
    if "logprobs" in asked.body:
        record.logprobs = sum(record.tokens.values())
    return record


@cache
def asked_of(seed: int, engine: str, numbers: Sequence[int]) -> list[tuple[int, int, Asked]]:
    """(job, part, request) of these jobs."""
    jobs = [make_job(seed, number, engine) for number in numbers]
    return [(job.number, part, asked) for job in jobs for part, asked in enumerate(job.asked)]


def right_history(seed: int, engine: str, numbers: Sequence[int] = range(NUM_JOBS)) -> list[tuple[Asked, Record]]:
    return [(asked, right_record(job, part, asked, engine)) for job, part, asked in asked_of(seed, engine, numbers)]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_right_history_has_no_violation(engine: str) -> None:
    for seed in range(3):
        verdict = check_history([record for _, record in right_history(seed, engine)], seed, engine, range(NUM_JOBS))

        assert verdict.violations == []
        assert verdict.num_requests >= NUM_JOBS
        assert verdict.refused_share < 0.2


def test_every_kind_is_in_the_mix() -> None:
    kinds = {asked.kind for asked, _ in right_history(1, "simulated", range(1500))}

    assert {"stop request", "context leg", "pair: two legs", "gateway: tools", "deadline", "gateway: response"} <= kinds
    assert len(kinds) == 23


def answered(pairs: list[tuple[Asked, Record]]) -> list[tuple[Asked, Record]]:
    """Those that have text of some length."""
    return [(asked, record) for asked, record in pairs if len(record.texts.get(0, "")) > 20]


def first(pairs: list[tuple[Asked, Record]], fits: Callable[[Asked, Record], bool]) -> Record:
    return next(record for asked, record in answered(pairs) if fits(asked, record))


def any_one(asked: Asked, record: Record) -> bool:
    return True


def plain(asked: Asked, record: Record) -> bool:
    return not asked.path and record.reasons[0] == ["stop"] and not asked.stops


def swap_texts(pairs: list[tuple[Asked, Record]]) -> None:
    one, other, *_ = [record for asked, record in answered(pairs) if plain(asked, record)]
    one.texts, other.texts = other.texts, one.texts


def lose(pairs: list[tuple[Asked, Record]]) -> None:
    pairs.remove(answered(pairs)[3])


def twice(pairs: list[tuple[Asked, Record]]) -> None:
    pairs.append(answered(pairs)[3])


def changed(fits: Callable[[Asked, Record], bool], change: Callable[[Record], object]) -> Callable[..., None]:
    return lambda pairs: change(first(pairs, fits)) and None


def set_text(change: Callable[[str], str]) -> Callable[[Record], object]:
    return lambda record: record.texts.update({0: change(record.texts[0])})


def one_id(pairs: list[tuple[Asked, Record]]) -> None:
    one, other, *_ = [record for asked, record in answered(pairs) if asked.path]
    other.ids = list(one.ids)


def several(asked: Asked, record: Record) -> bool:
    return asked.num_sequences > 1 and not record.errors


def end_second(*reasons: str) -> Callable[[Record], object]:
    """Let the second sequence end like this, with a text that is cut where a reason may be early."""

    def change(record: Record) -> None:
        record.reasons[1] = list(reasons)
        if "cancelled" in reasons:
            record.texts[1] = record.texts[1][:3]
        if not reasons:
            del record.reasons[1]

    return change


def refuse_stop(pairs: list[tuple[Asked, Record]]) -> None:
    """Let a request be cancelled, and its stop request be told that it is not there."""
    stop = next(record for asked, record in pairs if asked.kind == "stop request")
    first_one = next(record for asked, record in pairs if record.job == stop.job)
    first_one.reasons = {0: ["cancelled"]}
    stop.reasons, stop.errors = {}, ["[E_INVALID_ARGUMENT] no such request"]


WRONGS = {
    "a second sequence that nobody cancelled": (changed(several, end_second("cancelled")), "sequences ended with"),
    "a second sequence with a strange end": (changed(several, end_second("banana")), "sequences ended with"),
    "a second sequence without an end": (changed(several, end_second()), "have no end"),
    "a stop request that lies": (refuse_stop, "its stop request was refused"),
    "an answer without an id": (changed(plain, lambda record: record.ids.clear()), "has an id"),
    "an error before the client left": (
        changed(plain, lambda record: (setattr(record, "left", True), record.errors.append("[E_INTERNAL] x"))),
        "2 ends",
    ),
    "a request that hangs": (changed(plain, lambda record: setattr(record, "lost", "no end in 180 s")), "as no end"),
    "a request without a record": (lose, "were to be made"),
    "a request recorded twice": (twice, "were to be made"),
    "a record of another run": (
        lambda pairs: pairs.append((pairs[0][0], Record(job=NUM_JOBS + 5, part=0))),
        "none of this run",
    ),
    "texts of two requests swapped": (swap_texts, "expected"),
    "a text without its end": (changed(plain, set_text(lambda text: text[:-3])), "expected"),
    "a text without its middle": (changed(plain, set_text(lambda text: text[:8] + text[12:])), "expected"),
    "a text with two pieces swapped": (changed(plain, set_text(lambda text: text[9:18] + text[:9] + text[18:])), "exp"),
    "a piece that came twice": (changed(plain, set_text(lambda text: text[:9] + text)), "expected"),
    "two ends": (changed(plain, lambda record: record.reasons[0].append("length")), "2 ends"),
    "an end and an error": (changed(plain, lambda record: record.errors.append("[E_INTERNAL] x")), "2 ends"),
    "no end": (
        changed(
            lambda asked, record: plain(asked, record) and not asked.streaming, lambda record: record.reasons.clear()
        ),
        "no end",
    ),
    "a lost connection": (changed(plain, lambda record: setattr(record, "lost", "reset")), "lost"),
    "an answer that was not closed": (changed(any_one, lambda record: setattr(record, "closed", False)), "not closed"),
    "a response behind the end": (changed(any_one, lambda record: setattr(record, "late", 1)), "behind its end"),
    "another request's id": (changed(plain, lambda record: record.ids.append("job-x")), "have the ids"),
    "a token too many": (changed(plain, lambda record: record.tokens.update({0: record.tokens[0] + 2})), "tokens"),
    "a sequence too many": (changed(plain, lambda record: record.texts.update({9: "x"})), "there are sequences"),
    "no number of prompt tokens": (changed(plain, lambda record: record.prompt_tokens.clear()), "prompt tokens"),
    "two final responses": (
        changed(lambda asked, record: asked.protocol == GRPC, lambda record: setattr(record, "finals", 2)),
        "final responses",
    ),
    "a sum that is wrong": (
        changed(lambda asked, record: bool(asked.path), lambda record: setattr(record, "total_tokens", 1)),
        "tokens in all",
    ),
    "an id that two answers have": (one_id, "have the id"),
    "a call with other arguments": (
        changed(lambda asked, record: bool(record.call), lambda record: setattr(record, "call", '{"word": "x"}')),
        "called with",
    ),
}


def checked(pairs: list[tuple[Asked, Record]], *tolerated: str) -> Verdict:
    """Of seed 5. Each request may end as tolerated, too."""
    records = [record for _, record in pairs]
    return check_history(records, 5, "simulated", range(NUM_JOBS), tolerated=lambda asked, record: tolerated)


def test_wrong_histories_are_found(subtests: pytest.Subtests) -> None:
    for wrong, (change, message) in WRONGS.items():
        with subtests.test(wrong):
            pairs = right_history(5, "simulated")
            change(pairs)
            verdict = checked(pairs)
            assert 1 <= verdict.num_violations <= 3
            assert message in verdict.violations[0]


@pytest.mark.parametrize("outcome", ["E_UNAVAILABLE", NO_END])
def test_an_outcome_that_a_fault_explains_is_tolerated_and_its_text_is_still_checked(outcome: str) -> None:
    pairs = right_history(5, "simulated")
    record = first(pairs, plain)
    for part in (record.reasons, record.texts, record.tokens, record.prompt_tokens):
        part.clear()
    record.responses = 0
    record.errors = ["[E_UNAVAILABLE] the engine died"] if outcome == "E_UNAVAILABLE" else []
    assert checked(pairs).num_violations == 1
    assert checked(pairs, outcome).violations == []
    record.texts[0] = "another's"
    assert checked(pairs, outcome).num_violations == 1


def test_an_error_ends_a_request_of_which_some_sequences_had_ended() -> None:
    pairs = right_history(5, "simulated")
    record = next(record for asked, record in pairs if len(asked.words) > 2 and not asked.path and not record.errors)
    record.errors = ["[E_UNAVAILABLE] the engine died"]
    assert checked(pairs, "E_UNAVAILABLE").num_violations == 1
    del record.reasons[0]
    assert checked(pairs, "E_UNAVAILABLE").violations == []


@pytest.mark.parametrize("lost", ["", "no end in 180 s"])
def test_a_stream_that_triton_has_torn_is_counted_apart(lost: str) -> None:
    pairs = right_history(5, "simulated")
    record = first(pairs, lambda asked, record: plain(asked, record) and asked.protocol == HTTP and asked.streaming)
    record.reasons.clear()
    record.texts[0], record.lost, record.closed = record.texts[0][:-9], lost, not lost
    verdict = checked(pairs)
    assert (verdict.num_torn, verdict.violations) == (1, [])
    record.texts[0] = "another's"
    assert checked(pairs).num_violations == 1
    record.texts[0], record.lost = "", "ServerDisconnectedError: reset"
    record.closed = False
    assert checked(pairs).num_torn == 0


@pytest.mark.slow
def test_a_kind_that_never_ends_as_it_is_there_for_is_told() -> None:
    purposes = {"deadline": "timeout", "stopped by id": "cancelled"}
    jobs = ((number, make_job(5, number, "simulated").asked[0].outcomes) for number in range(9_000))
    numbers = tuple(number for number, outcomes in jobs if outcomes & set(purposes.values()))
    pairs = right_history(5, "simulated", numbers)

    def violations() -> list[str]:
        return check_history([record for _, record in pairs], 5, "simulated", numbers).violations

    assert {text.partition(":")[0] for text in violations() if "ended as" in text} >= purposes.keys()
    for asked, record in pairs:
        if asked.kind in purposes:
            record.reasons = {0: [purposes[asked.kind]]}
    assert violations() == []


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(ENGINES))
@settings(max_examples=60)
def test_a_job_is_the_same_in_every_process_and_its_words_are_its_own(seed: int, number: int, engine: str) -> None:
    job = make_job(seed, number, engine)

    assert job == make_job(seed, number, engine)
    others = {word for asked in make_job(seed, number + 1, engine).asked for words in asked.words for word in words}
    for asked in job.asked:
        for words in asked.words:
            assert len(set(words)) == len(words)
            assert others.isdisjoint(words)


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    written = [record for _, record in right_history(2, "trtllm", range(100))]
    with gzip.open(tmp_path / "0.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(record.as_line() + "\n" for record in written)

    assert list(read_records(tmp_path)) == written
    assert all(json.loads(record.as_line())["job"] == record.job for record in written)


def test_a_torn_stream_is_a_violation_where_queues_are_long() -> None:
    short = 212_992
    table = {
        (LONG_BYTES, 10**6, 0): 0, (LONG_BYTES, 10**6, 1): 1,
        (short, 600, 1): 0, (short, 600, 2): 1,
        (short, 10**6, 10): 0, (short, 10**6, 11): 1,
    }  # fmt: skip
    for (num_bytes, num_requests, num_torn), expected in table.items():
        verdict = Verdict(num_requests=num_requests, torn=Counter({SERVER: num_torn}))
        add_torn(verdict, num_bytes)
        assert verdict.num_violations == expected, (num_bytes, num_requests, num_torn)
