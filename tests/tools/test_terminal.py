"""What people see: at a terminal of 80 columns, at one without escape sequences, and with NO_COLOR."""

import io
import re
from contextlib import redirect_stderr, redirect_stdout

import pytest

from deepseek_triton_tools.cli.main import VERBS, main
from deepseek_triton_tools.cli.parsing import VerbParser
from deepseek_triton_tools.terminal import output_streams
from deepseek_triton_tools.terminal.status_line import StatusLine
from deepseek_triton_tools.terminal.tables import AnswerPrinter, Table, show
from support.terminal_session import Terminal

R1 = ["plan", "deepseek-r1", "--gpu", "h200", "--gpus"]
SHOWN = (
    ["--help"],
    ["launch", "docker", "--help"],
    ["variants"],
    [*R1, "3"],
    ["generate", "hello", "--modle", "x"],
    ["build", "tiny", "--engine", "simulated", "--output", "OUT"],
    ["doctor"],
    ["generate", "hello", "--retries", "0", "--url", "http://127.0.0.1:9"],
)
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def shown(argv, folder, **environment):
    """All that a terminal shows, which has 80 columns as long as it says nothing of its size."""
    with Terminal(*[str(folder) if word == "OUT" else word for word in argv], **environment) as terminal:
        terminal.exit_code()
        return terminal.seen.replace("\r\n", "\n")


@pytest.mark.slow
def test_80_columns_are_enough_and_nothing_is_cut(tmp_path):
    """Styles are shown where they are wanted."""
    for argv in SHOWN:
        seen = shown(argv, tmp_path, COLUMNS="")
        lines = _STYLE.sub("", seen).splitlines()
        assert (lines != [], "…" in seen) == (True, False), argv
        # A path or a name that is longer than the terminal is wide stays whole.
        assert [line for line in lines if len(line) > 80 and " " in line.strip()] == [], argv
        assert _STYLE.search(seen) or argv != ["variants"]
    for argv, environment in ((["variants"], {"NO_COLOR": "1"}), ([*R1, "8"], {"TERM": "dumb"})):
        assert "\x1b" not in shown(argv, tmp_path, **environment)


class FakeTerminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 40 columns, to become standard error: pytest sets its own after the fixtures."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    return FakeTerminal()


def test_a_status_line_ends_with_a_whole_word(terminal):
    with redirect_stderr(terminal):
        StatusLine().show(lambda: "loading tensorrt_llm, 0:00:17  Loading weights concurrently")

    assert terminal.getvalue() == "\r\x1b[Kloading tensorrt_llm, 0:00:17 …"


def test_a_terminal_without_escape_sequences_gets_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with redirect_stderr(terminal):
        line = StatusLine(plain_s=0)
        line.show(lambda: "loading")
        line.clear()

    assert terminal.getvalue() == "loading\n"


def test_an_error_is_broken_between_words(terminal):
    with redirect_stderr(terminal):
        output_streams.complain("one two three four five six seven eight nine ten \x1b eleven")

    assert terminal.getvalue() == "one two three four five six seven eight\n  nine ten \\x1b eleven\n"


def test_a_command_of_the_help_can_be_copied_from_two_lines(terminal):
    given = '  deepseek-triton generate "a b c d" --max-tokens 5 --x\n  --gpu   h100, h200, h20-96, b200, gb200\n'
    with redirect_stderr(terminal):
        VerbParser()._print_message(given)

    assert terminal.getvalue() == (
        '  deepseek-triton generate "a b c d" \\\n    --max-tokens 5 --x\n'
        "  --gpu   h100, h200, h20-96, b200,\n          gb200\n"
    )


def test_a_mistyped_verb_or_form_gets_its_neighbour(capsys):
    wrong = {(verb[:2] + verb[3:], "x"): verb for verb in VERBS if len(verb) > 4}
    for argv, meant in (wrong | {("launch", "dokcer", "r1"): "docker", ("probe", "raedy", "x"): "ready"}).items():
        assert main(list(argv)) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.endswith(f"; did you mean {meant}?"), line
    assert main(["xyzzy"]) == 2
    assert "deepseek-triton --help lists them" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [20, 60])
def test_a_grid_wider_than_the_terminal_keeps_every_digit(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    row = ("concurrency 64", *["1,151.3 ± 120.5"] * 4)
    stdout = FakeTerminal()
    with redirect_stdout(stdout):
        show(Table(title="", headings=("load", "TTFT", "TPOT", "ITL", "failed"), rows=[row], is_grid=True))
    assert all(cell in stdout.getvalue() for cell in (*row, "failed"))
    assert stdout.getvalue().count("1,151.3 ± 120.5") == 4


def test_an_answer_breaks_between_words_at_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "12")
    monkeypatch.setenv("TERM", "xterm")
    out = FakeTerminal()
    with redirect_stdout(out):
        printer = AnswerPrinter()
        for piece in ("one two th", "ree four 中文字符中文\n", "averylongaddress goes\ton e\u0301e\u0301e\u0301e"):
            printer.show(piece)
    shown = out.getvalue()
    while back := re.search(r"\x1b\[(\d+)D\x1b\[K", shown):  # left and clear: a word was taken back
        shown = shown[: back.start() - int(back[1])] + shown[back.end() :]
    lines = ["one two ", "three four ", "中文字符中", "文", "averylongaddress", "goes\ton ", "e\u0301e\u0301e\u0301e"]
    assert shown.split("\n") == lines
