"""`deepseek-triton upgrade`: a folder that `build` wrote, as this version writes it today, with hand edits kept."""

import argparse
import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepseek_triton_tools._version import __version__
from deepseek_triton_tools.cli.parsing import VerbParser, add_json, option, path, require_tools
from deepseek_triton_tools.tool_errors import ToolError

if TYPE_CHECKING:
    from deepseek_triton_build import File, Plan


def add_options(verb: VerbParser) -> None:
    verb.runs(
        _upgrade,
        "deepseek-triton upgrade r1",
        "deepseek-triton upgrade r1 --trtllm 1.2.1 --apply",
        notes="docs/generator.md has a session. Without --apply nothing is written.",
    )
    verb.add_argument("folder", type=path, metavar="DIR", help="the folder that build wrote")
    target = verb.add_mutually_exclusive_group()
    option(target, "--trtllm RELEASE", "for this release instead of the one it was built for")
    target.add_argument("--vllm", metavar="VERSION", help="the same for vLLM")
    target.add_argument("--image", metavar="TAG", help="the same by the tag of the Triton container, such as 26.07")
    help_text = "what wins where you and the generator have changed the same thing, or you removed a file"
    verb.add_argument("--keep", choices=("yours", "generated"), help=help_text)
    help_text = "write it; the folder as it was stays beside it, as DIR.before-upgrade-1"
    verb.add_argument("--apply", action="store_true", help=help_text)
    add_json(verb, "docs/generator.md")


def _upgrade(args: argparse.Namespace) -> int:
    require_tools()
    from deepseek_triton_tools.plans.folder_changes import UpgradeTarget, upgrade

    _refuse_place(args.folder, apply=args.apply)
    manifest, record = _manifest(args.folder)
    version = str(record.get("version"))
    if _numbers(version) > _numbers(__version__):  # its changes would be taken back
        raise ToolError(
            f"{args.folder}: expected a folder of deepseek-triton {__version__} or earlier, found one of {version}; "
            "upgrade it with that version or a later one",
            exit_code=2,
        )
    plans, files = _generated(args, manifest, record)
    target = UpgradeTarget(folder=args.folder, record=record, plans=plans, files=files)
    return upgrade(target, keep=args.keep, apply=args.apply, as_json=args.json)


def _refuse_place(folder: Path, *, apply: bool) -> None:
    """Raise ToolError for a backup, and for an upgrade of the current folder: the shell would go on in its backup."""
    from deepseek_triton_build import backup_above

    if (backup := backup_above(folder)) is not None:
        raise ToolError(
            f"{folder}: expected a folder that is in use, found {backup}, which an upgrade has kept as it was; rename "
            "it first, or name another folder",
            exit_code=2,
        )
    place = Path(os.path.realpath(folder))
    with contextlib.suppress(FileNotFoundError):  # the current folder was removed
        here = Path.cwd()
        if apply and place in (here, *here.parents):
            raise ToolError(
                f"{folder}: expected a current folder outside, found {here}, which would become the backup; cd out of "
                f"{place} first, and name it by its path",
                exit_code=2,
            )


def _manifest(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    """Return the manifest of a folder that `build` wrote, and what it holds.

    :raises ToolError: when there is none, or its options are not known.
    """
    from deepseek_triton_build import backups_of, manifests_of, read_manifest
    from deepseek_triton_build.check import MANIFEST, STAMP_FIX

    again = "take it from a backup, or build the pair again"
    if not (found := manifests_of(folder)):
        if not folder.exists() and (backups := backups_of(folder)):
            raise ToolError(f"{folder}: is gone; it is whole as it was in {backups[-1]}: move that back", exit_code=2)
        expected = f"{folder}: expected a folder that build wrote, found no {MANIFEST} in it"
        raise ToolError(f"{expected}; name the folder that was --output", exit_code=2)
    side, manifest = found[0]
    if side:
        raise ToolError(f"{folder}: expected the pair's own {MANIFEST} beside {side}, found none; {again}")
    record = read_manifest(manifest)
    place = Path(os.path.realpath(folder))
    above = manifests_of(place.parent)
    is_side = f"{place.name}/" in {side for side, _ in above}
    if is_side and read_manifest(above[0][1]).get("profile") == "disagg":  # both have to be for the same release
        raise ToolError(f"{folder}: is one side of a pair; upgrade both, in {place.parent}", exit_code=2)
    if not isinstance(record.get("options"), str) or not record["options"]:
        fix = again if found[1:] else STAMP_FIX  # no file has the options of both sides
        raise ToolError(f'{manifest}: expected the options of `build` as "options", found none; {fix}')
    if manifest.parent == folder and record.get("format") == "triton" and record.get("profile") != "disagg":
        raise ToolError(f"{folder}: is a model of a repository; name the repository, {folder.parent}", exit_code=2)
    return manifest, record


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version; none for a text that is no version."""
    found = re.match(r"\d{1,9}(\.\d{1,9})*", version, re.ASCII)
    return tuple(map(int, found[0].split("."))) if found else ()


_Made = tuple[Mapping[str, "Plan"], "list[File]"]
"""Plans by the folder of their files ("" for the whole), and the files."""


def _generated(args: argparse.Namespace, manifest: Path, record: Mapping[str, Any]) -> _Made:
    """Plan what the recorded options give today, for the release that was asked for.

    :raises ToolError: when they can't be planned any more.
    """
    from deepseek_triton_build import BuildError, UnknownNameError
    from deepseek_triton_tools.cli.plan_options import OptionError

    others = {name: getattr(args, name) for name in ("trtllm", "vllm", "image")}
    changed = {name: value for name, value in others.items() if value is not None}
    try:
        return _make(record, changed)
    except (BuildError, OptionError) as error:
        given = "".join(f" with --{name} {value}" for name, value in changed.items())
        is_typed = bool(changed) and isinstance(error, UnknownNameError | OptionError)
        fix = f'; change it in "options" of {manifest}, or name another release, and upgrade again'
        raise ToolError(
            f"{args.folder}: `build {record['options']}`{given} is refused now: {error}{'' if is_typed else fix}",
            exit_code=2 if is_typed else 1,
        ) from error


def _make(record: Mapping[str, Any], changed: Mapping[str, str]) -> _Made:
    """Plan the recorded options, for the release of the record or the one in `changed`."""
    from deepseek_triton_build import (
        DEFAULT_FORMAT,
        DISAGGREGATED,
        DYNAMO,
        format_files,
        format_request,
        make_disaggregated_plan,
        make_plan,
        pair_files,
    )
    from deepseek_triton_build.catalog import DEFAULT_RELEASE
    from deepseek_triton_tools.cli.plan_request import pair_request, plan_request, recorded_args

    args = recorded_args(record["options"])
    form = args.format or DEFAULT_FORMAT
    if changed:
        vars(args).update({"trtllm": None, "vllm": None, "image": None, **changed})
    elif form != DYNAMO and not (args.trtllm or args.vllm or args.image):
        # A release that was the default then is not among the options. Dynamo's own release decides about its keys.
        known = {name: value for name, value in record.items() if isinstance(value, str) and value != DEFAULT_RELEASE}
        args.trtllm, args.vllm = known.get("release"), known.get("vllm")
    request = replace(plan_request(args), dynamo=args.dynamo, kv_routing=args.kv_routing)
    if request.profile == DISAGGREGATED:
        both = format_request(form, request) if form == DYNAMO else request
        pair = make_disaggregated_plan(pair_request(args, both))
        return pair.sides, pair_files(pair, version=__version__, format=form)
    plan = make_plan(format_request(form, request))
    return {"": plan}, format_files(form, plan, version=__version__)
