from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer

from deepseek_backend.engines.reference.checkpoint_loading import LoadedCheckpoint, load_checkpoint
from deepseek_backend.engines.reference.feed_forward import MixtureOfExperts
from deepseek_backend.engines.reference.model_runner import ModelRunner
from support import random_checkpoint as making
from support.demo_decoding import DEMO_MAX_TOKENS, DEMO_PROMPTS
from support.random_checkpoint import BOS, EOS, PAD, build_tokenizer, write_checkpoint

pytestmark = pytest.mark.slow

Array = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def checkpoint(random_checkpoint: Path) -> LoadedCheckpoint:
    return load_checkpoint(str(random_checkpoint), version_dir=Path())


@pytest.fixture(scope="module")
def sequences(checkpoint: LoadedCheckpoint) -> list[tuple[int, list[int]]]:
    """Return the prompt length and all tokens of each demo prompt, continued greedily."""
    runner = ModelRunner(checkpoint.model, len(DEMO_PROMPTS))
    rows = [checkpoint.encode(prompt, True) for prompt in DEMO_PROMPTS]
    lengths = [len(row) for row in rows]
    hidden = np.stack([runner.prefill(row)[-1] for row in rows])
    for _ in range(DEMO_MAX_TOKENS):
        chosen = runner.logits(hidden).argmax(-1).tolist()
        for row, token_id in zip(rows, chosen, strict=True):
            row.append(token_id)
        hidden = runner.decode(chosen)
    return list(zip(lengths, rows, strict=True))


def test_the_same_bytes_every_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_checkpoint(tmp_path / name)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_is_a_deepseek_v3_of_a_few_million_parameters() -> None:
    config = making.build_config(1000)
    weights = making.build_weights(config, [5])
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert 2e6 < sum(weight.size for weight in weights.values()) < 8e6
    assert config["n_group"] > config["topk_group"] > 1
    assert config["rope_scaling"]["type"] == "yarn"


def test_no_decision_of_greedy_decoding_is_close(
    checkpoint: LoadedCheckpoint, sequences: list[tuple[int, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over each finished sequence gives the logits, and the scores of its routing."""
    config = checkpoint.model.config
    leads: dict[str, list[float]] = {"logits": [], "experts": [], "groups": []}
    route = MixtureOfExperts.route

    def watch(experts: MixtureOfExperts, x: Array) -> tuple[npt.NDArray[np.intp], Array]:
        scores = 1 / (1 + np.exp(-(experts._router @ x).T)) + experts._bias
        for row in scores:
            groups = row.reshape(config.n_group, -1)
            group_scores = np.sort(groups, axis=1)[:, -2:].sum(1)
            leads["groups"].append(smallest_lead(group_scores[None], config.topk_group))
            chosen = np.argsort(-group_scores)[: config.topk_group]
            leads["experts"].append(smallest_lead(groups[chosen].reshape(1, -1), config.num_experts_per_tok))
        return route(experts, x)

    monkeypatch.setattr(MixtureOfExperts, "route", watch)
    for num_prompt, tokens in sequences:
        assert len(tokens) == num_prompt + DEMO_MAX_TOKENS
        runner = ModelRunner(checkpoint.model, 1)
        logits = runner.logits(runner.prefill(tokens[:-1]))
        leads["logits"].append(smallest_lead(logits[num_prompt - 1 :], 1))
    assert min(min(values) for values in leads.values()) > 1e-3, {name: min(values) for name, values in leads.items()}


def smallest_lead(scores: Array, k: int) -> float:
    ordered = -np.sort(-scores, axis=1)
    return float((ordered[:, k - 1] - ordered[:, k]).min())


def test_it_generates_words_and_never_ends_by_itself(
    checkpoint: LoadedCheckpoint, sequences: list[tuple[int, list[int]]]
) -> None:
    for num_prompt, tokens in sequences:
        text = checkpoint.tokenizer.decode(tokens[num_prompt:])
        assert "\ufffd" not in text
        assert len(set(text.split())) > DEMO_MAX_TOKENS / 2


def test_the_spread_of_logits_keeps_sampling_varied(
    checkpoint: LoadedCheckpoint, sequences: list[tuple[int, list[int]]]
) -> None:
    runner = ModelRunner(checkpoint.model, 1)
    logits = runner.logits(runner.prefill(sequences[0][1]))
    vocab = build_tokenizer()["model"]["vocab"]
    spoken = logits[..., [vocab["Ġthe"], vocab["Ġriver"], vocab["Ġmoon"], vocab["Ġyear"]]]
    assert 5 < float(spoken.std(ddof=1)) < 20


# --- tokenizer -------------------------------------------------------------------------------------------------------

TOKENIZER = Tokenizer.from_str(json.dumps(build_tokenizer()))


def test_special_tokens_have_deepseeks_ids_and_bos_goes_first() -> None:
    assert [TOKENIZER.token_to_id(token) for token in (BOS, EOS, PAD)] == [0, 1, 2]
    assert TOKENIZER.encode("Hello").ids[0] == 0
    assert TOKENIZER.encode("Hello", add_special_tokens=False).ids[0] != 0


def test_vocabulary_has_every_byte_and_about_a_thousand_words() -> None:
    assert 800 <= TOKENIZER.get_vocab_size() <= 1500
    every_byte = "".join(map(chr, range(0x80))) + "".join(map(chr, range(0x80, 0x800, 0x40))) + "ࠀ𐀀\U0010ffff"
    assert TOKENIZER.decode(TOKENIZER.encode(every_byte).ids) == every_byte
    assert {chr(byte) for byte in range(0x21, 0x7F)} <= TOKENIZER.get_vocab().keys()


def test_ids_are_dense() -> None:
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(TOKENIZER.get_vocab_size()))


def test_each_listed_word_is_one_token() -> None:
    words = [*(f" {word}" for word in making._WORDS), *making._CHINESE, *making._EMOJI]
    assert [word for word in words if len(TOKENIZER.encode(word, add_special_tokens=False).ids) != 1] == []


def test_chat_template_renders_turns_without_earlier_reasoning(checkpoint: LoadedCheckpoint) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "<think>hm</think>Hi"},
        {"role": "user", "content": "Why"},
    ]
    turns = f"{BOS}Be brief.<｜User｜>Hello<｜Assistant｜></think>Hi{EOS}<｜User｜>Why"
    template = checkpoint.chat_template
    assert template.apply_chat_template(messages, tokenize=False, add_generation_prompt=False) == turns
    for thinking, start in ((True, "<think>"), (False, "</think>")):
        rendered = template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, thinking=thinking)
        assert rendered == f"{turns}<｜Assistant｜>{start}"
