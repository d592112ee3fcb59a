from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deepseek_backend.answer.reasoning import ReasoningSplitter
from deepseek_backend.engines.call_tags import BEGINNINGS, CALLS_BEGIN, DSML_BEGIN
from deepseek_backend.engines.reasoning_tags import CLOSING, OPENING, ends_inside


def split(pieces: Sequence[str], *, opened: bool) -> tuple[str, str]:
    """Return (reasoning, answer) when the text arrives in these pieces."""
    splitter = ReasoningSplitter(opened=opened)
    pushed = [*map(splitter.push, pieces), splitter.finish()]
    return "".join(reasoning for reasoning, _ in pushed), "".join(answer for _, answer in pushed)


def expected(text: str, *, opened: bool) -> tuple[str, str]:
    """The same, told from the whole text at once."""
    tag = re.match(r"[ \t\r\n]*<think>\n?", text) or (re.match(r"\n?", text) if opened else None)
    if tag is None:
        return "", text
    text = text[tag.end() :]
    end = re.search(f"{CLOSING}[ \t\r\n]*|(?={'|'.join(BEGINNINGS)})", text)
    return (text[: end.start()], text[end.end() :]) if end else (text, "")


def in_three(text: str) -> list[list[str]]:
    """Every way to cut it into three pieces, of which some are empty."""
    cuts = itertools.combinations_with_replacement(range(len(text) + 1), 2)
    return [[text[:first], text[first:second], text[second:]] for first, second in cuts]


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("", "", ""),
        ("Hello.", "", "Hello."),
        ("<think>Hm.</think>Hello.", "Hm.", "Hello."),
        ("\n <think>\nHm.\n</think>\n\nHello.\n", "Hm.\n", "Hello.\n"),
        ("<think>\n\n</think>\n\nHello.", "\n", "Hello."),
        ("<think></think>Hello.", "", "Hello."),
        ("<think>Hm.</think> \r\n\t", "Hm.", ""),
        ("<think>Hm.</think>\u3000Hello.", "Hm.", "\u3000Hello."),
        ("  Hello.", "", "  Hello."),
        ("<thin", "", "<thin"),
        (" \n", "", " \n"),
        ("<thinking>Hm.</thinking>", "", "<thinking>Hm.</thinking>"),
        ("Use <think>, then </think>.", "", "Use <think>, then </think>."),
        ("Hm.</think>Hello.", "", "Hm.</think>Hello."),
        ("</think>Hello.", "", "</think>Hello."),
        ("<think>Hm.</think>a<think>b</think>c", "Hm.", "a<think>b</think>c"),
        ("<think>a <think> b</think>c", "a <think> b", "c"),
        ("<think>Hm", "Hm", ""),
        ("<think>Hm.</thin", "Hm.</thin", ""),
        ("<think>a < b </ c <</think>d", "a < b </ c <", "d"),
        ("<think>", "", ""),
        (f"<think>Hm.\n{CALLS_BEGIN}f", "Hm.\n", f"{CALLS_BEGIN}f"),
        (f"<think>Hm.\n\n{DSML_BEGIN}\n</think>", "Hm.\n\n", f"{DSML_BEGIN}\n</think>"),
        (f"<think>Hm.</think>\n{CALLS_BEGIN}", "Hm.", CALLS_BEGIN),
        ("<think><｜tool▁calls", "<｜tool▁calls", ""),
        (f"<think><<｜tool▁{CALLS_BEGIN}", "<<｜tool▁", CALLS_BEGIN),
        (f"{CALLS_BEGIN}<think>", "", f"{CALLS_BEGIN}<think>"),
    ],
)
def test_the_output_opens_the_tag_at_its_beginning_or_not_at_all(text: str, reasoning: str, answer: str) -> None:
    assert split([text], opened=False) == (reasoning, answer)
    assert split(list(text), opened=False) == (reasoning, answer)


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("", "", ""),
        ("Hm.</think>\n\nHello.", "Hm.", "Hello."),
        ("\nHm.\n</think>\n\nHello.", "Hm.\n", "Hello."),
        ("</think>Hello.", "", "Hello."),
        ("\n</think>Hello.", "", "Hello."),
        (" Hm.</think>Hello.", " Hm.", "Hello."),
        ("<think>\nHm.</think>Hello.", "Hm.", "Hello."),
        ("\n<think>Hm.</think>Hello.", "Hm.", "Hello."),
        ("<think>", "", ""),
        ("<thin", "<thin", ""),
        ("\n", "", ""),
        ("Hm. <think> is a tag.</think>Hello.", "Hm. <think> is a tag.", "Hello."),
        ("Hm.", "Hm.", ""),
        ("Hm.</thi", "Hm.</thi", ""),
        ("Hm.</think>a</think>b", "Hm.", "a</think>b"),
    ],
)
def test_a_prompt_that_opens_the_tag_leaves_its_closing_to_the_output(text: str, reasoning: str, answer: str) -> None:
    assert split([text], opened=True) == (reasoning, answer)
    assert split(list(text), opened=True) == (reasoning, answer)


@pytest.mark.parametrize("text", ["<think>\nab</think>", "ab</think>\n\nc", "\n<think>\n\na"])
@pytest.mark.parametrize("opened", [True, False])
def test_a_tag_may_be_cut_anywhere(text: str, opened: bool) -> None:
    assert {split(pieces, opened=opened) for pieces in in_three(text)} == {expected(text, opened=opened)}


@pytest.mark.parametrize("tag", BEGINNINGS)
def test_a_tag_that_begins_calls_may_be_cut_anywhere(tag: str) -> None:
    text = f"<think>\na{tag}f"
    assert {split(pieces, opened=False) for pieces in in_three(text)} == {("a", f"{tag}f")}


PIECES = st.lists(
    st.sampled_from([OPENING, CLOSING, *BEGINNINGS, "<think", ">", "</", "think", "<", "<｜", "\n", " ", "a", "\u3000"])
    | st.text(max_size=3)
)


@given(PIECES, st.booleans())
@example(["<think>"], True)
@example(["<", "</think>", "\n", "a"], True)
def test_cutting_the_text_makes_no_difference(pieces: list[str], opened: bool) -> None:
    text = "".join(pieces)

    assert split(pieces, opened=opened) == expected(text, opened=opened)
    assert split(list(text), opened=opened) == expected(text, opened=opened)
    assert split([text], opened=opened) == expected(text, opened=opened)


@given(PIECES, st.booleans())
def test_nothing_is_lost_but_tags_and_white_space(pieces: list[str], opened: bool) -> None:
    text = "".join(pieces)
    reasoning, answer = split(pieces, opened=opened)

    assert re.fullmatch(rf"\s*(<think>)?\n?{re.escape(reasoning)}(</think>\s*)?{re.escape(answer)}", text)


@given(PIECES, PIECES, st.booleans())
def test_what_is_shown_is_never_taken_back(pieces: list[str], later: list[str], opened: bool) -> None:
    splitter = ReasoningSplitter(opened=opened)
    pushed = [splitter.push(piece) for piece in pieces]
    reasoning, answer = ("".join(part) for part in zip(*pushed, strict=True)) if pushed else ("", "")
    whole_reasoning, whole_answer = expected("".join(pieces + later), opened=opened)

    assert whole_reasoning.startswith(reasoning)
    assert whole_answer.startswith(answer)


def test_only_what_may_be_a_tag_is_held_back() -> None:
    splitter = ReasoningSplitter(opened=True)

    assert splitter.push("a</thi") == ("a", "")
    assert splitter.push("s </") == ("</this ", "")
    assert splitter.push("think>b<") == ("", "b<")
    assert splitter.push("think>") == ("", "think>")


def test_an_answer_without_reasoning_is_shown_with_its_first_characters() -> None:
    splitter = ReasoningSplitter(opened=False)

    assert splitter.push("\n<th") == ("", "")
    assert splitter.push("e") == ("", "\n<the")


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("", False),
        ("Hello.", False),
        ("<｜User｜>Hi<｜Assistant｜>", False),
        ("<｜User｜>Hi<｜Assistant｜><think>", True),
        ("<｜User｜>Hi<｜Assistant｜><think>\n", True),
        ("<｜User｜>Hi<｜Assistant｜></think>", False),
        ("<｜User｜>Hi<｜Assistant｜><think></think>", False),
        ("<｜User｜>Hi<｜Assistant｜><think>\n\n</think>\n\n", False),
        ("<｜Assistant｜><think>Hm.</think>Yes.<｜User｜>Sure?<｜Assistant｜><think>\n", True),
        ("What does <think> mean?", False),
        ("<think>\nOkay, so", False),
        ("<thinking>", False),
    ],
)
def test_an_output_begins_inside_where_the_prompt_ends_with_the_tag(prompt: str, inside: bool) -> None:
    assert ends_inside(prompt) is inside
