"""The SSE decoder: its result does not depend on how the bytes were cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_triton_client._core.exceptions import ProtocolError
from deepseek_triton_client._http.sse import SseDecoder


def decoded(*chunks, max_bytes=None):
    decoder = SseDecoder(max_bytes)
    return [event for chunk in chunks for event in decoder.feed(chunk)]


def in_bytes(body):
    return (body[place : place + 1] for place in range(len(body)))


EVENTS = {
    "LF": (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
    "CRLF": (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
    "CR": (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
    "mixed line ends": (b"data: a\r\n\ndata: b\n\r\n", [b"a", b"b"]),
    "multi-line data": (b"data: a\ndata: b\ndata:\ndata: c\n\n", [b"a\nb\n\nc"]),
    "one leading space is dropped": (b"data:a\n\ndata:  b\n\n", [b"a", b" b"]),
    "comments": (b": note\ndata: a\n: note\n\n", [b"a"]),
    "comments alone are no event": (b":\n\n:\n\n", []),
    "other fields": (b"event: x\nid: 1\nretry: 5\ndata: a\nother\n\n", [b"a"]),
    "an event without data is none": (b"event: x\n\n", []),
    "field without colon": (b"data\n\ndata\ndata\n\n", [b"", b"\n"]),
    "colons in data": (b'data: {"a": "b:c"}\n\n', [b'{"a": "b:c"}']),
    "blank lines": (b"\n\n\ndata: a\n\n\n\n", [b"a"]),
    "an incomplete event at the end": (b"data: a\n\ndata: cut off\n", [b"a"]),
    "byte order mark": (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
    "UTF-8": ("data: 你好 🙂\n\n".encode(), ["你好 🙂".encode()]),
}


def test_events():
    expected = {name: events for name, (_, events) in EVENTS.items()}
    assert {name: decoded(body) for name, (body, _) in EVENTS.items()} == expected
    assert {name: decoded(*in_bytes(body)) for name, (body, _) in EVENTS.items()} == expected


def test_an_event_is_there_as_soon_as_its_blank_line_is():
    """An event ends at once with CR line ends too, although the next byte could be the LF of a CRLF."""
    decoder = SseDecoder()
    assert decoder.feed(b"data: a\r\r") == [b"a"]
    assert decoder.feed(b"\n") == []
    assert decoder.feed(b"data: b\r\n\r") == [b"b"]
    assert decoder.feed(b"\ndata: c\n\n") == [b"c"]


def test_whole_events_after_the_beginning_of_one():
    after = b"data: b\n\ndata: c\n\n"
    for before in (b"data: a\n", b"data: a\r", b"da", b"data: a"):
        assert decoded(before, after) == decoded(*in_bytes(before + after))


line_ends = st.sampled_from([b"\n", b"\r", b"\r\n"])
lines = st.one_of(
    st.just(b""),
    st.text("ab 你🙂:\u2028\x0b\x85").map(lambda text: b"data: " + text.encode()),
    st.text("ab: ").map(lambda text: b": " + text.encode()),
    st.sampled_from([b"data", b"data:", b"event: x", b"id: 1", b"database: no"]),
)
bodies = st.lists(st.tuples(lines, line_ends).map(b"".join)).map(b"".join)


@pytest.mark.slow
@settings(max_examples=50)
@given(bodies, st.lists(st.integers(0, 200)))
def test_any_cut_gives_the_same_events(body, cuts):
    ends = sorted({min(cut, len(body)) for cut in cuts} | {len(body)})
    starts = [0, *ends]
    assert decoded(*(body[a:b] for a, b in zip(starts, ends, strict=False))) == decoded(body)
    decoder = SseDecoder()
    for byte in body + b"\n\n":
        decoder.feed(bytes([byte]))
    assert not decoder.pending


def test_what_is_pending():
    pending = {
        b"": False,
        b"data: a\n\n": False,
        b"data: a\n\n: note\n": False,
        b"data: a\n\nda": True,
        b"data: a\n\ndata: b\n": True,
    }
    for body, expected in pending.items():
        decoder = SseDecoder()
        decoder.feed(body)
        assert decoder.pending is expected, body


def test_the_largest_event():
    def fed(body, step):
        return decoded(*(body[start : start + step] for start in range(0, len(body), step)), max_bytes=100)

    line = b"data: " + b"x" * 94
    for step in (1, 7, 100_000):
        assert fed((line + b"\n\n" + b": a comment\n" + line + b"\r\r") * 20, step) == [b"x" * 94] * 40
        for event in (b"data: " + b"x" * 100, b"data: x\n" * 20, b"data\n" * 30, b": " + b"x" * 100):
            with pytest.raises(ProtocolError, match=r"connection\.max_message_bytes, 100"):
                fed(b"data: " + b"y" * 90 + b"\n\n" + event, step)
