"""What can be tested of the scripts for a GPU without one: tokens, figures, comparisons, and the order of the steps."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpu.compare_answers import compare_demo, compare_questions
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


def test_prompts_are_encoded_as_they_stand_and_answers_lose_their_eos(tokens, subtests):
    prompts = [*DEMO_PROMPTS, BOS + "été 3×4"]
    encoded = list(map(tokens.encode, prompts))
    assert [token_ids.count(0) for token_ids in encoded] == [1] * len(prompts)
    assert list(map(tokens.decode, encoded)) == prompts
    assert len(tokens.encode(f"{BOS}{USER}Hi{ASSISTANT}</think>")) == 6  # markers are single tokens
    for text in ("", "Paris.", "<think>", EOS + "a"):
        token_ids = tokens.encode(BOS + text)[1:]
        assert tokens.decode([*token_ids, 1]) == tokens.decode(token_ids) == text
    for prompt in ("", "Hello", USER + "Hello", BOS + BOS + "Hello", BOS + "Hello" + BOS):
        with subtests.test(prompt), pytest.raises(ValueError, match="expected a prompt that begins with"):
            tokens.encode(prompt)


def test_answers_stand_beside_their_questions_and_drafts_are_counted_from_there(tokens):
    engine = Echo()
    found = demo(engine, tokens)
    assert [each["prompt"] for each in found] == list(DEMO_PROMPTS)
    assert found[0]["choices"] == [{"token_id": 7, "logprob": -0.1, "other_id": 8, "other_logprob": -3.0}]
    questions = [Question(name, "taught", BOS + name * 2) for name in "xy"]
    answers, figures = answer(engine, tokens, questions)
    assert [(each["id"], each["text"]) for each in answers] == [("x", "xxx"), ("y", "yyy")]
    assert answers[0]["token_ids"] == [*tokens.encode(BOS + "xxx")[1:], 1]
    counted = {"questions": 2, "prompt_tokens": 6, "new_tokens": 8, "proposed_tokens": 20, "accepted_tokens": 10}
    assert counted.items() <= figures.items()


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
    one = {"answers": [{"id": "a", "token_ids": [1]}, {"id": "b", "token_ids": [2]}]}
    other = {"answers": [{"id": "b", "token_ids": [2]}, {"id": "a", "token_ids": [3]}]}
    assert compare_questions(one, other) == "1 of 2 questions have the same tokens"


def test_a_step_that_fails_is_told_and_the_others_run(tmp_path):
    """With one GPU, where python3 only notes its arguments."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "nvidia-smi").write_text("#!/bin/sh\necho GPU\n")
    (programs / "python3").write_text(
        '#!/bin/sh\ncase "$*" in *"--engine vllm-mtp"*) echo broken; exit 1;; esac\necho "$@"\n'
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    done = subprocess.run(
        [FOLDER / "run_tiny.sh", "CHECKPOINT", "QUESTIONS", tmp_path / "out"],
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
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
