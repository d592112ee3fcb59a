"""The user's own questions: JSON Lines with a question, or a prompt, or messages, and the answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from deepseek_triton_tools.evaluation.harness import as_text
from deepseek_triton_tools.evaluation.task_data import EvaluationTask, Row, generation_config, read_rows
from deepseek_triton_tools.generating.prompt_sources import problem_of_messages
from deepseek_triton_tools.tool_errors import ToolError

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
        raise ToolError(f"--data {data}: there is no such file")
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
