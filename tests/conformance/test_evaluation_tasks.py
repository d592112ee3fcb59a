"""Each task of `deepseek-triton eval`: its prompts are trtllm-eval's, and its scores lm-eval's, on recorded answers."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

import datasets
import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from conformance.recorded_server import NO_LOGPROBS, RecordedServer
from deepseek_triton_client import InvalidRequest, Overloaded
from deepseek_triton_tools.cli.main import main
from support.waiting import PATIENCE_S

DATA = Path(__file__).with_name("evaluation_data")
TASKS = Path(__file__).with_name("lm_eval_tasks")
GSM8K = ("--task", "gsm8k", "--data", DATA / "gsm8k")
RECORDED = [json.loads(line) for line in (DATA / "gsm8k_answers.jsonl").read_text("utf-8").splitlines()]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def eval_(server, *options, code=0):
    assert main(["eval", server.url, *map(str, options)]) == code


def samples(task):
    return [json.loads(line) for line in Path(f"eval-{task}/samples_{task}.jsonl").read_text("utf-8").splitlines()]


def summary(task):
    return json.loads(Path(f"eval-{task}/summary.json").read_text("utf-8"))


def recorded_answer(prompt):
    """The answer to the last question of a prompt."""
    [found] = [row["text"] for row in RECORDED if prompt.endswith(f"Question: {row['question']}\nAnswer:")]
    return str(found)


class RecordedLM(LM):
    """The same answers in lm-eval's own hands, as its models cut them."""

    def __init__(self):
        super().__init__()
        self.prompts = []

    def generate_until(self, requests):
        self.prompts = [request.args[0] for request in requests]
        texts = []
        for request in requests:
            text = recorded_answer(request.args[0]).rpartition("</think>")[2]
            for stop in request.args[1]["until"]:
                text = text.partition(stop)[0]
            texts.append(text)
        return texts

    def loglikelihood(self, requests):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def lm_evals_gsm8k():
    """lm-eval's own task, which reads the same files with its own loader."""
    files = {split: str(DATA / f"gsm8k/{split}.jsonl") for split in ("train", "test")}
    config = yaml.safe_load(resources.files("lm_eval").joinpath("tasks/gsm8k/gsm8k.yaml").read_text("utf-8"))
    config |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
    return list(TaskManager(include_defaults=False).load([config])["tasks"].values())


@pytest.mark.sample
def test_gsm8k_is_lm_evals_own_question_by_question():
    lm = RecordedLM()
    expected = simple_evaluate(model=lm, tasks=lm_evals_gsm8k(), bootstrap_iters=0)
    with RecordedServer(recorded_answer) as server:
        eval_(server, "--task", "gsm8k", "--like", "lm-eval", "--data", DATA / "gsm8k")
        assert sorted(server.prompts) == sorted(lm.prompts)
    found = {(sample["doc"]["question"], sample["filter"]): sample["exact_match"] for sample in samples("gsm8k")}
    theirs = expected["samples"]["gsm8k"]
    assert found == {(sample["doc"]["question"], sample["filter"]): sample["exact_match"] for sample in theirs}
    results = json.loads(Path("eval-gsm8k/results.json").read_text("utf-8"))["results"]["gsm8k"]
    for name in ("exact_match,strict-match", "exact_match,flexible-extract"):
        assert results[name] == expected["results"]["gsm8k"][name]
    for row in RECORDED:  # strict and flexible differ
        assert found[row["question"], "strict-match"] == row["strict"], row
        assert found[row["question"], "flexible-extract"] == row["flexible"], row
    right = [sum(row[name] for row in RECORDED) / len(RECORDED) for name in ("strict", "flexible")]
    assert [score["value"] / 100 for score in summary("gsm8k")["scores"]] == pytest.approx(right)
    assert summary("gsm8k")["score"] == pytest.approx(100 * sum(right) / 2)
    assert summary("gsm8k")["thought"] == 2


@pytest.mark.sample
def test_gsm8k_asks_what_trtllm_eval_asks():
    """It seeds the examples with 0, and shuffles the questions by 0 after lm-eval has made the task."""
    [task] = lm_evals_gsm8k()
    task.set_fewshot_seed(seed=0)
    for split in task.dataset:
        task.dataset[split] = task.dataset[split].shuffle(0)
    task.build_all_requests()
    with RecordedServer(recorded_answer) as server:
        eval_(server, *GSM8K, "--concurrency", 1)
        assert server.prompts == [instance.args[0] for instance in task.instances]
        params = next(request.params for request in server.requests if "task" not in request.body)
    assert (params.max_tokens, params.temperature) == (256, 0.0)
    assert list(params.stop or ()) == ["Question:", "</s>", "<|im_end|>"]


def test_the_fields_of_the_command_line_win():
    """The deployment guide's line: temperature 0, without special tokens, in our spelling."""
    with RecordedServer(recorded_answer) as server:
        options = [
            "--set",
            "add_special_tokens=false",
            "--temperature",
            "0",
            "--max-tokens",
            "99",
            "--num-fewshot",
            "2",
        ]
        eval_(server, *GSM8K, "--limit", 3, *options)
        params = [request.params for request in server.requests if "task" not in request.body]
        assert [prompt.count("Question:") for prompt in server.prompts] == [3, 3, 3]
    assert {(each.max_tokens, each.add_special_tokens) for each in params} == {(99, False)}


MMLU_PROMPT = """\
The following are multiple choice questions (with answers) about  abstract algebra.

Find all c in Z_3 such that c is even.
A. 0
B. 1
C. 2.0
D. 3
Answer: B

What is "x", if x = 2?
A. 1
B. 2
C. 3.0
D. 4
Answer: B

Is a group closed?
A. yes
B. no
C. nan
D. both
Answer: A

Order of e?
A. 1
B. 2
C. 3.0
D. 4
Answer: A

Order of Z_4?
A. 1
B. 2
C. 3.0
D. 4
Answer: D

Statement 1 | Every set, with no law. Statement 2 | None.
A. True, True
B. False, False
C. nan
D. False, True
Answer:"""


@pytest.mark.sample
def test_mmlu_asks_and_scores_as_trtllm_eval_does():
    """Five examples, two blanks before the subject, and numbers as pandas reads them."""

    def answer(prompt):
        return " B" if "Statement 1" in prompt else "C." if "How many?" in prompt else " A D"

    with RecordedServer(answer, finish_reason="length") as server:
        eval_(server, "--task", "mmlu", "--data", DATA / "mmlu", "--concurrency", 1)
        assert server.prompts[0] == MMLU_PROMPT
        assert len(server.prompts) == 5
        assert server.prompts[4].startswith(
            "The following are multiple choice questions (with answers) about  us foreign policy.\n\n"
        )
        assert server.prompts[4].endswith("When?\nA. 1.5\nB. 2\nC. 3\nD. 4\nAnswer:")
        params = server.requests[-1].params
    assert (params.max_tokens, params.truncate_prompt_tokens, params.stop) == (2, 4094, None)
    found = summary("mmlu")
    assert found["score"] == pytest.approx(60)
    assert found["breakdown"] == {"abstract_algebra": pytest.approx(200 / 3), "us_foreign_policy": 50}
    assert not [note for note in found["notes"] if "cut off" in note]


def test_a_limit_takes_as_many_of_each_subject_as_pandas_draws_with_seed_0():
    import numpy
    import pandas

    numpy.random.seed(0)
    drawn = [
        f"{question}\n"
        for subject in ("abstract_algebra", "us_foreign_policy")
        for question in pandas.read_csv(DATA / f"mmlu/test/{subject}_test.csv", header=None).sample(1)[0]
    ]
    with RecordedServer(lambda prompt: "A") as server:
        eval_(server, "--task", "mmlu", "--data", DATA / "mmlu", "--limit", 2, "--num-fewshot", 0)
        asked = sorted(prompt.partition("\n\n")[2] for prompt in server.prompts)
    assert [question.startswith(start) for question, start in zip(asked, sorted(drawn), strict=True)] == [True, True]


GPQA_TASK = (
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering.\n"
)


@pytest.mark.sample
def test_gpqa_asks_and_scores_as_trtllm_eval_does():
    def answer(prompt):
        [right] = [line[0] for line in prompt.splitlines() if line[3:] in ("blue", "7", "iron")]
        return f"Some thought.\nanswer : {right}" if "metal" not in prompt else "It is iron."

    with RecordedServer(answer, name="deepseek-r1-fp4") as server:
        eval_(server, "--task", "gpqa_diamond", "--data", DATA / "gpqa_diamond.csv", "--chat", "--concurrency", 1)
        sky = server.prompts[0].splitlines()
        assert server.prompts[0].startswith(f"{GPQA_TASK}What colour has the sky?\nBy day, that is.\nA) ")
        assert sorted(line[3:] for line in sky[3:]) == ["black, mostly", "blue", "green", "red"]
        assert [line[:3] for line in sky[3:]] == ["A) ", "B) ", "C) ", "D) "]
        assert server.requests[-1].params.max_tokens == 32768
        assert all(request.messages for request in server.requests if "task" not in request.body)
    assert {sample["arguments"][0][0][0]["role"] for sample in samples("gpqa_diamond")} == {"user"}
    found = summary("gpqa_diamond")
    assert found["score"] == pytest.approx(200 / 3)
    [verdict] = found["verdicts"]
    assert (verdict["reference"], verdict["passed"]) == (70.45, True)
    assert any("wider" in note for note in found["notes"])


def test_without_data_one_line_says_where_to_get_it(capsys):
    """The tests run with HF_HUB_OFFLINE and an empty cache."""
    Path("empty").mkdir()
    with RecordedServer(str) as server:
        for task in ("gsm8k", "mmlu", "gpqa_diamond"):
            eval_(server, "--task", task, code=1)
            eval_(server, "--task", task, "--data", "empty", code=1)
            lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("loading")]
            assert ["--data" in lines[0], "--data empty: expected" in lines[1], len(lines)] == [True, True, 2]
        assert server.prompts == []


def test_data_comes_from_the_hugging_face_cache_where_there_is_no_network(tmp_path):
    """The cache is made as a download makes it: Arrow files under the dataset's name."""
    made = tmp_path / "made"
    files = {split: str(DATA / f"gsm8k/{split}.jsonl") for split in ("train", "test")}
    datasets.load_dataset("json", data_files=files, cache_dir=str(made))
    [info] = made.glob("json/*/*/*/dataset_info.json")
    cached = tmp_path / "home/datasets/openai___gsm8k/main/0.0.0" / info.parent.name
    shutil.copytree(info.parent, cached)
    named = (cached / info.name).read_text("utf-8").replace('"config_name": "default"', '"config_name": "main"')
    (cached / info.name).write_text(named.replace('"dataset_name": "json"', '"dataset_name": "gsm8k"'), "utf-8")
    for file in cached.glob("json-*.arrow"):
        file.rename(cached / file.name.replace("json-", "gsm8k-"))
    with RecordedServer(recorded_answer) as server:
        run = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "eval", server.url, "--task", "gsm8k"]
        offline = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(run, env=offline, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert len(server.prompts) == len(RECORDED)
    assert done.stderr.splitlines() == ["loading lm-eval, which takes up to ten seconds"]


def test_own_questions_in_every_form():
    rows = [
        {"question": "2 + 2?", "answer": 4, "scorer": "number"},
        {"prompt": "2 + 2 =", "answer": ["four", "The answer to 2 + 2 ="]},
        {"messages": [{"role": "user", "content": "Capital of France?"}], "answer": "france", "scorer": "contains"},
        {"question": "Say A.", "answer": "^B$", "scorer": "regex"},
    ]
    Path("own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with RecordedServer(lambda asked: f"The answer to {asked}") as server:
        eval_(server, "--task", "own", "--data", "own.jsonl", "--concurrency", 1)
        assert [bool(request.messages) for request in server.requests[1:]] == [False, False, True, False]
    assert [sample["right"] for sample in samples("own")] == [0, 1, 1, 0]
    with RecordedServer(lambda asked: f"The answer to {asked}") as server:
        options = ["--chat", "--system", "Be brief.", "--chat-template-kwargs", '{"thinking": true}', "--overwrite"]
        eval_(server, "--task", "own", "--data", "own.jsonl", *options)
        asked = [request.messages for request in server.requests[1:]]
        assert {request.body["chat_template_kwargs"] for request in server.requests[1:]} == {'{"thinking": true}'}
    assert [[message["role"] for message in messages] for messages in asked] == [["system", "user"]] * 4
    assert {messages[1]["content"] for messages in asked} == {"2 + 2?", "2 + 2 =", "Capital of France?", "Say A."}


def test_failed_questions_are_never_wrong_answers(capsys):
    def broken(prompt):
        if "no number" in prompt.rpartition("Question:")[2]:
            raise InvalidRequest("too long", code="E_PROMPT_TOO_LONG")
        return recorded_answer(prompt)

    with RecordedServer(broken) as server:
        eval_(server, *GSM8K, code=1)
        assert "1 of 22 questions failed" in capsys.readouterr().err
        assert not Path("eval-gsm8k/summary.json").exists()
        num_asked = len(server.prompts)
        eval_(server, *GSM8K, "--allow-failed", 1)
        assert len(server.prompts) == num_asked + 1
    found = summary("gsm8k")
    assert (found["failed"], found["kept"], found["num_questions"]) == (1, 21, 22)
    assert any("1 questions failed and count as wrong" in note for note in found["notes"])


def test_a_full_server_is_asked_again_and_truncated_answers_are_counted():
    refused = set()

    def full_at_first(prompt):
        if prompt not in refused:
            refused.add(prompt)
            raise Overloaded("full")
        return recorded_answer(prompt)

    with RecordedServer(full_at_first, finish_reason="length") as server:
        eval_(server, *GSM8K, "--limit", 3)
        assert len(server.prompts) == 6
    found = summary("gsm8k")
    assert (found["failed"], found["truncated"]) == (0, 3)
    assert any("3 of 3 answers were cut off" in note for note in found["notes"])


def test_the_exit_code_follows_the_band_where_that_is_asked_for(capsys):
    with RecordedServer(recorded_answer) as server:
        eval_(server, *GSM8K, "--json")
        printed = json.loads(capsys.readouterr().out)
        assert (printed["schema"], printed["passed"]) == ("deepseek-triton/eval/1", False)
        eval_(server, *GSM8K, "--json", "--fail-below-band", code=1)
        eval_(server, *GSM8K, "--json", "--fail-below-band", "--pass-at", 50)
    with RecordedServer(recorded_answer, name="my-model") as server:
        eval_(server, *GSM8K, "--json", "--fail-below-band", code=2)
        assert "no accuracy of my-model" in capsys.readouterr().err
        assert server.prompts == []
    with RecordedServer(recorded_answer, name="deepseek-v3") as server:  # another model's answers are not taken
        eval_(server, *GSM8K, code=1)
        assert "name was 'deepseek-r1' and is 'deepseek-v3'" in capsys.readouterr().err
        eval_(server, *GSM8K, "--overwrite")


def test_a_group_of_tasks_is_reported_task_by_task():
    for name in ("capitals_chat", "capitals_completion"):
        text = (TASKS / f"{name}.yaml").read_text("utf-8")
        data = f"dataset_kwargs:\n  data_files:\n    test: {TASKS / 'capitals.jsonl'}\n"
        Path(f"{name}.yaml").write_text(text + data)
    Path("capitals.yaml").write_text("group: capitals\ntask: [capitals_chat, capitals_completion]\n")
    with RecordedServer(lambda prompt: " Paris" if "France" in prompt else " Rome") as server:
        eval_(server, "--task-file", "capitals.yaml")
    found = summary("capitals")
    values = {score["name"]: score["value"] for score in found["scores"]}
    assert values["capitals_completion exact_match,none"] == 20
    assert (found["score"], found["num_questions"]) == (10, 20)


def test_a_file_that_is_no_task_is_one_line(capsys):
    with RecordedServer(str) as server:
        for text in ("task: [", "- a", "task: x\ndataset_path: json\n"):
            Path("wrong.yaml").write_text(text)
            eval_(server, "--task-file", "wrong.yaml", code=1)
            assert "lm-eval can't load wrong" in capsys.readouterr().err.splitlines()[-1]


def test_a_run_that_was_interrupted_goes_on(tmp_path):
    def slow(prompt):
        if len(server.prompts) > 5:
            server.hold.wait()
        return recorded_answer(prompt)

    options = ["--task", "gsm8k", "--data", str(DATA / "gsm8k"), "--concurrency", "1"]
    with RecordedServer(slow) as server:
        run = [sys.executable, "-m", "deepseek_triton_tools.cli.main", "eval", server.url, *options]
        process = subprocess.Popen(run, stderr=subprocess.PIPE, text=True)
        kept = tmp_path / "eval-gsm8k/answers.jsonl"
        while process.poll() is None and (not kept.exists() or kept.read_text().count("\n") < 6):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=PATIENCE_S)
        server.hold.set()
        assert process.returncode == 130
        assert "the same command goes on" in printed
        assert "Traceback" not in printed
    with RecordedServer(recorded_answer) as server:
        eval_(server, *options)
        assert len(server.prompts) == len(RECORDED) - 5
    assert summary("gsm8k")["kept"] == 5


def test_likelihood_is_refused_with_the_engines_reason(capsys):
    file = Path("choice.yaml")
    text = (TASKS / "capitals_choice.yaml").read_text("utf-8")
    file.write_text(f"{text}dataset_kwargs:\n  data_files:\n    test: {TASKS / 'capitals.jsonl'}\n")
    with RecordedServer(str) as server:
        eval_(server, "--task-file", file, code=1)
        assert server.prompts == []
    assert f"prompt_logprobs: {NO_LOGPROBS}" in capsys.readouterr().err
