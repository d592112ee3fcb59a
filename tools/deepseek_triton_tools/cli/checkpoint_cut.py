"""`deepseek-triton checkpoint cut`: a small checkpoint of a model's own shapes, to test hardware and settings."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from deepseek_triton_tools.cli.parsing import Verbs, add_json, add_verb, path, positive, require_tools
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.tool_errors import InstallationError

_DOCUMENT = "deepseek-triton/checkpoint-cut/1"


def add_cut_form(forms: Verbs) -> None:
    """Add the form `cut` to `checkpoint`."""
    verb = add_verb(forms, "cut", "write the first layers and experts as a checkpoint of its own, to test hardware")
    verb.runs(
        _cut,
        "deepseek-triton checkpoint cut /models/DeepSeek-R1 --layers 4 --output /models/R1-4",
        "deepseek-triton checkpoint cut /models/DeepSeek-R1 --layers 5 --experts 32 --mtp --output /models/R1-small",
        notes="The tensors keep their shapes and bytes, so kernels, memory and settings are tested as they are; the\n"
        "answers are noise. `build --model OUTPUT` plans it with its own size.",
    )
    verb.add_argument("source", type=path, metavar="DIR", help="folder of the checkpoint")
    verb.add_argument("--layers", type=positive, required=True, metavar="N", help="keep the first N layers")
    verb.add_argument("--output", type=path, required=True, metavar="DIR", help="folder to write; it must not exist")
    help_text = "keep the first N routed experts of each layer, and the router's rows for them (default: all)"
    verb.add_argument("--experts", type=positive, metavar="N", help=help_text)
    verb.add_argument("--mtp", action="store_true", help="keep the MTP layer, after the last layer that is kept")
    add_json(verb, "docs/checkpoints.md")


def _cut(args: argparse.Namespace) -> int:
    require_tools()
    if find_spec("ml_dtypes") is None:
        raise InstallationError(f"checkpoint cut needs ml-dtypes and numpy: {install_extra('checkpoint')}")
    from deepseek_triton_tools.checkpoints.cut import CutOptions, plan_cut, write_cut
    from deepseek_triton_tools.checkpoints.stored_tensors import open_checkpoint, read_config
    from deepseek_triton_tools.host.stop_signals import Stop
    from deepseek_triton_tools.host.units import part_of, sized
    from deepseek_triton_tools.terminal.output_streams import complain, print_json
    from deepseek_triton_tools.terminal.status_line import StatusLine

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
        print_json({"schema": _DOCUMENT, **document})
    else:
        print(f"wrote {args.output}: {num_tensors:,} tensors, {sized(cut.size)}")
    return 0
