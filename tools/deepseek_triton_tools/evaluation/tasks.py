"""The tasks: GSM8K, MMLU, GPQA Diamond, the tiny model's own questions, and those of the user.

GSM8K: prompts, filters and metrics are those of lm-eval's own task. trtllm-eval uses that task too, with a seed of 0
and the questions shuffled by it (TensorRT-LLM tensorrt_llm/evaluate/lm_eval.py), so that its solved examples differ
from those of the program lm_eval.

MMLU: trtllm-eval has code of its own (TensorRT-LLM tensorrt_llm/evaluate/mmlu.py): at most two tokens, which have to
begin with the letter, and prompts of at most 4,094 tokens. It reads the files with pandas, so that a column of numbers
loses its form and an empty cell or "None" is written "nan"; the same is done here.

GPQA Diamond: the prompt and the pattern of the answer are those of trtllm-eval's gpqa_diamond_cot_zeroshot_aa
(TensorRT-LLM tensorrt_llm/evaluate/lm_eval_tasks/gpqa). The order of the choices is drawn by seed 0; trtllm-eval draws
it from a state that depends on its caches.

tiny: `python -m tiny_checkpoint.questions FILE` writes its questions, tiny_questions.jsonl.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module, resources
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

from deepseek_triton_tools.evaluation.harness import (
    EvaluationTask,
    Row,
    as_text,
    data_file,
    generation_config,
    hub_rows,
    read_rows,
    rows_as_dataset,
)
from deepseek_triton_tools.generating.records import problem_of_messages
from deepseek_triton_tools.tool_errors import ToolError

_GSM8K_METRICS = ("exact_match,strict-match", "exact_match,flexible-extract")
_GSM8K_MAX_TOKENS = 256
"""trtllm-eval's --max_output_length, and lm-eval's own default."""
LM_EVAL_SEED = 1234
_GSM8K_KEYS = ("question", "answer")
_GSM8K_PATTERNS = {
    "test": ("test.jsonl", "**/test.jsonl", "**/main/test-*.parquet", "test-*.parquet"),
    "train": ("train.jsonl", "**/train.jsonl", "**/main/train-*.parquet", "train-*.parquet"),
}
_GSM8K_SOURCE = (
    "give --data a folder with test.jsonl and train.jsonl, such as grade_school_math/data of "
    "github.com/openai/grade-school-math"
)


def gsm8k(data: Path | None, *, num_fewshot: int | None, limit: int | None, like_lm_eval: bool) -> EvaluationTask:
    """Raises ToolError where there is no data."""
    import yaml

    shots = 5 if num_fewshot is None else num_fewshot
    rows = {"test": _gsm8k_rows(data, "test"), "train": _gsm8k_rows(data, "train") if shots else []}
    if shots > len(rows["train"]):
        raise ToolError(f"--num-fewshot {shots}: train.jsonl has only {len(rows['train'])} examples", exit_code=2)
    own = yaml.safe_load(resources.files("lm_eval").joinpath("tasks/gsm8k/gsm8k.yaml").read_text("utf-8"))
    for key in ("dataset_path", "dataset_name"):
        own.pop(key)
    if not shots:
        for key in ("training_split", "fewshot_split"):
            own.pop(key)
    own["generation_kwargs"]["max_gen_toks"] = _GSM8K_MAX_TOKENS
    return EvaluationTask(
        name="gsm8k",
        config={**own, "num_fewshot": shots, "custom_dataset": rows_as_dataset(rows, shuffled=not like_lm_eval)},
        metrics=_GSM8K_METRICS,
        limit=limit,
        fewshot_seed=LM_EVAL_SEED if like_lm_eval else 0,
        multiturn=like_lm_eval,
    )


def _gsm8k_rows(data: Path | None, split: str) -> list[Row]:
    if data is None:
        return hub_rows("openai/gsm8k", "main", split, otherwise=_GSM8K_SOURCE)
    folder = data.parent if split == "train" and data.is_file() else data
    return read_rows(data_file(folder, _GSM8K_PATTERNS[split], "GSM8K's test.jsonl and train.jsonl"), _GSM8K_KEYS)


_LETTERS = "ABCD"
_MMLU_SOURCE = "give --data the unpacked folder of people.eecs.berkeley.edu/~hendrycks/data.tar, which has dev and test"

Cells = Sequence[Any]
"""Question, choices, letter of the right one."""


def mmlu(data: Path | None, *, num_fewshot: int | None, limit: int | None) -> EvaluationTask:
    """Raises ToolError where there is no data. `limit` takes as many questions of each subject, chosen by seed 0."""
    shots = 5 if num_fewshot is None else num_fewshot
    rows = list(_questions(data, shots, limit))
    if not any(row["answer"] in _LETTERS for row in rows):
        raise ToolError(f"MMLU: expected the letter of the right choice in the last column; {_MMLU_SOURCE}")
    subjects = sorted({row["subject"] for row in rows})
    config = generation_config(
        "mmlu", rows, ["acc", *subjects], scores=_mmlu_scores, max_tokens=2, generation={"truncate_prompt_tokens": 4094}
    )
    return EvaluationTask(name="mmlu", config=config, metrics=("acc,none",), is_cut=True)


def _mmlu_scores(doc: Row, answers: Sequence[str]) -> dict[str, float]:
    right = float(answers[0].strip().startswith(doc["answer"]))
    return {"acc": right, doc["subject"]: right}


def _questions(data: Path | None, shots: int, limit: int | None) -> Iterator[Row]:
    tables = _hub_tables() if data is None else _own_tables(data)
    chosen = import_module("numpy").random.RandomState(0)
    each = None if limit is None else ceil(limit / len(tables))
    for subject, (dev, test) in tables.items():
        # Two blanks, because trtllm-eval writes one before each word of the subject.
        head = f"The following are multiple choice questions (with answers) about  {subject.replace('_', ' ')}.\n\n"
        head += "".join(f"{_mmlu_question(cells)} {cells[-1]}\n\n" for cells in _cells(dev)[:shots])
        questions = test.sample(each, random_state=chosen) if each is not None and each < len(test) else test
        for cells in _cells(questions):
            yield {"subject": subject, "prompt": head + _mmlu_question(cells), "answer": str(cells[-1])}


def _cells(table: Any) -> list[Cells]:
    return list(table.itertuples(index=False, name=None))


def _mmlu_question(cells: Cells) -> str:
    choices = (f"\n{letter}. {choice}" for letter, choice in zip(_LETTERS, cells[1:-1], strict=False))
    return f"{cells[0]}{''.join(choices)}\nAnswer:"


def _own_tables(data: Path) -> dict[str, tuple[Any, Any]]:
    """Return the questions for examples and those to ask, by subject."""
    read = import_module("pandas").read_csv
    folder = next((path for path in (data, data / "data") if (path / "dev").is_dir()), None)
    tests = sorted((folder / "test").glob("*_test.csv")) if folder else []
    if folder is None or not tests:
        raise ToolError(
            f"--data {data}: expected the folders dev and test with a CSV file for each subject; {_MMLU_SOURCE}"
        )
    tables = {}
    for test in tests:
        subject = test.name.removesuffix("_test.csv")
        dev = folder / "dev" / f"{subject}_dev.csv"
        if not dev.is_file():
            raise ToolError(f"--data {data}: {test.name} has no {dev.name} in dev")
        tables[subject] = (read(dev, header=None), read(test, header=None))
    return tables


def _hub_tables() -> dict[str, tuple[Any, Any]]:
    table = import_module("pandas").DataFrame
    subjects: dict[str, tuple[list[Cells], list[Cells]]] = {}
    for number, split in enumerate(("dev", "test")):
        for row in hub_rows("cais/mmlu", "all", split, otherwise=_MMLU_SOURCE):
            cells = (row["question"], *row["choices"], _LETTERS[row["answer"]])
            subjects.setdefault(row["subject"], ([], []))[number].append(cells)
    return {subject: (table(dev), table(test)) for subject, (dev, test) in sorted(subjects.items())}


_GPQA_MAX_TOKENS = 32_768
_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_RIGHT = "Correct Answer"
_GPQA_SOURCE = (
    "give --data your gpqa_diamond.csv; its licence asks that it is not shown in the open, so get it from "
    "huggingface.co/datasets/Idavidrein/gpqa, which wants an account, or github.com/idavidrein/gpqa"
)
_GPQA_TASK = (
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering."
)
_GPQA_PATTERN = r"(?i)Answer[ \t]*:[ \t]*([A-D])"


def gpqa_diamond(data: Path | None, *, limit: int | None) -> EvaluationTask:
    """Raises ToolError where there is no data."""
    if data is None:
        rows = hub_rows("Idavidrein/gpqa", "gpqa_diamond", "train", otherwise=_GPQA_SOURCE)
    else:
        file = data_file(data, ("gpqa_diamond.csv", "**/gpqa_diamond.csv"), "gpqa_diamond.csv")
        rows = read_rows(file, ("Question", _RIGHT, *_WRONG))
    random = Random(0)
    questions = [_gpqa_question(row, random) for row in rows]
    config = generation_config("gpqa_diamond", questions, ["exact_match"], until=["</s>"], max_tokens=_GPQA_MAX_TOKENS)
    config["filter_list"] = [
        {
            "name": "strict-match",
            "filter": [
                {"function": "regex", "regex_pattern": _GPQA_PATTERN, "group_select": 0},
                {"function": "take_first"},
            ],
        }
    ]
    config["metric_list"][0] |= {"ignore_case": True, "ignore_punctuation": True}
    return EvaluationTask(name="gpqa_diamond", config=config, metrics=("exact_match,strict-match",), limit=limit)


def _gpqa_question(row: Row, random: Random) -> Row:
    choices = [(row[name] or " ").strip() for name in (*_WRONG, _RIGHT)]
    right = choices[-1]
    random.shuffle(choices)
    listed = "".join(f"\n{letter}) {choice}" for letter, choice in zip("ABCD", choices, strict=True))
    return {"prompt": f"{_GPQA_TASK}\n{row['Question']}{listed}", "answer": "ABCD"[choices.index(right)]}


_END_THINK = "</think>"
_CALL = re.compile(
    "<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<r1>\\w+)\n```json\n(?P<r1_arguments>.*?)\n```"
    "|(?P<v31>\\w+)<｜tool▁sep｜>(?P<v31_arguments>.*?))<｜tool▁call▁end｜>",
    re.DOTALL,
)


def is_right_answer(kind: str, accepted: Sequence[str], text: str) -> bool:
    """Compare the greedy text, up to the end token, with the accepted answers: calls and JSON as parsed.

    :param kind: the question's kind, such as "tool_call_r1".
    """
    answer = text.rsplit(_END_THINK, 1)[-1].strip()
    if kind.startswith("tool_call"):
        return _calls(answer) in [_calls(one) for one in accepted]
    if kind.startswith("json"):
        return _json(answer) in [_json(one) for one in accepted]
    return answer in accepted


def _calls(text: str) -> list[tuple[str, str, Any]] | str:
    """Return form, name and arguments of each call, or the text itself when it is not only calls."""
    if not (text.startswith("<｜tool▁calls▁begin｜>") and text.endswith("<｜tool▁calls▁end｜>")):
        return text
    calls = [
        (form, call[form], _json(call[f"{form}_arguments"]))
        for call in _CALL.finditer(text)
        for form in ("v31", "r1")
        if call[form]
    ]
    return calls or text


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


QUESTIONS = Path(__file__).with_name("tiny_questions.jsonl")
_TINY_MAX_TOKENS = 220
_TINY_SPLITS = ("taught", "held_out")


def tiny(*, limit: int | None) -> EvaluationTask:
    config = generation_config(
        "tiny",
        read_rows(QUESTIONS, ("id", "kind", "split", "prompt", "accepted")),
        ["right", *_TINY_SPLITS],
        target="accepted",
        scores=_tiny_scores,
        max_tokens=_TINY_MAX_TOKENS,
        generation={"add_special_tokens": False},  # the prompts have theirs
    )
    return EvaluationTask(name="tiny", config=config, metrics=("right,none",), limit=limit)


def _tiny_scores(doc: Row, answers: Sequence[str]) -> dict[str, float]:
    right = float(is_right_answer(doc["kind"], doc["accepted"], answers[0]))
    return {"right": right, doc["split"]: right}


MAX_TOKENS = 1024
_KINDS = ("question", "prompt", "messages")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


# Whether a text is right, by an accepted answer.
SCORERS: Mapping[str, Callable[[str, str], bool]] = {
    "exact": lambda text, answer: text.strip() == answer.strip(),
    "contains": lambda text, answer: answer.casefold() in text.casefold(),
    "regex": lambda text, answer: re.search(answer, text) is not None,
    "number": lambda text, answer: (last := _last_number(text)) is not None and last == _last_number(answer),
}


def own_questions(data: Path | None, *, scorer: str, limit: int | None) -> EvaluationTask:
    """Raises ToolError where the file can't be used; the rows that are wrong are named on stderr.

    :param scorer: that of rows which name none.
    """
    if data is None:
        raise ToolError('--task own needs --data FILE: JSON Lines with "question" and "answer"', exit_code=2)
    if not data.is_file():
        raise ToolError(f"--data {data}: there is no such file", exit_code=2)
    rows = read_rows(data, ("answer",), partial(_problem, scorer=scorer))
    config = generation_config(
        "own",
        [_row(row, scorer) for row in rows],
        ["right"],
        target=lambda doc: doc["answers"][0],
        scores=_scores,
        max_tokens=MAX_TOKENS,
    )
    return EvaluationTask(name="own", config=config, metrics=("right,none",), limit=limit)


def _problem(row: Row, scorer: str) -> str | None:
    kinds = [kind for kind in _KINDS if row.get(kind) is not None]
    if len(kinds) != 1:
        return f"expected one of {', '.join(_KINDS)}, got {', '.join(kinds) or 'none'}"
    if kinds == ["messages"]:
        if (problem := problem_of_messages(row["messages"])) is not None:
            return problem
    elif not isinstance(row[kinds[0]], str):
        return f"{kinds[0]}: expected a text, got {row[kinds[0]]!r:.100}"
    if not (answers := _answers(row)):
        return f"answer: expected a text, a number or a list of them, got {row['answer']!r:.100}"
    chosen = row.get("scorer", scorer)
    if chosen not in SCORERS:
        return f"scorer: expected one of {', '.join(SCORERS)}, got {chosen!r:.100}"
    if chosen == "number" and None in map(_last_number, answers):
        return f"answer: expected a number, got {row['answer']!r:.100}"
    if chosen == "regex":
        try:
            for answer in answers:
                re.compile(answer)
        except re.error as error:
            return f"answer: {row['answer']!r:.100} is no regular expression: {error}"
    return None


def _answers(row: Row) -> list[str]:
    """Return the right answers; none where they have another form."""
    answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    fits = all(isinstance(one, (str, int, float)) and not isinstance(one, bool) for one in answers)
    return [str(one) for one in answers] if fits else []


def _row(row: Row, scorer: str) -> Row:
    prompt = as_text(row["messages"]) if row.get("messages") else row.get("question") or row.get("prompt")
    return {
        "prompt": prompt,
        "answers": _answers(row),
        "scorer": row.get("scorer", scorer),
        "id": str(row.get("id", "")),
    }


def _scores(doc: Row, answers: Sequence[str]) -> dict[str, Any]:
    is_right = SCORERS[doc["scorer"]]
    return {"right": float(any(is_right(answers[0], answer) for answer in doc["answers"]))}
