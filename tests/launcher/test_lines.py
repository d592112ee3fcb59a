"""Lines put together from the output of `mpirun --tag-output`: tables of cases, and generated ones."""

import re

from hypothesis import given
from hypothesis import strategies as st

from deepseek_launcher.output import Lines

TAGS = ("[1,0]<stdout>:", "[1,0]<stderr>:", "[1,11]<stderr>:")
TAG = re.compile(r"(\[\d+,\d+\]<std\w+>:)")


class Heard:
    """Collects the lines that a Lines reports, and its output."""

    def __init__(self, *, tagged, keeps=lambda line: True):
        self.lines = []
        self._keeps = keeps
        self.of = Lines(self._hear, tagged=tagged)
        self.out = ""

    def _hear(self, line):
        self.lines.append(line)
        return self._keeps(line)

    def feed(self, text):
        """Return the lines that ended in this piece."""
        self.lines.clear()
        self.out += self.of.feed(text.encode()).decode()
        return list(self.lines)

    def idle(self):
        self.out += self.of.idle().decode()


def as_mpirun_writes(tag, piece):
    """Return the piece with a tag before it and behind each line end within it."""
    return tag + re.sub(r"\n(?!\Z)", f"\n{tag}", piece)


@st.composite
def interleaved(draw, alphabet):
    """Return each rank's text, and the stream that mpirun makes of them: in any order, in pieces cut anywhere.

    The alphabet has no letters of a tag, because a rank's text that looks like a tag can't be told from one.
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
    """Return the lines that ended, and everything that was passed on."""
    heard = Heard(tagged=True)
    ended = []
    for number, piece in enumerate(pieces):
        ended += heard.feed(piece)
        if number in pauses:
            heard.idle()
    heard.out += heard.of.end().decode()
    return ended, heard.out


@given(st.sampled_from(["ab[]<>,:1 \n", "ab[]<>,:1 \r\n"]).flatmap(interleaved), st.sets(st.integers(0, 9)))
def test_any_interleaving_gives_back_each_ranks_lines(given_pieces, pauses):
    texts, pieces = given_pieces
    ended, out = hear(pieces, pauses)
    _, *parts = TAG.split(out)
    for tag, text in zip(TAGS, texts, strict=True):
        if "\r" not in "".join(texts):
            assert [line.removeprefix(tag) for line in ended if line.startswith(tag)] == text.split("\n")[:-1]
        shown = "".join(part for whose, part in zip(parts[::2], parts[1::2], strict=True) if whose == tag)
        # An unfinished line gets an end where another rank's line follows.
        assert shown.replace("\n", "") == text.replace("\n", "")


@given(st.lists(st.text("ab[1,0]<stdou>:\r\n", max_size=30)), st.booleans())
def test_input_without_tags_is_passed_on_unchanged(pieces, pausing):
    heard = Heard(tagged=False)
    for piece in pieces:
        heard.feed(piece)
        if pausing:
            heard.idle()
    assert heard.out + heard.of.end().decode() == "".join(pieces)


TAGGED = [
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
]
"""(pieces, of which None stands for a pause; output)"""


def test_the_output_of_given_pieces():
    for pieces, out in TAGGED:
        heard = Heard(tagged=True, keeps=lambda line: "kept back" not in line)
        for piece in pieces:
            if piece is None:
                heard.idle()
            else:
                heard.feed(piece)
        assert heard.out == out, pieces


def test_a_line_without_an_end_is_passed_on_in_parts():
    heard = Heard(tagged=True)
    for _ in range(40):
        heard.feed("[1,0]<stdout>:" + "x" * 65536)
    heard.idle()
    assert max(map(len, heard.lines)) < 2 << 20
    assert heard.out == "[1,0]<stdout>:" + "x" * 40 * 65536
