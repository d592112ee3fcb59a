"""What can be tested of the scripts for a GPU without one: tokens, figures, comparisons, and the order of the steps."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpu.compare_answers import compare_demo, compare_questions, first_difference
from gpu.tiny_answers import (
    ASSISTANT,
    BOS,
    DEMO_PROMPTS,
    USER,
    Choice,
    Generated,
    Question,
    Tokens,
    _from_logprobs,
    _from_vllm,
    answer,
    demo,
    precision_of,
    read_questions,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

EOS = "<｜end▁of▁sentence｜>"
FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The files that name tokens. The tokenizer knows bytes and a few markers, and puts BOS before a text."""
    folder = tmp_path_factory.mktemp("checkpoint")
    special = [BOS, EOS]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*special, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in (USER, ASSISTANT, "<think>", "</think>")])
    tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", None, [(BOS, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokens(checkpoint):
    return Tokens(checkpoint)


class Echo:
    """An engine that repeats a prompt's last token as often as the prompt has tokens, and ends."""

    packages = ("pytest",)

    def __init__(self):
        self.proposed = 0

    def generate(self, prompts, *, with_choices):
        self.proposed += 10 * len(prompts)
        return [Generated([prompt[-1]] * len(prompt) + [1], [Choice(7, -0.1, 8, -3.0)]) for prompt in prompts]

    def drafted(self):
        return self.proposed, self.proposed // 2


def test_a_prompt_is_encoded_as_it_stands(tokens):
    prompts = [*DEMO_PROMPTS, BOS + "été 3×4"]
    encoded = list(map(tokens.encode, prompts))
    assert [token_ids.count(0) for token_ids in encoded] == [1] * len(prompts)
    assert list(map(tokens.decode, encoded)) == prompts


def test_markers_are_single_tokens(tokens):
    assert len(tokens.encode(f"{BOS}{USER}Hi{ASSISTANT}</think>")) == 6


def test_a_prompt_without_exactly_one_bos_at_its_start_is_refused(tokens, subtests):
    for prompt in ("", "Hello", USER + "Hello", BOS + BOS + "Hello", BOS + "Hello" + BOS):
        with subtests.test(prompt), pytest.raises(ValueError, match="expected a prompt that begins with"):
            tokens.encode(prompt)


def test_an_eos_at_the_end_is_no_part_of_the_text(tokens):
    texts = ["", "Paris.", "<think>", EOS + "a"]
    encoded = [tokens.encode(BOS + text)[1:] for text in texts]
    assert [tokens.decode([*token_ids, 1]) for token_ids in encoded] == texts
    assert list(map(tokens.decode, encoded)) == texts


def test_questions_are_read_with_all_their_letters(tmp_path):
    row = {"id": "a", "kind": "capital", "split": "taught", "prompt": BOS + "é", "accepted": ["x"]}
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n\n" + json.dumps({**row, "id": "b"}) + "\n", "utf-8")
    assert read_questions(path) == [Question(name, "taught", BOS + "é") for name in "ab"]


def test_answers_stand_beside_their_questions(tokens):
    questions = [Question(name, "taught", BOS + name * 2) for name in "xy"]
    answers, figures = answer(Echo(), tokens, questions)
    assert [(each["id"], each["text"]) for each in answers] == [("x", "xxx"), ("y", "yyy")]
    assert answers[0]["token_ids"] == [*tokens.encode(BOS + "xxx")[1:], 1]
    assert {"questions": 2, "prompt_tokens": 6, "new_tokens": 8}.items() <= figures.items()


def test_drafted_tokens_are_counted_from_where_the_questions_begin(tokens):
    engine = Echo()
    demo(engine, tokens)
    _, figures = answer(engine, tokens, [Question("x", "taught", BOS + "x")])
    assert (figures["proposed_tokens"], figures["accepted_tokens"]) == (10, 5)


def test_each_demo_prompt_has_its_text_and_choices(tokens):
    found = demo(Echo(), tokens)
    assert [each["prompt"] for each in found] == list(DEMO_PROMPTS)
    assert found[0]["choices"] == [{"token_id": 7, "logprob": -0.1, "other_id": 8, "other_logprob": -3.0}]


def test_the_runner_up_of_vllm_is_the_likeliest_other_token():
    # A tie; and vLLM adds the chosen one to the two likeliest.
    for candidates, other in (({5: -0.5, 6: -1.5}, 6), ({6: -0.5, 5: -0.5}, 6), ({5: -0.5, 6: -0.75, 7: -0.5}, 7)):
        logprobs = {index: SimpleNamespace(logprob=value) for index, value in candidates.items()}
        generated = _from_vllm(SimpleNamespace(token_ids=(5,), logprobs=[logprobs]))
        assert generated == Generated([5], [Choice(5, -0.5, other, candidates[other])])
    assert _from_vllm(SimpleNamespace(token_ids=(5,), logprobs=None)) == Generated([5], [])


def test_the_runner_up_of_transformers_is_the_likeliest_other_token():
    torch = pytest.importorskip("torch")
    logprobs = torch.tensor([[-4.0, -0.5, -2.0], [-1.0, -1.0, -1.0], [0.0, 0.0, 0.0]])
    first, second = _from_logprobs([1, 2], logprobs)
    assert first == Choice(1, -0.5, 2, -2.0)
    assert (second.token_id, second.logprob, second.other_logprob) == (2, -1.0, -1.0)
    assert second.other_id != 2


def test_the_precision_is_the_checkpoints(tmp_path):
    for more, precision in (({"quantization_config": {"quant_method": "fp8"}}, "fp8"), ({}, "bfloat16")):
        (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", **more}))
        assert precision_of(tmp_path) == precision


def test_the_first_difference():
    table = {((), ()): None, ((1, 2), (1, 2)): None, ((1, 2), (1, 3)): 1,
             ((1,), (1, 2)): 1, ((1, 2), (1,)): 1, ((2,), (3,)): 0}  # fmt: skip
    assert {case: first_difference(*case) for case in table} == table


def test_a_difference_is_told_with_the_margin_of_the_first_engine():
    def report(*demos):
        return {"demo": [{"prompt": f"p{n}", "token_ids": ids, "choices": choices} for n, ids, choices in demos]}

    choices = [{"logprob": -0.1, "other_logprob": -3.0}, {"logprob": -0.75, "other_logprob": -0.875}]
    first = report((0, [1, 2], choices), (1, [1, 2], choices), (2, [1], choices[:1]))
    second = report((0, [1, 2], []), (1, [1, 3], []), (2, [1, 9], []))
    assert list(compare_demo(first, second)) == [
        "same, 2 tokens: 'p0'",
        "differs at token 1, margin 0.1250: 'p1'",
        "differs at token 1: 'p2'",
    ]


def test_answers_are_compared_by_their_questions():
    first = {"answers": [{"id": "a", "token_ids": [1]}, {"id": "b", "token_ids": [2]}]}
    second = {"answers": [{"id": "b", "token_ids": [2]}, {"id": "a", "token_ids": [3]}]}
    assert compare_questions(first, second) == "1 of 2 questions have the same tokens"


def run_steps(tmp_path, *, gpus, fails):
    """Run run_tiny.sh where python3 only notes its arguments, and fails for those that contain `fails`."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "nvidia-smi").write_text(f"#!/bin/sh\nfor each in {'x ' * gpus}; do echo GPU; done\n")
    (programs / "python3").write_text(f'#!/bin/sh\ncase "$*" in *"{fails}"*) echo broken; exit 1;; esac\necho "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    return subprocess.run(
        [FOLDER / "run_tiny.sh", "CHECKPOINT", "QUESTIONS", tmp_path / "out"],
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )


def test_a_step_that_fails_is_told_and_the_others_run(tmp_path):
    done = run_steps(tmp_path, gpus=1, fails="--engine vllm-mtp")
    assert done.returncode == 1
    assert "vllm-mtp-fp8: FAILED after" in done.stdout
    assert "broken" in done.stdout
    assert [line.split(":")[0] for line in done.stdout.splitlines() if ": done in" in line] == [
        "bfloat16",
        "vllm-fp8",
        "vllm-bfloat16",
        "transformers-bfloat16",
        "transformers-fp8",
    ]
    log = (tmp_path / "out" / "transformers-fp8.log").read_text()
    assert "--checkpoint CHECKPOINT --questions QUESTIONS" in log
    assert "--engine transformers" in log


def test_several_gpus_hold_one_model(tmp_path):
    done = run_steps(tmp_path, gpus=2, fails="nothing")
    assert done.returncode == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "bfloat16.log",
        "vllm-fp8-tp2.log",
        "vllm-mtp-fp8-tp2.log",
    ]
    assert "--tensor-parallel 2" in (tmp_path / "out" / "vllm-fp8-tp2.log").read_text()
