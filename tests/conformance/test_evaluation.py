"""`deepseek-triton eval` on the tiny model under a real tritonserver, and lm-evaluation-harness through the gateway."""

import json
import re
from pathlib import Path

import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from conformance.running import ROOT, TINY
from deepseek_triton_client import Client
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
    cells = re.search(r"^\| all \| 1088 / 806 \| ([\d.]+) / ([\d.]+) ", CARD.read_text("utf-8"), re.MULTILINE)
    assert cells is not None
    splits = [f"{found['breakdown'][split]:.1f}" for split in ("taught", "held_out")]
    assert splits == list(cells.groups())
    assert (found["num_questions"], found["passed"], found["truncated"], found["failed"]) == (1894, True, 0, 0)
    assert capsys.readouterr().out.rstrip() in (ROOT / "docs/eval.md").read_text("utf-8")
    assert main(["eval", tiny_triton, "--task", "tiny"]) == 0
    assert (summary("eval-tiny")["kept"], summary("eval-tiny")["score"]) == (1894, found["score"])


# --- lm-eval itself, through the gateway ---


def lm_eval(kind, base_url, task, model, **model_args):
    """The results of one task. kind: lm-eval's name of the API."""
    path = "chat/completions" if kind == "local-chat-completions" else "completions"
    return simple_evaluate(
        model=kind,
        model_args={"model": model, "base_url": f"{base_url}/{path}", "max_retries": 1, **model_args},
        tasks=[config_of(task)],
        task_manager=TaskManager(include_defaults=False),
        apply_chat_template=kind == "local-chat-completions",
        bootstrap_iters=0,
    )


def config_of(task):
    config = yaml.safe_load((TASKS / f"{task}.yaml").read_text("utf-8"))
    return config | {"dataset_kwargs": {"data_files": {"test": str(TASKS / "capitals.jsonl")}}}


def test_lm_eval_gets_what_our_client_gets_of_the_server(base_url, model_name, tiny_triton):
    capitals = [json.loads(line) for line in (TASKS / "capitals.jsonl").read_text("utf-8").splitlines()]
    with Client(tiny_triton) as client:
        chats = [client.chat(f"What is the capital of {row['country']}?", max_tokens=40).text for row in capitals]
        prompts = [f"The capital of {row['country']} is" for row in capitals]
        texts = [client.generate(prompt, max_tokens=40, stop=["."]).text for prompt in prompts]
    found = lm_eval("local-chat-completions", base_url, "capitals_chat", model_name)
    assert [sample["filtered_resps"][0] for sample in found["samples"]["capitals_chat"]] == chats
    right = [f"The capital of {row['country']} is {row['choices'][0]}." for row in capitals]
    score = sum(map(str.__eq__, chats, right)) / len(right)
    assert found["results"]["capitals_chat"]["exact_match,none"] == score
    assert 0.5 < score < 1
    options = {"num_concurrent": 4, "tokenized_requests": False}
    found = lm_eval("local-completions", base_url, "capitals_completion", model_name, **options)
    assert [sample["filtered_resps"][0] for sample in found["samples"]["capitals_completion"]] == texts


def test_likelihoods_are_those_of_lm_evals_own_client(tiny_triton, base_url, model_name):
    """lm-eval asks the gateway with the tokenizer at its side; we ask the server, whose tokenizer counts."""
    Path("choice.yaml").write_text(yaml.safe_dump(config_of("capitals_choice")))
    assert main(["eval", tiny_triton, "--task-file", "choice.yaml", "--set", "add_special_tokens=false"]) == 0
    theirs = lm_eval("local-completions", base_url, "capitals_choice", model_name, batch_size=3)
    lines = Path("eval-choice/samples_capitals_choice.jsonl").read_text("utf-8").splitlines()
    ours = {sample["doc"]["country"]: sample["filtered_resps"] for sample in map(json.loads, lines)}
    for sample in theirs["samples"]["capitals_choice"]:
        for (logprob, is_greedy), mine in zip(sample["filtered_resps"], ours[sample["doc"]["country"]], strict=True):
            assert float(mine[0]) == pytest.approx(float(logprob), abs=1e-3)
            assert bool(mine[1]) == bool(is_greedy)
    assert summary("eval-choice")["num_questions"] == len(ours)
    assert theirs["results"]["capitals_choice"]["acc,none"] > 0.5
