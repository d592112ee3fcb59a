#!/usr/bin/env python3
"""`python3 supervise.py --help`: runs what serves this repository, watches it, and ends all of it."""

import os
import signal
import sys

if sys.version_info < (3, 10):  # noqa: UP036 - older ones can't even read the files below
    sys.exit("supervise.py: expected Python 3.10 or newer, got {}.{}".format(*sys.version_info[:2]))

# Whoever presses Ctrl-C before anything has begun, or during `stop`, wants no traceback.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from deepseek_launcher.main import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    # Not sys.exit: a thread that waits for a stdout which nobody reads must not keep this process.
    os._exit(code)
