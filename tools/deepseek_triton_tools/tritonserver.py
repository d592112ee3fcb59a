"""What is known of the tritonserver program: where it is, how it is run from there, and what its log says.

The server that the nvidia-pytriton wheel carries needs four things a container's does not: a backend directory that
holds the stub of the running Python, the wheel's and Python's own libraries on LD_LIBRARY_PATH, this environment's
`bin` first on PATH (the stub finds its prefix through `python3` there, and ignores PYTHONPATH), and numpy 1.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deepseek_triton_tools.errors import InstallationError
from deepseek_triton_tools.preflight import find_libpython, glibc_problem, libpython_problem

CONTAINER_BINARY = Path("/opt/tritonserver/bin/tritonserver")

_BACKEND_FILES = ("libtriton_python.so", "triton_python_backend_utils.py")
_STUB = "triton_python_backend_stub"


@dataclass(frozen=True)
class Installation:
    """A tritonserver and how to run it."""

    binary: Path
    kind: str
    """`explicit`, `path`, `container` or `wheel`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables to set, each with its whole value."""
    extra_args: tuple[str, ...] = ()


def find_tritonserver(explicit: Path | None = None) -> Installation:
    """The server at `explicit`, else from PATH, else the container's, else the wheel's.

    :raises InstallationError: when there is none, or the wheel's can't run here.
    """
    if explicit is not None:
        if not os.access(explicit, os.X_OK) or explicit.is_dir():
            raise InstallationError(f"--tritonserver {explicit} is no program that can be run: name the server binary")
        return Installation(explicit.absolute(), "explicit")
    on_path = shutil.which("tritonserver")
    if on_path:
        return Installation(Path(on_path), "path")
    if CONTAINER_BINARY.is_file():
        return Installation(CONTAINER_BINARY, "container")
    package = _wheel_package()
    if package is not None:
        return _wheel_installation(package)
    raise InstallationError(
        "no tritonserver on PATH, in /opt/tritonserver/bin or in this Python's environment: "
        "pip install 'deepseek-triton[server]', run in NVIDIA's Triton container, or name one with --tritonserver"
    )


def _wheel_package() -> Path | None:
    """The wheel's `pytriton` folder; only its files are wanted, so it isn't imported."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    return package if (package / "tritonserver/bin/tritonserver").is_file() else None


def _wheel_installation(package: Path) -> Installation:
    for problem in (glibc_problem(), libpython_problem(), _numpy_problem(), _stub_problem(package)):
        if problem:
            raise InstallationError(problem)
    libpython = find_libpython()
    assert libpython is not None  # libpython_problem() has looked
    libraries = [str(package.parent / "nvidia_pytriton.libs"), str(libpython.parent)]
    return Installation(
        package / "tritonserver/bin/tritonserver",
        "wheel",
        {
            "LD_LIBRARY_PATH": _prepended(libraries, "LD_LIBRARY_PATH"),
            "PATH": _prepended([str(Path(sys.prefix, "bin"))], "PATH"),
        },
        (f"--backend-directory={_backend_directory(package)}",),
    )


def _prepended(folders: list[str], variable: str) -> str:
    rest = os.environ.get(variable)
    return os.pathsep.join([*folders, rest] if rest else folders)


def _numpy_problem() -> str | None:
    """With numpy 2 the stub is silently wrong: arrays arrive with other values than were sent."""
    try:
        version = importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError:
        return "tritonserver's Python backend needs numpy in this environment: pip install 'numpy>=1.26,<2'"
    if version.startswith(("0.", "1.")):
        return None
    return (
        f"this environment has numpy {version}, with which the wheel's Python backend hands over wrong values: "
        "pip install 'numpy>=1.26,<2'"
    )


def _stub_path(package: Path) -> Path:
    return package / "tritonserver/python_backend_stubs/{}.{}".format(*sys.version_info) / _STUB


def _stub_problem(package: Path) -> str | None:
    stub = _stub_path(package)
    if stub.is_file():
        return None
    known = sorted((path.name for path in stub.parent.parent.iterdir()), key=lambda name: int(name.partition(".")[2]))
    return (
        f"the nvidia-pytriton wheel has no Python backend for Python {stub.parent.name}: "
        f"use one of {', '.join(known)} for the environment"
    )


def _backend_directory(package: Path) -> Path:
    """The folder for --backend-directory: links to the backend's files, and the stub beside them, where it is sought.

    Made once for each wheel and Python, complete or not at all.
    """
    key = hashlib.sha256(str(package).encode()).hexdigest()[:12]
    release = importlib.metadata.version("nvidia-pytriton")
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "deepseek-triton/backends")
    directory = root / f"{release}-py{_stub_path(package).parent.name}-{key}"
    if directory.is_dir():
        return directory
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=root, prefix=".making-"))
    (scratch / "python").mkdir()
    for source in [*(package / "tritonserver/backends/python" / name for name in _BACKEND_FILES), _stub_path(package)]:
        (scratch / "python" / source.name).symlink_to(source)
    try:
        scratch.rename(directory)
    except OSError:
        # Another process was first, or the folder can't be made.
        shutil.rmtree(scratch)
        if not directory.is_dir():
            raise
    return directory


@dataclass(frozen=True)
class LogLine:
    """One line of the server's output."""

    level: str
    """I, W, E or F; empty for what did not come through the server's logger: prints, tables, native libraries."""
    source: str
    """`file:line` that logged it; ends in `.py:N` for what a model logged through pb_utils."""
    message: str

    @property
    def is_from_model(self) -> bool:
        """Whether a model's Python logged or printed it, as far as can be told."""
        return ".py:" in self.source or (not self.level and not self.is_table)

    @property
    def is_table(self) -> bool:
        return not self.level and self.message[:1] in ("", "|", "+")


_LOGGED = re.compile(
    r"(?:(?P<level>[IWEF])\d{4} [\d:.]+|\d{4}-\d\d-\d\dT\S+ (?P<iso_level>[IWEF])) +\d+ "
    r"(?P<source>\S+?:\d+)\] *(?P<message>.*)"
)


def parse_log_line(text: str) -> LogLine:
    """`text` in parts, its message as it was before the logger quoted it."""
    match = _LOGGED.match(text)
    if not match:
        return LogLine("", "", text.rstrip())
    message = match["message"].rstrip()
    if len(message) > 1 and message[0] == message[-1] == '"':
        message = _unquoted(message)
    return LogLine(match["level"] or match["iso_level"], match["source"], message)


def _unquoted(message: str) -> str:
    try:
        # strict=False: the server leaves some control characters as they are.
        return str(json.loads(message, strict=False))
    except ValueError:
        return message[1:-1]


HOPELESS = "Failed to preinitialize Python stub: "
"""A stub that says this (model.py is missing, for one) leaves tritonserver waiting for ever."""

_PROTOBUF = re.compile(r"Error parsing text-format inference\.ModelConfig: (\d+):(\d+): (.*)")
_MODEL_CAUSES = (
    re.compile(r"failed to load '(?P<model>.+?)' version \d+: (?:[A-Z][a-z ]+: )?(?P<cause>.+)", re.DOTALL),
    re.compile(r"failed to load model '(?P<model>.+?)': (?P<cause>.+)", re.DOTALL),
    re.compile(r"Poll failed for model directory '(?P<model>.+?)': (?P<cause>.+)", re.DOTALL),
)
_SERVER_CAUSES = (
    re.compile(re.escape(HOPELESS) + "(?P<cause>.+)", re.DOTALL),
    re.compile(r"failed to start \S+ service: (?:\w+ - )?(?P<cause>.+)"),
    re.compile(r".*(?P<cause>error while loading shared libraries: .+)"),
    re.compile(r".*(?P<cause>unrecognized option .+)"),
    re.compile(r"error: creating server: (?:[A-Z][a-z ]+ - )?(?P<cause>.+)"),
)


def failure_cause(lines: Iterable[str]) -> str:
    """Why the server ended, in one line, from its own words.

    Where nothing in them is known for a cause: the last error that a model logged, else whatever was said last.
    """
    parsed = [parse_log_line(line) for line in lines]
    causes = _model_causes(parsed)
    if causes:
        model, cause = next(iter(causes.items()))
        more = f" (and {len(causes) - 1} more: {', '.join(list(causes)[1:])})" if len(causes) > 1 else ""
        return f"model {model!r} failed to load: {cause}{more}"
    for pattern in _SERVER_CAUSES:
        for line in parsed:
            match = pattern.match(line.message)
            if match:
                return _plain(match["cause"])
    errors = [line.message for line in parsed if line.level in ("E", "F") and line.is_from_model]
    words = errors or [line.message for line in parsed if line.message and not line.is_table]
    return _plain(words[-1]) if words else "tritonserver ended without a word"


def _model_causes(lines: list[LogLine]) -> dict[str, str]:
    """The cause for each model that failed, in the log's order."""
    causes: dict[str, str] = {}
    before = printed = ""
    for line in lines:
        match = next(filter(None, (pattern.match(line.message) for pattern in _MODEL_CAUSES)), None)
        if match:
            causes.setdefault(match["model"], _model_cause(match["cause"], before, printed))
        elif line.is_from_model:
            printed = line.message
        before = line.message
    return causes


def _model_cause(cause: str, before: str, printed: str) -> str:
    """`cause` made plain; `before` is the line that preceded it, `printed` the last that the model's process said."""
    syntax = _PROTOBUF.search(before)
    if syntax and "failed to read text proto" in cause:
        return f"config.pbtxt line {syntax[1]}, column {syntax[2]}: {syntax[3]}"
    if "is not healthy" in cause:
        words = f"; its last words: {_plain(printed)}" if printed else ""
        return f"its Python process died while loading (a crash, or killed for want of memory){words}"
    return _plain(cause)


_EXCEPTION = re.compile(r"(?P<name>[A-Za-z_][\w.]*(?:Error|Exception|Exit)): (?P<message>\S.*)", re.DOTALL)


def _plain(cause: str) -> str:
    """An exception's message in one line, without its traceback, and without its name where that says nothing.

    KeyError or ModuleNotFoundError says something; ValueError, RuntimeError and a library's own name hardly do.
    """
    text = cause.partition("\n\nAt:\n")[0].strip()
    match = _EXCEPTION.match(text)
    if match and (match["name"] in ("ValueError", "RuntimeError") or not hasattr(builtins, match["name"])):
        text = match["message"]
    return " ".join(text.split())
