"""Calls of the generator in a process of its own: one that gets a signal, or whose disk is full."""

import subprocess
import sys

_PROGRAM = """\
import os, pathlib, resource, signal, sys
from pathlib import Path, PurePosixPath
from deepseek_triton_build import *

code, folder, function, sent, points, limit = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
count, call = 0, getattr(os, function)

def interrupted(*args, **options):
    global count
    count += 1
    for point, act in (("before", lambda: None), ("at", lambda: call(*args, **options))):
        done = act()
        if f"{point}-{count}" in points.split(","):
            os.kill(os.getpid(), getattr(signal, sent))
    return done

for holder in (os, getattr(pathlib, "_normal_accessor", os)):  # Python 3.10's pathlib keeps os's functions there
    setattr(holder, function, interrupted)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
try:
    exec(code)
except OutputError as error:
    sys.exit(str(error))
except KeyboardInterrupt:
    sys.exit("interrupted")
"""


def call(code, folder, *, points="", function="rename", signal="SIGINT", max_file_size=10**6):
    """Run `code`, which knows `folder`, with a signal before or at the nth calls of a function of os (`at-2`).

    The limit on a file's size stands in for a full disk: a write fails half-way.
    """
    command = [sys.executable, "-c", _PROGRAM, code, folder, function, signal, points, max_file_size]
    return subprocess.run([str(word) for word in command], capture_output=True, text=True)


def error_of(code, folder, **how):
    """Return the line of the error with which the call ends."""
    done = call(code, folder, **how)
    assert done.returncode == 1, done
    [line] = done.stderr.splitlines()
    return line
