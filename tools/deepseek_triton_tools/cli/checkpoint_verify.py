"""`deepseek-triton checkpoint verify`: compare a checkpoint's files with their hashes, offline."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from deepseek_triton_tools.cli.parsing import Verbs, add_json, add_verb, positive, require_tools, words
from deepseek_triton_tools.host.units import part_of, sized
from deepseek_triton_tools.terminal.output_streams import print_json, to_reader
from deepseek_triton_tools.terminal.status_line import StatusLine
from deepseek_triton_tools.tool_errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from deepseek_triton_tools.checkpoints.verify import VerifyReport

_PLAIN_S = 15.0
_MOST_JOBS = 8


def add_verify_form(forms: Verbs) -> None:
    """Add the form `verify` to `checkpoint`."""
    verb = add_verb(forms, "verify", "compare every file with its size and SHA-256, offline, and name what is damaged")
    verb.runs(
        _verify,
        "deepseek-triton checkpoint verify /models/DeepSeek-R1",
        "deepseek-triton checkpoint verify deepseek-ai/DeepSeek-R1 --json",
        notes="The hashes are in checkpoint.sha256.json, which download and quantize write, in the hub's cache, or in\n"
        "*.sha256. Without them, only the index and headers are looked at. Exit code 1: something is damaged.",
    )
    verb.add_argument(
        "checkpoint", type=words, metavar="CHECKPOINT", help="its folder, or OWNER/NAME in the hub's cache"
    )
    verb.add_argument("--jobs", type=positive, metavar="N", help="files at once (default: one a CPU, at most 8)")
    add_json(verb, "docs/checkpoints.md")


def _verify(args: argparse.Namespace) -> int:
    require_tools()
    from deepseek_triton_tools.checkpoints.verify import VerifyProgress, verify

    status = StatusLine(_PLAIN_S)

    def show(progress: VerifyProgress) -> None:
        status.show(lambda: f"compared {part_of(progress.done, progress.total)}")

    jobs = args.jobs or min(_MOST_JOBS, len(os.sched_getaffinity(0)))
    try:
        report = verify(_folder(args.checkpoint), jobs=jobs, observe=show)
    finally:
        status.clear()
    code = 1 if report.damages else 0
    with to_reader():
        if args.json:
            print_json(_document(report, code))
        else:
            for damage in report.damages:
                print(damage)
            print(_summary(report))
    return code


def _folder(checkpoint: str) -> Path:
    """Return the folder, in the hub's cache where there is none of that name.

    :raises CheckpointError: when it is in neither place.
    """
    from pathlib import Path

    from deepseek_triton_build.text import safe_name
    from deepseek_triton_tools.repository.hub_cache import find_snapshot, parse_hub_name

    if (path := Path(checkpoint)).exists():
        return path
    name = parse_hub_name(checkpoint)
    if name is None:
        raise CheckpointError(
            f"{safe_name(checkpoint)}: expected a checkpoint's folder or OWNER/NAME, found nothing; correct the path"
        )
    folder, _ = find_snapshot(name)
    return folder


def _summary(report: VerifyReport) -> str:
    from deepseek_triton_build.text import safe_name

    files = f"{report.num_files} files, {sized(report.num_bytes)}"
    of = f" of {safe_name(report.source)}" if report.source else ""
    ending = f"{len(report.damages)} damaged" if report.damages else "nothing is damaged"
    if not report.compared_with:
        return (
            f"{report.folder}: there are no hashes: only the index and the headers of {files} were looked at; {ending}"
        )
    rest = f"; {len(report.unverified)} weight files have no hash there" if report.unverified else ""
    return f"{report.folder}: {files}{of}, compared with {report.compared_with}{rest}; {ending}"


def _document(report: VerifyReport, exit_code: int) -> dict[str, object]:
    from dataclasses import asdict

    from deepseek_triton_tools.checkpoints.verify import SCHEMA

    return (
        {"schema": SCHEMA, "ok": not exit_code, "exit_code": exit_code}
        | asdict(report)
        | {"folder": str(report.folder)}
    )
