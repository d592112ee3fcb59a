"""The user's own questions: JSON Lines with a question, or a prompt, or messages, and the answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from deepseek_triton_tools.evaluation.harness import as_text
from deepseek_triton_tools.evaluation.task_data import EvaluationTask, Row, metric, read_rows, rows_as_dataset
from deepseek_triton_tools.generating.prompt_sources import problem_of_messages
from deepseek_triton_tools.tool_errors import ToolError

MAX_TOKENS = 1024
_KINDS = ("question", "prompt", "messages")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def _exact(text: str, answer: str) -> bool:
    return text.strip() == answer.strip()


def _contains(text: str, answer: str) -> bool:
    return answer.casefold() in text.casefold()


def _regex(text: str, answer: str) -> bool:
    return re.search(answer, text) is not None


def _number(text: str, answer: str) -> bool:
    """Compare the last number of the text with that of the answer."""
    said, expected = _last_number(text), _last_number(answer)
    return said is not None and said == expected


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


SCORERS: Mapping[str, Callable[[str, str], bool]] = {
    "exact": _exact,
    "contains": _contains,
    "regex": _regex,
    "number": _number,
}


def own_questions(data: Path | None, *, scorer: str, limit: int | None) -> EvaluationTask:
    """Raises ToolError where the file can't be used; the rows that are wrong are named on stderr.

    :param scorer: that of rows which name none.
    """
    if data is None:
        raise ToolError('--task own needs --data FILE: JSON Lines with "question" and "answer"', exit_code=2)
    if not data.is_file():
        raise ToolError(f"--data {data}: there is no such file")
    given = read_rows(data, ("answer",), partial(_problem, scorer=scorer))
    config = {
        "task": "own",
        "output_type": "generate_until",
        "custom_dataset": rows_as_dataset(test=[_row(row, scorer) for row in given]),
        "test_split": "test",
        "doc_to_text": "prompt",
        "doc_to_target": lambda doc: doc["answers"][0],
        "process_results": _scores,
        "metric_list": [metric("right")],
        "generation_kwargs": {"until": [], "temperature": 0.0, "max_gen_toks": MAX_TOKENS},
        "num_fewshot": 0,
    }
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
    given = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    fits = all(isinstance(one, (str, int, float)) and not isinstance(one, bool) for one in given)
    return [str(one) for one in given] if fits else []


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
