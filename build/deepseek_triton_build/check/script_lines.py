"""Lines of a shell script that are not what they look like: with CRLF, or behind a continuation that was lost."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from deepseek_triton_build.check import codes
from deepseek_triton_build.data.finding import Finding
from deepseek_triton_build.text import safe_name

TOKEN = re.compile(
    r"""(?P<comment>(?<![^\s;])\#[^\n]*)
      | (?P<space>[ \t]+|\\\n)
      | (?P<end>[\n;|&()]+)
      | (?P<word>(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|[^\s;|&()'"\\])+)""",
    re.VERBOSE | re.DOTALL,
)
_HEREDOC = re.compile(r"""(?m)(?<!<)<<-?[ \t]*(['"]?)(\w+)\1.*\n((?:.*\n)*?)[ \t]*\2$""")
_FLAG = re.compile(r"--?[A-Za-z][\w-]*(=|$)")
_FLAG_IN_COMMENT = re.compile(r"(\s*)#+(\s*--[a-z].*)")
_COMMENT = re.compile(r"(?<!\S)#.*")
_PATTERN_END = re.compile(r"[ \t]*[)|]")


_QUOTED = re.compile(r"""'([^']*)'|"((?:\\.|[^"\\])*)"|\\(.)""", re.DOTALL)
_OPENS_ARRAY = re.compile(r"(\w+)\+?=")


class Place(NamedTuple):
    """A word and its line, from 1."""

    word: str
    line: int


class Array(NamedTuple):
    """An array as a script writes it, by `=` or `+=`."""

    name: str
    words: list[Place]


def unquoted(word: str) -> str:
    return _QUOTED.sub(lambda quoted: quoted[1] or quoted[2] or quoted[3] or "", word)


def arrays(text: str) -> list[Array]:
    """Return the arrays that a script writes, each time that it does, with their words unquoted."""
    found: list[Array] = []
    depth, line, read, name = 0, 1, 0, ""
    for token in TOKEN.finditer(text):
        line += text.count("\n", read, token.start())
        read = token.start()
        if token["end"] and (depth or (name and token[0].startswith("("))):
            found += [] if depth else [Array(name, [])]
            depth = max(0, depth + token[0].count("(") - token[0].count(")"))
        elif token["word"] and depth:
            found[-1].words.append(Place(unquoted(token[0]), line))
        opens = _OPENS_ARRAY.fullmatch(token["word"] or "")
        name = opens[1] if opens and not depth else ""
    return found


def mended_lines(text: str, file: str) -> tuple[str, list[Finding]]:
    """Return the script as it is meant, with the same lines, and what is wrong with them. So the rest of the check
    tells no consequence of it."""
    findings = []
    if "\r\n" in text:
        line = text.count("\n", 0, text.index("\r\n")) + 1
        message = "lines end in CRLF, as Windows writes them, and bash takes the CR for a part of the last word"
        fix = f"sed -i 's/\\r$//' {safe_name(file)}"
        findings.append(codes.BROKEN_SCRIPT.finding(message, fix, file=file, line=line))
        text = text.replace("\r\n", "\n")
    lines = text.splitlines(keepends=True)
    # Without the lines that it gives to a program's stdin.
    unfed = _HEREDOC.sub(lambda found: found[0].replace(found[3], "\n" * found[3].count("\n")), text)
    for flag, last, comment_line in _lost_arguments(unfed):
        line, why, fix = _cause(last, comment_line, flag.line)
        message = f"{why}, so {flag.word} and what follows it reach no program"
        findings.append(codes.LOST_ARGUMENTS.finding(message, fix, file=file, line=line, key=flag.word))
        for index in range(last.line - 1, flag.line - 1):
            kept = _COMMENT.sub("", _FLAG_IN_COMMENT.sub(r"\1\2", lines[index]))
            lines[index] = kept.rstrip(" \t\\\n") + " \\\n"
    return "".join(lines), findings


def _lost_arguments(text: str) -> Iterator[tuple[Place, Place, int]]:
    """Yield each argument that begins a command, the last word of its own command, and the line of the first comment
    between them, 0 without one."""
    depth, line, read, comment_line = 0, 1, 0, 0
    above: list[Place] = []
    command: list[Place] = []
    for token in TOKEN.finditer(text):
        line += text.count("\n", read, token.start())
        read = token.start()
        if token["end"]:
            depth = max(0, depth + token[0].count("(") - token[0].count(")"))
            above = (command or above) if depth == 0 and not token[0].strip("\n") else []
            command = []
        elif token["comment"]:
            comment_line = comment_line or line
        elif token["word"]:
            if above and not command and _is_lost(token[0], above, text[token.end() :]):
                yield Place(token[0].partition("=")[0].strip('"'), line), above[-1], comment_line
            command.append(Place(token[0], line))
            comment_line = 0


def _is_lost(word: str, above: Sequence[Place], rest: str) -> bool:
    """Tell whether the first word of a command belongs to the one above, and is no pattern of a `case`."""
    if word == '"$@"':
        return above[0].line < above[-1].line and any(place.word.startswith("--") for place in above)
    return _FLAG.match(word) is not None and not _PATTERN_END.match(rest)


def _cause(last: Place, comment_line: int, line: int) -> tuple[int, str, str]:
    """Return on which line, why and how to mend it that a command ended with its word `last`, before `line`."""
    if comment_line:
        return comment_line, "this comment ends the command", "remove the comment, or move it above the whole command"
    if not last.word.strip("\\ \t"):
        return last.line, "the blank behind the backslash ends the command", "remove the blank"
    if line > last.line + 1:
        return last.line + 1, "this empty line ends the command", "remove the line"
    return last.line, "the command ends on this line, without a backslash", "end the line with a backslash"
