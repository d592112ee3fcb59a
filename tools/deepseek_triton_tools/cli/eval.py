"""`deepseek-triton eval`: the accuracy of a served model, by lm-evaluation-harness over our client."""

import argparse
from functools import partial
from pathlib import Path

from deepseek_triton_tools.cli import client_options
from deepseek_triton_tools.cli.parsing import VerbParser, add_json, number, option, path, positive, real_number, words
from deepseek_triton_tools.tool_errors import ToolError, nearest

TASKS = {
    "tiny": "the 1,894 questions of the tiny model's own card; nothing else is needed for it",
    "gsm8k": "1,319 word problems of mathematics, after 5 solved ones; 256 tokens",
    "mmlu": "questions on 57 subjects, after 5 solved ones of the subject; the model writes the letter, 2 tokens",
    "gpqa_diamond": "198 questions of science that ask for thought; up to 32,768 tokens; most often with --chat",
    "own": 'your own questions: JSON Lines with "question" (or "prompt", "messages") and "answer"',
}
_SCORERS = ("exact", "contains", "regex", "number")
_percent = real_number("a number from 0 to 100", lambda value: 0 <= value <= 100)
_LISTED = "\n".join(f"  {name:<13} {text}" for name, text in TASKS.items())
_NOTES = f"""\
tasks, with trtllm-eval's prompts and limits where it has them:
{_LISTED}

The data of gsm8k, mmlu and gpqa_diamond is not part of this project: --data names your copy; without it, it is taken
from the Hugging Face cache, or downloaded. Sampling options win over the task's own settings, which are greedy.

exit codes: 0 scored; 1 it failed, questions got no answer, or with --fail-below-band the score is too low;
2 wrong command line. docs/eval.md has more."""


def add_options(verb: VerbParser) -> None:
    verb.runs(
        _eval,
        "deepseek-triton eval http://localhost:8000 --task tiny",
        "deepseek-triton eval grpc://node1:8001 --task gsm8k --data grade_school_math/data --fail-below-band",
        notes=_NOTES,
        common="--task --task-file --data --limit --chat --output --pass-at --fail-below-band --model --concurrency "
        "--max-tokens --temperature --json",
    )
    verb.usage = "%(prog)s [URL...] --task TASK [options]"
    client_options.add_address(verb)
    which = verb.add_mutually_exclusive_group(required=True)
    option(which, "--task TASK", f"{', '.join(TASKS)}; see below", _task)
    option(which, "--task-file FILE", "any task of lm-eval, by its YAML file", path)
    add_json(verb, "docs/eval.md")
    _add_questions(verb)
    files = verb.add_argument_group("files")
    text = "folder for results, samples and answers; a run that was stopped goes on there (default: eval-TASK)"
    option(files, "--output DIR", text, path)
    option(files, "--overwrite", "ask again, although answers are there")
    verdict = verb.add_argument_group("verdict")
    option(verdict, "--pass-at X", "the lowest score in percent that passes, in place of the published ones", _percent)
    option(verdict, "--fail-below-band", "exit with 1 if the score doesn't pass")
    server = verb.add_argument_group("server")
    client_options.add_server_options(server)
    option(server, "--concurrency N", "requests at once (default: 32)", positive, default=32)
    text = "score although up to N questions got no answer, which count as wrong (default: 0)"
    option(server, "--allow-failed N", text, number, default=0)
    client_options.add_sampling_options(verb, owner="the task")


def _add_questions(verb: VerbParser) -> None:
    questions = verb.add_argument_group("questions")
    option(questions, "--data PATH", "your copy of the task's data, a file or a folder", path)
    option(questions, "--limit N", "only N questions; mmlu takes as many of each subject", positive)
    option(questions, "--num-fewshot N", "solved examples before a question", number)
    option(questions, "--chat", "send messages, by the model's chat template")
    option(questions, "--system TEXT", "system message; in completions put before", words)
    text = "whose solved examples gsm8k shows: both use lm-eval's task, with other seeds (default: trtllm-eval)"
    option(questions, "--like", text, choices=("trtllm-eval", "lm-eval"), default="trtllm-eval")
    text = f"for own: how answers are compared, {', '.join(_SCORERS)} (default: exact); a row's own wins"
    questions.add_argument("--scorer", choices=_SCORERS, default="exact", metavar="HOW", help=text)


def _task(text: str) -> str:
    if text not in TASKS:
        hint = nearest(text, TASKS) or f"; there are {', '.join(TASKS)}"
        raise argparse.ArgumentTypeError(f"there is no task {text!r}{hint}")
    return text


def _eval(args: argparse.Namespace) -> int:
    args.fields = {field.name: value for field, value in client_options.sampling_params(args).given()}
    _refuse_misplaced(args)
    from deepseek_triton_client import AsyncClient
    from deepseek_triton_tools.evaluation.run_evaluation import run_evaluation

    args.output = args.output or Path(f"eval-{args.task or args.task_file.stem}")
    args.connect = partial(AsyncClient, args.urls or client_options.DEFAULT_URL, **client_options.client_settings(args))
    return run_evaluation(args)


def _refuse_misplaced(args: argparse.Namespace) -> None:
    """Raises ToolError for every option that the task has no use for."""
    downloaded = ("gsm8k", "mmlu", "gpqa_diamond")
    tasks_of = {
        "--data": (args.data is not None, (*downloaded, "own")),
        "--num-fewshot": (args.num_fewshot is not None, ("gsm8k", "mmlu", "--task-file")),
        "--like lm-eval": (args.like != "trtllm-eval", ("gsm8k",)),
        "--scorer": (args.scorer != "exact", ("own",)),
        "--chat": (args.chat, (*downloaded, "own", "--task-file")),
        "--system": (args.system is not None, (*downloaded, "own", "--task-file")),
    }
    problems = [
        f"{name} is for {', '.join(tasks)}"
        for name, (is_present, tasks) in tasks_of.items()
        if is_present and (args.task or "--task-file") not in tasks
    ]
    problems += [f"--set {name}: one answer to each question" for name in ("n", "best_of") if name in args.fields]
    if "chat_template_kwargs" in args.fields and not args.chat and args.task != "own":  # whose rows may be chats
        problems.append("--chat-template-kwargs goes with --chat")
    if problems:
        raise ToolError("; ".join(problems), exit_code=2)
