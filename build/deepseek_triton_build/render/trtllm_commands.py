"""The same plan for TensorRT-LLM's own programs: flags in a script, everything else in extra-llm-api-config.yml."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepseek_triton_build.data.planned_settings import Setting
from deepseek_triton_build.data.releases.spelling import canonical, flag_name
from deepseek_triton_build.render import shell
from deepseek_triton_build.render.model_yaml import llm_arguments
from deepseek_triton_build.render.yaml_text import yaml_lines
from deepseek_triton_build.text import comment_lines, is_path

if TYPE_CHECKING:
    from deepseek_triton_build.planning.plan import Plan

YAML_NAME = "extra-llm-api-config.yml"


@dataclass(frozen=True, kw_only=True)
class TrtllmArguments:
    """A plan's LLM arguments, each in the one place where a program takes it."""

    model: str
    flags: tuple[shell.Flag, ...]
    yaml: tuple[Setting, ...]
    """Settings for the YAML, under the release's keys."""

    @property
    def words(self) -> list[tuple[str, ...]]:
        """The flags as lines of a command."""
        return [flag.words for flag in self.flags]


def arguments(plan: Plan, program: str) -> TrtllmArguments:
    """Divide `plan` into the flags and the YAML of `program`: trtllm-serve, trtllm-bench or trtllm-eval.

    A section in the YAML replaces everything that flags say about that section, so all settings of such a section go
    into the YAML (update_llm_args_with_extra_dict in TensorRT-LLM's llm_args.py).
    """
    settings = llm_arguments(plan)
    flags = {setting.key: _flag(plan, program, setting) for setting in settings}
    sections = {_section(setting) for setting in settings if flags[setting.key] is None} - {None}
    given: list[shell.Flag] = []
    rest: list[Setting] = []
    for setting in settings:
        flag = flags[setting.key]
        if setting.key == "model" or (flag and setting.key == "trust_remote_code" and not setting.value):
            continue  # the script itself names the model; where trust_remote_code is a flag, it is off by default
        if flag is None or _section(setting) in sections:
            rest.append(setting)
        else:
            words = (flag,) if setting.value is True else (flag, shell.quoted(setting.value))
            given.append(shell.Flag(words, setting.comment))
    model = next(str(setting.value) for setting in settings if setting.key == "model")
    return TrtllmArguments(model=model, flags=tuple(given), yaml=tuple(rest))


def _flag(plan: Plan, program: str, setting: Setting) -> str | None:
    """Return the flag that sets `setting`; None when there is none. A switch can only turn something on."""
    keys = canonical({setting.key: setting.value}, shell.release_of(plan).version)
    flag = flag_name(program, next(iter(keys))) if len(keys) == 1 else None
    return None if setting.value is False and setting.key != "trust_remote_code" else flag


def _section(setting: Setting) -> str | None:
    section, dot, _ = setting.key.partition(".")
    return section if dot else None


def extra_llm_api_config(args: TrtllmArguments, *, stamp: str, program: str, script: str) -> str:
    """Return the YAML beside the script. It is never empty, because the programs fail on an empty document."""
    about = (
        f"Settings that {program} has no flag for; {script} passes this file. A section here replaces all flags about "
        "that section, so each section is complete."
    )
    return "\n".join([f"# {stamp}", *comment_lines(about), *(yaml_lines(args.yaml) or ["{}"])]) + "\n"


def _options(plan: Plan) -> list[str]:
    folder = "$config" if plan.files else "$here"
    return ["--extra_llm_api_options", f'"{folder}/{YAML_NAME}"']


def _whole_paths(plan: Plan) -> list[str]:
    """Return the lines that write a copy of the YAML into `config`, with whole paths of the plan's files."""
    if not plan.files:
        return []
    filled = [f"text=\"${{text//': {file.name}'/\": '$here/{file.name}'\"}}\"" for file in plan.files]
    return [
        *comment_lines("Programs look for the files that the YAML names from the folder where they were started."),
        f'text="$(<"$here/{YAML_NAME}")"',
        *filled,
        'config="$(mktemp -d)"',
        f'printf "%s\\n" "$text" > "$config/{YAML_NAME}"',
    ]


def serve_sh(plan: Plan, args: TrtllmArguments, *, stamp: str) -> str:
    """Return serve.sh, which starts an OpenAI-compatible server."""
    about = (
        f"Serves {shell.model_title(plan)} with trtllm-serve, in {plan.image_for('trtllm-serve')}. HOST and PORT set "
        "the address it listens on. Further arguments go to trtllm-serve."
    )
    command = shell.command(
        ["exec", *shell.launcher(plan), "trtllm-serve", shell.quoted(args.model)],
        ["--host", '"${HOST:-localhost}"', "--port", f'"${{PORT:-{_port(plan)}}}"'],
        *args.words,
        *_reasoning_parser(plan),
        _options(plan),
        ['"$@"'],
    )
    return _script(plan, args, command, stamp=stamp, name="serve.sh", about=about)


def _port(plan: Plan) -> int:
    """Return the default port. Beside the servers of a pair, the orchestrator has the first one."""
    profile = "" if plan.profile is None else plan.profile.name
    return {"ctx": 8001, "gen": 8002}.get(profile, 8000)


def _reasoning_parser(plan: Plan) -> list[list[str]]:
    """Return the flag that separates R1's reasoning from its answer, where the release is known to have the parser."""
    known = shell.release_of(plan).find_key("reasoning_parser") is not None
    asked = any(setting.key == "reasoning_parser" for setting in plan.settings)
    return [["--reasoning_parser", "deepseek-r1"]] if plan.variant.thinks and known and not asked else []


_LEAST_REQUESTS = 10
_REQUESTS_PER_PLACE = 5
"""Requests for each of those that run at once. The published runs send 10 requests one at a time, and 5,120 requests
1,024 at a time (TensorRT-LLM blog: How to get best performance on DeepSeek-R1)."""


def bench_sh(plan: Plan, args: TrtllmArguments, *, stamp: str) -> str:
    """Return bench.sh, which measures the throughput of the plan's own workload."""
    work = plan.workload
    concurrency = work.concurrency or plan.max_concurrency
    requests = max(_LEAST_REQUESTS, _REQUESTS_PER_PLACE * concurrency)
    about = (
        f"Measures {shell.model_title(plan)} with trtllm-bench, in {plan.image_for('trtllm-bench')}. DATASET is a file "
        "of requests, NUM_REQUESTS is how many of them are sent, CONCURRENCY how many at once. Further arguments go to "
        "trtllm-bench throughput: --streaming measures the time to the first token too, --report_json FILE keeps the "
        "figures, and --warmup 0 leaves the warm-up out."
    )
    if can_prepare(plan):
        about += " With PREPARE=1 the script only makes the dataset, where there is none."
    setup = [
        'dataset="${DATASET:-$here/dataset.txt}"',
        *(['if [[ -n "${PREPARE:-}" && -f "$dataset" ]]; then exit; fi'] if can_prepare(plan) else []),
        'if [[ ! -f "$dataset" ]]; then',
        *shell.indented(_no_dataset(plan, args, requests)),
        "  exit 2",
        "fi",
    ]
    command = shell.command(
        ["exec", *shell.launcher(plan), "trtllm-bench", *_bench_model(plan, args), "throughput"],
        ["--dataset", '"$dataset"'],
        ["--num_requests", f'"${{NUM_REQUESTS:-{requests}}}"'],
        ["--concurrency", f'"${{CONCURRENCY:-{concurrency}}}"'],
        *args.words,
        _options(plan),
        ['"$@"'],
    )
    return _script(plan, args, command, stamp=stamp, name="bench.sh", about=about, setup=setup)


_PREPARE = "benchmarks/cpp/prepare_dataset.py"


def can_prepare(plan: Plan) -> bool:
    """Return whether the plan has lengths, of which a dataset can be made."""
    return bool(plan.workload.isl and plan.workload.osl)


def _no_dataset(plan: Plan, args: TrtllmArguments, requests: int) -> list[str]:
    """Say how a dataset is made that has the lengths of the plan, by a program that this container has.

    From 1.2 trtllm-bench can make it (NVIDIA/TensorRT-LLM pull request 9250).
    """
    missing = "bench.sh: expected a dataset at $dataset, found none; set DATASET"
    work = plan.workload
    if not can_prepare(plan):
        return [f'echo "{missing} to a file of requests" >&2']
    model = shell.quoted(args.model)
    lengths = (
        f"token-norm-dist --input-mean {work.isl} --output-mean {work.osl} --input-stdev 0 --output-stdev 0 "
        f'--num-requests "${{NUM_REQUESTS:-{requests}}}"'
    )
    made = f'echo "{missing}, or make one:$(printf \' %q\' "${{make[@]}}")'
    if shell.release_of(plan).is_before("1.2.0"):
        image = plan.image_for("trtllm-bench")
        otherwise = [f'echo "{missing}, or run this in {image}, which has {_PREPARE}" >&2']
    else:
        program = [f"trtllm-bench --model {model}", 'prepare-dataset --output "$dataset${PREPARE:+.part}"', lengths]
        otherwise = [*shell.array("make", program), *_prepared('"${make[@]}"'), f'{made}" >&2']
    program = [f'python3 "$prepare" --stdout --tokenizer {model}', lengths]
    return [
        *comment_lines(
            "The command that is printed makes requests of the lengths that were planned for. With MTP, use real "
            "requests, because the number of accepted drafts depends on them."
        ),
        *shell.first_file("prepare", [f"{root}/{_PREPARE}" for root in shell.EXAMPLES]),
        'if [[ -n "$prepare" ]]; then',
        *shell.indented(shell.array("make", program)),
        *shell.indented(_prepared('"${make[@]}" > "$dataset.part"')),
        f'  {made} > $(printf %q "$dataset")" >&2',
        "else",
        *shell.indented(otherwise),
        "fi",
    ]


def _prepared(command: str) -> list[str]:
    """With PREPARE, run `command`, which makes the dataset. It gets its name when it is whole."""
    return [
        'if [[ -n "${PREPARE:-}" ]]; then',
        f"  {command}",
        '  mv -- "$dataset.part" "$dataset"',
        "  exit",
        "fi",
    ]


def _bench_model(plan: Plan, args: TrtllmArguments) -> list[str]:
    """Return the model's flags. A folder is named in addition to the model's name, not instead of it."""
    assert plan.checkpoint is not None
    if is_path(args.model):
        return ["--model", plan.checkpoint.model, "--model_path", shell.quoted(args.model)]
    return ["--model", shell.quoted(args.model)]


_TASKS = "mmlu, gsm8k or gpqa_diamond"


def eval_sh(plan: Plan, args: TrtllmArguments, *, stamp: str) -> str:
    """Return eval.sh, which measures the accuracy on one task."""
    about = (
        f"Measures the accuracy of {shell.model_title(plan)} with trtllm-eval, in {plan.image_for('trtllm-eval')}. The "
        f"first argument is the task: {_TASKS}. Further arguments are the task's own. The dataset of GPQA needs a "
        "Hugging Face account with access."
    )
    setup = [
        'task="${1:-}"',
        'case "$task" in',
        "  mmlu | gsm8k) options=() ;;",
        "  # GPQA's questions are asked as a chat (TensorRT-LLM examples/models/core/deepseek_v3/README.md).",
        "  gpqa_diamond) options=(--apply_chat_template) ;;",
        "  *)",
        f"    echo \"eval.sh: expected a task, {_TASKS}; got '$task'\" >&2",
        "    exit 2",
        "    ;;",
        "esac",
        "shift",
    ]
    command = shell.command(
        ["exec", *shell.launcher(plan), "trtllm-eval", "--model", shell.quoted(args.model)],
        *args.words,
        _options(plan),
        ['"$task"', '"${options[@]}"', '"$@"'],
    )
    return _script(plan, args, command, stamp=stamp, name="eval.sh", about=about, setup=setup)


def _script(
    plan: Plan,
    args: TrtllmArguments,
    command: list[str],
    *,
    stamp: str,
    name: str,
    about: str,
    setup: Sequence[str] = (),
) -> str:
    return shell.script(
        stamp,
        [about],
        [f"here={shell.HERE}", *_whole_paths(plan), *shell.exports(plan.environment, name)],
        setup,
        shell.on_every_node(plan, name),
        [*shell.flag_comments(args.flags), *command],
    )
