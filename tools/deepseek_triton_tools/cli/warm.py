"""`deepseek-triton warm`: what is done with a checkpoint's files, and how it ends.

Exit codes: 0 all of it is in the page cache (with --share: this share's files); 1 a file is missing, damaged or
unreadable, can't be held, or the server failed; 2 the command line; 3 only a part fits, or stayed; 4 the storage
stalled and it was given up; 130 and 143 by SIGINT and SIGTERM, which end a hold with 0. With --then, those of the
command, and 126 and 127 where it can't be run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deepseek_triton_tools.host.readiness_notice import ReadyFile, notify
from deepseek_triton_tools.host.stop_signals import Stop
from deepseek_triton_tools.host.then_command import CommandBeside, find_command, run_instead
from deepseek_triton_tools.host.units import sized
from deepseek_triton_tools.terminal.output_streams import complain, to_reader
from deepseek_triton_tools.terminal.tables import show
from deepseek_triton_tools.tool_errors import LockError, ToolError
from deepseek_triton_tools.warming import Share, Survey, WarmOptions, WarmResult, examine, take_survey, warm
from deepseek_triton_tools.warming.checkpoint.warm_options import MOST_JOBS
from deepseek_triton_tools.warming.evicting import evict_all
from deepseek_triton_tools.warming.hold import Held, check_hold, hold
from deepseek_triton_tools.warming.report import report
from deepseek_triton_tools.warming.report.document import evict_document, result_document, survey_document
from deepseek_triton_tools.warming.report.progress_view import ProgressView, progress_line
from deepseek_triton_tools.warming.warm_progress import WarmProgress

_SWITCH_INTERVAL_S = 0.0005
"""How long the thread that reads headers may keep those that read weights waiting for Python's lock: at Python's own
5 ms a checkpoint of 5 GB took 8% longer."""
_GOES_ON = (0, 3)
"""What a command after it, or a hold, may follow: what fits is warm, and the engine reads the rest."""


def run_warm(args: argparse.Namespace) -> int:
    """Call it in the main thread, for it takes signals.

    :raises ToolError: when there is nothing to warm, or the command line asks for what can't go together.
    """
    _check(args)
    if args.server:
        return _warm_server(args)
    if args.form:
        return _print_form(args)
    ready = ReadyFile(args.ready_file)
    if args.then:
        find_command(args.then)
    survey = _survey(args)
    if args.report:
        return _report(args, survey)
    if args.evict:
        return _evict(args, survey)
    return _warm(args, survey, ready)


_BELONGS = {
    **dict.fromkeys(("share", "jobs", "budget"), ("warm", "report")),
    **dict.fromkeys(("rate_limit", "verify", "hold", "stall", "give_up", "then"), ("warm",)),
    "ready_file": ("warm", "server"),
    "json": ("warm", "report", "evict", "server"),
    "verbose": ("warm", "report", "evict"),
    "rate": ("form",),
    **dict.fromkeys(("batch_sizes", "input_lengths", "max_tokens", "wait", "limit", "log", "metrics_url"), ("server",)),
    **dict.fromkeys(("model", "model_version", "token_file", "ca", "cert", "key"), ("server",)),
}
"""Option -> what it is for. Without --report, --evict, --server or --form it is to warm."""


def _check(args: argparse.Namespace) -> None:
    """:raises ToolError: when the options can't go together; all that is wrong."""
    asked = [name for name in ("report", "evict", "server", "form") if getattr(args, name) not in (None, False)]
    if len(asked) > 1:
        raise ToolError(f"expected one of {' and '.join(f'--{name}' for name in asked)}, got both", exit_code=2)
    action = asked[0] if asked else "warm"
    given = [name for name in _BELONGS if getattr(args, name)]
    wrong = [f"{_option(name)} is for {_listed(_BELONGS[name])}" for name in given if action not in _BELONGS[name]]
    wrong += _wrong_values(args)
    if problem := _wrong_number(action, len(args.checkpoints)):
        wrong.append(problem)
    if wrong:
        raise ToolError("; ".join(wrong), exit_code=2)


def _wrong_values(args: argparse.Namespace) -> Iterator[str]:
    if args.then == []:
        yield "--then needs a command after it"
    if args.server == "":
        yield "--server: expected an address, got nothing: is a variable not set?"
    if not all(text.strip() for text in args.checkpoints):  # Path("") would be the current folder
        yield "a checkpoint's name is empty: is a variable not set?"
    if args.jobs and args.jobs > MOST_JOBS:
        yield f"--jobs: expected 1 to {MOST_JOBS}, got {args.jobs}"
    if args.share and args.share[1] > 1:
        early = [_option(name) for name in ("then", "ready_file") if getattr(args, name)]
        if early:
            yield (
                f"{' and '.join(early)} with --share would come before the other shares have ended: run one process "
                "on the node without --share, or start what comes after when all shares have ended"
            )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _listed(actions: Sequence[str]) -> str:
    return " and ".join("warming" if action == "warm" else f"--{action}" for action in actions)


def _wrong_number(action: str, number: int) -> str | None:
    if action == "server":
        return "--server takes one model repository, or none" if number > 1 else None
    if action == "form":
        return None if number == 1 else "--form takes one model repository or checkpoint"
    return None if number else "name a checkpoint: its folder, its Hugging Face name, or a model repository"


def _survey(args: argparse.Namespace) -> Survey:
    options = WarmOptions(
        share=Share(*(args.share or ())),
        jobs=args.jobs,
        budget=args.budget,
        rate_limit=args.rate_limit,
        verify=args.verify,
        stall_s=args.stall or WarmOptions.stall_s,
        give_up_s=args.give_up,
    )
    try:
        return take_survey(args.checkpoints, options)
    except OSError as error:
        raise ToolError(f"{error.filename or 'this machine'} can't be read: {error.strerror}") from error


def _report(args: argparse.Namespace, survey: Survey) -> int:
    survey = examine(survey)
    code = 1 if survey.is_damaged else 0
    with to_reader():
        if args.json:
            _print_json(survey_document(survey, action="report", exit_code=code, verbose=args.verbose))
        else:
            for table in report.tables(survey, verbose=args.verbose):
                show(table)
            for checkpoint in survey.checkpoints:
                for finding in checkpoint.findings:
                    print(report.finding_line(finding))
    return code


def _evict(args: argparse.Namespace, survey: Survey) -> int:
    evicted = evict_all(survey)
    reasons = [f"{each.path}: {each.reason}" for each in evicted if each.reason]
    code = 1 if reasons else 0
    with to_reader():
        if args.json:
            _print_json(evict_document(survey, evicted, exit_code=code, verbose=args.verbose))
        else:
            print(report.eviction(survey, evicted))
    for line in reasons:
        complain(line)
    return code


def _warm(args: argparse.Namespace, survey: Survey, ready: ReadyFile) -> int:
    for line in report.preamble(survey):
        complain(line)
    holds = bool(args.hold) and _can_hold(args, survey)
    with Stop() as stop:
        result = _bring(survey, stop)
        code = result.exit_code
        if result.was_stopped:
            code = 0 if args.hold else stop.exit_code  # a hold that is told to stop has done what it should
        _tell(args, result, code)
        if result.was_stopped or code not in _GOES_ON:
            return code
        facts = {"exit_code": code, "warm_bytes": result.progress.done, "resident_bytes": result.resident}
        if holds and (held := _hold(args, result.survey, ready, stop, facts)) is not None:
            return held
        ready.write(facts)
        notify(READY="1", STATUS=report.summary(result))
    if args.then:
        run_instead(args.then)
    return code


def _can_hold(args: argparse.Namespace, survey: Survey) -> bool:
    """:raises LockError: when not, and nobody gains from warming without it."""
    try:
        check_hold(survey, args.hold)
    except LockError as error:
        _go_on_without(args, error)
        return False
    return True


def _go_on_without(args: argparse.Namespace, error: LockError) -> None:
    """Do without a hold where it was wished for and not demanded, for the sake of the command.

    :raises LockError: where not.
    """
    if args.hold != "auto" or not args.then:
        raise LockError(f"--hold: {error}") from error
    complain(f"--hold: {error}; {args.then[0]} is run without it")


def _bring(survey: Survey, stop: Stop) -> WarmResult:
    view = ProgressView()

    def observe(progress: WarmProgress) -> None:
        view(progress)
        notify(STATUS=progress_line(progress))

    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        return warm(survey, observe=observe, stop=stop.event)
    finally:
        view.clear()


def _tell(args: argparse.Namespace, result: WarmResult, code: int) -> None:
    with to_reader():
        if args.json:
            _print_json(result_document(result, exit_code=code, verbose=args.verbose))
        else:
            if files := report.files_now(result, verbose=args.verbose):
                show(report.files_table(files))
            print(report.summary(result))
    for line in report.warnings(result):
        complain(line)


def _hold(args: argparse.Namespace, survey: Survey, ready: ReadyFile, stop: Stop, facts: dict[str, Any]) -> int | None:
    """Until told to stop, or the command ends. None: it can't be held, and the command is to be run without."""
    beside: list[CommandBeside] = []
    said: set[str] = set()

    def observe(held: Held) -> None:
        if held.problem and held.problem not in said:
            said.add(held.problem)
            complain(held.problem)
        status = f"held by {held.mode}: {sized(held.resident or 0)} resident, {sized(held.rewarmed)} brought in again"
        notify(READY="1", STATUS=status)
        if not beside:
            complain(f"{status}; until {args.then[0] + ' ends' if args.then else 'SIGTERM or Ctrl-C'}")
            ready.write(facts | {"held_by": held.mode})
            beside.append(CommandBeside(args.then or (), stop))

    try:
        hold(survey, mode=args.hold, stop=stop.event, observe=observe)
    except LockError as error:
        if not beside:
            _go_on_without(args, error)
            return None
        if not args.then:
            raise
        complain(f"no longer held: {error}")  # what runs beside it goes on
    finally:
        ready.remove()
    code = beside[0].exit_code() if beside else 0
    notify(STOPPING="1")
    return code


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2, allow_nan=False))


def _warm_server(args: argparse.Namespace) -> int:
    from functools import partial

    from deepseek_triton_client import AsyncClient
    from deepseek_triton_tools.cli.client_options import DEFAULT_MODEL, client_settings
    from deepseek_triton_tools.warming.server.warm_server import ServerWarmOptions, warm_server

    args.model = args.model or DEFAULT_MODEL
    given = {"max_tokens": args.max_tokens, "wait_s": args.wait, "limit_s": args.limit}
    options = ServerWarmOptions(
        client=partial(AsyncClient, args.server, **client_settings(args)),
        repository=Path(args.checkpoints[0]) if args.checkpoints else None,
        batch_sizes=args.batch_sizes,
        input_lengths=args.input_lengths,
        log=args.log,
        metrics_url=args.metrics_url,
        ready_file=args.ready_file,
        as_json=args.json,
        **{name: value for name, value in given.items() if value is not None},
    )
    return warm_server(options)


def _print_form(args: argparse.Namespace) -> int:
    from deepseek_triton_tools.repository.serving_facts import serving_of
    from deepseek_triton_tools.warming.forms import render

    text = render(args.form, serving_of(args.checkpoints[0]), rate=args.rate)
    with to_reader():
        print(text, end="")
    return 0
