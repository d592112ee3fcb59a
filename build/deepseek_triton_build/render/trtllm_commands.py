"""The same plan for TensorRT-LLM's own programs: flags in a script, everything else in extra-llm-api-config.yml."""

from __future__ import annotations

from dataclasses import dataclass

from deepseek_triton_build.data.planned_settings import Setting
from deepseek_triton_build.data.releases.spelling import canonical, flag_name
from deepseek_triton_build.planning.plan import Plan
from deepseek_triton_build.render import shell
from deepseek_triton_build.render.yaml_text import comment, one_line, yaml_lines
from deepseek_triton_build.text import is_path as is_path

YAML_NAME = "extra-llm-api-config.yml"


@dataclass(frozen=True, kw_only=True)
class TrtllmArguments:
    """A plan's LLM arguments, each in the one place where a program takes it."""

    model: str
    flags: tuple[tuple[str, Setting], ...]
    """Flag and setting; a setting that is True is a switch."""
    yaml: tuple[Setting, ...]
    """Under the release's keys."""

    @property
    def words(self) -> list[list[str]]:
        """The flags as lines of a command."""
        return [
            [flag] if setting.value is True else [flag, shell.quoted(setting.value)] for flag, setting in self.flags
        ]

    @property
    def reasons(self) -> list[str]:
        """The flags' reasons: no comment can stand inside a command of several lines."""
        lines = []
        for flag, setting in self.flags:
            value = "" if setting.value is True else f" {setting.value}"
            lines += comment(f"{flag}{value}: {setting.comment}")
        return lines


def arguments(plan: Plan, program: str) -> TrtllmArguments:
    """`plan` for `program`: trtllm-serve, trtllm-bench or trtllm-eval.

    Where the YAML has a section, it replaces what flags say of that section, so these go into the YAML too
    (update_llm_args_with_extra_dict in TensorRT-LLM's llm_args.py).
    """
    settings = [setting for setting in plan.settings if not setting.key.startswith("triton_config.")]
    flags = {setting.key: _flag(plan, program, setting) for setting in settings}
    sections = {_section(setting) for setting in settings if flags[setting.key] is None} - {None}
    given: list[tuple[str, Setting]] = []
    rest: list[Setting] = []
    for setting in settings:
        flag = flags[setting.key]
        if setting.key == "model" or (flag and setting.key == "trust_remote_code" and not setting.value):
            continue  # named by the script itself; off is the program's own default
        if flag is None or _section(setting) in sections:
            rest.append(setting)
        else:
            given.append((flag, setting))
    model = next(str(setting.value) for setting in settings if setting.key == "model")
    return TrtllmArguments(model=model, flags=tuple(given), yaml=tuple(rest))


def _flag(plan: Plan, program: str, setting: Setting) -> str | None:
    """The flag that says `setting`, if any. A switch can only say yes."""
    assert plan.release is not None
    keys = canonical({setting.key: setting.value}, plan.release.version)
    flag = flag_name(program, next(iter(keys))) if len(keys) == 1 else None
    return None if setting.value is False and setting.key != "trust_remote_code" else flag


def _section(setting: Setting) -> str | None:
    section, dot, _ = setting.key.partition(".")
    return section if dot else None


def extra_llm_api_config(args: TrtllmArguments, *, stamp: str, program: str, script: str) -> str:
    """The YAML beside the script; never empty, for an empty document is no mapping to the programs."""
    lines = [
        f"# {stamp}",
        f"# What {program} has no flag for; {script} names this file. A section here replaces the flags",
    ]
    lines.append("# that speak of it, so each is whole.")
    return "\n".join([*lines, *(yaml_lines(args.yaml) or ["{}"])]) + "\n"


_OPTIONS = ["--extra_llm_api_options", f'"$here/{YAML_NAME}"']


def serve_sh(plan: Plan, args: TrtllmArguments, *, stamp: str) -> str:
    """serve.sh: an OpenAI-compatible server."""
    return _script(
        plan,
        stamp,
        "serve.sh",
        [
            f"Serves {_name(plan)} by trtllm-serve, {_where(plan)}. HOST and PORT say where it listens; further "
            "arguments go to trtllm-serve.",
        ],
        [],
        args,
        shell.command(
            ["exec", *shell.launcher(plan), "trtllm-serve", shell.quoted(args.model)],
            ["--host", '"${HOST:-localhost}"', "--port", '"${PORT:-8000}"'],
            *args.words,
            *_reasoning(plan),
            _OPTIONS,
            ['"$@"'],
        ),
    )


def _reasoning(plan: Plan) -> list[list[str]]:
    """The thinking of R1 apart from its answer, where the release is known to have the parser."""
    assert plan.release is not None
    known = plan.release.find_key("reasoning_parser") is not None
    asked = any(setting.key == "reasoning_parser" for setting in plan.settings)
    return [["--reasoning_parser", "deepseek-r1"]] if plan.variant.thinks and known and not asked else []


_LEAST_REQUESTS = 10
_REQUESTS_PER_PLACE = 5
"""What the published runs send: 10 one at a time, 5,120 of them 1,024 at once (TensorRT-LLM blog: How to get best
performance on DeepSeek-R1)."""


def bench_sh(plan: Plan, args: TrtllmArguments, *, stamp: str) -> str:
    """bench.sh: the throughput of the plan's own workload."""
    work = plan.workload
    concurrency = work.concurrency or plan.max_concurrency
    requests = max(_LEAST_REQUESTS, _REQUESTS_PER_PLACE * concurrency)
    return _script(
        plan,
        stamp,
        "bench.sh",
        [
            f"Measures {_name(plan)} by trtllm-bench, {_where(plan)}. DATASET is a file of requests, "
            "NUM_REQUESTS how many of them are sent, CONCURRENCY how many at once; further arguments go to "
            "trtllm-bench throughput.",
        ],
        [
            *(_dataset_comment(plan, args, requests) if work.isl and work.osl else []),
            'dataset="${DATASET:-$here/dataset.txt}"',
            'if [[ ! -f "$dataset" ]]; then',
            '  echo "bench.sh: expected a dataset at $dataset; see in this script how to make one, or set DATASET" >&2',
            "  exit 2",
            "fi",
        ],
        args,
        shell.command(
            ["exec", *shell.launcher(plan), "trtllm-bench", *_bench_model(plan, args), "throughput"],
            ["--dataset", '"$dataset"'],
            ["--num_requests", f'"${{NUM_REQUESTS:-{requests}}}"'],
            ["--concurrency", f'"${{CONCURRENCY:-{concurrency}}}"'],
            *args.words,
            _OPTIONS,
            ['"$@"'],
        ),
    )


def _dataset_comment(plan: Plan, args: TrtllmArguments, requests: int) -> list[str]:
    work = plan.workload
    prepare = (
        f"python3 /app/tensorrt_llm/benchmarks/cpp/prepare_dataset.py --stdout --tokenizer {shell.quoted(args.model)} "
        f"token-norm-dist --input-mean {work.isl} --output-mean {work.osl} --input-stdev 0 --output-stdev 0 "
        f"--num-requests {requests} > dataset.txt"
    )
    text = (
        "A dataset of the lengths planned for is made by the line below; with MTP take real requests, for how many "
        "drafts are accepted depends on them."
    )
    return [*comment(text), f"#   {one_line(prepare)}"]


def _bench_model(plan: Plan, args: TrtllmArguments) -> list[str]:
    """A folder goes beside the model's name, not in its place."""
    assert plan.checkpoint is not None
    if is_path(args.model):
        return ["--model", plan.checkpoint.model, "--model_path", shell.quoted(args.model)]
    return ["--model", shell.quoted(args.model)]


EVAL_TASKS = ("mmlu", "gsm8k", "gpqa_diamond")


def eval_sh(plan: Plan, args: TrtllmArguments, *, stamp: str) -> str:
    """eval.sh: accuracy on one task."""
    named = f"{', '.join(EVAL_TASKS[:-1])} or {EVAL_TASKS[-1]}"
    return _script(
        plan,
        stamp,
        "eval.sh",
        [
            f"Measures the accuracy of {_name(plan)} by trtllm-eval, {_where(plan)}. The first argument is the "
            f"task: {named}; further ones are the task's own. GPQA's dataset needs a Hugging Face account with access.",
        ],
        [
            'task="${1:-}"',
            'case "$task" in',
            "  mmlu | gsm8k) options=() ;;",
            "  # Its questions are put as a chat (TensorRT-LLM examples/models/core/deepseek_v3/README.md).",
            "  gpqa_diamond) options=(--apply_chat_template) ;;",
            "  *)",
            f"    echo \"eval.sh: expected a task, {named}; got '$task'\" >&2",
            "    exit 2",
            "    ;;",
            "esac",
            "shift",
        ],
        args,
        shell.command(
            ["exec", *shell.launcher(plan), "trtllm-eval", "--model", shell.quoted(args.model)],
            *args.words,
            _OPTIONS,
            ['"$task"', '"${options[@]}"', '"$@"'],
        ),
    )


def _script(
    plan: Plan, stamp: str, name: str, about: list[str], setup: list[str], args: TrtllmArguments, command: list[str]
) -> str:
    return shell.script(
        stamp,
        about,
        [f"here={shell.HERE}", *shell.exports(plan.environment)],
        setup,
        shell.on_every_node(plan, name),
        [*args.reasons, *command],
    )


def _name(plan: Plan) -> str:
    return plan.variant.title.partition(",")[0]


def _where(plan: Plan) -> str:
    assert plan.release is not None
    return f"in a container with TensorRT-LLM {plan.release.version}"
