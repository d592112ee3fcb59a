"""`deepseek-triton serve`: tritonserver on a model repository, in the foreground.

What is promised: nothing is started that can't work, the server's output always has a reader, its exit code is passed
on, and when this process is gone, however it went, so are the server and the Python stubs it had started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

from rich.console import Console
from rich.text import Text

from deepseek_triton_tools.server.server_log import parse_log_line
from deepseek_triton_tools.server.server_process import ServeOptions, ServerProcess, StartProgress

_PLAIN_PROGRESS_EVERY_S = 10


def serve(options: ServeOptions) -> int:
    """Serve until a signal says stop; SIGINT, SIGTERM and SIGHUP reach the server, the second of them kills it.

    Call it in the main thread. The server's address goes to stdout, everything else to stderr.

    :returns: the server's exit code as a shell has it.
    :raises ToolError: when it can't be started, doesn't become ready, or ends with an error unasked.
    """
    view = _View(options.verbose)
    with ServerProcess(options, on_line=view.show) as server, _signals_forwarded(server):
        server.start()
        with view.progress(server.models) as on_progress:
            ready = server.wait_until_ready(on_progress)
        if ready:
            view.is_ready = True
            print(_ready_text(server), flush=True)
        code = server.wait()
        if code and not server.stop_requested:
            raise server.failure()
        return code


class _View:
    """What `serve` shows of the server's log."""

    def __init__(self, verbose: bool) -> None:
        self.verbose = verbose
        self.is_ready = False
        """Warnings before this are about the GPU that a laptop lacks; a failure is told with its cause."""

    def show(self, text: str) -> None:
        line = parse_log_line(text)
        if self.verbose or (self.is_ready and (line.level in ("W", "E", "F") or line.is_from_model)):
            print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def progress(self, models: list[str]) -> Iterator[Callable[[StartProgress], None]]:
        """One line that is rewritten on a terminal, a line every ten seconds elsewhere; none beside the whole log."""
        console = Console(stderr=True)
        names = ", ".join(models)
        if self.verbose:
            yield lambda progress: None
        elif console.is_terminal:
            with console.status(f"loading {names}") as status:
                yield lambda progress: status.update(_progress_text(names, progress))
        else:
            last_s = 0.0

            def print_now_and_then(progress: StartProgress) -> None:
                nonlocal last_s
                if progress.elapsed_s - last_s >= _PLAIN_PROGRESS_EVERY_S:
                    last_s = progress.elapsed_s
                    print(_progress_text(names, progress), file=sys.stderr, flush=True)

            yield print_now_and_then


def _progress_text(names: str, progress: StartProgress) -> Text:
    minutes, seconds = divmod(int(progress.elapsed_s), 60)
    last = " ".join(progress.last_message.split())
    return Text(f"loading {names}, {minutes}:{seconds:02d}  {last}", no_wrap=True, overflow="ellipsis")


def _ready_text(server: ServerProcess) -> str:
    body = json.dumps({"text_input": "The capital of France is", "max_tokens": 32})
    return "\n".join(
        [
            f"ready: {', '.join(server.models)} (tritonserver is process {server.pid})",
            f"  HTTP     {server.http_url}",
            f"  gRPC     {server.address}:{server.grpc_port}",
            f"  metrics  {server.metrics_url}",
            f"try it: curl -s {server.http_url}/v2/models/{server.models[0]}/generate -d '{body}'",
        ]
    )


@contextlib.contextmanager
def _signals_forwarded(server: ServerProcess) -> Iterator[None]:
    def forward(signum: int, _: FrameType | None) -> None:
        if not server.stop_requested:
            # Not print: the handler may have interrupted one. And a terminal that hung up can't be written to.
            with contextlib.suppress(OSError):
                os.write(2, b"stopping; once more stops at once\n")
        # A terminal that hangs up is no reason for less than an orderly end.
        server.request_stop(signal.SIGTERM if signum == signal.SIGHUP else signum)

    signums = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # nohup ignores SIGHUP, and a shell's background jobs SIGINT: what was ignored stays so.
    before = {signum: signal.getsignal(signum) for signum in signums}
    taken = [signum for signum in signums if before[signum] != signal.SIG_IGN]
    try:
        for signum in taken:
            signal.signal(signum, forward)
        yield
    finally:
        for signum in taken:
            signal.signal(signum, before[signum])
