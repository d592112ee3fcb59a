"""Installs the files of a release into bare environments, and uses them there as a user would.

python -m releasing.smoke dist             # dependencies from the package index
python -m releasing.smoke dist --offline   # dependencies of this Python, which must have them all
"""

import argparse
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
import venv
from collections.abc import Sequence
from pathlib import Path

_ASK = """
from deepseek_triton_client import Client
from deepseek_triton_client.testing import FakeServer
with FakeServer() as server, Client(server.url) as client:
    assert client.generate("hello", max_tokens=5).text == "hello"
"""


class SmokeError(Exception):
    """A release doesn't work. The message has the command and the end of its output."""


class BareEnvironment:
    """A new environment with one file of the release, and an extra of it."""

    def __init__(self, folder: Path, release: Path, extra: str, *, is_offline: bool) -> None:
        self.folder = folder
        venv.create(folder)
        command = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--quiet"]
        if is_offline:
            (site,) = folder.glob("lib/python*/site-packages")
            (site / "offline.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
            command += ["--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed"]
        elif release.suffix == ".whl":
            command += ["--only-binary", ":all:"]
        _run([*command, f"{release}{f'[{extra}]' if extra else ''}"], folder)

    def run(self, *words: str) -> str:
        return _run([str(self.folder / "bin/deepseek-triton"), *words], self.folder)

    def python(self, program: str) -> str:
        return _run([str(self.folder / "bin/python"), "-I", "-c", program], self.folder)


def _run(command: Sequence[str], folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        end = " ".join((done.stderr or done.stdout).split()[-60:])
        raise SmokeError(f"{' '.join(command[:4])[:200]} ended with {done.returncode}: {end}")
    return done.stdout


def smoke(release: Path, version: str, folder: Path, *, is_offline: bool) -> None:
    """Try one wheel or sdist. :raises SmokeError: when something doesn't work."""
    base = BareEnvironment(folder / "base", release, "", is_offline=is_offline)
    if (shown := base.run("--version").split()[-1]) != version:
        raise SmokeError(f"--version: expected {version}, got {shown}")
    base.run("--help")
    base.python(_ASK)
    tools = BareEnvironment(folder / "tools", release, "tools", is_offline=is_offline)
    tools.run("build", "tiny", "--output", str(folder / "repository"))
    tools.run("check", str(folder / "repository"))
    _try_gateway(BareEnvironment(folder / "gateway", release, "gateway", is_offline=is_offline))


def _try_gateway(environment: BareEnvironment) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(environment.folder / "bin/deepseek-triton"), "gateway", "--port", str(port)]
    # Nobody is there, and the gateway itself answers.
    command += ["--server", "http://127.0.0.1:9"]
    gateway = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while gateway.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60):
                    return
            except OSError:
                # It doesn't listen yet.
                time.sleep(0.2)
        raise SmokeError(f"the gateway ended with {gateway.returncode}")
    finally:
        gateway.terminate()
        gateway.wait()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="smoke", description="try a release in bare environments")
    parser.add_argument("dist", type=Path, help="the folder with wheel and sdist")
    parser.add_argument("--offline", action="store_true", help="take the dependencies that this Python has")
    args = parser.parse_args(argv)
    releases = [*args.dist.glob("*.whl"), *args.dist.glob("*.tar.gz")]
    if {release.suffix for release in releases} != {".whl", ".gz"}:
        print(f"smoke: {args.dist}: expected a wheel and an sdist, as `make release` builds them", file=sys.stderr)
        return 1
    for release in releases:
        version = release.name.removesuffix(".tar.gz").split("-")[1]
        with tempfile.TemporaryDirectory(prefix="deepseek-triton-smoke-") as folder:
            try:
                smoke(release.absolute(), version, Path(folder), is_offline=args.offline)
            except SmokeError as error:
                print(f"smoke: {release.name}: {error}", file=sys.stderr)
                return 1
        print(f"{release.name} works")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
