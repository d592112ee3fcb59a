import ast
import platform
import re
import subprocess
import sys
import sysconfig
from collections import namedtuple
from pathlib import Path

import pytest

from deepseek_triton_tools.host import pip_install, preflight

VersionInfo = namedtuple("VersionInfo", "major minor micro releaselevel serial")


def pretend_python(monkeypatch, version):
    monkeypatch.setattr(sys, "version_info", VersionInfo(*version, "final", 0))
    monkeypatch.setattr(platform, "python_version", lambda: ".".join(map(str, version)))


def test_this_environment_is_fit():
    assert preflight.problems() == []


def test_it_runs_as_a_script_without_the_environment():
    done = subprocess.run([sys.executable, "-I", "-S", preflight.__file__], capture_output=True, text=True)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("version", "fit"),
    [((3, 8, 18), False), ((3, 9, 0), False), ((3, 10, 0), True), ((3, 12, 9), True), ((3, 13, 0), False)],
)
def test_python_versions(monkeypatch, version, fit):
    pretend_python(monkeypatch, version)

    problem = preflight.python_problem()

    assert (problem is None) == fit
    if problem:
        assert "make PYTHON=" in problem


@pytest.mark.parametrize(
    ("libc", "fit"),
    [(("glibc", "2.34"), False), (("glibc", "2.35"), True), (("glibc", "2.40.9000"), True), (("", ""), False)],
)
def test_glibc_versions(monkeypatch, libc, fit):
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)

    assert (preflight.glibc_problem() is None) == fit


def test_another_machine_is_named(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")

    assert "Linux on aarch64" in preflight.machine_problem()


def test_a_python_without_venv_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else object())

    problem = preflight.venv_problem()

    assert "lacks ensurepip" in problem
    assert "apt install python3-venv" in problem


def test_a_static_python_is_told_how_to_get_a_shared_library(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    pretend_python(monkeypatch, (3, 11, 7))

    problem = preflight.libpython_problem()

    assert "libpython3.11.so.1.0 is missing" in problem
    assert "apt install libpython3.11," in problem
    assert "--enable-shared pyenv install --force 3.11.7" in problem


def test_a_python_that_was_moved_is_found_below_its_prefix(monkeypatch, tmp_path):
    library = tmp_path / "lib" / preflight.libpython_name()
    library.parent.mkdir()
    library.touch()
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: "/install/lib")
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))

    assert preflight.find_libpython() == library


def test_problems_are_lines_and_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("musl", "1.2"))

    assert preflight.main() == 1
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_old_pythons_can_read_the_file():
    """It must be able to say that the Python is too old; no syntax newer than 3.8's."""
    with open(preflight.__file__, encoding="utf-8") as file:
        ast.parse(file.read(), feature_version=(3, 8))


CONNECTION = "WARNING: Retrying (Retry(total=4)) after connection broken by "
LOST = "ERROR: No matching distribution found for pip>=25.1\n"


@pytest.mark.parametrize(
    ("output", "told"),
    [
        pytest.param(
            f"{CONNECTION}'NewConnectionError('<HTTPConnection at 0x7>: Failed to establish a new connection: "
            f"[Errno 111] Connection refused')': /simple/pip/\n{LOST}",
            "the package index can't be reached ([Errno 111] Connection refused)",
            id="refused",
        ),
        pytest.param(
            f"{CONNECTION}'ProxyError('Cannot connect to proxy.', OSError('Tunnel connection failed: "
            f"407 Proxy Authentication Required'))': /simple/pip/\n{LOST}",
            "the package index can't be reached (407 Proxy Authentication Required)",
            id="proxy",
        ),
        pytest.param(
            f"{CONNECTION}'ReadTimeoutError(\"HTTPSConnectionPool(host='a', port=443): Read timed out. "
            f"(read timeout=15)\")': /simple/pip/\n{LOST}",
            "the package index can't be reached (timed out)",
            id="timeout",
        ),
        pytest.param(
            "WARNING: ... SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify "
            f"failed: self-signed certificate in certificate chain (_ssl.c:1006)'))\n{LOST}",
            "the package index can't be trusted (CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed",
            id="certificate",
        ),
        pytest.param(LOST, "no package index that answered has pip>=25.1 for this Python", id="nothing found"),
        pytest.param(
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n",
            "No space left on device: make room, or let TMPDIR name another folder",
            id="full disk",
        ),
        pytest.param("note: a\nERROR: the metadata is odd\nhint: b\n", "the metadata is odd", id="another error"),
        pytest.param("Traceback\nKeyError: 1\n", "KeyError: 1", id="a crash"),
        pytest.param("", "no output", id="nothing"),
    ],
)
def test_why_pip_failed_is_one_line(output, told):
    said = pip_install.failure(output)

    assert said.startswith(told)
    assert "\n" not in said


def test_make_refuses_a_python_that_the_checks_themselves_are_too_new_for():
    """As Python 2.7 and 3.6 would: neither reads the annotations of preflight.py."""
    makefile = Path(preflight.__file__).parents[3].joinpath("Makefile").read_text()
    check = re.search(r"\$\(PYTHON\) -c '(.+)'\n", makefile)[1]
    message = re.search(r"^TOO_OLD := (.+)$", makefile, re.MULTILINE)[1]
    program = check.replace("$(TOO_OLD)", message)

    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.version_info = (2, 7, 18); {program}"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == (
        "Python 3.10, 3.11 or 3.12 is needed, this is 2.7: name another, as in `make PYTHON=python3.12`\n"
    )
