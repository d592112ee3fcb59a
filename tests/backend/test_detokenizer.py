import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from deepseek_backend.engines.detokenizer import Detokenizer
from support.random_checkpoint import build_tokenizer
from tiny_checkpoint.architecture import BOS

TOKENIZER = Tokenizer.from_str(json.dumps(build_tokenizer()))

# Each of these has several tokens, or shares its first bytes with another.
AWKWARD = (
    *("👩‍💻", "👨‍👩‍👧‍👦", "👍🏽", "🏳️‍🌈", "我们", "你好", "𠮷野家", "é", "e\u0301", "ñ"),
    *("naïve", " the", "\u200d", "\n", " ", "0"),
)
TEXTS = st.lists(
    st.sampled_from(AWKWARD) | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")),
    max_size=12,
).map("".join)


def pieces(token_ids, *, skip_special_tokens=True):
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.slow
@given(TEXTS)
def test_pieces_of_a_text_join_to_it_and_never_split_a_character(text):
    result = pieces(TOKENIZER.encode(text).ids)
    assert "".join(result) == text
    assert not any("\ufffd" in piece for piece in result)


@pytest.mark.slow
@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=40), st.booleans())
def test_pieces_of_any_tokens_join_to_their_decoding(token_ids, skip):
    """The tokens need not be the encoding of a text: there may be stray bytes, and special tokens in the middle."""
    expected = TOKENIZER.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pieces(token_ids, skip_special_tokens=skip)) == expected


def test_a_character_comes_with_its_last_token():
    token_ids = TOKENIZER.encode("💻!", add_special_tokens=False).ids
    assert len(token_ids) > 2
    assert pieces(token_ids) == [""] * (len(token_ids) - 2) + ["💻", "!", ""]


def test_an_unfinished_character_is_flushed_as_a_replacement():
    first, *_ = TOKENIZER.encode("💻", add_special_tokens=False).ids
    assert pieces([first]) == ["", "\ufffd"]


@pytest.mark.parametrize(("skip", "expected"), [(True, "<think>"), (False, f"{BOS}<think>")])
def test_special_tokens_are_left_out_on_request_and_markers_never(skip, expected):
    token_ids = TOKENIZER.encode("<think>").ids
    assert "".join(pieces(token_ids, skip_special_tokens=skip)) == expected
