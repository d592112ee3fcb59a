#!/usr/bin/env python3
"""`python3 supervise.py --help`: runs what serves this repository, watches it, and ends all of it."""

import os
import sys

from deepseek_launcher.main import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    # Not sys.exit: a thread that waits for a stdout which nobody reads must not keep this process.
    os._exit(code)
