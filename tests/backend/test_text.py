import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_backend.text import StopStringFilter


def run(pieces, stops, **kwargs):
    stop_filter = StopStringFilter(stops, **kwargs)
    shown = [stop_filter.push(piece) for piece in pieces]
    if stop_filter.matched is None:
        shown.append(stop_filter.finish())
    return shown, stop_filter.matched


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "matched"),
    [
        (["abc"], [], "abc", None),
        (["abcENDdef"], ["END"], "abc", "END"),
        (["abcE", "N", "Ddef"], ["END"], "abc", "END"),
        (["abcE", "N", "def"], ["END"], "abcENdef", None),
        (["abcEN"], ["END"], "abcEN", None),
        (["xab", "ab", "c"], ["abc"], "xab", "abc"),
        (["one two"], ["two", "one"], "", "one"),
        (["xaab"], ["a", "aab"], "x", "a"),
        (["abcd"], ["abcd", "bc"], "a", "bc"),
    ],
)
def test_text_ends_before_the_first_stop_string(pieces, stops, text, matched):
    shown, found = run(pieces, stops)

    assert "".join(shown) == text
    assert found == matched


def test_the_stop_string_can_stay():
    shown, _ = run(["abcE", "NDx"], ["END"], include_stop=True)

    assert "".join(shown) == "abcEND"


def test_only_what_may_begin_a_stop_string_is_held_back():
    stop_filter = StopStringFilter(["END"])

    assert stop_filter.push("abE") == "ab"
    assert stop_filter.push("x") == "Ex"


@given(st.lists(st.text("abc", max_size=3)), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_splitting_the_text_makes_no_difference(pieces, stops):
    split, split_match = run(pieces, stops)
    whole, whole_match = run(["".join(pieces)], stops)

    assert "".join(split) == "".join(whole)
    assert split_match == whole_match
    assert whole_match or "".join(whole) == "".join(pieces)
