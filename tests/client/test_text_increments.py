"""Texts of a stream are joined again, whether the server sends increments or all text so far."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton_client import ProtocolError
from deepseek_triton_client._core.response_reader import Cumulative, Deltas

texts = st.text(st.sampled_from("ab é天地😀👩‍💻\ufffd\n") | st.characters(exclude_categories=["Cs"]))


def joined(increments, pieces, *, says_end):
    last = len(pieces) - 1
    new = [increments.add(piece, last=says_end and place == last) for place, piece in enumerate(pieces)]
    return "".join(new) + ("" if says_end else increments.end())


@st.composite
def so_far(draw):
    """A text, and what a server had of it at some moments, in bytes that may end inside a character."""
    text = draw(texts)
    encoded = text.encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(encoded)), max_size=8)))
    return text, [encoded[:cut].decode(errors="replace") for cut in (*cuts, len(encoded))]


@pytest.mark.slow
@settings(max_examples=60)
@given(so_far(), st.booleans())
def test_all_so_far_becomes_increments(stream, says_end):
    text, pieces = stream
    assert joined(Cumulative(), pieces, says_end=says_end) == text


def added(increments, *texts):
    return [increments.add(text, last=False) for text in texts]


def test_half_a_character_is_held_back_until_it_is_whole_or_the_last():
    increments = Cumulative()
    assert added(increments, "天", "天\ufffd", "天地\ufffd\ufffd", "天地😀") == ["天", "", "地", "😀"]
    assert added(increments, "天地😀\ufffd") == [""]
    assert increments.add("天地😀\ufffd", last=True) == "\ufffd"
    assert increments.end() == ""
    increments = Cumulative()
    assert added(increments, "a", "ab\ufffd") == ["a", "b"]
    assert (increments.end(), increments.end()) == ("\ufffd", "")


def test_increments_stay_what_they_are():
    assert joined(Deltas(), ["a\ufffd", "", "a"], says_end=False) == "a\ufffda"


def test_a_text_that_is_shorter_than_before_adds_nothing():
    cumulative = Cumulative()
    assert added(cumulative, "abc", "ab", "", "abcd", "abcd\ufffd") == ["abc", "", "", "d", ""]
    assert cumulative.add("abc", last=True) == ""


def test_a_text_that_differs_from_the_one_before_is_refused():
    increments = Cumulative()
    assert added(increments, "a", "abc") == ["a", "bc"]
    with pytest.raises(ProtocolError, match="got 'aXc' after 'abc'"):
        increments.add("aXc", last=False)
