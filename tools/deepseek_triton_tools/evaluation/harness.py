"""lm-evaluation-harness over a served model: tasks and their data for it, its requests as questions to the server."""

import asyncio
import csv
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepseek_triton_client import AsyncClient, DeepseekTritonError
from deepseek_triton_tools.evaluation.questions import (
    Generation,
    KeptAnswers,
    Likelihood,
    Question,
    ask_all,
    failures_by_message,
)
from deepseek_triton_tools.generating.records import checked_rows, json_of_line
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.terminal.output_streams import complain
from deepseek_triton_tools.tool_errors import InstallationError, ToolError

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class EvaluationTask:
    name: str
    config: dict[str, Any] | Path
    """The task as lm-eval takes it: keys and values, or a YAML file."""
    metrics: tuple[str, ...] = ()
    """lm-eval's names, such as "exact_match,strict-match", of those whose mean is the score; none: all of them."""
    is_cut: bool = False
    """Answers are meant to be cut off: the task gives them fewer tokens than the model would write."""
    limit: int | None = None
    """Only the first questions."""
    num_fewshot: int | None = None
    """Solved examples before each question, where the task leaves it open."""
    fewshot_seed: int = 0
    multiturn: bool = False
    """In chats the examples are turns of the conversation, not a part of the question."""


def rows_as_dataset(splits: Mapping[str, Sequence[Row]], *, shuffled: bool = False) -> Callable[..., Mapping[str, Any]]:
    """Return lm-eval's `custom_dataset`: these rows, by split.

    :param shuffled: put those of `test` into the order that trtllm-eval gives them.
    """

    def dataset(**_: Any) -> Mapping[str, Any]:
        from_rows = import_module("datasets").Dataset.from_list
        made = {name: from_rows(list(rows)) for name, rows in splits.items() if rows}
        if shuffled:
            # trtllm-eval shuffles the examples too, but after lm-eval has read them.
            made["test"] = made["test"].shuffle(seed=0)
        return made

    return dataset


def generation_config(
    name: str,
    rows: Sequence[Row],
    metrics: Sequence[str],
    *,
    target: Any = "answer",
    scores: Callable[[Row, Sequence[str]], Mapping[str, float]] | None = None,
    until: Sequence[str] = (),
    max_tokens: int,
    generation: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Describe to lm-eval a task whose answers are generated greedily after the `prompt` of each row.

    :param metrics: their names; each is a mean over the questions.
    :param target: the key of the right answer, or what finds it in a row.
    :param scores: compares a row with the answers; None: lm-eval's own metrics do.
    :param generation: more fields of the requests.
    """
    return {
        "task": name,
        "output_type": "generate_until",
        "custom_dataset": rows_as_dataset({"test": rows}),
        "test_split": "test",
        "doc_to_text": "prompt",
        "doc_to_target": target,
        **({"process_results": scores} if scores else {}),
        "metric_list": [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in metrics],
        "generation_kwargs": {
            "until": list(until),
            "temperature": 0.0,
            "max_gen_toks": max_tokens,
            **(generation or {}),
        },
        "num_fewshot": 0,
    }


def data_file(data: Path, patterns: Sequence[str], expected: str) -> Path:
    """Return `data` itself where it is a file, else the first file below it that fits a pattern."""
    if data.is_file():
        return data
    if not data.is_dir():
        raise ToolError(f"--data {data}: there is no such file or folder; expected {expected}", exit_code=2)
    for pattern in patterns:
        for path in sorted(data.glob(pattern)):
            return path
    raise ToolError(f"--data {data}: expected {expected}, found no {' or '.join(patterns)}")


def read_rows(path: Path, keys: Sequence[str], problem_of: Callable[[Row], str | None] = lambda _: None) -> list[Row]:
    """Read a file as JSON Lines, CSV with a heading, or Parquet, by its name.

    :param problem_of: says what else is wrong with a row that has the keys.
    :raises ToolError: where the file is none of these or empty, or a row is wrong. Each of the first ten problems is
        one line on stderr.
    """

    def checked(row: Any) -> Row:
        if not isinstance(row, dict):
            raise ToolError(f"expected an object, got {row!r:.100}")
        if missing := [key for key in keys if row.get(key) is None]:
            raise ToolError(f"expected the keys {', '.join(keys)}; it lacks {', '.join(missing)}")
        if problem := problem_of(row):
            raise ToolError(problem)
        return row

    try:
        if path.suffix in (".parquet", ".csv"):
            if path.suffix == ".parquet":
                table = import_module("pandas").read_parquet(path).to_dict("records")
            else:
                with path.open(encoding="utf-8", newline="") as text:
                    table = list(csv.DictReader(text))
            rows = checked_rows(str(path), "row", enumerate(table, 1), checked)
        else:
            with path.open("rb") as file:
                lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
                rows = checked_rows(str(path), "line", lines, lambda line: checked(json_of_line(line)))
    except (ValueError, OSError, csv.Error) as error:
        raise ToolError(f"{path} can't be read: {error}") from error
    if not rows:
        raise ToolError(f"{path} is empty")
    return rows


def hub_rows(name: str, config: str, split: str, *, otherwise: str) -> list[Row]:
    """Return a split of a dataset of the Hugging Face hub, from its cache or by download.

    :param otherwise: how the user gets the data where that fails.
    """
    load = import_module("datasets").load_dataset
    try:
        rows: list[Row] = load(name, config, split=split).to_list()
    except Exception as error:  # no network, offline, gated, not in the cache: many libraries raise here
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ToolError(f"no data of {name}: {otherwise} (Hugging Face: {reason:.200})") from error
    return rows


# No prompt begins with a record separator.
_MARK = "\x1emessages "


def as_text(messages: Sequence[Mapping[str, Any]]) -> str:
    return _MARK + json.dumps(messages, ensure_ascii=False)


def conversation_in(text: str) -> list[dict[str, Any]] | None:
    """Return the messages; None for a text that is a prompt."""
    if not text.startswith(_MARK):
        return None
    messages: list[dict[str, Any]] = json.loads(text.removeprefix(_MARK))
    return messages


_OF_LM_EVAL = {"max_gen_toks": "max_tokens", "max_new_tokens": "max_tokens", "max_tokens": "max_tokens"}
"""Its names of our sampling fields; the others are called alike."""
_DEFAULT_MAX_TOKENS = 256
"""lm-eval's own, for tasks that name none."""


class HarnessModel:
    """The methods of lm-eval's class LM. `lm_class` makes it one, where lm-eval is installed."""

    def __init__(
        self,
        connect: Callable[[], AsyncClient],
        kept: KeptAnswers,
        info: Mapping[str, Any],
        *,
        fields: Mapping[str, Any],
        concurrency: int,
        allow_failed: int,
    ) -> None:
        """:param info: what the server says of its model; only its name where it says no more.

        :param fields: sampling fields that win over those of the task.
        """
        super().__init__()
        self._connect = connect
        self._kept = kept
        self._info = info
        self._fields = dict(fields)
        self._concurrency = concurrency
        self._allow_failed = allow_failed
        self.num_asked = 0
        self.num_kept = 0
        self.num_output_tokens = 0
        self.truncated = 0
        """Answers that ended because they had as many tokens as they may have."""
        self.thought = 0
        """Answers that began with reasoning, which is not scored."""
        self.failed: dict[str, DeepseekTritonError] = {}

    # --- lm-eval's interface ---

    @property
    def tokenizer_name(self) -> str:
        return str(self._info.get("name", ""))

    def chat_template(self, chat_template: bool | str = False) -> str:
        return str(self._info.get("chat_template") or "")

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Keep the conversation as it is: the server applies its own template."""
        *before, last = map(dict, chat_history)
        if (own := conversation_in(str(last["content"]))) is not None:
            return as_text([*before, *own])
        if not add_generation_prompt:
            last["prefix"] = True
        return as_text([*before, last])

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval writes into its results."""
        return {name: value for name, value in self._info.items() if name not in ("chat_template", "fields")}

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        repeats: Counter[str] = Counter()
        questions = []
        for request in requests:
            question = self._generation(*request.args)
            questions.append(replace(question, repeat=repeats[question.key]))
            repeats[question.key] += 1
        records = self._answers(questions)
        for record in records:
            if record is not None:
                self.truncated += record["finish_reason"] == "length"
                self.thought += bool(record["reasoning"]) or "</think>" in record["text"]
        return [
            "" if record is None else question.answer_in(record)
            for question, record in zip(questions, records, strict=True)
        ]

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        return self._likelihoods([request.args for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Each text is one prompt: the server refuses those that are longer than its limit."""
        return [logprob for logprob, _ in self._likelihoods([("", request.args[0]) for request in requests])]

    # --- what they share ---

    def _generation(self, context: str, settings: Mapping[str, Any]) -> Generation:
        own = dict(settings)
        until = own.pop("until", None) or []
        is_sampled = own.pop("do_sample", None)
        fields = {_OF_LM_EVAL.get(name, name): value for name, value in own.items()}
        if is_sampled is False:
            fields["temperature"] = 0.0
        return Generation(
            content=conversation_in(context) or context,
            fields={"max_tokens": _DEFAULT_MAX_TOKENS, **fields, **self._fields},
            until=[until] if isinstance(until, str) else until,
        )

    def _likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        reason = self._info.get("fields", {}).get("prompt_logprobs", "the server doesn't say that it has them")
        if reason:
            engine = self._info.get("engine", "this server")
            raise ToolError(
                f"the task compares the log-probabilities of texts, which {engine} does not give: prompt_logprobs: "
                f"{reason}. Take a task whose answers are generated, or the engine vllm or reference"
            )
        questions = [
            Likelihood(context=conversation_in(context) or context, continuation=continuation, fields=self._fields)
            for context, continuation in pairs
        ]
        return [
            (float("-inf"), False) if record is None else (record["logprob"], record["is_greedy"])
            for record in self._answers(questions)
        ]

    def _answers(self, questions: Sequence[Question]) -> list[dict[str, Any] | None]:
        """Return a record for each question; None for one that failed, where that is allowed."""
        keys = [question.key for question in questions]
        self.num_asked += len(keys)
        self.num_kept += sum(self._kept.get(key) is not None for key in keys)
        failed = asyncio.run(ask_all(questions, self._connect, self._kept, self._concurrency))
        self.failed |= failed
        if len(self.failed) > self._allow_failed:
            raise ToolError(
                f"{len(self.failed)} of {self.num_asked} questions failed, so nothing was scored: "
                f"{failures_by_message(self.failed)}. The same command asks only these again; "
                f"--allow-failed {len(self.failed)} counts them as wrong"
            )
        records = [self._kept.get(key) for key in keys]
        self.num_output_tokens += sum(record["num_output_tokens"] or 0 for record in records if record is not None)
        return records


def prepare() -> None:
    """Raise InstallationError without lm-eval; keep it and its libraries from printing bars and advice to authors."""
    if find_spec("lm_eval") is None:
        raise InstallationError(f"eval needs lm-evaluation-harness; {install_extra('eval')}")
    quiet = {
        "TQDM_DISABLE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "DATASETS_VERBOSITY": "error",
        "HF_HUB_VERBOSITY": "error",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    for name, value in quiet.items():
        os.environ.setdefault(name, value)


def load_lm_eval() -> None:
    complain("loading lm-eval, which takes up to ten seconds")
    evaluator = import_module("lm_eval.evaluator")
    # It would write down the commit of any repository around the current folder, and git complains where there is none.
    vars(evaluator)["get_git_commit_hash"] = lambda: None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def lm_class() -> type[HarnessModel]:
    """Return the class that is a subclass of lm-eval's LM, too: lm-eval takes no other."""
    return type(HarnessModel.__name__, (HarnessModel, import_module("lm_eval.api.model").LM), {})


def evaluate(model: HarnessModel, task: EvaluationTask, *, chat: bool, system: str | None) -> dict[str, Any]:
    """Return lm-eval's results with the samples. Raises ToolError where lm-eval can't use the task."""
    from yaml import YAMLError

    try:
        manager, loaded = _loaded(task.config)
    except (KeyError, ValueError, TypeError, OSError, YAMLError) as error:
        raise ToolError(f"lm-eval can't load {task.name}: {error!s:.300}") from error
    tasks = list(loaded["groups"].values())[:1] or list(loaded["tasks"].values())  # a group has its tasks in it
    results: dict[str, Any] = import_module("lm_eval.evaluator").simple_evaluate(
        model=model,
        tasks=tasks,
        task_manager=manager,
        limit=task.limit,
        num_fewshot=task.num_fewshot,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat and task.multiturn,
        system_instruction=system,
        fewshot_random_seed=task.fewshot_seed,
        log_samples=True,
    )
    return results


def _loaded(config: dict[str, Any] | Path) -> tuple[Any, dict[str, Any]]:
    """Return lm-eval's manager of tasks, and what it made of `config`."""
    spec: Any = config if isinstance(config, dict) else str(config)
    folder = None
    if isinstance(config, Path) and (group := re.search(r"^group:\s*(\S+)", config.read_text("utf-8"), re.MULTILINE)):
        # It finds a group by its name only, and the group's tasks in the same folder.
        spec, folder = group[1], config.parent
    manager = import_module("lm_eval.tasks").TaskManager(include_path=folder, include_defaults=False)
    return manager, manager.load([spec])
