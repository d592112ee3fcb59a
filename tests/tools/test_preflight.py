import ast
import os
import platform
import pty
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


def test_it_runs_as_a_script_without_the_environment():
    done = subprocess.run([sys.executable, "-I", "-S", preflight.__file__], capture_output=True, text=True)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_versions_of_python_and_glibc_and_a_missing_venv(monkeypatch):
    pythons = {(3, 8, 18): False, (3, 9, 0): False, (3, 10, 0): True, (3, 12, 9): True, (3, 13, 0): False}
    for version, fit in pythons.items():
        pretend_python(monkeypatch, version)
        problem = preflight.python_problem()
        assert (problem is None) == fit
        assert fit or "make PYTHON=" in problem
    libcs = {("glibc", "2.34"): False, ("glibc", "2.35"): True, ("glibc", "2.40.9000"): True, ("", ""): False}
    for libc, fit in libcs.items():
        monkeypatch.setattr(platform, "libc_ver", lambda libc=libc: libc)
        assert (preflight.glibc_problem() is None) == fit
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else object())
    assert "apt install python3-venv" in preflight.venv_problem()


def test_where_the_shared_library_is_looked_for(monkeypatch, tmp_path):
    """A static Python is told how to get one; one that was moved has it below its prefix."""
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: "/install/lib")
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    library = tmp_path / "lib" / preflight.libpython_name()
    library.parent.mkdir()
    library.touch()
    assert preflight.find_libpython() == library

    library.unlink()
    pretend_python(monkeypatch, (3, 11, 7))
    problem = preflight.libpython_problem()
    assert "libpython3.11.so.1.0 is missing" in problem
    assert "apt install libpython3.11," in problem
    assert "--enable-shared pyenv install --force 3.11.7" in problem


def test_problems_are_lines_and_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("musl", "1.2"))

    assert "Linux on aarch64" in preflight.machine_problem()
    assert preflight.main() == 1
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_old_pythons_can_read_the_file():
    """It must be able to say that the Python is too old; no syntax newer than 3.8's."""
    ast.parse(Path(preflight.__file__).read_text(), feature_version=(3, 8))


CONNECTION = "WARNING: Retrying (Retry(total=4)) after connection broken by "
LOST = "ERROR: No matching distribution found for pip>=25.1\n"
UNREACHABLE = "the package index can't be reached"
WHY_PIP_FAILED = {
    f"{CONNECTION}'NewConnectionError('<HTTPConnection at 0x7>: Failed to establish a new connection: "
    f"[Errno 111] Connection refused')': /simple/pip/\n{LOST}": f"{UNREACHABLE} ([Errno 111] Connection refused)",
    f"{CONNECTION}'ProxyError('Cannot connect to proxy.', OSError('Tunnel connection "
    f"failed: 407 Proxy wants more'))': /simple/pip/\n{LOST}": f"{UNREACHABLE} (407 Proxy wants more)",
    f"{CONNECTION}'ReadTimeoutError(\"HTTPSConnectionPool(host='a', port=443): Read timed out. "
    f"(read timeout=15)\")': /simple/pip/\n{LOST}": f"{UNREACHABLE} (timed out)",
    "WARNING: ... SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify "
    f"failed: self-signed certificate in certificate chain (_ssl.c:1006)'))\n{LOST}": "the package index can't be "
    "trusted (CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed",
    LOST: "no package index that answered has pip>=25.1 for this Python",
    "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n": "No space left on "
    "device: make room, or let TMPDIR name another folder",
    "note: a\nERROR: the metadata is odd\nhint: b\n": "the metadata is odd",
    "Traceback\nKeyError: 1\n": "KeyError: 1",
    "": "no output",
}


def test_why_pip_failed_is_one_line():
    said = {output: pip_install.failure(output) for output in WHY_PIP_FAILED}
    assert {output: text[: len(WHY_PIP_FAILED[output])] for output, text in said.items()} == WHY_PIP_FAILED
    assert not any("\n" in text for text in said.values())


PIP = """
import sys, time
if "heavy" in sys.argv:
    print("Collecting heavy\\n  Downloading heavy-1.0-py3-none-any.whl (3.0 MB)")
    time.sleep(0.9)
    assert "--no-compile" in sys.argv
"""
"""Stands for pip, which prints how far it is."""


def on_a_terminal(argv):
    """All that it shows, and its exit status."""
    screen, terminal = pty.openpty()
    process = subprocess.Popen(argv, stdout=terminal, stderr=terminal, env={**os.environ, "COLUMNS": "60"})
    os.close(terminal)
    shown = b""
    try:
        while data := os.read(screen, 65536):
            shown += data
    except OSError:  # EIO: Linux's end of a terminal
        pass
    finally:
        os.close(screen)
    return shown.decode(), process.wait()


@pytest.mark.slow
def test_a_terminal_sees_pip_at_work(tmp_path, monkeypatch):
    (tmp_path / "pip.py").write_text(PIP)
    (tmp_path / "ensurepip.py").write_text("open(__file__ + '.ran', 'w').close()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    shown, exit_status = on_a_terminal([sys.executable, pip_install.__file__, str(tmp_path / "log"), "heavy"])
    assert exit_status == 0, shown
    assert (tmp_path / "ensurepip.py.ran").exists()
    assert shown.count("\n") == 1, "it is one line"
    states = shown.split("\r")
    assert {len(state) for state in states[1:-1]} == {59}, "each covers the one before"
    assert any(re.search(r" s  Downloading heavy-1.0-py3-none-any.whl \(3.0 MB\) *$", state) for state in states), shown
    assert re.search(r" s  installed *\r\n$", shown)


def test_a_log_gets_lines_and_the_cause(tmp_path, monkeypatch, capsys):
    log = tmp_path / "pip.log"
    monkeypatch.setattr(sys, "argv", ["pip_install.py", str(log), "absent"])
    monkeypatch.setattr(pip_install, "_run_module", lambda *_: log.write_text(LOST))
    assert pip_install.main() == 1
    out, err = capsys.readouterr()
    assert re.fullmatch(r" +\d+ s  pip failed\n", out)
    assert err == f"pip failed: {WHY_PIP_FAILED[LOST]} (its output: {log})\n"


@pytest.mark.slow
def test_make_notices_a_python_that_is_too_old_and_a_clone_that_was_moved(tmp_path):
    """Pythons 2.7 and 3.6 could not read the annotations of preflight.py."""
    makefile = Path(preflight.__file__).parents[3] / "Makefile"
    check = re.search(r"\$\(PYTHON\) -c '(.+)'\n", makefile.read_text())[1]
    message = re.search(r"^TOO_OLD := (.+)$", makefile.read_text(), re.MULTILINE)[1]
    program = check.replace("$(TOO_OLD)", message)
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    old = f"import sys; sys.version_info = (2, 7, 18); {program}"
    done = subprocess.run([sys.executable, "-c", old], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("this is 2.7: ")) == (1, 1)

    folder, pth = tmp_path / "a clone", ".venv/lib/python3/site-packages/_deepseek_triton.pth"
    (python := folder / ".venv/bin/python").parent.mkdir(parents=True)
    (folder / pth).parent.mkdir(parents=True)
    for file in ("pyproject.toml", ".venv/.demo"):
        (folder / file).touch()
    # As pip does, it says where the code is long before its end.
    python.write_text(f'#!/bin/sh\ncase $* in *pip_install*) echo "$@"; echo "$PWD/build" > {pth}; $END; esac')
    python.chmod(0o755)
    make, forced = ["PYTHON=.venv/bin/python", "make", f"-C{folder}", f"-f{makefile}", ".venv/.demo"], []
    for other in ("", "2"):
        (folder / pth).write_text(f"{folder}{other}/build\n/")
        for end in ("kill 0", "true", "true"):
            done = subprocess.run(["env", f"END={end}", *make], start_new_session=True, capture_output=True, text=True)
            forced.append("--force-reinstall" in done.stdout)
    assert forced == [False, False, False, True, True, False]
