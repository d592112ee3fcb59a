"""The same plan for TensorRT-LLM's own programs: flags in a script, everything else in extra-llm-api-config.yml.

quickstart_advanced.py takes flags only. They are those of NVIDIA/TensorRT-LLM:
examples/pytorch/quickstart_advanced.py@9aee0c4e (about 0.21), examples/llm-api/quickstart_advanced.py@01303b38 (about
1.0) and a copy of about 1.2; --tokens_per_block and --spec_decode_max_draft_len also in
examples/models/core/deepseek_v3/README.md@a98a9061.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from deepseek_triton_build.arithmetic.gpu_memory import cuda_graph_batch_sizes
from deepseek_triton_build.data.planned_settings import Setting
from deepseek_triton_build.data.releases import Release, load_release
from deepseek_triton_build.data.spelling import canonical, flag_name
from deepseek_triton_build.render import shell
from deepseek_triton_build.render.model_configuration import llm_arguments, yaml_lines
from deepseek_triton_build.rules.rule import CANONICAL_RELEASE
from deepseek_triton_build.text import comment_lines, enroot_image, is_path

if TYPE_CHECKING:
    from deepseek_triton_build.planning.plan import Plan

YAML_NAME = "extra-llm-api-config.yml"
_LEAST_REQUESTS = 10
# Requests for each of those that run at once. The published runs send 10 requests one at a time, and 5,120 requests
# 1,024 at a time (TensorRT-LLM blog: How to get best performance on DeepSeek-R1).
_REQUESTS_PER_PLACE = 5


@dataclass(frozen=True, kw_only=True)
class TrtllmArguments:
    """A plan's LLM arguments, each in the one place where a program takes it."""

    model: str
    flags: tuple[shell.Flag, ...]
    yaml: tuple[Setting, ...]
    """Settings for the YAML, under the release's keys."""


def arguments(plan: Plan, program: str) -> TrtllmArguments:
    """Divide `plan` into the flags and the YAML of `program`: trtllm-serve, trtllm-bench or trtllm-eval.

    A section in the YAML replaces everything that flags say about that section, so all settings of such a section go
    into the YAML (update_llm_args_with_extra_dict in TensorRT-LLM's llm_args.py).
    """
    settings, release = llm_arguments(plan), shell.release_of(plan).version
    flags: dict[str, str | None] = {}
    for setting in settings:
        keys = list(canonical({setting.key: setting.value}, release))
        # A switch can only turn something on. Where trust_remote_code is one, it is off by default.
        has_flag = len(keys) == 1 and (setting.value is not False or setting.key == "trust_remote_code")
        flags[setting.key] = flag_name(program, keys[0]) if has_flag else None
    sections = {_section(setting) for setting in settings if flags[setting.key] is None} - {None}
    given: list[shell.Flag] = []
    rest: list[Setting] = []
    for setting in settings:
        flag = flags[setting.key]
        if setting.key == "model" or (flag and setting.key == "trust_remote_code" and not setting.value):
            continue  # the script itself names the model
        if flag is None or _section(setting) in sections:
            rest.append(setting)
        else:
            words = (flag,) if setting.value is True else (flag, shell.quoted(setting.value))
            given.append(shell.Flag(words, setting.comment))
    model = next(str(setting.value) for setting in settings if setting.key == "model")
    return TrtllmArguments(model=model, flags=tuple(given), yaml=tuple(rest))


def _section(setting: Setting) -> str | None:
    section, dot, _ = setting.key.partition(".")
    return section if dot else None


def extra_llm_api_config(args: TrtllmArguments, *, stamp: str, program: str, script: str) -> str:
    """Return the YAML beside the script. It is never empty, because the programs fail on an empty document."""
    about = f"Settings that {program} has no flag for; {script} passes this file. "
    about += "A section here replaces all flags about that section, so each section is complete."
    return "\n".join([f"# {stamp}", *comment_lines(about), *(yaml_lines(args.yaml) or ["{}"])]) + "\n"


def serve_sh(plan: Plan, args: TrtllmArguments, *, stamp: str) -> str:
    """Return serve.sh, which starts an OpenAI-compatible server."""
    profile = "" if plan.profile is None else plan.profile.name
    is_parsed = any(setting.key == "reasoning_parser" for setting in plan.settings)
    values = {
        **_values(plan, args, stamp, "trtllm-serve", "serve.sh"),
        "model": shell.quoted(args.model),
        # Beside the servers of a pair, the orchestrator has the first port.
        "port": {"ctx": 8001, "gen": 8002}.get(profile, 8000),
        # R1's reasoning comes apart from its answer, where the release is known to have the parser. For V4 none is.
        "reasoning_parser": plan.variant.thinks
        and not (plan.variant.architecture is not None and plan.variant.architecture.csa)
        and shell.release_of(plan).find_key("reasoning_parser") is not None
        and not is_parsed,
    }
    return shell.filled("trtllm_serve.sh", values)


def bench_sh(plan: Plan, args: TrtllmArguments, *, stamp: str) -> str:
    """Return bench.sh, which measures the throughput of the plan's own workload.

    Where there is no dataset, it says how one is made with the lengths of the plan, by a program that this container
    has. From 1.2 trtllm-bench can make it (NVIDIA/TensorRT-LLM pull request 9250).
    """
    assert plan.checkpoint is not None
    work, model = plan.workload, shell.quoted(args.model)
    concurrency = work.concurrency or plan.max_concurrency
    requests = max(_LEAST_REQUESTS, _REQUESTS_PER_PLACE * concurrency)
    lengths = (
        f"token-norm-dist --input-mean {work.isl} --output-mean {work.osl} --input-stdev 0 --output-stdev 0 "
        f'--num-requests "${{NUM_REQUESTS:-{requests}}}"'
    )
    prepare = " With PREPARE=1 the script only makes the dataset, where there is none."
    # A folder is named in addition to the model's name, not instead of it.
    flags = f"--model {plan.checkpoint.model} --model_path {model}" if is_path(args.model) else f"--model {model}"
    values = {
        **_values(plan, args, stamp, "trtllm-bench", "bench.sh"),
        "model": model,
        "model_flags": flags,
        "about_prepare": prepare if can_prepare(plan) else "",
        "lengths": lengths if can_prepare(plan) else "",
        "prepares_itself": not shell.release_of(plan).is_before("1.2.0"),
        "requests": requests,
        "concurrency": concurrency,
    }
    return shell.filled("trtllm_bench.sh", values)


def can_prepare(plan: Plan) -> bool:
    """Return whether the plan has lengths, of which a dataset can be made."""
    return bool(plan.workload.isl and plan.workload.osl)


def eval_sh(plan: Plan, args: TrtllmArguments, *, stamp: str) -> str:
    """Return eval.sh, which measures the accuracy on one task."""
    values = _values(plan, args, stamp, "trtllm-eval", "eval.sh")
    return shell.filled("trtllm_eval.sh", {**values, "model": shell.quoted(args.model)})


def _values(plan: Plan, args: TrtllmArguments, stamp: str, program: str, script: str) -> dict[str, Any]:
    """Return what the scripts of all three programs need."""
    return {
        **shell.script_values(plan, stamp, script),
        **shell.rank_values(plan),
        **shell.flag_values(args.flags),
        "title": shell.model_title(plan),
        "image": plan.image_for(program),
        "files": [file.name for file in plan.files],
        # With files beside the YAML, the program gets a copy of it that has their whole paths.
        "folder": "config" if plan.files else "here",
        "launcher": shell.launcher(plan),
    }


def bench_slurm(plan: Plan, args: TrtllmArguments, *, stamp: str) -> str:
    """Return bench.slurm, for a plan of several nodes: a batch script that makes the dataset where there is none, and
    runs bench.sh over all nodes. One process makes it, because the ranks would each make one."""
    mount = shell.quoted(f"{args.model}:{args.model}:ro")
    values = {
        "stamp": f"# {stamp}",
        "title": shell.model_title(plan),
        "image": enroot_image(plan.image_for("trtllm-bench") or ""),
        "nodes": plan.num_nodes,
        "gpus_per_node": plan.gpus_per_node,
        "world_size": plan.world_size,
        "about_dataset": "The dataset is made when there is none. " if can_prepare(plan) else "",
        "model_mount": mount if is_path(args.model) else "",
    }
    return shell.filled("bench.slurm", values)


_VALUES = {
    "tensor_parallel_size": "--tp_size",
    "pipeline_parallel_size": "--pp_size",
    "moe_expert_parallel_size": "--moe_ep_size",
    "max_batch_size": "--max_batch_size",
    "max_num_tokens": "--max_num_tokens",
    "max_seq_len": "--max_seq_len",
    "attn_backend": "--attention_backend",
    "moe_config.backend": "--moe_backend",
    "kv_cache_config.dtype": "--kv_cache_dtype",
    "kv_cache_config.free_gpu_memory_fraction": "--kv_cache_fraction",
    "kv_cache_config.tokens_per_block": "--tokens_per_block",
    "attention_dp_config.timeout_iters": "--attention_dp_time_out_iters",
    "attention_dp_config.batching_wait_iters": "--attention_dp_batching_wait_iters",
    "sampler_type": "--sampler_type",
    "speculative_config.decoding_type": "--spec_decode_algo",
    "speculative_config.num_nextn_predict_layers": "--spec_decode_max_draft_len",
    "speculative_config.relaxed_topk": "--relaxed_topk",
    "speculative_config.relaxed_delta": "--relaxed_delta",
}
_SWITCHES = {
    "enable_attention_dp": (True, "--enable_attention_dp"),
    "attention_dp_config.enable_balance": (True, "--attention_dp_enable_balance"),
    "enable_chunked_prefill": (True, "--enable_chunked_prefill"),
    "disable_overlap_scheduler": (True, "--disable_overlap_scheduler"),
    "print_iter_log": (True, "--print_iter_log"),
    "trust_remote_code": (True, "--trust_remote_code"),
    "cuda_graph_config.enable_padding": (True, "--cuda_graph_padding_enabled"),
    "kv_cache_config.enable_block_reuse": (False, "--disable_kv_cache_reuse"),
    "speculative_config.use_relaxed_acceptance_for_thinking": (True, "--use_relaxed_acceptance_for_thinking"),
}
"""Key -> the value that the flag stands for, and the flag. The other value is the script's own default."""

_SINCE = {
    "--attention_dp_enable_balance": "1.1.0",
    "--attention_dp_time_out_iters": "1.1.0",
    "--attention_dp_batching_wait_iters": "1.1.0",
    "--sampler_type": "1.1.0",
    "--tokens_per_block": "1.2.0",
}
"""Flag -> the release since which it is known to exist; all other flags are older."""

_SET_BY_THE_SCRIPT = ("model", "backend", "cuda_graph_config")


def flag_meanings() -> dict[str, tuple[str, Any]]:
    """Return flag -> the canonical key that it sets, and the value that it stands for; None where that follows it."""
    switches = {flag: (key, given) for key, (given, flag) in _SWITCHES.items()}
    others = {
        "--cuda_graph_batch_sizes": ("cuda_graph_config.batch_sizes", None),
        "--spec_decode_nextn": ("speculative_config.num_nextn_predict_layers", None),
        "--enable_trtllm_sampler": ("sampler_type", "TRTLLMSampler"),
    }
    return {flag: (key, None) for key, flag in _VALUES.items()} | switches | others


def quickstart_sh(plan: Plan, *, stamp: str) -> str:
    """Return quickstart.sh, which answers a few prompts once."""
    release = shell.release_of(plan)
    settings = {
        key: replace(setting, key=key, value=value)
        for setting in llm_arguments(plan)
        for key, value in canonical({setting.key: setting.value}, release.version).items()
    }
    flags, left = _flags(settings, release)
    folders = ["examples/llm-api", "examples/pytorch"]
    if release.is_before("1.0.0"):
        folders.reverse()
    values = {
        **shell.script_values(plan, stamp, "quickstart.sh"),
        **shell.rank_values(plan),
        **shell.flag_values(flags),
        "title": shell.model_title(plan),
        "image": plan.image_for("quickstart"),
        "places": [f"{root}/{folder}/quickstart_advanced.py" for folder in folders for root in shell.EXAMPLES],
        "left": ", ".join(left),
        "launcher": shell.launcher(plan),
        "model": shell.quoted(settings["model"].value),
    }
    return shell.filled("quickstart.sh", values)


def _flags(settings: Mapping[str, Setting], release: Release) -> tuple[list[shell.Flag], list[str]]:
    """Return the flags, and the keys that no flag can set."""
    flags: list[shell.Flag] = []
    left = []
    for key, setting in settings.items():
        words = _words(key, setting.value, release)
        if words:
            flags.append(shell.Flag(words, setting.comment))
            continue
        # What the script or the engine does anyway needs no flag.
        known = load_release(CANONICAL_RELEASE).find_key(key)
        is_default = known is not None and known.default == setting.value
        is_off = key in _SWITCHES and setting.value is not _SWITCHES[key][0]
        if not (is_default or is_off or key in _SET_BY_THE_SCRIPT):
            left.append(setting.key)
    if any(key.startswith("cuda_graph_config.") for key in settings):
        flags.append(shell.Flag(("--use_cuda_graph",), "without this flag the script leaves CUDA graphs off"))
    if "speculative_config.decoding_type" in settings:
        reason = "MTP in one model, as the LLM arguments have it; copies of about 1.2 take two models without this flag"
        flags.append(shell.Flag(("--use_one_model",), reason))
    return flags, left


def _words(key: str, value: Any, release: Release) -> tuple[str, ...]:
    """Return the flag that sets `key` to `value`, and its values, as shell text; nothing when there is no such flag."""
    if key in _SWITCHES:
        given, flag = _SWITCHES[key]
        return (flag,) if value is given and _has(release, flag) else ()
    if key in ("cuda_graph_config.batch_sizes", "cuda_graph_config.max_batch_size"):
        sizes = value if isinstance(value, list | tuple) else cuda_graph_batch_sizes(value)
        return ("--cuda_graph_batch_sizes", *map(str, sizes))
    if key == "speculative_config.num_nextn_predict_layers":
        # The older name was read in copies of about 0.21 and 1.0, the newer one in a copy of about 1.2.
        flag = "--spec_decode_nextn" if release.is_before("1.1.0") else "--spec_decode_max_draft_len"
        return flag, shell.quoted(value)
    if key == "sampler_type" and not _has(release, "--sampler_type"):
        return ("--enable_trtllm_sampler",) if value == "TRTLLMSampler" else ()
    if key in _VALUES and _has(release, _VALUES[key]):
        return _VALUES[key], shell.quoted(value)
    return ()


def _has(release: Release, flag: str) -> bool:
    return flag not in _SINCE or not release.is_before(_SINCE[flag])
