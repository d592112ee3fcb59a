"""Runs lm-evaluation-harness on one task. Only this module imports it, and only when a task runs: it takes seconds."""

from __future__ import annotations

import logging
import os
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepseek_triton_tools.evaluation.evaluation_task import EvaluationTask
from deepseek_triton_tools.evaluation.harness_model import HarnessModel, as_lm
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.terminal.output_streams import complain
from deepseek_triton_tools.tool_errors import InstallationError, ToolError


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
    return as_lm(HarnessModel, import_module("lm_eval.api.model").LM)


def evaluate(model: HarnessModel, task: EvaluationTask, *, chat: bool, system: str | None) -> dict[str, Any]:
    """Return lm-eval's results with the samples. Raises ToolError where lm-eval can't use the task."""
    from yaml import YAMLError

    try:
        manager, loaded = _loaded(task.config)
    except (KeyError, ValueError, TypeError, OSError, YAMLError) as error:
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


def _loaded(config: dict[str, Any] | Path) -> tuple[Any, dict[str, Any]]:
    """Return lm-eval's manager of tasks, and what it made of `config`."""
    spec: Any = config if isinstance(config, dict) else str(config)
    folder = None
    if isinstance(config, Path) and (group := re.search(r"^group:\s*(\S+)", config.read_text("utf-8"), re.MULTILINE)):
        # It finds a group by its name only, and the group's tasks in the same folder.
        spec, folder = group[1], config.parent
    manager = import_module("lm_eval.tasks").TaskManager(include_path=folder, include_defaults=False)
    return manager, manager.load([spec])
