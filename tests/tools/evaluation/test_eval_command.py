"""`deepseek-triton eval` where lm-eval is not installed; tests/conformance has the runs with it."""

import asyncio
import importlib.util
from functools import partial

import pytest

from deepseek_triton_client import AsyncClient, ModelNotFound
from deepseek_triton_client.testing import FakeServer
from deepseek_triton_tools.cli.main import main
from deepseek_triton_tools.evaluation.harness import read_rows
from deepseek_triton_tools.evaluation.run_evaluation import _describe
from deepseek_triton_tools.evaluation.tasks import QUESTIONS
from support.raw_triton import RawTriton, gateway_before
from tiny_checkpoint import questions as tiny_questions

URL = "http://localhost:1"


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_lm_eval_one_line_says_how_to_get_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", URL, "--task", "tiny"]) == 1
    assert "pip install '.[eval]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_is_refused(capsys, subtests):
    without_a_meaning = {
        ("tiny", "--data", "x", "--chat"): ["--data is for gsm8k", "--chat is for"],
        ("mmlu", "--scorer", "regex", "--like", "lm-eval"): ["--scorer is for own", "--like lm-eval is for gsm8k"],
        ("gsm8k", "--chat-template-kwargs", '{"thinking": true}'): ["--chat-template-kwargs goes with --chat"],
        ("own", "--set", "n=2"): ["--set n: one answer to each question"],
    }
    for words, expected in without_a_meaning.items():
        with subtests.test(" ".join(words)):
            assert main(["eval", URL, "--task", *words]) == 2
            printed = capsys.readouterr().err
            assert [text for text in expected if text not in printed] == []
            assert printed.count("\n") == 1
    no_one_task = {
        (): "--task",
        ("--task", "tiny", "--task-file", "x"): "--task",
        ("--task", "tinny"): "there is no task 'tinny'; did you mean tiny?",
        ("--task", "arc"): "there is no task 'arc'; there are tiny, gsm8k, mmlu, gpqa_diamond, own",
    }
    for words, expected in no_one_task.items():
        with subtests.test(" ".join(words)):
            with pytest.raises(SystemExit, match="2"):
                main(["eval", URL, *words])
            assert expected in capsys.readouterr().err


def test_a_gateway_is_told_from_a_triton_server():
    with RawTriton().serving() as triton, gateway_before(triton) as address:
        with pytest.raises(ModelNotFound, match=f"write {address}/v1"):
            asyncio.run(_describe(partial(AsyncClient, address)))
        info = asyncio.run(_describe(partial(AsyncClient, f"{address}/v1")))
        assert (info["name"], [text[:3] for text in info["versions"]]) == ("tiny", ["fp_"])
    with FakeServer() as server, pytest.raises(ModelNotFound):
        asyncio.run(_describe(partial(AsyncClient, server.url, model_name="other")))


@pytest.mark.slow
def test_the_bundled_questions_are_those_of_the_model_card(tmp_path):
    tiny_questions.write(tmp_path / "questions.jsonl")
    assert (tmp_path / "questions.jsonl").read_bytes() == QUESTIONS.read_bytes()
    assert len(read_rows(QUESTIONS, ("id", "accepted"))) == 1894
