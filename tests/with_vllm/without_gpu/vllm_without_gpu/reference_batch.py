"""The requests that vLLM has scheduled, over the reference engine's model: prefill, decode, drafts and sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepseek_backend.engines.generate_request import SamplingParams
from deepseek_backend.engines.reference.checkpoint_loading import load_checkpoint
from deepseek_backend.engines.reference.deepseek_model import ModelRunner
from deepseek_backend.engines.reference.token_sampling import TokenSampler, sample_tokens
from vllm_without_gpu.made_tokens import LogprobRows, MadeTokens

Array = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


def sampling_of(params: Any) -> SamplingParams:
    """Return vLLM's SamplingParams as the reference engine's, without the fields that its scheduler applies."""
    return SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k if params.top_k > 0 else None,
        top_p=params.top_p if params.top_p < 1 else None,
        min_p=params.min_p or None,
        seed=params.seed,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        min_tokens=params.min_tokens,
        logit_bias=params.logit_bias,
    )


class ScheduledSequence:
    """One request: its tokens so far, and how the next one is chosen."""

    def __init__(self, prompt_ids: Sequence[int], params: Any, vocab_size: int) -> None:
        self.token_ids = list(prompt_ids)
        self.params = params
        self._num_prompt_tokens = len(prompt_ids)
        self._vocab_size = vocab_size
        self._sampler = TokenSampler(
            sampling_of(params),
            prompt_ids=prompt_ids,
            end_ids=params.all_stop_token_ids,
            bad_sequences=params.bad_words_token_ids or (),
            vocab_size=vocab_size,
        )

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and len(self.token_ids) == self._num_prompt_tokens

    def make(self, logits: Array, drafts: Sequence[int], masks: Sequence[Mask]) -> MadeTokens:
        """Choose tokens until one is not the draft at its place.

        :param logits: after the last token and after each draft, [len(drafts) + 1, vocab_size]; they are changed.
        :param masks: for each row the tokens that the grammar allows; empty without a grammar.
        """
        made: list[int] = []
        raw = []
        for place, row in enumerate(logits):
            if masks:
                row[~masks[place]] = -np.inf
            raw.append(row.copy())  # vLLM's log-probabilities know the grammar, and nothing else
            made += sample_tokens(row[None], [self._sampler])
            if made[-1:] != list(drafts[place : place + 1]):
                break
        self.token_ids += made
        number = self._number(self.params.logprobs)
        return MadeTokens(made, None if number is None else LogprobRows.of(np.array(raw), made, number))

    def prompt_logprobs(self, logits: Array) -> LogprobRows:
        """Return the rows of the prompt; `logits` are those after each of its tokens but the last."""
        return LogprobRows.of(logits, self.token_ids[1:], self._number(self.params.prompt_logprobs) or 0)

    def _number(self, given: int | None) -> int | None:
        return self._vocab_size if given == -1 else given

    def drafts(self, number: int) -> list[int]:
        """Guess the next tokens: what followed the last time, as far as that is known."""
        guess = list(self.token_ids)
        for _ in range(number):
            places = [i for i in range(len(guess) - 1) if guess[i] == guess[-1]]
            guess.append(guess[places[-1] + 1] if places else guess[-1])
        return guess[len(self.token_ids) :]


class ReferenceBatch:
    """The sequences of one engine core. The model's cache holds those that decode without a break.

    A sequence that is not scheduled for one iteration, or has a draft refused, loses its place and is computed anew.
    """

    def __init__(self, checkpoint: Path, *, max_num_seqs: int, num_drafts: int) -> None:
        loaded = load_checkpoint(str(checkpoint), version_dir=Path())
        self._runner = ModelRunner(loaded.model, max_num_seqs)
        self._vocab_size = loaded.vocab_size
        self._num_drafts = num_drafts
        self._sequences: dict[str, ScheduledSequence] = {}
        self._rows: list[str] = []
        """Ids of the sequences in the model's cache, in the order of its rows."""
        self._drafted: list[str] = []

    def iterate(self, scheduled: Any, grammar: Any) -> Mapping[str, MadeTokens]:
        """Return what one iteration makes of the requests in vLLM's SchedulerOutput and GrammarOutput."""
        for request_id in scheduled.finished_req_ids:
            self._sequences.pop(request_id, None)
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduled.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            if new.req_id not in self._sequences:
                self._sequences[new.req_id] = ScheduledSequence(
                    new.prompt_token_ids, new.sampling_params, self._vocab_size
                )
        drafts = scheduled.scheduled_spec_decode_tokens
        made: dict[str, MadeTokens] = {}
        whole: list[str] = []
        for request_id, number in scheduled.num_scheduled_tokens.items():
            made[request_id] = MadeTokens()
            end = computed[request_id] + number - len(drafts.get(request_id, ()))
            if end >= len(
                self._sequences[request_id].token_ids
            ):  # else a part of a prompt: it is computed with the last
                whole.append(request_id)
        masks = _masks(grammar, drafts, self._vocab_size)
        for request_id, (logits, prompt_logprobs) in self._forward(whole, drafts).items():
            sequence = self._sequences[request_id]
            tokens = sequence.make(logits, drafts.get(request_id, ()), masks.get(request_id, ()))
            made[request_id] = MadeTokens(tokens.token_ids, tokens.logprobs, prompt_logprobs)
        self._drafted = whole
        return made

    def drafts(self) -> dict[str, list[int]]:
        """Return guesses for the sequences that got tokens in the last iteration."""
        return {name: self._sequences[name].drafts(self._num_drafts) for name in self._drafted}

    def _forward(
        self, names: Sequence[str], drafts: Mapping[str, Sequence[int]]
    ) -> dict[str, tuple[Array, LogprobRows | None]]:
        """Return each sequence's logits after its last token and its drafts, and the rows of its prompt."""
        for row in reversed(range(len(self._rows))):
            name = self._rows[row]
            if name not in names or name in drafts or self._runner.lengths[row] != self._num_tokens(name) - 1:
                self._runner.remove(row)
                self._rows[row] = self._rows[-1]
                self._rows.pop()
        found: dict[str, tuple[Array, LogprobRows | None]] = {}
        if self._rows:
            hidden = self._runner.decode([self._sequences[name].token_ids[-1] for name in self._rows])
            rows = self._runner.logits(hidden)
            found |= {name: (rows[index : index + 1], None) for index, name in enumerate(self._rows)}
        for name in names:
            if name not in found:
                found[name] = self._prefill(name, drafts.get(name, ()))
        return found

    def _num_tokens(self, name: str) -> int:
        sequence = self._sequences.get(name)
        return len(sequence.token_ids) if sequence else 0

    def _prefill(self, name: str, drafts: Sequence[int]) -> tuple[Array, LogprobRows | None]:
        sequence = self._sequences[name]
        hidden = self._runner.prefill([*sequence.token_ids, *drafts])
        self._rows.append(name)
        of_prompt = None
        if sequence.wants_prompt_logprobs and len(sequence.token_ids) > 1:
            of_prompt = sequence.prompt_logprobs(self._runner.logits(hidden[: len(sequence.token_ids) - 1]))
        return self._runner.logits(hidden[len(sequence.token_ids) - 1 :]), of_prompt


def _masks(grammar: Any, drafts: Mapping[str, Sequence[int]], vocab_size: int) -> dict[str, list[Mask]]:
    """Return the allowed tokens after the last token and after each draft, by the ids of guided requests."""
    if grammar is None:
        return {}
    bits = np.unpackbits(grammar.grammar_bitmask.view(np.uint8), axis=-1, bitorder="little")[:, :vocab_size]
    rows = iter(bits.astype(np.bool_))
    return {
        name: [next(rows) for _ in range(1 + len(drafts.get(name, ())))]
        for name in grammar.structured_output_request_ids
    }
