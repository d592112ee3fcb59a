"""Texts of a stream are joined again, whether the server sends increments or all text so far."""

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deepseek_triton_client import ProtocolError
from deepseek_triton_client._core.text_increments import Cumulative, Deltas, Unknown

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


@pytest.mark.parametrize("kind", [Cumulative, Unknown])
@given(so_far(), st.booleans())
def test_all_so_far_becomes_increments(kind, stream, says_end):
    text, pieces = stream
    assert joined(kind(), pieces, says_end=says_end) == text


@given(in_pieces(), st.booleans())
def test_increments_stay_what_they_are(stream, says_end):
    text, pieces = stream
    assert joined(Deltas(), pieces, says_end=says_end) == text


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


@pytest.mark.parametrize(
    ("texts", "new"),
    [
        pytest.param(["Hello", " world"], ["Hello", " world"], id="increments"),
        pytest.param(["Hello", "Hello world"], ["Hello", " world"], id="all-so-far"),
        pytest.param(
            ["", "", "Hello", "", "Hello world"], ["", "", "Hello", "", " world"], id="an-empty-one-says-nothing"
        ),
        pytest.param(["ha", "ha", "haha"], ["ha", "", "ha"], id="a-repetition-then-all-so-far"),
        pytest.param(["ha", "ha", "ha", "!"], ["ha", "", "", "haha!"], id="a-repetition-then-increments"),
        pytest.param(["a\ufffd", "a天"], ["a", "天"], id="half-a-character-then-all-of-it"),
        pytest.param(["a\ufffd", "b"], ["a", "\ufffdb"], id="held-back-then-increments"),
        pytest.param(["\ufffd", "Hello", " world"], ["", "", "\ufffdHello world"], id="broken-then-increments"),
        pytest.param(["\ufffd", "天", "天地"], ["", "", "天地"], id="broken-then-all-so-far"),
        pytest.param(
            ["\ufffd", "\ufffd", "\ufffd\ufffd", "a", "b"], ["", "", "", "", "\ufffd" * 4 + "ab"], id="broken"
        ),
        pytest.param(["a", "ab", "abc"], ["a", "b", "c"], id="the-ambiguity"),
    ],
)
def test_which_of_the_two_it_is_shows_with_the_second_text(texts, new):
    unknown = Unknown()
    assert [unknown.add(text, last=False) for text in texts] == new


@pytest.mark.parametrize("kind", [Cumulative, Unknown])
def test_half_a_character_is_held_back_until_it_is_whole_or_the_last(kind):
    increments = kind()
    steps = ["天", "天\ufffd", "天地\ufffd\ufffd", "天地😀"]
    assert [increments.add(step, last=False) for step in steps] == ["天", "", "地", "😀"]
    assert increments.add("天地😀\ufffd", last=False) == ""
    assert increments.add("天地😀\ufffd", last=True) == "\ufffd"
    assert increments.end() == ""


@pytest.mark.parametrize("kind", [Cumulative, Unknown])
def test_what_is_held_back_comes_with_the_end(kind):
    increments = kind()
    assert [increments.add(text, last=False) for text in ("a", "ab\ufffd")] == ["a", "b"]
    assert (increments.end(), increments.end()) == ("\ufffd", "")


@pytest.mark.parametrize("says_end", [True, False])
@pytest.mark.parametrize(
    ("texts", "text"), [(["\ufffd"], "\ufffd"), (["\ufffd", "😀"], "😀"), (["\ufffd", "😀", ""], "😀")]
)
def test_a_stream_that_ends_undecided_was_cumulative(texts, text, says_end):
    assert joined(Unknown(), texts, says_end=says_end) == text


def test_a_text_that_is_shorter_than_before_adds_nothing():
    cumulative = Cumulative()
    assert [cumulative.add(text, last=False) for text in ("abc", "ab", "", "abcd")] == ["abc", "", "", "d"]
    assert cumulative.add("abcd\ufffd", last=False) == ""
    assert cumulative.add("abc", last=True) == ""


@pytest.mark.parametrize("kind", [Cumulative, Unknown])
def test_a_text_that_differs_from_the_one_before_is_refused(kind):
    increments = kind()
    assert [increments.add(text, last=False) for text in ("a", "abc")] == ["a", "bc"]
    with pytest.raises(ProtocolError, match="got 'aXc' after 'abc'"):
        increments.add("aXc", last=False)
