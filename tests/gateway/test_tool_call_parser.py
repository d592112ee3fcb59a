"""The parser of tool calls: all forms, however the text is cut."""

import json
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepseek_triton_tools.gateway.chat import AnswerCalls
from deepseek_triton_tools.gateway.tool_call_parser import (
    AFTER_PARAMETER,
    CLOSINGS,
    DSML_CALLS_BEGIN,
    DSML_PARAMETER_END,
    OPENINGS,
    SEPARATOR,
    ArgumentsPiece,
    CallBegins,
    CallEnds,
    TextPiece,
    ToolCallParser,
)

CALLS = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"


@dataclass(frozen=True)
class Answer:
    """All pieces put together. calls: (name, arguments, cut), where cut is None for a call that has not ended."""

    text: str
    calls: tuple[tuple[str, str, bool | None], ...]


def put_together(pieces):
    text = ""
    calls = []
    for piece in pieces:
        if isinstance(piece, TextPiece):
            assert piece.text
            assert not calls or calls[-1][2] is not None, "text inside a call"
            text += piece.text
        elif isinstance(piece, CallBegins):
            assert piece.index == len(calls)
            calls.append((piece.name, "", None))
        else:
            name, arguments, cut = calls[piece.index]
            assert cut is None, "a call has ended already"
            assert piece.index == len(calls) - 1
            if isinstance(piece, ArgumentsPiece):
                calls[piece.index] = (name, arguments + piece.text, None)
            else:
                calls[piece.index] = (name, arguments, piece.cut)
    return Answer(text, tuple(calls))


def parse(chunks):
    parser = ToolCallParser()
    pieces = [piece for chunk in chunks for piece in parser.feed(chunk)]
    return put_together(pieces + parser.end())


def fenced(name, arguments):
    return f"{CALL}function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```{CALL_END}"


def raw(name, arguments):
    return f"{CALL}{name}<｜tool▁sep｜>{arguments}{CALL_END}"


def dsml(name, arguments, space=""):
    parameters = "".join(
        f'<｜DSML｜{space}parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</｜DSML｜{space}parameter>\n"
        for key, value in arguments.items()
    )
    return f'<｜DSML｜{space}invoke name="{name}">\n{parameters}</｜DSML｜{space}invoke>'


def dsml_block(calls, word="function_calls"):
    return f"\n\n<｜DSML｜{word}>\n{calls}\n</｜DSML｜{word}>"


def said(text, *calls):
    """An answer whose calls have ended, unless they say that they were cut."""
    return Answer(text, tuple((name, arguments, bool(cut)) for name, arguments, *cut in calls))


PARIS = '{"city": "Paris"}'

ANSWERS = {
    "plain": ("a < b\n\nand c", said("a < b\n\nand c")),
    "fenced": (
        f"Let me look.{CALLS}{fenced('get_weather', PARIS)}{CALLS_END}",
        said("Let me look.", ("get_weather", PARIS)),
    ),
    "two fenced": (f"{CALLS}{fenced('a', '{}')}\n{fenced('b', PARIS)}{CALLS_END}", said("", ("a", "{}"), ("b", PARIS))),
    "no fence": (f"{CALLS}{CALL}function<｜tool▁sep｜>f\n{PARIS}{CALL_END}{CALLS_END}", said("", ("f", PARIS))),
    "fence without its word": (
        f"{CALLS}{CALL}function<｜tool▁sep｜>f\n```\n{PARIS}\n```{CALL_END}{CALLS_END}",
        said("", ("f", PARIS)),
    ),
    "newlines as tags are printed": (
        f"{CALLS}\n{CALL}function<｜tool▁sep｜>f\n```json\n{PARIS}\n```\n{CALL_END}\n{CALLS_END}\n",
        said("", ("f", PARIS)),
    ),
    "raw": (f"Yes.{CALLS}{raw('a', PARIS)}{raw('b', '{}')}{CALLS_END}", said("Yes.", ("a", PARIS), ("b", "{}"))),
    "raw, in a fence": (f"{CALLS}{raw('a', f'```json{PARIS}```')}{CALLS_END}", said("", ("a", PARIS))),
    "a tool named function": (
        f"{CALLS}{raw('function', PARIS)}{raw('function', '')}{CALLS_END}",
        said("", ("function", PARIS), ("function", "{}")),
    ),
    "no outer tag": (raw("a", PARIS), said("", ("a", PARIS))),
    "no arguments": (
        f"{CALLS}{raw('now', '')}{CALL}function<｜tool▁sep｜>now{CALL_END}{CALLS_END}",
        said("", ("now", "{}"), ("now", "{}")),
    ),
    "text after": (f"{CALLS}{raw('a', PARIS)}{CALLS_END}\nThat was it.\n", said("\nThat was it.\n", ("a", PARIS))),
    "text between": (
        f"{CALLS}{raw('a', PARIS)} and {raw('b', PARIS)}{CALLS_END}",
        said(" and ", ("a", PARIS), ("b", PARIS)),
    ),
    "two blocks": (
        f"{CALLS}{raw('a', PARIS)}{CALLS_END}{CALLS}{raw('b', PARIS)}{CALLS_END}",
        said("", ("a", PARIS), ("b", PARIS)),
    ),
    "tags inside a JSON string": (
        f"{CALLS}"
        + raw("a", json.dumps({"x": f"}}{CALL_END}{CALLS_END}", "y": '"\\'}, ensure_ascii=False))
        + CALLS_END,
        said("", ("a", json.dumps({"x": f"}}{CALL_END}{CALLS_END}", "y": '"\\'}, ensure_ascii=False))),
    ),
    "the last bracket is missing": (
        f"{CALLS}{raw('a', PARIS[:-1])}{raw('b', PARIS)}{CALLS_END}",
        said("", ("a", PARIS[:-1]), ("b", PARIS)),
    ),
    "one bracket too many": (f"{CALLS}{raw('a', PARIS + '}')}{CALLS_END}", said("}", ("a", PARIS))),
    "the call's end tag is missing": (f"{CALLS}{CALL}a<｜tool▁sep｜>{PARIS}{CALLS_END}", said("", ("a", PARIS))),
    "arguments that are no JSON": (f"{CALLS}{raw('a', 'x < y')}{CALLS_END}", said("", ("a", "x < y"))),
    "dsml": (
        f"I look.{dsml_block(dsml('get_weather', {'city': 'Paris', 'days': 3}))}",
        said("I look.", ("get_weather", '{"city": "Paris", "days": 3}')),
    ),
    "dsml, two calls": (
        dsml_block(dsml("a", {"x": 'say "hi"\n\\'}) + "\n" + dsml("b", {"y": {"z": [1, None, True]}})),
        said("", ("a", '{"x": "say \\"hi\\"\\n\\\\"}'), ("b", '{"y": {"z": [1, null, true]}}')),
    ),
    "dsml without parameters": (dsml_block(dsml("now", {})), said("", ("now", "{}"))),
    "dsml with the whole object": (
        dsml_block(f'<｜DSML｜invoke name="a">\n{PARIS}\n</｜DSML｜invoke>'),
        said("", ("a", PARIS)),
    ),
    "dsml of V4": (dsml_block(dsml("a", {"x": "y"}), "tool_calls"), said("", ("a", '{"x": "y"}'))),
    "dsml of V4.1": (dsml_block(dsml("a", {"x": "y"}, " "), " calls"), said("", ("a", '{"x": "y"}'))),
    "dsml of V4, whose first block is the last": (
        f"{dsml_block(dsml('a', {}), 'tool_calls')} Done.\n{dsml_block(dsml('b', {}), 'tool_calls')}",
        said("", ("a", "{}")),
    ),
    "dsml of V4, a string that is called JSON": (
        dsml_block(dsml("a", {"x": 1}), "tool_calls").replace(">1<", ">Paris<"),
        said("", ("a", '{"x": Paris}')),
    ),
    "dsml of V4, other text in its block": (
        f"Hi\n\n\n<｜DSML｜tool_calls>\nno{dsml('a', {})}no\n{dsml('b', {})}\n</｜DSML｜tool",
        said("Hi", ("a", "{}"), ("b", "{}")),
    ),
    "dsml of V4, cut behind a parameter": (
        dsml_block(dsml("a", {"x": "y"}), "tool_calls").partition("ke>")[0],
        said("", ("a", '{"x": "y"', True)),
    ),
    "dsml of V4, cut in its first tag": ("Hi\n\n<｜DSML｜tool_c", said("Hi")),
    "dsml of V4, cut before a call": ("Hi\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke na", said("Hi")),
    "dsml without the outer tag": (dsml("a", {"x": "y"}), said("", ("a", '{"x": "y"}'))),
    "dsml, end tags inside a value": (
        dsml_block(dsml("a", {"x": "1</｜DSML｜invoke></｜DSML｜function_calls>2</｜DSML｜parameter>3"})),
        said("", ("a", '{"x": "1</｜DSML｜invoke></｜DSML｜function_calls>2</｜DSML｜parameter>3"}')),
    ),
    "dsml, the call's end tag is missing": (
        dsml_block(dsml("a", {"x": "y"}).removesuffix("</｜DSML｜invoke>")),
        said("", ("a", '{"x": "y"}')),
    ),
    "dsml, a string that is called JSON": (
        dsml_block(
            '<｜DSML｜invoke name="a"><｜DSML｜parameter name="x" string="false">Paris</｜DSML｜parameter>'
            '<｜DSML｜parameter name="y" string="false">NaN</｜DSML｜parameter>'
            '<｜DSML｜parameter name="z" string="false"></｜DSML｜parameter></｜DSML｜invoke>'
        ),
        said("", ("a", '{"x": "Paris", "y": "NaN", "z": ""}')),
    ),
    "dsml, a parameter that is none": (
        dsml_block('<｜DSML｜invoke name="a">one two <b>\n</｜DSML｜invoke>'),
        said("one two <b>\n", ("a", "{}")),
    ),
    "cut in the name": (f"{CALLS}{CALL}get_wea", said(f"{CALLS}{CALL}get_wea")),
    "cut after the fenced type": (f"{CALLS}{CALL}function<｜tool▁sep｜>", said(f"{CALLS}{CALL}function<｜tool▁sep｜>")),
    "cut before the arguments": (f"{CALLS}{CALL}a<｜tool▁sep｜>", said("", ("a", "", True))),
    "cut in the arguments": (f'{CALLS}{CALL}a<｜tool▁sep｜>{{"x": "y', said("", ("a", '{"x": "y', True))),
    "cut before the end tag": (f"{CALLS}{CALL}a<｜tool▁sep｜>{PARIS}\n", said("", ("a", PARIS))),
    "dsml, cut in a value": (
        '<｜DSML｜invoke name="a"><｜DSML｜parameter name="x" string="true">y</｜DSML｜par',
        said("", ("a", '{"x": "y', True)),
    ),
    "dsml, cut in a number": (
        '<｜DSML｜invoke name="a"><｜DSML｜parameter name="x" string="false">12',
        said("", ("a", '{"x": 12', True)),
    ),
    "dsml, cut between parameters": (
        '<｜DSML｜invoke name="a"><｜DSML｜parameter name="x" string="true">y</｜DSML｜parameter>\n',
        said("", ("a", '{"x": "y"', True)),
    ),
    "tags in text": (
        f"The tag {CALL} begins a call and {CALL_END} ends it; <｜DSML｜invoke name=x> is none\n\n\n<",
        said(f"The tag {CALL} begins a call and {CALL_END} ends it; <｜DSML｜invoke name=x> is none\n\n\n<"),
    ),
    "the outer tag again and again": (CALLS * 5 + "MM", said(CALLS * 5 + "MM")),
    "a name without end": (f"{CALL}{'x' * 300}", said(f"{CALL}{'x' * 300}")),
}


def test_answers():
    for cut in (lambda text: [text], list):
        assert {name: parse(cut(text)) for name, (text, _) in ANSWERS.items()} == {
            name: expected for name, (_, expected) in ANSWERS.items()
        }


STREAMS = {
    "a name comes as soon as it is whole, and arguments as they come": [
        ("Hm.", [TextPiece("Hm.")]),
        (f"{CALLS}{CALL}get_weather", []),
        ("<｜tool▁sep｜>", [CallBegins(0, "get_weather")]),
        ('{"ci', [ArgumentsPiece(0, '{"ci')]),
        ('ty": "<', [ArgumentsPiece(0, 'ty": "<')]),
        ('"}', [ArgumentsPiece(0, '"}')]),
        (CALL_END, [CallEnds(0, cut=False)]),
        (CALLS_END, []),
    ],
    "a fenced name comes with its newline": [
        (f"{CALL}function<｜tool▁sep｜>get_", []),
        ("weather\n", [CallBegins(0, "get_weather")]),
        ("```json", []),
        ("\n", []),
        ("{", [ArgumentsPiece(0, "{")]),
    ],
    "dsml arguments come as JSON": [
        ('\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="a">', [CallBegins(0, "a")]),
        ('\n<｜DSML｜parameter name="x" string="true">', [ArgumentsPiece(0, '{"x": "')]),
        ('a "b"\n', [ArgumentsPiece(0, 'a \\"b\\"\\n')]),
        ("c</｜DSML｜parameter>", [ArgumentsPiece(0, "c")]),
        ("\n</｜DSML｜invoke>", [ArgumentsPiece(0, '"}'), CallEnds(0, cut=False)]),
    ],
    "only what may be a tag is held back": [
        ("a <", [TextPiece("a ")]),
        ("b>", [TextPiece("<b>")]),
        ("line\n", [TextPiece("line")]),
        ("next", [TextPiece("\nnext")]),
        ("<｜tool▁c", []),
        ("x", [TextPiece("<｜tool▁cx")]),
    ],
}


def test_pieces_come_as_soon_as_they_can():
    def fed(steps):
        parser = ToolCallParser()
        return [(text, parser.feed(text)) for text, _ in steps]

    assert {name: fed(steps) for name, steps in STREAMS.items()} == STREAMS


# Properties

TAGS = (*OPENINGS, *CLOSINGS, *AFTER_PARAMETER, *DSML_PARAMETER_END, SEPARATOR)
JUNK = st.lists(
    st.sampled_from(
        [*TAGS, "function", "f", '"', ">", '" string="true">', '" string="false">', "\n", " ", "```", "json", "{", "}"]
    )
    | st.text(alphabet='<>｜▁/"\\{}[]`\n ,:ab1é😀', max_size=6),
    max_size=14,
).map("".join)


@st.composite
def cut_text(draw, texts):
    """A text, and the same in chunks of any length."""
    text = draw(texts)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return text, [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


NAMES = st.text(alphabet="abcXYZ019_-.", min_size=1, max_size=12) | st.just("function")
STRINGS = st.text(max_size=8) | st.lists(st.sampled_from(TAGS) | st.text(max_size=3), max_size=4).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(STRINGS, VALUES, max_size=4)
CALL_LISTS = st.lists(st.tuples(NAMES, OBJECTS), min_size=1, max_size=3)


# DSML has no escapes, so that it can't carry a string that looks like a parameter's end.
DSML_OBJECTS = st.dictionaries(st.text(alphabet="ab_é ", min_size=1, max_size=6), VALUES, max_size=4).filter(
    lambda arguments: not any(end in json.dumps(arguments, ensure_ascii=False) for end in DSML_PARAMETER_END)
)


def check_calls(calls, text, before, data):
    _, chunks = data.draw(cut_text(st.just(before + text)))
    answer = parse(chunks)
    assert answer.text == before
    found = [(name, json.loads(arguments), cut) for name, arguments, cut in answer.calls]
    assert found == [(name, arguments, False) for name, arguments in calls]


@pytest.mark.slow
@settings(max_examples=40)
@given(CALL_LISTS, st.booleans(), st.sampled_from([None, 2]), st.text(alphabet="ab\n <", max_size=5), st.data())
def test_calls_written_as_json_come_out_as_they_went_in(calls, in_fences, indent, before, data):
    write, between = (fenced, "\n") if in_fences else (raw, "")
    texts = [write(name, json.dumps(arguments, ensure_ascii=False, indent=indent)) for name, arguments in calls]
    check_calls(calls, CALLS + between.join(texts) + CALLS_END, before.rstrip("\n"), data)


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(st.tuples(NAMES, DSML_OBJECTS), min_size=1, max_size=3), st.sampled_from(["", " "]), st.data())
def test_calls_written_as_dsml_come_out_as_they_went_in(calls, space, data):
    check_calls(calls, dsml_block("\n".join(dsml(name, each, space) for name, each in calls)), "", data)


@pytest.mark.slow
@settings(max_examples=150)
@given(cut_text(JUNK))
@example(('<｜DSML｜invoke name="a">x <b> \n y', ['<｜DSML｜invoke name="a">x', " <b> ", "\n", " y"]))
def test_any_cut_of_any_text_gives_the_uncut_result(cut):
    text, chunks = cut
    assert parse(chunks) == parse([text])


@pytest.mark.slow
@settings(max_examples=150)
@given(JUNK.filter(lambda text: not any(tag in text for tag in DSML_CALLS_BEGIN[1:])))
def test_only_tags_names_and_white_space_are_dropped(text):
    """Each character of a text that is no part of a tag comes out, as text, as a name or in arguments."""
    answer = parse([text])
    if not answer.calls:
        assert answer.text == text.removesuffix("<｜DSML｜")  # which may begin V4's block
    came = answer.text + "".join(name + arguments for name, arguments, _ in answer.calls)
    for letter in "é😀":  # these are in no tag
        assert came.count(letter) == text.count(letter)


# The calls of an answer. tests/gateway/test_chat_answers.py has their deltas.

TWO_CALLS = f"Look:{CALLS}{raw('get_weather', PARIS)}{raw('get_time', '{}')}{CALLS_END}"


def kept(calls, chunks):
    """The text and the names of the calls."""
    pieces = [piece for chunk in chunks for piece in calls.feed(chunk)] + calls.end()
    text = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
    return text, [piece.name for piece in pieces if isinstance(piece, CallBegins)]


def test_each_call_has_an_id_of_its_own():
    answers = [AnswerCalls(), AnswerCalls()]
    assert [kept(calls, TWO_CALLS) for calls in answers] == [("Look:", ["get_weather", "get_time"])] * 2
    ids = {call.call_id for calls in answers for call in calls.calls}
    assert len(ids) == 4
    assert all(call_id.startswith("call_") for call_id in ids)


def test_calls_that_nobody_wants_are_left_out():
    calls = AnswerCalls(drop=True)
    assert kept(calls, [TWO_CALLS, "Then."]) == ("Look:Then.", [])
    assert calls.calls == []
    calls = AnswerCalls(only_first=True)
    calls.feed(TWO_CALLS[:60])
    assert not calls.complete
    calls.feed(TWO_CALLS[60:])
    assert calls.complete
    assert kept(AnswerCalls(only_first=True), TWO_CALLS + "more") == ("Look:", ["get_weather"])
