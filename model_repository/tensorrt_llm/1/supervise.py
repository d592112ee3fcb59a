#!/usr/bin/env python3
"""Runs the server of this repository, watches it, and ends all of it: `python3 supervise.py --help`."""

import os
import signal
import sys

if sys.version_info < (3, 10):  # noqa: UP036 - an older Python can't even parse the files below
    sys.exit("supervise.py: expected Python 3.10 or newer, got {}.{}".format(*sys.version_info[:2]))

# Ctrl-C before anything has begun, or during `stop`, must print no traceback.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

if __name__ == "__main__":
    try:
        from deepseek_launcher.main import main

        code = main(sys.argv[1:])
    except (ImportError, SyntaxError) as error:  # a file is gone, or cut short
        sys.exit(f"supervise.py: {error}: copy the repository again; `deepseek-triton check` names what is wrong")
    # Not sys.exit: a thread that writes to a stdout which nobody reads must not keep this process alive.
    os._exit(code)
