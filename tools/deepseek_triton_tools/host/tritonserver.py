"""Finding tritonserver, and what it needs to run from there.

The server in the nvidia-pytriton wheel needs four things that the server in a container does not: a backend directory
that holds the stub of the running Python, the libraries of the wheel and of Python on LD_LIBRARY_PATH, this
environment's `bin` first on PATH (the stub finds its prefix through `python3` there, and ignores PYTHONPATH), and
numpy 1.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deepseek_triton_tools.host.preflight import find_libpython, glibc_problem, libpython_problem
from deepseek_triton_tools.pages import install_extra
from deepseek_triton_tools.tool_errors import InstallationError

CONTAINER_BINARY = Path("/opt/tritonserver/bin/tritonserver")

_LIBRARY = "libtriton_python.so"
_BACKEND_FILES = (_LIBRARY, "triton_python_backend_utils.py")
_STUB = "triton_python_backend_stub"


@dataclass(frozen=True)
class Installation:
    """A tritonserver and how to run it."""

    binary: Path
    kind: str
    """`explicit`, `path`, `container` or `wheel`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to set, each with its whole value."""
    extra_args: tuple[str, ...] = ()
    backends: Path = Path("/opt/tritonserver/backends")
    """The server's backend directory; this is its own default, wherever the binary lies."""

    def backend_directory(self, folder: Path, added: Iterable[Path]) -> Path:
        """Make `folder` a backend directory with the server's backends and the folders `added`, and return it."""
        backends = {backend.name: backend.absolute() for backend in (*self.backends.iterdir(), *added)}
        shutil.copytree(backends.pop("python"), folder / "python", copy_function=_copy_library_link_rest)
        for name, backend in backends.items():
            (folder / name).symlink_to(backend)
        return folder


def _copy_library_link_rest(source: str, target: str) -> None:
    """Triton refuses a link to the Python backend's library where a backend with a model.py needs it (2.51)."""
    if Path(source).name == _LIBRARY:
        shutil.copy(source, target)
    else:
        Path(target).symlink_to(source)


def find_tritonserver(explicit: Path | None = None, *, extra: str = "demo") -> Installation:
    """The server at `explicit`, else the one on PATH, else the container's, else the wheel's.

    :param extra: of this project, which is advised where there is no server.
    :raises InstallationError: when there is no server, or the wheel's can't run here.
    """
    if explicit is not None:
        if not os.access(explicit, os.X_OK) or explicit.is_dir():
            raise InstallationError(f"--tritonserver {explicit} is no program that can be run: name the server binary")
        return Installation(explicit.absolute(), "explicit")
    if on_path := shutil.which("tritonserver"):
        return Installation(Path(on_path), "path")
    if CONTAINER_BINARY.is_file():
        return Installation(CONTAINER_BINARY, "container")
    if (package := wheel_package()) is not None:
        return _wheel_installation(package)
    raise InstallationError(
        "no tritonserver on PATH, in /opt/tritonserver/bin or in this Python's environment: "
        f"{install_extra(extra)}; or run in NVIDIA's Triton container, or put one on PATH"
    )


def wheel_package() -> Path | None:
    """The wheel's `pytriton` folder, without importing it; None where the wheel is not installed."""
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
    assert libpython is not None  # libpython_problem() has checked this
    libraries = [str(package.parent / "nvidia_pytriton.libs"), str(libpython.parent)]
    backends = _backend_directory(package)
    return Installation(
        package / "tritonserver/bin/tritonserver",
        "wheel",
        {
            "LD_LIBRARY_PATH": _prepended(libraries, "LD_LIBRARY_PATH"),
            "PATH": _prepended([str(Path(sys.prefix, "bin"))], "PATH"),
        },
        (f"--backend-directory={backends}",),
        backends,
    )


def _prepended(folders: list[str], variable: str) -> str:
    rest = os.environ.get(variable)
    return os.pathsep.join([*folders, rest] if rest else folders)


def _numpy_problem() -> str | None:
    """With numpy 2 the stub is silently wrong: arrays arrive with other values than those that were sent."""
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
    """The folder for --backend-directory: links to the backend's files, with the stub beside them, where the server
    looks for it.

    It is made once for each wheel and Python, and appears complete or not at all.
    """
    key = hashlib.sha256(str(package).encode()).hexdigest()[:12]
    release = importlib.metadata.version("nvidia-pytriton")
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "deepseek-triton/backends")
    directory = root / f"{release}-py{_stub_path(package).parent.name}-{key}"
    if shlex.quote(str(root)) != str(root):  # Triton hands it to a shell, and the wheel's stub takes ASCII alone
        raise InstallationError(f"tritonserver can't use {root}: let XDG_CACHE_HOME name one of plain ASCII, no blanks")
    if os.path.isdir(directory):
        return directory
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".making-") as name:
            scratch = Path(name, "made")
            (scratch / "python").mkdir(parents=True)
            backend = [package / "tritonserver/backends/python" / file for file in _BACKEND_FILES]
            for source in [*backend, _stub_path(package)]:
                (scratch / "python" / source.name).symlink_to(source)
            scratch.rename(directory)
    except OSError as error:
        if not directory.is_dir():  # else another process was first
            raise InstallationError(
                f"{root} can't be written: {error.strerror}; the variable XDG_CACHE_HOME names another folder for it"
            ) from error
    return directory
