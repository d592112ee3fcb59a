"""The requests that `bench` makes up: exact lengths, the same for a seed, no special tokens."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton_tools.bench.random_prompts import RandomConversations, text_token_ids
from deepseek_triton_tools.bench.workload import DatasetOptions, NormalLengths, UniformLengths
from deepseek_triton_tools.cli.bench_options import add_bench_options, check_options, dataset_options
from deepseek_triton_tools.cli.parsing import VerbParser
from deepseek_triton_tools.tool_errors import ToolError

TINY = Path(__file__).resolve().parents[3] / "model_repository/tensorrt_llm/1/tiny/tokenizer.json"
IDS = text_token_ids()

some_lengths = st.one_of(
    st.builds(NormalLengths, st.integers(1, 60), st.integers(0, 40)),
    st.integers(1, 60).flatmap(lambda least: st.builds(UniformLengths, st.just(least), st.integers(least, 60))),
)
some_options = st.builds(
    DatasetOptions,
    input=some_lengths,
    output=some_lengths,
    prefix_len=st.integers(0, 20),
    num_prefixes=st.integers(1, 3),
    turns=st.integers(1, 3),
    later_input=st.none() | some_lengths,
    think_s=st.sampled_from([0.0, 2.5]),
    seed=st.integers(0, 2**32 - 1),
)


@pytest.mark.slow
@given(options=some_options, num=st.integers(0, 7))
def test_random_conversations_are_as_asked(options, num):
    made = RandomConversations(options, num, IDS)
    assert len(made) == num
    for conversation in made:
        assert len(conversation) == options.turns
        for turn, request in enumerate(conversation):
            assert type(request.prompt) is tuple
            assert {*map(type, request.prompt)} == {int}
            assert min(request.prompt) >= 3
            assert max(request.prompt) < 128_000
            assert len(request.prompt) > (0 if turn else options.prefix_len)
            assert request.output_tokens >= 1
            assert request.wait_s == (options.think_s if turn else 0)
            assert request.at_s is None


@pytest.mark.slow
@given(options=some_options, num=st.integers(1, 7), more=st.integers(0, 5))
def test_the_same_options_make_the_same_requests(options, num, more):
    """Whoever asks for more gets the same ones first, unless there are several turns."""
    made = RandomConversations(options, num, IDS)
    assert list(made) == list(RandomConversations(options, num, IDS)) == list(pickle.loads(pickle.dumps(made)))
    if options.turns == 1:
        assert list(made) == list(RandomConversations(options, num + more, IDS))[:num]


def test_lengths_without_spread_are_exact():
    lengths = {"input": NormalLengths(1000), "output": NormalLengths(2048), "later_input": NormalLengths(7)}
    for conversation in RandomConversations(DatasetOptions(turns=3, **lengths), 5, IDS):
        assert [len(request.prompt) for request in conversation] == [1000, 7, 7]
        assert [request.output_tokens for request in conversation] == [2048] * 3


@pytest.mark.slow
@given(mean=st.integers(1, 3000), stdev=st.integers(0, 900), num=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_normal_lengths_are_those_of_prepare_dataset(mean, stdev, num, seed):
    np.random.seed(seed)
    expected = [max(1, int(np.ceil(length))) for length in np.random.normal(loc=mean, scale=stdev, size=num).tolist()]
    assert NormalLengths(mean, stdev).draw(num, seed).tolist() == expected


@pytest.mark.slow
@given(least=st.integers(1, 50), more=st.integers(0, 50))
def test_uniform_lengths_include_both_ends(least, more):
    drawn = UniformLengths(least, least + more).draw(2000, 1)
    assert (drawn.min(), drawn.max()) == (least, least + more)


def test_groups_of_prompts_begin_with_the_same_tokens():
    options = DatasetOptions(input=NormalLengths(30), prefix_len=64, num_prefixes=3)
    made = [conversation[0].prompt for conversation in RandomConversations(options, 9, IDS)]
    assert {len(prompt) for prompt in made} == {94}
    assert [prompt[:64] for prompt in made] == [prompt[:64] for prompt in made[:3]] * 3
    assert len({prompt[:64] for prompt in made}) == 3
    assert len({prompt[64:] for prompt in made}) == 9


def test_another_seed_makes_other_prompts():
    assert len({RandomConversations(DatasetOptions(seed=seed), 1, IDS)[0][0].prompt for seed in range(5)}) == 5


@pytest.mark.slow
def test_conversations_are_made_only_when_they_are_asked_for():
    """50 million token ids would take gigabytes."""
    made = RandomConversations(DatasetOptions(), 10**6, IDS)
    assert made[999_999] == made[999_999] != made[0]
    assert len(pickle.dumps(made)) < 2 * 8 * 10**6 + 10**4
    with pytest.raises(IndexError):
        made[10**6]


def test_no_random_prompt_has_a_special_token():
    tokenizer = json.loads(TINY.read_text("utf-8"))
    ids = text_token_ids(len(tokenizer["model"]["vocab"]))
    assert {token["id"] for token in tokenizer["added_tokens"]}.isdisjoint(ids)
    assert len(ids) > 1200
    # DeepSeek's ids don't depend on how a server counts them.
    assert {text_token_ids(size) for size in (None, 128_000, 128_815, 129_280)} == {range(3, 128_000)}


# --- Options ---


def parsed(line):
    verb = VerbParser(prog="bench")
    add_bench_options(verb)
    args = verb.parse_args(["http://localhost:8000", *line.split()])
    check_options(args, is_openai=False)
    return dataset_options(args)


TURNS = {"prefix_len": 500, "num_prefixes": 4, "turns": 3, "later_input": NormalLengths(50), "think_s": 1.5}
OPTIONS = {
    "": (DatasetOptions(output=NormalLengths(128)), "random 1024/128"),
    "--random-input-len 8000 --random-output-len 1000 --random-prefix-len 0 --seed 3": (
        DatasetOptions(input=NormalLengths(8000), output=NormalLengths(1000), seed=3),
        "random 8000/1000",
    ),
    "--isl 1000 --osl 100 --input-stdev 9 --output-stdev 8 --range-ratio 0": (
        DatasetOptions(input=NormalLengths(1000, 9), output=NormalLengths(100, 8)),
        "random 1000±9/100±8",
    ),
    "--isl 1000 --osl 1 --random-range-ratio 0.25": (
        DatasetOptions(input=UniformLengths(750, 1250), output=UniformLengths(1, 1)),
        "random 750-1250/1-1",
    ),
    "--prefix-len 500 --num-prefixes 4 --turns 3 --later-isl 50 --think-time 1.5": (
        DatasetOptions(output=NormalLengths(128), **TURNS),
        "random 1024/128, 4 prefixes of 500, 3 turns",
    ),
    "--dataset a/b.jsonl --shuffle --trace-speedup 2": (
        DatasetOptions(file=Path("a/b.jsonl"), shuffle=True, speedup=2.0),
        "b.jsonl",
    ),
    "--dataset b.jsonl --osl 50 --output-stdev 5": (
        DatasetOptions(file=Path("b.jsonl"), output=NormalLengths(50, 5)),
        "b.jsonl, output 50±5",
    ),
}


def test_options_say_which_requests():
    found = {line: parsed(line) for line in OPTIONS}
    assert {line: (options, options.label) for line, options in found.items()} == OPTIONS


def test_options_that_are_refused(capsys, subtests):
    together = {
        "--dataset f --isl 5 --turns 2": "--isl, --turns: not with --dataset",
        "--shuffle --duration 1 --rounds 2": "--shuffle: only with --dataset; --duration: not with --num-prompts",
        "--range-ratio 0.1 --input-stdev 5": "--input-stdev: not with --range-ratio",
        "--dataset f --output-stdev 5": "--output-stdev: with --dataset it needs --osl",
    }
    for line, message in together.items():
        with subtests.test(line):
            with pytest.raises(ToolError, match=message) as caught:
                parsed(line)
            assert caught.value.exit_code == 2
    for line in ("--range-ratio 1", "--metrics-url :", "--trace-speedup 0", "--trace-speedup nan", "--seed 4294967296"):
        with subtests.test(line):
            with pytest.raises(SystemExit, match="2"):
                parsed(line)
            assert line.split()[0] in capsys.readouterr().err
