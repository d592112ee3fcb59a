"""`deepseek-triton eval` on the tiny model under a real tritonserver."""

import json
import re
from pathlib import Path

import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from conformance.running import ROOT, TINY
from deepseek_triton_tools.cli.main import main

TASKS = Path(__file__).with_name("lm_eval_tasks")
CARD = TINY / "tensorrt_llm/1/tiny/README.md"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def summary(folder):
    return json.loads(Path(folder, "summary.json").read_text("utf-8"))


def test_the_tiny_model_gets_the_score_of_its_card(tiny_triton, capsys):
    """The page shows the same run."""
    assert main(["eval", tiny_triton, "--task", "tiny", "--fail-below-band"]) == 0
    found = summary("eval-tiny")
    cells = re.search(r"^\| all \| 888 / 646 \| ([\d.]+) / ([\d.]+) ", CARD.read_text("utf-8"), re.MULTILINE)
    assert cells is not None
    splits = [f"{found['breakdown'][split]:.1f}" for split in ("taught", "held_out")]
    assert splits == list(cells.groups())
    assert (found["num_questions"], found["passed"], found["truncated"], found["failed"]) == (1534, True, 0, 0)
    assert capsys.readouterr().out.rstrip() in (ROOT / "docs/eval.md").read_text("utf-8")
    assert main(["eval", tiny_triton, "--task", "tiny"]) == 0
    assert (summary("eval-tiny")["kept"], summary("eval-tiny")["score"]) == (1534, found["score"])


@pytest.mark.parametrize("chat", [False, True])
def test_own_questions(chat, tiny_triton):
    rows = [
        {"question": "What is the capital of France?", "answer": "The capital of France is Paris."},
        {"messages": [{"role": "user", "content": "What is 47 + 38?"}], "answer": 85, "scorer": "number"},
        {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "answer": "five", "scorer": "contains"},
    ]
    Path("own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    thinking = ["--chat-template-kwargs", '{"thinking": true}', "--chat"] if chat else []
    assert main(["eval", tiny_triton, "--task", "own", "--data", "own.jsonl", *thinking]) == 0
    samples = [json.loads(line) for line in Path("eval-own/samples_own.jsonl").read_text("utf-8").splitlines()]
    rights = [sample["right"] for sample in samples]
    assert rights[2] == 0
    if chat:
        assert rights == [1, 1, 0]
        assert summary("eval-own")["thought"] == 3


def test_likelihoods_are_those_of_lm_evals_own_client(tiny_triton, base_url, model_name):
    """lm-eval asks the gateway with the tokenizer at its side; we ask the server, whose tokenizer counts."""
    config = yaml.safe_load((TASKS / "capitals_choice.yaml").read_text("utf-8"))
    config["dataset_kwargs"] = {"data_files": {"test": str(TASKS / "capitals.jsonl")}}
    Path("choice.yaml").write_text(yaml.safe_dump(config))
    assert main(["eval", tiny_triton, "--task-file", "choice.yaml", "--no-add-special-tokens"]) == 0
    theirs = simple_evaluate(
        model="local-completions",
        model_args={"model": model_name, "base_url": f"{base_url}/completions", "max_retries": 1},
        tasks=[config],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    lines = Path("eval-choice/samples_capitals_choice.jsonl").read_text("utf-8").splitlines()
    ours = {sample["doc"]["country"]: sample["filtered_resps"] for sample in map(json.loads, lines)}
    for sample in theirs["samples"]["capitals_choice"]:
        for (logprob, is_greedy), mine in zip(sample["filtered_resps"], ours[sample["doc"]["country"]], strict=True):
            assert float(mine[0]) == pytest.approx(float(logprob), abs=1e-3)
            assert bool(mine[1]) == bool(is_greedy)
    assert summary("eval-choice")["num_questions"] == len(ours)
