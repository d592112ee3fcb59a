"""Speculative decoding by vLLM's scheduler, with drafts that the executor guesses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.vllm_in_process import a_request, answered, running_engine

PROMPTS = ("The capital of France is", "7 + 5 =", "Once upon a time")


@pytest.fixture(scope="module")
def drafting_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    with running_engine(tmp_path_factory.mktemp("drafts"), speculative_config=drafts) as engine:
        yield engine


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.2, "seed": 7}], ids=["greedy", "sampled"])
def test_answers_are_the_same_with_drafts(drafting_engine: Any, reference_engine: Any, fields: dict[str, Any]) -> None:
    requests = [a_request(prompt, prompt, max_tokens=60, logprobs=1, **fields) for prompt in PROMPTS]

    ours, expected = answered(drafting_engine, *requests), answered(reference_engine, *requests)

    for prompt in PROMPTS:
        assert ours.token_ids(prompt) == expected.token_ids(prompt)
        assert ours.text(prompt) == expected.text(prompt)


def test_a_step_may_have_several_tokens_and_drafts_are_counted(drafting_engine: Any) -> None:
    log = answered(drafting_engine, a_request("a", "1, 2, 1, 2, 1, 2, 1, 2,", max_tokens=200, ignore_eos=True))

    assert len(log.token_ids("a")) == 200
    assert max(len(step.token_ids) for step in log.steps["a"]) > 1
    stats = drafting_engine.stats()
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens


def test_a_grammar_holds_with_drafts(drafting_engine: Any) -> None:
    log = answered(drafting_engine, a_request("a", "Answer:", guided_regex="(ab){20}!", max_tokens=100))

    assert log.text("a") == "ab" * 20 + "!"


def test_fields_that_vllm_refuses_with_drafts_are_no_capability(drafting_engine: Any) -> None:
    capabilities = drafting_engine.capabilities
    assert not {"min_p", "logit_bias"} & capabilities.sampling_fields
    assert all("speculative decoding" in capabilities.unsupported[name] for name in ("min_p", "logit_bias"))
