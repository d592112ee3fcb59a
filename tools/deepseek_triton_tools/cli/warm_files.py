"""`deepseek-triton warm files`, `report` and `evict`: what is done with a checkpoint's files, and how it ends."""

import argparse
import gc
import sys
from typing import Any

from deepseek_triton_tools.host.lifecycle import CommandBeside, ReadyFile, Stop, find_command, notify, run_instead
from deepseek_triton_tools.host.units import sized
from deepseek_triton_tools.terminal.output_streams import complain, print_json, to_reader
from deepseek_triton_tools.terminal.tables import show
from deepseek_triton_tools.tool_errors import LockError, ToolError
from deepseek_triton_tools.warming import Share, WarmOptions, examine, report, take_survey, warm
from deepseek_triton_tools.warming.hold import Held, check_hold, evict_all, hold
from deepseek_triton_tools.warming.report import (
    ProgressView,
    evict_document,
    progress_line,
    result_document,
    survey_document,
)
from deepseek_triton_tools.warming.survey import Survey
from deepseek_triton_tools.warming.warm_up import WarmProgress, WarmResult

# Seconds for which the thread that reads headers may hold Python's lock, while threads that read weights wait for it.
# With Python's default of 5 ms, a checkpoint of 5 GB took 8% longer.
_SWITCH_INTERVAL_S = 0.0005
# Exit codes after which a command or a hold may begin: what fits is warm, and the engine reads the rest.
_MAY_GO_ON = (0, 3)


def warm_files(args: argparse.Namespace) -> int:
    """Warm the files, hold them and run the command after them, as the options say. Call it in the main thread,
    because it takes signals.

    :raises ToolError: when there is nothing to warm, or for options that can't go together.
    """
    if args.then == []:
        raise ToolError("--then needs a command after it", exit_code=2)
    early = [f"--{name.replace('_', '-')}" for name in ("then", "ready_file") if getattr(args, name)]
    if early and args.share[1] > 1:
        raise ToolError(
            f"{' and '.join(early)} with --share would come before the other shares have ended: run one process on the "
            "node without --share, or start what comes after when all shares have ended",
            exit_code=2,
        )
    ready = ReadyFile(args.ready_file)
    if args.then:
        find_command(args.then)
    options = _options(
        args,
        rate_limit=args.rate_limit,
        verify=args.verify,
        give_up_s=args.give_up,
        stall_s=args.stall or WarmOptions.stall_s,
    )
    return _warm(args, _survey(args, options), ready)


def _options(args: argparse.Namespace, **others: Any) -> WarmOptions:
    """:raises ToolError: for a value that is out of range."""
    try:
        return WarmOptions(share=Share(*args.share), jobs=args.jobs, budget=args.budget, **others)
    except ValueError as error:
        raise ToolError(f"--{error}", exit_code=2) from error


def _survey(args: argparse.Namespace, options: WarmOptions) -> Survey:
    try:
        return take_survey(args.checkpoints, options)
    except OSError as error:
        raise ToolError(f"{error.filename or 'this machine'} can't be read: {error.strerror}") from error


def report_files(args: argparse.Namespace) -> int:
    """Say what is there; 1 when something is damaged."""
    survey = examine(_survey(args, _options(args)))
    code = 1 if survey.is_damaged else 0
    with to_reader():
        if args.json:
            print_json(survey_document(survey, action="report", exit_code=code, verbose=args.verbose))
        else:
            for line in report.preamble(survey):
                print(line)
            if files := report.files_to_show(survey, verbose=args.verbose):
                show(report.files_table(files))
            for checkpoint in survey.checkpoints:
                for finding in checkpoint.findings:
                    print(report.finding_line(finding))
    return code


def evict_files(args: argparse.Namespace) -> int:
    """Drop the files from the page cache; 1 when some of them stay."""
    survey = _survey(args, WarmOptions())
    evicted = evict_all(survey)
    reasons = [f"{each.path}: {each.reason}" for each in evicted if each.reason]
    code = 1 if reasons else 0
    with to_reader():
        if args.json:
            print_json(evict_document(survey, evicted, exit_code=code, verbose=args.verbose))
        else:
            print(report.eviction(survey, evicted))
    for line in reasons:
        complain(line)
    return code


def _warm(args: argparse.Namespace, survey: Survey, ready: ReadyFile) -> int:
    for line in report.preamble(survey):
        complain(line)
    holds = bool(args.hold)
    if holds:
        try:
            check_hold(survey, args.hold)
        except LockError as error:
            _go_on_without(args, error)
            holds = False
    with Stop() as stop:
        result = _read_with_progress(survey, stop)
        code = result.exit_code
        if result.was_stopped:
            code = 0 if args.hold else stop.exit_code  # a hold that is told to stop has done its work
        _print_result(args, result, code)
        if result.was_stopped or code not in _MAY_GO_ON:
            return code
        facts = {"exit_code": code, "warm_bytes": result.progress.done, "resident_bytes": result.resident}
        if holds and (held := _hold(args, result.survey, ready, stop, facts)) is not None:
            return held
        ready.write(facts)
        notify(READY="1", STATUS=report.summary(result))
    if args.then:
        run_instead(args.then)
    return code


def _go_on_without(args: argparse.Namespace, error: LockError) -> None:
    """Go on without the hold where `--hold` left the choice and a command follows.

    :raises LockError: otherwise: warming without a hold would be of no use.
    """
    if args.hold != "auto" or not args.then:
        raise LockError(f"--hold: {error}") from error
    complain(f"--hold: {error}; {args.then[0]} is run without it")


def _read_with_progress(survey: Survey, stop: Stop) -> WarmResult:
    view = ProgressView()

    def observe(progress: WarmProgress) -> None:
        view(progress)
        notify(STATUS=progress_line(progress))

    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.disable()  # the headers of 92,000 tensors hold no circles: looking for them took a tenth of the check
    try:
        return warm(survey, observe=observe, stop=stop.event)
    finally:
        gc.enable()
        view.clear()


def _print_result(args: argparse.Namespace, result: WarmResult, code: int) -> None:
    with to_reader():
        if args.json:
            print_json(result_document(result, exit_code=code, verbose=args.verbose))
        else:
            if files := report.files_now(result, verbose=args.verbose):
                show(report.files_table(files))
            print(report.summary(result))
    for line in report.warnings(result):
        complain(line)


def _hold(args: argparse.Namespace, survey: Survey, ready: ReadyFile, stop: Stop, facts: dict[str, Any]) -> int | None:
    """Hold the files until told to stop, or until the command ends, and return the exit code. Returns None when the
    files can't be held, and the command is to run without a hold."""
    beside: list[CommandBeside] = []
    reported: set[str] = set()

    def observe(held: Held) -> None:
        if held.problem and held.problem not in reported:
            reported.add(held.problem)
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
        complain(f"no longer held: {error}")  # the command beside it goes on
    finally:
        ready.remove()
    code = beside[0].exit_code() if beside else 0
    notify(STOPPING="1")
    return code
