from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepseek_backend.engines.reference import tiny_checkpoint
from deepseek_backend.engines.reference.tiny_checkpoint import (
    BOS,
    EOS,
    PAD,
    build_tokenizer,
    ensure_tiny_checkpoint,
    make_checkpoint,
    write_checkpoint,
)
from support.demo_decoding import DEMO_MAX_TOKENS, DEMO_PROMPTS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the checkpoint; the engine's tests of the same run share it."""
    return ensure_tiny_checkpoint(tmp_path_factory.getbasetemp() / "cache")


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


def test_is_made_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(tiny_checkpoint, "write_checkpoint", never)
    assert ensure_tiny_checkpoint(folder.parent) == folder


def test_default_cache_is_the_users(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ensure_tiny_checkpoint() == tmp_path / "deepseek-triton" / folder.name


def test_loads_as_a_deepseek_v3_of_a_few_million_parameters(folder: Path) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model).__name__ == "DeepseekV3ForCausalLM"
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert 2e6 < sum(parameter.numel() for parameter in model.parameters()) < 8e6
    config = json.loads((folder / "config.json").read_text())
    assert config["n_group"] > config["topk_group"] > 1
    assert config["rope_scaling"]["type"] == "yarn"


def greedy(folder: Path) -> tuple[torch.nn.Module, list[tuple[int, list[int]]]]:
    """Return the model, and the prompt length and all tokens of each demo prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sequences = []
    for prompt in DEMO_PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**inputs, do_sample=False, max_new_tokens=DEMO_MAX_TOKENS)
        sequences.append((inputs.input_ids.shape[1], output[0].tolist()))
    return model, sequences


def test_no_decision_of_greedy_decoding_is_close(folder: Path) -> None:
    """A pass over each finished sequence gives router logits, and numpy computes the routing scores from them."""
    model, sequences = greedy(folder)
    config = model.config
    biases = [m.e_score_correction_bias.numpy() for m in model.modules() if hasattr(m, "e_score_correction_bias")]
    leads: dict[str, list[float]] = {"logits": [], "experts": [], "groups": []}
    for num_prompt, tokens in sequences:
        assert len(tokens) == num_prompt + DEMO_MAX_TOKENS
        with torch.no_grad():
            output = model(torch.tensor([tokens[:-1]]), output_router_logits=True)
        leads["logits"].append(smallest_lead(output.logits[0, num_prompt - 1 :].numpy(), 1))
        for router_logits, bias in zip(output.router_logits, biases, strict=True):
            scores = 1 / (1 + np.exp(-router_logits.numpy())) + bias
            for row in scores:
                groups = row.reshape(config.n_group, -1)
                group_scores = np.sort(groups, axis=1)[:, -2:].sum(1)
                leads["groups"].append(smallest_lead(group_scores[None], config.topk_group))
                chosen = np.argsort(-group_scores)[: config.topk_group]
                leads["experts"].append(smallest_lead(groups[chosen].reshape(1, -1), config.num_experts_per_tok))
    assert min(min(values) for values in leads.values()) > 1e-3, {name: min(values) for name, values in leads.items()}


def smallest_lead(scores: npt.NDArray[np.float32], k: int) -> float:
    ordered = -np.sort(-scores, axis=1)
    return float((ordered[:, k - 1] - ordered[:, k]).min())


def test_it_generates_words_and_never_ends_by_itself(folder: Path) -> None:
    _, sequences = greedy(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for num_prompt, tokens in sequences:
        text = tokenizer.decode(tokens[num_prompt:])
        assert "\ufffd" not in text
        assert len(set(text.split())) > DEMO_MAX_TOKENS / 2


def test_the_spread_of_logits_keeps_sampling_varied(folder: Path) -> None:
    model, sequences = greedy(folder)
    with torch.no_grad():
        logits = model(torch.tensor([sequences[0][1]])).logits
    vocab = build_tokenizer()["model"]["vocab"]
    spoken = logits[..., [vocab["Ġthe"], vocab["Ġriver"], vocab["Ġmoon"], vocab["Ġyear"]]]
    assert 5 < float(spoken.std()) < 20


def test_two_at_once_both_get_the_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both_written = threading.Barrier(2)

    def wait_for_the_other(folder: Path) -> None:
        write_checkpoint(folder)
        both_written.wait(timeout=60)

    monkeypatch.setattr(tiny_checkpoint, "write_checkpoint", wait_for_the_other)
    errors: list[BaseException] = []

    def make() -> None:
        try:
            make_checkpoint(tmp_path / "tiny")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    assert len(list((tmp_path / "tiny").iterdir())) == 5


def test_command_prints_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny_checkpoint.main(["--output", str(tmp_path / "here")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "here")
    assert (tmp_path / "here" / "model.safetensors").is_file()


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
    words = [*(f" {word}" for word in tiny_checkpoint._WORDS), *tiny_checkpoint._CHINESE, *tiny_checkpoint._EMOJI]
    assert [word for word in words if len(TOKENIZER.encode(word, add_special_tokens=False).ids) != 1] == []


def test_chat_template_renders_turns_without_earlier_reasoning(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "<think>hm</think>Hi"},
        {"role": "user", "content": "Why"},
    ]
    turns = f"{BOS}Be brief.<｜User｜>Hello<｜Assistant｜></think>Hi{EOS}<｜User｜>Why"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == turns
    for thinking, start in ((True, "<think>"), (False, "</think>")):
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, thinking=thinking
        )
        assert rendered == f"{turns}<｜Assistant｜>{start}"
