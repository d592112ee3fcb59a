"""`deepseek-triton checkpoint quantize`: make a checkpoint of another precision."""

import argparse
import os
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from deepseek_triton_tools.cli.parsing import Verbs, add_json, add_verb, option, path, positive, share, size
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.tool_errors import CheckpointError, InstallationError, ToolError

if TYPE_CHECKING:
    from deepseek_triton_tools.checkpoints.converting import ConversionProgress

_TARGETS = ("w4afp8", "fp8", "bf16")
_DOCUMENT = "deepseek-triton/checkpoint-quantize/1"


def add_quantize_form(forms: Verbs) -> None:
    verb = add_verb(forms, "quantize", "write a checkpoint in W4AFP8, FP8 or bfloat16, or switch its KV cache to FP8")
    verb.runs(
        _quantize,
        "deepseek-triton checkpoint quantize /models/DeepSeek-R1 --to w4afp8 --act-scales act_scales.safetensors "
        "--output /models/DeepSeek-R1-W4AFP8",
        "deepseek-triton checkpoint quantize /models/DeepSeek-R1 --kv-cache fp8",
        notes="Run the same command again after a stop, and it goes on. Exit codes: 0 the checkpoint is complete; 1 it "
        "failed; 2 wrong command line; 3 this share is done, others are not.\ndocs/checkpoints.md has more.",
    )
    option(verb, "source DIR", "folder of the checkpoint", path)
    targets = "w4afp8: experts in INT4; fp8: blocks of 128 x 128; bf16"
    option(verb, "--to", targets, type=str.lower, choices=_TARGETS)
    option(verb, "--output DIR", "folder to write, new or of a run that was stopped", path)
    what = "w4afp8: a safetensors file of input scales, or the folder that ModelOpt's calibration wrote"
    option(verb, "--act-scales PATH", what, path)
    what = "TensorRT-LLM keeps the KV cache in FP8; without --to, only hf_quant_config.json in DIR is written"
    option(verb, "--kv-cache", what, type=str.lower, choices=("fp8",))
    what = "the layer for multi-token prediction, in FP8 with w4afp8 (default: keep)"
    option(verb, "--mtp", what, choices=("keep", "drop"), default="keep")
    add_json(verb, "docs/checkpoints.md")
    work = verb.add_argument_group("work; none of it changes a byte of what is written, except --shard-size")
    option(work, "--workers N", "processes (default: one a core)", positive)
    option(work, "--share K/N", "do only part K of N (default: 1/1)", share, default=(1, 1))
    option(work, "--shard-size SIZE", "of each file (default: 1/64 of all, 100MB to 2.5GB)", size)


def require_numbers(form: str) -> None:
    """:raises InstallationError: without the extra `checkpoint`, which has FP8 for numpy."""
    if find_spec("ml_dtypes") is None:
        raise InstallationError(f"checkpoint {form} needs ml-dtypes and numpy: {install_extra('checkpoint')}")


def _quantize(args: argparse.Namespace) -> int:
    require_numbers("quantize")
    if args.to is None:
        return _switch_kv_cache(args)
    if args.output is None:
        raise ToolError("expected --output with --to: the folder to write", exit_code=2)
    return _convert(args)


def _switch_kv_cache(args: argparse.Namespace) -> int:
    """Change hf_quant_config.json of the checkpoint itself, whose weights stay as they are."""
    from deepseek_triton_build import quant_config_change, write_quant_config
    from deepseek_triton_build.check import read_facts
    from deepseek_triton_tools.checkpoints.conversion_plan import W4AFP8_KV_CACHE
    from deepseek_triton_tools.checkpoints.converting import update_manifest

    if args.kv_cache is None:
        raise ToolError("expected --to w4afp8, fp8 or bf16, or --kv-cache fp8", exit_code=2)
    given = (args.output, args.act_scales, args.mtp == "drop", args.share != (1, 1), args.workers, args.shard_size)
    if any(given):
        names = "--output, --act-scales, --mtp, --share, --workers and --shard-size"
        raise ToolError(f"{names} go with --to; without it only hf_quant_config.json is changed", exit_code=2)
    facts, findings = read_facts(args.source, str(args.source))
    if facts.is_contradictory:
        raise CheckpointError("; ".join(f"{finding.file}: {finding.message}; {finding.fix}" for finding in findings))
    change = quant_config_change(args.source, "FP8")
    if change.after["quantization"]["quant_algo"] == "MIXED_PRECISION":
        raise CheckpointError(f"{args.source}: {W4AFP8_KV_CACHE}", exit_code=2)
    write_quant_config(change)
    update_manifest(args.source, change.path.name)
    _say(args, change.summary, {"changed": str(change.path) if change.is_needed else None})
    return 0


def _convert(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.checkpoints.activation_scales import read_activation_scales
    from deepseek_triton_tools.checkpoints.conversion_plan import ConversionOptions, plan_conversion
    from deepseek_triton_tools.checkpoints.converting import ConversionRun, convert
    from deepseek_triton_tools.checkpoints.stored_tensors import open_checkpoint, read_config
    from deepseek_triton_tools.host.lifecycle import Stop
    from deepseek_triton_tools.host.units import about, part_of, sized
    from deepseek_triton_tools.terminal.output_streams import complain
    from deepseek_triton_tools.terminal.status_line import StatusLine

    options = ConversionOptions(
        target=args.to,
        act_scales=args.act_scales and read_activation_scales(args.act_scales),
        kv_cache_fp8=args.kv_cache is not None,
        keep_mtp=args.mtp == "keep",
        shard_bytes=args.shard_size,
    )
    plan = plan_conversion(open_checkpoint(args.source), read_config(args.source), options)
    run = ConversionRun(workers=args.workers or len(os.sched_getaffinity(0)), share=args.share)
    status, begin_s = StatusLine(), time.monotonic()
    last: list[ConversionProgress] = []

    def show(progress: "ConversionProgress") -> None:
        if not last and not args.json:
            files = "1 file" if len(plan.shards) == 1 else f"{len(plan.shards)} files"
            status.say(f"{args.source}: {sized(plan.source_bytes)} to {sized(plan.size)} in {files}")
        last[:] = [progress]
        rate = progress.new / max(time.monotonic() - begin_s, 1e-9)
        left = f"{about((progress.total - progress.done) / rate)} left" if rate else "begun"
        files = f"files {progress.num_files_done}/{progress.num_files}"
        status.show(lambda: f"{files}, {part_of(progress.done, progress.total)}, {sized(rate)}/s, {left}")

    with Stop() as stop:
        is_complete = convert(plan, args.output, run, on_progress=show, should_stop=stop.event.is_set)
        status.clear()
        if stop.event.is_set() and not is_complete:
            complain(f"{args.output}: stopped; the same command goes on from here")
            return stop.exit_code
    elapsed_s = time.monotonic() - begin_s
    num_new = last[0].new if last else 0
    document = {
        "output": str(args.output),
        "complete": is_complete,
        "files": len(plan.shards),
        "bytes": plan.size,
        "read_bytes": num_new,
        "seconds": round(elapsed_s, 3),
    }
    rate = f", {sized(num_new)} read in {about(elapsed_s)}: {sized(num_new / elapsed_s)}/s" if num_new else ""
    what = "complete" if is_complete else f"share {run.share[0]}/{run.share[1]} is done, others are not"
    _say(args, f"{args.output}: {what}{rate}", document)
    return 0 if is_complete else 3


def _say(args: argparse.Namespace, text: str, document: dict[str, Any]) -> None:
    from deepseek_triton_tools.terminal.output_streams import print_json

    if args.json:
        print_json({"schema": _DOCUMENT, **document})
    else:
        print(text)
