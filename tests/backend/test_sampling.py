import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from deepseek_backend.engines.generate_request import SamplingParams
from deepseek_backend.engines.reference import token_sampling
from support.random_checkpoint import build_tokenizer

VOCAB_SIZE = 12
TOKENIZER = Tokenizer.from_str(json.dumps(build_tokenizer()))
LOGITS = np.array([2.0, -1.0, 0.5, 2.5, -3.0, 0.0, 1.5, 1.0, -0.5, 2.2, -2.0, 0.7], np.float32)


def sampler(*, prompt_ids=(), end_ids=(), bad_sequences=(), **params):
    places = {"prompt_ids": prompt_ids, "end_ids": end_ids, "bad_sequences": bad_sequences, "vocab_size": VOCAB_SIZE}
    return token_sampling.TokenSampler(SamplingParams(**params), **places)


def draws(count, **params):
    one = sampler(**params)
    return [token_sampling.sample_tokens(LOGITS[None].copy(), [one])[0] for _ in range(count)]


def reference(*, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Return the distribution after one filter after the other, normalised after each."""
    p = np.exp(LOGITS.astype(np.float64) / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0
        p /= p.sum()
    total = 0.0
    for token in order:
        if total >= top_p:
            p[token] = 0
        total += p[token]
    p /= p.sum()
    p[p < min_p * p.max()] = 0
    return p / p.sum()


DISTRIBUTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.4},
    {"temperature": 3.0},
    {"top_k": 3},
    {"top_k": 1000, "temperature": 1.0},
    {"top_p": 0.7},
    {"top_p": 1e-6},
    {"min_p": 0.3},
    {"temperature": 1.7, "top_k": 6, "top_p": 0.8, "min_p": 0.5},
]


@pytest.mark.slow
def test_draws_follow_the_reference_distribution(subtests):
    count = 2000
    for params in DISTRIBUTIONS:
        with subtests.test(str(params)):
            expected, seen = reference(**params), Counter(draws(count, seed=1, **params))
            assert {token for token in seen if expected[token] == 0} == set()
            for token, p in enumerate(expected):
                assert abs(seen[token] / count - p) <= 4.5 * np.sqrt(p * (1 - p) / count), token


def test_greedy_and_the_ends_of_the_ranges_take_the_likeliest():
    for params in [
        {},
        {"temperature": 0.0, "top_p": 0.5},
        {"top_k": 1, "temperature": 2.0},
        {"temperature": 1e-30, "seed": 3},
        {"temperature": 1e-5, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 5e-324, "top_k": 2},
        {"temperature": 1e-5, "min_p": 1.0},
        {"temperature": 1e-5, "repetition_penalty": 0.01, "top_p": 0.9},
    ]:
        assert set(draws(20, **params)) == {int(LOGITS.argmax())}, params


def test_a_seed_repeats_and_another_or_none_does_not():
    first = draws(40, temperature=1.0, seed=2**64 - 1)
    assert draws(40, temperature=1.0, seed=2**64 - 1) == first
    assert draws(40, temperature=1.0, seed=7) != first
    assert draws(40, temperature=1.0) != draws(40, temperature=1.0)


def test_a_seeded_row_does_not_depend_on_its_neighbours():
    rows = [sampler(temperature=1.0, seed=5), sampler(), sampler(temperature=1.0, seed=6)]
    batch = [token_sampling.sample_tokens(np.repeat(LOGITS[None], 3, 0), rows) for _ in range(40)]
    assert [step[0] for step in batch] == draws(40, temperature=1.0, seed=5)
    assert {step[1] for step in batch} == {int(LOGITS.argmax())}


def penalised(logits, tokens):
    """Divide what is positive and multiply what is not by the repetition penalty of the tests."""
    return [
        logit if token not in tokens else logit / 1.5 if logit > 0 else logit * 1.5
        for token, logit in enumerate(logits)
    ]


def test_penalties():
    """Repetition sees prompt and output; presence and frequency the output only."""
    prompt, output = (0, 1, 4), (3, 3, 1)
    one = sampler(prompt_ids=prompt, repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2)
    for token in output:
        one.record(token)
    logits = LOGITS.copy()
    one.adjust(logits)
    expected = penalised(LOGITS.tolist(), {*prompt, *output})
    for token in set(output):
        expected[token] -= 0.3 + 0.2 * output.count(token)
    np.testing.assert_allclose(logits, expected, rtol=1e-6)
    assert len(set(draws(VOCAB_SIZE, temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0))) > 1


def test_min_tokens_delays_the_end():
    """Stop tokens outside the vocabulary are allowed, and never generated."""
    best = int(LOGITS.argmax())
    one = sampler(end_ids=(best, VOCAB_SIZE + 5), min_tokens=2)
    tokens = [token_sampling.sample_tokens(LOGITS[None].copy(), [one])[0] for _ in range(3)]
    second = int(np.argsort(-LOGITS)[1])
    assert tokens == [second, second, best]


token_ids = st.integers(0, VOCAB_SIZE - 1)
sampled = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 1.0, 5.0])},
    optional={
        "seed": st.integers(0, 2**64 - 1),
        "top_k": st.integers(0, VOCAB_SIZE),
        "top_p": st.floats(0, 1),
        "repetition_penalty": st.floats(0.5, 2),
        "presence_penalty": st.floats(-2, 2),
    },
)


@pytest.mark.slow
@given(token_ids, st.sets(token_ids, max_size=VOCAB_SIZE - 1), sampled)
def test_a_token_with_the_largest_bias_always_comes_and_one_with_the_smallest_never(token_id, banned, params):
    assert set(draws(10, logit_bias={token_id: 100.0}, **params)) == {token_id}
    assert not banned & set(draws(10, logit_bias=dict.fromkeys(banned, -100.0), **params))


@pytest.mark.slow
@given(st.dictionaries(token_ids, st.floats(-100, 100, width=32)))
def test_a_bias_is_added_to_the_logits_before_the_penalties(biases):
    """vLLM does it in this order, so that a penalty may also divide what the bias has made positive."""
    prompt = (0, 1, 4)
    one = sampler(prompt_ids=prompt, logit_bias=biases, repetition_penalty=1.5)
    logits = LOGITS.copy()
    one.adjust(logits)
    expected = penalised([float(logit) + biases.get(token, 0) for token, logit in enumerate(LOGITS)], prompt)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


FORBIDDEN = {(): {5}, (1,): {2, 5}, (7, 1): {2, 5}, (1, 2): {5}, (0, 1): {2, 3, 5}, (0, 1, 4): {5}}
"""Output -> tokens, where (5,), (1, 2) and (0, 1, 3) are bad."""


def test_the_last_token_of_a_bad_sequence_is_forbidden_after_the_others():
    """The prompt does not count."""
    for output, forbidden in FORBIDDEN.items():
        one = sampler(prompt_ids=(0, 1), bad_sequences=((5,), (1, 2), (0, 1, 3)))
        for token_id in output:
            one.record(token_id)
        logits = LOGITS.copy()
        one.adjust(logits)
        assert set(np.isinf(logits).nonzero()[0].tolist()) == forbidden
        assert (logits == LOGITS).sum() == VOCAB_SIZE - len(forbidden)


def test_bad_strings_are_spelt_at_the_beginning_of_a_word_and_inside_one():
    inside, beginning = token_sampling.spellings(TOKENIZER, ["moon"])
    assert TOKENIZER.decode(inside) == "moon"
    assert beginning == [TOKENIZER.token_to_id("Ġmoon")]


def test_logprobs_have_the_chosen_token_first_and_the_others_in_order():
    """Equally likely tokens share a rank, and a request may ask for more tokens than there are."""
    logits = np.array([[0.0, 2.0, 1.0, 2.0, -1.0], [0.0, 2.0, 1.0, 2.5, -1.0]], np.float32)
    chosen_fourth, chosen_first = token_sampling.token_logprobs(logits, [0, 3], [3, 100], TOKENIZER)
    assert [entry.token_id for entry in chosen_fourth] == [0, 1, 3, 2]
    assert [entry.rank for entry in chosen_fourth] == [4, 1, 1, 3]
    assert [entry.token_id for entry in chosen_first] == [3, 1, 2, 0, 4]
    assert [entry.rank for entry in chosen_first] == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(
        [entry.logprob for entry in chosen_first],
        np.log(np.exp(logits[1]) / np.exp(logits[1]).sum())[[3, 1, 2, 0, 4]],
        rtol=1e-5,
    )
    assert sum(np.exp(entry.logprob) for entry in chosen_first) == pytest.approx(1)


def test_a_long_prompts_logprobs_are_made_in_parts():
    random = np.random.default_rng(0)
    logits = random.standard_normal((600, VOCAB_SIZE)).astype(np.float32)
    prompt_ids = random.integers(VOCAB_SIZE, size=600).tolist()
    sizes = []

    def head(hidden):
        sizes.append(len(hidden))
        return hidden

    first, *others = token_sampling.prompt_logprobs(logits, head, prompt_ids, 0, TOKENIZER)
    assert first is None
    assert sizes == [256, 256, 87]
    assert others == token_sampling.token_logprobs(logits[:-1], prompt_ids[1:], [0] * 599, TOKENIZER)
    assert token_sampling.prompt_logprobs(logits[:1], head, prompt_ids[:1], 3, TOKENIZER) == [None]
