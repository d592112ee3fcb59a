"""Chooses the next token of each row from its logits, by the sampling fields of each request.

The order is: logit_bias, penalties, min_tokens, bad, guide, temperature, top_k, top_p, min_p. As in vLLM, penalties see
the logits with their bias. Each filter sees only the tokens that the one before has left. A random number is drawn per
token, so that a seed gives the same whatever runs beside it.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from deepseek_backend.engines.base import Logprob, TokenLogprobs
from deepseek_backend.engines.generate_request import SamplingParams
from deepseek_backend.engines.reference.guides import Guide

Array = npt.NDArray[np.float32]
Probabilities = npt.NDArray[np.float64]
# Rows of a prompt whose logits exist at a time: those of a long prompt over a real vocabulary would take gigabytes.
_ROWS_AT_ONCE = 256


def spellings(tokenizer: Tokenizer, bad: Iterable[str]) -> list[list[int]]:
    """Return the token sequences that write a string of `bad`, at the beginning of a word or inside one."""
    texts = [text for word in bad for text in (word, f" {word}")]
    sequences = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return [sequence for sequence in sequences if sequence]


class TokenSampler:
    """Chooses the tokens of one request."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_ids: Sequence[int],
        end_ids: Iterable[int],
        bad_sequences: Sequence[Sequence[int]] = (),
        guide: Guide | None = None,
        vocab_size: int,
    ) -> None:
        """Make the sampler.

        :param end_ids: end and stop tokens, which min_tokens delays. Ids outside the vocabulary are ignored.
        :param bad_sequences: token ids; the last of a sequence is never chosen after the others.
        """
        self.greedy = params.greedy
        self._params = params
        self._random = np.random.default_rng(None if params.seed is None else params.seed % 2**64)
        self._end_ids = [i for i in end_ids if i < vocab_size]
        biases = params.logit_bias or {}
        self._biased_ids, self._biases = list(biases), np.array(list(biases.values()), np.float32)
        self._bad = [(list(before), last) for *before, last in bad_sequences]
        self._guide = guide
        self._output_ids: list[int] = []
        # [vocab_size]. Made only for penalties, because they are large with a real vocabulary.
        self._counts: Array | None = None
        if (params.repetition_penalty or 1.0) != 1.0 or params.presence_penalty or params.frequency_penalty:
            self._counts = np.zeros(vocab_size, np.float32)
            self._seen = np.zeros(vocab_size, np.bool_)
            self._seen[list(prompt_ids)] = True

    def adjust(self, logits: Array) -> None:
        """Apply logit_bias, penalties, min_tokens, bad and the guide to `logits` [vocab_size] in place."""
        if self._biased_ids:
            logits[self._biased_ids] += self._biases
        if self._counts is not None:
            penalty = np.float32(self._params.repetition_penalty or 1.0)
            repeated = np.where(logits > 0, logits / penalty, logits * penalty)
            np.copyto(logits, repeated, where=self._seen)
            logits -= self._counts * np.float32(self._params.frequency_penalty or 0.0)
            logits -= (self._counts > 0) * np.float32(self._params.presence_penalty or 0.0)
        if len(self._output_ids) < (self._params.min_tokens or 0):
            logits[self._end_ids] = -np.inf
        if self._bad:
            output = self._output_ids
            logits[[last for before, last in self._bad if output[len(output) - len(before) :] == before]] = -np.inf
        if self._guide is not None:
            self._guide.mask(logits)
            if not np.isfinite(logits).any():  # the guide allows only what min_tokens and bad do not
                logits[self._end_ids] = 0

    def choose(self, logits: Array) -> int:
        """Draw a token from the adjusted `logits` [vocab_size]."""
        temperature = 1.0 if self._params.temperature is None else self._params.temperature
        # The largest is subtracted so that a small temperature does not overflow. float64 keeps the small summands of a
        # sum over 130,000 tokens.
        probabilities = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
        token_ids = np.argsort(-probabilities, kind="stable")
        descending = probabilities[token_ids]
        kept = descending[: self._num_kept(descending)].cumsum()
        threshold = self._random.random() * kept[-1]
        index = int(kept.searchsorted(threshold, side="right"))
        return int(token_ids[min(index, len(kept) - 1)])

    def record(self, token_id: int) -> None:
        """Count `token_id` as generated."""
        self._output_ids.append(token_id)
        if self._guide is not None:
            self._guide.accept(token_id)
        if self._counts is not None:
            self._counts[token_id] += 1
            self._seen[token_id] = True

    def _num_kept(self, probabilities: Probabilities) -> int:
        """Return how many of `probabilities` pass the filters, which keep the likeliest.

        :param probabilities: in descending order, relative to the first, which is 1.
        """
        num_kept = min(self._params.top_k or len(probabilities), len(probabilities))
        if self._params.top_p is not None:
            cumulative = probabilities[:num_kept].cumsum()
            before = cumulative - probabilities[:num_kept]
            num_kept = np.count_nonzero(before < self._params.top_p * cumulative[-1])
        if self._params.min_p is not None:
            num_kept = np.count_nonzero(probabilities[:num_kept] >= self._params.min_p)
        return max(1, num_kept)  # a top_p below the smallest step of a float would keep none


def sample_tokens(logits: Array, samplers: Sequence[TokenSampler]) -> list[int]:
    """Choose and record the next token of each row of `logits` [n, vocab_size] float32, which is changed."""
    for row, sampler in zip(logits, samplers, strict=True):
        sampler.adjust(row)
    token_ids: list[int] = logits.argmax(-1).tolist()
    for index, sampler in enumerate(samplers):
        if not sampler.greedy:
            token_ids[index] = sampler.choose(logits[index])
        sampler.record(token_ids[index])
    return token_ids


def token_logprobs(
    logits: Array, token_ids: Sequence[int], num_likeliest: Sequence[int], tokenizer: Tokenizer
) -> list[TokenLogprobs]:
    """Return for each row of `logits` [n, vocab_size] its token of `token_ids`, then its `num_likeliest` tokens."""
    logprobs = log_softmax(logits)
    own_values = logprobs[np.arange(len(logprobs)), token_ids]
    ranks = 1 + np.count_nonzero(logprobs > own_values[:, None], axis=-1)
    likeliest = _likeliest(logprobs, max(num_likeliest))
    values = np.take_along_axis(logprobs, likeliest, -1)
    own_entries = zip(token_ids, own_values.tolist(), ranks.tolist(), strict=True)
    result: list[TokenLogprobs] = []
    for own, ids, row, number in zip(own_entries, likeliest.tolist(), values.tolist(), num_likeliest, strict=True):
        # `row` is in descending order: the first position of a value is the token's rank.
        ranked = [(i, value, row.index(value) + 1) for i, value in zip(ids[:number], row, strict=False)]
        entries = [own, *(entry for entry in ranked if entry[0] != own[0])]
        result.append([Logprob(*entry, tokenizer.decode([entry[0]], skip_special_tokens=False)) for entry in entries])
    return result


def prompt_logprobs(
    hidden: Array, logits: Callable[[Array], Array], prompt_ids: Sequence[int], num_likeliest: int, tokenizer: Tokenizer
) -> list[TokenLogprobs | None]:
    """Return an entry for each token of the prompt; None for the first.

    :param hidden: the model's states after each token, [len(prompt_ids), hidden_size].
    :param logits: makes logits [n, vocab_size] of n states.
    """
    result: list[TokenLogprobs | None] = [None]
    for start in range(1, len(prompt_ids), _ROWS_AT_ONCE):
        token_ids = prompt_ids[start : start + _ROWS_AT_ONCE]
        before = logits(hidden[start - 1 : start - 1 + len(token_ids)])
        result += token_logprobs(before, token_ids, [num_likeliest] * len(token_ids), tokenizer)
    return result


def log_softmax(logits: Array) -> Array:
    """Return the logarithm of the probabilities that `logits` [n, vocab_size] mean."""
    shifted: Array = logits - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def _likeliest(logprobs: Array, number: int) -> npt.NDArray[np.intp]:
    """Return the token ids of the `number` largest of each row, in descending order; equal ones by id."""
    number = min(number, logprobs.shape[-1])
    if not number:
        return np.empty((len(logprobs), 0), np.intp)
    # A partition first: sorting a whole vocabulary takes a hundred times as long.
    some = np.argpartition(logprobs, -number, axis=-1)[:, -number:]
    some.sort(axis=-1)
    order = np.argsort(-np.take_along_axis(logprobs, some, -1), axis=-1, kind="stable")
    return np.take_along_axis(some, order, -1)
