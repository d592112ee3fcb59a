"""Each fuzz target for a moment: all of its corpus, and mutants that hypothesis chooses, the same ones each time."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reliability.fuzz.gateway_targets import close_app
from reliability.fuzz.mutation import mutated
from reliability.fuzz.targets import CORPUS, TARGETS, inputs_of


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_app()


def test_what_a_target_begins_with_and_what_once_failed_is_taken(subtests: pytest.Subtests) -> None:
    for name, target in TARGETS.items():
        with subtests.test(name):
            for data in inputs_of(name):
                target.run(data)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TARGETS))
@settings(max_examples=25, derandomize=True, database=None)
@given(chance=st.randoms(use_true_random=False), begin=st.integers(0, 99), noise=st.binary(max_size=64))
def test_a_mutant_is_taken_or_refused_by_an_error_of_the_parser(
    name: str, chance: random.Random, begin: int, noise: bytes
) -> None:
    pool = inputs_of(name)
    TARGETS[name].run(mutated(pool[begin % len(pool)], chance) if begin % 8 else noise)


def test_every_folder_of_the_corpus_is_of_a_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= TARGETS.keys()
