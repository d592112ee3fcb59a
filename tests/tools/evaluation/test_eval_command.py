"""`deepseek-triton eval` where lm-eval is not installed; tests/conformance has the runs with it."""

import asyncio
import importlib.util
from functools import partial

import pytest

from deepseek_triton_client import AsyncClient, ModelNotFound
from deepseek_triton_client.testing import FakeServer
from deepseek_triton_tools.cli.eval import TASKS
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.evaluation.run_evaluation import _describe
from deepseek_triton_tools.evaluation.task_data import read_rows
from deepseek_triton_tools.evaluation.tasks.tiny_task import QUESTIONS
from deepseek_triton_tools.tool_errors import ToolError
from support.raw_triton import RawTriton, gateway_before
from tiny_checkpoint import questions as tiny_questions

URL = "http://localhost:1"


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_lm_eval_one_line_says_how_to_get_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", URL, "--task", "tiny"]) == 1
    assert "pip install '.[eval]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(["--task", "tiny", "--data", "x", "--chat"], ["--data is for gsm8k", "--chat is for"], id="all"),
        pytest.param(["--task", "mmlu", "--scorer", "regex"], ["--scorer is for own"], id="scorer"),
        pytest.param(["--task", "mmlu", "--like", "lm-eval"], ["--like lm-eval is for gsm8k"], id="like"),
        pytest.param(["--task", "own", "--n", "2"], ["--n: one answer to each question"], id="n"),
    ],
)
def test_options_without_a_meaning_are_refused(options, expected, capsys):
    assert main(["eval", URL, *options]) == 2
    printed = capsys.readouterr().err
    assert [text in printed for text in expected] == [True] * len(expected)
    assert printed.count("\n") == 1


@pytest.mark.parametrize("argv", [["eval", URL], ["eval", URL, "--task", "tiny", "--task-file", "x"]])
def test_there_is_one_task(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "--task" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "hint"),
    [
        pytest.param("tinny", "there is no task 'tinny'; did you mean tiny?", id="misspelt"),
        pytest.param("arc", "there is no task 'arc'; there are tiny, gsm8k, mmlu, gpqa_diamond, own", id="unknown"),
    ],
)
def test_an_unknown_task_has_a_hint(task, hint, capsys):
    with pytest.raises(SystemExit):
        main(["eval", URL, "--task", task])
    assert hint in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("path", ["", "/v1"])
def test_a_gateway_is_told_from_a_triton_server(path):
    with (
        RawTriton().serving() as triton,
        gateway_before(triton) as address,
        pytest.raises(ToolError, match="eval asks Triton servers, not OpenAI endpoints"),
    ):
        asyncio.run(_describe(partial(AsyncClient, f"{address}{path}")))


def test_a_model_that_triton_lacks_is_named():
    with FakeServer() as server, pytest.raises(ModelNotFound, match="unknown model"):
        asyncio.run(_describe(partial(AsyncClient, server.url, model_name="other")))


def test_the_help_explains_every_task(capsys):
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    printed = capsys.readouterr().out
    assert {task for task in TASKS if f"\n  {task} " not in printed} == set()


@pytest.mark.slow
def test_the_bundled_questions_are_those_of_the_model_card(tmp_path):
    tiny_questions.write(tmp_path / "questions.jsonl")
    assert (tmp_path / "questions.jsonl").read_bytes() == QUESTIONS.read_bytes()
    assert len(read_rows(QUESTIONS, ("id", "accepted"))) == 1534
