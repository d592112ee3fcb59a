"""GPQA Diamond: 198 questions of science with four choices. The model thinks, then writes a last line.

The prompt and the pattern of the answer are those of trtllm-eval's gpqa_diamond_cot_zeroshot_aa (TensorRT-LLM
tensorrt_llm/evaluate/lm_eval_tasks/gpqa). The order of the choices is drawn by seed 0; trtllm-eval draws it from a
state that depends on its caches.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

from deepseek_triton_tools.evaluation.evaluation_task import EvaluationTask, Row, metric, rows_as_dataset
from deepseek_triton_tools.evaluation.task_data import found_file, hub_rows, read_rows

MAX_TOKENS = 32_768
_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_RIGHT = "Correct Answer"
_WHERE = (
    "give --data your gpqa_diamond.csv; its licence asks that it is not shown in the open, so get it from "
    "huggingface.co/datasets/Idavidrein/gpqa, which wants an account, or github.com/idavidrein/gpqa"
)
_TASK = (
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering."
)
_PATTERN = r"(?i)Answer[ \t]*:[ \t]*([A-D])"


def gpqa_diamond(data: Path | None, *, limit: int | None) -> EvaluationTask:
    """Raises ToolError where there is no data."""
    if data is None:
        rows = hub_rows("Idavidrein/gpqa", "gpqa_diamond", "train", otherwise=_WHERE)
    else:
        file = found_file(data, ("gpqa_diamond.csv", "**/gpqa_diamond.csv"), "gpqa_diamond.csv")
        rows = read_rows(file, ("Question", _RIGHT, *_WRONG))
    random = Random(0)
    config = {
        "task": "gpqa_diamond",
        "output_type": "generate_until",
        "custom_dataset": rows_as_dataset(test=[_question(row, random) for row in rows]),
        "test_split": "test",
        "doc_to_text": "prompt",
        "doc_to_target": "answer",
        "filter_list": [
            {
                "name": "strict-match",
                "filter": [
                    {"function": "regex", "regex_pattern": _PATTERN, "group_select": 0},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [{**metric("exact_match"), "ignore_case": True, "ignore_punctuation": True}],
        "generation_kwargs": {"until": ["</s>"], "temperature": 0.0, "max_gen_toks": MAX_TOKENS},
        "num_fewshot": 0,
    }
    return EvaluationTask(name="gpqa_diamond", config=config, metrics=("exact_match,strict-match",), limit=limit)


def _question(row: Row, random: Random) -> Row:
    choices = [(row[name] or " ").strip() for name in (*_WRONG, _RIGHT)]
    right = choices[-1]
    random.shuffle(choices)
    listed = "".join(f"\n{letter}) {choice}" for letter, choice in zip("ABCD", choices, strict=True))
    return {"prompt": f"{_TASK}\n{row['Question']}{listed}", "answer": "ABCD"[choices.index(right)]}
