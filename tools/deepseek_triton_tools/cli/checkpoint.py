"""`deepseek-triton checkpoint`: get a checkpoint, verify it, look into it, and make another precision of it.

`quantize` has a module of its own.
"""

import argparse
import os
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from deepseek_triton_tools.cli.checkpoint_quantize import add_quantize_form, require_numbers
from deepseek_triton_tools.cli.parsing import (
    VerbParser,
    Verbs,
    add_json,
    add_verb,
    duration,
    option,
    path,
    positive,
    require_tools,
    size,
    words,
)
from deepseek_triton_tools.host.units import part_of, sized
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.terminal.output_streams import complain, print_json, to_reader
from deepseek_triton_tools.terminal.status_line import StatusLine
from deepseek_triton_tools.tool_errors import CheckpointError, InstallationError, ToolError

# The hub's library takes longer than the rest of --help.
if TYPE_CHECKING:
    from deepseek_triton_tools.repository.hub_cache import HubName

_PLAIN_S = 15.0
_MOST_JOBS = 8
_CUT_DOCUMENT = "deepseek-triton/checkpoint-cut/1"


def add_options(verb: VerbParser) -> None:
    forms = verb.add_forms(
        "FORM",
        "deepseek-triton checkpoint download deepseek-r1 --to /models/DeepSeek-R1",
        "deepseek-triton checkpoint quantize /models/DeepSeek-R1 --to w4afp8 --act-scales act_scales.safetensors "
        "--output /models/DeepSeek-R1-W4AFP8",
        notes="docs/checkpoints.md has more.",
    )
    for add in (_add_download, _add_verify, _add_info, add_quantize_form, _add_calibrate, _add_cut):
        add(forms)


def _add_download(forms: Verbs) -> None:
    verb = add_verb(forms, "download", "download what serving needs, each file verified; started again, it continues")
    verb.runs(
        _download,
        "deepseek-triton checkpoint download deepseek-r1 --to /models/DeepSeek-R1",
        "deepseek-triton checkpoint download nvidia/DeepSeek-R1-FP4 --revision main --rate-limit 500MB",
        notes="HF_TOKEN or `hf auth login` gives the token, HF_ENDPOINT a mirror. docs/checkpoints.md has more.\n"
        "Exit codes: 0 all files are there and verified; 1 some are not; 2 wrong command line; 130 interrupted.",
    )
    verb.usage = "%(prog)s MODEL [--to DIR] [options]"
    option(verb, "model MODEL", "a name of `deepseek-triton variants`, or OWNER/NAME on the hub", words)
    option(verb, "--to DIR", "a plain folder (default: the hub's cache)", path)
    option(verb, "--precision NAME", "of a variant's several checkpoints (default: its first)")
    option(verb, "--revision NAME", "a branch, tag or commit (default: main)", words)
    option(verb, "--include GLOB", "instead of what serving needs; may be repeated", words, action="append")
    option(verb, "--exclude GLOB", "but not these; may be repeated", words, action="append")
    limits = verb.add_argument_group("limits; SIZE is 64GiB or 64G (2^30 each), 500MB (10^6) or a number of bytes")
    option(limits, "--jobs N", "files at once (default: 4)", positive, default=4)
    option(limits, "--rate-limit SIZE", "most bytes a second (default: no limit)", size)
    option(limits, "--give-up S", "end if no byte came for S (default: 300)", duration, default=300.0)


def _download(args: argparse.Namespace) -> int:
    require_tools()
    if find_spec("huggingface_hub") is None:
        raise InstallationError(f"this form needs huggingface_hub; {install_extra('checkpoint')}")
    name = _hub_name(args)
    from deepseek_triton_tools.checkpoints.download import NOT_SERVED, SERVED, DownloadOptions, DownloadView, download

    options = DownloadOptions(
        name=name,
        folder=args.to,
        include=args.include or SERVED,
        exclude=(*(args.exclude or ()), *(() if args.include else NOT_SERVED)),
        jobs=args.jobs,
        rate_limit=args.rate_limit,
        give_up_s=args.give_up,
    )
    view = DownloadView()
    try:
        result = download(options, view)
    except KeyboardInterrupt:
        view.say("interrupted: start it again, and it continues")
        raise
    finally:
        view.clear()
    with to_reader():
        came = f"{sized(result.received)} of it now" if result.received else "all was there"
        print(
            f"{result.folder}: {len(result.files)} files of {name}, {sized(result.size)}, verified; {came}; "
            f"commit {result.listing.commit}"
        )
    return 0


def _hub_name(args: argparse.Namespace) -> "HubName":
    """Return the name on the hub. Raises ToolError where there is none."""
    from deepseek_triton_build.text import safe_name
    from deepseek_triton_tools.repository.hub_cache import HubName, parse_hub_name

    if "/" not in args.model:
        name: HubName | None = HubName(_of_variant(args.model, args.precision))
    elif args.precision:
        raise ToolError("--precision chooses among a variant's checkpoints; OWNER/NAME is one already", exit_code=2)
    else:
        name = parse_hub_name(args.model)
    if name is None:
        raise ToolError(
            f"expected a name of `deepseek-triton variants` or OWNER/NAME, got {safe_name(args.model)}", exit_code=2
        )
    if args.revision is None:
        return name
    if "@" in args.model:
        raise ToolError(f"{args.model} has a revision already; leave --revision out", exit_code=2)
    return HubName(name.model, args.revision)


def _of_variant(variant_name: str, precision: str | None) -> str:
    from deepseek_triton_build.catalog import checkpoint_named, find_precision, find_variant, full_name, variants

    if full_name(variant_name) not in variants() and (named := checkpoint_named(variant_name, precision)):
        if precision is not None and named[1].precision != find_precision(precision):
            raise ToolError(f"{variant_name} is known as {named[1].model} only; correct --precision", exit_code=2)
        return named[1].model
    variant = find_variant(variant_name)
    published = {each: known.model for each, known in variant.checkpoints.items() if "/" in known.model}
    if not published:
        raise ToolError(f"{variant.name} is not on the hub: it travels in every repository that build writes")
    chosen = next(iter(published)) if precision is None else find_precision(precision)
    if chosen not in published:
        known = ", ".join(f"{each} ({model})" for each, model in published.items())
        raise ToolError(f"{variant.name} is published as {known}, not as {chosen}; correct --precision", exit_code=2)
    return published[chosen]


def _add_verify(forms: Verbs) -> None:
    verb = add_verb(forms, "verify", "compare every file with its size and SHA-256, offline, and name what is damaged")
    verb.runs(
        _verify,
        "deepseek-triton checkpoint verify /models/DeepSeek-R1",
        "deepseek-triton checkpoint verify deepseek-ai/DeepSeek-R1 --json",
        notes="The hashes are in checkpoint.sha256.json, which download and quantize write, in the hub's cache, or in\n"
        "*.sha256. Without them, only the index and headers are looked at. Exit code 1: something is damaged.",
    )
    option(verb, "checkpoint CHECKPOINT", "its folder, or OWNER/NAME in the hub's cache", words)
    option(verb, "--jobs N", "files at once (default: one a CPU, at most 8)", positive)
    add_json(verb, "docs/checkpoints.md")


def _verify(args: argparse.Namespace) -> int:
    require_tools()
    from deepseek_triton_tools.checkpoints.verify import SCHEMA, verify

    status = StatusLine(_PLAIN_S)

    def show(done: int, total: int) -> None:
        status.show(lambda: f"compared {part_of(done, total)}")

    jobs = args.jobs or min(_MOST_JOBS, len(os.sched_getaffinity(0)))
    try:
        report = verify(_folder(args.checkpoint), jobs=jobs, observe=show)
    finally:
        status.clear()
    code = 1 if report.damages else 0
    with to_reader():
        if args.json:
            print_json(
                {"schema": SCHEMA, "ok": not code, "exit_code": code, **asdict(report), "folder": str(report.folder)}
            )
        else:
            for damage in report.damages:
                print(damage)
            print(report.summary())
    return code


def _folder(checkpoint: str) -> Path:
    """Return the folder, in the hub's cache where there is none of that name.

    :raises CheckpointError: when it is in neither place.
    """
    from deepseek_triton_build.text import safe_name
    from deepseek_triton_tools.repository.hub_cache import find_snapshot, parse_hub_name

    if (path := Path(checkpoint)).exists():
        return path
    if (name := parse_hub_name(checkpoint)) is None:
        raise CheckpointError(
            f"{safe_name(checkpoint)}: expected a checkpoint's folder or OWNER/NAME, found nothing; correct the path"
        )
    folder, _ = find_snapshot(name)
    return folder


def _add_info(forms: Verbs) -> None:
    verb = add_verb(forms, "info", "say what a checkpoint is: model, precision, parts, and what serves it")
    verb.runs(
        _info,
        "deepseek-triton checkpoint info /models/DeepSeek-R1",
        "deepseek-triton checkpoint info deepseek-ai/DeepSeek-R1 --json",
        notes="Only headers are read, so it takes seconds. Exit codes: 0 it is described; 1 its files contradict each\n"
        "other, or one is missing or damaged.",
    )
    what = "its folder, its Hugging Face name in the local cache, or a model repository that serves it"
    option(verb, "checkpoint CHECKPOINT", what, words)
    add_json(verb, "docs/checkpoints.md")


def _info(args: argparse.Namespace) -> int:
    require_tools()
    require_numbers("info")
    from deepseek_triton_tools.checkpoints.info import SCHEMA, describe, tables
    from deepseek_triton_tools.repository.checkpoint_files import find_checkpoints
    from deepseek_triton_tools.terminal.tables import show

    infos = [describe(files) for files in find_checkpoints(args.checkpoint)]
    with to_reader():
        if args.json:
            print_json({"schema": SCHEMA, "checkpoints": infos})
        else:
            for info in infos:
                for table in tables(info):
                    show(table)
    problems = [problem for info in infos for problem in info["problems"]]
    for problem in problems:
        complain(f"deepseek-triton checkpoint: {problem}")
    return 1 if problems else 0


def _add_calibrate(forms: Verbs) -> None:
    verb = add_verb(forms, "calibrate", "print a script that calibrates activations for W4AFP8 on 8 GPUs, or run it")
    verb.runs(
        _calibrate,
        "deepseek-triton checkpoint calibrate /models/DeepSeek-R1 --output /models/R1-amax > calibrate.sh",
        "deepseek-triton checkpoint calibrate /models/DeepSeek-R1 --output /models/R1-amax --run",
        notes="The folder is for checkpoint quantize --to w4afp8 --act-scales. A run that has failed goes on with the\n"
        "stage that failed. It clones and installs NVIDIA's ModelOpt. docs/checkpoints.md has more.",
    )
    option(verb, "source DIR", "folder of DeepSeek-V3, R1 or V3.1 in FP8, as published", path)
    what = "folder that gets the amax files; the work beside it, OUT.work, takes as much disk as the checkpoint"
    option(verb, "--output OUT", what, path, required=True)
    option(verb, "--run", "run it here, instead of printing it")


def _calibrate(args: argparse.Namespace) -> int:
    require_numbers("calibrate")
    from deepseek_triton_tools.checkpoints.calibration import lacking, plan_calibration, render_calibration
    from deepseek_triton_tools.doctor.machine import Machine
    from deepseek_triton_tools.host.lifecycle import run_instead

    calibration = plan_calibration(args.source, args.output)
    text = render_calibration(calibration)
    if args.run:
        if wrong := list(lacking(calibration, Machine())):
            raise InstallationError(f"the calibration can't run here: {'; '.join(wrong)}")
        run_instead(["bash", "-c", text, "calibrate"])
    with to_reader():
        print(text, end="")
    return 0


def _add_cut(forms: Verbs) -> None:
    verb = add_verb(forms, "cut", "write the first layers and experts as a checkpoint of its own, to test hardware")
    verb.runs(
        _cut,
        "deepseek-triton checkpoint cut /models/DeepSeek-R1 --layers 4 --output /models/R1-4",
        "deepseek-triton checkpoint cut /models/DeepSeek-R1 --layers 5 --experts 32 --mtp --output /models/R1-small",
        notes="The tensors keep their shapes and bytes, so kernels, memory and settings are tested as they are; the\n"
        "answers are noise. `build --model OUTPUT` plans it with its own size.",
    )
    option(verb, "source DIR", "folder of the checkpoint", path)
    option(verb, "--layers N", "keep the first N layers", positive, required=True)
    option(verb, "--output DIR", "folder to write, new or empty", path, required=True)
    what = "keep the first N routed experts of each layer, and the router's rows for them (default: all)"
    option(verb, "--experts N", what, positive)
    option(verb, "--mtp", "keep the MTP layer, after the last layer that is kept")
    add_json(verb, "docs/checkpoints.md")


def _cut(args: argparse.Namespace) -> int:
    require_tools()
    require_numbers("cut")
    from deepseek_triton_tools.checkpoints.cut import CutOptions, plan_cut, write_cut
    from deepseek_triton_tools.checkpoints.stored_tensors import open_checkpoint, read_config
    from deepseek_triton_tools.host.lifecycle import Stop

    options = CutOptions(num_layers=args.layers, num_experts=args.experts, keep_mtp=args.mtp)
    cut = plan_cut(open_checkpoint(args.source), read_config(args.source), options)
    if not cut.num_moe_layers:
        complain(f"note: the first {args.layers} layers are dense: none with routed experts is kept")
    status = StatusLine()
    with Stop() as stop:
        is_done = write_cut(
            cut,
            args.output,
            on_progress=lambda written: status.show(lambda: part_of(written, cut.size)),
            should_stop=stop.event.is_set,
        )
        status.clear()
        if not is_done:
            complain(f"{args.output}: stopped; nothing was written")
            return stop.exit_code
    num_tensors = sum(map(len, cut.shards.values()))
    if args.json:
        document = {"output": str(args.output), "files": len(cut.shards), "tensors": num_tensors, "bytes": cut.size}
        print_json({"schema": _CUT_DOCUMENT, **document})
    else:
        print(f"wrote {args.output}: {num_tensors:,} tensors, {sized(cut.size)}")
    return 0
