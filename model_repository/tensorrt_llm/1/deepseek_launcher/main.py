"""The command line of supervise.py."""

import argparse
import contextlib
import errno
import math
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from deepseek_launcher.command import option
from deepseek_launcher.options import POLICIES, LauncherError, RunOptions, UsageError


def main(argv: Sequence[str]) -> int:
    """Run a command line; return its exit code. An error is reported in one line on stderr."""
    try:
        # A standard stream that is closed is opened: else the guard's pipe might get the number of stderr.
        for descriptor in (0, 1, 2):
            try:
                os.fstat(descriptor)
            except OSError:
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        return _run_verb(_parser().parse_args(argv))
    except LauncherError as error:
        _tell(f"deepseek-triton: {error}", to=2)
        return error.exit_code
    except OSError as error:
        hint = ": see `ulimit -a`" if error.errno in _AT_A_LIMIT else ""
        _tell(f"deepseek-triton: {error}{hint}", to=2)
        return LauncherError.exit_code


_AT_A_LIMIT = (errno.EAGAIN, errno.EMFILE, errno.ENFILE)

_ABOUT = """\
Run the server of this repository in the foreground, watch it, and leave no process of it behind. Needs only Python 3.10
or newer, and can be process 1 of a container.
"""

_RUN = """\
Start COMMAND and watch it until told to stop. SIGTERM, SIGINT or SIGHUP is an orderly stop: tritonserver
finishes its open requests. A second signal ends it at once. However this process ends, also by kill -9, everything that
it started on this machine ends too.

exit codes: COMMAND's own (128 + n for a signal), 0 after an orderly stop, 4 when it was not ready within
--ready-within, 2 for a wrong command line or a port that is taken, 1 when the nodes would serve different files
"""

_EXAMPLES = """\
examples:
  supervise.py run --repository . -- supervise.py rank -- tritonserver --model-repository .
  supervise.py run --repository . --ranks 16 --hosts node1,node2 --ready-within 3600 -- \\
      mpirun --tag-output -n 16 -H node1:8,node2:8 -x DEEPSEEK_TRITON_LAUNCH \\
      python3 supervise.py rank -- trtllm-llmapi-launch tritonserver --model-repository .
(start.sh of a generated repository writes such a line; DRY_RUN=1 ./start.sh prints it)
"""

_RANK = """\
Guard one rank: run its COMMAND for the MPI launcher or the supervisor. When the launcher dies, everything of this rank
ends. Report on stderr where the rank runs, with which files, and how it ended. On SIGTERM rank 0's tritonserver
finishes its open requests, and the other ranks wait for it. A second SIGTERM, or SIGUSR2, ends the rank at once.
"""

_STOP = """\
Stop what you have started on this machine, and wait until no process of it is left. Only processes that carry the
launch's tag (the variable DEEPSEEK_TRITON_LAUNCH) get a signal. This works also when the supervisor was killed.
Exit code 1: nothing here has one of the IDs; what has the others is stopped all the same.
"""


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="supervise.py", description=_ABOUT, formatter_class=raw)
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB", dest="verb")
    run = verbs.add_parser("run", help="start, watch, restart", description=_RUN, epilog=_EXAMPLES, formatter_class=raw)
    _add_run(run)
    guard = verbs.add_parser("rank", help="guard one rank", description=_RANK, formatter_class=raw)
    guard.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND...")
    add = verbs.add_parser("stop", help="stop what was started", description=_STOP, formatter_class=raw).add_argument
    add("ids", nargs="*", metavar="ID", help="launch id, as `supervise.py list` shows it")
    add("--repository", type=Path, action="append", default=[], metavar="DIR", help="stop what serves DIR; repeatable")
    add("--all", action="store_true", help="stop everything that you have started on this machine")
    add("--now", action="store_true", help="don't wait for open requests")
    shown = verbs.add_parser("list", help="list what was started", description="List what this user has started here.")
    shown.add_argument("--json", action="store_true", help="print a JSON list instead")
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--repository", type=Path, metavar="DIR", help="model repository whose models must all become ready")
    add("--ranks", type=_positive, default=1, metavar="N", help="number of MPI ranks in all (default: 1)")
    add("--ranks-per-node", type=_positive, metavar="K", help="ranks on each node, to name the host of a missing rank")
    add("--hosts", type=_names, default=(), metavar="A,B", help="the nodes in the order of their ranks")
    for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        add(f"--{name}-port", type=_port, default=port, metavar="PORT", help=f"{name} port (default: {port})")
    add("--http-address", default="0.0.0.0", metavar="A", help="listen address (default: 0.0.0.0, asked at 127.0.0.1)")
    text = "restarts in a row (default: 3); after 10 minutes of being ready the count begins anew"
    add("--max-restarts", type=_count, default=3, metavar="N", help=text)
    add(
        "--restart",
        choices=POLICIES,
        default="fatal",
        help="fatal (default): restart a server that had been ready and failed; always: restart whatever ends; never. "
        "The pauses are 1, 2, 4 ... 60 s",
    )
    add("--ready-file", type=Path, metavar="FILE", help="file that exists while the server is ready")
    for name, default, text in (
        ("ready-within", 0.0, "seconds until it must be ready (default: 0, no limit)"),
        ("exit-timeout", 30.0, "seconds of a stop: open requests get 5 less, at least half (default: 30)"),
        ("health-every", 5.0, "seconds between health checks once ready (default: 5)"),
    ):
        dest = f"{name.replace('-', '_')}_s"
        add(f"--{name}", dest=dest, type=_seconds, default=default, metavar="S", help=text)
    text = "the process that started this one: when it has ended, everything ends at once"
    add("--with-parent", type=_positive, metavar="PID", help=text)
    add("command", nargs=argparse.REMAINDER, metavar="-- COMMAND...")


def _run_verb(arguments: argparse.Namespace) -> int:
    """Run the verb. Each imports only its own: sixteen ranks of a node start at once, and their processes stay."""
    if arguments.verb in ("run", "rank"):
        words: list[str] = arguments.command
        arguments.command = command = tuple(words[1:] if words[:1] == ["--"] else words)
        if not command:
            raise UsageError("no command: expected `-- COMMAND...` at the end")
        if arguments.verb == "rank":
            from deepseek_launcher.rank import rank

            return rank(command)
        from deepseek_launcher.supervisor import run

        if (option(command, "--allow-http") or "").lower() in ("0", "false", "off", "no"):
            raise UsageError(
                "--allow-http is off: readiness is asked over HTTP; leave it on, at --http-address=127.0.0.1"
            )
        return run(RunOptions(**{field.name: getattr(arguments, field.name) for field in fields(RunOptions)}))
    from deepseek_launcher.launches import show, stop

    if arguments.verb == "list":
        return show(as_json=arguments.json, say=_say)
    return stop(arguments.ids, arguments.repository, everything=arguments.all, now=arguments.now, say=_tell)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if not _count(text):
        raise argparse.ArgumentTypeError("expected 1 or more, got 0")
    return int(text)


def _port(text: str) -> int:
    if _positive(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port up to 65535, got {text}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds, got {text!r}")
    return seconds


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.replace(" ", ",").split(",")))


def _tell(text: str, *, to: int = 1) -> None:
    """Write a line, and ignore every error: the verb's work counts, not whether it can be reported."""
    with contextlib.suppress(OSError):
        _say(text, to=to)


def _say(text: str, *, to: int = 1) -> None:
    with contextlib.suppress(BrokenPipeError):  # its reader has gone
        os.write(to, f"{text}\n".encode("utf-8", errors="surrogateescape"))
