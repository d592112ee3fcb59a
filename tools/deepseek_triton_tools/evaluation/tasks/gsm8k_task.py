"""GSM8K: 1,319 word problems of school mathematics, after five solved ones.

Prompts, filters and metrics are those of lm-eval's own task. trtllm-eval uses that task too, with a seed of 0 and the
questions shuffled by it (TensorRT-LLM tensorrt_llm/evaluate/lm_eval.py), so that its solved examples differ from those
of the program lm_eval.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from deepseek_triton_tools.evaluation.evaluation_task import EvaluationTask, Row
from deepseek_triton_tools.evaluation.task_data import found_file, hub_rows, read_rows
from deepseek_triton_tools.tool_errors import ToolError

METRICS = ("exact_match,strict-match", "exact_match,flexible-extract")
MAX_TOKENS = 256
"""trtllm-eval's --max_output_length, and lm-eval's own default."""
LM_EVAL_SEED = 1234
_KEYS = ("question", "answer")
_PATTERNS = {
    "test": ("test.jsonl", "**/test.jsonl", "**/main/test-*.parquet", "test-*.parquet"),
    "train": ("train.jsonl", "**/train.jsonl", "**/main/train-*.parquet", "train-*.parquet"),
}
_WHERE = (
    "give --data a folder with test.jsonl and train.jsonl, such as grade_school_math/data of "
    "github.com/openai/grade-school-math"
)


def gsm8k(data: Path | None, *, num_fewshot: int | None, limit: int | None, like_lm_eval: bool) -> EvaluationTask:
    """Raises ToolError where there is no data."""
    import yaml

    shots = 5 if num_fewshot is None else num_fewshot
    rows = {"test": _rows(data, "test"), "train": _rows(data, "train") if shots else []}
    if shots > len(rows["train"]):
        raise ToolError(f"--num-fewshot {shots}: train.jsonl has only {len(rows['train'])} examples", exit_code=2)
    own = yaml.safe_load(resources.files("lm_eval").joinpath("tasks/gsm8k/gsm8k.yaml").read_text("utf-8"))
    for key in ("dataset_path", "dataset_name"):
        own.pop(key)
    if not shots:
        for key in ("training_split", "fewshot_split"):
            own.pop(key)
    own["generation_kwargs"]["max_gen_toks"] = MAX_TOKENS
    return EvaluationTask(
        name="gsm8k",
        config={**own, "num_fewshot": shots, "custom_dataset": _dataset(rows, shuffled=not like_lm_eval)},
        metrics=METRICS,
        limit=limit,
        fewshot_seed=LM_EVAL_SEED if like_lm_eval else 0,
        multiturn=like_lm_eval,
    )


def _rows(data: Path | None, split: str) -> list[Row]:
    if data is None:
        return hub_rows("openai/gsm8k", "main", split, otherwise=_WHERE)
    folder = data.parent if split == "train" and data.is_file() else data
    return read_rows(found_file(folder, _PATTERNS[split], "GSM8K's test.jsonl and train.jsonl"), _KEYS)


def _dataset(rows: Mapping[str, list[Row]], *, shuffled: bool) -> Any:
    def dataset(**_: Any) -> Mapping[str, Any]:
        from_rows = import_module("datasets").Dataset.from_list
        found = {split: from_rows(given) for split, given in rows.items() if given}
        if shuffled:
            # trtllm-eval shuffles the examples too, but after lm-eval has read them.
            found["test"] = found["test"].shuffle(seed=0)
        return found

    return dataset
