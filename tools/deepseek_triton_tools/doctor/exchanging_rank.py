"""One rank of the exchange over all hosts. mpi_exchange.py hands this file's text to `python3 -c`, with the host's name
and the seconds that the rank waits for the others.

Nothing is installed on a host for it: Open MPI's library is called without mpi4py. Its binary interface has been the
same from 3.0 to 5.0 (libmpi.so.40). Each rank sends 1 MiB to every other rank. No transport sends that much before the
other side has answered, so both directions of a pair must work.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import shutil
import signal
import sys
import time

# Begins each line of a rank; a login script may print other lines.
STEP_PREFIX = "deepseek-triton exchange "
_MESSAGE_BYTES = 1 << 20
_LIBRARY = "libmpi.so.40"
_POLLING_S = 0.01
_OTHERS_WRITE_S = 1


def main(host: str, patience_s: float) -> None:
    """Print a line for each step that this rank has reached."""

    def say(step: str, **more: object) -> None:
        print(STEP_PREFIX + json.dumps({"host": host, "step": step, **more}), flush=True)

    # A signal's default action ends a process that hangs inside MPI_Init, where Python runs no handler.
    signal.setitimer(signal.ITIMER_REAL, 2 * patience_s)
    say("started")
    try:
        mpi = _load()
    except OSError as error:
        say("failed", why=str(error))
        sys.exit(1)
    mpi.MPI_Init(None, None)
    world = _global(mpi, "ompi_mpi_comm_world")
    mpi.MPI_Comm_set_errhandler(world, _global(mpi, "ompi_mpi_errors_return"))
    rank, size = ctypes.c_int(), ctypes.c_int()
    mpi.MPI_Comm_rank(world, ctypes.byref(rank))
    mpi.MPI_Comm_size(world, ctypes.byref(size))
    say("joined", rank=rank.value, size=size.value)
    missing = _exchange(mpi, world, rank.value, size.value, patience_s)
    say("exchanged", missing=missing)
    if missing:
        time.sleep(_OTHERS_WRITE_S)  # mpirun ends all ranks as soon as one fails
        os._exit(1)
    mpi.MPI_Finalize()


def _load() -> ctypes.CDLL:
    """Load Open MPI's library: the linker's own, or that of the mpirun on PATH.

    :raises OSError: when it is in neither place.
    """
    try:
        return ctypes.CDLL(_LIBRARY, ctypes.RTLD_GLOBAL)  # its plug-ins need its symbols
    except OSError:
        root = os.path.dirname(os.path.dirname(os.path.realpath(shutil.which("mpirun") or "/usr/bin/mpirun")))
        copies = sorted(glob.glob(f"{root}/lib*/{_LIBRARY}") + glob.glob(f"{root}/lib*/*/{_LIBRARY}"))
        if not copies:
            raise
        return ctypes.CDLL(copies[0], ctypes.RTLD_GLOBAL)


def _global(mpi: ctypes.CDLL, name: str) -> ctypes.c_void_p:
    """Return a handle of Open MPI, which is the address of a global variable."""
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, name)))


def _exchange(mpi: ctypes.CDLL, world: ctypes.c_void_p, rank: int, size: int, patience_s: float) -> list[int]:
    """Return the ranks whose message did not come, or which did not take this rank's."""
    byte = _global(mpi, "ompi_mpi_byte")
    sent = ctypes.create_string_buffer(_MESSAGE_BYTES)
    received = {other: ctypes.create_string_buffer(_MESSAGE_BYTES) for other in range(size) if other != rank}
    open_requests: dict[int, list[ctypes.c_void_p]] = {}
    for other, buffer in received.items():
        for call, content in ((mpi.MPI_Irecv, buffer), (mpi.MPI_Isend, sent)):
            request = ctypes.c_void_p()
            code = call(content, _MESSAGE_BYTES, byte, other, 0, world, ctypes.byref(request))
            if code:
                return [*received]
            open_requests.setdefault(other, []).append(request)
    failed = set()
    deadline = time.monotonic() + patience_s
    while open_requests and time.monotonic() < deadline:
        for other, requests in list(open_requests.items()):
            done = ctypes.c_int()
            for request in requests:
                if mpi.MPI_Test(ctypes.byref(request), ctypes.byref(done), None):
                    failed.add(other)
                if not done.value:
                    break
            if done.value or other in failed:
                del open_requests[other]
        time.sleep(_POLLING_S)
    return sorted({*open_requests, *failed})


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
