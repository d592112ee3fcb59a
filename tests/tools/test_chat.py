"""`deepseek-triton chat`: at a real terminal, in a pipe, and the conversation by itself."""

import io
import json
import os
import sys
from pathlib import Path

import pytest

from deepseek_triton_client import Overloaded, SamplingParams, ServerError
from deepseek_triton_tools.cli.chat import Conversation
from deepseek_triton_tools.tool_errors import ToolError
from support.commands import run_command
from support.model_server import END, WAIT, echo
from support.terminal_session import CTRL_C, CTRL_D, Terminal
from support.waiting import PATIENCE_S

PROMPT = "> "


@pytest.fixture
def chat(model_server, tmp_path):
    """A chat at a terminal that has shown its first prompt."""
    opened = []

    model_server.template = "x"

    def start(*argv):
        opened.append(Terminal("chat", "--url", model_server.url, *argv, XDG_STATE_HOME=str(tmp_path / "state")))
        assert f"deepseek-r1 on {model_server.url}" in opened[-1].read_until(PROMPT)
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.__exit__(None, None, None)


@pytest.fixture
def pipe(model_server, monkeypatch):
    """Chat in a pipe with these lines; returns exit code, stdout, stderr."""

    def run(*lines, argv=()):
        text = "".join(f"{line}\n" for line in lines)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        done = run_command("chat", "--url", model_server.url, *argv)
        return done.returncode, done.stdout, done.stderr

    return run


def say(terminal, text):
    """Type a line, and return what is shown until the next prompt."""
    terminal.type(f"{text}\r")
    terminal.read_until("\n")
    return terminal.read_until(f"\n\x1b[?2004h{PROMPT}")


def conversation_of(body):
    return [(message["role"], message["content"]) for message in json.loads(body["messages"])]


# --- at a terminal ---


@pytest.mark.slow
def test_a_conversation_goes_on_with_what_was_said(chat, model_server):
    """Reasoning is dimmed, and not sent back. Several lines are one turn when pasted or continued."""
    terminal = chat("--system", "Be brief.", "--temperature", "0.5")
    assert "HELLO" in say(terminal, "hello")
    model_server.answer = lambda _: iter([
        {"text_output": "", "reasoning_output": "hm \x1b[2J"},
        {"text_output": "\n\nyes \x9b2J", "reasoning_output": "", **END, "num_output_tokens": 3},
    ])  # fmt: skip
    shown = say(terminal, "why?")
    assert "\x1b[2mhm \\x1b[2J\x1b[0m\r\n\r\nyes \\x9b2J\r\n" in shown
    assert "[3 tokens, " in shown
    part = {"text_output": "", "reasoning_output": "half"}
    model_server.answer = lambda _: iter([{**part, **END, "finish_reason": "length"}])
    assert "cut off in its reasoning by max_tokens (/params) or a full context]" in say(terminal, "a long story")
    assert "thinking: on\x1b" in say(terminal, "/thinking on")
    say(terminal, "/clear")
    model_server.answer = echo
    terminal.type("\x1b[200~one\ntwo\x1b[201~\r")
    terminal.read_until("TWO")
    terminal.read_until(PROMPT)
    terminal.type("three\\\rfour\r")
    terminal.read_until("FOUR")
    terminal.read_until(PROMPT)
    terminal.type(CTRL_D)
    assert terminal.exit_code() == 0

    assert conversation_of(model_server.bodies[2]) == [
        ("system", "Be brief."), ("user", "hello"), ("assistant", "HELLO"), ("user", "why?"),
        ("assistant", "\n\nyes \x9b2J"), ("user", "a long story"),
    ]  # fmt: skip
    assert model_server.bodies[1]["sampling_param_temperature"] == 0.5
    assert conversation_of(model_server.bodies[4])[1:] == [
        ("user", "one\ntwo"), ("assistant", "ONE\nTWO"), ("user", "three\nfour"),
    ]  # fmt: skip


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_on_the_server_and_keeps_what_came(chat, model_server, tmp_path):
    """Before the first word it leaves the conversation as it was; at the prompt it drops the line."""

    def stop(typed, shown, answer, said="[stopped]"):
        model_server.answer = answer
        model_server.waiting.clear()
        model_server.gone.clear()
        terminal.type(f"{typed}\r")
        terminal.read_until(shown)
        assert model_server.waiting.wait(PATIENCE_S)
        terminal.press(CTRL_C, until=said)
        terminal.read_until(PROMPT)
        assert model_server.gone.wait(PATIENCE_S)
        model_server.answer = echo

    terminal = chat()
    stop("slow", "slow", lambda _: iter([WAIT]), said="/retry")
    assert "SLOW" in say(terminal, "/retry")
    stop("go on", "half", lambda _: iter([{"text_output": "half"}, WAIT]))
    terminal.type("not this")
    terminal.read_until("not this")  # its echo: readline is waiting, and not on its way there
    terminal.press(CTRL_C, until=f"\n\x1b[?2004h{PROMPT}")
    say(terminal, "more")
    say(terminal, f"/save {tmp_path}/talk.json")

    assert conversation_of(model_server.bodies[1]) == [("user", "slow")]
    before = [("user", "slow"), ("assistant", "SLOW"), ("user", "go on"), ("assistant", "half"), ("user", "more")]
    assert conversation_of(model_server.bodies[3]) == before
    saved = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message.get("interrupted", False) for message in saved] == [False, False, False, True, False, False]


@pytest.mark.slow
def test_an_error_is_one_line_and_the_chat_goes_on(chat, model_server):
    def full(_):
        raise Overloaded("later")
        yield

    def breaks(_):
        yield {"text_output": "half"}
        raise ConnectionResetError("the server has gone")

    terminal = chat("--retries", "0")
    say(terminal, "first")
    model_server.answer = full
    assert "deepseek-triton chat: [E_OVERLOADED] later" in say(terminal, "second")
    model_server.answer = echo
    assert "SECOND" in say(terminal, "/retry")
    before = ["first", "FIRST", "second"]
    assert [content for _, content in conversation_of(model_server.bodies[2])] == before

    model_server.answer = breaks
    seen = " ".join(say(terminal, "third").split())
    assert " half deepseek-triton chat: POST http://127" in seen
    model_server.answer = echo
    say(terminal, "fourth")
    assert [content for _, content in conversation_of(model_server.bodies[4])] == [*before, "SECOND", "fourth"]


@pytest.mark.slow
def test_the_history_is_there_the_next_time_and_private(chat, tmp_path):
    """A terminal is left as it was."""
    terminal = chat()
    say(terminal, "remember me")
    terminal.type("/quit\r")
    assert terminal.exit_code() == 0
    assert terminal.seen.rpartition("\x1b[?2004")[2].startswith("l")
    history = tmp_path / "state/deepseek-triton/chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "remember me" in history.read_text()

    terminal = chat()
    terminal.type("\x1b[A\x1b[A\r")  # the arrow up, past /quit
    terminal.read_until("REMEMBER ME")


# --- commands ---


def test_commands_change_what_is_sent(pipe, model_server):
    """/thinking leaves the template's other arguments."""
    lines = ["/system Be brief.", "/params temperature=0.5", "/params stop=x", "/thinking on", "hi", "/params stop="]
    argv = ["--chat-template-kwargs", '{"tools": []}']
    assert pipe(*lines, "/system -", "/thinking off", "there", "/thinking max", "!", argv=argv)[0] == 0

    first, second, third = model_server.bodies
    assert conversation_of(first) == [("system", "Be brief."), ("user", "hi")]
    assert (first["sampling_param_temperature"], first["sampling_param_stop"]) == (0.5, "x")
    assert json.loads(first["chat_template_kwargs"]) == {"tools": [], "thinking": True}
    assert conversation_of(second) == [("user", "hi"), ("assistant", "HI"), ("user", "there")]
    assert "sampling_param_stop" not in second
    assert json.loads(second["chat_template_kwargs"]) == {"tools": [], "thinking": False}
    assert json.loads(third["chat_template_kwargs"]) == {"tools": [], "thinking": True, "reasoning_effort": "max"}


def test_turns_can_be_taken_back_and_asked_again(pipe, model_server):
    pipe("a", "b", "/undo", "c", "/retry", "/clear", "d")

    assert [[content for _, content in conversation_of(body)] for body in model_server.bodies] == [
        ["a"], ["a", "A", "b"], ["a", "A", "c"], ["a", "A", "c"], ["d"],
    ]  # fmt: skip


def test_a_cut_answer_is_told_on_stderr(pipe, model_server):
    for reason, text, code in (("timeout", "half", 1), ("length", "", 0)):
        part = {"text_output": text, "reasoning_output": "hm", **END, "finish_reason": reason}
        model_server.answer = lambda _, part=part: iter([part])
        found, out, err = pipe("hi", "/clear", argv=["--hide-reasoning"])
        assert (found, out, err.count("deepseek-triton chat: ")) == (code, f"{text}\n", 1)


WRONG_COMMANDS = {
    "/hepl": "no command /hepl; did you mean /help?",
    "/retry": "there is nothing to ask again",
    "/undo": "there is nothing to take back",
    "/thinking 101": "expected /thinking on, off or an effort",
    "/params temprature=1": "unknown field 'temprature'; did you mean 'temperature'?",
    "/params n=2": "a chat has one answer to each turn",
    "/save": "expected /save FILE",
    "/save no/where": "no/where can't be written: No such file",
    "/load nowhere": "nowhere can't be read: No such file",
}


def test_a_command_that_is_wrong_is_one_line(pipe):
    code, out, err = pipe(*WRONG_COMMANDS, "still here")

    assert (code, out) == (1, "STILL HERE\n")
    for said, expected in zip(err.splitlines(), WRONG_COMMANDS.values(), strict=True):
        assert said.startswith(f"deepseek-triton chat: {expected}")
    assert [pipe("/thinking on", argv=["--set", each])[0] for each in ("n=2", "chat_template_kwargs=x")] == [2, 2]


def test_a_conversation_is_saved_and_loaded(pipe, model_server, tmp_path):
    path = tmp_path / "talk.json"
    pipe("/system Be brief.", "/params stop=x", "hi", f"/save {path}")

    assert json.loads(path.read_text()) == {
        "model": "tensorrt_llm",
        "params": {"stop": ["x"]},
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "HI"},
        ],
    }
    assert pipe("there", argv=["--load", str(path), "--temperature", "0.5"])[1] == "THERE\n"
    assert pipe(f"/load {path}", "there")[1] == "THERE\n"
    for body in model_server.bodies[1:]:
        assert [content for _, content in conversation_of(body)] == ["Be brief.", "hi", "HI", "there"]
        assert body["sampling_param_stop"] == "x"
    assert model_server.bodies[1]["sampling_param_temperature"] == 0.5
    assert [each.name for each in tmp_path.iterdir()] == ["talk.json"]


def test_a_conversation_that_was_saved_is_replaced(tmp_path):
    conversation = Conversation(SamplingParams())
    for answer in ("one", "two"):
        conversation.add_answer("hi", 0, answer)
        conversation.save(tmp_path / "talk.json", model="m")
    assert Conversation.loaded(tmp_path / "talk.json").messages[-1]["content"] == "two"


OF_OTHER_ORIGIN = {
    "notes": "# Notes\n",
    "empty": "",
    "list": "[]",
    "null": "null",
    "deep": "[" * 100_000,
    "messages-only": '{"messages": []}',
    "request": '{"messages": [{"role": "user", "content": "of another"}], "model": "m", "max_tokens": 5}',
    "params": '{"model": "m", "params": {"temprature": 1}, "messages": []}',
}


def test_a_file_of_other_origin_is_not_replaced(pipe, tmp_path):
    for name, content in OF_OTHER_ORIGIN.items():
        (tmp_path / name).write_text(content)

    code, _, err = pipe("hi", *(f"/save {tmp_path / name}" for name in OF_OTHER_ORIGIN))
    assert code == 1
    for name, content in OF_OTHER_ORIGIN.items():
        assert f"{tmp_path / name} is there already, and /save did not write it; choose another name" in err
        assert (tmp_path / name).read_text() == content
    assert len(list(tmp_path.iterdir())) == len(OF_OTHER_ORIGIN)


def test_a_place_that_takes_no_file_stays_as_it_was(tmp_path):
    makers = {"folder": Path.mkdir, "pipe": os.mkfifo, "link": lambda path: path.symlink_to("nowhere")}
    for name, make in makers.items():
        make(tmp_path / name)
        with pytest.raises(ToolError, match="did not write it"):
            Conversation(SamplingParams()).save(tmp_path / name, model="m")
    with pytest.raises(ToolError, match="can't be written"):
        Conversation(SamplingParams()).save(tmp_path / "nowhere/talk.json", model="m")
    assert {each.name for each in tmp_path.iterdir()} == makers.keys()


def test_what_is_no_conversation_is_refused(tmp_path):
    for content, expected in (
        ("{", "is not JSON"),
        ("[]", 'expected an object with "messages"'),
        ('{"messages": [{"content": "a"}]}', "messages[0]: expected"),
        ('{"messages": [{"role": "user", "content": 5}]}', "expected a text as each one's content"),
        ('{"messages": [], "params": 5}', "params: expected an object, got 5"),
        ('{"messages": [], "params": {"temprature": 1}}', "did you mean 'temperature'?"),
    ):
        (tmp_path / "talk.json").write_text(content)
        with pytest.raises(ToolError) as caught:
            Conversation.loaded(tmp_path / "talk.json")
        assert expected in str(caught.value)


# --- in a pipe ---


def test_a_pipe_gets_answers_and_nothing_else(pipe):
    assert pipe("one", "", "two", "/params", "//help") == (0, "ONE\nTWO\n/HELP\n", "")


def test_a_failed_turn_is_said_at_the_end_by_the_code(pipe, model_server):
    """A retry that fails keeps the old answer."""

    def fails_at(number):
        def answer(body):
            if len(model_server.bodies) == number:
                raise ServerError("no")
            yield from echo(body)

        return answer

    model_server.answer = fails_at(1)
    assert pipe("one", "two") == (1, "TWO\n", "deepseek-triton chat: [E_INTERNAL] no\n")
    assert conversation_of(model_server.bodies[1]) == [("user", "two")]
    model_server.answer = fails_at(4)
    pipe("one", "/retry", "two")
    assert conversation_of(model_server.bodies[4]) == [("user", "one"), ("assistant", "ONE"), ("user", "two")]
