import itertools
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deepseek_backend.answer_text import ReasoningSplitter
from deepseek_backend.engines.tags import BEGINNINGS, CALLS_BEGIN, CLOSING, DSML_BEGIN, OPENING, ends_inside


def split(pieces, *, opened):
    """Return (reasoning, answer) when the text arrives in these pieces."""
    splitter = ReasoningSplitter(opened=opened)
    pushed = [*map(splitter.push, pieces), splitter.finish()]
    return "".join(reasoning for reasoning, _ in pushed), "".join(answer for _, answer in pushed)


def expected(text, *, opened):
    """The same, told from the whole text at once."""
    tag = re.match(r"[ \t\r\n]*<think>\n?", text) or (re.match(r"\n*", text) if opened else None)
    if tag is None:
        return "", text
    text = text[tag.end() :]
    end = re.search(f"{CLOSING}[ \t\r\n]*|(?={'|'.join(BEGINNINGS)})", text)
    return (text[: end.start()].rstrip("\n"), text[end.end() :]) if end else (text, "")


def in_three(text):
    """Every way to cut it into three pieces, of which some are empty."""
    cuts = itertools.combinations_with_replacement(range(len(text) + 1), 2)
    return [[text[:first], text[first:second], text[second:]] for first, second in cuts]


CLOSED = [  # text, its reasoning, its answer
    ("", "", ""),
    ("Hello.", "", "Hello."),
    ("<think>Hm.</think>Hello.", "Hm.", "Hello."),
    ("\n <think>\nHm.\n</think>\n\nHello.\n", "Hm.", "Hello.\n"),
    ("<think>Hm.</think> \r\n\t", "Hm.", ""),
    ("<think>Hm.</think>\u3000Hello.", "Hm.", "\u3000Hello."),
    ("<thin", "", "<thin"),
    (" \n", "", " \n"),
    ("<thinking>Hm.</thinking>", "", "<thinking>Hm.</thinking>"),
    ("Hm.</think>Hello.", "", "Hm.</think>Hello."),
    ("<think>Hm.</think>a<think>b</think>c", "Hm.", "a<think>b</think>c"),
    ("<think>a <think> b</think>c", "a <think> b", "c"),
    ("<think>Hm.</thin", "Hm.</thin", ""),
    ("<think>a < b </ c <</think>d", "a < b </ c <", "d"),
    ("<think>", "", ""),
    (f"<think>Hm.\n{CALLS_BEGIN}f", "Hm.", f"{CALLS_BEGIN}f"),
    (f"<think>Hm.\n\n{DSML_BEGIN}\n</think>", "Hm.", f"{DSML_BEGIN}\n</think>"),
    (f"<think>Hm.</think>\n{CALLS_BEGIN}", "Hm.", CALLS_BEGIN),
    ("<think><｜tool▁calls", "<｜tool▁calls", ""),
    (f"<think><<｜tool▁{CALLS_BEGIN}", "<<｜tool▁", CALLS_BEGIN),
    (f"{CALLS_BEGIN}<think>", "", f"{CALLS_BEGIN}<think>"),
]
OPENED = [  # by the prompt, which leaves the closing to the output
    ("", "", ""),
    ("Hm.</think>\n\nHello.", "Hm.", "Hello."),
    ("\n</think>Hello.", "", "Hello."),
    (" Hm.</think>Hello.", " Hm.", "Hello."),
    (f"Hm.\n\n{DSML_BEGIN[:9]}", "Hm.", ""),
    ("\n\nHm.</think>Hello.", "Hm.", "Hello."),
    ("<think>\nHm.</think>Hello.", "Hm.", "Hello."),
    ("\n<think>Hm.</think>Hello.", "Hm.", "Hello."),
    ("Hm. <think> is a tag.</think>Hello.", "Hm. <think> is a tag.", "Hello."),
    ("Hm.</thi", "Hm.</thi", ""),
    ("Hm.\n", "Hm.\n", ""),
    ("Hm.</think>a</think>b", "Hm.", "a</think>b"),
]


@pytest.mark.parametrize(("table", "opened"), [(CLOSED, False), (OPENED, True)], ids=["by the output", "by the prompt"])
def test_reasoning_and_answer_by_who_opens_the_tag(table, opened):
    for make_pieces in (lambda text: [text], list):
        assert [(text, *split(make_pieces(text), opened=opened)) for text, *_ in table] == table


def test_newlines_behind_a_prompt_that_has_closed_the_tag_are_no_part_of_the_answer():
    for text, answer in ("\n\n\n Hi\n", " Hi\n"), ("\n\n", ""), ("\n<think>Hm.</think>Hi", "Hi"):
        for pieces in ([text], list(text)):
            splitter = ReasoningSplitter(opened=False, closed=True)
            pushed = [*map(splitter.push, pieces), splitter.finish()]
            assert "".join(part for _, part in pushed) == answer


def test_a_tag_may_be_cut_anywhere():
    texts = ["<think>\nab</think>", "ab</think>\n\nc", "\n<think>\n\na", *(f"<think>\na{tag}f" for tag in BEGINNINGS)]
    for text, opened in itertools.product(texts, (True, False)):
        assert {split(pieces, opened=opened) for pieces in in_three(text)} == {expected(text, opened=opened)}


PIECES = st.lists(
    st.sampled_from([OPENING, CLOSING, *BEGINNINGS, "<think", ">", "</", "think", "<", "<｜", "\n", " ", "a", "\u3000"])
    | st.text(max_size=3)
)


@pytest.mark.slow
@given(PIECES, st.booleans())
@example(["<think>"], True)
@example(["<", "</think>", "\n", "a"], True)
def test_cutting_the_text_makes_no_difference(pieces, opened):
    text = "".join(pieces)
    assert split(pieces, opened=opened) == expected(text, opened=opened)
    assert split(list(text), opened=opened) == expected(text, opened=opened)
    assert split([text], opened=opened) == expected(text, opened=opened)


@pytest.mark.slow
@given(PIECES, PIECES, st.booleans())
def test_what_is_shown_is_never_taken_back(pieces, later, opened):
    splitter = ReasoningSplitter(opened=opened)
    pushed = [splitter.push(piece) for piece in pieces]
    reasoning, answer = ("".join(part) for part in zip(*pushed, strict=True)) if pushed else ("", "")
    whole_reasoning, whole_answer = expected("".join(pieces + later), opened=opened)
    assert whole_reasoning.startswith(reasoning)
    assert whole_answer.startswith(answer)


def test_only_what_may_be_a_tag_is_held_back():
    splitter = ReasoningSplitter(opened=True)
    assert splitter.push("a</thi") == ("a", "")
    assert splitter.push("s </") == ("</this ", "")
    assert splitter.push("think>b<") == ("", "b<")
    assert splitter.push("think>") == ("", "think>")


def test_an_answer_without_reasoning_is_shown_with_its_first_characters():
    splitter = ReasoningSplitter(opened=False)
    assert splitter.push("\n<th") == ("", "")
    assert splitter.push("e") == ("", "\n<the")


TURN = "<｜User｜>Hi<｜Assistant｜>"
OUTSIDE = ["", "Hello.", TURN, f"{TURN}</think>", f"{TURN}<think></think>", f"{TURN}<think>\n\n</think>\n\n"]
OUTSIDE += ["What does <think> mean?", "<think>\nOkay, so", "<thinking>"]
BEFORE_REASONING = [f"{TURN}<think>", f"{TURN}<think>\n", f"<｜Assistant｜><think>Hm.</think>Yes.{TURN}<think>\n"]


def test_an_output_begins_inside_where_the_prompt_ends_with_the_tag():
    assert [prompt for prompt in OUTSIDE + BEFORE_REASONING if ends_inside(prompt)] == BEFORE_REASONING
