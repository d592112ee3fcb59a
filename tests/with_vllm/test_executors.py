"""The executors of this lane themselves: what they make of what a scheduler hands over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.vllm_in_process import TINY

vllm_without_gpu = pytest.importorskip("vllm_without_gpu")

from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm_without_gpu.executor_options import ExecutorOptions  # noqa: E402
from vllm_without_gpu.made_tokens import LogprobRows, MadeTokens, runner_output  # noqa: E402
from vllm_without_gpu.reference_batch import ReferenceBatch  # noqa: E402

PROMPT = (0, 58, 335, 35, 56, 362)  # "7 + 5 ="
OTHER = (0, 698, 695, 263, 477)  # "Once upon a time"
VOCAB_SIZE = 1280


class Scheduler:
    """Hands requests to a batch as vLLM's scheduler does, without its limits."""

    def __init__(self, num_drafts: int = 0) -> None:
        self.batch = ReferenceBatch(TINY, max_num_seqs=8, num_drafts=num_drafts)
        self.tokens: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}
        self._finished: set[str] = set()

    def finish(self, name: str) -> None:
        self._finished.add(name)

    def step(
        self,
        new: dict[str, tuple[tuple[int, ...], Any]] | None = None,
        again: tuple[str, ...] = (),
        *,
        drafts: dict[str, list[int]] | None = None,
        masks: dict[str, npt.NDArray[np.bool_]] | None = None,
        num_tokens: int | None = None,
    ) -> Any:
        new, drafts, masks = new or {}, drafts or {}, masks or {}
        for name, (prompt, _) in new.items():
            self.tokens[name] = list(prompt)
            self._computed[name] = 0
        names = [*again, *new]
        counts = {
            name: num_tokens or len(self.tokens[name]) - self._computed[name] + len(drafts.get(name, ()))
            for name in names
        }
        bits = [np.packbits(rows, axis=-1, bitorder="little").view(np.int32) for rows in masks.values()]
        made = self.batch.iterate(
            SimpleNamespace(
                finished_req_ids=self._finished,
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=n, prompt_token_ids=list(p), sampling_params=params, num_computed_tokens=0)
                    for n, (p, params) in new.items()
                ],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=list(again), num_computed_tokens=[self._computed[name] for name in again]
                ),
                num_scheduled_tokens=counts,
                scheduled_spec_decode_tokens=drafts,
            ),
            SimpleNamespace(structured_output_request_ids=list(masks), grammar_bitmask=np.concatenate(bits))
            if masks
            else None,
        )
        self._finished = set()
        for name, count in counts.items():
            self.tokens[name] += made[name].token_ids
            refused = len(drafts.get(name, ())) + 1 - len(made[name].token_ids) if made[name].token_ids else 0
            self._computed[name] += count - refused
        return made


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=64, **fields)


@pytest.fixture(scope="module")
def alone() -> list[int]:
    return continued(Scheduler(), 20)


def continued(scheduler: Scheduler, number: int) -> list[int]:
    """The first tokens of the greedy answer to OTHER."""
    scheduler.step({"a": (OTHER, greedy())})
    for _ in range(number - 1):
        scheduler.step(again=("a",))
    return scheduler.tokens["a"][len(OTHER) :]


@settings(max_examples=10, derandomize=True)
@given(turns=st.lists(st.lists(st.sampled_from("abc"), min_size=1, unique=True), min_size=1, max_size=20))
def test_tokens_do_not_depend_on_who_is_scheduled_beside(alone: list[int], turns: list[list[str]]) -> None:
    """Whoever has to wait an iteration, as after a preemption, is computed anew."""
    scheduler = Scheduler()
    for turn in turns:
        known = tuple(name for name in turn if name in scheduler.tokens)
        scheduler.step({name: (OTHER, greedy()) for name in turn if name not in known}, known)

    for tokens in scheduler.tokens.values():
        made = tokens[len(OTHER) :]
        assert made == alone[: len(made)]


def test_a_part_of_a_prompt_makes_no_token(alone: list[int]) -> None:
    scheduler = Scheduler()
    assert scheduler.step({"a": (OTHER, greedy())}, num_tokens=2)["a"] == MadeTokens()
    assert list(scheduler.step(again=("a",))["a"].token_ids) == alone[:1]


def test_a_finished_request_is_forgotten(alone: list[int]) -> None:
    scheduler = Scheduler()
    scheduler.step({"a": (PROMPT, greedy()), "b": (OTHER, greedy())})
    scheduler.finish("a")
    scheduler.step(again=("b",))
    scheduler.step({"a": (OTHER, greedy())}, ("b",))

    assert scheduler.tokens["a"][len(OTHER) :] == alone[:1]
    assert scheduler.tokens["b"][len(OTHER) :] == alone[:3]


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_drafts_are_accepted_as_far_as_they_are_right(alone: list[int], right: int) -> None:
    scheduler = Scheduler(num_drafts=3)
    scheduler.step({"a": (OTHER, greedy())})
    drafts = [*alone[1 : 1 + right], *([5] * (3 - right))]

    made = scheduler.step(again=("a",), drafts={"a": drafts})

    assert list(made["a"].token_ids) == alone[1 : 2 + right]
    scheduler.step(again=("a",))
    assert scheduler.tokens["a"][len(OTHER) :] == alone[: 3 + right]


def test_drafts_are_offered_for_who_got_tokens() -> None:
    scheduler = Scheduler(num_drafts=2)
    scheduler.step({"a": (OTHER, greedy()), "b": (PROMPT, greedy())})

    assert {name: len(drafts) for name, drafts in scheduler.batch.drafts().items()} == {"a": 2, "b": 2}


def test_a_grammar_allows_what_its_bits_say() -> None:
    allowed = np.zeros((1, VOCAB_SIZE), np.bool_)
    allowed[0, [300, 301, 302]] = True
    scheduler = Scheduler()

    made = scheduler.step({"free": (OTHER, greedy()), "bound": (OTHER, greedy(logprobs=2))}, masks={"bound": allowed})

    assert made["bound"].token_ids[0] in (300, 301, 302)
    assert set(made["bound"].logprobs.token_ids[0]) <= {300, 301, 302}
    assert made["free"].token_ids[0] not in (300, 301, 302)


def test_a_bias_forces_a_token() -> None:
    made = Scheduler().step({"a": (OTHER, greedy(logit_bias={300: 100.0}))})

    assert list(made["a"].token_ids) == [300]


@pytest.mark.parametrize("many", [0, 1, 5])
def test_logprob_rows_are_probabilities_in_order(many: int) -> None:
    logits = np.random.default_rng(1).normal(size=(3, 50)).astype(np.float32)

    rows = LogprobRows.of(logits, [4, 5, 6], many)

    whole = LogprobRows.of(logits, [4, 5, 6], 50)
    assert np.exp(whole.logprobs[:, 1:]).sum(-1) == pytest.approx([1, 1, 1], rel=1e-5)
    assert rows.token_ids.shape == (3, many + 1)
    assert rows.token_ids[:, 0].tolist() == [4, 5, 6]
    for row in range(3):
        assert whole.token_ids[row, rows.ranks[row]] == rows.token_ids[row, 0]
        assert list(rows.logprobs[row, 1:]) == sorted(rows.logprobs[row, 1:], reverse=True)


def test_each_request_finds_its_rows_in_vllms_container() -> None:
    logits = np.random.default_rng(1).normal(size=(3, 50)).astype(np.float32)
    rows = {number: LogprobRows.of(logits[:2], [7, 8], number) for number in (0, 3)}
    made = {
        "none": MadeTokens([1]),
        "two": MadeTokens([7, 8], rows[0]),
        "part": MadeTokens(),
        "wide": MadeTokens([7, 8], rows[3], rows[3]),
    }

    output = runner_output(made)

    for name in ("two", "wide"):
        index = output.req_id_to_index[name]
        found = output.logprobs.slice_request(index, 2)
        its_rows = made[name].logprobs
        assert found.logprob_token_ids[:, : its_rows.token_ids.shape[1]].tolist() == its_rows.token_ids.tolist()
        assert found.sampled_token_ranks.tolist() == its_rows.ranks.tolist()
    assert output.sampled_token_ids == [[1], [7, 8], [], [7, 8]]
    assert output.prompt_logprobs_dict.keys() == {"wide"}


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ValueError, match="expected fail_after, kv_bytes, step_s, got pace"):
        ExecutorOptions.of({"pace": 1})
