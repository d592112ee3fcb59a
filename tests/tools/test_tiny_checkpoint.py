"""The committed checkpoint: its files, and what it knows. tests/build/test_rehearsal.py has the tensors' form."""

import hashlib
import json
import math
import shutil
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tokenizers import Tokenizer

from deepseek_backend.engines.reference.checkpoint_loading import load_checkpoint
from deepseek_backend.errors import EngineError
from deepseek_triton_build import model_repository
from tiny_checkpoint.answering import generate, loaded
from tiny_checkpoint.architecture import CONFIG, MARKER_TOKENS, SPECIAL_TOKENS
from tiny_checkpoint.chat_templates import R1_TEMPLATE, V31_TEMPLATE
from tiny_checkpoint.questions import is_right, questions
from tiny_checkpoint.tokenizer import GENERATION_CONFIG, write_tokenizer

MOST_BYTES = 16 * 2**20
UNLISTED = {"checksums.sha256", "README.md"}
"""Files that checksums.sha256 need not name: itself, and the model card, which no engine reads."""


@pytest.fixture(scope="module")
def checkpoint():
    folder = model_repository() / "tensorrt_llm/1/tiny"
    assert folder.is_dir(), f"there is no trained checkpoint at {folder}: restore it, or `make tiny-checkpoint`"
    return folder


@pytest.fixture(scope="module")
def tensors(checkpoint):
    content = np.fromfile(checkpoint / "model.safetensors", np.uint8)
    start = 8 + int(content[:8].view("<u8")[0])
    header = json.loads(bytes(content[8:start]))
    assert header.pop("__metadata__") == {"format": "pt"}  # transformers asks for it
    return {name: (entry["dtype"], content[start:][slice(*entry["data_offsets"])]) for name, entry in header.items()}


def test_the_numbers_are_whole(tensors):
    for name, (dtype, data) in tensors.items():
        if dtype == "F8_E4M3":
            assert not (data & 0x7F == 0x7F).any(), f"{name}: not a number"
        elif dtype == "F32":
            assert np.isfinite(data.view("<f4")).all(), name
            assert name.endswith("bias") or (data.view("<f4") > 0).all(), name
        else:
            assert not (data.view("<u2") & 0x7F80 == 0x7F80).any(), f"{name}: infinite, or not a number"
    # Engines load either copy for the layer that predicts ahead.
    for own, shared in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        assert np.array_equal(tensors[f"model.layers.3.{own}.weight"][1], tensors[f"{shared}.weight"][1])


def test_configuration_and_templates_are_those_of_the_training(checkpoint):
    files = ("generation_config.json", *(f"{edition}tokenizer_config.json" for edition in ("", "r1/", "v4/")))
    generation, v31, r1, v4 = (json.loads((checkpoint / name).read_text("utf-8")) for name in files)
    assert generation == GENERATION_CONFIG
    assert (CONFIG["vocab_size"], CONFIG["bos_token_id"], CONFIG["eos_token_id"]) == (1280, 0, 1)
    assert [one.get("chat_template") for one in (v31, r1, v4)] == [V31_TEMPLATE, R1_TEMPLATE, None]
    assert sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file()) <= MOST_BYTES


def test_the_special_tokens_have_their_ids_and_flags(checkpoint):
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    expected = {index: (token, True) for index, token in enumerate(SPECIAL_TOKENS)}
    expected |= {index: (token, False) for index, token in enumerate(MARKER_TOKENS, 1280 - len(MARKER_TOKENS))}
    assert tokenizer.get_vocab_size() == 1280
    added = tokenizer.get_added_tokens_decoder()
    assert {index: (token.content, token.special) for index, token in added.items()} == expected
    for index, (token, is_special) in expected.items():
        assert tokenizer.encode(f"a{token}b", add_special_tokens=False).ids[1] == index
        assert tokenizer.decode([index], skip_special_tokens=True) == ("" if is_special else token)
    assert tokenizer.encode("a").ids[0] == 0


@pytest.mark.nightly
def test_training_the_tokenizer_again_gives_the_same_files(checkpoint, tmp_path):
    write_tokenizer(tmp_path)

    written = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert len(written) == 5
    for name in written:
        assert (tmp_path / name).read_bytes() == (checkpoint / name).read_bytes(), name


def test_the_checksums_are_true_and_name_every_file(checkpoint):
    lines = (checkpoint / "checksums.sha256").read_text("utf-8").splitlines()
    recorded = {name: checksum for checksum, name in (line.split("  ") for line in lines)}
    files = {
        path.relative_to(checkpoint).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in checkpoint.rglob("*")
        if path.is_file()
    }

    assert recorded.items() <= files.items()
    assert files.keys() - recorded.keys() <= UNLISTED


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def swap(file):
    """Put a file of the same length in its place, as a copy of another training would be."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.slow
def test_damaged_files_are_named_and_nothing_is_loaded(checkpoint, tmp_path):
    def refusal(damages):
        copied = tmp_path / "copied"
        shutil.rmtree(copied, ignore_errors=True)
        shutil.copytree(checkpoint, copied)
        for name, damage in damages.items():
            damage(copied / name)
        with pytest.raises(EngineError) as caught:
            load_checkpoint("copied", version_dir=tmp_path)
        return str(caught.value)

    weights, *others = ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"]
    damages = [(weights, cut), (weights, swap), *((name, Path.unlink) for name in (weights, *others))]
    for name, damage in damages:
        cause, expected = refusal({name: damage}), "is missing" if damage is Path.unlink else "is not the file that"
        assert f"{name} {expected}" in cause
        assert (cause.count(expected), cause.count("\n")) == (1, 0)  # the other files are as they should be
    both = refusal({weights: cut, "generation_config.json": Path.unlink})
    assert "generation_config.json is missing; model.safetensors is not the file" in both


@pytest.mark.parametrize(
    "number",
    [pytest.param(4, marks=pytest.mark.slow), pytest.param(80, marks=pytest.mark.nightly)],
    ids=["sample", "nightly"],
)
def test_it_answers_what_it_was_taught_and_most_of_what_it_was_not(checkpoint, number):
    """The model card has the scores of all questions; these are some of each split."""
    for split, least in (("taught", 0.95), ("held_out", 0.80)):
        asked = Random(19).sample([question for question in questions() if question.split == split], number)
        with loaded(checkpoint) as engine:
            answers = generate(engine, {question.id: question.prompt for question in asked})
        texts = {name: "".join(step.text for step in steps) for name, steps in answers.items()}
        wrong = [(one.prompt, texts[one.id]) for one in asked if not is_right(one, texts[one.id])]

        assert len(wrong) <= math.ceil((1 - least) * len(asked)), wrong
