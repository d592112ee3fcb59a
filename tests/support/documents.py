"""The snippets of README.md, docs/ and the other pages, read from the pages themselves."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = tuple(
    path.relative_to(ROOT).as_posix()
    for path in (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/*.md")))
)
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True, kw_only=True)
class Snippet:
    """A code block."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True, kw_only=True)
class Command:
    """A program with its arguments, as a shell reads them; `statement` is all that was written."""

    statement: str
    argv: tuple[str, ...]
    output: str | None

    @property
    def program(self) -> str:
        return self.argv[0].rpartition("/")[2]


def read(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def snippets(*languages: str, page: str | None = None) -> list[Snippet]:
    """The code blocks of one page or of all, of these languages or of all."""
    found = []
    for name in PAGES if page is None else (page,):
        text = read(name)
        for block in _FENCED.finditer(text):
            if not languages or block[1] in languages:
                line = text.count("\n", 0, block.start()) + 2
                found.append(Snippet(page=name, line=line, language=block[1], text=block[2]))
    return found


def commands(page: str) -> list[Command]:
    """Every command in the shell snippets of a page, in the order in which a reader types them."""
    statements = (statement for snippet in snippets("sh", page=page) for statement in _statements(snippet.text))
    return [command for statement in statements for command in parse(statement)]


def _statements(text: str) -> Iterator[str]:
    """Lines, joined where a line goes on in the next."""
    pending = ""
    for line in text.splitlines():
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1]
        elif _is_closed(pending):
            yield pending
            pending = ""
        else:
            pending += "\n"
    assert pending == "", f"a quote is open at the end of {text!r}"


def _is_closed(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def parse(statement: str) -> Iterator[Command]:
    """The commands of a statement; `until X; do Y; done` is X, and an assignment alone is none."""
    lexer = shlex.shlex(statement.removeprefix("until "), posix=True, punctuation_chars=";|>")
    lexer.whitespace_split = True
    words = [">" if word == ">>" else word for word in lexer]
    if ";" in words:
        words = words[: words.index(";")]
    for part in " ".join(map(shlex.quote, words)).split(" '|' "):
        argv = shlex.split(part)
        output = argv[argv.index(">") + 1] if ">" in argv else None
        argv = argv[: argv.index(">")] if ">" in argv else argv
        while argv and _ASSIGNMENT.match(argv[0]):
            argv = argv[1:]
        if argv:
            yield Command(statement=statement, argv=tuple(argv), output=output)
