"""`deepseek-triton serve`: tritonserver on a model repository, in the foreground.

It starts nothing that can't work, always reads the server's output, and passes on its exit code. When this process has
ended, in whatever way, the server and its Python stubs have ended too.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from deepseek_triton_tools.cli.parsing import VerbParser, add_tritonserver, path, port_or_auto, seconds
from deepseek_triton_tools.server.server_log import parse_log_line
from deepseek_triton_tools.server.server_process import ServeOptions, ServerProcess, StartProgress
from deepseek_triton_tools.terminal.status_line import StatusLine, clock

_KILLED = (
    "tritonserver had not ended {} s after the stop and was killed; as long as a client keeps a gRPC stream open, "
    "Triton 2.51 doesn't end"
)
# Seconds that the supervisor gives a server after the exit timeout, in which it unloads its models.
_PATIENCE_S = 15


def add_options(verb: VerbParser) -> None:
    verb.runs(
        _serve,
        "deepseek-triton serve model_repository",
        "deepseek-triton serve model_repository --http-port auto -- --log-verbose 1",
    )
    verb.usage, verb.rest = "%(prog)s DIR [options] [-- ARGS...]", "server_args"
    verb.add_argument("repository", type=path, metavar="DIR", help="the model repository; ARGS are for tritonserver")
    add_tritonserver(verb)
    for name, default in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        help_text = f"{name} port, or auto for a free one (default: {default})"
        verb.add_argument(f"--{name}-port", type=port_or_auto, default=default, metavar="PORT", help=help_text)
    verb.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s; all: 0.0.0.0)")
    help_text = "seconds of a stop: open requests get 5 less, at least half (default: 30)"
    dest = "exit_timeout_secs"
    verb.add_argument("--exit-timeout", dest=dest, type=seconds, default=30, metavar="S", help=help_text)
    verb.add_argument("--log-file", type=path, metavar="FILE", help="write the server's whole log to FILE")
    verb.add_argument("--verbose", action="store_true", help="show the server's whole log")


def _serve(args: argparse.Namespace) -> int:
    args.server_args = tuple(args.server_args)
    return serve(ServeOptions(**{field.name: getattr(args, field.name) for field in dataclasses.fields(ServeOptions)}))


def serve(options: ServeOptions) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP, which are passed on to the server; a second signal kills it.

    Call it in the main thread. The server's address goes to stdout, everything else to stderr. Returns the server's
    exit code as a shell has it: 128 + N for signal N.

    :raises ToolError: when it can't be started, doesn't become ready, or ends with an error without a stop.
    """
    is_ready = False

    def show(text: str) -> None:
        if options.verbose or (is_ready and is_worth_showing(text)):
            print(text, file=sys.stderr, flush=True)

    with ServerProcess(options, on_line=show) as server, _signals_forwarded(server):
        server.start()
        line, names = StatusLine(), ", ".join(server.models)

        def show_progress(progress: StartProgress) -> None:
            if not options.verbose:
                line.show(lambda: f"loading {names}, {clock(progress.elapsed_s)}  {progress.last_message}")

        try:
            is_ready = server.wait_until_ready(show_progress)
        finally:
            line.clear()
        if is_ready:
            print(_ready_text(server), flush=True)
        code = server.wait()
        if server.was_killed:
            print(_KILLED.format(options.exit_timeout_secs + _PATIENCE_S), file=sys.stderr)
        if code and not server.stop_requested:
            raise server.failure()
        return code


def is_worth_showing(text: str) -> bool:
    """Whether a line of a server that is ready is for people. Earlier warnings are about a missing GPU."""
    line = parse_log_line(text)
    return line.level in ("W", "E", "F") or line.is_from_model


def _ready_text(server: ServerProcess) -> str:
    addresses = [
        f"  HTTP     {server.http_url}",
        f"  gRPC     {server.address}:{server.grpc_port}",
        f"  metrics  {server.metrics_url}",
    ]
    process = f"(tritonserver is process {server.pid})"
    if not server.loaded_models:
        load = f"curl -X POST {server.http_url}/v2/repository/models/{server.models[0]}/load"
        return "\n".join([f"ready: no model is loaded {process}", *addresses, f"load one: {load}"])
    body = json.dumps({"text_input": "The capital of France is", "max_tokens": 32})
    ask = f"curl -s {server.http_url}/v2/models/{server.loaded_models[0]}/generate -d '{body}'"
    return "\n".join([f"ready: {', '.join(server.loaded_models)} {process}", *addresses, f"try it: {ask}"])


@contextlib.contextmanager
def _signals_forwarded(server: ServerProcess) -> Iterator[None]:
    def forward(signum: int, _: FrameType | None) -> None:
        if not server.stop_requested:
            # os.write, because the handler may have interrupted a print; a terminal that hung up can't be written to.
            with contextlib.suppress(OSError):
                os.write(2, b"stopping; once more stops at once\n")
        # When the terminal hangs up, the server still ends in order.
        server.request_stop(signal.SIGTERM if signum == signal.SIGHUP else signum)

    signums = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # nohup ignores SIGHUP, and a shell's background jobs ignore SIGINT: a signal that was ignored stays ignored.
    before = {signum: signal.getsignal(signum) for signum in signums}
    taken = [signum for signum in signums if before[signum] != signal.SIG_IGN]
    try:
        for signum in taken:
            signal.signal(signum, forward)
        yield
    finally:
        for signum in taken:
            signal.signal(signum, before[signum])
