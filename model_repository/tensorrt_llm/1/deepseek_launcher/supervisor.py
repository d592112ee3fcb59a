"""The supervisor: it runs one start attempt after the other, until it is told to stop or a further one is no use."""

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from deepseek_launcher import launches, processes
from deepseek_launcher.attempt import Attempt, End, Restarts, Supervision
from deepseek_launcher.launch_tag import LAUNCH_VARIABLE, LaunchTag, SupervisorGuard, own_launch_id
from deepseek_launcher.options import RunOptions, UsageError
from deepseek_launcher.server_watch import PATIENCE_S

# Seconds to wait before a restart until the ports of the last attempt are free.
_PORTS_FREE_S = 30
_LOOK_S = 0.1


def check_free(host: str, ports: Mapping[str, int]) -> None:
    """Refuse ports that can't be listened on.

    :raises UsageError: with every such port, and the process that holds it.
    """
    problems = [problem for name, port in ports.items() if (problem := _port_problem(host, name, port))]
    if len(set(ports.values())) < len(ports):
        problems.append(f"HTTP, gRPC and metrics need a port each, got {', '.join(map(str, ports.values()))}")
    if problems:
        raise UsageError("; ".join(problems))


def reserve(ports: Mapping[str, int]) -> contextlib.ExitStack:
    """Reserve the ports for this process until the result is closed or the process ends.

    tritonserver opens its ports only when the model has loaded. Two servers can then share a port without an error, and
    each gets half of the requests. A reservation is the name of a socket in Linux's abstract namespace, the same name
    that `deepseek-triton serve` takes.

    :raises UsageError: when another process has reserved one of them.
    """
    with contextlib.ExitStack() as reservations:
        for port in ports.values():
            reservation = reservations.enter_context(socket.socket(socket.AF_UNIX))
            try:
                reservation.bind(f"\0deepseek-triton/port/{port}")
            except OSError as error:
                raise UsageError(
                    f"port {port} is reserved: another launch is loading a model to serve there, or is stopping; "
                    "end that (supervise.py list shows it), or choose another port"
                ) from error
        return reservations.pop_all()


def _wait_for_stopping(ports: Mapping[str, int]) -> None:
    """Wait for launches that are stopping and have one of the ports, as long as they may take: scripts that restart a
    server end it and start the next one at once."""
    for record in launches.read_records():
        if record.state != "stopping" or not {*record.ports.values()} & {*ports.values()}:
            continue
        patience_s = record.exit_timeout_s + PATIENCE_S
        end = time.monotonic() + patience_s
        if record.supervisor() is not None:
            said = f"launch {record.id} is stopping and has one of the ports: waiting for it, at most {patience_s:g} s"
            print(f"deepseek-triton: {said}", file=sys.stderr, flush=True)
        while record.supervisor() is not None and time.monotonic() < end:
            time.sleep(_LOOK_S)


def _port_problem(host: str, name: str, port: int) -> str | None:
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            holder = _holder(port)
            return f"port {port} for {name} is taken{f' by {holder}' if holder else ''}: end that, or choose another"
        if error.errno == errno.EACCES:
            return f"port {port} for {name} is for root alone: choose one from 1024 on"
        return f"can't listen on {host}:{port} for {name}: {error.strerror or error}: give an address of this machine"
    return None


def _holder(port: int) -> str | None:
    """Return the process that listens on `port`; None where /proc does not show it."""
    # Columns of /proc/net/tcp, from proc(5): 1 is address:port in hex, 3 the state, 9 the inode.
    tables = [table for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if table.is_file()]
    rows = [row.split() for table in tables for row in table.read_text(encoding="ascii").splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        # It belongs to another user, or has gone meanwhile.
        with contextlib.suppress(OSError):
            if os.readlink(descriptor) in sockets:
                name = (descriptor.parents[1] / "comm").read_text(encoding="utf-8", errors="replace").strip()
                return f"process {descriptor.parents[1].name} ({name})"
    return None


def run(options: RunOptions) -> int:
    """Run the command until a stop is requested or no further attempt is due; no process of it is left then.

    Call it in the main thread of a process that does nothing else: it handles signals and reaps all children.

    :returns: the exit code: the command's own, 0 after an orderly stop, 4 for the deadline.
    :raises UsageError: when a port is taken, the ready file can't be made, or another supervisor has the same launch.
        Nothing was started then.
    """
    file = options.ready_file
    if file is not None and (os.path.isdir(file) or not os.access(f"{file.parent}/.", os.W_OK | os.X_OK)):
        raise UsageError(f"--ready-file {file}: expected a file in a folder that can be written to: name another")
    tag = LaunchTag(launch=own_launch_id())
    models = model_names(options.repository) if options.repository else []
    _wait_for_stopping(options.ports)
    check_free(options.http_address, options.ports)
    # Two supervisors of one launch would kill each other's processes.
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0deepseek-triton/launch/{processes.namespace()}/{os.getuid()}/{tag.launch}")
    except OSError as error:
        claim.close()
        raise UsageError(
            f"launch {tag.launch} is supervised already: unset {LAUNCH_VARIABLE} for another, or end that one "
            f"(supervise.py stop {tag.launch})"
        ) from error
    with claim, contextlib.ExitStack() as guarded:

        def remove_files() -> None:
            """Run in the guard, after the supervisor was killed."""
            if options.ready_file is not None:
                with contextlib.suppress(OSError):
                    options.ready_file.unlink(missing_ok=True)
            launches.remove_record(tag.launch)

        # Process 1 needs no guard: the kernel kills the whole container with it.
        guard = None if os.getpid() == 1 else SupervisorGuard(tag, afterwards=remove_files)
        if guard is not None:
            guarded.enter_context(guard)
        with reserve(options.ports):
            supervision = Supervision(options, tag, models, guard)
            try:
                return _run(supervision)
            finally:
                supervision.close()


def model_names(repository: Path) -> list[str]:
    """Return the names of the repository's models, sorted.

    :raises UsageError: when the folder holds no model.
    """
    if not repository.is_dir():
        raise UsageError(f"there is no folder {repository}: give --repository a model repository")
    models = sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
    if not models:
        raise UsageError(f"{repository} holds no model: expected {repository}/MODEL/config.pbtxt")
    return models


def _run(supervision: Supervision) -> int:
    options = supervision.options
    restarts = Restarts(options.restart, options.max_restarts)
    num_attempts = 0
    while True:
        num_attempts += 1
        outcome = Attempt(supervision).run()
        is_last = supervision.stop.stopping or supervision.is_stuck
        delay_s = None if is_last else restarts.delay_s(outcome)
        if delay_s is None:
            given_up = f"; given up after {num_attempts} tries" if num_attempts > 1 and outcome.end is End.FATAL else ""
            code = f"exit code {outcome.exit_code}"
            supervision.say(f"{outcome.reason}{given_up}" + ("" if code in outcome.reason else f" ({code})"))
            return outcome.exit_code
        supervision.num_restarts = restarts.done
        supervision.say(
            f"{outcome.reason}; started again in {delay_s:g} s, restart {restarts.done} of {options.max_restarts}"
        )
        supervision.record_state("waiting")
        if not supervision.pause(delay_s) or not _wait_for_ports(supervision):
            stopping = supervision.stop.stopping
            supervision.say("stopped before the next try" if stopping else "given up")
            return 0 if stopping else UsageError.exit_code


def _wait_for_ports(supervision: Supervision) -> bool:
    """Wait until the ports are free; return False when they stay taken, or a stop was requested meanwhile."""
    deadline = time.monotonic() + _PORTS_FREE_S
    while True:
        try:
            check_free(supervision.options.http_address, supervision.options.ports)
        except UsageError as error:
            if time.monotonic() > deadline:
                supervision.say(f"not started again: {error}")
                return False
        else:
            return True
        if not supervision.pause(1):
            return False
