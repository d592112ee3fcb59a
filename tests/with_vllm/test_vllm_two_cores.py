"""Two ranks of data parallelism, each with a core process: priorities, and what is answered when a core is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from deepseek_backend.errors import UnavailableError
from support.vllm_arguments import filler_arguments
from support.vllm_in_process import a_request, answered, running_engine, submitted


def all_cores() -> set[int]:
    children = psutil.Process().children(recursive=True)
    return {child.pid for child in children if "EngineCore" in " ".join(child.cmdline())}


OTHER_CORES = set[int]()
"""Cores of other engines in this process."""


@pytest.fixture(scope="module")
def two_cores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine with room for one request in each core."""
    OTHER_CORES.update(all_cores())
    arguments = filler_arguments(step_s=0.02) | {"data_parallel_size": 2, "max_num_seqs": 1}
    with running_engine(tmp_path_factory.mktemp("two_cores"), **arguments) as engine:
        yield engine


def core_pids() -> list[int]:
    return sorted(all_cores() - OTHER_CORES)


def test_both_ranks_answer(two_cores: Any) -> None:
    log = answered(two_cores, *(a_request(str(i), max_tokens=5, ignore_eos=True) for i in range(6)))

    assert all(len(log.token_ids(str(i))) == 5 for i in range(6))
    assert {len(call) for call in log.calls} == {1}
    assert len(core_pids()) == 2


def test_the_higher_priority_goes_first(two_cores: Any) -> None:
    names = ["first", "second", *(f"low {i}" for i in range(4)), *(f"high {i}" for i in range(4))]
    fields = {"max_tokens": 10, "ignore_eos": True}
    requests = [a_request(name, priority=5 if name.startswith("high") else 0, **fields) for name in names]
    log = answered(two_cores, *requests)

    order = [name for call in log.calls for name, step in call if step.finish_reason]
    places = {kind: [i for i, name in enumerate(order) if name.startswith(kind)] for kind in ("high", "low")}
    assert sum(places["high"]) < sum(places["low"])


def test_requests_wait_for_a_place(two_cores: Any) -> None:
    names = [f"long {i}" for i in range(5)]
    log = submitted(two_cores, *(a_request(name, max_tokens=4000, ignore_eos=True) for name in names))
    while len({name for call in list(log.calls) for name, _ in call}) < 2:
        time.sleep(0.05)

    stats = two_cores.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 3)
    assert stats.kv_blocks_used > 0
    for name in names:
        two_cores.abort(name)
    assert {last.finish_reason for last in log.wait(*names)} == {"cancelled"}


def test_all_is_answered_when_one_core_is_killed(two_cores: Any) -> None:
    """The last test of this engine."""
    names = [f"open {i}" for i in range(5)]
    log = submitted(two_cores, *(a_request(name, max_tokens=4000, ignore_eos=True) for name in names))
    while not log.calls:
        time.sleep(0.05)
    assert two_cores.health().alive
    cores = core_pids()
    os.kill(cores[0], signal.SIGKILL)

    assert all(isinstance(last.error, UnavailableError) for last in log.wait(*names))
    assert not two_cores.health().alive
    assert "engine core has died" in two_cores.health().reason
    (late,) = answered(two_cores, a_request("late")).steps["late"]
    assert isinstance(late.error, UnavailableError)
    two_cores.stop()
    two_cores.stop()
    assert not [pid for pid in cores if psutil.pid_exists(pid)]
