"""Renders chat templates within bounds of memory and time, in the process of `template_program.py`.

A template is a program that comes with a checkpoint. jinja2's sandbox keeps it from files and code, but not from a loop
without an end or a text of gigabytes, and neither can be stopped within this process.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_PROGRAM = Path(__file__).with_name("template_program.py")
# Address space of the process. A conversation of 64 MiB, the most that a gateway takes, needs a third of it.
_MEMORY_MIB = 2048
# Seconds of the processor for a conversation. DeepSeek's templates take milliseconds.
_PROCESSOR_S = 10
_MOST_BYTES = 256 * 2**20
"""Longest prompt, in UTF-8."""
# Environment variables that the process gets; by the last one the supervisor finds it. It gets no secret.
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL", "DEEPSEEK_TRITON_LAUNCH")


class TemplateFailure(Exception):
    """A template gave no prompt. The message says why, on one line."""


class _KilledFromOutside(TemplateFailure):
    pass


class TemplateProcess:
    """The process, which is started when it is needed. Any thread may use it."""

    def __init__(
        self, *, memory_mib: int = _MEMORY_MIB, processor_s: int = _PROCESSOR_S, most_bytes: int = _MOST_BYTES
    ) -> None:
        self._limits = (memory_mib, processor_s)
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, source: str, values: Mapping[str, Any] | None) -> str:
        """Return what the template makes of `values`, which JSON can hold; None: only compile it, and return "".

        :raises TemplateFailure: with the reason.
        """
        try:
            request = json.dumps({"source": source, "values": values}, default=dict).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateFailure(f"expected values that JSON can hold: {error}") from error
        with self._lock:
            for is_last in (False, True):
                try:
                    word, text = self._exchange(self._running(), request)
                    break
                except BaseException as error:
                    self._end()
                    # Whoever kills it, as the kernel does when memory is short, may have meant another request's work.
                    if is_last or not isinstance(error, _KilledFromOutside):
                        raise
            if word == b"memory":  # what it allocated may never be whole again
                self._end()
        if word != b"text":
            raise TemplateFailure(text)
        return text

    def close(self) -> None:
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        folders: dict[str, None] = {}
        for package in ("jinja2", "markupsafe"):
            spec = find_spec(package)
            if spec is None or spec.origin is None:
                raise TemplateFailure(f"{package} is not installed, which chat templates need: pip install jinja2")
            folders[str(Path(spec.origin).parents[1])] = None
        # Nothing of the environment and the site is loaded (-I, -S), which keeps out what others put there and is fast.
        command = [
            *(sys.executable or f"{sys.exec_prefix}/bin/python3", "-I", "-S", "-B", str(_PROGRAM)),
            *map(str, self._limits),
            *folders,
        ]
        kept = {name: value for name in _KEPT_VARIABLES if (value := os.environ.get(name)) is not None}
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=kept)
        except OSError as error:
            raise TemplateFailure(f"the process that renders it can't be started: {error.strerror}") from error
        return self._process

    def _exchange(self, process: subprocess.Popen[bytes], request: bytes) -> tuple[bytes, str]:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended, which the answer shows
            process.stdin.write(request)
            process.stdin.flush()
        head = process.stdout.readline(64)
        word, _, size = head.strip().partition(b" ")
        num_bytes = int(size) if size.isdigit() else 0
        if num_bytes > self._most_bytes:
            raise TemplateFailure(f"expected a prompt of at most {self._most_bytes:,} bytes, got {num_bytes:,}")
        answer = process.stdout.read(num_bytes)
        if not head or len(answer) < num_bytes:
            code = process.wait()
            if code == -signal.SIGXCPU:
                raise TemplateFailure(f"it took more than {self._limits[1]} s of the processor")
            failure = _KilledFromOutside if code == -signal.SIGKILL else TemplateFailure
            raise failure(f"the process that renders it has ended with {code}")
        return word, answer.decode("utf-8", "surrogatepass")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # a request that was not sent whole
                    pipe.close()


_process = TemplateProcess()
render_template = _process.render
atexit.register(_process.close)
_inside = threading.local()


@contextmanager
def transformers_bounded() -> Iterator[None]:
    """Have transformers, where it is loaded, render the templates of this thread in the process too."""
    utilities = sys.modules.get("transformers.utils.chat_template_utils")
    compile_template = getattr(utilities, "_compile_jinja_template", None)
    if compile_template is not None and not hasattr(compile_template, "is_bounded"):

        def compile_bounded(chat_template: str) -> Any:
            if getattr(_inside, "is_on", False):
                # Stands for a template that jinja2 has compiled, of which transformers calls `render` only.
                return SimpleNamespace(render=lambda **values: render_template(chat_template, values))
            return compile_template(chat_template)

        compile_bounded.is_bounded = True  # type: ignore[attr-defined]
        utilities._compile_jinja_template = compile_bounded  # type: ignore[union-attr]

    _inside.is_on = True
    try:
        yield
    finally:
        _inside.is_on = False
