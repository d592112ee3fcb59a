"""Runs lm-evaluation-harness on one task. Only this module imports it, and only when a task runs: it takes seconds."""

from __future__ import annotations

import logging
import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from deepseek_triton_tools.evaluation.evaluation_task import EvaluationTask
from deepseek_triton_tools.evaluation.harness_model import HarnessModel, as_lm
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.terminal.output_streams import complain
from deepseek_triton_tools.tool_errors import InstallationError, ToolError


def require_lm_eval() -> None:
    if find_spec("lm_eval") is None:
        raise InstallationError(f"eval needs lm-evaluation-harness; {install_extra('eval')}")


def load_lm_eval() -> None:
    """Import it without its bars of progress and its advice to authors of tasks."""
    complain("loading lm-eval, which takes some ten seconds")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import_module("lm_eval.api.model")
    # It would write down the commit of any repository around the current folder, and git complains where there is none.
    vars(import_module("lm_eval.evaluator"))["get_git_commit_hash"] = lambda: None
    for name in ("lm_eval", "datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)


def lm_class() -> type[HarnessModel]:
    return as_lm(HarnessModel, import_module("lm_eval.api.model").LM)


def evaluate(model: HarnessModel, task: EvaluationTask, *, chat: bool, system: str | None) -> dict[str, Any]:
    """Return lm-eval's results with the samples. Raises ToolError where lm-eval can't use the task."""
    manager = import_module("lm_eval.tasks").TaskManager(include_defaults=False)
    try:
        loaded = manager.load([task.config])
    except (KeyError, ValueError, TypeError, OSError) as error:
        raise ToolError(f"lm-eval can't load {task.name}: {error!s:.300}") from error
    tasks = list(loaded["groups"].values())[:1] or list(loaded["tasks"].values())  # a group has its tasks in it
    found: dict[str, Any] = import_module("lm_eval.evaluator").simple_evaluate(
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
    return found
