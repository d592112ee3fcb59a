"""What `make demo` costs where there is nothing but Python and make: bytes over the line, bytes on the disk, seconds.

    python3 tests/bench/fresh_install.py [--revision HEAD] [--target demo] [--mbit 100] [--keep DIR]

It clones this checkout into an empty folder, and runs make there with an empty HOME, an empty cache and none of this
machine's settings of pip. pip goes through a proxy that counts what comes over the line, and holds it down to --mbit
Mbit/s. It adds no latency. An http(s)_proxy of this machine is not used. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEPT = ("PATH", "TERM", "LANG", "PIP_CERT", "SSL_CERT_FILE")
"""Variables that the run keeps: how programs are found, and whom this network has https signed by."""


class Line:
    """What comes over it, in bytes, and its speed."""

    def __init__(self, mbit_per_s: float | None) -> None:
        self.num_bytes = 0
        self._bytes_per_s = mbit_per_s * 1e6 / 8 if mbit_per_s else None
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def carry(self, num_bytes: int) -> None:
        """Wait as long as so many bytes take."""
        with self._lock:
            self.num_bytes += num_bytes
            if self._bytes_per_s:
                self._free_at_s = max(self._free_at_s, time.monotonic()) + num_bytes / self._bytes_per_s
            wait_s = self._free_at_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)


class Proxy(socketserver.ThreadingTCPServer):
    """An HTTP proxy for https: CONNECT and nothing else."""

    daemon_threads = True

    def __init__(self, line: Line) -> None:
        super().__init__(("127.0.0.1", 0), Tunnel)
        self.line = line


class Tunnel(socketserver.StreamRequestHandler):
    server: Proxy

    def handle(self) -> None:
        host, _, port = self.rfile.readline().split()[1].decode().rpartition(":")
        while self.rfile.readline().strip():
            pass
        with socket.create_connection((host, int(port)), timeout=60) as remote:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                for ready in select.select([self.connection, remote], [], [])[0]:
                    try:
                        data = ready.recv(65536)
                    except ConnectionError:
                        return
                    if not data:
                        return
                    if ready is remote:
                        self.server.line.carry(len(data))
                    (self.connection if ready is remote else remote).sendall(data)


def size_mb(folder: Path) -> float:
    """Megabytes of all files below a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()) / 1e6


def measure(folder: Path, revision: str, target: str, mbit_per_s: float | None) -> dict[str, object]:
    clone, home = folder / "clone", folder / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    subprocess.run(["git", "-C", clone, "checkout", "--quiet", "--detach", revision], check=True)
    line = Line(mbit_per_s)
    with Proxy(line) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        address = "http://{}:{}".format(*proxy.server_address)
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        environment |= {"HOME": str(home), "https_proxy": address, "no_proxy": "localhost,127.0.0.1"}
        environment["PIP_CONFIG_FILE"] = os.devnull
        started, started_s = time.time(), time.monotonic()
        done = subprocess.run(["make", target], cwd=clone, env=environment, stdin=subprocess.DEVNULL)
        took_s = time.monotonic() - started_s
        proxy.shutdown()
    stamps = [path.stat().st_mtime for path in (clone / ".venv/.demo", clone / ".venv/.installed") if path.exists()]
    return {
        "exit_status": done.returncode,
        "install_s": round(max(stamps) - started, 1) if stamps else None,
        "all_s": round(took_s, 1),
        "line_mb": round(line.num_bytes / 1e6, 1),
        "venv_mb": round(size_mb(clone / ".venv"), 1),
        "home_mb": round(size_mb(home), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--revision", default="HEAD", help="commit to measure; what isn't committed is left out")
    parser.add_argument("--target", default="demo", help="what to make (default: %(default)s)")
    parser.add_argument("--mbit", type=float, metavar="N", help="speed of the line (default: as fast as it is)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="new folder for the clone (default: a temporary one)")
    args = parser.parse_args()
    revision = subprocess.check_output(["git", "-C", ROOT, "rev-parse", args.revision], text=True).strip()
    folder = args.keep.absolute() if args.keep else Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=not args.keep)
    try:
        print(json.dumps(measure(folder, revision, args.target, args.mbit), indent=1))
    finally:
        if not args.keep:
            shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
