"""Checks that a machine has what `make` needs, and says how to get what is missing.

Run as `python3 preflight.py`. It needs the standard library only, and runs on Python 3.8, so that it can say that 3.8
is too old. It prints a line for each problem, and exits with 1 when there is any.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
import sysconfig
from pathlib import Path

OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 12)
"""The wheel's Python stub works with numpy 1.26 at most, which is built for no Python newer than 3.12."""

OLDEST_GLIBC = (2, 35)
"""NVIDIA built the nvidia-pytriton wheel against this version, which is that of Ubuntu 22.04."""


def problems() -> list[str]:
    """One line for each thing that this machine or this Python lacks."""
    found = [machine_problem(), python_problem(), venv_problem(), glibc_problem(), libpython_problem()]
    return [problem for problem in found if problem]


def machine_problem() -> str | None:
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        return None
    return (
        f"the tritonserver wheel is for Linux on x86_64, this is {platform.system()} on {platform.machine()}: "
        "use an x86_64 Linux machine or container"
    )


def python_problem() -> str | None:
    if OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
        return None
    return (
        f"Python 3.10, 3.11 or 3.12 is needed, {sys.executable} is {platform.python_version()}: "
        "name another, as in `make PYTHON=python3.12`"
    )


def venv_problem() -> str | None:
    lacking = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if not lacking:
        return None
    return (
        f"this Python can't make a virtual environment, it lacks {' and '.join(lacking)}: apt install python3-venv, "
        "or use a Python that has them, as in `make PYTHON=...`"
    )


def glibc_problem() -> str | None:
    name, version = platform.libc_ver()
    if name == "glibc" and tuple(map(int, version.split(".")[:2])) >= OLDEST_GLIBC:
        return None
    return (
        f"the tritonserver wheel needs glibc 2.35 or newer, this is {f'{name} {version}'.strip() or 'another libc'}: "
        "use Ubuntu 22.04, Debian 12 or newer, or NVIDIA's Triton container"
    )


def libpython_problem() -> str | None:
    if find_libpython():
        return None
    version = platform.python_version()
    return (
        f"{libpython_name()} is missing, which tritonserver's Python backend is linked with: "
        f"apt install libpython{version.rpartition('.')[0]}, or with pyenv: "
        f"env PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install --force {version}"
    )


def libpython_name() -> str:
    return "libpython{}.{}.so.1.0".format(*sys.version_info)


def find_libpython() -> Path | None:
    """This Python's shared library; None when it was built without one.

    A Python that was moved after its build (conda, uv) records a LIBDIR that does not exist, so the folder below
    base_prefix is searched too.
    """
    folders = [sysconfig.get_config_var("LIBDIR"), str(Path(sys.base_prefix, "lib"))]
    candidates = [Path(folder, libpython_name()) for folder in folders if folder]
    return next((path for path in candidates if path.is_file()), None)


def main() -> int:
    found = problems()
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
