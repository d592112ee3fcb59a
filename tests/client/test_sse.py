"""The SSE decoder: its result does not depend on how the bytes were cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_triton_client._core.exceptions import ProtocolError
from deepseek_triton_client._http.sse import SseDecoder


def decoded(*chunks: bytes, max_bytes: int | None = None) -> list[bytes]:
    decoder = SseDecoder(max_bytes)
    return [event for chunk in chunks for event in decoder.feed(chunk)]


@pytest.mark.parametrize(
    ("body", "events"),
    [
        pytest.param(b"data: a\n\ndata: b\n\n", [b"a", b"b"], id="LF"),
        pytest.param(b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"], id="CRLF"),
        pytest.param(b"data: a\r\rdata: b\r\r", [b"a", b"b"], id="CR"),
        pytest.param(b"data: a\r\n\ndata: b\n\r\n", [b"a", b"b"], id="mixed-line-ends"),
        pytest.param(b"data: a\ndata: b\ndata:\ndata: c\n\n", [b"a\nb\n\nc"], id="multi-line-data"),
        pytest.param(b"data:a\n\ndata:  b\n\n", [b"a", b" b"], id="one-leading-space-is-dropped"),
        pytest.param(b": note\ndata: a\n: note\n\n", [b"a"], id="comments"),
        pytest.param(b":\n\n:\n\n", [], id="comments-alone-are-no-event"),
        pytest.param(b"event: x\nid: 1\nretry: 5\ndata: a\nother\n\n", [b"a"], id="other-fields"),
        pytest.param(b"event: x\n\n", [], id="an-event-without-data-is-none"),
        pytest.param(b"data\n\ndata\ndata\n\n", [b"", b"\n"], id="field-without-colon"),
        pytest.param(b'data: {"a": "b:c"}\n\n', [b'{"a": "b:c"}'], id="colons-in-data"),
        pytest.param(b"\n\n\ndata: a\n\n\n\n", [b"a"], id="blank-lines"),
        pytest.param(b"data: a\n\ndata: cut off\n", [b"a"], id="incomplete-event-at-the-end"),
        pytest.param(b"\xef\xbb\xbfdata: a\n\n", [b"a"], id="byte-order-mark"),
        pytest.param("data: 你好 🙂\n\n".encode(), ["你好 🙂".encode()], id="UTF-8"),
    ],
)
def test_events(body, events):
    assert decoded(body) == events
    assert decoded(*(body[i : i + 1] for i in range(len(body)))) == events


def test_an_event_is_there_as_soon_as_its_blank_line_is():
    """An event ends at once with CR line ends too, although the next byte could be the LF of a CRLF."""
    decoder = SseDecoder()
    assert decoder.feed(b"data: a\r\r") == [b"a"]
    assert decoder.feed(b"\n") == []
    assert decoder.feed(b"data: b\r\n\r") == [b"b"]
    assert decoder.feed(b"\ndata: c\n\n") == [b"c"]


@pytest.mark.parametrize("before", [b"data: a\n", b"data: a\r", b"da", b"data: a"])
def test_whole_events_after_the_beginning_of_one(before):
    after = b"data: b\n\ndata: c\n\n"
    assert decoded(before, after) == decoded(*(bytes([byte]) for byte in before + after))


line_ends = st.sampled_from([b"\n", b"\r", b"\r\n"])
lines = st.one_of(
    st.just(b""),
    st.text("ab 你🙂:\u2028\x0b\x85").map(lambda text: b"data: " + text.encode()),
    st.text("ab: ").map(lambda text: b": " + text.encode()),
    st.sampled_from([b"data", b"data:", b"event: x", b"id: 1", b"database: no"]),
)
bodies = st.lists(st.tuples(lines, line_ends).map(b"".join)).map(b"".join)


@given(bodies, st.lists(st.integers(0, 200)))
def test_any_cut_gives_the_same_events(body, cuts):
    ends = sorted({min(cut, len(body)) for cut in cuts} | {len(body)})
    starts = [0, *ends]
    assert decoded(*(body[a:b] for a, b in zip(starts, ends, strict=False))) == decoded(body)


@given(st.lists(st.lists(st.text("ab 你🙂:\u2028\x0b\x85"), min_size=1)), line_ends)
def test_what_was_put_into_events_comes_out(events, end):
    body = b"".join(b"".join(b"data: " + line.encode() + end for line in event) + end for event in events)
    assert decoded(body) == ["\n".join(event).encode() for event in events]


@pytest.mark.parametrize(
    ("body", "pending"),
    [
        pytest.param(b"", False, id="nothing"),
        pytest.param(b"data: a\n\n", False, id="a-whole-event"),
        pytest.param(b"data: a\n\n: note\n", False, id="a-comment"),
        pytest.param(b"data: a\n\nda", True, id="half-a-line"),
        pytest.param(b"data: a\n\ndata: b\n", True, id="no-blank-line"),
    ],
)
def test_what_is_pending(body, pending):
    decoder = SseDecoder()
    decoder.feed(body)
    assert decoder.pending is pending


@given(bodies, st.lists(st.integers(0, 200)))
def test_nothing_is_pending_after_a_blank_line(body, cuts):
    decoder = SseDecoder()
    for byte in body + b"\n\n":
        decoder.feed(bytes([byte]))
    assert not decoder.pending


@pytest.mark.parametrize("event", [b"data: " + b"x" * 100, b"data: x\n" * 20, b"data\n" * 30, b": " + b"x" * 100])
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_an_event_that_is_too_large(event, step):
    body = b"data: " + b"y" * 90 + b"\n\n" + event
    pieces = (body[start : start + step] for start in range(0, len(body), step))
    with pytest.raises(ProtocolError, match=r"connection\.max_message_bytes, 100"):
        decoded(*pieces, max_bytes=100)


@pytest.mark.parametrize("step", [1, 7, 100_000])
def test_many_events_of_the_largest_size_are_none_too_large(step):
    line = b"data: " + b"x" * 94
    body = (line + b"\n\n" + b": a comment\n" + line + b"\r\r") * 20
    pieces = (body[start : start + step] for start in range(0, len(body), step))
    assert decoded(*pieces, max_bytes=100) == [b"x" * 94] * 40
