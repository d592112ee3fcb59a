"""A few hundred bad inputs over a real server and a real gateway, and the inputs themselves."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from reliability.bad_input import History, main
from reliability.bad_requests import BadInput, expensive, make


@pytest.mark.slow
def test_a_run_of_a_few_hundred_inputs_has_no_violation(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    arguments = ("--inputs", "300", "--seed", "7", "--no-expensive", "--out", str(tmp_path / "out"))
    assert main([*arguments, "--record", str(record)]) == 0
    summary = json.loads(record.read_text())
    assert summary["violations"] == []
    assert summary["inputs"] == 300
    assert sum(sum(outcomes.values()) for outcomes in summary["outcomes"].values()) == 300
    assert {"HTTP", "HTTP stream", "gRPC", "gateway"} <= summary["canaries"].keys()


@pytest.mark.slow
def test_the_number_and_the_seed_decide_an_input() -> None:
    first = [make(number, 3) for number in range(200)]
    assert first == [make(number, 3) for number in range(200)]
    assert first != [make(number, 4) for number in range(200)]
    kinds = Counter(given.kind for given in first)
    assert len(kinds) == 9
    assert {given.where for given in first} == {"server", "gateway", "grpc"}


@pytest.mark.slow
def test_an_expensive_input_comes_once_to_each_place() -> None:
    names = [(given.kind, given.where) for given in expensive()]
    assert len(names) == len(set(names))


def test_an_outcome_that_none_may_have_is_kept_with_its_input() -> None:
    history = History()
    given = BadInput("server: JSON", "server", b"GET /")
    history.add(5, given, "refused: E_INVALID_ARGUMENT")
    history.add(6, given, "VIOLATION: no end")
    assert history.outcomes == {("server: JSON", "refused"): 1, ("server: JSON", "VIOLATION"): 1}
    assert history.violations == [{"what": "input 6 (server: JSON): no end", "input": "b'GET /'"}]
