"""Texts of a stream are joined again, whether the server sends increments or all text so far."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deepseek_triton_client import ProtocolError
from deepseek_triton_client._core.response_reader import Cumulative, Deltas, Unknown

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


@st.composite
def in_pieces(draw):
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return text, [text[a:b] for a, b in itertools.pairwise((0, *cuts, len(text)))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Cumulative, Unknown])
@settings(max_examples=60)
@given(so_far(), st.booleans())
def test_all_so_far_becomes_increments(kind, stream, says_end):
    text, pieces = stream
    assert joined(kind(), pieces, says_end=says_end) == text


@pytest.mark.slow
@settings(max_examples=60)
@given(in_pieces(), st.booleans())
def test_increments_are_recognised(stream, says_end):
    """Increments are detected when the first different text does not begin with the first text that has a whole
    character."""
    text, pieces = stream
    telling = list(itertools.dropwhile(lambda piece: not piece.rstrip("\ufffd"), pieces))
    first = next(iter(telling), "")
    other = next((piece for piece in telling if piece not in ("", first)), None)
    assume(other is not None and not other.startswith(first.rstrip("\ufffd")))
    assert joined(Unknown(), pieces, says_end=says_end) == text


STREAMS = {
    "increments": (["Hello", " world"], ["Hello", " world"]),
    "all so far": (["Hello", "Hello world"], ["Hello", " world"]),
    "an empty one says nothing": (["", "", "Hello", "", "Hello world"], ["", "", "Hello", "", " world"]),
    "a repetition, then all so far": (["ha", "ha", "haha"], ["ha", "", "ha"]),
    "a repetition, then increments": (["ha", "ha", "ha", "!"], ["ha", "", "", "haha!"]),
    "half a character, then all of it": (["a\ufffd", "a天"], ["a", "天"]),
    "held back, then increments": (["a\ufffd", "b"], ["a", "\ufffdb"]),
    "broken, then increments": (["\ufffd", "Hello", " world"], ["", "", "\ufffdHello world"]),
    "broken, then all so far": (["\ufffd", "天", "天地"], ["", "", "天地"]),
    "broken": (["\ufffd", "\ufffd", "\ufffd\ufffd", "a", "b"], ["", "", "", "", "\ufffd" * 4 + "ab"]),
    "the ambiguity": (["a", "ab", "abc"], ["a", "b", "c"]),
}


def added(increments, *texts):
    return [increments.add(text, last=False) for text in texts]


def test_which_of_the_two_it_is_shows_with_the_second_text():
    expected = {name: new for name, (_, new) in STREAMS.items()}
    assert {name: added(Unknown(), *texts) for name, (texts, _) in STREAMS.items()} == expected


@pytest.mark.parametrize("kind", [Cumulative, Unknown])
def test_half_a_character_is_held_back_until_it_is_whole_or_the_last(kind):
    increments = kind()
    assert added(increments, "天", "天\ufffd", "天地\ufffd\ufffd", "天地😀") == ["天", "", "地", "😀"]
    assert added(increments, "天地😀\ufffd") == [""]
    assert increments.add("天地😀\ufffd", last=True) == "\ufffd"
    assert increments.end() == ""
    increments = kind()
    assert added(increments, "a", "ab\ufffd") == ["a", "b"]
    assert (increments.end(), increments.end()) == ("\ufffd", "")


def test_a_stream_that_ends_undecided_was_cumulative():
    for texts, text in ((["\ufffd"], "\ufffd"), (["\ufffd", "😀"], "😀"), (["\ufffd", "😀", ""], "😀")):
        assert [joined(Unknown(), texts, says_end=says_end) for says_end in (True, False)] == [text] * 2


def test_increments_stay_what_they_are():
    assert joined(Deltas(), ["a\ufffd", "", "a"], says_end=False) == "a\ufffda"


def test_a_text_that_is_shorter_than_before_adds_nothing():
    cumulative = Cumulative()
    assert added(cumulative, "abc", "ab", "", "abcd", "abcd\ufffd") == ["abc", "", "", "d", ""]
    assert cumulative.add("abc", last=True) == ""


@pytest.mark.parametrize("kind", [Cumulative, Unknown])
def test_a_text_that_differs_from_the_one_before_is_refused(kind):
    increments = kind()
    assert added(increments, "a", "abc") == ["a", "bc"]
    with pytest.raises(ProtocolError, match="got 'aXc' after 'abc'"):
        increments.add("aXc", last=False)
