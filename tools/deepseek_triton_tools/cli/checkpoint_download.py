"""`deepseek-triton checkpoint download`: a checkpoint from the Hugging Face hub, verified as it lands."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import TYPE_CHECKING

from deepseek_triton_tools.cli.parsing import (
    Verbs,
    add_verb,
    duration,
    option,
    path,
    positive,
    require_tools,
    size,
    words,
)
from deepseek_triton_tools.host.units import sized
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.terminal.output_streams import to_reader
from deepseek_triton_tools.tool_errors import InstallationError, ToolError

# The hub's library takes longer than the rest of --help.
if TYPE_CHECKING:
    from deepseek_triton_tools.repository.hub_cache import HubName


def add_download_form(forms: Verbs) -> None:
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


def _hub_name(args: argparse.Namespace) -> HubName:
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
