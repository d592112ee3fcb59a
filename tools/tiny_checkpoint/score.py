"""Scores answers by kind of question: `python -m tiny_checkpoint.score ANSWERS.json ...`, a table in Markdown.

A file of answers has `engine`, `precision` and `answers`, a list of `id` and `text`. `tiny_checkpoint.answering` writes
it for the reference engine, and tests/gpu/tiny_answers.py for vLLM and transformers.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tiny_checkpoint.questions import Question, is_right, questions

SPLITS = ("taught", "held_out")
"""The order of the two numbers in a cell."""


def scores(answers: dict[str, str]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return (right answers, questions) by kind and split. A question without an answer counts as wrong."""
    right: Counter[tuple[str, str]] = Counter()
    total: Counter[tuple[str, str]] = Counter()
    for question in questions():
        for kind in (question.kind, "all"):
            total[kind, question.split] += 1
            right[kind, question.split] += is_right(question, answers.get(question.id, ""))
    return {key: (right[key], total[key]) for key in total}


def table(columns: Sequence[tuple[str, dict[str, str]]]) -> str:
    """Return the scores in Markdown: a row for each kind, a column for each engine; `all` comes last."""
    by_engine = [(name, scores(answers)) for name, answers in columns]
    lines = [
        "| kind | questions | " + " | ".join(f"{name}, %" for name, _ in by_engine) + " |",
        "| --- | ---: |" + " ---: |" * len(by_engine),
    ]
    kinds = {kind for _, result in by_engine for kind, _ in result}
    for kind in sorted(kinds, key=lambda kind: (kind == "all", kind)):
        counts = [str(by_engine[0][1][kind, split][1]) for split in SPLITS]
        cells = [" / ".join(_percent(*result[kind, split]) for split in SPLITS) for _, result in by_engine]
        lines.append(f"| {kind} | {' / '.join(counts)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _percent(right: int, total: int) -> str:
    return f"{100 * right / total:.1f}".removesuffix(".0")


def wrong_answers(answers: dict[str, str]) -> list[tuple[Question, str]]:
    return [
        (question, answers.get(question.id, ""))
        for question in questions()
        if not is_right(question, answers.get(question.id, ""))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Score the answers of engines to the tiny checkpoint's questions.")
    parser.add_argument("answers", type=Path, nargs="+", help="a file of answers of each engine")
    parser.add_argument("--wrong", action="store_true", help="list the wrong answers too")
    args = parser.parse_args()
    columns = []
    for file in args.answers:
        document = json.loads(file.read_text(encoding="utf-8"))
        columns.append(
            (
                f"{document['engine']} {document['precision']}",
                {answer["id"]: answer["text"] for answer in document["answers"]},
            )
        )
    print(table(columns))
    if args.wrong:
        for name, answers in columns:
            for question, text in wrong_answers(answers):
                print(f"\n{name}: {question.kind}, {question.split}\n  asked    {question.prompt!r}")
                print(f"  expected {question.accepted[0]!r}\n  answered {text!r}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
