"""What a person who runs the demo reads, in a pipe and at a terminal."""

import re
import tempfile

import pytest

from deepseek_triton_tools.cli.demo import PROMPTS
from deepseek_triton_tools.cli.main import main
from support.documents import read
from support.terminal_session import Terminal

pytestmark = pytest.mark.slow

SIMULATED = ["--engine", "simulated", "--preset", "b200x8-r1-fp4-min-latency"]
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def test_a_pipe_gets_whole_lines_that_say_who_speaks(capsys):
    assert main(["demo"]) == 0

    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    lines = [line for line in printed.splitlines() if re.match(r"\w[\w ]{12} ", line)]
    spoken = [(line[:14].strip(), line[14:]) for line in lines]
    prompts = [text for label, text in spoken if label == "prompt"]
    assert prompts == [*PROMPTS, f"{PROMPTS[0]} (over gRPC)"]
    after = dict(zip(prompts, [spoken[spoken.index(("prompt", prompt)) + 1] for prompt in prompts], strict=True))
    assert {label for label, _ in after.values()} == {"model"}
    assert after["The capital of France is"][1].startswith("Paris.")
    assert after[prompts[0]] == after[prompts[-1]]

    chat = spoken[spoken.index(("user", "What is 27 + 45?")) :]
    assert [label for label, _ in chat[:3]] == ["user", "thinking", "model"]
    assert "27 + 45 = 72" in chat[2][1]
    assert "<think>" not in printed
    assert "</think>" not in printed

    tool = spoken[spoken.index(("tool offered", "get_weather(city): Get the weather in a city.")) :]
    assert [label for label, _ in tool] == ["tool offered", "user", "model", "demo", "tool result", "model"]
    assert '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>' in tool[2][1]
    assert 'get_weather with {"city": "Oslo"}' in tool[3][1]
    assert all(word in tool[5][1] for word in ("12", "cloudy", "Oslo"))

    readme = re.search(r"^```text\n(prompt .*?)^```$", read("README.md"), re.DOTALL | re.MULTILINE)
    assert readme is not None
    assert [line for line in readme[1].splitlines() if line and line not in printed.splitlines()] == []

    rows = re.findall(r"  (HTTP|gRPC)  \d+ ms +\d+ +\d+ +(.*)", printed)
    assert rows == [("HTTP", "the model")] * 4 + [("gRPC", "the model")] + [("HTTP", "the model")] * 3
    assert "Stopped cleanly" in printed


@pytest.mark.nightly
def test_a_terminal_gets_dimmed_thinking_and_lines_broken_between_words():
    """The run in a pipe is its sample."""
    with Terminal("demo", COLUMNS="80") as terminal:
        assert terminal.exit_code() == 0
        shown = terminal.seen.replace("\r", "")

    thinking = shown[shown.index("thinking") : shown.index("27 + 45 = 72.")]
    assert "\x1b[2mThe\x1b[0m" in thinking
    plain = ESCAPE.sub("", shown)
    conversation = plain[plain.index("Completion:") : plain.index("Speed of")]
    assert max(map(len, conversation.splitlines())) <= 80
    assert re.search(r"^prompt +The president.*\nmodel +the head.*\n( {14}\w.*\n)*.*Washington\.$", conversation, re.M)
    assert 'get_weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>' in conversation


def test_a_call_that_is_cut_off_is_told_and_not_played(capsys):
    assert main(["demo", "--max-tokens", "9"]) == 0

    printed = capsys.readouterr().out
    assert "no whole call" in printed
    assert "tool result" not in printed
    assert "Stopped cleanly" in printed


def test_the_simulated_engine_completes_and_thinks(capsys):
    assert main(["demo", "--max-tokens", "12", *SIMULATED]) == 0

    printed = capsys.readouterr().out
    assert all(prompt in printed for prompt in PROMPTS)
    rows = re.findall(r"  (HTTP|gRPC)  \d+ ms +(\d+) .*--max-tokens", printed)
    assert rows == [("HTTP", "12")] * 4 + [("gRPC", "12"), ("HTTP", "12")]
    assert "\nthinking " in printed
    assert "tool" not in printed[printed.index("\nthinking ") : printed.index("Speed of")]
    assert "Stopped cleanly" in printed


def test_what_can_t_be_shown_is_refused(capsys, monkeypatch):
    for argv, expected in (
        (["--preset", "b200x8-r1-fp4-min-latency"], "add --engine simulated"),
        (["--tritonserver", "/nowhere/tritonserver"], "/nowhere"),
    ):
        assert main(["demo", *argv]) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert expected in line
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    assert main(["demo"]) == 1
