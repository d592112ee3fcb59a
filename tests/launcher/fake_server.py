"""Fake of tritonserver in everything that the supervisor sees: its name, a stub, the health over HTTP, SIGTERM.

fake_server.py PORT [--dies-after SECONDS] [--drains SECONDS] [--never-ready] [--says LINE]
"""

import argparse
import contextlib
import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

STUB = """\
import time
open("/proc/self/comm", "w").write("triton_python_backend_stub")
time.sleep(1000)
"""


class Health(http.server.BaseHTTPRequestHandler):
    ready = True

    def do_GET(self):
        self.send_response(200 if Health.ready else 400)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--dies-after", type=float, metavar="SECONDS")
    parser.add_argument("--drains", type=float, default=0)
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--says", action="append", default=[])
    arguments, _ = parser.parse_known_args()
    Path("/proc/self/comm").write_text("tritonserver")
    stub = subprocess.Popen([sys.executable, "-I", "-S", "-c", STUB])

    def end(*_):
        print("draining", flush=True)
        until = time.monotonic() + arguments.drains
        while Health.ready and time.monotonic() < until:  # SIGUSR1 ends it
            time.sleep(0.02)
        stub.kill()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGUSR1, lambda *_: setattr(Health, "ready", not Health.ready))
    for line in arguments.says:
        print(line, flush=True)
    if arguments.dies_after is not None:
        threading.Timer(arguments.dies_after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if arguments.never_ready:
        signal.pause()
    until_stub_named = time.monotonic() + 10
    while time.monotonic() < until_stub_named:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{stub.pid}/comm").read_text().startswith("triton_python_b"):
                break
        time.sleep(0.01)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", arguments.port), Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("serving", flush=True)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()
