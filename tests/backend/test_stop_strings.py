import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_backend.answer_text import StopStringFilter


def run(pieces, stops, **kwargs):
    stop_filter = StopStringFilter(stops, **kwargs)
    shown = [stop_filter.push(piece) for piece in pieces]
    if stop_filter.matched is None:
        shown.append(stop_filter.finish())
    return shown, stop_filter.matched


ENDS = [  # pieces, stop strings, the text that is shown, and the string that was found
    (["abc"], [], "abc", None),
    (["abcENDdef"], ["END"], "abc", "END"),
    (["abcE", "N", "Ddef"], ["END"], "abc", "END"),
    (["abcE", "N", "def"], ["END"], "abcENdef", None),
    (["abcEN"], ["END"], "abcEN", None),
    (["xab", "ab", "c"], ["abc"], "xab", "abc"),
    (["one two"], ["two", "one"], "", "one"),
    (["xaab"], ["a", "aab"], "x", "a"),
    (["abcd"], ["abcd", "bc"], "a", "bc"),
    (["xab"], ["b", "ab"], "x", "ab"),
    (list("aabaaabaaac"), ["aabaaac"], "aaba", "aabaaac"),
]


def test_text_ends_before_the_first_stop_string():
    found = [run(pieces, stops) for pieces, stops, *_ in ENDS]
    assert [("".join(shown), matched) for shown, matched in found] == [(text, stop) for *_, text, stop in ENDS]


def test_the_stop_string_can_stay():
    shown, _ = run(["abcE", "NDx"], ["END"], include_stop=True)
    assert "".join(shown) == "abcEND"


def test_only_what_may_begin_a_stop_string_is_held_back():
    stop_filter = StopStringFilter(["END"])
    assert stop_filter.push("abE") == "ab"
    assert stop_filter.push("x") == "Ex"


PIECES = st.lists(st.text("abc", max_size=3) | st.text("ab", max_size=12))
STOPS = st.lists(st.text("abc", min_size=1, max_size=4) | st.text("ab", min_size=1, max_size=8), max_size=3)


@pytest.mark.slow
@given(PIECES, STOPS)
def test_no_more_is_held_back_than_may_begin_a_stop_string(pieces, stops):
    shown, matched = run(pieces, stops)
    text = "".join(pieces)
    beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
    held = max((beginning for beginning in beginnings if text.endswith(beginning)), key=len, default="")
    assert matched or shown[-1] == held


@pytest.mark.slow
@given(PIECES, STOPS)
def test_the_stop_string_that_is_complete_first_ends_the_text(pieces, stops):
    shown, matched = run(pieces, stops)
    text = "".join(pieces)
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))]
    expected = text, None
    if ends:
        longest = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
        expected = text[: ends[0]].removesuffix(longest), longest
    assert ("".join(shown), matched) == expected
