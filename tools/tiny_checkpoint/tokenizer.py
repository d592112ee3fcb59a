"""Trains the tiny checkpoint's tokenizer: DeepSeek's byte-level BPE with 1,280 tokens and single digits.

`python -m tiny_checkpoint.tokenizer DIR` writes tokenizer.json, tokenizer_config.json (also r1/ and v4/ with one) and
generation_config.json.
"""

import argparse
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from tiny_checkpoint.architecture import BOS, EOS, MARKER_TOKENS, PAD, SPECIAL_TOKENS
from tiny_checkpoint.chat_templates import R1_TEMPLATE, V31_TEMPLATE
from tiny_checkpoint.corpus import Document, training_documents

VOCABULARY_SIZE = 1280
SAMPLE_SEED, SAMPLE_SIZE = 1, 40_000
"""The documents that the tokenizer is trained on."""

SPLITS = (r"\p{N}", r"\p{Han}+", r" ?[\p{L}\p{M}]+| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+")
"""DeepSeek's, but with single digits: the model learns sums digit by digit."""

_ANY_SPECIAL = re.compile("|".join(re.escape(token) for token in (*SPECIAL_TOKENS, *MARKER_TOKENS)))


def train_tokenizer(documents: Iterable[Document]) -> dict[str, Any]:
    """Return the content of tokenizer.json, trained on the documents' text. The same documents give the same bytes."""
    letters = byte_letters()
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = _pre_tokenizer(SPLITS)
    size = VOCABULARY_SIZE - len(SPECIAL_TOKENS) - len(MARKER_TOKENS)
    texts = (segment.text for document in documents for segment in document.segments)
    plain_texts = (part for text in texts for part in _ANY_SPECIAL.split(text) if part)
    trained.train_from_iterator(
        plain_texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=letters, show_progress=False)
    )
    merges: list[list[str]] = json.loads(trained.to_str())["model"]["merges"]
    tokens = [*SPECIAL_TOKENS, *letters, *(left + right for left, right in merges), *MARKER_TOKENS]
    if len(set(tokens)) != VOCABULARY_SIZE:
        raise ValueError(f"expected {VOCABULARY_SIZE} tokens, got {len(set(tokens))}: train on more documents")
    ids = {token: index for index, token in enumerate(tokens)}
    return tokenizer_json(ids, merges)


def byte_letters() -> list[str]:
    """Return each byte's letter in a byte-level vocabulary: itself, or the next unused one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = itertools.count(0x100)
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def tokenizer_json(
    ids: dict[str, int],
    merges: list[list[str]],
    *,
    splits: Sequence[str] = SPLITS,
    markers: Sequence[str] = MARKER_TOKENS,
) -> dict[str, Any]:
    """Return tokenizer.json: byte-level BPE that puts the begin-of-sentence token before a prompt.

    :param ids: token -> id.
    :param merges: pairs of tokens, the first to be merged first.
    :param splits: regular expressions that cut a text before its bytes are merged.
    :param markers: single tokens that skip_special_tokens leaves in the text.
    """
    made = Tokenizer(models.BPE(ids, [(left, right) for left, right in merges]))
    made.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    made.add_tokens([AddedToken(token, normalized=False) for token in markers])
    made.normalizer = normalizers.Sequence([])
    made.pre_tokenizer = _pre_tokenizer(splits)
    made.post_processor = processors.TemplateProcessing(
        single=[BOS, "$A"], pair=[BOS, "$A", BOS, "$B:1"], special_tokens=[(BOS, ids[BOS])]
    )
    document: dict[str, Any] = json.loads(made.to_str())
    del document["model"]["ignore_merges"]  # its default, which older versions don't know
    return document | {"decoder": document["pre_tokenizer"]["pretokenizers"][-1]}


def _pre_tokenizer(splits: Sequence[str]) -> pre_tokenizers.Sequence:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(each), "isolated") for each in splits), byte_level])


def tokenizer_config(**chat_template: str) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, without `chat_template` where there is none."""
    return {
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        **chat_template,
    }


GENERATION_CONFIG = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 0.6, "top_p": 0.95}


def write_tokenizer(folder: Path) -> None:
    """Train the tokenizer on its sample and write its files, which say nothing of the weights, into `folder`."""
    contents = {
        "tokenizer.json": train_tokenizer(training_documents(SAMPLE_SEED, SAMPLE_SIZE)),
        "tokenizer_config.json": tokenizer_config(chat_template=V31_TEMPLATE),
        "r1/tokenizer_config.json": tokenizer_config(chat_template=R1_TEMPLATE),
        "v4/tokenizer_config.json": tokenizer_config(),
        "generation_config.json": GENERATION_CONFIG,
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train the tiny checkpoint's tokenizer and write its files.")
    parser.add_argument("folder", type=Path, help="folder to write")
    write_tokenizer(parser.parse_args(argv).folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
