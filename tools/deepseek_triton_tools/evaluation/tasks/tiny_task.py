"""The questions of the tiny model's own card, which come with the project: tiny_questions.jsonl.

`python -m tiny_checkpoint.questions FILE` writes that file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deepseek_triton_tools.evaluation.evaluation_task import EvaluationTask, Row, metric, rows_as_dataset
from deepseek_triton_tools.evaluation.task_data import read_rows
from deepseek_triton_tools.evaluation.tasks.tiny_scoring import is_right_answer

QUESTIONS = Path(__file__).with_name("tiny_questions.jsonl")
MAX_TOKENS = 220
_SPLITS = ("taught", "held_out")


def tiny(*, limit: int | None) -> EvaluationTask:
    config = {
        "task": "tiny",
        "output_type": "generate_until",
        "custom_dataset": rows_as_dataset(test=read_rows(QUESTIONS, ("id", "kind", "split", "prompt", "accepted"))),
        "test_split": "test",
        "doc_to_text": "prompt",
        "doc_to_target": "accepted",
        "process_results": _scores,
        "metric_list": [metric(name) for name in ("right", *_SPLITS)],
        # The prompts have their special tokens.
        "generation_kwargs": {"until": [], "temperature": 0.0, "max_gen_toks": MAX_TOKENS, "add_special_tokens": False},
        "num_fewshot": 0,
    }
    return EvaluationTask(name="tiny", config=config, metrics=("right,none",), limit=limit)


def _scores(doc: Row, answers: Sequence[str]) -> dict[str, float]:
    right = float(is_right_answer(doc["kind"], doc["accepted"], answers[0]))
    return {"right": right, doc["split"]: right}
