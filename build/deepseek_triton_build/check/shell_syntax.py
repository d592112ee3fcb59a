"""Bash as a tree of commands, whose words stay as they are written: shell_words.py expands them.

Whatever the text, there is a tree; what bash could not read is left out of it.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache


@dataclass(frozen=True)
class Raw:
    """A word with its quotes and expansions, and its line."""

    text: str
    line: int


@dataclass(frozen=True)
class Redirect:
    operator: str
    target: Raw
    """The file; of `<<` the text."""
    is_literal: bool = False
    """Whether nothing in the text of a `<<` is expanded."""


@dataclass(frozen=True)
class Node:
    """One command, simple or compound."""

    kind: str
    """`simple`; `[[`, `((`; `{`, `(`; `if`, `for`, `while`, `until`, `case`, `arm`, `function`; `&&`, `||`, `|`, `!`,
    `&`."""
    words: tuple[Raw, ...] = ()
    """`for` has its variable here, and the words if it has any; `function` its name; `arm`, a part of `case`, the
    patterns."""
    bodies: "tuple[Body, ...]" = ()
    """`if` has conditions and commands by turns, and last those of `else`."""
    redirects: tuple[Redirect, ...] = ()


Body = tuple[Node, ...]
UNKNOWN, END = "\ue000", "\ue001"
"""The script that runs alone knows what stands between these: shell_words.py has expanded the rest."""
UNSEEN = re.compile(f"{UNKNOWN}[^{END}]*{END}")

_BLANK = re.compile(r"(?:[ \t]|\\\n|(?<![^\s;&|()])#[^\n]*)+")
_REDIRECT = re.compile(r"(?:\d+|\{\w+\})?(&>>|&>|<<<|<<-|<<|<>|>>|>\||<&|>&|<(?!\()|>(?!\())")
_KEYWORD = re.compile(
    r"(?:if|for|select|while|until|case|function|then|elif|else|fi|do|done|esac|in|[{}!]|time)(?![^\s;&|()])"
)
_CLOSING = ("then", "elif", "else", "fi", "do", "done", "esac", "}")
_FUNCTION = re.compile(r"(?:function[ \t]+)?([^\s;&|()<>$\"'`=]+)[ \t]*\([ \t]*\)\s*|function[ \t]+(\S+)\s+")
_ARRAY = re.compile(r"\w+(\[[^]]*\])?\+?=")
_PIPE = re.compile(r"\|&?(?!\|)")
_TEST = re.compile(r"\[\[(?=\s)")
_QUOTES = re.compile(r"""['"\\]""")
_SINGLE = re.compile(r"'[^']*'|\$'(?:\\.|[^'\\])*'|`(?:\\.|[^`\\])*`|\ue000[^\ue001]*\ue001", re.DOTALL)
_MOST_LEVELS = 40


class _TooDeepError(Exception):
    """Commands are nested so deep that Python could not follow."""


@lru_cache(maxsize=1024)
def parse(text: str, first_line: int = 1, *, is_elsewhere: bool = False) -> Body:
    """Return the commands of a script.

    :param first_line: the line of the text's first; of a text from elsewhere, of all.
    """
    reader = _Reader(text, first_line, is_elsewhere)
    nodes: list[Node] = []
    try:
        while reader.rest():
            nodes += reader.body()
            reader.position += 1  # over a keyword or a bracket that closes nothing
    except _TooDeepError:
        pass
    return tuple(nodes)


def end_of(text: str, start: int) -> int:
    """Return the end of the quotes, brackets or the escape that begins at `start`; one character where none does."""
    two = text[start : start + 2]
    if two[:1] == "\\":
        return min(start + 2, len(text))
    if two[:1] in ("'", "`", UNKNOWN) or two == "$'":
        found = _SINGLE.match(text, start)
        return found.end() if found else len(text)
    if two[:1] == '"':
        return closed(text, start + 1, '"')
    if two in ("$(", "<(", ">("):
        return closed(text, start + 2, ")", "(")
    return closed(text, start + 2, "}") if two == "${" else start + 1


def closed(text: str, position: int, close: str, opening: str = "") -> int:
    """Return the end of what `close` ends, behind it, for a position inside."""
    level = 1
    while position < len(text):
        letter = text[position]
        level += (letter == opening) - (letter == close)
        if level == 0:
            return position + 1
        # Single quotes mean nothing inside double ones.
        is_plain = letter in (close, opening) or (letter == "'" and close == '"')
        position = position + 1 if is_plain else end_of(text, position)
    return len(text)


class _Reader:
    def __init__(self, text: str, first_line: int, is_elsewhere: bool) -> None:
        self.text, self.first_line, self.is_elsewhere = text, first_line, is_elsewhere
        self.position = self.level = 0
        # Where the texts of the `<<` end that the line has so far.
        self.after_texts = 0

    def rest(self, length: int = 1) -> str:
        return self.text[self.position : self.position + length]

    def raw(self, start: int, end: int) -> Raw:
        below = 0 if self.is_elsewhere else self.text.count("\n", 0, start)
        return Raw(self.text[start:end], self.first_line + below)

    def skip(self, separators: str = "") -> None:
        """Step over blanks and comments, and over separators."""
        while True:
            found = _BLANK.match(self.text, self.position)
            self.position = found.end() if found else self.position
            if not self.rest() or self.rest() not in separators or self.rest(2) == ";;":
                return
            self.position = max(self.position + 1, self.after_texts if self.rest() == "\n" else 0)

    def keyword(self) -> str:
        """Return the keyword that comes next; an empty string where there is none."""
        self.skip()
        found = _KEYWORD.match(self.text, self.position)
        return found[0] if found else ""

    def take(self, *keywords: str) -> str:
        """Step over one of these, and return it; an empty string where none comes next."""
        self.skip("\n;")
        keyword = self.keyword()
        if keyword not in keywords:
            return ""
        self.position += len(keyword)
        return keyword

    def body(self) -> Body:
        """Return the commands up to a keyword or a bracket that ends them."""
        self.level += 1
        if self.level > _MOST_LEVELS:
            raise _TooDeepError
        nodes: list[Node] = []
        while True:
            self.skip("\n;")
            start = self.position
            if self.rest() in (")", "") or self.rest(2) == ";;" or self.keyword() in _CLOSING:
                break
            node = self.chain()
            self.skip()
            nodes.append(Node("&", bodies=((node,),)) if self.rest() == "&" else node)
            self.position += self.rest() == "&" or self.position == start
        self.level -= 1
        return tuple(nodes)

    def chain(self) -> Node:
        node = self.pipe()
        while self.rest(2) in ("&&", "||"):
            operator = self.rest(2)
            self.position += 2
            self.skip("\n")
            node = Node(operator, bodies=((node,), (self.pipe(),)))
        return node

    def pipe(self) -> Node:
        keyword = self.take("!", "time")
        if keyword:
            return Node("!", bodies=((self.pipe(),),)) if keyword == "!" else self.pipe()
        parts = [(self.command(),)]
        self.skip()
        while (operator := _PIPE.match(self.text, self.position)) is not None:
            self.position = operator.end()
            self.skip("\n")
            parts.append((self.command(),))
            self.skip()
        return Node("|", bodies=tuple(parts)) if len(parts) > 1 else parts[0][0]

    def command(self) -> Node:
        keyword = self.keyword()
        if _TEST.match(self.text, self.position):
            return self.test()
        if self.rest(2) == "((":
            return Node("((", (self.inside_brackets(),))
        function = _FUNCTION.match(self.text, self.position) if keyword in ("", "function") else None
        if function is not None:
            self.position = function.end()
            return Node("function", (Raw(function[1] or function[2], 0),), ((self.command(),),))
        kinds = {"for": self.loop_over, "select": self.loop_over, "while": self.loop, "until": self.loop}
        kinds |= {"if": self.conditional, "case": self.choice, "{": self.group, "(": self.group}
        kind = keyword or self.rest()
        if kind not in kinds:
            return self.simple()
        self.position += len(kind)
        node, redirects = kinds[kind](kind), self.simple().redirects
        return Node("{", bodies=((node,),), redirects=redirects) if redirects else node

    def group(self, kind: str) -> Node:
        body = self.body()
        self.position += self.rest() in ("}", ")")
        return Node(kind, bodies=(body,))

    def conditional(self, _: str) -> Node:
        bodies: list[Body] = []
        keyword = "if"
        while keyword:
            bodies += [] if keyword == "else" else [self.body()]
            self.take("then")
            bodies.append(self.body())
            keyword = self.take("elif", "else")
        self.take("fi")
        return Node("if", bodies=tuple(bodies))

    def loop(self, kind: str) -> Node:
        return Node(kind, bodies=(self.body(), self.block()))

    def loop_over(self, _: str) -> Node:
        self.skip()
        if self.rest(2) == "((":
            inside = self.inside_brackets()
            parts = [Node("((", (replace(inside, text=part),)) for part in (*inside.text.split(";"), "", "")]
            return Node("{", bodies=((parts[0], Node("while", bodies=((parts[1],), (*self.block(), parts[2])))),))
        name = self.simple(most_words=1).words
        words = self.simple().words if self.take("in") else (Raw('"$@"', 0),)
        return Node("for", (*name, *words), (self.block(),))

    def block(self) -> Body:
        """Return the commands of `do ... done`, or of braces."""
        self.take("do", "{")
        body = self.body()
        self.take("done", "}")
        return body

    def choice(self, _: str) -> Node:
        word = self.simple(most_words=1).words
        arms: list[Node] = []
        self.take("in")
        while self.rest() and not self.take("esac"):
            start = self.position
            patterns: tuple[Raw, ...] = ()
            while self.rest() in ("(", "|") or not patterns:
                self.position += self.rest() in ("(", "|")
                patterns += self.simple(most_words=1).words or (Raw("", 0),)
                self.skip()
            self.position += self.rest() == ")"
            arms.append(Node("arm", patterns, (self.body(),)))
            while self.rest() and self.rest() in ";&":
                self.position += 1
            if self.position == start:
                break
        return Node("case", word, tuple((arm,) for arm in arms))

    def test(self) -> Node:
        self.position += 2
        words: list[Raw] = []
        self.skip("\n")
        while self.rest() and self.rest(2) != "]]":
            start = self.position
            is_pattern = bool(words) and words[-1].text == "=~"
            if self.rest(2) in ("&&", "||"):
                self.position += 2
            elif self.rest() in ("(", ")") and not is_pattern:
                self.position += 1
            else:
                while self.rest() and not self.rest().isspace() and (is_pattern or self.rest() != ")"):
                    self.position = end_of(self.text, self.position)
            words.append(self.raw(start, self.position))
            self.skip("\n")
        self.position += 2
        return Node("[[", tuple(words))

    def inside_brackets(self) -> Raw:
        """Return what stands in `(( ))`."""
        start = self.position + 2
        self.position = closed(self.text, start, ")", "(")
        inside = self.raw(start, max(start, self.position - 1))
        self.position += self.rest() == ")"
        return inside

    def simple(self, most_words: int | None = None) -> Node:
        words: list[Raw] = []
        redirects: list[Redirect] = []
        while len(words) != most_words:
            self.skip()
            redirect = _REDIRECT.match(self.text, self.position)
            self.position = redirect.end() if redirect else self.position
            word = self.word()
            if word is None:
                break
            if redirect is None:
                words.append(word)
            elif redirect[1].startswith("<<") and redirect[1] != "<<<":
                redirects.append(self.text_below(word, has_tabs=redirect[1] == "<<-"))
            else:
                redirects.append(Redirect(redirect[1], word))
        return Node("simple", tuple(words), redirects=tuple(redirects))

    def word(self) -> Raw | None:
        """Return the word that comes next; None where an operator does, or the line ends."""
        self.skip()
        start = self.position
        while self.rest() and (self.rest() not in " \t\n;&|()<>" or self.rest(2) in ("<(", ">(")):
            is_array = self.rest() == "=" and _ARRAY.fullmatch(self.text, start, self.position + 1)
            self.position = end_of(self.text, self.position)
            if is_array and self.rest() == "(":
                self.position = closed(self.text, self.position + 1, ")", "(")
        return self.raw(start, self.position) if self.position > start else None

    def text_below(self, delimiter: Raw, *, has_tabs: bool) -> Redirect:
        """Return the text of a `<<`, which begins in the next line."""
        line_end = self.text.find("\n", self.position) + 1 or len(self.text)
        start = position = max(line_end, self.after_texts)
        end = _QUOTES.sub("", delimiter.text)
        lines: list[str] = []
        while position < len(self.text):
            following = self.text.find("\n", position) + 1 or len(self.text)
            line = self.text[position:following].lstrip("\t" if has_tabs else "")
            position = following
            if line.rstrip("\n") == end:
                break
            lines.append(line)
        self.after_texts = position
        text = Raw("".join(lines), self.raw(start, start).line)
        return Redirect("<<", text, is_literal=end != delimiter.text)
