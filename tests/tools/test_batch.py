"""`deepseek-triton generate --input`: the order of answers, an early end, --resume, and refused input."""

import json
import os
import shlex
import subprocess
import sys
from functools import partial

import pytest

from deepseek_triton_client import AccessDenied, Overloaded, Retries, ServerError
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.generating import batch
from deepseek_triton_tools.terminal.status_line import StatusLine
from support.model_server import WAIT, echo
from support.terminal_session import CTRL_C, Terminal
from support.waiting import PATIENCE_S


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(model_server, capsys, folder):
    """Run `generate --input in.jsonl --output out.jsonl *argv` on these lines; returns exit code, stdout, stderr."""

    def generate(lines, *argv):
        if lines is not None:
            write(lines)
        files = ["--input", "in.jsonl", "--output", "out.jsonl"]
        code = main(["generate", "--url", model_server.url, *files, *argv])
        return code, *capsys.readouterr()

    return generate


def write(lines):
    with open("in.jsonl", "w") as file:
        file.writelines(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)


def rows(name="out.jsonl"):
    with open(name, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def texts(name="out.jsonl"):
    return [row.get("text", row.get("error", {}).get("code")) for row in rows(name)]


def failing(*prompts, code="E_INTERNAL"):
    """Answer every prompt but these."""

    def answer(body):
        if body["text_input"] not in prompts:
            yield from echo(body)
        elif code == "E_CANCELLED":  # as a server that stops ends one, and another at its time limit
            yield {"text_output": "half", "finish_reason": "timeout" if body["text_input"] == "d" else "cancelled"}
        else:
            raise ServerError("no", code=code)

    return answer


def test_answers_are_in_the_order_of_the_input(run, model_server):
    prompts = [f"prompt {number}" for number in range(60)]
    code, out, err = run([json.dumps(prompt) for prompt in prompts], "--concurrency", "5", "--max-tokens", "9")
    assert (code, out) == (0, "")
    assert err.startswith("60 of 60 rows done; 120 tokens in ")
    assert texts() == [prompt.upper() for prompt in prompts]
    assert model_server.most_at_once <= 5
    assert {body["sampling_param_max_tokens"] for body in model_server.bodies} == {9}


def test_a_row_says_what_it_is_and_its_own_fields_win(run, model_server):
    named, requested = {"prompt": "named", "id": 7, "temperature": 0.5}, {"prompt": "requested", "request_id": "r-1"}
    said = {"messages": [{"role": "user", "content": "said"}], "id": "x"}
    run(['"plain"', named, "", requested, said], "--temperature", "1")
    answers = {1: "PLAIN", 7: "NAMED", "r-1": "REQUESTED", "x": "SAID"}
    assert {row["id"]: row["text"] for row in rows()} == answers
    by_text = {body.get("text_input", "said"): body for body in model_server.bodies}
    assert by_text["requested"]["id"] == "r-1"
    assert by_text["named"]["sampling_param_temperature"] == 0.5
    assert by_text["said"]["sampling_param_temperature"] == 1
    row = rows()[0]
    assert (row["finish_reason"], row["num_input_tokens"], row["num_output_tokens"]) == ("stop", 3, 2)
    assert row["total_s"] > 0


def test_prompts_can_be_sent_as_chats(run, model_server):
    run(['"hi"', {"messages": "there"}], "--system", "Be brief.")
    chats = [json.loads(body["messages"]) for body in model_server.bodies]
    said = sorted((system["content"], user["content"]) for system, user in chats)
    assert said == [("Be brief.", "hi"), ("Be brief.", "there")]


def test_every_wrong_row_is_named_before_anything_is_sent(run, model_server, folder):
    wrong = {
        "{": "not JSON",
        "[1]": 'expected a text or an object with "prompt" or "messages", got [1]',
        "{}": 'expected one of "prompt" and "messages", got nothing',
        '{"prompt": "a", "messages": "b"}': "got prompt, messages",
        '{"prompt": 5}': "prompt: expected a text or a list of token ids, got int",
        '{"prompt": []}': "prompt: expected at least one token id",
        '{"prompt": [-1]}': "prompt: expected a text or token ids, got [-1]",
        '""': "prompt: expected a text or token ids, got ''",
        '{"prompt": [true]}': "prompt: expected",
        '{"prompt": "a", "max_token": 5}': "unknown field 'max_token'; did you mean 'max_tokens'?",
        '{"prompt": "a", "temperature": "hot", "top_k": 1.5}': "temperature: expected",
        '{"prompt": "a", "temperature": NaN}': "not JSON",
        '{"prompt": "\\ud800"}': "not JSON",
        '{"prompt": "a", "id": [1]}': "id: expected a text or a whole number, got [1]",
        '{"prompt": "a", "request_id": 5}': "request_id: expected a text",
        '{"messages": [{"role": 5}]}': "messages[0]: expected",
        '{"prompt": "a", "max_tokens": -1}': "max_tokens: expected a number >= 1",
        '{"messages": [{"role": "usr", "content": "a"}]}': "role: expected one of system,",
    }
    code, _, err = run(['"right"', *wrong, '"right"'])
    *lines, last = err.splitlines()
    assert code == 1
    assert last.endswith(f"{len(wrong)} of {len(wrong) + 2} rows of in.jsonl are wrong; nothing was sent")
    for number, (line, expected) in enumerate(zip(lines, wrong.values(), strict=True), start=2):
        assert line.startswith(f"in.jsonl line {number}: ")
        assert expected in line
    assert run(['"a"'], "--temperature", "900")[:2] == (2, "")
    assert model_server.bodies == []
    assert not (folder / "out.jsonl").exists()
    assert run([{"prompt": "a", "top_k": -1, "timeout_ms": 9000}])[0] == 0


def test_a_failed_row_is_a_row_and_the_others_go_on(run, model_server, monkeypatch):
    monkeypatch.setattr(Retries, "delay_s", lambda *_: 0)
    model_server.script(*[Overloaded("full")] * 12)  # which is waited for
    model_server.answer = failing("b")
    code, _, err = run(['"a"', '"b"', '"c"'])
    assert (code, err.partition(" in ")[0]) == (1, "line 2: [E_INTERNAL] no\n3 of 3 rows done, 1 failed; 4 tokens")
    failed = rows()[1]
    assert failed["error"] == {"type": "ServerError", "code": "E_INTERNAL", "message": "no"}
    assert "text" not in failed
    assert texts() == ["A", "E_INTERNAL", "C"]


def test_max_failures_ends_the_batch(run, model_server):
    for refusal in ("E_INTERNAL", "E_UNSUPPORTED"):
        model_server.answer = failing("b", "c", code=refusal)
        code, _, err = run(LINES, "--max-failures", "2", "--concurrency", "1", "--overwrite")
        assert (code, err.partition(";")[0]) == (1, f"line 2: [{refusal}] no\n3 of 6 rows done, 2 failed")
        assert ("the same command with --resume goes on" in err) == (refusal == "E_INTERNAL")
        assert texts() == ["A", refusal, refusal]


def test_a_server_that_is_not_there_fails_the_whole_and_no_row(folder, capsys):
    write(['"a"', '"b"'])
    argv = ["--input", "in.jsonl", "--output", "out.jsonl", "--url", "http://127.0.0.1:9", "--retries", "0"]
    assert main(["generate", *argv]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("deepseek-triton generate: http://127.0.0.1:9: can't connect")
    assert not (folder / "out.jsonl").exists()


def test_a_token_that_is_refused_fails_the_whole_too(run, model_server, folder):
    def refuse(_):
        raise AccessDenied("who are you?")
        yield

    model_server.answer = refuse
    code, _, err = run(['"a"', '"b"'])
    assert (code, len(err.splitlines())) == (1, 1)
    assert not (folder / "out.jsonl").exists()
    model_server.answer = failing("b", code="E_UNAVAILABLE")  # what begins later ends it too
    code, _, err = run(['"a"', '"b"', '"c"'], "--retries", "0", "--concurrency", "1")
    assert (code, texts(), "--resume goes on" in err) == (1, ["A"], True)


def test_a_server_that_comes_back_is_waited_for(run, model_server, monkeypatch):
    monkeypatch.setattr(Retries, "delay_s", lambda *_: 0)
    lost = [ServerError("it loads", code="E_UNAVAILABLE")] * 4

    def answer(body):
        if body["text_input"] == "b" and lost:
            raise lost.pop()
        yield from echo(body)

    model_server.answer = answer
    assert (run(['"a"', '"b"', '"c"'], "--concurrency", "1")[0], texts(), lost) == (0, ["A", "B", "C"], [])


@pytest.mark.parametrize("option", ["--overwrite", "--resume"])
def test_earlier_answers_stay_until_new_ones_are_written(run, model_server, folder, option):
    model_server.answer = failing("b")
    run(['"a"', '"b"'])
    before = (folder / "out.jsonl").read_bytes()
    model_server.answer = failing("a", "b", code="E_UNAVAILABLE")
    assert run(None, option, "--retries", "0")[0] == 1
    assert (folder / "out.jsonl").read_bytes() == before
    model_server.answer = echo
    assert run(None, option)[0] == 0
    assert texts() == ["A", "B"]


def test_an_empty_input_gives_an_empty_output(run, folder):
    (folder / "out.jsonl").write_text("something else")
    assert run([], "--overwrite")[:2] == (0, "")
    assert (folder / "out.jsonl").read_bytes() == b""


@pytest.mark.slow
def test_standard_input_and_output_can_be_used(model_server):
    command = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "generate", "--url", model_server.url]
    command += ["--input", "-", "--output", "-"]
    done = subprocess.run(command, input='"grüß"\n"b"'.encode(), stdout=subprocess.PIPE, check=True)
    assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == ["GRÜSS", "B"]


@pytest.mark.slow
def test_a_reader_that_leaves_ends_it(model_server, folder):
    write([f'"{number}"' for number in range(2000)])
    command = shlex.join(start(model_server, "--output", "-", "--concurrency", "1"))
    done = subprocess.run(["sh", "-c", f"{command} | head -1"], capture_output=True, text=True)
    assert json.loads(done.stdout)["text"] == "0"
    assert "Traceback" not in done.stderr
    assert len(model_server.bodies) < 2000


def test_a_named_pipe_can_be_the_input(run, folder, model_server):
    os.mkfifo("in.jsonl")
    with subprocess.Popen(["sh", "-c", """printf '"a"\\n"b"\\n' > in.jsonl"""]):
        assert run(None)[0] == 0
    assert texts() == ["A", "B"]


def test_an_existing_output_is_kept_unless_overwrite_is_given(run, model_server):
    run(['"a"'])
    code, _, err = run(['"b"'])
    assert code == 2
    assert "out.jsonl is there already: --resume goes on where it ends, --overwrite begins anew" in err
    assert texts() == ["A"]
    assert run(['"b"'], "--overwrite")[0] == 0
    assert texts() == ["B"]


def test_files_that_can_not_be_used_are_said(model_server, folder, capsys):
    write(['"a"'])
    cases = {
        "--input in.jsonl": "--input needs --output",
        "--input in.jsonl --output in.jsonl --overwrite": "are the same file",
        "--input in.jsonl --output - --resume": "--resume needs an --output that can be read again",
        "--input nowhere --output x": "nowhere can't be read: No such file",
        "--input in.jsonl --output no/where": "no/where can't be written: No such file",
        "--input in.jsonl --output x --json": "--json: not with --input",
        "--input in.jsonl --output x --resume --overwrite": "--overwrite: not allowed with argument --resume",
    }
    for argv, expected in cases.items():
        try:
            code = main(["generate", "--url", model_server.url, *argv.split()])
        except SystemExit as ended:
            code = ended.code
        assert code == (1 if "no/where" in argv else 2)
        assert expected in capsys.readouterr().err
    assert model_server.bodies == []
    assert (folder / "in.jsonl").read_text() == '"a"\n'
    assert main(["generate", "--url", model_server.url, "--input", "in.jsonl", "--output", "/dev/full"]) == 1
    assert "/dev/full can't be written: No space left on device\n" in capsys.readouterr().err


LINES = [f'"{prompt}"' for prompt in "abcdef"]


def test_resume_goes_on_where_the_output_ends(run, model_server, folder):
    assert run(LINES, "--resume")[0] == 0  # without an output it begins
    whole = (folder / "out.jsonl").read_bytes()
    assert texts() == list("ABCDEF")
    for kept in (0, 1, 4, 6):
        lines = whole.splitlines(keepends=True)
        # What a kill leaves: some rows, and a part of one.
        (folder / "out.jsonl").write_bytes(b"".join(lines[:kept]) + (lines[kept][:-1] if kept < 6 else b""))
        model_server.requests.clear()
        code, _, err = run(LINES, "--resume")
        assert code == 0
        assert f"6 of 6 rows done{f' ({kept} by an earlier run)' if kept else ''};" in err
        assert sorted(body["text_input"] for body in model_server.bodies) == list("abcdef")[kept:]
        assert texts() == list("ABCDEF")


@pytest.mark.parametrize("code", ["E_INTERNAL", "E_CANCELLED"])
def test_resume_asks_again_what_failed(run, model_server, code):
    model_server.answer = failing("b", "d", "f", code=code)
    assert run(LINES)[0] == 1
    for left, asked in (("df", "bd"), ("f", "df"), ("", "f")):
        model_server.answer = failing(*left, code=code)
        model_server.requests.clear()
        last = [] if left == "f" else ["--max-failures", "1"]
        lines = [*LINES[:5], '"f"' if left else {"prompt": "f"}]  # mended at last
        assert run(lines, "--resume", "--concurrency", "1", *last)[0] == bool(left)
        assert [body["text_input"] for body in model_server.bodies] == list(asked)
        assert texts() == [code if prompt in left else prompt.upper() for prompt in "abcdef"[: 5 if "d" in left else 6]]


def test_resume_refuses_answers_to_something_else(run, model_server, folder):
    run(['"a"', '"b"'])
    before = (folder / "out.jsonl").read_bytes()
    model_server.requests.clear()
    another = "line 2 answers row 2, and the input has another row 2 there: give another --output, or --overwrite"
    mine = {"prompt": "a", "id": "mine"}
    cases = [
        (before, ['"a"', '"x"', '"c"'], another),
        (before, ['"a"'], "out.jsonl line 2 answers row 2, and the input ends before"),
        (before, [mine], "out.jsonl line 1 answers row 1, and the input has another row 'mine'"),
        (b"dear diary\n", LINES, "out.jsonl line 1 is no answer of a batch"),
    ]
    for content, lines, expected in cases:
        (folder / "out.jsonl").write_bytes(content)
        code, _, err = run(lines, "--resume")
        assert (code, expected in err) == (1, True), err
        assert (folder / "out.jsonl").read_bytes() == content
    assert model_server.bodies == []


def stopping_at(prompt):
    def answer(body):
        if body["text_input"] == prompt:
            yield WAIT
        yield from echo(body)

    return answer


def start(model_server, *argv):
    command = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "generate", "--url", model_server.url]
    return [*command, "--input", "in.jsonl", "--output", "out.jsonl", *argv]


@pytest.mark.slow
def test_answers_are_on_disk_when_the_process_is_killed(model_server, folder, run):
    write(LINES)
    model_server.answer = stopping_at("d")
    with subprocess.Popen(start(model_server, "--concurrency", "1"), stderr=subprocess.PIPE) as process:
        assert model_server.waiting.wait(PATIENCE_S)
        process.kill()
        process.wait()
    assert texts() == ["A", "B", "C"]
    model_server.release.set()
    assert run(LINES, "--resume")[0] == 0
    assert texts() == list("ABCDEF")


@pytest.mark.slow
def test_two_runs_do_not_write_one_output(model_server, folder, run):
    write(LINES)
    model_server.answer = stopping_at("d")
    with subprocess.Popen(start(model_server)) as process:
        assert model_server.waiting.wait(PATIENCE_S)
        said = run(LINES, "--resume", "--timeout", "5")[2]
        model_server.release.set()
        assert process.wait(PATIENCE_S) == 0
    assert "out.jsonl is being written by another run" in said
    assert texts() == list("ABCDEF")


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(run, model_server, folder):
    model_server.answer = failing("b", "d")
    run(LINES)
    model_server.answer = stopping_at("d")
    files = ["--input", "in.jsonl", "--output", "out.jsonl", "--concurrency", "1", "--resume"]
    with Terminal("generate", "--url", model_server.url, *files) as terminal:
        assert model_server.waiting.wait(PATIENCE_S)
        terminal.type(CTRL_C)
        terminal.read_until("stopped: 5 of 6 rows done (4 by an earlier run)")
        terminal.read_until("--resume goes on in out.jsonl")
        assert terminal.exit_code() == 130
    assert model_server.gone.wait(PATIENCE_S)
    assert texts() == ["A", "B", "C", "E_INTERNAL", "E", "F"]


def test_without_a_terminal_the_progress_is_a_line_now_and_then(run, monkeypatch):
    monkeypatch.setattr(batch, "StatusLine", partial(StatusLine, 0.0))
    lines = run(LINES)[2].splitlines()
    assert [line.partition(",")[0] for line in lines[:6]] == [f"{number}/6 done" for number in range(1, 7)]
    assert " left" in lines[0]
    assert " left" not in lines[5]
    assert "\x1b" not in "".join(lines)
