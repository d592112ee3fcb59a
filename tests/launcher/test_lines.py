"""Lines put together out of what `mpirun --tag-output` makes of the ranks' output, by tables and by chance."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_launcher.line_splitter import Lines

TAGS = ("[1,0]<stdout>:", "[1,0]<stderr>:", "[1,11]<stderr>:")
TAG = re.compile(r"(\[\d+,\d+\]<std\w+>:)")


class Heard:
    """Keeps what it is given, and hands on what comes."""

    def __init__(self, *, tagged, keeps=lambda line: True):
        self.lines = []
        self._keeps = keeps
        self.of = Lines(self._hear, tagged=tagged)
        self.out = ""

    def _hear(self, line):
        self.lines.append(line)
        return self._keeps(line)

    def feed(self, text):
        """The lines that ended with it."""
        self.lines.clear()
        self.out += self.of.feed(text.encode()).decode()
        return list(self.lines)

    def idle(self):
        self.out += self.of.idle().decode()


def as_mpirun_writes(tag, piece):
    """A tag before each piece and behind each end of a line within it."""
    return tag + re.sub(r"\n(?!\Z)", f"\n{tag}", piece)


@st.composite
def interleaved(draw, alphabet):
    """What each rank writes, and what is read of it: in any order between ranks, in pieces cut anywhere.

    No letters of a tag: what a rank writes that looks like one can't be told from it.
    """
    texts = [draw(st.text(alphabet, max_size=40)) for _ in TAGS]
    rests = dict(zip(TAGS, texts, strict=True))
    stream = ""
    while any(rests.values()):
        tag = draw(st.sampled_from([tag for tag in TAGS if rests[tag]]))
        length = draw(st.integers(1, len(rests[tag])))
        stream += as_mpirun_writes(tag, rests[tag][:length])
        rests[tag] = rests[tag][length:]
    cuts = sorted(draw(st.sets(st.integers(0, len(stream)), max_size=8)))
    return texts, [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


def hear(pieces, pauses):
    """The lines that ended, and all that was handed on."""
    heard = Heard(tagged=True)
    ended = []
    for number, piece in enumerate(pieces):
        ended += heard.feed(piece)
        if number in pauses:
            heard.idle()
    heard.out += heard.of.end().decode()
    return ended, heard.out


PAUSES = st.sets(st.integers(0, 9))


@given(interleaved("ab[]<>,:1 \n"), PAUSES)
def test_any_interleaving_gives_back_each_ranks_lines(given_pieces, pauses):
    texts, pieces = given_pieces
    ended, _ = hear(pieces, pauses)
    for tag, text in zip(TAGS, texts, strict=True):
        assert [line.removeprefix(tag) for line in ended if line.startswith(tag)] == text.split("\n")[:-1]


@given(interleaved("ab[]<>,:1 \r\n"), PAUSES)
def test_any_interleaving_is_handed_on_with_whose_it_is(given_pieces, pauses):
    texts, pieces = given_pieces
    _, out = hear(pieces, pauses)
    _, *parts = TAG.split(out)
    for tag, text in zip(TAGS, texts, strict=True):
        shown = "".join(part for whose, part in zip(parts[::2], parts[1::2], strict=True) if whose == tag)
        # Where another's line is between, what is unfinished gets an end.
        assert shown.replace("\n", "") == text.replace("\n", "")


@given(st.lists(st.text("ab[1,0]<stdou>:\r\n", max_size=30)), st.booleans())
def test_without_tags_what_came_is_handed_on_as_it_is(pieces, pausing):
    heard = Heard(tagged=False)
    for piece in pieces:
        heard.feed(piece)
        if pausing:
            heard.idle()
    assert heard.out + heard.of.end().decode() == "".join(pieces)


@pytest.mark.parametrize(
    ("pieces", "out"),
    [
        (["[1,0]<stdout>:one[1,1]<stdout>:two\n[1,0]<stdout>: more\n"], "[1,1]<stdout>:two\n[1,0]<stdout>:one more\n"),
        (["[1,0]<stdout>:a\nmpirun: its own\n"], "[1,0]<stdout>:a\nmpirun: its own\n"),
        (["[1,0]<std", "out>:cut\n"], "[1,0]<stdout>:cut\n"),
        (["[1,0]<stdout>:5%\r10%\r", None], "[1,0]<stdout>:5%\r[1,0]<stdout>:10%\r"),
        (["[1,0]<stdout>:no", None, " end\n"], "[1,0]<stdout>:no end\n"),
        (
            ["[1,0]<stdout>:no", None, "[1,1]<stdout>:b\n", "[1,0]<stdout>: end\n"],
            "[1,0]<stdout>:no\n[1,1]<stdout>:b\n[1,0]<stdout>: end\n",
        ),
        (["no tag[1", None], "no tag"),
        (["[1,0]<std", None, "out>:cut\n"], "[1,0]<stdout>:cut\n"),
        (["[1,0]<stdout>:kept back\n[1,0]<stdout>:b\n"], "[1,0]<stdout>:b\n"),
    ],
)
def test_what_is_handed_on(pieces, out):
    """None is a pause."""
    heard = Heard(tagged=True, keeps=lambda line: "kept back" not in line)
    for piece in pieces:
        if piece is None:
            heard.idle()
        else:
            heard.feed(piece)
    assert heard.out == out


def test_a_line_without_an_end_is_not_collected_for_ever():
    heard = Heard(tagged=True)
    for _ in range(40):
        heard.feed("[1,0]<stdout>:" + "x" * 65536)
    heard.idle()
    assert max(map(len, heard.lines)) < 2 << 20
    assert heard.out == "[1,0]<stdout>:" + "x" * 40 * 65536
