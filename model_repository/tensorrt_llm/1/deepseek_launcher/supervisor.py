"""The supervisor: one attempt after the other, until it is told to stop or another one makes no sense."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

from deepseek_launcher import launch_record, reserved_ports
from deepseek_launcher.attempt import Attempt
from deepseek_launcher.launch_tag import LAUNCH, LaunchTag, is_launch, new_launch
from deepseek_launcher.launcher_errors import UsageError
from deepseek_launcher.restarts import End, Outcome, Restarts
from deepseek_launcher.run_options import RunOptions
from deepseek_launcher.supervision import Supervision
from deepseek_launcher.supervisor_guard import SupervisorGuard

_PORTS_FREE_S = 30


def run(options: RunOptions) -> int:
    """Run it until it is told to stop, or there is no further try; nothing of it is left then.

    Call it in the main thread of a process that runs nothing else: it takes over signals and the reaping.

    :returns: the exit code: the command's own, 0 after an orderly stop, 4 for the deadline.
    :raises UsageError: when a port is taken, or another supervisor has the same launch. Nothing is started.
    """
    launch = os.environ.get(LAUNCH, "")
    mark = LaunchTag(launch=launch if is_launch(launch) else new_launch())
    models = model_names(options.repository) if options.repository else []
    reserved_ports.check_free(options.http_address, options.ports)
    claim = _claim(mark.launch)
    with claim, contextlib.ExitStack() as guarded:
        # As process 1 it takes all of its container along when it is killed.
        guard = None if os.getpid() == 1 else SupervisorGuard(mark, afterwards=lambda: _forget(options, mark))
        if guard is not None:
            guarded.enter_context(guard)
        with reserved_ports.reserve(options.ports):
            supervision = Supervision(options, mark, models, guard)
            try:
                return _run(supervision)
            finally:
                supervision.close()


def _forget(options: RunOptions, mark: LaunchTag) -> None:
    """What says that it runs."""
    if options.ready_file is not None:
        with contextlib.suppress(OSError):
            options.ready_file.unlink(missing_ok=True)
    launch_record.remove(mark.launch)


def model_names(repository: Path) -> list[str]:
    """:raises UsageError: when the folder holds no model."""
    if not repository.is_dir():
        raise UsageError(f"there is no folder {repository}: give --repository a model repository")
    models = sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
    if not models:
        raise UsageError(f"{repository} holds no model: expected {repository}/MODEL/config.pbtxt")
    return models


def _claim(launch: str) -> socket.socket:
    """Two supervisors of one launch would each end what the other has started. Held until this process ends.

    :raises UsageError: when another has it.
    """
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0deepseek-triton/launch/{launch_record.namespace()}/{os.getuid()}/{launch}")
    except OSError as error:
        claim.close()
        raise UsageError(
            f"launch {launch} is supervised already: unset {LAUNCH} for another, or end that one "
            f"(supervise.py stop {launch})"
        ) from error
    return claim


def _run(supervision: Supervision) -> int:
    options = supervision.options
    restarts = Restarts(options.restart, options.max_restarts)
    num_tries = 0
    while True:
        num_tries += 1
        outcome = Attempt(supervision).run()
        final = supervision.stopping or supervision.is_stuck
        delay_s = None if final else restarts.delay_s(outcome)
        if delay_s is None:
            supervision.say(_last_words(outcome, num_tries))
            return outcome.exit_code
        supervision.num_restarts = restarts.done
        supervision.say(
            f"{outcome.reason}; started again in {delay_s:g} s, restart {restarts.done} of {options.max_restarts}"
        )
        supervision.note("waiting")
        if not supervision.pause(delay_s) or not _ports_free(supervision):
            supervision.say("stopped before the next try" if supervision.stopping else "given up")
            return 0 if supervision.stopping else UsageError.exit_code


def _ports_free(supervision: Supervision) -> bool:
    """False when they stay taken, or a stop was asked for meanwhile."""
    give_up = time.monotonic() + _PORTS_FREE_S
    while True:
        try:
            reserved_ports.check_free(supervision.options.http_address, supervision.options.ports)
        except UsageError as error:
            if time.monotonic() > give_up:
                supervision.say(f"not started again: {error}")
                return False
        else:
            return True
        if not supervision.pause(1):
            return False


def _last_words(outcome: Outcome, tries: int) -> str:
    given_up = f"; given up after {tries} tries" if tries > 1 and outcome.end is End.FATAL else ""
    code = f"exit code {outcome.exit_code}"
    return f"{outcome.reason}{given_up}" + ("" if code in outcome.reason else f" ({code})")
