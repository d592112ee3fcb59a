"""`deepseek-triton generate` against a server on a real socket: what is sent, what is shown, how it ends."""

import dataclasses
import io
import json
import os
import shlex
import subprocess
import sys
import threading
from unittest.mock import ANY

import pytest

from deepseek_triton_client import Overloaded, SamplingParams
from deepseek_triton_tools.cli import client_options
from deepseek_triton_tools.cli.client_options import assigned
from deepseek_triton_tools.cli.main import program_parser
from deepseek_triton_tools.tool_errors import ToolError
from support.commands import run_command
from support.model_server import END, WAIT, saying
from support.terminal_session import Terminal
from support.waiting import PATIENCE_S


@pytest.fixture
def run(model_server):
    """Run `generate *argv`; returns exit code, stdout, stderr."""

    def generate(*argv):
        done = run_command("generate", "--url", model_server.url, *argv)
        return done.returncode, done.stdout, done.stderr

    return generate


def started(server):
    """Start `generate` in a process."""
    command = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "generate", "hi", "--url", server.url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def give_input(monkeypatch, content):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


# --- what is asked ---


def test_a_piped_prompt_is_sent_as_it_is(run, model_server, monkeypatch, tmp_path):
    for argv in ([], ["-"], ["--file", "-"]):
        give_input(monkeypatch, "grüß\n".encode())
        assert run(*argv) == (0, "GRÜSS\n\n", "")
        assert model_server.bodies[-1]["text_input"] == "grüß\n"
    give_input(monkeypatch, b"not this")
    assert run("this")[1] == "THIS\n"
    (tmp_path / "prompt.txt").write_text("a long one")
    assert run("--file", str(tmp_path / "prompt.txt"))[0] == 0
    assert model_server.bodies[-1]["text_input"] == "a long one"
    (tmp_path / "binary").write_bytes(b"ab\xff")
    assert "is not UTF-8: invalid start byte at byte 2" in run("--file", str(tmp_path / "binary"))[2]


@pytest.mark.slow
def test_without_a_prompt_at_a_terminal_it_says_what_to_give():
    with Terminal("generate") as terminal:
        terminal.read_until("give a prompt, --file FILE, --messages FILE or --input FILE, or pipe one in")
        assert terminal.exit_code() == 2


def test_what_is_wrong_is_said_before_anything_is_sent(run, model_server, tmp_path):
    wrong = [
        (["hi", "--file", "x"], "give one of PROMPT and --file"),
        (["hi", "--input", "x"], "PROMPT: not with --input"),
        (["hi", "--raw", "--system", "x"], "--raw: not with"),
        (["hi", "--output", "x"], "--output: only with --input"),
        ([""], "PROMPT: expected a prompt, got nothing"),
        (["--file", "/dev/null", "--system", "x"], "--file: expected a prompt"),
        (["hi", "--url", "a:1/v2/models/x/generate"], "argument --url: expected the server's own address"),
        (["--file", "nowhere"], "nowhere can't be read: No such file"),
        (["hi", "--timeout", "nan"], "expected a number of seconds above 0, got 'nan'"),
        (["hi", "--token-file", "tls.key"], "the token can't be read from tls.key: No such file"),
        (["hi", "--key", "nowhere"], "--key: expected --cert too"),
        (["hi", "--cert", __file__, "--key", "/no/tls.key"], "--key: expected a PEM file, found none at '/no/tls.key'"),
        (["hi", "--ca", __file__], "generate: --ca: expected"),
    ]
    contents = {"{": "is not JSON", "{}": "messages: expected a text", '[{"role": 1}]': "messages[0]: expected"}
    for number, (content, expected) in enumerate(contents.items()):
        (tmp_path / f"{number}.json").write_text(content)
        wrong.append((["--messages", str(tmp_path / f"{number}.json")], expected))
    for argv, expected in wrong:
        code, out, err = run(*argv)
        assert (code in (1, 2), out, expected in err) == (True, "", True), argv
    assert model_server.bodies == []


def test_a_prompt_is_a_message_where_the_model_has_a_chat_form(run, model_server):
    for template, argv, is_chat in (
        (None, [], False),
        (None, ["--chat"], True),
        ("x", [], True),
        ("x", ["--raw"], False),
    ):
        model_server.template = template
        run("hi", *argv)
        assert ("messages" in model_server.bodies[-1]) is is_chat


def test_a_chat_sends_the_prompt_as_a_message(run, model_server, tmp_path):
    """A conversation keeps its own system message."""
    user, own = {"role": "user", "content": "hi"}, {"role": "system", "content": "Own."}
    brief = {"role": "system", "content": "Be brief."}
    for name, messages in (("none", [user]), ("own", [own, user])):
        (tmp_path / name).write_text(json.dumps(messages))
    for argv, expected in (
        (["hi", "--chat"], [user]),
        (["hi", "--system", "Be brief."], [brief, user]),
        (["--messages", str(tmp_path / "none"), "--system", "Be brief."], [brief, user]),
        (["--messages", str(tmp_path / "own"), "--system", "Be brief."], [own, user]),
    ):
        assert run(*argv)[1] == "HI\n"
        assert json.loads(model_server.bodies[-1]["messages"]) == expected
        assert "text_input" not in model_server.bodies[-1]


# --- the server ---


def test_the_token_comes_from_the_environment_or_a_file(run, model_server, monkeypatch, tmp_path):
    monkeypatch.setenv("DEEPSEEK_TRITON_TOKEN", "of-the-environment")
    run("hi")
    (tmp_path / "token").write_text("of-the-file\n")
    run("hi", "--token-file", str(tmp_path / "token"))

    sent = [headers["authorization"] for headers in model_server.headers]
    assert sent == ["Bearer of-the-environment", "Bearer of-the-file"]


def test_a_refusal_is_retried_as_often_as_asked(run, model_server):
    """The next URL is used when a server is gone."""

    def full(_):
        raise Overloaded("4 requests wait already")
        yield

    model_server.answer = full
    refusal = (1, "", "deepseek-triton generate: [E_OVERLOADED] 4 requests wait already\n")
    assert run("hi", "--retries", "0") == run("hi", "--retries", "1") == refusal
    assert len(model_server.bodies) == 1 + 2
    model_server.answer = saying("a")
    assert run_command("generate", "hi", "--url", "http://127.0.0.1:9", "--url", model_server.url).returncode == 0


@pytest.mark.slow
def test_each_time_limit_reaches_the_client(run, model_server):
    def stalls(_):
        yield {"text_output": "a"}
        yield WAIT

    model_server.answer = stalls
    for option in ("--timeout", "--token-timeout"):
        code, out, err = run("hi", option, "0.3")
        assert (code, out) == (1, "a\n")
        assert f" {option} of 0.3 s" in err


# --- what is shown ---


@pytest.mark.slow
def test_the_text_is_shown_as_it_comes(model_server):
    def answer(_):
        yield {"text_output": "one "}
        yield WAIT
        yield {"text_output": "two", **END, "num_output_tokens": 2}

    model_server.answer = answer
    with started(model_server) as process:
        assert os.read(process.stdout.fileno(), 100) == b"one "
        model_server.release.set()
        assert process.stdout.read() == b"two\n"


def think(_):
    yield {"text_output": "", "reasoning_output": "hm \x1b[31m"}
    yield {"text_output": "\n\n", "reasoning_output": ""}
    yield {"text_output": "yes\t\x1b[2J\nok", "reasoning_output": "", **END, "num_output_tokens": 3}


def test_a_pipe_gets_the_plain_answer_alone(run, model_server):
    model_server.answer = think
    assert [run("--chat", "hi", *how)[1] for how in ((), ["--no-stream"])] == ["yes\t\x1b[2J\nok\n"] * 2


@pytest.mark.slow
def test_a_terminal_shows_reasoning_dimmed_and_no_control_characters(model_server):
    model_server.answer = think
    with Terminal("generate", "--chat", "hi", "--url", model_server.url) as terminal:
        assert terminal.exit_code() == 0
    assert terminal.seen == "\x1b[2mhm \\x1b[31m\x1b[0m\r\n\r\nyes\t\\x1b[2J\r\nok\r\n"
    with Terminal("generate", "--chat", "hi", "--url", model_server.url, NO_COLOR="1") as terminal:
        terminal.exit_code()
    assert "\x1b" not in terminal.seen


def test_several_answers_are_told_apart(run, model_server):
    """The best of several is not asked as a stream."""

    def two(_):
        both = {"finish_reason": ["stop", "length"], "sequence_index": [0, 1], "num_output_tokens": [1, 2]}
        yield {"text_output": ["one", "two"], "num_input_tokens": [3, 3], **both}

    model_server.answer = two
    expected = "--- answer 1 of 2 ---\none\n--- answer 2 of 2 ---\ntwo\n"
    assert run("hi", "--set", "n=2", "--temperature", "1")[1] == expected
    answers = json.loads(run("hi", "--set", "n=2", "--json")[1])["answers"]
    assert [(answer["text"], answer["finish_reason"]) for answer in answers] == [("one", "stop"), ("two", "length")]
    run("hi", "--set", "best_of=3", "--temperature", "1")
    assert model_server.bodies[-1]["streaming"] is False


def test_json_has_everything_and_no_nan(run, model_server):
    def answer(_):
        yield {"text_output": "a", "output_ids": 5, "cumulative_logprob": -0.5}
        token = {"6": {"logprob": float("-inf"), "rank": 1, "decoded_token": "b"}}
        logprobs = json.dumps([token]).replace("-Infinity", "-1e999")
        yield {"text_output": "b", **END, "num_output_tokens": 2, "output_ids": 6, "logprobs": logprobs}

    model_server.answer = answer
    record = json.loads(run("hi", "--json", "--set", "logprobs=0", "--set", "return_output_ids=true")[1])
    assert 0 < record["time_to_first_token_s"] <= record["total_s"]
    assert record["logprobs"][-1] == [{"token_id": 6, "logprob": None, "rank": 1, "text": "b"}]
    assert record.items() >= {
        "text": "ab", "finish_reason": "stop", "stop_reason": None, "output_ids": [5, 6], "url": model_server.url,
        "num_input_tokens": 3, "num_output_tokens": 2, "num_cached_tokens": 0,
        "request_id": model_server.bodies[0]["id"],
    }.items()  # fmt: skip


def test_usage_is_one_line_on_stderr(run, model_server):
    model_server.answer = saying("a", "b")
    for option in ("-v", "--usage"):
        _, out, err = run("hi", option)
        assert out == "ab\n"
        assert err.startswith("3 tokens in, 2 out, first after ")
        assert err.endswith(f"; stop; {model_server.bodies[-1]['id']} on {model_server.url}\n")


def test_an_incomplete_answer_is_said_to_be(run, model_server):
    """An error in the middle leaves the text and gets its own line."""

    def breaks(_):
        yield {"text_output": "half"}
        yield {"error": "[E_INTERNAL] out of memory"}

    for why in ("timeout", "cancelled"):
        model_server.answer = saying("so far", finish_reason=why)
        assert run("hi") == (1, "so far\n", f"deepseek-triton generate: the answer is not complete: {why}\n")
    model_server.answer = lambda _: [{"text_output": "", "reasoning_output": "Well,", "finish_reason": "length"}]
    assert "its reasoning reached max_tokens" in run("hi", "--chat")[2]
    model_server.answer = breaks
    assert run("hi") == (1, "half\n", "deepseek-triton generate: [E_INTERNAL] out of memory\n")


@pytest.mark.slow
def test_ctrl_c_cancels_on_the_server_and_keeps_the_text(model_server):
    model_server.answer = lambda _: iter([{"text_output": "half"}, WAIT])
    with Terminal("generate", "hi", "--url", model_server.url) as terminal:
        terminal.read_until("half")
        assert terminal.interrupt() == 130
    assert model_server.gone.wait(PATIENCE_S)
    assert terminal.seen.replace("^C", "") == "half\r\n"


@pytest.mark.slow
def test_ctrl_c_before_the_first_token_cancels_too(model_server):
    model_server.answer = lambda _: iter([WAIT])
    with Terminal("generate", "hi", "--url", model_server.url, "--json") as terminal:
        assert model_server.waiting.wait(PATIENCE_S)
        assert terminal.interrupt() == 130
    assert model_server.gone.wait(PATIENCE_S)


@pytest.mark.slow
def test_a_reader_that_leaves_cancels(model_server):
    many = threading.Event()

    def goes_on(_):
        yield {"text_output": "half"}
        many.wait(PATIENCE_S)
        yield {"text_output": "more"}
        yield {"text_output": "more"}
        yield WAIT

    model_server.answer = goes_on
    with started(model_server) as process:
        assert os.read(process.stdout.fileno(), 100) == b"half"
        process.stdout.close()
        many.set()
        assert (process.wait(PATIENCE_S), process.stderr.read()) == (0, b"")
    assert model_server.gone.wait(PATIENCE_S)


# --- options ---

FIELDS = {field.name: field.metadata for field in dataclasses.fields(SamplingParams)}
COMMON = ("max_tokens", "temperature", "top_p", "seed", "stop", "chat_template_kwargs")


def example(name):
    """A value as it is typed for a field, and as it is sent."""
    metadata = FIELDS[name]
    if metadata["many"]:
        values = ["a b", "-c"] if metadata["datatype"] == "BYTES" else [5, 6]
        return json.dumps(values), values
    values = {"FP32": ("0.5", 0.5), "BYTES": ('{"a": 1}', '{"a": 1}'), "BOOL": ("false", False)}
    return ('[{"a": 1}]',) * 2 if name == "tools" else values.get(metadata["datatype"], ("2", 2))


@pytest.mark.slow
def test_every_field_can_be_set_and_few_have_options_of_their_own(run, model_server):
    for name in FIELDS:
        typed, expected = example(name)
        sent = f"{'' if FIELDS[name]['plain'] else 'sampling_param_'}{name}"
        run("--chat", "hi", "--no-stream", "--set", f"{name}={typed}")
        assert model_server.bodies[-1][sent] == expected
        option = f"--{name.replace('_', '-')}"
        code, _, err = run("--chat", "hi", option, typed)
        if name in COMMON:
            assert model_server.bodies[-1][sent] == (typed if name == "stop" else expected)
        else:
            assert (code, shlex.quote(f"{name}={typed}") in err) == (2, True)
    assert "--set ignore_eos=" in run("hi", "--no-ignore-eos")[2]
    for wrong in ("tempture=1", "temperature"):
        assert run("hi", "--set", wrong) == (2, "", ANY)
    tls = run_command("generate", "hi", "--retries", "0", "--url", model_server.url.replace("http", "https"))
    assert ("TLS" in tls.stderr, "8000" in tls.stderr) == (True, False)  # the server runs


def test_a_field_can_be_assigned():
    fields = {
        "temperature=0.5": ("temperature", 0.5),
        "max-tokens = 7": ("max_tokens", 7),
        "ignore_eos=false": ("ignore_eos", False),
        'stop=["a", "b"]': ("stop", ["a", "b"]),
        "stop=a, b": ("stop", "a, b"),
        "stop_token_ids=[1]": ("stop_token_ids", [1]),
        "guided_regex=[0-9]+=": ("guided_regex", "[0-9]+="),
        "seed=": ("seed", None),
        "top_n=5": ("top_n", 5),
        "stop=1": ("stop", "1"),
        "mode=fast": ("mode", "fast"),
        'logit_bias={"5": 1}': ("logit_bias", {"5": 1}),
    }
    assert {typed: assigned(typed) for typed in fields} == fields
    with pytest.raises(ToolError, match="expected"):
        assigned("temperature")


def test_the_limits_are_given_in_seconds(model_server, monkeypatch):
    made = []
    monkeypatch.setattr("deepseek_triton_client.Client", lambda url, **settings: made.append((url, settings)))
    argv = ["--timeout", "4", "--first-token-timeout", "3", "--token-timeout", "2", "--connect-timeout", "1"]
    args = program_parser(["generate", "chat"]).parse_args(
        ["chat", *argv, "--retries", "5", "--model", "m", "--model-version", "2"]
    )
    client_options.client_of(args)

    ((url, settings),) = made
    timeouts = settings["timeouts"]
    assert (timeouts.total, timeouts.first_token, timeouts.between_tokens, timeouts.connect) == (4, 3, 2, 1)
    assert settings["retries"].attempts == 6
    assert (url, settings["model_name"], settings["model_version"]) == ("http://localhost:8000", "m", "2")
