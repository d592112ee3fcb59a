"""lm-evaluation-harness scores the tiny model through the gateway as our own client does on the server itself."""

import json
from pathlib import Path

import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer

from conformance.running import TINY
from deepseek_triton_client import Client

TASKS = Path(__file__).with_name("lm_eval_tasks")
CAPITALS = [json.loads(line) for line in (TASKS / "capitals.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def client(tiny_triton):
    with Client(tiny_triton) as client:
        yield client


def evaluate(kind, url, task, model, **model_args):
    """The results of one task. kind: lm-eval's name of the API."""
    config = yaml.safe_load((TASKS / f"{task}.yaml").read_text(encoding="utf-8"))
    config["dataset_kwargs"] = {"data_files": {"test": str(TASKS / "capitals.jsonl")}}
    return simple_evaluate(
        model=kind,
        model_args={"model": model, "base_url": url, "max_retries": 1, **model_args},
        tasks=[config],
        task_manager=TaskManager(include_defaults=False),
        apply_chat_template=kind == "local-chat-completions",
        log_samples=True,
        bootstrap_iters=0,
    )


def test_chat_completions(base_url, model_name, client):
    found = evaluate("local-chat-completions", f"{base_url}/chat/completions", "capitals_chat", model_name)
    said = [
        client.chat([{"role": "user", "content": f"What is the capital of {row['country']}?"}], max_tokens=40).text
        for row in CAPITALS
    ]
    right = [f"The capital of {row['country']} is {row['choices'][0]}." for row in CAPITALS]
    score = sum(text == wanted for text, wanted in zip(said, right, strict=True)) / len(right)
    assert [sample["filtered_resps"][0] for sample in found["samples"]["capitals_chat"]] == said
    assert found["results"]["capitals_chat"]["exact_match,none"] == score
    assert 0.5 < score < 1


@pytest.mark.parametrize("num_concurrent", [1, 4])
def test_completions_from_token_ids(base_url, model_name, client, num_concurrent):
    found = evaluate(
        "local-completions",
        f"{base_url}/completions",
        "capitals_completion",
        model_name,
        num_concurrent=num_concurrent,
        tokenized_requests=False,
    )

    said = [client.generate(f"The capital of {row['country']} is", max_tokens=40, stop=["."]).text for row in CAPITALS]
    assert [sample["filtered_resps"][0] for sample in found["samples"]["capitals_completion"]] == said


def test_choices_by_their_log_probability(base_url, model_name, client):
    """lm-eval finds the gateway's tokenizer, sends token ids, and reads the prompt's log-probabilities."""
    found = evaluate("local-completions", f"{base_url}/completions", "capitals_choice", model_name, batch_size=3)
    tokenizer = Tokenizer.from_file(str(TINY / "tensorrt_llm/1/tiny/tokenizer.json"))

    def logprob_of(country, capital):
        context = tokenizer.encode(f"The capital of {country} is", add_special_tokens=False).ids
        whole = tokenizer.encode(f"The capital of {country} is {capital}", add_special_tokens=False).ids
        answer = client.generate(whole, max_tokens=1, prompt_logprobs=1).answers[0]
        return sum(token[0].logprob for token in answer.prompt_logprobs[len(context) :] if token)

    ours = [[logprob_of(row["country"], choice) for choice in row["choices"]] for row in CAPITALS]
    theirs = [
        [float(response[0]) for response in sample["filtered_resps"]] for sample in found["samples"]["capitals_choice"]
    ]
    for mine, other in zip(ours, theirs, strict=True):
        assert other == pytest.approx(mine, abs=1e-3)
    score = sum(max(row) == row[0] for row in ours) / len(ours)
    assert found["results"]["capitals_choice"]["acc,none"] == score
    assert score > 0.5
