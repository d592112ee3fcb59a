import ast
import io
import os
import platform
import pty
import re
import subprocess
import sys
import sysconfig
import threading
import time
import zipfile
from collections import namedtuple
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from deepseek_triton_tools.host import pip_install, preflight

VersionInfo = namedtuple("VersionInfo", "major minor micro releaselevel serial")


def pretend_python(monkeypatch, version):
    monkeypatch.setattr(sys, "version_info", VersionInfo(*version, "final", 0))
    monkeypatch.setattr(platform, "python_version", lambda: ".".join(map(str, version)))


def test_it_runs_as_a_script_without_the_environment():
    done = subprocess.run([sys.executable, "-I", "-S", preflight.__file__], capture_output=True, text=True)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_versions_of_python_and_glibc(monkeypatch):
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


def test_a_python_without_venv_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else object())

    problem = preflight.venv_problem()

    assert "lacks ensurepip" in problem
    assert "apt install python3-venv" in problem


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
    with open(preflight.__file__, encoding="utf-8") as file:
        ast.parse(file.read(), feature_version=(3, 8))


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
    for output, told in WHY_PIP_FAILED.items():
        said = pip_install.failure(output)
        assert said.startswith(told)
        assert "\n" not in said


FETCHED = (
    "Obtaining file:///a\nCollecting one\n  Downloading one-1.0-py3-none-any.whl.metadata (1.2 kB)\n"
    "  Downloading one-1.0-py3-none-any.whl (340 kB)\n"
    "Collecting two\n  Using cached two-2.0-py3-none-any.whl (18.3 MB)\n"
    "Collecting big\n  Downloading big_one-0.7.0-py3-none-manylinux_2_35_x86_64.whl (55.4 MB)\nProgress 0 of 55369373\n"
)


def test_how_far_pip_is():
    ended = f"{FETCHED}Progress 55369373 of 55369373\n"
    states = {
        "": "asking the package index",
        FETCHED.partition("  Using")[0]: "0 of about 115 MB: one-1.0, 340 kB",
        FETCHED.partition("Coll")[0]: "asking the package index",
        FETCHED: "19 of about 115 MB: big_one-0.7.0, 55.4 MB",
        f"{FETCHED}Progress 30000000 of 55369373\nProg": "49 of about 115 MB: big_one-0.7.0, 55.4 MB",
        f"{ended}Collecting c\n  Downloading c-1.tar.gz (512 bytes)\n": "74 of about 115 MB: c-1.tar.gz, 512 bytes",
        f"{ended}Installing collected packages: one, two, big-one\n": "installing 3 packages, 74 MB",
    }
    assert {output: pip_install.progress(output, 115) for output in states} == states


class SlowIndex(BaseHTTPRequestHandler):
    """A package index with one wheel, which it sends in ten pieces."""

    wheel: ClassVar = b""
    asked: ClassVar = []

    def do_GET(self):
        self.asked.append(self.path)
        self.send_response(200)
        if self.path.endswith(".whl"):
            self.send_header("Content-Length", str(len(self.wheel)))
            self.end_headers()
            piece = len(self.wheel) // 10 + 1
            for start in range(0, len(self.wheel), piece):
                self.wfile.write(self.wheel[start : start + piece])
                time.sleep(0.3)
        else:
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b'<a href="/heavy-1.0-py3-none-any.whl">heavy-1.0-py3-none-any.whl</a>')

    def log_message(self, *args):
        pass


@pytest.fixture
def index(monkeypatch):
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("heavy.py", "#" * 3_000_000)
        archive.writestr("heavy-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: heavy\nVersion: 1.0\n")
        archive.writestr("heavy-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("heavy-1.0.dist-info/RECORD", "")
    SlowIndex.wheel, SlowIndex.asked = content.getvalue(), []
    with ThreadingHTTPServer(("127.0.0.1", 0), SlowIndex) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def command(index, folder, name):
    options = ["--target", str(folder / "site"), "--index-url", f"{index}/simple", "--no-cache-dir"]
    return [sys.executable, pip_install.__file__, str(folder / "pip.log"), "3", *options, name]


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
def test_a_terminal_sees_pip_at_work(index, tmp_path):
    shown, exit_status = on_a_terminal(command(index, tmp_path, "heavy"))

    assert exit_status == 0, shown
    assert shown.count("\n") == 1, "it is one line"
    states = shown.split("\r")
    assert {len(state) for state in states[1:-1]} == {59}, "each covers the one before"
    assert any(re.search(r" s  [12] of about 3 MB: heavy-1.0, 3.0 MB *$", state) for state in states), shown
    assert re.search(r" s  installed 1 package, 3 MB *\r\n$", shown)
    assert [path for path in SlowIndex.asked if path.endswith(".whl")] == ["/heavy-1.0-py3-none-any.whl"]
    assert (tmp_path / "site/heavy.py").is_file()
    assert not (tmp_path / "site/__pycache__").exists()


@pytest.mark.slow
def test_a_log_gets_lines_and_the_cause(index, tmp_path):
    done = subprocess.run(command(index, tmp_path, "absent"), capture_output=True, text=True)

    assert done.returncode == 1
    assert re.fullmatch(r" +\d+ s  pip failed\n", done.stdout)
    assert done.stderr == (
        f"pip failed: no package index that answered has absent for this Python (its output: {tmp_path}/pip.log)\n"
    )


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
